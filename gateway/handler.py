"""Handler of requests to models: admit, parse, forward, answer, record.

A request that goes well is a chain of callbacks, from the client's last byte to the engine's. A task begins only when
it must wait, for a slot, a replica or another engine.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from typing_extensions import override

from gateway import errors
from gateway.apis.adapter import ApiAdapter, ModelMissingError, ResponseTranslator
from gateway.apis.openai import with_model
from gateway.auth.access_control import AccessControl
from gateway.auth.rate_limits import RateLimiter
from gateway.canonical_prompts import canonicalize
from gateway.forwarding.engine_stream import EngineStream, StreamReceiver
from gateway.forwarding.forwarder import Forwarder
from gateway.forwarding.mirror import Mirror
from gateway.forwarding.retry_state import ForwardResult, WholeResponse
from gateway.http import idempotency
from gateway.http.handler_options import HandlerOptions
from gateway.http.idempotency import IdempotencyTable
from gateway.http.protocol import HeadCheck, check_model_body
from gateway.http.request_context import RequestContext, header_lines, outcome_of
from gateway.request import JSON, InferenceRequest
from gateway.responses.stateful import PATH, StatefulResponses
from gateway.routing.default_model import choose_default
from gateway.telemetry.recorder import RequestRecorder
from gateway.upstream.call import BrokenResponseError, Headers
from gateway.upstream.response_head import list_lines
from schemas.wire import headers as wire_headers
from schemas.wire.errors import (
    CANCELLED_STATUS,
    Refusal,
    RefusedError,
    cancelled,
)
from schemas.wire.streams import WAITING

# A request may be in transit on a connection that looks idle.
IDLE_LINGER_S = 1.0
# The routing table may be out of date because the store has been unreachable for a while.
_STALE = (wire_headers.STORE.encode(), wire_headers.STORE_STALE.encode())
_REQUEST_ID = wire_headers.REQUEST_ID.encode()
_TRACE_PARENT = wire_headers.TRACE_PARENT.encode()
_ATTEMPTS = wire_headers.ATTEMPTS.encode()
_CANONICAL = wire_headers.CANONICAL.encode()

log = logging.getLogger(__name__)


class InferenceHandler:
    """Answers every request to a model."""

    def __init__(
        self,
        forwarder: Forwarder,
        adapters: Mapping[bytes, ApiAdapter],
        access: AccessControl,
        recorder: RequestRecorder,
        options: HandlerOptions,
        responses: StatefulResponses,
    ) -> None:
        self._forwarder = forwarder
        self._staleness = forwarder.table_cache.staleness
        self._access = access
        self._recorder = recorder
        self.clock = forwarder.clock
        self.adapters = adapters
        self.max_body = options.max_body
        self.body_memory = options.body_memory
        self.connections = options.connections
        self.hosts = options.hosts
        self._head_check = HeadCheck(access, forwarder.table_cache, options)
        self._default_model, self._rename = options.default_model, options.rename
        self._store_wait_s, self._store_wait_limit = options.store_wait_s, options.store_wait_limit
        self.responses = responses
        self._awaits_store = True
        """False once there was a routing table."""
        self.idempotency = IdempotencyTable(self.clock)
        self.mirror = Mirror(forwarder, with_model, options.draw, options.count_mirrored)
        self.is_stopping = False
        """True once the gateway stops: the next response on each connection is its last."""
        self.linger_s = IDLE_LINGER_S
        """Seconds that an idle connection stays open once the gateway stops."""
        self.common_headers: Headers = []
        """The headers of every response, such as the date."""
        self.common_lines = b""
        """The same as they are written."""
        self.contexts: set[RequestContext] = set()

    def running(self) -> tuple[RequestContext, ...]:
        """Return the requests that are being answered."""
        return tuple(self.contexts)

    def set_common_headers(self, common: Headers) -> None:
        """Change the headers of every response, such as the date."""
        self.common_headers, self.common_lines = common, header_lines(common)

    def check_head(self, context: RequestContext) -> Refusal | None:
        """Check a request whose headers are complete, and give it an id; return None if its body may be read."""
        return self._head_check.check(context)

    def start(self, context: RequestContext) -> None:
        """Answer a complete request of an identified client, now or later; its arrival is `context.began_s`."""
        self.contexts.add(context)
        http_request, limiter = context.http_request, context.limiter
        try:
            if self._recorder.tracer is not None or _TRACE_PARENT in http_request.fields:
                self._recorder.begin(context)
            if limiter is not None:
                if limiter.is_limited:
                    self._admit(context, (limiter,))
                else:
                    limiter.in_flight += 1
                    limiter.requests_used += 1
                    context.limiters = (limiter,)
            context.is_admitted = True
            key = http_request.fields.get(idempotency.HEADER)
            if key is not None and self.idempotency.replay(context, key):
                context.outcome = outcome_of(context.response.status)
                self.finish(context)
                return
            if self._awaits_store and self._is_unsynced():
                self.run(context, self._start_synced(context))
                return
            self.forward(context)
        except RefusedError as error:
            self._refuse(context, error.refusal)
        except Exception as error:  # noqa: BLE001 - the client still gets an answer
            self.fail(context, error)

    def forward(self, context: RequestContext) -> None:
        """Parse an admitted request and forward it. Raises RefusedError."""
        adapter, http_request = context.adapter, context.http_request
        if (
            http_request.path == PATH
            and context.turn is None
            and self.responses.begin(self, context)
        ):
            return
        if context.began_s > self._staleness.fresh_until_s and not context.extra_headers:
            context.extra_headers = (_STALE,)
        if len(http_request.body) > self._head_check.usual_body:
            # Check key and size before a large body is translated. Raises RefusedError.
            name = context.adapter.find_model(context.http_request.body)
            model = self._forwarder.table_cache.table.models.get(name)
            if model is not None:
                self._allow(context, name)
                check_model_body(context, model)
        try:
            request, context.translator = adapter.read(http_request)
        except ModelMissingError:
            self._set_default_model(context)
            request, context.translator = adapter.read(http_request)
        context.request, http_request.body = request, b""
        self._admit_model(context, request)
        if request.is_unload and context.model == request.model:
            self._confirm(context)
            return
        self._canonicalize(context, request)
        self._forwarder.start(request, context.retry_state, context, context.began_s)
        if context.mirrored is not None:
            self.mirror.offer(request, context.mirrored)

    def _confirm(self, context: RequestContext) -> None:
        """Answer a request that was done without an engine."""
        assert context.translator is not None
        headers = [
            (b"content-type", b"application/json"),
            (_REQUEST_ID, context.http_request.request_id),
            *context.extra_headers,
        ]
        status, headers, body = context.translator.whole(200, headers, b"")
        context.outcome = "ok"
        context.response.whole(status, header_lines(headers), body)
        self.finish(context)

    def _canonicalize(self, context: RequestContext, request: InferenceRequest) -> None:
        """Make the prompt canonical before its prefix is looked up here and at engines, and tell the client."""
        served = self._forwarder.table_cache.table.models.get(request.model)
        if served is None or served.routing.canonical_prompts == "Off":
            return
        rules = canonicalize(request)
        if rules:
            line = (_CANONICAL, ", ".join(rules).encode())
            context.extra_headers = (*context.extra_headers, line)
            log.debug(
                "prompt made canonical",
                extra={"request_id": request.request_id.decode("ascii"), "rules": rules},
            )

    def _is_unsynced(self) -> bool:
        """Return whether there is no routing table since the start. Raises RefusedError: too many wait for it."""
        self._awaits_store = not self._forwarder.table_cache.is_synced
        if self._awaits_store and len(self.contexts) > self._store_wait_limit:
            raise RefusedError(errors.not_synced())
        return self._awaits_store

    async def _start_synced(self, context: RequestContext) -> None:
        """Wait for the first routing table, then forward the request, or refuse it."""
        table_cache = self._forwarder.table_cache
        until_s = context.began_s + self._store_wait_s
        while not table_cache.is_synced and (left_s := until_s - self.clock.monotonic()) > 0:
            await table_cache.changed(within_s=left_s)
        context.task = None  # from here on as without the wait
        self.forward(context)

    def on_result(self, context: RequestContext, result: ForwardResult) -> None:
        """Answer with the first response of an engine, or with a refusal."""
        try:
            if type(result) is WholeResponse and not context.response.status:
                status, body = result.status, result.body
                if status < 300 and context.turn is not None and context.turn.is_stored:
                    self.run(context, self.responses.store_whole(self, context, result))
                    return
                context.outcome = "ok" if status < 400 else outcome_of(status)
                if context.translator is None:
                    head = context.head(result.passed, result.endpoint)
                else:
                    context.translator.take_wait(context.retry_state.queued_s)
                    headers = list_lines(context.head(result.passed, result.endpoint))
                    status, headers, body = context.translator.whole(status, headers, body)
                    head = header_lines(headers)
                if context.kept_answer is not None:
                    self.idempotency.complete(context.kept_answer, status, head, body)
                context.response.whole(status, head, body)
            elif isinstance(result, EngineStream):
                self._begin_stream(result, context)
                return
            elif isinstance(result, WholeResponse):
                self.break_off(context, errors.engine_refusal(result.status, result.body))
            else:
                self.break_off(context, result)
        except Exception as error:  # noqa: BLE001 - the client still gets an answer
            self.fail(context, error)
        else:
            self.finish(context)

    def wait_for(self, context: RequestContext, result: Coroutine[Any, Any, ForwardResult]) -> None:
        """Await the result of a request in a task."""
        self.run(context, self._wait(context, result))

    def run(self, context: RequestContext, work: Coroutine[Any, Any, None]) -> None:
        """Do what a request waits for, in a task."""
        context.task = asyncio.get_running_loop().create_task(self._guarded(context, work))

    async def _guarded(self, context: RequestContext, work: Coroutine[Any, Any, None]) -> None:
        """Await work; only the leaving of the request's client and `cut_off` cancel it."""
        try:
            await work
        except RefusedError as error:
            self._refuse(context, error.refusal)
        except asyncio.CancelledError:
            # End a request whose task was cancelled: the client left, or the request was cut off.
            self._release_engine(context)
            if context.cut_off_reason is not None and not context.response.is_gone:
                self.break_off(context, context.cut_off_reason)
            self.finish(context)
        except Exception as error:  # noqa: BLE001 - the client still gets an answer
            self.fail(context, error)

    async def _wait(
        self, context: RequestContext, result: Coroutine[Any, Any, ForwardResult]
    ) -> None:
        found = await result
        context.task = None
        self.on_result(context, found)

    async def search(
        self, context: RequestContext, stream: "ClientStream", *, is_suspended: bool = False
    ) -> None:
        """Search another engine for a stream whose engine died, and tell the client that it is waited for.

        A suspended stream first waits until its client reads.
        """
        if is_suspended:
            await context.response.drained()
        try:
            while not await stream.source.find_next():
                if stream.write(WAITING):
                    await context.response.drained()
        except BrokenResponseError as error:
            stream.on_stream_broken(error)
        else:
            context.task = None
            stream.attach()

    def _refuse(self, context: RequestContext, refusal: Refusal) -> None:
        # Record the model of a refused body, if it exists and the key's limits allowed the request.
        if context.request is None and context.is_admitted:
            name = context.adapter.find_model(context.http_request.body)
            if name in self._forwarder.table_cache.table.models:
                context.model = name
        self.break_off(context, refusal)
        self.finish(context)

    def fail(self, context: RequestContext, error: Exception) -> None:
        """End a request after an error of the gateway, which is reported as one of the event loop."""
        self._release_engine(context)
        if not context.response.is_complete and not context.response.is_gone:
            self.break_off(context, errors.internal())
        self.finish(context)
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a request to a model failed", "exception": error}
        )

    def disconnect(self, context: RequestContext) -> None:
        """Stop serving a request whose client is gone."""
        if context.response.is_gone:
            return
        context.response.is_gone = True
        if context.task is not None:
            context.task.cancel()
        elif context in self.contexts:
            self._release_engine(context)
            self.finish(context)

    def _release_engine(self, context: RequestContext) -> None:
        """Give up the engine's response."""
        self._forwarder.abandon(context.retry_state)
        if context.stream is not None:
            context.stream.close()

    def _admit(self, context: RequestContext, limiters: tuple[RateLimiter, ...]) -> None:
        """Count the request under these limits. Its response tells the state of all its limits, refused or not."""
        try:
            self._access.admit(limiters)
        except RefusedError:
            self._show_rates(context, (*context.limiters, *limiters))
            raise
        context.limiters += limiters
        self._show_rates(context, context.limiters)

    def _show_rates(self, context: RequestContext, limiters: tuple[RateLimiter, ...]) -> None:
        rates = context.adapter.rate_headers(self._access.rates(limiters))
        is_stale = self._forwarder.table_cache.is_stale
        context.extra_headers = (*rates, _STALE) if is_stale else rates

    def _set_default_model(self, context: RequestContext) -> None:
        """Write the default model into the body of a request that names none.

        Raises:
            RefusedError: there is none, or the routing table is not known yet.

        """
        table_cache, principal = self._forwarder.table_cache, context.principal
        if not table_cache.is_synced:
            raise RefusedError(errors.not_synced())
        may_use = self._access.may_use(principal)
        name = choose_default(table_cache.table, self._default_model, may_use)
        http_request = context.http_request
        http_request.body = with_model(http_request.body, name)

    def _allow(self, context: RequestContext, name: str) -> None:
        """Check that the key may use the model. Raises RefusedError."""
        principal = context.principal
        if principal is not None and not principal.may_ask_for(name):
            self._access.refund(context.limiters)
            self._show_rates(context, context.limiters)
            self._access.allow(principal, name)

    def _admit_model(self, context: RequestContext, request: InferenceRequest) -> None:
        """Check that the key may use the model, count the request under the model's limits, and salt its cache."""
        principal, name, table_cache = context.principal, request.model, self._forwarder.table_cache
        served = table_cache.table.models.get(name)
        is_limited = principal is not None and bool(principal.models)
        if is_limited:
            self._allow(context, name)
        if served is None and table_cache.is_synced:
            is_asked = self._forwarder.on_demand.ask(principal, name)
            if is_limited and not is_asked:
                raise self._access.unknown_model(principal, table_cache.table, name)
        if served is not None:
            context.model = name
            if served.mirror is not None and request.content_type == JSON:
                context.mirrored = served
            if request.keep_alive_s is not None:
                self._forwarder.keep_loaded(served, request.keep_alive_s)
            else:
                self._forwarder.claim(served)
            if principal is not None and not served.shares_cache:
                request.key_salt = principal.cache_salt
            if served.routing.rate_limit is not None:
                self._admit(context, self._access.model_limiters(principal, name, served))
                return
        if principal is not None and principal.by_model:
            self._admit(context, self._access.model_limiters(principal, name, served))

    def finish(self, context: RequestContext) -> None:
        """Release and record a request that was served. May be called again."""
        if context not in self.contexts:
            return
        self.contexts.remove(context)
        if context.kept_answer is not None:
            self.idempotency.end(context.kept_answer)
        state = context.retry_state
        if state.admission is not None:
            self._forwarder.leave(state)
        for limiter in context.limiters:
            tokens = state.usage[0] + state.usage[2]
            if limiter.tokens is None:
                limiter.in_flight -= 1
                limiter.tokens_used += tokens
            else:
                limiter.leave(tokens, self.clock)
        self._recorder.record(context)
        context.release()

    def refuse(self, context: RequestContext, refusal: Refusal) -> None:
        """Answer a request with a refusal."""
        self._send_refusal(context, context.adapter.error_translator(), refusal)
        self._recorder.record(context)
        context.release()

    def cut_off(self) -> None:
        """End all running requests and tell their clients."""
        why = errors.shutting_down()
        for context in tuple(self.contexts):
            response = context.response
            response.keep_alive = response.keep_alive and response.is_started
            self._cut_off(context, why)

    def cancel(self, context: RequestContext) -> bool:
        """End a running request, here and at its engine, and tell its client; return False if it has ended."""
        return context in self.contexts and self._cut_off(context, cancelled().refusal)

    def _cut_off(self, context: RequestContext, why: Refusal) -> bool:
        if context.cut_off_reason is not None:
            return False
        if context.task is None:
            self._release_engine(context)
            self.break_off(context, why)
            self.finish(context)
        else:
            context.cut_off_reason = why
            context.task.cancel()
        return True

    def _begin_stream(self, source: EngineStream, context: RequestContext) -> None:
        """Pass the stream of an engine through, event by event."""
        context.stream = source
        context.first_s, response = self.clock.monotonic(), context.response
        translator = context.translator
        head = context.head(source.passed, source.endpoint)
        if translator is not None:
            translator.take_wait(context.retry_state.queued_s)
            if source.resume_log is not None:
                translator.take_usage(source.resume_log.usage)
            head = header_lines(translator.begin(list_lines(head)))
        if not response.status:
            response.begin(source.status, head)
        ClientStream(self, context, source, translator).attach()

    def end_stream(self, context: RequestContext, end: bytes) -> None:
        """End a complete stream with these events."""
        context.response.end(end, context.resumed_line())
        self.finish(context)

    def _send_refusal(
        self, context: RequestContext, translator: ResponseTranslator | None, refusal: Refusal
    ) -> None:
        if self._rename is not None:
            refusal = self._rename(refusal)
        status, body = refusal.status, refusal.body()
        headers = [
            *refusal.headers(),
            (_REQUEST_ID, context.http_request.request_id),
            (_ATTEMPTS, b"%d" % context.retry_state.started),
            *context.extra_headers,
        ]
        context.outcome = outcome_of(status)
        if translator is not None:
            status, headers, body = translator.whole(status, headers, body)
        context.response.whole(status, header_lines(headers), body)

    def break_off(self, context: RequestContext, refusal: Refusal) -> None:
        """End the response with an error: by status before the response starts, else by a last event.

        No [DONE] follows that event, or the client would take it for the end of the text.
        """
        translator = context.translator
        if context.request is None:  # the body is not read
            translator = context.adapter.error_translator()
        if not context.response.is_started:
            self._send_refusal(context, translator, refusal)
            return
        is_broken = context.first_s and refusal.status != CANCELLED_STATUS
        context.outcome = "interrupted" if is_broken else outcome_of(refusal.status)
        if self._rename is not None:
            refusal = self._rename(refusal)
        if translator is not None and translator.is_file:
            context.response.abort()
            return
        event = refusal.event() if translator is None else translator.broken(refusal)
        context.response.end(event, context.resumed_line())


