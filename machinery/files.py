"""Small files that must never be seen half written."""

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: str, *, mode: int = 0o600) -> None:
    """Replace the file in one step, so that a reader or a crash sees the old or the new one.

    Raises:
        OSError: the folder cannot be written to, or the disk is full; the old file is untouched.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        Path(temporary).replace(path)
        _sync_folder(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Have the new name of the file survive a power cut, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
