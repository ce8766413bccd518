"""Reports of a Mac's kernel panics, from the folder in which macOS leaves them at the next start."""

import contextlib
import os
import re
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from schemas.node import KernelPanic

FOLDER: Final = Path("/Library/Logs/DiagnosticReports")
_SUFFIX: Final = ".panic"
# The names hold the local time: panic-full-2026-04-20-094322.0002.panic.
_NAME_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\d-\d{6})", re.ASCII)
_TIME: Final = re.compile(r'"timestamp"\s*:\s*"([^"]{10,40})"')
# JSON, but with raw line ends in some releases; the string is the beginning of pages of registers and threads.
_STRING: Final = re.compile(r'"panicString"\s*:\s*"((?:[^"\\]|\\.){1,2000})', re.DOTALL)
_PREFIX: Final = re.compile(r"panic\(cpu \d{1,4}(?: caller 0x[0-9a-fA-F]{1,16})?\): ?", re.ASCII)
# The beginning holds all that is wanted; a whole report has megabytes.
_MAX_BYTES: Final = 64 << 10
_MAX_NAMES: Final = 10_000
_MAX_TEXT: Final = 160


def read_panics(folder: Path = FOLDER, *, most: int = 5) -> tuple[KernelPanic, ...]:
    """Return the newest panics, the newest first; a report that cannot be read has no text.

    Raises:
        OSError: the folder cannot be read. Only root and members of _analyticsusers may.

    """
    names = []
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count >= _MAX_NAMES:
                break
            time = _NAME_TIME.search(entry.name)
            if entry.name.endswith(_SUFFIX) and time is not None:
                names.append((time[1], entry.name))
    reports = (_read(folder / name, time) for time, name in sorted(names, reverse=True)[:most])
    return tuple(panic for panic in reports if panic is not None)


def _read(path: Path, name_time: str) -> KernelPanic | None:
    printed = ""
    with contextlib.suppress(OSError):
        # Never through a link, and never waiting for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            if stat.S_ISREG(os.fstat(handle).st_mode):
                printed = file.read(_MAX_BYTES).decode(errors="replace")
    return parse_panic(printed, name_time)


def parse_panic(printed: str, name_time: str) -> KernelPanic | None:
    """Return the panic in the beginning of a report, or at least its time by the report's name; None for another file."""
    found, string = _TIME.search(printed), _STRING.search(printed)
    at = None
    with contextlib.suppress(ValueError, OverflowError):
        at = datetime.strptime(name_time, "%Y-%m-%d-%H%M%S").astimezone(UTC)
    if found is not None:
        with contextlib.suppress(ValueError, OverflowError):
            at = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S.%f %z").astimezone(UTC)
    if at is None:
        return None
    text = "" if string is None else re.split(r"\\n|\n", string[1], maxsplit=1)[0]
    text = _PREFIX.sub("", text.replace('\\"', '"').replace("\\/", "/"))
    return KernelPanic(
        at=at.replace(microsecond=0),
        text="".join(c for c in text if c.isprintable()).strip()[:_MAX_TEXT],
    )
