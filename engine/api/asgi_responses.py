"""An answer that is not streamed as an ASGI response: it is sent as a whole, or refused.

One request for embeddings as an ASGI response: nothing is streamed, so it ends as a whole or is refused.

One request to count tokens as an ASGI response: it needs no slot, only a tokenizer's thread.

One generation as an ASGI response. Nothing is sent before the first token exists.

Until then a gateway may give the request to another replica without the client noticing; so a
refusal that comes late, such as a drain, is still a refusal with a status code.

A client that does not read makes `send` wait (uvicorn holds 64 KiB for it) and this process not grow:
its tokens queue up in the ticket meanwhile, at most `max_tokens` a choice.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.admission import Ticket
from engine.api import web
from engine.api.encoder import CompletionEncoder, ResponsesEncoder
from engine.api.generation_stream import ChoiceDelta, Deadline, GenerationStream
from engine.errors import Refusal, RefusedError
from engine.jobs import EmbeddingOutput
from engine.openai import embeddings, tokenization
from engine.openai.embeddings import EmbeddingRequest
from engine.openai.input_processor import GenerationChoice, InputProcessor
from engine.openai.request_body import GenerationRequest
from engine.openai.response_body import ResponseFormatter, TextOffset
from engine.openai.responses import ResponsesRequest
from engine.openai.tokenization import TokenizeRequest
from engine.service import Service


@dataclass(frozen=True, slots=True)
class WholeResponse:
    """Works on it for as long as the client is there."""

    service: Service
    make: Callable[[], Awaitable[bytes]]
    """Returns the body, or raises RefusedError; it is cancelled when the client leaves or its time is over."""
    arrived_s: float
    """When the request came, on the service's monotonic clock."""
    timeout_s: float | None
    """How long its client waits from then on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make it and send it."""
        await web.run_while_connected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = Response(await self._in_time(), media_type="application/json")
        except RefusedError as error:
            response = web.refusal_response(error.refusal)
        await response(scope, receive, send)

    async def _in_time(self) -> bytes:
        if self.timeout_s is None:
            return await self.make()
        deadline = Deadline(self.arrived_s + self.timeout_s, self.timeout_s)
        try:
            async with asyncio.timeout(deadline.at_s - self.service.clock.monotonic()):
                return await self.make()
        except TimeoutError:
            raise deadline.passed() from None


@dataclass(frozen=True, slots=True)
class EmbeddingResponse:
    """The request leaves its slot whichever way this ends."""

    service: Service
    request: EmbeddingRequest
    arrived_s: float
    """When it came, on the service's monotonic clock."""
    timeout_s: float | None = None
    """How long its client waits from then on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Embed and send."""
        answer = WholeResponse(self.service, self._body, self.arrived_s, self.timeout_s)
        await answer(scope, receive, send)

    async def _body(self) -> bytes:
        how = self.service.admit().ready.pooling
        asked, ticket = await self.service.enter_embedding(self.request)
        try:
            made = await ticket.next()
        finally:
            self.service.admission.leave(ticket)
        assert isinstance(made, EmbeddingOutput)
        assert how is not None  # else it had been refused
        return await asyncio.to_thread(embeddings.encode_response, self.request, how, asked, made)


@dataclass(frozen=True, slots=True)
class TokenizeResponse:
    """Counts for as long as the client is there."""

    service: Service
    asked: TokenizeRequest
    arrived_s: float
    """When it came, on the service's monotonic clock."""
    timeout_s: float | None = None
    """How long its client waits from then on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count and send."""
        answer = WholeResponse(self.service, self._body, self.arrived_s, self.timeout_s)
        await answer(scope, receive, send)

    async def _body(self) -> bytes:
        tokens = await self.service.tokens(self.asked.request)
        return tokenization.encode_response(self.asked, tokens, self.service.config.context_length)


AnyEncoder: TypeAlias = CompletionEncoder | ResponsesEncoder

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


