"""Files that must never be seen half written."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: str, *, mode: int = 0o600) -> None:
    """Replace the file in one step, so that a reader or a crash sees the old or the new one.

    Raises:
        OSError: the folder cannot be written to, or the disk is full; the old file is untouched.

    """
    with open_replacement(path, mode=mode) as file:
        file.write(content.encode())


@contextmanager
def open_replacement(path: Path, *, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Yield a file that takes the path's place in one step when the block ends well.

    Raises:
        OSError: the folder cannot be written to, or the disk is full; the old file is untouched.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w+b") as file:
            os.fchmod(descriptor, mode)
            yield file
            file.flush()
            os.fsync(descriptor)
        Path(temporary).replace(path)
        sync_folder(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def make_private_folder(folder: Path) -> None:
    """Make the folder, and refuse one in which somebody else could put what we then execute or believe.

    Raises:
        OSError: it cannot be made.
        PermissionError: it is another user's, or open to others.

    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not ours alone (want owner {os.getuid()}, mode 0700)")


def sync_folder(folder: Path) -> None:
    """Have new names of files in the folder survive a power cut, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
