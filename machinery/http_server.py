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
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

import uvicorn
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from machinery import host_header
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from machinery.connection_limits import AddressLimit, ConnectionLimiter, is_loopback
from machinery.tcp_keepalive import enable_keepalive
from machinery.websocket import MAX_MESSAGE_BYTES, WebSocketProtocol

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
# Copies of a listening socket. uvloop accepts one connection of each in a turn of the event loop: with one, the last of a
# thousand new clients of a busy process waits for a thousand turns. Processes that share a socket share new clients.
_ACCEPTS_AT_ONCE: Final = 4
_BACKOFF = Backoff(first_s=2.0, limit_s=30.0)
_SHUTDOWN_S = 1.0
# For a client to read that it is refused.
_REFUSED_S = 1.0
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


class ConnectionAcceptor(Protocol):
    """Accepts connections on a listening socket until it is closed (`machinery.tls_server.TlsListener` is one)."""

    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...


MakeAcceptor: TypeAlias = Callable[
    [socket.socket, Callable[[], asyncio.Protocol]], ConnectionAcceptor
]
"""From a listening socket and the protocol of its connections to what accepts them."""


class HttpServer(uvicorn.Server):
    """A uvicorn server that does not stop at signals, and whose connections an acceptor may accept."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_signal: Callable[[], object] | None,
        acceptor: MakeAcceptor | None = None,
    ) -> None:
        """`on_signal`: called at SIGTERM and SIGINT; None: signals stay the process's own."""
        super().__init__(config)
        self._on_signal = on_signal
        self._make_acceptor = acceptor
        self._acceptors: list[ConnectionAcceptor] = []

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if self._on_signal is None:
            yield
            return
        with super().capture_signals():
            yield

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # In a signal handler no asyncio object may be touched before the loop's next turn.
        if self._on_signal is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._on_signal)

    @override
    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        make = self._make_acceptor
        if make is None:
            copies = [sock.dup() for sock in sockets or [] for _ in range(_ACCEPTS_AT_ONCE)]
            await super().startup(copies)
            return
        await super().startup(sockets=[])
        self._acceptors = [make(listener, self._make_protocol) for listener in sockets or []]

    def _make_protocol(self) -> asyncio.Protocol:
        make: Callable[..., Any] = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def close(self) -> None:
        """Accept no more connections."""
        for acceptor in (*getattr(self, "servers", ()), *self._acceptors):
            acceptor.close()

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.close()
        # A client whose handshake is in progress has sent its request, or is about to.
        with contextlib.suppress(TimeoutError):
            await asyncio.gather(*(acceptor.wait_closed() for acceptor in self._acceptors))
        await super().shutdown(sockets)


PIECE_BYTES: Final = 4 << 10
"""The most that is parsed at once: a read of 256 KiB may have 5,000 requests, each of which costs 2 KB and 50 us."""


class PipelineFlow(FlowControl):
    """Flow control that reads no more while pipelined requests wait.

    uvicorn reads on after each response. A client that reads none of them then fills the memory with requests.
    """

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        """Read on only while `waiting` is empty: the requests that wait for the one before them."""
        super().__init__(transport)
        self._waiting = waiting

    @override
    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


class StepLimits(Protocol):
    """The longest time for each step of a client, in seconds."""

    @property
    def idle_s(self) -> float:
        """From the connection, or the last response, to the first byte of a request."""
        ...

    @property
    def head_s(self) -> float:
        """From there to the end of the headers."""
        ...

    @property
    def body_s(self) -> float:
        """From there to the end of the body."""
        ...


