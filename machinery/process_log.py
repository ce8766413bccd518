"""Where in a log to begin: so many lines from its end, or those of the last minutes. Pure, but for reading a file backwards.

A position is whatever the log counts in: bytes of a file, numbers of lines kept in memory.

The last lines of this process' own log, kept in memory for who asks over HTTP: its stderr may lead anywhere.

Logging set-up for processes: one JSON object a line on stderr, fields from `extra`.
"""

import json
import logging
import re
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, BinaryIO

from typing_extensions import override

from machinery.clock import Clock

# How machinery.process_log begins a line.
_TIME_FIELD = re.compile(rb'\{"time": ?"([0-9T:.+Z-]{10,40})"')
_BLOCK_BYTES = 64 << 10
# What goes on for longer without an end of line is shown as several.
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSelection:
    """What of a log is wanted; both together mean what both allow."""

    lines: int | None = None
    """So many from the end; None: all."""
    since: datetime | None = None
    """Those logged from then on; lines without a time belong to the one before them."""


def time_text(line: bytes) -> bytes | None:
    """Return the time that a line begins with, as it is written there; None if it has none."""
    found = _TIME_FIELD.match(line)
    return None if found is None else found[1]


def parse_time(line: bytes) -> datetime | None:
    """Return when a line was logged; None if it does not say (a traceback, a library's own words)."""
    stamp = time_text(line)
    if stamp is None:
        return None
    try:
        at = datetime.fromisoformat(stamp.decode())
    except ValueError:
        return None
    return at if at.tzinfo is not None else None


def start_position(
    backwards: Callable[[], Iterator[tuple[int, bytes]]], want: LogSelection, *, end: int
) -> int | None:
    """Return the position to show from; None means from the first there is.

    `backwards` yields positions and lines, the last first; `end` is the position after the last.
    """
    starts = []
    if want.lines is not None:
        starts.append(_start_of_last_lines(backwards(), want.lines, end))
    if want.since is not None:
        starts.append(_start_of_time_range(backwards(), want.since, end))
    found = [start for start in starts if start is not None]
    return max(found) if found else None


def _start_of_last_lines(
    backwards: Iterator[tuple[int, bytes]], count: int, end: int
) -> int | None:
    found = end
    for number, (position, _) in enumerate(backwards):
        if number == count:
            return found
        found = position
    return None if count else end


def _start_of_time_range(
    backwards: Iterator[tuple[int, bytes]], since: datetime, end: int
) -> int | None:
    found = end
    for position, line in backwards:
        at = parse_time(line)
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
        size = min(_BLOCK_BYTES, at - start)
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
        is_cut = len(rest) > _MAX_LINE_BYTES
        if is_cut:
            yield at, rest
            rest = b""
    if start < end and not is_cut:
        yield start, rest


_POLL_S = 0.25
# What is sent at once.
_PIECE_BYTES = 64 << 10


class LogRing(logging.Handler):
    """Keeps lines up to so many bytes, the last ones. Threads may log while the event loop reads."""

    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._next = 0
        """The number that the next line gets; lines are counted from 0."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        # handle() holds the lock of this handler.
        line = self.format(record).encode("utf-8", "replace")[: self._limit_bytes]
        self._lines.append(line)
        self._next += 1
        self._bytes += len(line)
        while self._bytes > self._limit_bytes:
            self._bytes -= len(self._lines.popleft())

    def numbered(self) -> list[tuple[int, bytes]]:
        """Return all lines with their numbers, the first first."""
        self.acquire()
        try:
            return list(enumerate(self._lines, self._next - len(self._lines)))
        finally:
            self.release()

    def after(self, number: int) -> tuple[bytes, int]:
        """Return lines from the number on, as text, and the number to ask for next; lines that are gone are left out."""
        text = bytearray()
        for here, line in self.numbered():
            if here < number:
                continue
            text += line + b"\n"
            number = here + 1
            if len(text) >= _PIECE_BYTES:
                break
        return bytes(text), number


async def stream_ring(
    ring: LogRing,
    want: LogSelection,
    clock: Clock,
    *,
    follow: bool,
    is_over: Callable[[], Awaitable[bool]],
) -> AsyncGenerator[bytes]:
    """Yield what is wanted of the lines; if it is followed, what comes until `is_over`."""
    there = ring.numbered()

    def backwards() -> Iterator[tuple[int, bytes]]:
        return reversed(there)

    end = there[-1][0] + 1 if there else 0
    number = start_position(backwards, want, end=end) or 0
    while True:
        text, number = ring.after(number)
        if text:
            yield text
        elif not follow:
            return
        else:
            await clock.sleep(_POLL_S)
        if await is_over():
            return


_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One line a record: time, level, logger, message, and the fields given as `extra`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, tz=UTC).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        # A field may not hide what every line says.
        taken = _STANDARD | line.keys()
        line.update({k: v for k, v in vars(record).items() if k not in taken})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup(process: str, level: str = "info", *, ring: LogRing | None = None) -> None:
    """Log to stderr, and to a ring if there is one, from here on; `level` is debug, info, warning or error."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    handlers += [] if ring is None else [ring]
    for handler in handlers:
        handler.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(level.upper())
    # Each request of ours to etcd and to engines would be a line.
    for chatty in ("aiohttp.access", "asyncio", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
