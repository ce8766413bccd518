"""Pool of connections to engines, with one request at a time on each.

Engines with TLS get a spare connection when they appear, and another one whenever the last idle connection is taken: a
handshake takes milliseconds, and no request shall wait for one.
"""

import asyncio
import errno
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from typing_extensions import override

from gateway.upstream.call import BrokenResponseError, EngineCall, Exchange, UnreachableError
from gateway.upstream.connection import SHORT_LIMIT_S, Connection, KeptConnections
from gateway.upstream.tls import (
    REFUSED,
    EngineTls,
    external_context,
    message_of,
    new_failures,
    reason_of,
)
from machinery import unix_sockets
from machinery.backoff import Backoff, Retries
from machinery.clock import NEVER, Clock
from schemas import local_network
from schemas.wire.connections import POOL_IDLE_S
from schemas.wire.engine_address import EngineAddress

# A lost SYN is sent again after 1 s; a sleeping or missing Mac never answers.
_CONNECT_S = 2.0
_SWEEP_S = 1.0
_SHORT_SWEEP_S = 0.05
# No file descriptor is left, in the process or in the system.
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE})
# A refused client learns of it within a round trip and a turn of the engine's loop.
_REFUSAL_S = 1.0
# Handshakes at once; each takes 1 ms of CPU.
_SPARES_AT_ONCE = 8

log = logging.getLogger(__name__)

# The kernel's queue of a busy engine's socket is full. TCP waits then; a socket refuses at once. BSDs, so probably
# macOS (not tried on a Mac), do so with the error of a dead engine.
_FULL_QUEUE = frozenset({errno.ECONNREFUSED if sys.platform == "darwin" else errno.EAGAIN})
_QUEUE_BACKOFF = Backoff(first_s=0.005, limit_s=0.02)
_QUEUE_TRIES = 6


