"""Context of one request to a model, from its first byte to its last."""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.apis.adapter import ApiAdapter, ResponseTranslator
from gateway.auth.keyring import Principal
from gateway.forwarding.retry_state import RetryState
from gateway.http.cors import AllowedOrigins
from gateway.http.response_writer import ResponseWriter, header_lines
from gateway.request import HttpRequest, InferenceRequest, RawHeaders
from gateway.upstream.connection import Headers
from machinery.clock import NEVER, Clock
from schemas.wire import headers
from schemas.wire.errors import Refusal

_REQUEST_ID = headers.REQUEST_ID.encode()
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)


class RequestHandler(Protocol):
    """Answers requests to models."""

    clock: Clock
    adapters: Mapping[bytes, ApiAdapter]
    """API adapters by path."""
    origins: AllowedOrigins
    max_body: int
    is_stopping: bool
    """True once the gateway stops: the next response on each connection is its last."""
    linger_s: float
    """Seconds that an idle connection stays open once the gateway stops."""

    def next_id(self) -> bytes:
        """Return a new request id."""
        ...

    def common_headers(self, common: Headers) -> bytes:
        """Return the headers of every response, as they are written."""
        ...

    def serve(self, context: "RequestContext") -> Coroutine[Any, Any, None]:
        """Answer a complete request."""
        ...

    def refuse(self, context: "RequestContext", refusal: Refusal) -> None:
        """Answer a request with a refusal."""
        ...


@dataclass(slots=True, eq=False)
class RequestContext:
    """State of one request to a model."""

    http_request: HttpRequest
    response: ResponseWriter
    adapter: ApiAdapter
    more_body: bool = True
    body: bytes | bytearray = b""
    is_current: bool = False
    """True once all earlier requests on the connection are answered."""
    expects_continue: bool = False
    """True if the client waits for 100 Continue before it sends the body."""
    refusal: Refusal | None = None
    """A refusal that is sent as soon as earlier requests are answered."""
    task: asyncio.Task[None] | None = None
    cut_off_reason: Refusal | None = None
    """The reason if the gateway ends the request although the client is connected."""
    translator: ResponseTranslator | None = None
    """Translates the response; None passes it through."""
    request: InferenceRequest | None = None
    """Set once the body is parsed."""
    retry_state: RetryState = field(default_factory=RetryState)
    principal: Principal | None = None
    """The API key of the request once it is authenticated; None if keys are not required."""
    extra_headers: RawHeaders = ()
    """Response headers about the key's rates and the store."""
    model: str = "unknown"
    outcome: str = "client_gone"
    began_s: float = 0.0
    """Time at which the request was complete, by the gateway's clock."""
    first_s: float = 0.0
    """Time of the first event of a stream; 0 for other responses."""
    blocked_since_s: float = NEVER
    """Time since which the client has read nothing; infinite if it reads."""

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

    def take_body(self) -> bytes:
        """Return the whole body and drop it."""
        body, self.body = self.body, b""
        return body if isinstance(body, bytes) else bytes(body)

    def release(self) -> None:
        """Drop the request's data: an idle connection may keep this object for long."""
        self.request = self.translator = None
        self.body = self.http_request.body = b""

    def disconnect(self) -> None:
        """Stop serving the request, because its client is gone."""
        if self.task is not None and not self.response.is_gone:
            self.task.cancel()
        self.response.is_gone = True

    async def send_keep_alive(self) -> None:
        """Send a keep-alive event to a waiting streaming client; other responses have no form for it."""
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
        if self.response.piece(b": waiting\n\n"):
            await self.response.drained()

    def cut_off(self, why: Refusal) -> None:
        """End the request and tell the client the reason."""
        if self.task is not None and self.cut_off_reason is None:
            self.cut_off_reason = why
            self.response.keep_alive = self.response.keep_alive and self.response.is_started
            self.task.cancel()
