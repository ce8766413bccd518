"""HTTP/1.1 as clients send it: where requests begin and end, and what is too much. Answers nothing itself."""

import asyncio
from typing import Any, Protocol

import httptools
from typing_extensions import override
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.asks import RawHeaders
from gateway.clients import refusals
from gateway.clients.reply import lines
from gateway.errors import Refusal
from machinery.clock import Clock

# Clients send some hundred bytes of headers; cookies and tokens may make it a few thousand.
_HEAD_LIMIT = 64 << 10
_HEADERS_LIMIT = 100
# How long a client may take to send a request. The largest body within this is 140 kB/s.
REQUEST_S = 60.0
NEVER = float("inf")


class Receiver(Protocol):
    """Who hears what was framed."""

    def heard_head(self) -> None:
        """Take up a request whose headers are here."""
        ...

    def heard_all(self) -> None:
        """Take note that all of the request is here."""
        ...

    def refuse(self, refusal: Refusal) -> None:
        """Answer what is no request, or not all of one, and hear nothing more."""
        ...


class Framing(HttpToolsProtocol, Receiver):
    """One client's connection, as far as its requests have to be told apart."""

    def __init__(
        self,
        clock: Clock,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.clock = clock
        self.has_begun = False
        """Whether a request has begun whose end is not here yet."""
        self.is_in_head = True
        """Whether what comes next is no body: of a request's head, or of none yet."""
        self.is_deaf = False
        """Whether what still comes is thrown away."""
        self.is_in_trailer = False
        """Whether chunks may be over: nothing but trailers follows the last one's size."""
        self.head_bytes = 0
        """How much came of a head or of trailers."""
        self.deadline_s = clock.monotonic() + REQUEST_S
        """When the client has to have done something; never, while it waits for us."""

    @override
    def data_received(self, data: bytes) -> None:
        if self.is_deaf:
            return
        if is_head := self.is_in_head or self.is_in_trailer:
            self.head_bytes += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as asked:
                self._decline(memoryview(data)[asked.args[0] :])
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, httptools.HttpParserInvalidURLError):
                raise
            self.refuse(refusals.not_http())
        except httptools.HttpParserError:
            self.refuse(refusals.not_http())
        else:
            if (
                is_head
                and (self.is_in_head or self.is_in_trailer)
                and self.head_bytes > _HEAD_LIMIT
            ):
                self.refuse(refusals.head_too_large(_HEAD_LIMIT))

    def _decline(self, rest: memoryview) -> None:
        """Go on as if nobody had asked for an upgrade, which we may (RFC 9110, 7.8).

        Java's own client asks for h2c with every request; its body would be lost, for the parser
        takes what follows for another protocol.
        """
        while not self.is_deaf:
            method, version = self.parser.get_method(), self.parser.get_http_version()
            if method == b"CONNECT":
                self.refuse(refusals.not_http())
                return
            kept = [header for header in self.headers if header[0] != b"upgrade"]
            head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version.encode(), lines(kept))
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(head)
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as asked:
                rest = rest[asked.args[0] :]
            else:
                return

    @override
    def on_message_begin(self) -> None:
        # Not uvicorn's: the scope it makes is of no use to requests to models.
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self.has_begun = True
        self.deadline_s = self.clock.monotonic() + REQUEST_S

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_head:  # or it is a trailer, which nobody asked for
            self.headers.append((name.lower(), value))

    @override
    def on_headers_complete(self) -> None:
        if self.is_deaf or self.parser.should_upgrade():
            return
        if len(self.headers) > _HEADERS_LIMIT:
            self.refuse(refusals.too_many_headers(_HEADERS_LIMIT))
        elif self.head_bytes > _HEAD_LIMIT and _size(self.headers) > _HEAD_LIMIT:
            self.refuse(refusals.head_too_large(_HEAD_LIMIT))
        else:
            self.heard_head()
            self.is_in_head, self.head_bytes = False, 0

    def let_uvicorn(self) -> None:
        """Have the application answer."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        for name, value in headers:
            super().on_header(name, value)
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Take a chunk for the last one until it has a body."""
        self.is_in_trailer = True

    @override
    def on_body(self, body: bytes) -> None:
        self.is_in_trailer, self.head_bytes = False, 0
        if not self.is_deaf:
            super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        if self.is_deaf or self.parser.should_upgrade():
            return
        self.is_in_head, self.is_in_trailer, self.has_begun = True, False, False
        self.head_bytes, self.deadline_s = 0, NEVER
        self.heard_all()


def _size(headers: RawHeaders) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)
