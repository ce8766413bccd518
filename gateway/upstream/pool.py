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


class UnreachableError(Exception):
    """No connection: the engine has seen nothing of the request."""


class Answer(Protocol):
    """One response, its head already there."""

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

    async def request(self, origin: Origin, raw: bytes) -> Answer:
        """Send a whole HTTP request; return when the response's head is there.

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
        self._open: set[Connection] = set()

    async def request(self, origin: Origin, raw: bytes) -> Exchange:
        connection = self._reused(origin)
        if connection is not None:
            try:
                return await self._exchange(connection, raw)
            except BrokenError as error:
                # The engine closed it while we took it up: it never saw the request.
                if error.had_bytes or error.is_silence:
                    raise
        return await self._exchange(await self._connect(origin), raw)

    async def keep(self) -> None:
        """Cut engines that fell silent and connections that nobody needs, for ever."""
        while True:
            await self._clock.sleep(_SWEEP_S)
            self.sweep(self._clock.monotonic())

    def sweep(self, now_s: float) -> None:
        """Do what `keep` does, once."""
        for connection in list(self._open):
            if connection.silent_since < now_s - self._silence_s:
                connection.fail(f"silent for {self._silence_s:g} s", is_silence=True)
            elif connection.idle_since < now_s - _IDLE_S:
                connection.cut()

    def close(self) -> None:
        """Cut every connection."""
        for connection in list(self._open):
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
            raise UnreachableError(f"no connection within {_CONNECT_S:g} s") from None
        except OSError as error:
            # Not asyncio's own words: they repeat the address and leave out the reason.
            said = os.strerror(error.errno) if error.errno else str(error)
            raise UnreachableError(said) from error
        _notice_dead_peers(transport.get_extra_info("socket"))
        return connection

    async def _exchange(self, connection: Connection, raw: bytes) -> Exchange:
        exchange = connection.start(raw)
        if not connection.is_gone:
            self._open.add(connection)
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
        self._open.discard(connection)
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
