"""One client's request to a model, from its first byte to its last, as uvicorn's protocol carries it along."""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.apis.adapter import ApiAdapter, ResponseTranslator
from gateway.auth.keyring import Principal
from gateway.errors import Refusal
from gateway.forwarding.retry_state import RetryState
from gateway.http.cors import AllowedOrigins
from gateway.http.response_writer import ResponseWriter, header_lines
from gateway.request import HttpRequest, InferenceRequest, RawHeaders
from gateway.upstream.connection import Headers
from machinery.clock import Clock

_NEVER = float("inf")
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)


class RequestHandler(Protocol):
    """Who answers requests to models."""

    clock: Clock
    surfaces: Mapping[bytes, ApiAdapter]
    """By path."""
    origins: AllowedOrigins
    max_body: int
    is_stopping: bool
    """Whether the gateway stops: the next answer on each connection is its last."""
    linger_s: float
    """How long an idle connection stays open once the gateway stops."""

    def next_id(self) -> bytes:
        """Return a request id."""
        ...

    def stamp(self, common: Headers) -> bytes:
        """Return the headers of every response, as they are written."""
        ...

    def serve(self, visit: "RequestContext") -> Coroutine[Any, Any, None]:
        """Answer the request to the end."""
        ...

    def refuse(self, visit: "RequestContext", refusal: Refusal) -> None:
        """Answer with a refusal."""
        ...


@dataclass(slots=True, eq=False)
class RequestContext:
    """It has what uvicorn's protocol asks of its own request cycles, and is put in their place."""

    heard: HttpRequest
    reply: ResponseWriter
    surface: ApiAdapter
    more_body: bool = True
    body: bytes | bytearray = b""
    is_turn: bool = False
    """Whether what was asked before on this connection has been answered."""
    expects: bool = False
    """Whether the client sends no body before it is asked to."""
    refusal: Refusal | None = None
    """What to answer when it is its turn, if that is certain already."""
    task: asyncio.Task[None] | None = None
    ending: Refusal | None = None
    """Why it is cut off although its client is there."""
    telling: ResponseTranslator | None = None
    """How its answer is told."""
    ask: InferenceRequest | None = None
    """What it asks, as soon as it is read."""
    trail: RetryState = field(default_factory=RetryState)
    holder: Principal | None = None
    """Whose key it is, from the moment it is let in; None where keys are not asked for."""
    more: RawHeaders = ()
    """Headers of the answer, about the key and the store."""
    model: str = "unknown"
    outcome: str = "client_gone"
    began_s: float = 0.0
    """When the request was all here, by the gateway's clock."""
    first_s: float = 0.0
    """When the first event of a stream was there; 0 of other answers."""
    sending_since_s: float = _NEVER
    """Since when the client has been reading nothing."""

    def take(self, piece: bytes) -> int:
        """Take a part of the body; return how long it is by now."""
        # Most bodies come in one piece, which need not be copied.
        if not self.body:
            self.body = piece
        elif isinstance(self.body, bytearray):
            self.body += piece
        else:
            self.body = bytearray(self.body) + piece
        return len(self.body)

    def whole_body(self) -> bytes:
        """Return all that was taken, and keep it no longer."""
        body, self.body = self.body, b""
        return body if isinstance(body, bytes) else bytes(body)

    def forget(self) -> None:
        """Keep nothing of what was asked: the connection keeps this, and may be idle for long."""
        self.ask = self.telling = None
        self.body = self.heard.body = b""

    @property
    def response_started(self) -> bool:
        return self.reply.is_started

    @property
    def response_complete(self) -> bool:
        return self.reply.is_complete

    @property
    def keep_alive(self) -> bool:
        return self.reply.keep_alive

    @keep_alive.setter
    def keep_alive(self, value: bool) -> None:
        self.reply.keep_alive = value

    @property
    def disconnected(self) -> bool:
        return self.reply.is_gone

    @disconnected.setter
    def disconnected(self, value: bool) -> None:
        if self.task is not None and value and not self.reply.is_gone:
            self.task.cancel()
        self.reply.is_gone = value

    @property
    def message_event(self) -> "RequestContext":
        return self

    def set(self) -> None:
        """Do nothing: what uvicorn tells its cycles this way, we are told otherwise."""

    async def tick(self) -> None:
        """Tell a client that waits for a stream that it is not forgotten; what is no stream has no words for that."""
        if self.ask is None or not self.ask.is_streamed:
            return
        if not self.reply.is_started:
            # From here on there is no status to refuse with; what goes wrong then is told as an event.
            headers = [*_STREAM_HEADERS, (b"x-request-id", self.heard.request_id), *self.more]
            if self.telling is not None:
                headers = self.telling.begin(headers)
            if not dict(headers).get(b"content-type", b"").startswith(b"text/event-stream"):
                return
            self.reply.begin(200, header_lines(headers))
        if self.reply.piece(b": waiting\n\n"):
            await self.reply.drained()

    def cut(self, why: Refusal) -> None:
        """End it, and tell the client why."""
        if self.task is not None and self.ending is None:
            self.ending = why
            self.reply.keep_alive = self.reply.keep_alive and self.reply.is_started
            self.task.cancel()