class ConnectionPool(KeptConnections):
    """Opens the connections, and ends idle and silent ones. `run()` must run for its time limits to hold."""

    def __init__(self, clock: Clock, *, silence_s: float, tls: EngineTls | None = None) -> None:
        """`tls`: the gateway's identity; None: engines with TLS are unreachable."""
        super().__init__(clock)
        self._clock = clock
        self._silence_s = silence_s
        self._tls = tls
        self.tls_failures = new_failures()
        self._failing: dict[EngineAddress, str] = {}
        """The reason that was logged, of engines to which the last TLS connection failed."""
        self._known: frozenset[EngineAddress] = frozenset()
        """The engines with TLS that have an endpoint."""
        self._spares: dict[EngineAddress, None] = {}
        """Those that need a spare connection."""
        self._needs_spares = asyncio.Event()
        self.open: set[Connection] = set()
        """All connections, idle ones included."""
        self._short_limits: set[Connection] = set()
        """Connections whose time limits are checked more often."""
        self._has_short_limits = asyncio.Event()
        self.make_room: Callable[[], bool] = lambda: False
        """Frees file descriptors; returns False if it cannot."""

    @override
    def dial(self, call: EngineCall) -> None:
        call.dialing = asyncio.get_running_loop().create_task(self._dial(call))

    @override
    def watch(self, connection: Connection) -> None:
        self._short_limits.add(connection)
        self._has_short_limits.set()

    @override
    def on_last_taken(self, origin: EngineAddress) -> None:
        if origin in self._known:
            self._want_spare(origin)

    @override
    def on_proven(self, connection: Connection) -> None:
        self._failing.pop(connection.origin, None)

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
        try:
            await exchange.wait_head()
        except BaseException:
            exchange.close()
            raise
        return exchange

    async def _dial(self, call: EngineCall) -> None:
        """Open a connection for a call."""
        try:
            left_s = call.until_s - self._clock.monotonic()
            limit_s = max(0.0, min(_CONNECT_S, call.silence_s, left_s))
            connection = await self._connect(call.origin, limit_s)
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
        if not connection.is_reused and self._is_refusal(connection) and not error.is_silence:
            self._record_refusal(connection, str(error))
            reason = f"the engine refused the connection after its TLS handshake: {error}"
            call.on_error(UnreachableError(reason))
            return
        call.on_error(error)

    async def run(self) -> None:
        """Close connections to silent engines and idle connections, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._check_short_limits())
            group.create_task(self._open_spares())
            while True:
                await self._clock.sleep(_SWEEP_S)
                self.sweep(self._clock.monotonic())

    def set_engines(self, addresses: Iterable[EngineAddress]) -> None:
        """Set the engines that have an endpoint, and open a connection to each new one with TLS."""
        known = (
            frozenset(address for address in addresses if address.node)
            if self._tls is not None
            else ()
        )
        for one in known:
            if one not in self._known:
                self._want_spare(one)
        self._known = frozenset(known)
        self._failing = {one: why for one, why in self._failing.items() if one in self._known}

    def close_revoked(self) -> None:
        """Close the connections to nodes whose certificate was revoked; their requests go elsewhere."""
        if self._tls is None:
            return
        is_revoked = self._tls.credentials.is_revoked
        for connection in tuple(self.open):
            if connection.origin.node and is_revoked(connection.ssl_object):
                log.warning(
                    "connection closed; its node is revoked", extra={"node": connection.origin.node}
                )
                self.tls_failures.add("Revoked")
                connection.fail("the node's certificate was revoked", is_silence=False)

    def _want_spare(self, origin: EngineAddress) -> None:
        self._spares[origin] = None
        self._needs_spares.set()

    async def _open_spares(self) -> None:
        """Open spare connections, forever; failures are left to health checks and requests."""
        async with asyncio.TaskGroup() as group:
            limit = asyncio.Semaphore(_SPARES_AT_ONCE)
            while True:
                await self._needs_spares.wait()
                self._needs_spares.clear()
                wanted, self._spares = self._spares, {}
                for origin in wanted:
                    await limit.acquire()
                    group.create_task(self._open_spare(origin)).add_done_callback(
                        lambda _: limit.release()
                    )

    async def _open_spare(self, origin: EngineAddress) -> None:
        if origin not in self._known or self.idle.get(origin):
            return
        try:
            connection = await self._connect(origin, _CONNECT_S)
        except UnreachableError as error:
            log.info(
                "no spare connection to an engine",
                extra={"node": origin.node, "url": origin.url, "why": str(error)},
            )
            return
        self.open.add(connection)
        connection.rest()

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

    def fail_waiting(self, origin: EngineAddress, why: str) -> None:
        """Fail the requests that wait for the origin."""
        for connection in tuple(self.open):
            if connection.origin == origin and connection.silent_since < NEVER:
                connection.fail(why, is_silence=True)

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self.open):
            connection.cut()

    async def _connect(self, origin: EngineAddress, limit_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s):
                try:
                    transport, connection = await self._open(loop, origin)
                except OSError as error:
                    if error.errno not in _NO_FILES or not self.make_room():
                        raise
                    await asyncio.sleep(0)  # the descriptors are free in the next turn of the loop
                    transport, connection = await self._open(loop, origin)
        except TimeoutError:
            reason = f"no connection within {limit_s:.3g} s"
            raise UnreachableError(reason, is_timeout=True) from None
        except unix_sockets.SocketFolderError as error:
            raise UnreachableError(str(error)) from error
        except ssl.SSLError as error:
            self._record_failure(origin, reason_of(error), message_of(error))
            raise UnreachableError(message_of(error)) from error
        except UnicodeError as error:
            raise UnreachableError(f"{origin.host[:100]!r} is no host name") from error
        except OSError as error:
            raise UnreachableError(
                local_network.failure_text(error, origin.host),
                is_own_fault=error.errno in _NO_FILES,
                has_no_route=local_network.has_no_route(error),
            ) from error
        if not origin.socket:
            # Without it a request to such a Mac waits for the full time limit before it is retried.
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if sys.platform == "darwin":
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, 5)
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            if sys.platform == "linux":
                # Keep-alive probes stop while sent data is unacknowledged; this covers that case.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 8000)
        return connection

    async def _open(
        self, loop: asyncio.AbstractEventLoop, origin: EngineAddress
    ) -> tuple[asyncio.Transport, Connection]:
        if origin.socket:
            # At each connection: the folder may have been replaced since its endpoint was accepted.
            unix_sockets.check_private(Path(origin.socket).parent)

        def make() -> Connection:
            return Connection(self._clock, origin, self)

        if origin.node:
            if self._tls is None:
                raise OSError("the engine serves TLS, and this gateway has no identity")
            name = self._tls.server_name(origin.node)
            return await origin.connect(loop, make, self._tls.context, name)
        if origin.authorities:
            context = external_context(origin.authorities)
            return await origin.connect(loop, make, context, origin.host)
        retries = Retries(_QUEUE_BACKOFF, self._clock)
        while True:
            try:
                return await origin.connect(loop, make)
            except OSError as error:
                is_full = bool(origin.socket) and error.errno in _FULL_QUEUE
                if not is_full or retries.failures == _QUEUE_TRIES:
                    raise
            await retries.wait()

    def _is_refusal(self, connection: Connection) -> bool:
        """Return whether the engine closed the connection as it does to a peer that it refuses."""
        age_s = self._clock.monotonic() - connection.opened_s
        return bool(connection.origin.node) and not connection.is_proven and age_s < _REFUSAL_S

    def _record_refusal(self, connection: Connection, why: str) -> None:
        if not connection.is_refused:
            connection.is_refused = True
            self._record_failure(connection.origin, REFUSED, why)

    def _record_failure(self, origin: EngineAddress, reason: str, why: str) -> None:
        self.tls_failures.add(reason)
        if self._failing.get(origin) == reason:
            return  # health checks try again and again
        self._failing[origin] = reason
        log.warning(
            "TLS connection to an engine failed",
            extra={
                "node": origin.node or origin.external,
                "url": origin.url,
                "reason": reason,
                "why": why,
            },
        )

    @override
    def forget(self, connection: Connection) -> None:
        if not connection.is_cut and self._is_refusal(connection):
            self._record_refusal(connection, connection.end)
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
