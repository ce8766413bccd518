"""HTTP/1.1 as clients send it: where requests begin and end, and what is too much. Answers nothing itself.

uvicorn's HTTP connection, but for requests to models: those are answered without ASGI, which costs too much.

Everything else about a connection (pipelining, other paths) stays uvicorn's. See docs/adr/0020-the-hot-path.md.
"""

import asyncio
from typing import Any, Final, Protocol

import httptools
from typing_extensions import override
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway import errors
from gateway.errors import Refusal
from gateway.http.request_context import RequestContext, RequestHandler
from gateway.http.response_writer import ResponseWriter, header_lines
from gateway.request import HttpRequest, RawHeaders
from machinery.clock import Clock
from machinery.http_server import REQUEST_ID

# Clients send some hundred bytes of headers; cookies and tokens may make it a few thousand.
_HEAD_LIMIT = 64 << 10
_HEADERS_LIMIT = 100
# How long a client may take to send a request. The largest body within this is 140 kB/s.
REQUEST_S = 60.0
NEVER = float("inf")


class RequestReceiver(Protocol):
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


class RequestFramer(HttpToolsProtocol, RequestReceiver):
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
            self.refuse(errors.not_http())
        except httptools.HttpParserError:
            self.refuse(errors.not_http())
        else:
            if (
                is_head
                and (self.is_in_head or self.is_in_trailer)
                and self.head_bytes > _HEAD_LIMIT
            ):
                self.refuse(errors.head_too_large(_HEAD_LIMIT))

    def _decline(self, rest: memoryview) -> None:
        """Go on as if nobody had asked for an upgrade, which we may (RFC 9110, 7.8).

        Java's own client asks for h2c with every request; its body would be lost, for the parser
        takes what follows for another protocol.
        """
        while not self.is_deaf:
            method, version = self.parser.get_method(), self.parser.get_http_version()
            if method == b"CONNECT":
                self.refuse(errors.not_http())
                return
            kept = [header for header in self.headers if header[0] != b"upgrade"]
            head = b"%b %b HTTP/%b\r\n%b\r\n" % (
                method,
                self.url,
                version.encode(),
                header_lines(kept),
            )
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
            self.refuse(errors.too_many_headers(_HEADERS_LIMIT))
        elif self.head_bytes > _HEAD_LIMIT and _head_size(self.headers) > _HEAD_LIMIT:
            self.refuse(errors.head_too_large(_HEAD_LIMIT))
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


def _head_size(headers: RawHeaders) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


# Longer than clients keep theirs (httpx: 5 s), so that they never write into a closing one.
_KEEP_ALIVE_S = 75.0
# After a refusal of what is still being sent: for the client to read it before the connection breaks.
_CLOSE_LINGER_S = 2.0


# What uvicorn has at first, and does not say so.
_NONE: Final[Any] = None


