"""The log of a process: lines of JSON or text on stderr, a ring of the last lines, and reading a log from its end.

A position in a log is whatever the log counts in: bytes of a file, or numbers of lines in memory.
"""

import json
import logging
import os
import re
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from typing_extensions import override

from machinery.clock import Clock
from machinery.control_characters import make_printable

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# The beginning of a line that `JsonFormatter` writes.
_TIME_FIELD = re.compile(rb'\{"time": ?"([0-9T:.+Z-]{10,40})"')
# Fields that are the same in all lines of a process, or of no interest to its users.
_OF_PROCESS = frozenset({"time", "process", "logger"})
# A value that needs no quotes in text.
_WORD = re.compile(r"[^\s\"=]+")
_BLOCK_BYTES = 64 << 10
# A longer line is returned in several pieces.
_MAX_LINE_BYTES = 1 << 20
_POLL_S = 0.25
_PIECE_BYTES = 64 << 10
_FILE_BYTES, _OLDER_FILES = 16 << 20, 3


class JsonFormatter(logging.Formatter):
    """Formats a record as one line: time, level, process, logger, message, and the fields given as `extra`."""

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
        # An extra field must not replace a standard one.
        reserved = _STANDARD | line.keys()
        line.update({k: v for k, v in vars(record).items() if k not in reserved})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Formats a record for a person at a terminal: local time, level, logger, message, and fields as `name=value`."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).astimezone()
        fields = (
            f"{name}={_field_text(value)}"
            for name, value in vars(record).items()
            if name not in _STANDARD
        )
        head = f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03} {record.levelname:<7}"
        message = record.getMessage().replace("\n", "\\n")
        line = " ".join((head, f"{record.name}: {message}", *fields))
        if record.exc_info:
            line += f"\n{self.formatException(record.exc_info)}"
        return make_printable(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of `JsonFormatter`, as a person reads it."""

    time: str
    """Local time."""
    level: str
    """In capitals."""
    text: str
    """Message, fields, and the traceback below."""


def parse_line(line: bytes) -> LogLine | None:
    """Return a line for a person; None if it is not one of `JsonFormatter`, such as the output of a library."""
    at = parse_time(line)
    if at is None:
        return None
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    words = [str(fields.pop("message", "")).replace("\n", "\\n")]
    level, traceback = str(fields.pop("level", "")), fields.pop("traceback", "")
    words += [f"{k}={_field_text(v)}" for k, v in fields.items() if k not in _OF_PROCESS]
    below = f"\n{traceback}" if traceback else ""
    local = at.astimezone()
    return LogLine(
        time=f"{local:%Y-%m-%d %H:%M:%S}.{local.microsecond // 1000:03}",
        level=level.upper(),
        text=f"{' '.join(words)}{below}",
    )


def _field_text(value: object) -> str:
    """Return a value as one word; anything else in quotes, as in JSON."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if _WORD.fullmatch(text) else json.dumps(value, default=str, ensure_ascii=False)


class LogRing(logging.Handler):
    """Keeps the last lines of a log, up to a size in bytes. Threads may log while the event loop reads."""

    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._next = 0
        """The number of the next line; lines are counted from 0."""

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
        """Return all lines with their numbers, the oldest first."""
        self.acquire()
        try:
            return list(enumerate(self._lines, self._next - len(self._lines)))
        finally:
            self.release()

    def after(self, number: int) -> tuple[bytes, int]:
        """Return lines from `number` on as text, and the number to continue with; dropped lines are skipped."""
        text = bytearray()
        for here, line in self.numbered():
            if here < number:
                continue
            text += line + b"\n"
            number = here + 1
            if len(text) >= _PIECE_BYTES:
                break
        return bytes(text), number


class RotatingLogFile(RotatingFileHandler):
    """A log in a private file, which is renamed when it is large. A disk that is full costs lines, and nothing else."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=_FILE_BYTES, backupCount=_OLDER_FILES, encoding="utf-8")

    @override
    def _open(self) -> TextIOWrapper:
        def private(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_CLOEXEC, 0o600)

        return open(self.baseFilename, "a", encoding="utf-8", opener=private)

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line: stderr has it, and a traceback for each line would bury it."""


LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "text", "json"]
"""auto: text if stderr is a terminal, else JSON."""


