"""Where in a log to begin: so many lines from its end, or those of the last minutes. Pure, but for reading a file backwards.

A position is whatever the log counts in: bytes of a file, numbers of lines kept in memory.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import BinaryIO

# How machinery.logging begins a line.
_TIME = re.compile(rb'\{"time": ?"([0-9T:.+Z-]{10,40})"')
_BLOCK = 64 << 10
# What goes on for longer without an end of line is shown as several.
_LONGEST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What of a log is wanted; both together mean what both allow."""

    lines: int | None = None
    """So many from the end; None: all."""
    since: datetime | None = None
    """Those logged from then on; lines without a time belong to the one before them."""


def stamp_of(line: bytes) -> bytes | None:
    """Return the time that a line begins with, as it is written there; None if it has none."""
    found = _TIME.match(line)
    return None if found is None else found[1]


def time_of(line: bytes) -> datetime | None:
    """Return when a line was logged; None if it does not say (a traceback, a library's own words)."""
    stamp = stamp_of(line)
    if stamp is None:
        return None
    try:
        at = datetime.fromisoformat(stamp.decode())
    except ValueError:
        return None
    return at if at.tzinfo is not None else None


def begin(
    backwards: Callable[[], Iterator[tuple[int, bytes]]], want: Want, *, end: int
) -> int | None:
    """Return the position to show from; None means from the first there is.

    `backwards` yields positions and lines, the last first; `end` is the position after the last.
    """
    starts = []
    if want.lines is not None:
        starts.append(_last(backwards(), want.lines, end))
    if want.since is not None:
        starts.append(_since(backwards(), want.since, end))
    found = [start for start in starts if start is not None]
    return max(found) if found else None


def _last(backwards: Iterator[tuple[int, bytes]], count: int, end: int) -> int | None:
    found = end
    for number, (position, _) in enumerate(backwards):
        if number == count:
            return found
        found = position
    return None if count else end


def _since(backwards: Iterator[tuple[int, bytes]], since: datetime, end: int) -> int | None:
    found = end
    for position, line in backwards:
        at = time_of(line)
        if at is None:
            continue
        if at < since:
            return found
        found = position
    return None


def lines_backwards(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield offset and line (without its end) between two offsets of a file, the last first. Raises OSError."""
    at, rest, is_cut = end, b"", False
    while at > start:
        size = min(_BLOCK, at - start)
        at -= size
        file.seek(at)
        block = file.read(size) + rest
        if at + size == end:
            block = block.removesuffix(b"\n")  # it ends the last line, and begins no other
        rest, *whole = block.split(b"\n")
        position = at + len(block)
        for line in reversed(whole):
            position -= len(line)
            yield position, line
            position -= 1
        is_cut = len(rest) > _LONGEST
        if is_cut:
            yield at, rest
            rest = b""
    if start < end and not is_cut:
        yield start, rest
