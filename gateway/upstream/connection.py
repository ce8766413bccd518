"""One HTTP/1.1 connection to an engine, which carries one exchange at a time. Parses nothing itself."""

import asyncio
from collections.abc import Callable
from typing import cast

from typing_extensions import override

from gateway.routing.table import Origin
from gateway.upstream.exchange import Exchange
from machinery.clock import Clock

_NEVER = float("inf")


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
