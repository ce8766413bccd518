"""HTTP/1.1 connections of clients, with a direct path for requests to models that skips ASGI.

uvicorn serves all other paths. See docs/adr/0021-gateway-request-path.md.
"""

import asyncio
import itertools
import re
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import httptools
from typing_extensions import override
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from gateway import errors
from gateway.apis import audio
from gateway.auth.access_control import AccessControl
from gateway.http import chat_socket
from gateway.http.handler_options import HandlerOptions
from gateway.http.request_context import (
    RequestContext,
    ResponseOwner,
    ResponseWriter,
    header_lines,
)
from gateway.http.request_framer import HEADERS_LIMIT, REQUEST_S, RequestFramer
from gateway.request import HttpRequest, RawHeaders
from gateway.routing.table import ServedModel
from gateway.state.table_cache import TableCache
from machinery.clock import NEVER
from machinery.http_server import MAX_HEAD_BYTES, REQUEST_ID
from machinery.websocket_frames import KEY_LENGTH, switching_protocols
from schemas.wire import headers as wire_headers
from schemas.wire.audio_limits import UPLOAD_BYTES
from schemas.wire.body_limits import LEAST_LIMIT
from schemas.wire.connections import SERVER_KEEP_ALIVE_S
from schemas.wire.errors import Refusal, RefusedError, body_too_large

if TYPE_CHECKING:  # it answers the requests
    from gateway.handler import InferenceHandler

_REQUEST_ID = wire_headers.REQUEST_ID.encode()
# Paths of requests with many prompts, whose limit is that of the gateway.
_MANY_PROMPTS = ("/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank", "/api/embed")
# Time for the client to read a refusal while it still sends.
_CLOSE_LINGER_S = 2.0
# The longest wait for the end of an idle TLS connection. TLS waits for the client's own end, which a client with a pool
# of idle connections may never send.
_TLS_CLOSE_S = 3.0
# The limit of unsent bytes above which a stream waits, as without TLS. The default with TLS is 512 KiB.
_TLS_HIGH_WATER_BYTES = 64 << 10
# uvicorn's initial value of its cycle and scope, which its type hints leave out.
_SLASHES = re.compile(rb"//+")
_NONE: Final[Any] = None
ModelOrAsgiRequest: TypeAlias = RequestContext | RequestResponseCycle
"""A request to a model, or the cycle in which uvicorn serves any other request."""


