"""HTTP connections of an engine: a time limit on each step, a bound on their number, and clients that do not read.

uvicorn closes a connection that is idle after a response. It waits forever for the first request, for the rest of a
request, and for a client that does not read.
"""

import asyncio
import fcntl
import platform
import socket
import struct
import termios
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from machinery.http_server import SERVICE_UNAVAILABLE, BoundedHttpProtocol
from machinery.tcp_keepalive import enable_keepalive
from schemas.wire.connections import SERVER_KEEP_ALIVE_S

# Bytes of a response in the kernel: a larger buffer hides for minutes that nothing is read.
_SEND_BUFFER_BYTES = 64 << 10
# <sys/socket.h> of macOS: the bytes in the send buffer that were not acknowledged.
_SO_NWRITE = 0x1024


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

    @property
    def check_s(self) -> float:
        """The time between two looks at a client that does not read."""
        return min(self.crowded_stall_s, self.stall_s) / 10


class EngineHttpProtocol(BoundedHttpProtocol):
    """One connection of an engine. A connection that reaches a limit is aborted, which frees its request's slot."""

    def __init__(self, limits: EngineConnectionLimits, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._step: asyncio.TimerHandle | None = None
        """Ends the connection when its current step takes too long."""
        self._stall: asyncio.TimerHandle | None = None
        """Looks again at a client that does not read."""
        self._unsent = 0
        self._stalled_s = 0.0
        self.idle_since = 0.0
        """The beginning of the wait for a request, on the loop's clock."""

    @property
    def has_request(self) -> bool:
        """True from the end of a request's headers to the end of its response."""
        return not getattr(self.cycle, "response_complete", True)  # None before the first

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            enable_keepalive(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._wait_for_request()
        if len(self.connections) > self._limits.connections and not self._make_room():
            transport.write(SERVICE_UNAVAILABLE)
            transport.close()

    def _make_room(self) -> bool:
        """Abort the connection that has waited longest for a request; return False if all others have one."""
        others = [
            one
            for one in self.connections
            if isinstance(one, EngineHttpProtocol) and one is not self and not one.has_request
        ]
        if not others:
            return False
        min(others, key=lambda one: one.idle_since).transport.abort()
        return True

    def retire(self) -> None:
        """Take no further request: close now, or when the current one is answered."""
        if self.has_request:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def _wait_for_request(self) -> None:
        self.idle_since = self.loop.time()
        self._begin_step(self._limits.idle_s)

    def _begin_step(self, seconds: float) -> None:
        self._end_step()
        self._step = self.loop.call_later(seconds, self._abort)

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.cancel()
            self._step = None

    def _abort(self) -> None:
        self.transport.abort()

    @override
    def on_message_begin(self) -> None:
        # The next request may come while the last one is answered; its time begins after that.
        if not self.has_request:
            self._begin_step(self._limits.head_s)
        super().on_message_begin()

    @override
    def on_headers_complete(self) -> None:
        if not self.has_request:
            self._begin_step(self._limits.body_s)
        super().on_headers_complete()

    @override
    def on_message_complete(self) -> None:
        self._end_step()
        super().on_message_complete()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.has_request:
            self._wait_for_request()

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
            self._abort()
            return
        self._watch_reader()

    def _count_unsent(self) -> int:
        """Return the bytes of the response that the client's machine has not accepted yet."""
        return self.transport.get_write_buffer_size() + _unacknowledged_bytes(
            self.transport.get_extra_info("socket")
        )

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._end_step()
        self._forget_reader()
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
