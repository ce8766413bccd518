"""Listening for HTTP, as our processes do it: one socket, and signals that mean what we say.

HTTP/1.1 as uvicorn speaks it, with a limit on what comes before a body: httptools has none of its own.

HTTP beside a process' main work: figures and logs for people. Whoever asks slowly, or not at all, is given up.

The main work goes on whatever happens here: connections are few, each step of one has a time limit, and a port that
is taken is said so and tried again.

A log as an answer over HTTP: piece by piece, for a few at a time.
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
from typing import Any, cast

import uvicorn
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from machinery.clock import Clock
from machinery.tcp_keepalive import enable_keepalive

# What is echoed into headers and logs; anything else is replaced.
REQUEST_ID = re.compile(rb"[!-~]{1,128}")
# https://www.w3.org/TR/trace-context/#traceparent-header; longer ones are of versions to come.
TRACE_PARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?"
)
_LISTEN_BACKLOG = 2048


class SignalServer(uvicorn.Server):
    """A uvicorn server that tells us of signals instead of ending by itself."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # From a signal handler: nothing of asyncio may be touched before the loop's next turn.
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._on_signal)

    @override
    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: somebody else listens there, or the address is not ours.

    """
    family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((host, port), family=family, backlog=_LISTEN_BACKLOG)


# Twice what nginx takes by default (4 buffers of 8 KiB).
MAX_HEAD_BYTES = 64 << 10
_HEAD_TOO_LARGE_BODY = b'{"error":{"message":"The headers are larger than 64 KiB.","type":"invalid_request_error","param":null,"code":null}}'
_HEAD_TOO_LARGE_HEAD = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. A header that never ends is collected by the parser, in a time that grows with its square."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head: int | None = None  # bytes of the head that is being read; None: none is

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is None or self.transport.is_closing():
            return
        self._head += len(data)
        if self._head > MAX_HEAD_BYTES:
            length = f"content-length: {len(_HEAD_TOO_LARGE_BODY)}\r\n\r\n".encode()
            self.transport.write(_HEAD_TOO_LARGE_HEAD + length + _HEAD_TOO_LARGE_BODY)
            self.transport.close()

    @override
    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()

    @override
    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()


_RETRY_S = 30.0
_SHUTDOWN_S = 1.0
_SERVICE_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What strangers are granted, in seconds."""

    head_s: float = 10.0
    """From the first byte of a connection, or of a request, to the end of its headers."""
    flush_s: float = 10.0
    """For taking what is left of an answer that is complete."""
    stall_s: float = 30.0
    """For a reader who follows and takes nothing."""
    connections: int = 64
    """How many there may be at once."""


class AdminHttpProtocol(BoundedHttpProtocol):
    """One connection: one request, one answer."""

    def __init__(self, patience: ConnectionLimits, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._patience = patience
        self._late: asyncio.TimerHandle | None = None

    def _within(self, seconds: float) -> None:
        """Give the connection up unless something happens by then."""
        self._at_ease()
        self._late = self.loop.call_later(seconds, self.transport.abort)

    def _at_ease(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._within(self._patience.head_s)
        line = transport.get_extra_info("socket")
        if line is not None:
            enable_keepalive(line)
        if len(self.connections) > self._patience.connections:
            transport.write(_SERVICE_UNAVAILABLE)
            transport.close()

    @override
    def on_message_begin(self) -> None:
        self._within(self._patience.head_s)
        super().on_message_begin()

    @override
    def on_headers_complete(self) -> None:
        self._at_ease()
        super().on_headers_complete()
        self.cycle.keep_alive = False

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._within(self._patience.flush_s)

    @override
    def pause_writing(self) -> None:
        self._within(self._patience.stall_s)
        super().pause_writing()

    @override
    def resume_writing(self) -> None:
        # What is left after the end of an answer keeps its own limit.
        if not self.transport.is_closing():
            self._at_ease()
        super().resume_writing()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._at_ease()
        super().connection_lost(exc)


def _error_text(error: OSError) -> str:
    # asyncio and socket put the address into strerror as well; names that cannot be resolved have errors below 0.
    number = error.errno or 0
    return os.strerror(number).lower() if number > 0 else str(error.strerror or error)


class _AdminUvicornServer(uvicorn.Server):
    """uvicorn without its handlers of signals: they are the process' own."""

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AdminServer:
    """An app on a port of its own, for as long as `run()` runs."""

    def __init__(
        self,
        app: ASGIApp,
        clock: Clock,
        address: tuple[str, int],
        on_change: Callable[[], None],
        *,
        patience: ConnectionLimits | None = None,
    ) -> None:
        """`address`: host and port, 0 for any; `on_change` is called when `url` or `why` is another one."""
        self._app = app
        self._clock = clock
        self._host, self._port = address
        self._patience = patience or ConnectionLimits()
        self._on_change = on_change
        self.url = ""
        """Where it answers; empty while it does not."""
        self.why = ""
        """Why it does not."""

    async def run(self) -> None:
        """Listen, and answer; while somebody else has the port, try again now and then."""
        while True:
            try:
                listener = listen(self._host, self._port)
            except OSError as error:
                why = f"port {self._port} on {self._host}: {_error_text(error)}"
                if why != self.why:
                    log.warning(
                        "logs and figures cannot be asked for over HTTP", extra={"why": why}
                    )
                    self.why = why
                    self._on_change()
                await self._clock.sleep(_RETRY_S)
                continue
            named = f"[{self._host}]" if ":" in self._host else self._host
            self.url, self.why = f"http://{named}:{listener.getsockname()[1]}", ""
            log.info("answers over HTTP", extra={"url": self.url})
            self._on_change()
            await self._serve(listener)

    async def _serve(self, listener: socket.socket) -> None:
        server = _AdminUvicornServer(
            uvicorn.Config(
                self._app,
                http=cast("type[AdminHttpProtocol]", partial(AdminHttpProtocol, self._patience)),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # strangers' wrong requests are no news
                access_log=False,
                server_header=False,
                proxy_headers=False,
            )
        )
        try:
            await server.serve(sockets=[listener])
        finally:
            for one in server.servers:
                one.close()
            for connection in tuple(server.server_state.connections):
                if isinstance(connection, AdminHttpProtocol):
                    connection.transport.abort()
            if server.server_state.tasks:
                await asyncio.wait(server.server_state.tasks, timeout=_SHUTDOWN_S)


# Each that is followed is looked at four times a second.
MAX_LOG_READERS = 16


class LogReaders:
    """How many logs are being read."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def is_full(self) -> bool:
        """Whether another one must wait."""
        return self.count >= MAX_LOG_READERS


class LogResponse(StreamingResponse):
    """Pieces of a log as text; counted for as long as it is being sent."""

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
