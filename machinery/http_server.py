"""HTTP servers of our processes on uvicorn: listening, signals, header limits, and the admin server beside the main work.

    server = AdminServer(app, clock, ("127.0.0.1", 4001), on_change)
    group.create_task(server.run())

The main work goes on whatever happens on the admin server: connections are few, each step of one has a time limit,
and a port that is in use is reported and tried again. The parts of uvicorn that are private are listed in
tests/machinery/test_private_parts.py.
"""

import asyncio
import contextlib
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeAlias, cast

import uvicorn
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from machinery.connection_limits import is_loopback
from machinery.tcp_keepalive import enable_keepalive

# The form of request ids that are copied into headers and logs; any other is replaced.
REQUEST_ID = re.compile(rb"[!-~]{1,128}")
# https://www.w3.org/TR/trace-context/#traceparent-header; a later version may be longer.
TRACE_PARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?"
)
# Printable, because it is copied into a header. W3C demands at least 512 characters.
TRACE_STATE = re.compile(rb"[ -~\t]{1,2048}")
# Twice the default of nginx (4 buffers of 8 KiB).
MAX_HEAD_BYTES = 64 << 10
SSL_OBJECT: Final = "ssl_object"
"""The key in an ASGI scope's `state` with the connection's SSL object, which knows the verified peer; None without TLS."""
# A follower polls its log four times a second.
MAX_LOG_READERS = 16

_LISTEN_BACKLOG = 2048
_BACKOFF = Backoff(first_s=2.0, limit_s=30.0)
_SHUTDOWN_S = 1.0
SERVICE_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-length: 0\r\n\r\n"
)
_HEAD_TOO_LARGE_BODY = (
    b'{"error":{"message":"The headers are larger than 64 KiB.",'
    b'"type":"invalid_request_error","param":null,"code":null}}'
)
_HEAD_TOO_LARGE_HEAD = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"connection: close\r\n"
)

log = logging.getLogger(__name__)


class ListenAddress(NamedTuple):
    """Host and port of a server."""

    host: str
    port: int


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: the port is in use, or the host is not an address of this machine.

    """
    family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((host, port), family=family, backlog=_LISTEN_BACKLOG)


class SignalServer(uvicorn.Server):
    """A uvicorn server that reports SIGTERM and SIGINT to a callback and does not stop by itself."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # In a signal handler no asyncio object may be touched before the loop's next turn.
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._on_signal)

    @override
    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 connection with a limit on headers: httptools has none, and takes quadratic time for them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_bytes: int | None = None  # None while no headers are being read

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes is None or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            length = f"content-length: {len(_HEAD_TOO_LARGE_BODY)}\r\n\r\n".encode()
            self.transport.write(_HEAD_TOO_LARGE_HEAD + length + _HEAD_TOO_LARGE_BODY)
            self.transport.close()

    @override
    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()
        self.scope["state"][SSL_OBJECT] = self.transport.get_extra_info("ssl_object")

    @override
    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of an admin server's connections; times in seconds."""

    head_s: float = 10.0
    """From the first byte of a connection, or of a request, to the end of its headers."""
    flush_s: float = 10.0
    """For a client to read the rest of a complete response."""
    stall_s: float = 30.0
    """For a client that follows a stream and reads nothing."""
    connections: int = 64
    """The number of simultaneous connections."""