class ClientProtocol(RequestFramer, ResponseOwner):
    """Client connection that serves requests to models itself. The server calls `on_deadline` after `deadline_s`.

    uvicorn's own cycles are used for all other requests. Requests of both kinds wait in one queue, so that
    pipelined requests are answered in their order; uvicorn's `pipeline` stays empty.
    """

    __slots__ = (
        "_final_refusal",
        "_handler",
        "_is_tls",
        "_latest",
        "_serving",
        "_socket",
        "_unsent_bytes",
    )

    def __init__(
        self,
        handler: "InferenceHandler",
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(handler.clock, config, server_state, app_state, _loop)
        self._handler = handler
        self._latest: ModelOrAsgiRequest | None = None
        """The request whose bytes arrive, or arrived last; None while the connection is idle."""
        self._serving: RequestContext | None = None
        """The last request to a model that was started."""
        self._final_refusal: Refusal | None = None
        """Sent after the responses that are in progress."""
        self._unsent_bytes = 0
        """Bytes of the last response that waited for the client at the last deadline."""
        self._is_tls = False
        self._socket: chat_socket.ChatSocket | None = None
        """Serves the connection since its upgrade to a WebSocket."""

    @override
    def on_request_head(self) -> None:
        fields = dict(self.headers)
        if b"transfer-encoding" in fields and (codings := _other_codings(self.headers)):
            self.refuse(errors.unknown_transfer_coding(codings))
            return
        path, query = self.url, b""
        adapter = self._handler.adapters.get(path)
        if adapter is None:
            self.url = path = _usual_url(path)
            path, _, query = path.partition(b"?")
            if not path.startswith(b"/"):
                # An absolute URL, as sent to proxies. The host does not matter.
                path = httptools.parse_url(self.url).path or b"/"
            adapter = self._handler.adapters.get(path)
        if adapter is None or self.parser.get_method() != b"POST":
            self._pass_on(fields)
            return
        http_request = HttpRequest(
            path=path.decode("ascii"), query=query, headers=self.headers, fields=fields
        )
        context = RequestContext(self._handler, http_request, self._new_response(), adapter)
        previous, self._latest = self._latest, context
        self.is_in_head = False
        if _is_complete(previous):
            context.is_current = True
        else:
            self._enqueue(context, self.app)
        # Before the body is read: the headers are all that is kept of a stranger's request.
        refusal = self._handler.check_head(context)
        if refusal is not None:
            self.refuse(refusal)
        elif b"expect" in fields:
            context.expects_continue = fields[b"expect"].lower() == b"100-continue" and (
                not context.response.is_http_10
            )
            self._send_continue(context)

    @override
    def on_upgrade(self, rest: bytes) -> bool:
        if self.url.partition(b"?")[0] != chat_socket.PATH or self.parser.get_method() != b"GET":
            return False
        fields = dict(self.headers)
        if fields.get(b"upgrade", b"").lower() != b"websocket" or not _is_complete(self._latest):
            return False
        http_request = HttpRequest(
            path=chat_socket.CHAT.decode(), headers=self.headers, fields=fields
        )
        adapter = self._handler.adapters[chat_socket.CHAT]
        context = RequestContext(self._handler, http_request, self._new_response(), adapter)
        refusal = self._socket_refusal(context, rest)
        if refusal is not None:
            self.refuse(refusal)
            return True
        self._socket = chat_socket.ChatSocket(self, self._handler, self.headers, context.owner)
        # The connection stays counted here; its bytes go there.
        self.ignores_input, self.deadline_s = True, NEVER
        self.transport.set_protocol(self._socket)
        self.transport.write(switching_protocols(fields[b"sec-websocket-key"]))
        return True

    def _socket_refusal(self, context: RequestContext, rest: bytes) -> Refusal | None:
        """Return the refusal of a handshake; None if it is accepted."""
        fields = context.http_request.fields
        is_valid = len(fields.get(b"sec-websocket-key", b"")) == KEY_LENGTH
        if not is_valid or fields.get(b"sec-websocket-version") != b"13" or rest:
            return errors.no_websocket()
        if len(self.headers) > HEADERS_LIMIT:
            return errors.too_many_headers(HEADERS_LIMIT)
        if self.head_bytes > MAX_HEAD_BYTES:
            return errors.head_too_large(MAX_HEAD_BYTES)
        if self._handler.is_stopping:
            return errors.shutting_down()
        return self._handler.check_head(context)

    def _pass_on(self, fields: dict[bytes, bytes]) -> None:
        """Pass a request that is not to a model to the application."""
        host = fields.get(b"host", b"")
        if not self._handler.hosts.allows(host):
            self.refuse(errors.wrong_host(host.decode("latin-1")))
            return
        # Without a cycle uvicorn calls `_start_asgi_task`, which queues the request if necessary.
        self.cycle = _NONE
        self.pass_to_uvicorn()
        if self._handler.is_stopping:
            self.cycle.keep_alive = False

    def _new_response(self) -> ResponseWriter:
        """Return the writer of a response."""
        handler, common = self._handler, self.server_state.default_headers
        # uvicorn makes a new list, with a new date, every second.
        if common is not handler.common_headers:
            handler.set_common_headers(common)
        parser = self.parser
        is_http_10 = parser.get_http_version() == "1.0"
        keep_alive = parser.should_keep_alive() and not is_http_10 and not handler.is_stopping
        lines = handler.common_lines
        return ResponseWriter(self.transport, self.flow, self, lines, keep_alive, is_http_10)

    def _enqueue(self, request: ModelOrAsgiRequest, app: Any) -> None:
        self.flow.pause_reading()
        self.pipelined.append((request, app))

    def _send_continue(self, context: RequestContext) -> None:
        if context.expects_continue and context.is_current:
            context.expects_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    @override
    def on_body(self, body: bytes) -> None:
        latest = self._latest
        if not isinstance(latest, RequestContext):
            super().on_body(body)
        elif not self.ignores_input:
            self.is_in_trailer, self.head_bytes = False, 0
            if latest.add_body(body) > latest.body_limit:
                self.refuse(body_too_large(latest.body_limit).refusal)

    @override
    def on_partial_body(self) -> None:
        latest = self._latest
        if isinstance(latest, RequestContext):
            refusal = latest.hold(len(latest.body))
            if refusal is not None:
                self.refuse(refusal)

    @override
    def on_request_complete(self) -> None:
        latest = self._latest
        if isinstance(latest, RequestContext):
            latest.more_body = False
            refusal = latest.hold(len(latest.body), is_complete=True)
            if refusal is not None:
                self.is_in_head = False  # it answers this request, not the next one
                self.refuse(refusal)
            elif latest.is_current:
                self._start(latest, latest.take_body())
        elif latest is not None and not latest.response_complete:
            latest.more_body = False
            latest.message_event.set()

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        previous, self._latest = self._latest, cycle
        if _is_complete(previous):
            super()._start_asgi_task(cycle, app)
        else:
            self._enqueue(cycle, app)

    def _start_next(self) -> None:
        if self.transport.is_closing():
            return
        self._start_queued(*self.pipelined.pop(0))
        self.read_on()

    def _start_queued(self, request: ModelOrAsgiRequest, app: Any) -> None:
        if not isinstance(request, RequestContext):
            super()._start_asgi_task(request, app)
            return
        request.is_current = True
        if request.refusal is not None:
            self._handler.refuse(request, request.refusal)
        elif not request.more_body:
            self._start(request, request.take_body())
        else:
            self.deadline_s = self.clock.monotonic() + REQUEST_S
            self._send_continue(request)

    def _start(self, context: RequestContext, body: bytes) -> None:
        context.http_request.body, context.began_s = body, self.clock.monotonic()
        self._serving = context
        self._handler.start(context)

    @override
    def on_response_complete(self) -> None:
        # Not uvicorn's: one timer for each response costs more than a sweep over all connections.
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipelined:
            # Not now: a long pipeline of requests that are refused at once would be as deep a recursion.
            self.loop.call_soon(self._start_next)
        elif self._final_refusal is not None:
            self._send_refusal(self._final_refusal)
        elif not self.ignores_input and not self.has_begun:
            self.deadline_s = self.clock.monotonic() + SERVER_KEEP_ALIVE_S
            # An idle connection must not hold the last request.
            if self._serving is not self._latest:
                self.cycle, self.scope = _NONE, _NONE
            self.headers = []
            self._latest = self._serving = None
            if self._handler.is_stopping:
                self.loop.call_later(self._handler.linger_s, self._close_idle)

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        if self._is_tls:
            transport.set_write_buffer_limits(high=_TLS_HIGH_WATER_BYTES)
        limiter = self._handler.connections
        refused = limiter.admit(self, self.client[0] if self.client else "")
        if refused == "address":
            self._turn_away(errors.too_many_of_address(limiter.addresses.limit))
        elif refused == "full":
            self._turn_away(errors.too_many_connections())
        if self._handler.is_stopping:  # accepted from the queue after listening stopped
            self.shutdown()

    def _turn_away(self, refusal: Refusal) -> None:
        """Refuse a new connection without the wait for the client that other refusals have: it holds a descriptor."""
        self._send_refusal(refusal)
        self._end_tls(_CLOSE_LINGER_S)
        self.ignores_input, self.deadline_s = True, NEVER

    @property
    def is_serving(self) -> bool:
        """True while a request is answered."""
        if self._socket is not None:
            return self._socket.is_serving
        if self._serving is not None and not self._serving.response.is_complete:
            return True
        return not isinstance(self._latest, RequestContext) and not _is_complete(self._latest)

    @property
    def shed_order(self) -> tuple[bool, bool, float]:
        """Connections that are closing are closed first, then the longest idle ones, unfinished requests last."""
        return not self.transport.is_closing(), self.has_begun, self.deadline_s

    def shed(self) -> None:
        """Close the connection at once, to free its file descriptor."""
        self.transport.abort()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for request in (self._latest, *(request for request, _ in self.pipelined)):
            if isinstance(request, RequestContext) and request is not self._serving:
                request.free_body()
        self._handler.connections.leave(self)
        for context in (self._latest, self._serving):
            if isinstance(context, RequestContext) and not context.response.is_complete:
                self._handler.disconnect(context)

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        if self._serving is not None and not self._serving.response.is_complete:
            self._serving.pause()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        if self._serving is not None and not self._serving.response.is_complete:
            self._serving.resume()

    @override
    def shutdown(self) -> None:
        """Close after the requests in progress.

        An idle connection stays open for a moment: a request may be in transit.
        """
        if self._socket is not None:
            self._socket.shut_down()
            return
        latest = self._latest
        if isinstance(latest, RequestContext):
            if not latest.response.is_started:
                latest.response.keep_alive = False
        elif latest is not None and not latest.response_started:
            latest.keep_alive = False
        self.loop.call_later(self._handler.linger_s, self._close_idle)

    def _close_idle(self) -> None:
        if not self.has_begun and _is_complete(self._latest):
            self.transport.close()
            self._end_tls(_TLS_CLOSE_S)

    def _end_tls(self, seconds: float) -> None:
        """Abort a TLS connection that is being closed, unless its client ends it within `seconds`."""
        if self._is_tls:
            self.loop.call_later(seconds, self.transport.abort)

    def on_deadline(self, now_s: float) -> None:
        """Close a connection without a request, or refuse one that arrives too slowly."""
        latest = self._latest
        if not self.has_begun:
            # Close an idle connection. One whose client has not read all of a response is idle once
            # it reads no more.
            unsent_bytes = self.transport.get_write_buffer_size()
            if not unsent_bytes:
                self.transport.close()
                self._end_tls(_TLS_CLOSE_S)
            elif 0 < self._unsent_bytes <= unsent_bytes:
                self.transport.abort()
            else:
                self._unsent_bytes, self.deadline_s = unsent_bytes, now_s + SERVER_KEEP_ALIVE_S
        elif (self.is_in_head and not _is_complete(latest)) or (
            isinstance(latest, RequestContext) and not latest.is_current
        ):
            # The client waits too, for the previous response, which must not be cut off.
            self.deadline_s = now_s + REQUEST_S
        else:
            self.refuse(errors.too_slow(REQUEST_S))

    @override
    def refuse(self, refusal: Refusal) -> None:
        if self.ignores_input:
            return
        self.ignores_input, self.deadline_s = True, NEVER
        latest = self._latest
        if self.is_in_head:
            if _is_complete(latest):
                self._send_refusal(refusal)
            else:
                self._final_refusal = refusal
        elif isinstance(latest, RequestContext):
            latest.response.keep_alive = False
            if latest.is_current:
                self._handler.refuse(latest, refusal)
            else:
                latest.refusal = refusal
                latest.free_body()
        elif latest is None or latest.response_started or self.pipelined:
            self.transport.abort()  # the client could not attribute a response
        else:
            latest.disconnected = True  # tells the application, which then writes nothing
            latest.message_event.set()
            self._send_refusal(refusal)

    def _send_refusal(self, refusal: Refusal) -> None:
        self._final_refusal = None
        response = self._new_response()
        response.keep_alive = False
        response.whole(refusal.status, header_lines(refusal.headers()), refusal.body())

    @override
    def close_after_response(self) -> None:
        if not self.ignores_input:
            self.transport.close()
            self.ignores_input = True
            return
        # Closing while the client still sends would discard the response.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:  # TLS, which reads on until the client has read the end
            self.transport.close()
        self.loop.call_later(_CLOSE_LINGER_S, self.transport.abort)


def _usual_url(url: bytes) -> bytes:
    """Return a URL without doubled and trailing slashes in its path: clients join addresses and paths in all ways."""
    path, mark, query = url.partition(b"?")
    if not path.startswith(b"/"):
        return url
    return (_SLASHES.sub(b"/", path).rstrip(b"/") or b"/") + mark + query


def _other_codings(headers: RawHeaders) -> str:
    """Return all transfer codings, comma-separated, unless the only one is chunked (RFC 9112, 6.1)."""
    values = [value for name, value in headers if name == b"transfer-encoding"]
    codings = b",".join(values).decode("latin-1").lower()
    return "" if codings.strip() == "chunked" else codings


def _is_complete(request: ModelOrAsgiRequest | None) -> bool:
    """Return whether the request is answered, or there is none."""
    if isinstance(request, RequestContext):
        return request.response.is_complete
    return request is None or request.response_complete


class HeadCheck:
    """Checks heads, and gives each request its id."""

    def __init__(
        self, access: AccessControl, table_cache: TableCache, options: HandlerOptions
    ) -> None:
        self._access = access
        self._table_cache = table_cache
        self._hosts, self._origins = options.hosts, options.origins
        self._allowed_host = b""
        """The last `Host` that was allowed."""
        self._id_prefix = options.id_prefix.encode()
        self._count = itertools.count(1)
        self._max_body = options.max_body
        self.usual_body = min(options.max_body, LEAST_LIMIT)
        """Bytes of a body that needs no further check: every model takes as many."""

    def check(self, context: RequestContext) -> Refusal | None:
        """Return a refusal, or None if the body may be read."""
        http_request, access = context.http_request, self._access
        fields = http_request.fields
        id_ = fields.get(_REQUEST_ID)
        if not id_ or not REQUEST_ID.fullmatch(id_):
            id_ = b"%b-%x" % (self._id_prefix, next(self._count))
        http_request.request_id = id_
        if fields.get(b"host", b"") != self._allowed_host or b"origin" in fields:
            refusal = self._source_refusal(context)
            if refusal is not None:
                return refusal
        try:
            principal = access.identify(http_request.headers, fields)
        except RefusedError as error:
            return error.refusal
        if principal is not None:
            context.principal, context.limiter = principal, principal.limiter
        elif access.anonymous is not None:
            peer = context.response.transport.get_extra_info("peername")
            context.limiter = access.anonymous.of(peer[0] if isinstance(peer, tuple) else "")
        context.is_identified = True
        return self._body_refusal(context)

    def _source_refusal(self, context: RequestContext) -> Refusal | None:
        """Return the refusal of a request by its host or its web page; None if both are allowed."""
        fields = context.http_request.fields
        host, origin = fields.get(b"host", b""), fields.get(b"origin")
        if origin:
            context.response.common += header_lines(self._origins.headers(origin))
        if not self._hosts.allows(host):
            return errors.wrong_host(host.decode("latin-1"))
        self._allowed_host = host
        if origin and not self._origins.allows(origin):
            return errors.wrong_origin(origin.decode("latin-1"))
        return None

    def _body_refusal(self, context: RequestContext) -> Refusal | None:
        """Return the refusal of a body by what its headers say; None if it may be read."""
        fields = context.http_request.fields
        coding = fields.get(b"content-encoding")
        if coding and coding.lower() != b"identity":
            return errors.compressed(coding.decode("latin-1"))
        if context.http_request.path in audio.UPLOADS:
            context.body_limit = UPLOAD_BYTES
        else:
            # The model is not known before the body is read.
            largest = self._table_cache.table.body_limit
            is_limited = largest and context.http_request.path not in _MANY_PROMPTS
            context.body_limit = min(largest, self._max_body) if is_limited else self._max_body
        length = int(fields.get(b"content-length", b"0"))
        return body_too_large(context.body_limit).refusal if length > context.body_limit else None


def check_model_body(context: RequestContext, model: ServedModel) -> None:
    """Raise RefusedError if a complete body is larger than any that the model takes."""
    limit, http_request = model.body_limit, context.http_request
    if limit and len(http_request.body) > limit and http_request.path not in _MANY_PROMPTS:
        raise body_too_large(limit, model.name)
