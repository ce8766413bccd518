"""The way to engines: pooled connections, one request at a time on each. Knows no models."""

import asyncio
import os
import socket
import sys
from typing import Protocol

from gateway.routing.table import Origin
from gateway.upstream.connection import Connection
from gateway.upstream.exchange import BrokenError, Exchange, Headers
from machinery.clock import Clock

# A SYN that got lost is sent again after 1 s; a Mac that sleeps or is gone never answers.
_CONNECT_S = 2.0
# Engines close idle connections after 75 s (nodeagent/engine/process.py): be first, and the race
# is rare.
_IDLE_S = 60.0
_SWEEP_S = 1.0
_NEVER = float("inf")


class UnreachableError(Exception):
    """No connection: the engine has seen nothing of the request."""

    def __init__(self, message: str, *, is_timeout: bool = False) -> None:
        super().__init__(message)
        self.is_timeout = is_timeout
        """Whether nobody said no: it may be there and hang."""


class Answer(Protocol):
    """One response, its head already there."""

    is_surplus: bool
    """Whether more came than the response was to have: then its length was wrong."""
    until_s: float
    """When its reader gives up, by the clock; may be changed."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    async def read(self) -> bytes:
        """Return what came since the last call; empty at the end.

        Raises:
            BrokenError: the connection ended before the response did.

        """
        ...

    def close(self) -> None:
        """Have done with it; a connection whose response was not read to its end is cut."""
        ...


class Upstream(Protocol):
    """Whoever can ask engines."""

    async def request(
        self,
        origin: Origin,
        raw: bytes,
        *,
        silence_s: float | None = None,
        until_s: float = _NEVER,
    ) -> Answer:
        """Send a whole HTTP request; return when the response's head is there.

        The engine is given up, to the second, when it says nothing for `silence_s`, or whoever waits for it
        still does at `until_s` of the clock.

        Raises:
            UnreachableError: the engine takes no connection.
            BrokenError: the connection ended before the head was there.

        """
        ...


class Pool:
    """`Upstream` over kept-alive connections. `keep()` must run for its time limits to hold."""

    def __init__(self, clock: Clock, *, silence_s: float) -> None:
        self._clock = clock
        self._silence_s = silence_s
        self._idle: dict[Origin, list[Connection]] = {}
        self.open: set[Connection] = set()
        """All there are, idle ones too."""

    async def request(
        self,
        origin: Origin,
        raw: bytes,
        *,
        silence_s: float | None = None,
        until_s: float = _NEVER,
    ) -> Exchange:
        patience_s = self._silence_s if silence_s is None else silence_s
        connection = self._reused(origin)
        if connection is not None:
            try:
                return await self._exchange(connection, raw, patience_s, until_s)
            except BrokenError as error:
                # The engine closed it while we took it up: it never saw the request.
                if error.had_bytes or error.is_silence:
                    raise
        return await self._exchange(await self._connect(origin), raw, patience_s, until_s)

    async def keep(self) -> None:
        """Cut engines that fell silent and connections that nobody needs, for ever."""
        while True:
            await self._clock.sleep(_SWEEP_S)
            self.sweep(self._clock.monotonic())

    def sweep(self, now_s: float) -> None:
        """Do what `keep` does, once."""
        for connection in list(self.open):
            if connection.silent_since < now_s - connection.patience_s:
                connection.fail(f"silent for {connection.patience_s:g} s", is_silence=True)
            elif connection.until_s <= now_s and connection.silent_since <= now_s:
                connection.fail("its time was up", is_silence=True)
            elif connection.idle_since < now_s - _IDLE_S:
                connection.cut()

    def connections(self) -> int:
        """Return how many connections there are, idle ones too."""
        return len(self.open)

    def close(self) -> None:
        """Cut every connection."""
        for connection in list(self.open):
            connection.cut()

    def _reused(self, origin: Origin) -> Connection | None:
        idle = self._idle.get(origin)
        oldest = self._clock.monotonic() - _IDLE_S
        while idle:
            connection = idle.pop()
            if connection.is_usable and connection.idle_since >= oldest:
                return connection
            connection.cut()
        return None

    async def _connect(self, origin: Origin) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                transport, connection = await loop.create_connection(
                    lambda: Connection(loop, self._clock, origin, self._settle), *origin
                )
        except TimeoutError:
            said = f"no connection within {_CONNECT_S:g} s"
            raise UnreachableError(said, is_timeout=True) from None
        except OSError as error:
            # Not asyncio's own words: they repeat the address and leave out the reason.
            said = os.strerror(error.errno) if error.errno else str(error)
            raise UnreachableError(said) from error
        _notice_dead_peers(transport.get_extra_info("socket"))
        return connection

    async def _exchange(
        self, connection: Connection, raw: bytes, patience_s: float, until_s: float
    ) -> Exchange:
        exchange = connection.start(raw, patience_s=patience_s, until_s=until_s)
        if not connection.is_gone:
            self.open.add(connection)
        try:
            await exchange.head()
        except BaseException:
            exchange.close()
            raise
        return exchange

    def _settle(self, connection: Connection) -> None:
        """Take back a connection whose exchange is over, or forget one that is gone."""
        if connection.is_usable:
            self._idle.setdefault(connection.origin, []).append(connection)
            return
        self.open.discard(connection)
        idle = self._idle.get(connection.origin, [])
        if connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(connection.origin, None)


def _notice_dead_peers(sock: socket.socket) -> None:
    """Have the kernel break connections to a Mac that lost power: 5 s quiet, then 3 probes.

    Without it a request to such a Mac waits for the whole time limit instead of moving on.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "darwin":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, 5)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    if sys.platform == "linux":
        # Keep-alive probes rest while data waits for its acknowledgement; this covers that case.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 8000)
