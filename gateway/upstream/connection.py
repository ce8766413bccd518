"""One request's response on a connection to an engine, as it comes in. Pools nothing, sends nothing.

One HTTP/1.1 connection to an engine, which carries one exchange at a time. Parses nothing itself.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeAlias, cast

import httptools
from typing_extensions import override

from gateway.routing.table import Origin
from machinery.clock import Clock

Headers: TypeAlias = list[tuple[bytes, bytes]]

# Engines send a few hundred bytes of headers; more than this is not an engine.
_HEAD_LIMIT = 64 << 10
# What may lie here unread by a slow client before the engine is held back.
_BUFFER_LIMIT = 256 << 10
_NEVER = float("inf")


class BrokenResponseError(Exception):
    """The connection ended before the response did."""

    def __init__(self, message: str, *, had_bytes: bool, is_silence: bool = False) -> None:
        super().__init__(message)
        self.had_bytes = had_bytes
        """Whether any byte of the response had come."""
        self.is_silence = is_silence
        """Whether the engine was given up for saying nothing for too long."""


class ExchangeCarrier(Protocol):
    """The connection, as far as the exchange needs it."""

    silent_since: float
    """Since when somebody has been waiting for the engine in vain; infinity if nobody is."""

    is_paused: bool
    """Whether the engine is held back."""

    def waits(self) -> None:
        """Note that somebody waits for the engine from now on."""
        ...

    def resume(self) -> None:
        """Let the engine send again."""
        ...

    def finish(self, exchange: "Exchange") -> None:
        """Have done with the exchange."""
        ...


class Exchange:
    """One request's response as it comes in: `gateway.upstream.Answer`."""

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

    def __init__(self, connection: ExchangeCarrier, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: Headers = []
        self.is_complete = False
        self.has_bytes = False
        self.is_surplus = False
        self.until_s = _NEVER
        """When whoever waits for more gives up, whatever came before."""
        self._connection = connection
        self._loop = loop
        self._head_bytes = 0
        self._is_framed = False
        self._keeps_alive = False
        self._pieces: list[bytes] = []
        # What httptools calls with each part of a body. No function of ours: a stream has as many parts as events.
        self.on_body = self._pieces.append
        self._buffered = 0
        """How many bytes came since the last piece was taken away, what frames them included."""
        self._broken: BrokenResponseError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        # At last: it looks up now what it will call.
        self._parser = httptools.HttpResponseParser(self)

    async def head(self) -> None:
        """Wait for the response's head. Raises BrokenError."""
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
        """Return whether the connection is clean for the next request."""
        return self.is_complete and not self.is_surplus and self._keeps_alive

    def _more(self) -> asyncio.Future[None]:
        """Return what is done when there is more to look at; who gives up waiting must `close`."""
        self._waiter = waiter = self._loop.create_future()
        self._connection.waits()
        return waiter

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            self._connection.silent_since = _NEVER
            if not waiter.done():
                waiter.set_result(None)

    def feed(self, data: bytes) -> bool:
        """Take bytes; return whether there is still room for more."""
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
        if not self.status and self._head_bytes > _HEAD_LIMIT:
            self.fail(f"the response's head is larger than {_HEAD_LIMIT} bytes")
        self._buffered += len(data)
        if self._waiter is not None:
            self._wake()
        # Without a piece nobody would come and have the engine go on.
        return self._buffered < _BUFFER_LIMIT or not self._pieces

    def end_of_input(self, why: str, *, is_orderly: bool) -> None:
        """Learn that nothing more will come."""
        if self.status and not self._is_framed and is_orderly:
            # Neither length nor chunks: such a body ends with the connection.
            self.is_complete = self.is_surplus = True
            self._wake()
            return
        self.fail(why)

    def fail(self, why: str, *, is_silence: bool = False) -> None:
        """Have readers raise once they have read what came."""
        if not self.is_complete and self._broken is None:
            self._broken = BrokenResponseError(why, had_bytes=self.has_bytes, is_silence=is_silence)
        self._wake()

    # What httptools calls while it is fed.

    def on_message_begin(self) -> None:
        if self.is_complete:
            # `feed` notes it; nothing of what follows may be taken for a part of this response.
            raise BrokenResponseError("more than one response", had_bytes=True)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
            return
        # Now, for the parser forgets it once the message is complete.
        self._keeps_alive = self._parser.should_keep_alive()
        named = dict(self.headers)
        self._is_framed = (
            b"content-length" in named or b"transfer-encoding" in named or status in (204, 304)
        )
        self.status = status

    def on_message_complete(self) -> None:
        # Without a status it was a 1xx, and the real response follows.
        if self.status:
            self.is_complete = True


class Connection(asyncio.Protocol):
    """One connection; `settle` is called when it becomes idle and when it is gone."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        origin: Origin,
        settle: Callable[["Connection"], None],
    ) -> None:
        self.origin = origin
        self.is_usable = False
        self.idle_since = _NEVER
        self.silent_since = _NEVER
        """Since when somebody has been waiting in vain; never, if nobody is."""
        self.patience_s = _NEVER
        """How long somebody waits for anything at all."""
        self.is_heard = False
        """Whether anything came since the last look at it."""
        self._loop = loop
        self._clock = clock
        self._settle = settle
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self.is_paused = False
        """Whether the engine is held back, for its reader is slow."""

    def start(self, raw: bytes, *, patience_s: float = _NEVER, until_s: float = _NEVER) -> Exchange:
        """Send a request; what comes from now on is its response."""
        self.is_usable, self.idle_since = False, _NEVER
        self.patience_s = patience_s
        self._exchange = Exchange(self, self._loop)
        self._exchange.until_s = until_s
        if self._transport is None or self._transport.is_closing():
            self._exchange.fail("the connection was closed")
        else:
            self._transport.write(raw)
        return self._exchange

    def finish(self, exchange: Exchange) -> None:
        """Have done with the exchange: idle if that went well to its end, cut otherwise."""
        if exchange is not self._exchange:
            return
        self._exchange, self.silent_since = None, _NEVER
        if self._transport is None or not exchange.can_keep_alive():
            self.cut()
            return
        if self.is_paused:
            self.resume()
        self.is_usable, self.idle_since = True, self._clock.monotonic()
        self._settle(self)

    def cut(self) -> None:
        """Close at once, so that the engine notices and frees the request's place."""
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    def fail(self, why: str, *, is_silence: bool) -> None:
        """Give the engine up."""
        if self._exchange is not None:
            self._exchange.fail(why, is_silence=is_silence)
        self.cut()

    def waits(self) -> None:
        """Note that somebody waits for the engine from now on."""
        self.silent_since = self._clock.monotonic()

    def resume(self) -> None:
        """Let the engine send again."""
        if self.is_paused and self._transport is not None:
            self.is_paused = False
            self._transport.resume_reading()

    @property
    def until_s(self) -> float:
        """When whoever waits then gives up; never, if nobody asked for anything."""
        return _NEVER if self._exchange is None else self._exchange.until_s

    @property
    def is_gone(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._transport is None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports are none by inheritance.
        self._transport = cast("asyncio.Transport", transport)

    @override
    def data_received(self, data: bytes) -> None:
        self.is_heard = True
        if self._exchange is None:
            # Nobody asked for anything: whatever this is, it must not become somebody's answer.
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
        if self._exchange is not None:
            why = "the connection was lost" if exc is None else f"the connection was lost: {exc}"
            self._exchange.end_of_input(why, is_orderly=False)
        self._settle(self)