class ClientStream(StreamReceiver):
    """One stream on its way to the client, driven by the engine's connection."""

    __slots__ = ("_context", "_handler", "_response", "_translator", "source")

    def __init__(
        self,
        handler: InferenceHandler,
        context: RequestContext,
        source: EngineStream,
        translator: ResponseTranslator | None,
    ) -> None:
        self.source = source
        self._handler = handler
        self._context = context
        self._response = context.response
        self._translator = translator

    def attach(self) -> None:
        """Pass on what has arrived, and what comes."""
        self.source.attach(self)
        if self._context.response.flow.write_paused and self._context.stream is self.source:
            self._context.pause()

    def write(self, events: bytes) -> bool:
        """Send events to the client; return whether it reads too slowly."""
        translator = self._translator
        return self._response.piece(events if translator is None else translator.events(events))

    @override
    def on_events(self, events: bytes) -> None:
        translator = self._translator
        try:
            self._response.piece(events if translator is None else translator.events(events))
        except Exception as error:  # noqa: BLE001 - the client still gets an answer
            self._handler.fail(self._context, error)

    @override
    def chunk_writer(self) -> Callable[[bytes], object] | None:
        return self._response.chunk_writer() if self._translator is None else None

    @override
    def on_stream_end(self) -> None:
        context, translator = self._context, self._translator
        self.source.close()
        context.outcome = "ok" if self.source.is_whole else "interrupted"
        handler, turn = self._handler, context.turn
        try:
            end = b"" if translator is None else translator.end()
            if end and turn is not None and turn.is_stored:
                handler.run(context, handler.responses.store_stream(handler, context, end))
            else:
                handler.end_stream(context, end)
        except Exception as error:  # noqa: BLE001 - the client still gets an answer
            handler.fail(context, error)

    @override
    def on_stream_broken(self, error: BrokenResponseError) -> None:
        self._handler.break_off(self._context, errors.interrupted(str(error)))
        self.source.close()
        self._handler.finish(self._context)

    @override
    def on_engine_died(self) -> None:
        self._handler.run(self._context, self._handler.search(self._context, self))

    @override
    def on_suspended(self) -> None:
        search = self._handler.search(self._context, self, is_suspended=True)
        self._handler.run(self._context, search)
