"""The value of `system_fingerprint`: a short name for a model and the libraries that run it."""

import contextlib
import hashlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

# The end of each weight file is read: it differs between two fine-tunes with equal shapes.
_SAMPLE_BYTES = 4096


def compute(folder: Path, settings: Sequence[object]) -> str:
    """Return a name that changes only with the model's files, `settings` or the versions of mlx and mlx-lm.

    Modification times do not count, so two machines with the same model agree. Takes milliseconds.

    Raises:
        ImportError: mlx or mlx-lm is not installed.

    """
    found = hashlib.blake2b(digest_size=6)
    # A file that vanished since the model was loaded changes the name, and must not stop the engine.
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if path.suffix in (".json", ".safetensors") and path.is_file():
                found.update(f"{path.name} {path.stat().st_size}\n".encode())
                found.update(_tail_bytes(path))
    versions = [metadata.version(name) for name in ("mlx", "mlx-lm")]
    found.update(repr((versions, [str(setting) for setting in settings])).encode())
    return f"fp_{found.hexdigest()}"


def _tail_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _SAMPLE_BYTES))
        return file.read(_SAMPLE_BYTES)
