"""HTTP connections of an engine: a time limit on each step, a bound on their number, and clients that do not read.

uvicorn waits forever for a client that does not read.

A client that ends its sending side may have closed the connection, or may still wait for the answer (`nc -N`): TCP shows
the difference only when something is written. The machine of one that has closed it resets the connection then.
"""

import asyncio
import fcntl
import platform
import socket
import struct
import termios
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from typing_extensions import override
from uvicorn.server import ServerState

from machinery.connection_limits import AddressLimit, ConnectionLimiter
from machinery.engine_link import EngineGauges
from machinery.http_server import BoundedHttpProtocol
from schemas.wire.connections import SERVER_KEEP_ALIVE_S

HAND_OVER: Final = "hand_over"
"""The key in an ASGI scope's `state` with the function that gives the connection to another protocol. The function takes
what makes the protocol, from uvicorn's state of the server and from a function to call at the end of the connection."""

IS_LINK: Final = "is_link"
"""The key in an ASGI scope's `state` of requests that come over a link, which reports the load once for all of them."""

# Bytes of a response in the kernel: a larger buffer hides for minutes that nothing is read.
_SEND_BUFFER_BYTES = 64 << 10
# <sys/socket.h> of macOS: the bytes in the send buffer that were not acknowledged.
_SO_NWRITE = 0x1024
# Every client skips an interim response of this status, wanted or not (RFC 9110, 15.2); Python's skips no other. Go's
# takes at most five. A proxy learns from the first that its client is gone, and the engine from the next.
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_INTERIM_AFTER_S = (0.0, 5.0, 30.0, 120.0)
# The time between two looks at whether a connection was reset: first a round trip, then twice the last one.
_RESET_CHECK_S, _RESET_CHECK_MOST_S = 0.01, 1.0


MakeProtocol: TypeAlias = Callable[[ServerState, Callable[[], None]], asyncio.Protocol]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConnectionLimits:
    """Limits of an engine's connections; times in seconds."""

    connections: int = 1024
    """The number of simultaneous connections."""
    idle_s: float = SERVER_KEEP_ALIVE_S
    """Without a request; longer than gateways keep a connection in their pools."""
    head_s: float = 30.0
    """From the first byte of a request to the end of its headers."""
    body_s: float = 120.0
    """From there to the end of its body."""
    stall_s: float = 60.0
    """For a client that reads nothing of its response."""
    crowded_stall_s: float = 10.0
    """The same, while other requests wait for a slot."""
    is_crowded: Callable[[], bool] = lambda: False
    """Returns whether requests wait."""
    gauges: Callable[[], EngineGauges] = lambda: EngineGauges(
        replica="", is_ready=True, in_flight=0, queued=0
    )
    """Returns what links report of the engine."""

    def limiter(self) -> ConnectionLimiter:
        """Return the limiter of the connections of one engine. Its clients are gateways: none is limited by address."""
        return ConnectionLimiter(AddressLimit(0), lambda count: count <= self.connections)

    @property
    def check_s(self) -> float:
        """The time between two looks at a client that does not read."""
        return min(self.crowded_stall_s, self.stall_s) / 10


class EngineHttpProtocol(BoundedHttpProtocol):
    """One connection of an engine. A connection that reaches a limit is aborted, which frees its request's slot."""

    def __init__(
        self,
        limits: EngineConnectionLimits,
        limiter: ConnectionLimiter,
        *arguments: Any,
        **options: Any,
    ) -> None:
        super().__init__(limits, limiter, *arguments, **options)
        self._limits = limits
        self._stall: asyncio.TimerHandle | None = None
        """Looks again at a client that does not read."""
        self._unsent = 0
        self._stalled_s = 0.0
        self._interims: list[asyncio.TimerHandle] = []
        """Write to a client that sends no more."""
        self._reset_check: asyncio.TimerHandle | None = None
        """Looks whether it is gone."""
        self._is_handed_over = False

    @property
    @override
    def is_serving(self) -> bool:
        """True while a request is answered, or once another protocol has the connection."""
        return self._is_handed_over or super().is_serving

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    def retire(self) -> None:
        """Take no further request: close now, or when the current one is answered."""
        if self.has_request:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][HAND_OVER] = self._hand_over

    def _hand_over(self, make: MakeProtocol) -> None:
        """Give the connection to another protocol; the current request gets no response."""
        self._is_handed_over = True
        self.end_step()
        self.cycle.disconnected = True
        self.connections.discard(self)
        protocol = make(self.server_state, partial(self._limiter.leave, self))
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.has_request:
            self.wait_for_request()

    @override
    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's closes every connection
        """Return True to answer a client that sends no more; one that is gone resets the connection soon."""
        cycle = self.cycle
        is_plain = self.scheme == "http"  # TLS ends in both directions at once
        if not (is_plain and self.has_request) or cycle.more_body or self.pipeline:
            return False
        if cycle.scope["http_version"] != "1.1":  # knows no interim responses
            return False
        cycle.keep_alive = False
        self._interims = [
            self.loop.call_later(after_s, self._send_interim) for after_s in _INTERIM_AFTER_S
        ]
        self._watch_reset(_RESET_CHECK_S)
        return True

    def _send_interim(self) -> None:
        if not self.cycle.response_started:  # later, each token does as well
            self.transport.write(_INTERIM)

    def _watch_reset(self, after_s: float) -> None:
        self._reset_check = self.loop.call_later(after_s, self._check_reset, after_s)

    def _check_reset(self, waited_s: float) -> None:
        """Abort the connection if the client has reset it: the loop looks for that only where it reads."""
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.shed()
        else:
            self._watch_reset(min(2 * waited_s, _RESET_CHECK_MOST_S))

    @override
    def pause_writing(self) -> None:
        self._unsent, self._stalled_s = self._count_unsent(), 0.0
        self._watch_reader()
        super().pause_writing()

    @override
    def resume_writing(self) -> None:
        self._forget_reader()
        super().resume_writing()

    def _watch_reader(self) -> None:
        self._stall = self.loop.call_later(self._limits.check_s, self._check_reader)

    def _forget_reader(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _check_reader(self) -> None:
        """Abort the connection if the client has read nothing for too long."""
        limits, unsent = self._limits, self._count_unsent()
        self._stalled_s = 0.0 if unsent < self._unsent else self._stalled_s + limits.check_s
        self._unsent = unsent
        if self._stalled_s >= (limits.crowded_stall_s if limits.is_crowded() else limits.stall_s):
            self.shed()
            return
        self._watch_reader()

    def _count_unsent(self) -> int:
        """Return the bytes of the response that the client's machine has not accepted yet."""
        return self.transport.get_write_buffer_size() + _unacknowledged_bytes(
            self.transport.get_extra_info("socket")
        )

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_reader()
        for timer in (*self._interims, self._reset_check):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)


def _unacknowledged_bytes(connection: Any) -> int:
    """Return the bytes in the kernel's send buffer; 0 if unknown."""
    try:
        if platform.system() == "Darwin":
            return int(connection.getsockopt(socket.SOL_SOCKET, _SO_NWRITE))
        found = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        return int(struct.unpack("i", found)[0])
    except (OSError, AttributeError):
        return 0