class AdminHttpProtocol(BoundedHttpProtocol):
    """One connection of an admin server: one request, one response, and a time limit on each step."""

    def __init__(self, limits: ConnectionLimits, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._timeout: asyncio.TimerHandle | None = None

    def _set_timeout(self, seconds: float) -> None:
        """Abort the connection in `seconds`, unless the timeout is cleared or set anew."""
        self._clear_timeout()
        self._timeout = self.loop.call_later(seconds, self.transport.abort)

    def _clear_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._set_timeout(self._limits.head_s)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            enable_keepalive(connection)
        if len(self.connections) > self._limits.connections:
            transport.write(SERVICE_UNAVAILABLE)
            transport.close()

    @override
    def on_message_begin(self) -> None:
        self._set_timeout(self._limits.head_s)
        super().on_message_begin()

    @override
    def on_headers_complete(self) -> None:
        self._clear_timeout()
        super().on_headers_complete()
        if self.cycle is not None:  # an upgrade has none
            self.cycle.keep_alive = False

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_timeout(self._limits.flush_s)

    @override
    def pause_writing(self) -> None:
        self._set_timeout(self._limits.stall_s)
        super().pause_writing()

    @override
    def resume_writing(self) -> None:
        # The rest of a complete response keeps its own limit.
        if not self.transport.is_closing():
            self._clear_timeout()
        super().resume_writing()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_timeout()
        super().connection_lost(exc)


class ConnectionAcceptor(Protocol):
    """Accepts connections on a listening socket until it is closed (`machinery.tls_server.TlsListener` is one)."""

    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...


MakeAcceptor: TypeAlias = Callable[
    [socket.socket, Callable[[], asyncio.Protocol]], ConnectionAcceptor
]
"""From a listening socket and the protocol of its connections to what accepts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSecurity:
    """Protection of a server: without an acceptor it listens on loopback only, unless the operator insists."""

    acceptor: MakeAcceptor | None = None
    """Accepts TLS connections, and plain ones where they are allowed; None: all connections are plain."""
    is_https: Callable[[], bool] = lambda: False
    """Returns whether clients should use TLS now."""
    insecure_flag: str = ""
    """The flag by which the operator insists on plain HTTP, such as --insecure-http."""
    is_insecure: bool = False
    """True if the flag is given."""


_LOOPBACK_ONLY: Final = ServerSecurity()


class _AdminUvicornServer(uvicorn.Server):
    """A uvicorn server without signal handlers: the process has its own."""

    def __init__(self, config: uvicorn.Config, make_acceptor: MakeAcceptor | None) -> None:
        super().__init__(config)
        self._make_acceptor = make_acceptor
        self._acceptors: list[ConnectionAcceptor] = []

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        make = self._make_acceptor
        if make is None:
            await super().startup(sockets)
            return
        await super().startup(sockets=[])
        self._acceptors = [make(one, self._make_protocol) for one in sockets or []]

    def _make_protocol(self) -> asyncio.Protocol:
        make: Callable[..., Any] = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def close(self) -> None:
        """Accept no more connections."""
        for one in (*self.servers, *self._acceptors):
            one.close()


class AdminServer:
    """Serves an app on a port of its own while `run()` runs."""

    def __init__(
        self,
        app: ASGIApp,
        clock: Clock,
        address: tuple[str, int],
        on_change: Callable[[], None],
        *,
        limits: ConnectionLimits | None = None,
        security: ServerSecurity = _LOOPBACK_ONLY,
    ) -> None:
        """`address` is host and port, 0 for any; `on_change` is called when `url` or `error` changes."""
        self.websocket: type[asyncio.Protocol] | None = None
        """Protocol of connections that ask for an upgrade to WebSocket; None ignores the upgrade."""
        self._security = security
        self._app = app
        self._clock = clock
        self._host, self._port = address
        self._limits = limits or ConnectionLimits()
        self._on_change = on_change
        self._bound = ""
        self.error = ""
        """The reason it does not listen."""
        self.is_refused = False
        """True if it does not listen because other machines could read what it sends."""

    @property
    def url(self) -> str:
        """The URL of the server; "" while it does not listen."""
        return self._bound and f"{'https' if self._security.is_https() else 'http'}://{self._bound}"

    async def run(self) -> None:
        """Listen and serve forever; while the port is in use, try again every 30 s at last."""
        retries = Retries(_BACKOFF, self._clock)
        while True:
            try:
                listener = listen(self._host, self._port)
            except OSError as error:
                text = f"port {self._port} on {self._host}: {_error_text(error)}"
                if text != self.error:
                    log.warning("admin server cannot listen; will retry", extra={"why": text})
                    self.error = text
                    self._on_change()
                await retries.wait()
                continue
            retries.reset()
            address, port = listener.getsockname()[:2]
            if self._is_open(address):
                listener.close()
                await self._refuse(address)
            host = f"[{self._host}]" if ":" in self._host else self._host
            self._bound, self.error = f"{host}:{port}", ""
            log.info("admin server listens", extra={"url": self.url})
            self._on_change()
            await self._serve(listener)

    def _is_open(self, address: str) -> bool:
        """Return whether other machines would use the server without TLS."""
        security = self._security
        return not (security.acceptor or security.is_insecure or is_loopback(address))

    async def _refuse(self, address: str) -> NoReturn:
        """Report why the server does not listen, and wait forever: a person has to change it."""
        flag = self._security.insecure_flag
        self.error = (
            f"other machines can reach {address}, and the process has no identity for TLS. Give it one with "
            "--identity-dir (`fleetctl join` and `fleetctl secure` issue it)"
            + (f", or give {flag} if you trust everything on the network" if flag else "")
        )
        self.is_refused = True
        log.error("admin server does not listen", extra={"why": self.error})
        self._on_change()
        await asyncio.Event().wait()
        raise AssertionError("nothing sets this event")

    async def _serve(self, listener: socket.socket) -> None:
        server = _AdminUvicornServer(
            uvicorn.Config(
                self._app,
                http=cast("type[AdminHttpProtocol]", partial(AdminHttpProtocol, self._limits)),
                ws=self.websocket or "none",
                lifespan="off",
                log_config=None,
                log_level="error",  # malformed requests of strangers are not worth a line
                access_log=False,
                server_header=False,
                proxy_headers=False,
            ),
            self._security.acceptor,
        )
        try:
            await server.serve(sockets=[listener])
        finally:
            server.close()
            if self._security.acceptor is not None:
                listener.close()
            for connection in tuple(server.server_state.connections):
                if isinstance(connection, AdminHttpProtocol):
                    connection.transport.abort()
            if server.server_state.tasks:
                await asyncio.wait(server.server_state.tasks, timeout=_SHUTDOWN_S)


def _error_text(error: OSError) -> str:
    # asyncio and socket put the address into strerror; names that do not resolve have error numbers below 0.
    number = error.errno or 0
    return os.strerror(number).lower() if number > 0 else str(error.strerror or error)


class LogReaders:
    """The number of logs that are being sent, with a limit."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def is_full(self) -> bool:
        """True if no further log may be sent."""
        return self.count >= MAX_LOG_READERS


class LogResponse(StreamingResponse):
    """A response that streams a log as text; it counts as one of `readers` while it is sent."""

    def __init__(self, pieces: AsyncIterator[bytes], readers: LogReaders) -> None:
        super().__init__(
            pieces,
            media_type="text/plain; charset=utf-8",
            headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
        )
        self._readers = readers

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._readers.count += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._readers.count -= 1