def setup(
    process: str,
    level: LogLevel = "info",
    *,
    log_format: LogFormat = "auto",
    ring: LogRing | None = None,
    file: Path | None = None,
) -> None:
    """Log to stderr in this format, and to `ring` and `file`, if given, as JSON.

    Raises:
        OSError: the file cannot be opened.

    """
    screen = logging.StreamHandler(sys.stderr)
    is_text = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())
    screen.setFormatter(TextFormatter() if is_text else JsonFormatter(process))
    handlers: list[logging.Handler] = [screen]
    if ring is not None:
        ring.setFormatter(JsonFormatter(process))
        handlers.append(ring)
    if file is not None:
        log_file = RotatingLogFile(file)
        log_file.setFormatter(JsonFormatter(process))
        handlers.append(log_file)
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(level.upper())
    # Otherwise each of our requests to etcd and to engines would be a line.
    for chatty in ("aiohttp.access", "asyncio", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSelection:
    """The part of a log to read; a line must satisfy both limits."""

    lines: int | None = None
    """The number of lines from the end; None: all."""
    since: datetime | None = None
    """Lines logged from this time on; a line without a time belongs to the one before it."""


def time_text(line: bytes) -> bytes | None:
    """Return the time at the beginning of a line as it is written; None if there is none."""
    found = _TIME_FIELD.match(line)
    return None if found is None else found[1]


def parse_time(line: bytes) -> datetime | None:
    """Return the time of a line; None if it has none, such as a traceback or the output of a library."""
    stamp = time_text(line)
    if stamp is None:
        return None
    try:
        at = datetime.fromisoformat(stamp.decode())
    except ValueError:
        return None
    return at if at.tzinfo is not None else None


def start_position(
    backwards: Callable[[], Iterator[tuple[int, bytes]]], selection: LogSelection, *, end: int
) -> int | None:
    """Return the position of the first selected line; None if it is the first line of the log.

    `backwards` yields positions and lines, the last one first; `end` is the position after the last line.
    """
    starts = []
    if selection.lines is not None:
        starts.append(_start_of_last_lines(backwards(), selection.lines, end))
    if selection.since is not None:
        starts.append(_start_of_time_range(backwards(), selection.since, end))
    found = [start for start in starts if start is not None]
    return max(found) if found else None


def _start_of_last_lines(
    backwards: Iterator[tuple[int, bytes]], count: int, end: int
) -> int | None:
    start = end
    for number, (position, _) in enumerate(backwards):
        if number == count:
            return start
        start = position
    return None if count else end


def _start_of_time_range(
    backwards: Iterator[tuple[int, bytes]], since: datetime, end: int
) -> int | None:
    start = end
    for position, line in backwards:
        at = parse_time(line)
        if at is None:
            continue
        if at < since:
            return start
        start = position
    return None


def lines_backwards(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield offset and line (without its end) between two offsets of a file, the last one first. Raises OSError."""
    at, rest, is_cut = end, b"", False
    while at > start:
        size = min(_BLOCK_BYTES, at - start)
        at -= size
        file.seek(at)
        block = file.read(size) + rest
        if at + size == end:
            block = block.removesuffix(b"\n")  # it ends the last line and begins no other
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


async def stream_ring(
    ring: LogRing,
    selection: LogSelection,
    clock: Clock,
    *,
    follow: bool,
    is_over: Callable[[], Awaitable[bool]],
) -> AsyncGenerator[bytes]:
    """Yield the selected lines of a ring; with `follow` also later lines, until `is_over` returns true."""
    lines = ring.numbered()

    def backwards() -> Iterator[tuple[int, bytes]]:
        return reversed(lines)

    end = lines[-1][0] + 1 if lines else 0
    number = start_position(backwards, selection, end=end) or 0
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
