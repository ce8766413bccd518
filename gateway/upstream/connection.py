"""One HTTP/1.1 connection to an engine and the exchange that it carries: one request, one response."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias, cast

import httptools
from typing_extensions import override

from machinery.clock import NEVER, Clock
from machinery.http_server import MAX_HEAD_BYTES
from schemas.wire.engine_address import EngineAddress

Headers: TypeAlias = list[tuple[bytes, bytes]]

# The limit of unread bytes for a slow client before the engine is paused.
_BUFFER_LIMIT = 256 << 10


class BrokenResponseError(Exception):
    """The connection ended before the response was complete."""

    def __init__(self, message: str, *, had_bytes: bool, is_silence: bool = False) -> None:
        super().__init__(message)
        self.had_bytes = had_bytes
        """True if any byte of the response had arrived."""
        self.is_silence = is_silence
        """True if the engine was given up after too long a silence."""


class Exchange:
    """One response as it arrives; implements `UpstreamResponse`."""

    __slots__ = (
        "_broken",
        "_buffered",
        "_connection",
        "_head_bytes",
        "_is_closed",
        "_is_framed",
        "_keeps_alive",
        "_loop",
        "_parser",
        "_pieces",
        "_waiter",
        "has_bytes",
        "headers",
        "is_complete",
        "is_surplus",
        "on_body",
        "status",
        "until_s",
    )

    def __init__(self, connection: "Connection", loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: Headers = []
        self.is_complete = False
        self.has_bytes = False
        self.is_surplus = False
        self.until_s = NEVER
        """The deadline of the reader, whatever has arrived before."""
        self._connection = connection
        self._loop = loop
        self._head_bytes = 0
        self._is_framed = False
        self._keeps_alive = False
        self._pieces: list[bytes] = []
        # httptools calls this with each part of a body. A list's method, because a stream has a
        # part for each event.
        self.on_body = self._pieces.append
        self._buffered = 0
        """Bytes received since the last read, chunk framing included."""
        self._broken: BrokenResponseError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        # Last: the parser looks up its callbacks now.
        self._parser = httptools.HttpResponseParser(self)

    async def head(self) -> None:
        """Wait for the head of the response. Raises BrokenResponseError."""
        while not self.status:
            if self._broken is not None:
                raise self._broken
            await self._more()

    async def read(self) -> bytes:
        while not self._pieces:
            if self.is_complete:
                return b""
            if self._broken is not None:
                raise self._broken
            await self._more()
        data = b"".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
        self._pieces.clear()
        self._buffered = 0
        if self._connection.is_paused:
            self._connection.resume()
        return data

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._connection.finish(self)

    def can_keep_alive(self) -> bool:
        """Return whether the connection can carry another request."""
        return self.is_complete and not self.is_surplus and self._keeps_alive

    def _more(self) -> asyncio.Future[None]:
        """Return the future of the next change; a reader that stops waiting must `close`."""
        self._waiter = waiter = self._loop.create_future()
        self._connection.start_waiting()
        return waiter

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            self._connection.silent_since = NEVER
            if not waiter.done():
                waiter.set_result(None)

    def feed(self, data: bytes) -> bool:
        """Parse received bytes; return whether there is room for more."""
        self.has_bytes = True
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self.is_complete:
                self.is_surplus = True
            else:
                self.fail(f"not HTTP: {error}")
        if not self.status and self._head_bytes > MAX_HEAD_BYTES:
            self.fail(f"the response's head is larger than {MAX_HEAD_BYTES} bytes")
        self._buffered += len(data)
        if self._waiter is not None:
            self._wake()
        # Without a piece no reader would come and resume the engine.
        return self._buffered < _BUFFER_LIMIT or not self._pieces

    def end_of_input(self, why: str, *, is_orderly: bool) -> None:
        """Record the end of the input."""
        if self.status and not self._is_framed and is_orderly:
            # Without length and chunks, the end of the connection ends the body.
            self.is_complete = self.is_surplus = True
            self._wake()
            return
        self.fail(why)

    def fail(self, why: str, *, is_silence: bool = False) -> None:
        """Make readers raise after they have read all that arrived."""
        if not self.is_complete and self._broken is None:
            self._broken = BrokenResponseError(why, had_bytes=self.has_bytes, is_silence=is_silence)
        self._wake()

    # Callbacks of httptools.

    def on_message_begin(self) -> None:
        if self.is_complete:
            # `feed` records it; nothing that follows may become part of this response.
            raise BrokenResponseError("more than one response", had_bytes=True)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
            return
        # Now, because the parser forgets it when the message is complete.
        self._keeps_alive = self._parser.should_keep_alive()
        named = dict(self.headers)
        self._is_framed = (
            b"content-length" in named or b"transfer-encoding" in named or status in (204, 304)
        )
        self.status = status

    def on_message_complete(self) -> None:
        # Without a status it was a 1xx response, and the real one follows.
        if self.status:
            self.is_complete = True


class Connection(asyncio.Protocol):
    """One connection. `settle` is called when it becomes idle and when it is gone."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        origin: EngineAddress,
        settle: Callable[["Connection"], None],
    ) -> None:
        self.origin = origin
        self.is_usable = False
        self.idle_since = NEVER
        self.silent_since = NEVER
        """Time since which a reader has been waiting; infinite if none is."""
        self.silence_s = NEVER
        """The longest silence that the reader accepts, in seconds."""
        self.has_received = False
        """True if anything arrived since this was last reset."""
        self.opened_s = clock.monotonic()
        self.end = ""
        """The reason of its end."""
        self.is_cut = False
        """True once the gateway has closed it."""
        self.is_refused = False
        """True once its end was counted as a refusal by the engine."""
        self.is_proven = False
        """True once anything has arrived: the engine has accepted the connection."""
        self._loop = loop
        self._clock = clock
        self._settle = settle
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self.is_paused = False
        """True if reading is paused because the reader is slow."""

    def start(self, raw: bytes, *, silence_s: float = NEVER, until_s: float = NEVER) -> Exchange:
        """Send a request and return its exchange."""
        self.is_usable, self.idle_since = False, NEVER
        self.silence_s = silence_s
        self._exchange = Exchange(self, self._loop)
        self._exchange.until_s = until_s
        if self._transport is None or self._transport.is_closing():
            self._exchange.fail("the connection was closed")
        else:
            self._transport.write(raw)
        return self._exchange

    def rest(self) -> None:
        """Become idle without a request, so that one finds the connection open."""
        if self._transport is not None and not self._transport.is_closing():
            self.is_usable, self.idle_since = True, self._clock.monotonic()
            self._settle(self)

    def finish(self, exchange: Exchange) -> None:
        """Release the exchange: the connection becomes idle if the response is complete, else it is closed."""
        if exchange is not self._exchange:
            return
        self._exchange, self.silent_since = None, NEVER
        if self._transport is None or not exchange.can_keep_alive():
            self.cut()
            return
        if self.is_paused:
            self.resume()
        self.is_usable, self.idle_since = True, self._clock.monotonic()
        self._settle(self)

    def cut(self) -> None:
        """Close at once, so that the engine frees the request's slot."""
        self.is_usable, self.is_cut = False, True
        if self._transport is not None:
            self._transport.abort()

    def fail(self, why: str, *, is_silence: bool) -> None:
        """Give the engine up."""
        if self._exchange is not None:
            self._exchange.fail(why, is_silence=is_silence)
        self.cut()

    def start_waiting(self) -> None:
        """Record that a reader waits for the engine."""
        self.silent_since = self._clock.monotonic()

    def resume(self) -> None:
        """Resume reading from the engine."""
        if self.is_paused and self._transport is not None:
            self.is_paused = False
            self._transport.resume_reading()

    @property
    def until_s(self) -> float:
        """The reader's deadline; infinite without a request."""
        return NEVER if self._exchange is None else self._exchange.until_s

    @property
    def ssl_object(self) -> object:
        """The TLS state; None without TLS."""
        return None if self._transport is None else self._transport.get_extra_info("ssl_object")

    @property
    def is_gone(self) -> bool:
        """True if nothing can be sent."""
        return self._transport is None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No isinstance check: uvloop's transports do not inherit from it.
        self._transport = cast("asyncio.Transport", transport)

    @override
    def data_received(self, data: bytes) -> None:
        self.has_received = self.is_proven = True
        if self._exchange is None:
            # Input without a request must not become the response of the next one.
            self.cut()
        elif not self._exchange.feed(data) and not self.is_paused and self._transport is not None:
            self.is_paused = True
            self._transport.pause_reading()

    @override
    def eof_received(self) -> bool:
        if self._exchange is not None:
            self._exchange.end_of_input("the engine closed the connection", is_orderly=True)
        return False

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        self._transport = None
        self.end = "the connection was lost" if exc is None else f"the connection was lost: {exc}"
        if self._exchange is not None:
            self._exchange.end_of_input(self.end, is_orderly=False)
        self._settle(self)
