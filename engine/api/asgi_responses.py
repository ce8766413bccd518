"""ASGI responses of the POST routes: generations, and bodies that are sent as a whole.

Each ends when the client disconnects or its deadline passes, and frees its slots however it ends. A generation sends
nothing before its first token exists (see app.py).

A client that does not read makes `send` wait (uvicorn buffers 64 KiB). Tokens wait in the ticket meanwhile, and
admission.py bounds the memory that they take in all tickets.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.api import web
from engine.api.encoder import CompletionEncoder, ResponsesEncoder
from engine.api.generation_stream import ChoiceDelta, Deadline, GenerationStream, within
from engine.api.link import FAILURE, RECORD, SEND_EVENTS
from engine.api.progress import ProgressReporter
from engine.openai import output_format
from engine.openai.input_processor import InputProcessor
from engine.openai.request_body import GenerationRequest
from engine.openai.response_body import Echo, ResponseFormatter, TextOffset
from engine.openai.responses import ResponsesRequest
from engine.service import Service
from engine.text.template_traits import TemplateTraits
from machinery.engine_link import Failure
from schemas.wire import headers
from schemas.wire.errors import Refusal, RefusedError
from schemas.wire.streams import WAITING

AnyEncoder: TypeAlias = CompletionEncoder | ResponsesEncoder

# A pause of a stream, such as one for memory that other requests have, after which it shows that it goes on.
QUIET_S = 20.0

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


@dataclass(frozen=True, slots=True)
class GenerationResponse:
    """Response of a chat, a completion or a request of the Responses API."""

    service: Service
    request: GenerationRequest
    arrived_s: float
    """Arrival of the request, on the service's monotonic clock."""
    deadline: Deadline | None
    response: ResponsesRequest | None = None
    """Set if the request came to `/v1/responses`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send until the client disconnects."""
        await web.run_while_connected(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            processor = self.service.admit()
            async with within(self.service, self.deadline):
                choices, ticket = await self.service.enter(self.request)
        except RefusedError as error:
            await self._refuse(error.refusal)(scope, receive, send)
            return
        stream = GenerationStream(self.service, choices, ticket, self.deadline)
        try:
            encoder = self._encoder(stream, processor)
            reporter = ProgressReporter.of(scope)
            is_whole = not self.request.is_streamed
            if reporter is not None and is_whole and encoder.recorder is not None:
                reporter.resume_records = encoder.recorder.interim
            warning = self._warning_headers(processor.ready.codec.traits)
            await self._send(encoder, warning, scope, receive, send)
        finally:
            self.service.admission.leave(ticket)

    def _refuse(self, refusal: Refusal) -> Response:
        if self.response is not None:
            refusal = self.response.rename_params(refusal)
        return web.refusal_response(refusal)

    def _encoder(self, stream: GenerationStream, processor: InputProcessor) -> AnyEncoder:
        if self.response is not None:
            return ResponsesEncoder.new(self.response, stream)
        return CompletionEncoder(self._formatter(stream, processor), stream, self.arrived_s)

    def _formatter(self, stream: GenerationStream, processor: InputProcessor) -> ResponseFormatter:
        request, kind = self.request, "chatcmpl" if self.request.is_chat else "cmpl"
        resumed = request.resumed
        return ResponseFormatter(
            id=resumed.id if resumed else self.service.response_id(stream.ticket, kind=kind),
            created=resumed.created if resumed else int(self.service.clock.now().timestamp()),
            request=request,
            fingerprint=processor.fingerprint,
            spell=processor.ready.codec.piece,
            offsets=tuple(TextOffset() for _ in stream.choices),
            echoes=tuple(Echo(choice.job.prompt, choice.echo) for choice in stream.choices),
        )

    async def _send(
        self,
        encoder: AnyEncoder,
        warning: dict[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        stream = encoder.stream
        try:
            # The tokens from another engine may have ended the answer already.
            deltas = [] if stream.is_over else await stream.burst()
            more = {**warning, **self._miss_header(stream)}
            if not self.request.is_streamed:
                body = await _encode_whole(encoder, deltas)
                response = Response(body, media_type="application/json", headers=more)
                await response(scope, receive, send)
                return
        except RefusedError as error:
            await self._refuse(error.refusal)(scope, receive, send)
            return
        await _send_stream(encoder, deltas, scope, send, more)

    def _miss_header(self, stream: GenerationStream) -> dict[str, str]:
        """Return the header that explains to a gateway why tokens of the prompt were read again."""
        job, cached_tokens = stream.choices[0].job, stream.usage.cached_tokens
        why = self.service.explain_miss(self.request, job, cached_tokens=cached_tokens)
        return {headers.CACHE_MISS: why} if why else {}

    def _warning_headers(self, traits: TemplateTraits) -> dict[str, str]:
        """Return the header that tells the client which parameters were left out; no header if there are none."""
        ignored = (*self.request.ignored, *output_format.ignored_by_template(self.request, traits))
        if not ignored:
            return {}
        for name in ignored:
            self.service.metrics.ignored_parameters.add(name)
        return {headers.WARNING: headers.format_warning(f"left out: {', '.join(ignored)}")}


async def _encode_whole(encoder: AnyEncoder, first: list[ChoiceDelta]) -> bytes:
    deltas = list(first)
    while not encoder.stream.is_over:
        deltas += await encoder.stream.burst()
    return encoder.full_body(deltas)


async def _send_stream(
    encoder: AnyEncoder,
    deltas: list[ChoiceDelta],
    scope: Scope,
    send: Send,
    more: Mapping[str, str],
) -> None:
    async def send_part(events: bytes, record: bytes | None) -> None:
        await send(_message(events, record, more_body=True))

    start: dict[str, Any] = {"type": "http.response.start", "status": 200}
    own = [(name.encode(), value.encode()) for name, value in more.items()]
    await send({**start, "headers": [*_STREAM_HEADERS, *own]})
    send_events = scope.get("state", {}).get(SEND_EVENTS, send_part)
    reporter, pending = ProgressReporter.of(scope), encoder.begin()
    # A gateway is told in a long pause that the engine advances.
    quiet_s = None if reporter is None else QUIET_S
    try:
        while True:
            pending += encoder.chunks(deltas)
            if encoder.stream.is_over:
                break
            if pending:
                await send_events(pending, encoder.record())
            pending = b""
            deltas = await encoder.stream.burst(quiet_s)
            if not deltas and reporter is not None and reporter.has_advanced():
                pending = WAITING
        end = pending + encoder.end()
        last = _message(end, encoder.record(), more_body=False)
    except RefusedError as error:
        # The status was sent already. No [DONE]: the client must not take this for the end of the text.
        last = _failed_message(encoder, error.refusal)
    await send(last)


def _message(events: bytes, record: bytes | None, *, more_body: bool) -> Message:
    message = {"type": "http.response.body", "body": events, "more_body": more_body}
    return message if record is None else {**message, RECORD: record}


def _failed_message(encoder: AnyEncoder, refusal: Refusal) -> Message:
    event = encoder.fail(refusal)
    message = {"type": "http.response.body", "body": event, "more_body": False}
    if encoder.recorder is not None:
        # This engine drains or has failed; any other refusal would be that of the next engine, too.
        is_own = refusal.type == "server_error" and refusal.code != "request_timeout"
        message[FAILURE] = Failure(refusal.message, b"" if is_own else event)
    return message


@dataclass(frozen=True, slots=True)
class WholeResponse:
    """Response that is sent as a whole."""

    service: Service
    make: Callable[[], Awaitable[bytes]]
    """Returns the body or raises RefusedError; cancelled when the client disconnects or its deadline passes."""
    deadline: Deadline | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make and send the body until the client disconnects."""
        await web.run_while_connected(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with within(self.service, self.deadline):
                body = await self.make()
            response = Response(body, media_type="application/json")
        except RefusedError as error:
            response = web.refusal_response(error.refusal)
        await response(scope, receive, send)
