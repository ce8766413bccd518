"""The value of `system_fingerprint`: a short name for a model and the libraries that run it."""

import contextlib
import hashlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from models import partial_model
from models.model_files import PARTIAL_MARK

# The end of each weight file whose digest is not known is read: it differs between two fine-tunes with equal shapes.
_SAMPLE_BYTES = 4096


def compute(folder: Path, settings: Sequence[object]) -> str:
    """Return a name that changes only with the model's files, `settings` or the versions of mlx and mlx-lm.

    Modification times do not count, so two machines with the same model agree. So do two ranks that have other weight
    files of one model of the store. Takes milliseconds.

    Raises:
        ImportError: mlx or mlx-lm is not installed.

    """
    blake2b = hashlib.blake2b(digest_size=6)
    # A file that vanished since the model was loaded changes the name, and must not stop the engine.
    with contextlib.suppress(OSError):
        paths = [one for one in folder.iterdir() if one.name != PARTIAL_MARK and one.is_file()]
        weights = [one for one in paths if one.suffix == ".safetensors"]
        digests = partial_model.content_digests(folder, weights)
        known = {name: f"{name} {digest}\n".encode() for name, digest in digests.items()}
        read = [one for one in paths if one.suffix in (".json", ".safetensors")]
        for path in read:
            if path.name not in known:
                size = path.stat().st_size
                known[path.name] = f"{path.name} {size}\n".encode() + _tail_bytes(path)
        for _, part in sorted(known.items()):
            blake2b.update(part)
    versions = [metadata.version(name) for name in ("mlx", "mlx-lm")]
    blake2b.update(repr((versions, [str(setting) for setting in settings])).encode())
    return f"fp_{blake2b.hexdigest()}"


def _tail_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _SAMPLE_BYTES))
        return file.read(_SAMPLE_BYTES)
