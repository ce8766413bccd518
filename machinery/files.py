"""Files: atomic replacement, private folders, and small system files that may be unreadable."""

import errno
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

# On macOS fsync leaves the data in the drive's cache, which a power cut empties (man fsync(2)); other systems have no
# such request. It takes about 18 ms on an M1 Pro (go-ethereum#28754).
FULL_SYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)
# File systems without it, such as those of network disks, answer one of these.
_UNSUPPORTED: Final = (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY)

log = logging.getLogger(__name__)


def write_atomically(path: Path, content: str, *, mode: int = 0o600) -> None:
    """Replace the file in one step: a reader, or a crash, sees the old file or the new one.

    Raises:
        OSError: the folder cannot be written to, or the disk is full; the old file is untouched.

    """
    with open_replacement(path, mode=mode) as file:
        file.write(content.encode())


@contextmanager
def open_replacement(path: Path, *, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces `path` in one step when the block succeeds.

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
            sync(descriptor)
        Path(temporary).replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # a full disk has no name of its own
        raise


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock (flock) of a file; a file that does not exist has none."""
    try:
        with path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def make_private_folder(folder: Path) -> None:
    """Create the folder, and refuse one to which another user could write what we execute or trust.

    Raises:
        OSError: it cannot be created.
        PermissionError: it belongs to another user, or is open to others.

    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    result = folder.stat()
    if result.st_uid != os.getuid() or result.st_mode & 0o077:
        raise PermissionError(
            f"{folder} is not private: expected owner {os.getuid()} and mode 0700"
        )


def make_owner_folder(folder: Path, *, sign: str) -> None:
    """Create the folder for its owner only, or close an existing one to others if it is ours.

    It is ours if it is empty or contains the file `sign`. Any other folder keeps its mode: it may have been given by
    mistake, such as /tmp.

    Raises:
        OSError: it cannot be created, or its mode cannot be changed.

    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_open = folder.stat().st_mode & 0o077
    if is_open and ((folder / sign).exists() or not any(folder.iterdir())):
        folder.chmod(0o700)


def sync(descriptor: int, request: int | None = FULL_SYNC) -> None:
    """Flush an open file so that it survives a power cut; with `request` of fcntl, also the cache of the drive.

    Raises:
        OSError: the disk refuses the data.

    """
    if request is not None:
        try:
            fcntl.fcntl(descriptor, request)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        else:
            return
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush the folder's entries to disk, so that new file names survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str:
    """Return the content of a small system file; "" if it cannot be read.

    A sensor that is asleep fails at every reading, so a failure is logged at debug level only.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        log.debug("file not read", extra={"path": str(path), "why": error.strerror})
        return ""
