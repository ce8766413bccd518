"""Rotation of logs that other processes write: each is copied beside itself and truncated once it is large.

The writer need not know: it has opened the file for appending, so it goes on at the new end. Therefore any process can
rotate the log of any program, etcd's and the output of C libraries included, before and after a restart of either. A
rotation that was killed at any point is done again from the beginning.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from machinery.clock import Clock

LIMIT_BYTES = 16 << 20
"""A larger log is rotated; there is one older file of about this size."""
# A program that logs 10 MB a second, which is a disk's share, passes the limit by 50 MB.
_CHECK_S = 5.0
_PIECE_BYTES = 1 << 20

log = logging.getLogger(__name__)


def rotated_path(path: Path) -> Path:
    """Return the file with the older part of a log."""
    return path.with_name(f"{path.name}.1")


def rotate(
    path: Path,
    *,
    limit_bytes: int = LIMIT_BYTES,
    before_truncate: Callable[[], None] = lambda: None,
) -> bool:
    """Move the content of a log to `rotated_path` if it is larger than the limit; return whether it was.

    The rotated file appears once the log is truncated. On a full disk the content is dropped instead: the log itself may
    have filled it. `before_truncate` is called when the content is copied.

    Raises:
        OSError: the log cannot be read or truncated, or its folder cannot be written to.

    """
    temporary = path.with_name(f".{path.name}.rotating")
    try:
        with path.open("r+b", buffering=0) as source:
            # Another process or thread may be rotating it.
            fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(source.fileno()).st_size <= limit_bytes:
                with contextlib.suppress(FileNotFoundError):
                    temporary.replace(rotated_path(path))  # a rotation was killed at its last step
                return False
            log_fd = source.fileno()
            try:
                with temporary.open("wb", buffering=0) as copy:
                    os.fchmod(copy.fileno(), os.fstat(log_fd).st_mode & 0o777)
                    _copy_rest(log_fd, copy.fileno())
                    before_truncate()
                    # Lines that were written meanwhile. A line between the last look and the truncation is lost.
                    _copy_rest(log_fd, copy.fileno())
                    os.ftruncate(log_fd, 0)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                if error.errno != errno.ENOSPC:
                    raise
                os.ftruncate(log_fd, 0)
            with contextlib.suppress(FileNotFoundError):  # the disk is full
                temporary.replace(rotated_path(path))
    except (FileNotFoundError, BlockingIOError):
        return False
    return True


def _copy_rest(source_fd: int, target_fd: int) -> None:
    while piece := os.read(source_fd, _PIECE_BYTES):
        while piece:
            piece = piece[os.write(target_fd, piece) :]


async def keep_bounded(rotate_all: Callable[[], None], clock: Clock) -> None:
    """Call `rotate_all`, which rotates some logs, every few seconds in a thread; run forever."""
    was_failing = False
    while True:
        await clock.sleep(_CHECK_S)
        try:
            await asyncio.to_thread(rotate_all)
        except OSError as error:
            if not was_failing:
                log.warning("a log cannot be rotated; will retry", extra={"why": str(error)})
            was_failing = True
        else:
            was_failing = False


def main() -> int:
    """Run `python -m machinery.log_rotation FILE...`: rotate these logs once, as a periodic job does."""
    code = 0
    for name in sys.argv[1:]:
        try:
            rotate(Path(name))
        except OSError as error:
            print(f"{name}: {error.strerror}", file=sys.stderr)  # noqa: T201 - the output of a command
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
