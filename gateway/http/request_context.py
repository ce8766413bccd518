"""One request to a model: its context from the first byte to the last, and its response's writer.

The response is written by hand, because uvicorn's writer costs more than all of routing.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway import errors
from gateway.apis.adapter import ApiAdapter, ResponseTranslator
from gateway.auth.keyring import Principal
from gateway.auth.rate_limits import RateLimiter
from gateway.forwarding.engine_stream import EngineStream
from gateway.forwarding.retry_state import ForwardResult, RetryState
from gateway.http.idempotency import KeptAnswer
from gateway.request import HttpRequest, InferenceRequest, RawHeaders, Turn
from gateway.routing.table import EngineEndpoint, ServedModel
from machinery.clock import NEVER
from machinery.http_chunks import CHUNK_END, SIZE_LINES
from schemas.wire import headers
from schemas.wire.body_limits import LEAST_LIMIT
from schemas.wire.errors import CANCELLED_STATUS, Refusal

if TYPE_CHECKING:  # it answers the requests
    from gateway.handler import InferenceHandler

_CLOSE_LINE = b"connection: close\r\n"
_REQUEST_ID = headers.REQUEST_ID.encode()
_REQUEST_ID_NAME = _REQUEST_ID + b": "
_ATTEMPTS_LINE = headers.ATTEMPTS.encode() + b": %d\r\n"
_RESUMED_LINE = headers.RESUMED.encode() + b": %d\r\n"
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)


def header_lines(fields: RawHeaders) -> bytes:
    """Return headers as they are written."""
    return b"".join([b"%b: %b\r\n" % field for field in fields])


def outcome_of(status: int) -> str:
    """Return the request outcome that a response status stands for."""
    if status < 400:
        return "ok"
    if status == CANCELLED_STATUS:
        return "cancelled"
    if status < 500 and status != 429:
        return "refused"
    return "unavailable" if status in (429, 503) else "failed"


class ResponseOwner(Protocol):
    """The connection of a response."""

    def on_response_complete(self) -> None:
        """Handle the end of a response."""
        ...

    def close_after_response(self) -> None:
        """Close the connection, whose last response has ended."""
        ...


class ResponseWriter(msgspec.Struct, eq=False):
    """Writes one response: started once at most, ended once at most. Writes nothing to a disconnected client."""

    transport: asyncio.Transport
    flow: FlowControl
    owner: ResponseOwner
    common: bytes = b""
    """Header lines of every response, such as the date."""
    keep_alive: bool = True
    is_http_10: bool = False
    status: int = 0
    is_streamed: bool = False
    """True if the response is sent event by event."""
    is_complete: bool = False
    is_gone: bool = False
    _head: bytes = b""

    @property
    def is_started(self) -> bool:
        """True once the status is sent, so that it cannot change."""
        return self.status != 0

    def whole(self, status: int, head: bytes, body: bytes) -> None:
        """Send a complete response. `head`: its header lines without the length."""
        self.status = status
        if not self.keep_alive:
            head += _CLOSE_LINE
        if not self.is_gone:
            end = b"content-length: %d\r\n\r\n" % len(body)
            self.transport.write(b"".join((STATUS_LINE[status], self.common, head, end, body)))
        if self.keep_alive and not self.is_complete:
            self.is_complete = True
            self.owner.on_response_complete()
        else:
            self._complete()

    def begin(self, status: int, head: bytes) -> None:
        """Begin a response of unknown length. Its head is sent with the first piece."""
        self.status, self.is_streamed = status, True
        if self.is_http_10:
            self.keep_alive = False  # the end of the connection ends the body
            self._head = self._begun(status, head) + b"\r\n"
        else:
            self._head = self._begun(status, head) + b"transfer-encoding: chunked\r\n\r\n"

    def piece(self, data: bytes) -> bool:
        """Send a piece; return whether the client reads too slowly."""
        if not data or self.is_gone:
            return False
        # Framed here without a coroutine, because this runs for each event.
        if not self.is_http_10:
            data = b"".join((SIZE_LINES[len(data)], data, CHUNK_END))
        if self._head:
            data, self._head = self._head + data, b""
        self.transport.write(data)
        return self.flow.write_paused

    def chunk_writer(self) -> Callable[[bytes], object] | None:
        """Return the function that sends chunks of an open response whose head is sent; None if it takes no chunks."""
        if self.is_http_10 or self._head or self.is_gone or not self.status:
            return None
        return self.transport.write

    async def drained(self) -> None:
        """Wait until the client reads again."""
        await self.flow.drain()

    def end(self, data: bytes = b"", trailers: bytes = b"") -> None:
        """Send the last piece and end the response. `trailers`: header lines; HTTP/1.0 has none."""
        if not self.is_gone:
            framed = self._framed(data) if data else b""
            last = b"" if self.is_http_10 else b"0\r\n%b\r\n" % trailers
            self.transport.write(self._head + framed + last)
        self._complete()

    def unsent_bytes(self) -> int:
        """Return the bytes that wait for the client to read."""
        return self.transport.get_write_buffer_size()

    def abort(self) -> None:
        """Abort the connection, so that the client sees an incomplete response."""
        self.transport.abort()

    def _framed(self, data: bytes) -> bytes:
        return data if self.is_http_10 else b"".join((SIZE_LINES[len(data)], data, CHUNK_END))

    def _begun(self, status: int, head: bytes) -> bytes:
        return STATUS_LINE[status] + self.common + head + (b"" if self.keep_alive else _CLOSE_LINE)

    def _complete(self) -> None:
        if self.is_complete:
            return
        self.is_complete = True
        if not self.keep_alive and not self.is_gone:
            self.owner.close_after_response()
        self.owner.on_response_complete()


class RequestContext(msgspec.Struct, eq=False):
    """State of one request to a model."""

    handler: "InferenceHandler"
    http_request: HttpRequest
    response: ResponseWriter
    adapter: ApiAdapter
    more_body: bool = True
    body: bytes | bytearray = b""
    body_limit: int = LEAST_LIMIT
    """Bytes that the body may have, by the head of the request."""
    is_current: bool = False
    """True once all earlier requests on the connection are answered."""
    expects_continue: bool = False
    """True if the client waits for 100 Continue before it sends the body."""
    refusal: Refusal | None = None
    """A refusal that is sent as soon as earlier requests are answered."""
    task: asyncio.Task[None] | None = None
    """The task of a request that waits, for a slot, a replica or another engine; nearly always None."""
    stream: EngineStream | None = None
    """The stream that is passed through."""
    cut_off_reason: Refusal | None = None
    """The reason if the gateway ends the request although the client is connected."""
    translator: ResponseTranslator | None = None
    """Translates the response; None passes it through."""
    request: InferenceRequest | None = None
    """Set once the body is parsed."""
    retry_state: RetryState = msgspec.field(default_factory=RetryState)
    principal: Principal | None = None
    """The API key of the request once it is identified; None if keys are not required."""
    limiter: RateLimiter | None = None
    """Limits of the key, or of a client without one, once it is identified; None: there are none."""
    is_identified: bool = False
    """True once host, origin and key are checked. The journal has no entries of other requests: strangers could push
    out its history."""
    is_admitted: bool = False
    """True once the limits of the key or the client are checked and the request is counted."""
    limiters: tuple[RateLimiter, ...] = ()
    """Limits under which the request is counted."""
    extra_headers: RawHeaders = ()
    """Response headers about rates and the store."""
    turn: Turn | None = None
    """The state of a request for a response, once it is read."""
    kept_answer: KeptAnswer | None = None
    """The place of its answer under its idempotency key; None without one."""
    mirrored: ServedModel | None = None
    """The model, if copies of its requests go to a mirror."""
    held_bytes: int = 0
    """Bytes of its body that are counted in the memory of bodies."""
    model: str = "unknown"
    outcome: str = "client_gone"
    began_s: float = 0.0
    """Time at which the request was complete, by the gateway's clock."""
    first_s: float = 0.0
    """Time of the first event of a stream; 0 for other responses."""
    blocked_since_s: float = NEVER
    """Time since which the client has read nothing; infinite if it reads."""
    unsent_bytes: int = 0
    """Bytes that waited for the client at the last look."""

    def add_body(self, piece: bytes) -> int:
        """Add a part of the body and return the length so far."""
        # Most bodies arrive in one piece, which needs no copy.
        if not self.body:
            self.body = piece
        elif isinstance(self.body, bytearray):
            self.body += piece
        else:
            self.body = bytearray(self.body) + piece
        return len(self.body)

    @property
    def owner(self) -> str:
        """The identity of its API key; empty without one."""
        return "" if self.principal is None else self.principal.identity

    def hold(self, size: int, *, is_complete: bool = False) -> Refusal | None:
        """Count so many bytes of the body until the request has ended. Return a refusal if there is no room."""
        memory = self.handler.body_memory
        if is_complete and size <= memory.SMALL:
            size = 0
        if size < self.held_bytes:
            memory.free(self.owner, self.held_bytes - size)
        elif size > self.held_bytes and not memory.take(self.owner, size - self.held_bytes):
            return errors.too_many_bodies(memory.limit, memory.share)
        self.held_bytes = size
        return None

    def free_body(self) -> None:
        """Drop the body, and count it no more."""
        self.body = self.http_request.body = b""
        if self.held_bytes:
            self.handler.body_memory.free(self.owner, self.held_bytes)
            self.held_bytes = 0

    def take_body(self) -> bytes:
        """Return the whole body and drop it."""
        body, self.body = self.body, b""
        return body if isinstance(body, bytes) else bytes(body)

    def on_result(self, result: ForwardResult) -> None:
        """Answer with the first response of an engine, or with a refusal."""
        self.handler.on_result(self, result)

    def wait_for(self, result: Coroutine[Any, Any, ForwardResult]) -> None:
        """Await the result in a task."""
        self.handler.wait_for(self, result)

    def head(self, passed: bytes, endpoint: EngineEndpoint) -> bytes:
        """Return the header lines of a response of an engine; `passed` are the engine's."""
        return b"".join(
            (
                passed,
                _REQUEST_ID_NAME,
                self.http_request.request_id,
                b"\r\n",
                endpoint.lines,
                _ATTEMPTS_LINE % self.retry_state.started,
                self.resumed_line(),
                header_lines(self.extra_headers) if self.extra_headers else b"",
            )
        )

    def resumed_line(self) -> bytes:
        """Return the header line, or the trailer of a stream, that tells how often it continued on another engine."""
        resumptions = self.retry_state.resumptions
        return _RESUMED_LINE % resumptions if resumptions else b""

    def release(self) -> None:
        """Drop the request's data: an idle connection may keep this object for long."""
        self.request = self.translator = self.stream = self.mirrored = None
        self.free_body()
        self.retry_state.client = None

    def pause(self) -> None:
        """Read no more from the engine, because the client reads too slowly."""
        self.blocked_since_s = self.handler.clock.monotonic()
        if self.stream is not None:
            self.stream.pause()

    def resume(self) -> None:
        """Read from the engine again."""
        self.blocked_since_s = NEVER
        if self.stream is not None:
            self.stream.resume()

    async def send_keep_alive(self, note: str) -> None:
        """Send a keep-alive event, a comment, to a waiting streaming client; other responses have no form for it."""
        if self.request is None or not self.request.is_streamed:
            return
        if not self.response.is_started:
            # The status is sent here, so later failures are reported as an event.
            head = [
                *_STREAM_HEADERS,
                (_REQUEST_ID, self.http_request.request_id),
                *self.extra_headers,
            ]
            if self.translator is not None:
                head = self.translator.begin(head)
            if not dict(head).get(b"content-type", b"").startswith(b"text/event-stream"):
                return
            self.response.begin(200, header_lines(head))
        if self.response.piece(f": {note}\n\n".encode()):
            await self.response.drained()