class BoundedHttpProtocol(HttpToolsProtocol):
    """One HTTP/1.1 connection of a bounded number, with a time limit on each step of the client.

    uvicorn waits forever for a request and its end. httptools has no limit of headers, and takes quadratic time for them.
    """

    def __init__(
        self, limits: StepLimits, limiter: ConnectionLimiter, *arguments: Any, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._steps = limits
        self._limiter = limiter
        self._step: asyncio.TimerHandle | None = None
        """Ends the connection when its current step takes too long."""
        self._unparsed = b""
        """Input behind a request that waits for the one before it."""
        self._head_bytes: int | None = None  # None while no headers are being read
        self._is_verified = False
        self.idle_since = 0.0
        """The beginning of the wait for a request, on the loop's clock."""

    @property
    def has_request(self) -> bool:
        """True from the end of a request's headers to the end of its response."""
        return not getattr(self.cycle, "response_complete", True)  # None before the first

    @property
    def is_serving(self) -> bool:
        """True while a request is answered whose body has arrived."""
        return self.has_request and not self.cycle.more_body

    @property
    def shed_order(self) -> tuple[bool, bool, float]:
        """Connections that are closing are closed first, then those without a verified peer, the longest idle ones first."""
        return not self.transport.is_closing(), self._is_verified, self.idle_since

    def shed(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def begin_step(self, seconds: float) -> None:
        """Abort the connection in `seconds`, unless the step ends or another begins."""
        self.end_step()
        self._step = self.loop.call_later(seconds, self.shed)

    def end_step(self) -> None:
        """Wait for the client no longer."""
        if self._step is not None:
            self._step.cancel()
            self._step = None

    def wait_for_request(self) -> None:
        """Begin the wait for a request."""
        self.idle_since = self.loop.time()
        self.begin_step(self._steps.idle_s)

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self.flow = PipelineFlow(transport, self.pipeline)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            enable_keepalive(connection)
        tls = transport.get_extra_info(SSL_OBJECT)
        self._is_verified = tls is not None and tls.getpeercert(binary_form=True) is not None
        self.wait_for_request()
        # What strangers do must not keep out a peer that has a certificate of the fleet.
        is_counted = self.client is not None and not self._is_verified
        if self._limiter.admit(self, self.client[0] if self.client and is_counted else ""):
            transport.write(SERVICE_UNAVAILABLE)
            transport.close()
            self.begin_step(_REFUSED_S)

    @override
    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            # A connection that is refused still delivers over TLS what the client sends. Or it is a WebSocket now.
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                return
            if self.pipeline:
                self._unparsed += data[start:]
                return
            self._parse_piece(data[start : start + PIECE_BYTES])

    def _parse_piece(self, data: bytes) -> None:
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
        # The next request may come while the last one is answered; its time begins after that.
        if not self.has_request:
            self.begin_step(self._steps.head_s)
        super().on_message_begin()
        self.scope["state"][SSL_OBJECT] = self.transport.get_extra_info("ssl_object")

    @override
    def on_headers_complete(self) -> None:
        self._head_bytes = None
        if not self.has_request:
            self.begin_step(self._steps.body_s)
        super().on_headers_complete()

    @override
    def on_message_complete(self) -> None:
        if (
            self.has_request
        ):  # else the response came before the end of the body, and another step has begun
            self.end_step()
        super().on_message_complete()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unparsed:
            data, self._unparsed = self._unparsed, b""
            self.data_received(data)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.end_step()
        self._unparsed = b""
        self._limiter.leave(self)
        super().connection_lost(exc)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of an admin server's connections; times in seconds."""

    idle_s: float = 10.0
    head_s: float = 10.0
    body_s: float = 60.0
    flush_s: float = 10.0
    """For a client to read the rest of a complete response."""
    stall_s: float = 30.0
    """For a client that follows a stream and reads nothing."""
    connections: int = 64
    """The number of simultaneous connections."""
    per_address: int = 16
    """Those of one address of another machine, without a verified peer."""
    has_websockets: bool = False
    """False ignores upgrades to WebSocket."""


class AdminHttpProtocol(BoundedHttpProtocol):
    """One connection of an admin server: one request and one response, or one WebSocket."""

    def __init__(
        self,
        limits: ConnectionLimits,
        limiter: ConnectionLimiter,
        *arguments: Any,
        **options: Any,
    ) -> None:
        super().__init__(limits, limiter, *arguments, **options)
        self._limits = limits
        self._websocket: WebSocketProtocol | None = None
        """Serves the connection since its upgrade; it stays counted here."""

    @property
    @override
    def is_serving(self) -> bool:
        """True while a request is answered, or a WebSocket is open."""
        return super().is_serving if self._websocket is None else self._websocket.is_open

    @override
    def handle_websocket_upgrade(self) -> None:
        self.end_step()
        super().handle_websocket_upgrade()
        self._websocket = cast("WebSocketProtocol", self.transport.get_protocol())
        self._websocket.on_lost = partial(self._limiter.leave, self)

    @override
    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None:  # an upgrade has none
            self.cycle.keep_alive = False

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.begin_step(self._limits.flush_s)

    @override
    def pause_writing(self) -> None:
        self.begin_step(self._limits.stall_s)
        super().pause_writing()

    @override
    def resume_writing(self) -> None:
        # The rest of a complete response keeps its own limit.
        if not self.transport.is_closing():
            self.end_step()
        super().resume_writing()


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
    allowed_hosts: Collection[str] | None = None
    """The names of --allowed-host besides those of this machine; None: the process has no such flag."""


_LOOPBACK_ONLY: Final = ServerSecurity()


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
        self._security = security
        names = host_header.machine_names(address[0], *(security.allowed_hosts or ()))
        flag = "" if security.allowed_hosts is None else "--allowed-host"
        self._app = host_header.HostCheck(app, names, flag=flag)
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
                # Report why the server does not listen, and wait forever: a person has to change
                # it.
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
            host = f"[{self._host}]" if ":" in self._host else self._host
            self._bound, self.error = f"{host}:{port}", ""
            log.info("admin server listens", extra={"url": self.url})
            self._on_change()
            await self._serve(listener)

    def _is_open(self, address: str) -> bool:
        """Return whether other machines would use the server without TLS."""
        security = self._security
        return not (security.acceptor or security.is_insecure or is_loopback(address))

    async def _serve(self, listener: socket.socket) -> None:
        limits = self._limits
        limiter = ConnectionLimiter(
            AddressLimit(limits.per_address), lambda count: count <= limits.connections
        )
        protocol = partial(AdminHttpProtocol, limits, limiter)
        server = HttpServer(
            uvicorn.Config(
                self._app,
                http=cast("type[AdminHttpProtocol]", protocol),
                ws=WebSocketProtocol if limits.has_websockets else "none",
                ws_max_size=MAX_MESSAGE_BYTES,
                ws_per_message_deflate=False,
                lifespan="off",
                log_config=None,
                log_level="error",  # malformed requests of strangers are not worth a line
                access_log=False,
                server_header=False,
                proxy_headers=False,
            ),
            on_signal=None,
            acceptor=self._security.acceptor,
        )
        try:
            await server.serve(sockets=[listener])
        finally:
            server.close()
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
