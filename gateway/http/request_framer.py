"""Framing of clients' requests: where they begin and end, and whether they keep the limits of heads and time."""

import asyncio
from collections import deque
from collections.abc import Sized
from typing import Any, Final, Protocol

import httptools
from typing_extensions import override
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway import errors
from gateway.http.request_context import header_lines
from gateway.request import RawHeaders
from machinery.clock import NEVER, Clock
from machinery.http_server import MAX_HEAD_BYTES, PIECE_BYTES, SSL_OBJECT, PipelineFlow
from schemas.wire.errors import Refusal

HEADERS_LIMIT = 100
# A body is fed in larger pieces than heads: it is a request in itself.
_BODY_PIECE_BYTES: Final = 64 << 10
# uvicorn's queue of requests, which is not used.
_NO_PIPELINE: Final = deque[Any](maxlen=0)
# The longest time that a client may take to send a request. The largest body then needs 140 kB/s.
REQUEST_S = 60.0


class RequestReceiver(Protocol):
    """Receives the requests of a connection."""

    def on_request_head(self) -> None:
        """Handle a request whose headers are complete."""
        ...

    def on_partial_body(self) -> None:
        """Handle a read after which more of the body is missing."""
        ...

    def on_request_complete(self) -> None:
        """Handle the end of a request."""
        ...

    def refuse(self, refusal: Refusal) -> None:
        """Answer an invalid or incomplete request and ignore further input."""
        ...


class ConnectionFlow(PipelineFlow):
    """Flow control without an event as long as nothing waits for the client to read."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        self._transport, self._waiting = transport, waiting
        self.read_paused = self.write_paused = False
        self._readable: asyncio.Event | None = None

    @override
    async def drain(self) -> None:
        if self.write_paused:
            if self._readable is None:
                self._readable = asyncio.Event()
            await self._readable.wait()

    @override
    def pause_writing(self) -> None:
        self.write_paused = True

    @override
    def resume_writing(self) -> None:
        self.write_paused = False
        if self._readable is not None:
            self._readable.set()
            self._readable = None


class RequestFramer(HttpToolsProtocol, RequestReceiver):
    """One client connection: where its requests begin and end, and whether they keep the limits."""

    # With more than 30 attributes in its dict, an object would not share the names with others.
    __slots__ = (
        "clock",
        "deadline_s",
        "has_begun",
        "head_bytes",
        "ignores_input",
        "is_in_head",
        "is_in_trailer",
        "pipelined",
        "unparsed",
    )

    def __init__(
        self,
        clock: Clock,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.pipeline = _NO_PIPELINE
        self.unparsed = b""
        """Input behind a request that waits."""
        self.pipelined: list[tuple[Any, Any]] = []
        """Requests that wait for the one before them, and their ASGI application, in the order of arrival."""
        self.clock = clock
        self.has_begun = False
        """True from the first byte of a request to its last."""
        self.is_in_head = True
        """True while a request head is expected or incomplete."""
        self.ignores_input = False
        """True if further input is discarded."""
        self.is_in_trailer = False
        """True after the size of the last chunk: only trailers may follow."""
        self.head_bytes = 0
        """Bytes received of the current head or trailers."""
        self.deadline_s = clock.monotonic() + REQUEST_S
        """Time by which the client must complete its request; infinite while the client waits for us."""

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.flow = ConnectionFlow(transport, self.pipelined)

    @override
    def data_received(self, data: bytes) -> None:
        start, end = 0, len(data)
        while start < end and not self.ignores_input:
            if self.pipelined:  # not beyond a request that waits for the one before it
                self.unparsed += data[start:]
                return
            is_in_body = self.has_begun and not self.is_in_head and not self.is_in_trailer
            size = _BODY_PIECE_BYTES if is_in_body else PIECE_BYTES
            self._feed_piece(data[start : start + size])
            start += size
        if self.has_begun and not self.is_in_head and not self.ignores_input:
            self.on_partial_body()

    def read_on(self) -> None:
        """Parse what has arrived, if no request waits, and then read on."""
        if not self.pipelined and self.unparsed:
            data, self.unparsed = self.unparsed, b""
            self.data_received(data)
        self.flow.resume_reading()

    def _feed_piece(self, data: bytes) -> None:
        if is_head := self.is_in_head or self.is_in_trailer:
            self.head_bytes += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._ignore_upgrade(memoryview(data)[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, httptools.HttpParserInvalidURLError):
                raise
            self.refuse(errors.not_http())
        except httptools.HttpParserError:
            self.refuse(errors.not_http())
        else:
            if (
                is_head
                and (self.is_in_head or self.is_in_trailer)
                and self.head_bytes > MAX_HEAD_BYTES
            ):
                self.refuse(errors.head_too_large(MAX_HEAD_BYTES))

    def _ignore_upgrade(self, rest: memoryview) -> None:
        """Continue as if no upgrade was requested, which RFC 9110, 7.8 permits.

        Java's HTTP client asks for h2c with every request. Its body would be lost, because the
        parser takes the rest of the input for another protocol.
        """
        if self.on_upgrade(bytes(rest)):
            return
        while not self.ignores_input:
            method, version = self.parser.get_method(), self.parser.get_http_version()
            if method == b"CONNECT":
                self.refuse(errors.not_http())
                return
            headers = [header for header in self.headers if header[0] != b"upgrade"]
            head = b"%b %b HTTP/%b\r\n%b\r\n" % (
                method,
                self.url,
                version.encode(),
                header_lines(headers),
            )
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
            self.parser.feed_data(head)
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            else:
                return

    def on_upgrade(self, _rest: bytes) -> bool:
        """Return whether the connection has changed to another protocol, or was refused; False ignores the upgrade."""
        return False

    @override
    def on_message_begin(self) -> None:
        # Not uvicorn's: requests to models do not need the ASGI scope.
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self.has_begun = True
        self.deadline_s = self.clock.monotonic() + REQUEST_S

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_head:  # else it is a trailer, which is ignored
            self.headers.append((name.lower(), value))

    @override
    def on_headers_complete(self) -> None:
        if self.ignores_input or self.parser.should_upgrade():
            return
        if len(self.headers) > HEADERS_LIMIT:
            self.refuse(errors.too_many_headers(HEADERS_LIMIT))
        elif self.head_bytes > MAX_HEAD_BYTES and _head_size(self.headers) > MAX_HEAD_BYTES:
            self.refuse(errors.head_too_large(MAX_HEAD_BYTES))
        else:
            self.on_request_head()
            self.is_in_head, self.head_bytes = False, 0

    def pass_to_uvicorn(self) -> None:
        """Pass the request to the ASGI application."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.scope["state"][SSL_OBJECT] = self.transport.get_extra_info("ssl_object")
        self.url = url
        for name, value in headers:
            super().on_header(name, value)
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Expect trailers until the chunk has a body."""
        self.is_in_trailer = True

    @override
    def on_body(self, body: bytes) -> None:
        self.is_in_trailer, self.head_bytes = False, 0
        if not self.ignores_input:
            super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        if self.ignores_input or self.parser.should_upgrade():
            return
        self.is_in_head, self.is_in_trailer, self.has_begun = True, False, False
        self.head_bytes, self.deadline_s = 0, NEVER
        self.on_request_complete()


def _head_size(headers: RawHeaders) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)