@dataclass(frozen=True, slots=True)
class GenerationResponse:
    """The request leaves its slots whichever way this ends."""

    service: Service
    request: GenerationRequest
    arrived_s: float
    """When it came, on the service's monotonic clock."""
    timeout_s: float | None = None
    """How long its client waits from then on."""
    response: ResponsesRequest | None = None
    """If it came to `/v1/responses`, what its answer has to be worded with."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send, for as long as the client is there."""
        await web.run_while_connected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = None
        if self.timeout_s is not None:
            deadline = Deadline(self.arrived_s + self.timeout_s, self.timeout_s)
        try:
            processor = self.service.admit()
            choices, ticket = await self._enter(deadline)
        except RefusedError as error:
            await self._refused(error.refusal)(scope, receive, send)
            return
        telling = GenerationStream(self.service, choices, ticket, deadline)
        try:
            wording = self._wording(telling, processor)
            await self._respond(wording, scope, receive, send)
        finally:
            self.service.admission.leave(ticket)

    async def _enter(
        self, deadline: Deadline | None
    ) -> tuple[tuple[GenerationChoice, ...], Ticket]:
        if deadline is None:
            return await self.service.enter(self.request)
        try:
            async with asyncio.timeout(deadline.at_s - self.service.clock.monotonic()):
                return await self.service.enter(self.request)
        except TimeoutError:
            raise deadline.passed() from None

    def _refused(self, refusal: Refusal) -> Response:
        return web.refusal_response(
            refusal if self.response is None else self.response.told(refusal)
        )

    def _wording(self, telling: GenerationStream, processor: InputProcessor) -> AnyEncoder:
        if self.response is not None:
            return ResponsesEncoder.of(self.response, telling)
        return CompletionEncoder(self._envelope(telling, processor), telling, self.arrived_s)

    def _envelope(self, telling: GenerationStream, processor: InputProcessor) -> ResponseFormatter:
        request, kind = self.request, "chatcmpl" if self.request.is_chat else "cmpl"
        before = request.resumed
        return ResponseFormatter(
            id=before.id if before else self.service.response_id(telling.ticket, kind=kind),
            created=before.created if before else int(self.service.clock.now().timestamp()),
            request=request,
            fingerprint=processor.fingerprint,
            spell=processor.ready.codec.piece,
            offsets=tuple(TextOffset() for _ in telling.choices),
        )

    async def _respond(
        self, wording: AnyEncoder, scope: Scope, receive: Receive, send: Send
    ) -> None:
        telling = wording.telling
        try:
            # What another process had made may have ended the answer already.
            burst = [] if telling.is_over else await telling.burst()
            if not self.request.is_streamed:
                body = await _encode_whole(wording, burst)
                response = Response(body, media_type="application/json")
                await response(scope, receive, send)
                return
        except RefusedError as error:
            await self._refused(error.refusal)(scope, receive, send)
            return
        await _send_stream(wording, burst, send)


async def _encode_whole(wording: AnyEncoder, burst: list[ChoiceDelta]) -> bytes:
    told = list(burst)
    while not wording.telling.is_over:
        told += await wording.telling.burst()
    return wording.whole(told)


async def _send_stream(wording: AnyEncoder, burst: list[ChoiceDelta], send: Send) -> None:
    start: dict[str, Any] = {"type": "http.response.start", "status": 200}
    await send({**start, "headers": list(_STREAM_HEADERS)})
    telling, pending = wording.telling, wording.begin()
    try:
        while True:
            pending += wording.pieces(burst)
            if telling.is_over:
                break
            if pending:
                await send({"type": "http.response.body", "body": pending, "more_body": True})
            pending = b""
            burst = await telling.burst()
        pending += wording.last()
    except RefusedError as error:
        # The status is long gone. No [DONE]: the client must not take this for the end of the text.
        pending = wording.broken(error.refusal)
    await send({"type": "http.response.body", "body": pending, "more_body": False})
