"""Pool of HTTP connections to external servers, with one request at a time on each."""

import asyncio

from typing_extensions import override

from gateway.upstream.call import BrokenResponseError, EngineCall, Exchange, UnreachableError
from gateway.upstream.connection import Connection, KeptConnections
from gateway.upstream.dialer import CONNECT_S, Dialer
from gateway.upstream.response_head import SHORT_LIMIT_S
from machinery.clock import NEVER, Clock
from schemas.wire.connections import POOL_IDLE_S
from schemas.wire.engine_address import EngineAddress

_SWEEP_S = 1.0
_SHORT_SWEEP_S = 0.05


class ConnectionPool(KeptConnections):
    """Opens the connections, and ends idle and silent ones. `run()` must run for its time limits to hold."""

    def __init__(self, clock: Clock, dialer: Dialer, *, silence_s: float) -> None:
        """`silence_s`: the limit of requests that state none."""
        super().__init__(clock)
        self._clock = clock
        self._dialer = dialer
        self._silence_s = silence_s
        self.open: set[Connection] = set()
        """All connections, idle ones included."""
        self._short_limits: set[Connection] = set()
        """Connections whose time limits are checked more often."""
        self._has_short_limits = asyncio.Event()

    @override
    def dial(self, call: EngineCall) -> None:
        call.dialing = asyncio.get_running_loop().create_task(self._dial(call))

    @override
    def watch(self, connection: Connection) -> None:
        self._short_limits.add(connection)
        self._has_short_limits.set()

    async def request(
        self,
        origin: EngineAddress,
        raw: bytes,
        *,
        silence_s: float | None = None,
        until_s: float = NEVER,
    ) -> Exchange:
        """Send a complete HTTP request; return when the head of the response has arrived.

        Raises:
            UnreachableError: the engine accepts no connection.
            BrokenResponseError: the connection ended before the head had arrived.

        """
        silence_s = self._silence_s if silence_s is None else silence_s
        exchange = Exchange(origin=origin, raw=raw, silence_s=silence_s, until_s=until_s)
        self.send(exchange)
        await exchange.wait_head()
        return exchange

    async def _dial(self, call: EngineCall) -> None:
        """Open a connection for a call."""
        try:
            left_s = call.until_s - self._clock.monotonic()
            limit_s = max(0.0, min(CONNECT_S, call.silence_s, left_s))
            connection = await self._dialer.connect(
                call.origin, limit_s, lambda: Connection(self._clock, call.origin, self)
            )
        except UnreachableError as error:
            call.dialing = None
            call.on_error(error)
            return
        call.dialing = None
        if not connection.is_gone:
            self.open.add(connection)
        now_s = self._clock.monotonic()
        if call.silence_s < SHORT_LIMIT_S or call.until_s < now_s + SHORT_LIMIT_S:
            self.watch(connection)
        connection.start(call, now_s)

    @override
    def on_broken(
        self, connection: Connection, call: EngineCall, error: BrokenResponseError
    ) -> None:
        if connection.is_reused and not (error.had_bytes or error.is_silence):
            # The engine closed the connection while it was idle and never saw the request.
            self.send(call)
            return
        call.on_error(error)

    async def run(self) -> None:
        """Close connections to silent servers and idle connections, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._check_short_limits())
            while True:
                await self._clock.sleep(_SWEEP_S)
                self.sweep(self._clock.monotonic())

    def sweep(self, now_s: float) -> None:
        """Check every connection once."""
        for connection in list(self.open):
            if not _fail_if_late(connection, now_s) and connection.idle_since < now_s - POOL_IDLE_S:
                connection.cut()

    async def _check_short_limits(self) -> None:
        while True:
            await self._has_short_limits.wait()
            self._has_short_limits.clear()
            while self._short_limits:
                await self._clock.sleep(_SHORT_SWEEP_S)
                now_s = self._clock.monotonic()
                for connection in list(self._short_limits):
                    if _fail_if_late(connection, now_s) or not _has_short_limit(connection, now_s):
                        self._short_limits.discard(connection)

    def connections(self) -> int:
        """Return the number of connections, idle ones included."""
        return len(self.open)

    def responding_origins(self) -> set[EngineAddress]:
        """Return the origins that sent anything since the last call."""
        engine_addresses = set()
        for connection in self.open:
            if connection.has_received:
                connection.has_received = False
                engine_addresses.add(connection.origin)
        return engine_addresses

    def silent_origins(self, since_s: float) -> set[EngineAddress]:
        """Return the origins that readers have been waiting on at least since that time."""
        return {connection.origin for connection in self.open if connection.silent_since <= since_s}

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self.open):
            connection.cut()

    @override
    def forget(self, connection: Connection) -> None:
        self.open.discard(connection)
        idle = self.idle.get(connection.origin, [])
        if connection in idle:
            idle.remove(connection)
        if not idle:
            self.idle.pop(connection.origin, None)


def _fail_if_late(connection: Connection, now_s: float) -> bool:
    """Fail a request that exceeds its time limit; return whether it does."""
    if connection.silent_since < now_s - connection.silence_s:
        connection.fail(f"silent for {connection.silence_s:g} s", is_silence=True)
        return True
    if connection.until_s <= now_s and connection.silent_since <= now_s:
        connection.fail("its time was up", is_silence=True)
        return True
    return False


def _has_short_limit(connection: Connection, now_s: float) -> bool:
    """Return whether a request is in progress that needs the frequent check."""
    if connection.is_usable or connection.is_gone:
        return False
    return connection.silence_s < SHORT_LIMIT_S or connection.until_s < now_s + SHORT_LIMIT_S
