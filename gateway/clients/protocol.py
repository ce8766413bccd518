"""uvicorn's HTTP connection, but for requests to models: those are answered without ASGI, which costs too much.

Everything else about a connection (keep-alive, pipelining, other paths) stays uvicorn's. See docs/adr/0020-the-hot-path.md.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, cast

from typing_extensions import override
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway import errors
from gateway.asks import Heard
from gateway.clients.reply import Reply
from gateway.clients.surface import Surface
from gateway.clients.visit import Visit
from gateway.errors import Refusal
from machinery.clock import Clock
from machinery.web import REQUEST_ID

# Clients send some hundred bytes of headers; cookies and tokens may make it a few thousand.
_HEAD_LIMIT = 64 << 10
_HEADERS_LIMIT = 100
# After a refusal of what is still being sent: for the client to read it before the connection breaks.
_LINGER_S = 2.0
_NEVER = float("inf")


class Desk(Protocol):
    """Who answers requests to models."""

    clock: Clock
    surfaces: Mapping[bytes, Surface]
    """By path."""
    max_body: int

    def next_id(self) -> bytes:
        """Return a request id."""
        ...

    def serve(self, visit: Visit, surface: Surface) -> Coroutine[Any, Any, None]:
        """Answer the request to the end."""
        ...

    def refuse(self, visit: Visit, surface: Surface, refusal: Refusal) -> None:
        """Answer with a refusal."""
        ...


class ClientProtocol(HttpToolsProtocol):
    """One client's connection."""

    def __init__(
        self,
        desk: Desk,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._desk = desk
        self._surface: Surface | None = None
        self._head_bytes = 0
        self._is_in_head = True
        self._is_deaf = False
        self.receiving_since_s = desk.clock.monotonic()
        """Since when the client owes us the rest of a request; never, if it does not."""

    @override
    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._is_in_head:
            if not self._head_bytes:
                self.receiving_since_s = self._desk.clock.monotonic()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > _HEAD_LIMIT:
            self._refuse_head(errors.head_too_large(_HEAD_LIMIT))

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._surface = None

    @override
    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes = False, 0
        path, _, query = self.url.partition(b"?")
        surface = self._desk.surfaces.get(path)
        if surface is None or self.parser.get_method() != b"POST":
            super().on_headers_complete()
            return
        self._surface = surface
        before = self.cycle
        visit = self._visit(path, query)
        self.cycle = cast("Any", visit)  # it has what a cycle is asked for
        if before is None or before.response_complete:  # type: ignore[redundant-expr]  # None at first
            visit.is_turn = True
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))
        if self._declared(visit.heard) > self._desk.max_body:
            self._refuse_body(visit, errors.too_large(self._desk.max_body).refusal)
        elif self.expect_100_continue and visit.is_turn:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    @override
    def on_body(self, body: bytes) -> None:
        if self._surface is None:
            super().on_body(body)
            return
        visit = cast("Visit", self.cycle)
        if visit.response_complete:
            return
        visit.body += body
        if len(visit.body) > self._desk.max_body:
            self._refuse_body(visit, errors.too_large(self._desk.max_body).refusal)

    @override
    def on_message_complete(self) -> None:
        self._is_in_head, self.receiving_since_s = True, _NEVER
        if self._surface is None:
            super().on_message_complete()
            return
        visit = cast("Visit", self.cycle)
        visit.more_body = False
        if visit.is_turn and not visit.response_complete:
            self._start(visit)

    @override
    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if not isinstance(cycle, Visit):
            super()._start_asgi_task(cycle, app)
            return
        cycle.is_turn = True
        if not cycle.more_body:
            self._start(cycle)

    def _start(self, visit: Visit) -> None:
        visit.heard.body = bytes(visit.body)
        visit.began_s = self._desk.clock.monotonic()
        surface = self._desk.surfaces[visit.heard.path.encode("ascii")]
        visit.task = self.loop.create_task(self._desk.serve(visit, surface))
        self.tasks.add(visit.task)
        visit.task.add_done_callback(self.tasks.discard)

    def _visit(self, path: bytes, query: bytes) -> Visit:
        version = self.parser.get_http_version()
        reply = Reply(
            transport=self.transport,
            flow=self.flow,
            common=self.server_state.default_headers,
            on_complete=self.on_response_complete,
            on_last=self._close,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            is_http_10=version == "1.0",
        )
        given = next((value for name, value in self.headers if name == b"x-request-id"), b"")
        heard = Heard(
            path=path.decode("ascii"),
            query=query,
            headers=self.headers,
            request_id=given if REQUEST_ID.fullmatch(given) else self._desk.next_id(),
        )
        return Visit(heard=heard, reply=reply)

    def late(self, now_s: float, patience_s: float) -> None:
        """Give up a client that takes longer than this for a request."""
        if self.receiving_since_s >= now_s - patience_s or self._is_deaf:
            return
        if self._is_in_head and not self._head_bytes:
            self.transport.close()  # it connected, and never said anything
        elif self._is_in_head or self._surface is None:
            self._refuse_head(errors.too_slow(patience_s))
        else:
            self._refuse_body(cast("Visit", self.cycle), errors.too_slow(patience_s))

    def _declared(self, heard: Heard) -> int:
        declared = heard.header(b"content-length")
        return int(declared) if declared.isdigit() else 0

    def _refuse_body(self, visit: Visit, refusal: Refusal) -> None:
        """Answer before the request is all here; what still comes is thrown away."""
        visit.keep_alive = False
        if visit.is_turn and self._surface is not None:
            self._linger()
            self._desk.refuse(visit, self._surface, refusal)
        else:
            self.transport.abort()  # an answer that is under way before it would be garbled

    def _refuse_head(self, refusal: Refusal) -> None:
        """Answer what never became a request."""
        if self.cycle is not None and not self.cycle.response_complete:  # type: ignore[redundant-expr]  # None at first
            self.transport.abort()
            return
        self._linger()
        reply = Reply(
            transport=self.transport,
            flow=self.flow,
            common=self.server_state.default_headers,
            on_complete=self._close,
            on_last=self._close,
            keep_alive=False,
        )
        reply.whole(refusal.status, [(b"content-type", b"application/json")], refusal.body())

    def _close(self) -> None:
        if not self._is_deaf:
            self.transport.close()
        elif self.transport.can_write_eof():
            self.transport.write_eof()

    def _linger(self) -> None:
        """Hear nothing more, and close in a moment: closing at once would take our answer with it."""
        self._is_deaf, self.receiving_since_s = True, _NEVER
        self.loop.call_later(_LINGER_S, self.transport.abort)
