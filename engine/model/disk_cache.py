"""The prefix cache on disk of a model, as the engine's config says."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from engine.cache.block_files import BlockFiles
from engine.cache.disk_blocks import BlockDisk
from models import fingerprint
from schemas import quantity
from schemas.wire.engine_config import EngineConfig

log = logging.getLogger(__name__)

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def open_disk(config: EngineConfig) -> BlockDisk | None:
    """Return the prefix cache on disk; None if it is off, for a rank of a group, or if its folder cannot be used.

    Ranks of a group must hold the same blocks, and their disks need not.
    """
    if config.kv_cache.disk_bytes is None or config.group is not None:
        return None
    try:
        model = name_model(config)
        files = BlockFiles(
            config.prefix_disk_dir, limit_bytes=quantity.parse(config.kv_cache.disk_bytes)
        )
        return BlockDisk(files=files, model=model)
    except OSError as error:
        extra = {"folder": str(config.prefix_disk_dir), "reason": str(error)}
        log.warning("no prefix cache on disk: its folder cannot be used", extra=extra)
        return None


def name_model(config: EngineConfig) -> str:
    """Return a name for everything that keys and values depend on besides the tokens.

    `system_fingerprint` reads the end of each weight file; keys and values that outlive a process need more certainty,
    so samples from all over the files are added.

    Raises:
        OSError: a weight file cannot be read.

    """
    # Adapters that requests choose are in the salts of their prompts (input_processor.py).
    folders = [config.model_dir, *([config.adapter] if config.adapter else [])]
    blake2b = hashlib.blake2b(digest_size=32)
    for folder in folders:
        _add_folder(folder, (config.kv_cache.bits, config.window_setting), blake2b)
    return blake2b.hexdigest()


def digest_folder(folder: Path) -> str:
    """Return a name for the content of an adapter's folder.

    Raises:
        OSError: a weight file cannot be read.

    """
    blake2b = hashlib.blake2b(digest_size=16)
    _add_folder(folder, (), blake2b)
    return blake2b.hexdigest()


def _add_folder(folder: Path, settings: Sequence[object], found: "hashlib.blake2b") -> None:
    found.update(fingerprint.compute(folder, settings).encode())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(size * number // _SAMPLES)
                found.update(file.read(_SAMPLE_BYTES))
