"""What `system_fingerprint` says: which model and which libraries made an answer. Reads files, briefly."""

import contextlib
import hashlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

# Of a file of weights its end is read: of two fine-tunes with the same shapes, those bytes differ.
_SAMPLE_BYTES = 4096


def compute(folder: Path, settings: Sequence[object]) -> str:
    """Return a short name that stays as long as the model, `settings` and the libraries stay.

    The time of a file does not matter, so two machines with the same model agree. Takes milliseconds.
    """
    found = hashlib.blake2b(digest_size=6)
    # What went away since it was loaded changes the name, and is no reason not to serve.
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
