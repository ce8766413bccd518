"""Who of the engines is heard, and who is waited for, by the connections there are. Opens none.

The way to engines: pooled connections, one request at a time on each. Knows no models.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Iterable
from typing import Protocol

from gateway.routing.table import Origin
from gateway.upstream.connection import BrokenResponseError, Connection, Exchange, Headers
from machinery.clock import Clock


def responding_origins(connections: Iterable[Connection]) -> set[Origin]:
    """Return who sent anything since this was last asked."""
    found = set()
    for connection in connections:
        if connection.is_heard:
            connection.is_heard = False
            found.add(connection.origin)
    return found


def silent_origins(connections: Iterable[Connection], since_s: float) -> set[Origin]:
    """Return from whom somebody has been waiting at least since then for a sign of life."""
    return {one.origin for one in connections if one.silent_since <= since_s}


def fail_waiting(connections: Iterable[Connection], origin: Origin, why: str) -> None:
    """Have whoever waits for the engine wait no more."""
    for connection in tuple(connections):
        if connection.origin == origin and connection.silent_since < float("inf"):
            connection.fail(why, is_silence=True)


# A SYN that got lost is sent again after 1 s; a Mac that sleeps or is gone never answers.
_CONNECT_S = 2.0
# Engines close idle connections after 75 s (engine/process.py): be first, and the race
# is rare.
_IDLE_S = 60.0
_SWEEP_S = 1.0
# Who waits for less than this is looked at more often than once a second, and nobody else is.
_HURRIED_S = 5.0
_HURRIED_SWEEP_S = 0.05
_NEVER = float("inf")


class UnreachableError(Exception):
    """No connection: the engine has seen nothing of the request."""

    def __init__(self, message: str, *, is_timeout: bool = False) -> None:
        super().__init__(message)
        self.is_timeout = is_timeout
        """Whether nobody said no: it may be there and hang."""


class UpstreamResponse(Protocol):
    """One response, its head already there."""

    is_complete: bool
    """Whether all of it came, read or not."""
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
    ) -> UpstreamResponse:
        """Send a whole HTTP request; return when the response's head is there.

        The engine is given up when it says nothing for `silence_s`, or whoever waits for it still does at `until_s`
        of the clock: to the second, or to 50 ms if that is less than 5 s ahead now.

        Raises:
            UnreachableError: the engine takes no connection.
            BrokenError: the connection ended before the head was there.

        """
        ...


class ConnectionPool:
    """`Upstream` over kept-alive connections. `keep()` must run for its time limits to hold."""

    def __init__(self, clock: Clock, *, silence_s: float) -> None:
        self._clock = clock
        self._silence_s = silence_s
        self._idle: dict[Origin, list[Connection]] = {}
        self.open: set[Connection] = set()
        """All there are, idle ones too."""
        self._hurried: set[Connection] = set()
        """Those of `open` that may not wait for the usual sweep."""
        self._has_hurried = asyncio.Event()

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
        is_new = connection is None
        while True:
            if connection is None:
                connection = await self._connect(origin, self._connect_s(patience_s, until_s))
                is_new = True
            exchange = connection.start(raw, patience_s=patience_s, until_s=until_s)
            if is_new and not connection.is_gone:
                self.open.add(connection)
            if patience_s < _HURRIED_S or until_s < self._clock.monotonic() + _HURRIED_S:
                self._hurried.add(connection)
                self._has_hurried.set()
            try:
                await exchange.head()
            except BrokenResponseError as error:
                exchange.close()
                # The engine closed it while we took it up: it never saw the request.
                if is_new or error.had_bytes or error.is_silence:
                    raise
                connection = None
            except BaseException:
                exchange.close()
                raise
            else:
                return exchange

    async def keep(self) -> None:
        """Cut engines that fell silent and connections that nobody needs, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_hurried())
            while True:
                await self._clock.sleep(_SWEEP_S)
                self.sweep(self._clock.monotonic())

    def sweep(self, now_s: float) -> None:
        """Look at every connection, once."""
        for connection in list(self.open):
            if not _fail_if_late(connection, now_s) and connection.idle_since < now_s - _IDLE_S:
                connection.cut()

    async def _keep_hurried(self) -> None:
        while True:
            await self._has_hurried.wait()
            self._has_hurried.clear()
            while self._hurried:
                await self._clock.sleep(_HURRIED_SWEEP_S)
                now_s = self._clock.monotonic()
                for connection in list(self._hurried):
                    if _fail_if_late(connection, now_s) or not _is_hurried(connection, now_s):
                        self._hurried.discard(connection)

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

    def _connect_s(self, patience_s: float, until_s: float) -> float:
        """Return how long a connection may take: no longer than its request."""
        left_s = until_s - self._clock.monotonic()
        return max(0.0, min(_CONNECT_S, patience_s, left_s))

    async def _connect(self, origin: Origin, limit_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s):
                transport, connection = await loop.create_connection(
                    lambda: Connection(loop, self._clock, origin, self._settle), *origin
                )
        except TimeoutError:
            said = f"no connection within {limit_s:.3g} s"
            raise UnreachableError(said, is_timeout=True) from None
        except OSError as error:
            # Not asyncio's own words: they repeat the address and leave out the reason.
            said = os.strerror(error.errno) if error.errno else str(error)
            raise UnreachableError(said) from error
        _enable_keepalive(transport.get_extra_info("socket"))
        return connection

    def _settle(self, connection: Connection) -> None:
        """Take back a connection whose exchange is over, or forget one that is gone."""
        if connection.is_usable:
            idle = self._idle.get(connection.origin)
            if idle is None:
                self._idle[connection.origin] = [connection]
            else:
                idle.append(connection)
            return
        self.open.discard(connection)
        idle = self._idle.get(connection.origin, [])
        if connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(connection.origin, None)


def _fail_if_late(connection: Connection, now_s: float) -> bool:
    """Have who waits too long give up; return whether somebody did."""
    if connection.silent_since < now_s - connection.patience_s:
        connection.fail(f"silent for {connection.patience_s:g} s", is_silence=True)
        return True
    if connection.until_s <= now_s and connection.silent_since <= now_s:
        connection.fail("its time was up", is_silence=True)
        return True
    return False


def _is_hurried(connection: Connection, now_s: float) -> bool:
    """Return whether its request is under way, and may not wait for the usual sweep."""
    if connection.is_usable or connection.is_gone:
        return False
    return connection.patience_s < _HURRIED_S or connection.until_s < now_s + _HURRIED_S


def _enable_keepalive(sock: socket.socket) -> None:
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
