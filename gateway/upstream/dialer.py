"""Opens connections to engines, over TCP, TLS or a socket, and counts failures of TLS, those of external servers included."""

import asyncio
import errno
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from gateway.upstream.call import UnreachableError
from gateway.upstream.tls import EngineTls, message_of, new_failures, reason_of
from machinery import unix_sockets
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from machinery.connection_limits import ConnectionLimiter
from machinery.tcp_keepalive import enable_keepalive
from schemas import local_network
from schemas.wire.engine_address import EngineAddress

_P = TypeVar("_P", bound=asyncio.BaseProtocol)
# No file descriptor is left, in the process or in the system.
NO_FILES = frozenset({errno.EMFILE, errno.ENFILE})
# The kernel's queue of a busy engine's socket is full. TCP waits then; a socket refuses at once. BSDs, so probably
# macOS (not tried on a Mac), do so with the error of a dead engine.
_FULL_QUEUE = frozenset({errno.ECONNREFUSED if sys.platform == "darwin" else errno.EAGAIN})
_QUEUE_BACKOFF = Backoff(first_s=0.005, limit_s=0.02)
_QUEUE_TRIES = 6
CONNECT_S = 2.0
"""A lost SYN is sent again after 1 s; a sleeping or missing Mac never answers."""

log = logging.getLogger(__name__)


class Dialer:
    """Opens connections with the gateway's identity."""

    def __init__(self, clock: Clock, tls: EngineTls | None = None) -> None:
        """`tls`: the gateway's identity; None: engines with TLS are unreachable."""
        self._clock = clock
        self.tls = tls
        self.tls_failures = new_failures()
        self._failing: dict[EngineAddress, str] = {}
        """The reason that was logged, of engines to which the last TLS connection failed."""
        self.clients: ConnectionLimiter | None = None
        """The connections of clients: idle ones give their files up for connections to engines."""

    def make_room(self) -> bool:
        """Free file descriptors; return False if none can be freed."""
        return self.clients is not None and self.clients.make_room()

    async def connect(self, origin: EngineAddress, limit_s: float, make: Callable[[], _P]) -> _P:
        """Return the protocol of a new connection, made by `make`.

        Raises:
            UnreachableError: there is none.

        """
        try:
            async with asyncio.timeout(limit_s):
                try:
                    transport, protocol = await self._open(origin, make)
                except OSError as error:
                    if error.errno not in NO_FILES or not self.make_room():
                        raise
                    await asyncio.sleep(0)  # the descriptors are free in the next turn of the loop
                    transport, protocol = await self._open(origin, make)
        except TimeoutError:
            reason = f"no connection within {limit_s:.3g} s"
            raise UnreachableError(reason, is_timeout=True) from None
        except unix_sockets.SocketFolderError as error:
            raise UnreachableError(str(error)) from error
        except UnicodeError as error:
            raise UnreachableError(f"{origin.host[:100]!r} is no host name") from error
        except OSError as error:
            raise self.unreachable(origin, error) from error
        if not origin.socket:
            set_keepalive(transport.get_extra_info("socket"))
        return protocol

    async def _open(
        self, origin: EngineAddress, make: Callable[[], _P]
    ) -> tuple[asyncio.Transport, _P]:
        loop = asyncio.get_running_loop()
        if origin.socket:
            # At each connection: the folder may have been replaced since its endpoint was accepted.
            unix_sockets.check_private(Path(origin.socket).parent)
        if origin.node:
            if self.tls is None:
                raise OSError("the engine serves TLS, and this gateway has no identity")
            name = self.tls.server_name(origin.node)
            return await origin.connect(loop, make, self.tls.context, name)
        retries = Retries(_QUEUE_BACKOFF, self._clock)
        while True:
            try:
                return await origin.connect(loop, make)
            except OSError as error:
                is_full = bool(origin.socket) and error.errno in _FULL_QUEUE
                if not is_full or retries.failures == _QUEUE_TRIES:
                    raise
            await retries.wait()

    def unreachable(self, origin: EngineAddress, error: OSError) -> UnreachableError:
        """Return what a failure to connect means, and count it if TLS is the reason."""
        if isinstance(error, ssl.SSLError):
            self.record_failure(origin, reason_of(error), message_of(error))
            return UnreachableError(message_of(error))
        return UnreachableError(
            local_network.failure_text(error, origin.host),
            is_own_fault=error.errno in NO_FILES,
            has_no_route=local_network.has_no_route(error),
        )

    def record_failure(self, origin: EngineAddress, reason: str, why: str) -> None:
        """Count a failure of TLS, and log it unless the last connection failed for the same reason."""
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

    def record_success(self, origin: EngineAddress) -> None:
        """Log the next failure again."""
        self._failing.pop(origin, None)

    def set_known(self, origins: Iterable[EngineAddress]) -> None:
        """Forget the failures of all others."""
        known = frozenset(origins)
        self._failing = {o: why for o, why in self._failing.items() if o in known}


def set_keepalive(sock: socket.socket) -> None:
    """Find out within 8 s that the other machine is gone: without it a request to it waits for its full time limit."""
    enable_keepalive(sock, idle_s=5, interval_s=1)