class ClientProtocol(RequestFramer):
    """One client's connection. `late` must be called when `deadline_s` is over."""

    def __init__(
        self,
        desk: RequestHandler,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(desk.clock, config, server_state, app_state, _loop)
        self._desk = desk
        self._serving: RequestContext | None = None
        self._last_words: Refusal | None = None
        """What is said after the answers that are under way."""

    @override
    def heard_head(self) -> None:
        path, query = self.url, b""
        surface = self._desk.surfaces.get(path)
        if surface is None:
            path, _, query = path.partition(b"?")
            if not path.startswith(b"/"):
                # A whole URL, as for a proxy: whose it is does not matter, we answer for ourselves.
                path = httptools.parse_url(self.url).path or b"/"
            surface = self._desk.surfaces.get(path)
        if surface is None or self.parser.get_method() != b"POST":
            self.let_uvicorn()
            if self._desk.is_stopping:
                self.cycle.keep_alive = False
            return
        fields = dict(self.headers)
        given, origin = fields.get(b"x-request-id", b""), fields.get(b"origin", b"")
        heard = HttpRequest(
            path=path.decode("ascii"),
            query=query,
            headers=self.headers,
            request_id=given if given and REQUEST_ID.fullmatch(given) else self._desk.next_id(),
        )
        more = header_lines(self._desk.origins.headers(origin)) if origin else b""
        visit = RequestContext(heard, self._reply(more), surface)
        taken: Any = visit  # it has what a cycle is asked for
        before, self.cycle = self.cycle, taken
        self.is_in_head = False
        if before is None or before.response_complete:  # type: ignore[redundant-expr]  # None at first
            visit.is_turn = True
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))
        if origin and not self._desk.origins.allows(origin):
            self.refuse(errors.wrong_origin(origin.decode("latin-1")))
        elif (coding := fields.get(b"content-encoding")) and coding.lower() != b"identity":
            self.refuse(errors.compressed(coding.decode("latin-1")))
        elif int(fields.get(b"content-length", b"0")) > self._desk.max_body:
            self.refuse(errors.too_large(self._desk.max_body).refusal)
        elif b"expect" in fields and fields[b"expect"].lower() == b"100-continue":
            visit.expects = not visit.reply.is_http_10
            self._ask_on(visit)

    def _reply(self, more: bytes = b"") -> ResponseWriter:
        is_http_10 = self.parser.get_http_version() == "1.0"
        return ResponseWriter(
            self.transport,
            self.flow,
            self._desk.stamp(self.server_state.default_headers) + more,
            self.on_response_complete,
            self._close,
            keep_alive=not (is_http_10 or self._desk.is_stopping)
            and self.parser.should_keep_alive(),
            is_http_10=is_http_10,
        )

    def _ask_on(self, visit: RequestContext) -> None:
        if visit.expects and visit.is_turn:
            visit.expects = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    @override
    def on_body(self, body: bytes) -> None:
        visit: Any = self.cycle
        if not isinstance(visit, RequestContext):
            super().on_body(body)
        elif not self.is_deaf:
            self.is_in_trailer, self.head_bytes = False, 0
            if visit.take(body) > self._desk.max_body:
                self.refuse(errors.too_large(self._desk.max_body).refusal)

    @override
    def heard_all(self) -> None:
        cycle: Any = self.cycle
        if not isinstance(cycle, RequestContext):
            if not cycle.response_complete:
                cycle.more_body = False
                cycle.message_event.set()
            return
        cycle.more_body = False
        if cycle.is_turn:
            self._start(cycle)

    @override
    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if not isinstance(cycle, RequestContext):
            super()._start_asgi_task(cycle, app)
            return
        cycle.is_turn = True
        if cycle.refusal is not None:
            self._desk.refuse(cycle, cycle.refusal)
        elif not cycle.more_body:
            self._start(cycle)
        else:
            self.deadline_s = self.clock.monotonic() + REQUEST_S
            self._ask_on(cycle)

    def _start(self, visit: RequestContext) -> None:
        visit.heard.body = visit.whole_body()
        visit.began_s = self.clock.monotonic()
        self._serving = visit
        visit.task = self.loop.create_task(self._desk.serve(visit))

    @override
    def on_response_complete(self) -> None:
        # Not uvicorn's: a timer for each answer costs more than looking at all connections now and then.
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._last_words is not None:
            self._say(self._last_words)
        elif not self.is_deaf and not self.has_begun:
            self.deadline_s = self.clock.monotonic() + _KEEP_ALIVE_S
            # What was asked and answered must not stay for as long as the connection idles.
            self.cycle, self.scope, self.headers = _NONE, _NONE, []
            self._serving = None
            if self._desk.is_stopping:
                self.loop.call_later(self._desk.linger_s, self._part)

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if self._desk.is_stopping:  # it was in the queue when we stopped listening
            self.shutdown()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn tells the last request only, which may wait behind the one that is being answered.
        if self._serving is not None and not self._serving.response_complete:
            self._serving.disconnected = True

    @override
    def shutdown(self) -> None:
        """End after what is under way; an idle connection not at once, for a request may be on its way."""
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_started and not cycle.response_complete:
            cycle.keep_alive = False
        self.loop.call_later(self._desk.linger_s, self._part)

    def _part(self) -> None:
        cycle: Any = self.cycle
        if not self.has_begun and (cycle is None or cycle.response_complete):
            self.transport.close()

    def late(self, now_s: float) -> None:
        """Give up a client that takes too long for a request, or has none."""
        cycle: Any = self.cycle
        if not self.has_begun:
            self.transport.close()
        elif (self.is_in_head and cycle is not None and not cycle.response_complete) or (
            isinstance(cycle, RequestContext) and not cycle.is_turn
        ):
            # It waits for us, too: for the answer before. That must not be cut off.
            self.deadline_s = now_s + REQUEST_S
        else:
            self.refuse(errors.too_slow(REQUEST_S))

    @override
    def refuse(self, refusal: Refusal) -> None:
        if self.is_deaf:
            return
        self.is_deaf, self.deadline_s = True, NEVER
        cycle: Any = self.cycle
        if self.is_in_head:
            if cycle is None or cycle.response_complete:
                self._say(refusal)
            else:
                self._last_words = refusal
        elif isinstance(cycle, RequestContext):
            cycle.keep_alive = False
            if cycle.is_turn:
                self._desk.refuse(cycle, refusal)
            else:
                cycle.refusal = refusal
        elif cycle.response_started or self.pipeline:
            self.transport.abort()  # no word of ours would be understood
        else:
            cycle.disconnected = True  # the application is told, and says nothing any more
            cycle.message_event.set()
            self._say(refusal)

    def _say(self, refusal: Refusal) -> None:
        self._last_words = None
        reply = self._reply()
        reply.keep_alive = False
        reply.whole(refusal.status, header_lines(refusal.headers()), refusal.body())

    def _close(self) -> None:
        if not self.is_deaf:
            self.transport.close()
            return
        # Closing while the client still sends would take our answer with it.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_CLOSE_LINGER_S, self.transport.abort)
