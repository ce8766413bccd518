"""The last lines of this process' own log, kept in memory for who asks over HTTP: its stderr may lead anywhere."""

import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

from typing_extensions import override

from machinery.clock import Clock
from machinery.loglines import Want, begin

_POLL_S = 0.25
# What is sent at once.
_PIECE_BYTES = 64 << 10


class Ring(logging.Handler):
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


async def pieces(
    ring: Ring,
    want: Want,
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
    number = begin(backwards, want, end=end) or 0
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
