"""Where requests to models are answered: read, have carried, told. One `serve` is one request's life."""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from typing_extensions import override

from gateway import errors
from gateway.apis.adapter import ApiAdapter, ResponseTranslator
from gateway.apis.openai import find_model_name
from gateway.auth.access_control import AccessControl
from gateway.auth.keyring import Principal
from gateway.errors import Refusal, RefusedError
from gateway.forwarding.admission import engine_refusal
from gateway.forwarding.engine_stream import EngineStream
from gateway.forwarding.forwarder import Forwarder
from gateway.forwarding.retry_state import WholeResponse
from gateway.http.cors import AllowedOrigins
from gateway.http.request_context import RequestContext, RequestHandler
from gateway.http.response_writer import header_lines
from gateway.request import RawHeaders
from gateway.routing.table import EngineEndpoint
from gateway.telemetry.recorder import RequestRecorder
from gateway.upstream.connection import BrokenResponseError, Headers

_NEVER = float("inf")
_SWEEP_S = 1.0
# A request may be on its way on a connection that looks idle.
IDLE_LINGER_S = 1.0
# What is known of the fleet may be out of date: the store has not been heard for a while.
_STALE = (b"x-fleet-store", b"stale")

# Hop by hop, or set by ourselves; x-fleet-* is ours to say, and those of it that engines always send are here, too.
_NOT_PASSED_ON = frozenset(
    {
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"server",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-fleet-in-flight",
        b"x-fleet-memory-free",
        b"x-fleet-queued",
        b"x-fleet-replica",
        b"x-request-id",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOptions:
    """What holds for every request."""

    max_body: int
    """Bytes."""
    origins: AllowedOrigins
    id_prefix: str
    """What our request ids begin with."""


class InferenceHandler(RequestHandler):
    """Answers every request to a model."""

    def __init__(
        self,
        failover: Forwarder,
        surfaces: Mapping[bytes, ApiAdapter],
        access: AccessControl,
        recorder: RequestRecorder,
        rules: HandlerOptions,
    ) -> None:
        self._failover = failover
        self._access = access
        self._recorder = recorder
        self.clock = failover.clock
        self.surfaces = surfaces
        self.max_body = rules.max_body
        self.origins = rules.origins
        self._id_prefix = rules.id_prefix.encode()
        self.is_stopping = False
        self.linger_s = IDLE_LINGER_S
        self._count = itertools.count(1)
        self._common: Headers = []
        self._stamp = b""
        self._visits: set[RequestContext] = set()

    @override
    def next_id(self) -> bytes:
        return b"%b-%x" % (self._id_prefix, next(self._count))

    @override
    def stamp(self, common: Headers) -> bytes:
        # uvicorn makes a new list every second, with the date.
        if common is not self._common:
            self._common, self._stamp = common, header_lines(common)
        return self._stamp

    @override
    async def serve(self, visit: RequestContext) -> None:
        self._visits.add(visit)
        telling = visit.surface.telling()
        try:
            self._recorder.begin(visit)
            # The key first: nobody else's body is read.
            visit.holder = holder = self._access.enter(visit.heard.headers)
            if self._failover.keeper.is_stale or (holder is not None and holder.is_limited):
                visit.more = self._more(holder)
            ask, telling = visit.surface.read(visit.heard)
            visit.ask = ask
            if holder is not None and holder.models:
                self._access.allow(holder, ask.model)
            if ask.model in self._failover.keeper.table.models:
                visit.model = ask.model
            visit.telling = telling
            result = await self._failover.serve(ask, visit.trail, visit)
            if isinstance(result, EngineStream):
                await self._stream(result, visit, telling)
            else:
                self._answer(result, visit, telling)
        except RefusedError as error:
            self._note_model(visit)
            self._tell(visit, telling, error.refusal)
        except asyncio.CancelledError:
            # Its client left, or it is cut off; nothing else cancels it.
            if visit.ending is not None and not visit.reply.is_gone:
                self._break_off(visit, telling, visit.ending)
        finally:
            if not visit.reply.is_complete and not visit.reply.is_gone:
                # A mistake of ours, which is raised on; nobody is left without an answer for it.
                self._break_off(visit, telling, errors.internal())
            self._visits.discard(visit)
            self._failover.leave(visit.trail)
            if visit.holder is not None:
                trail = visit.trail
                self._access.leave(visit.holder, trail.prompt_tokens + trail.output_tokens)
            self._recorder.ended(visit)
            visit.forget()

    def _note_model(self, visit: RequestContext) -> None:
        """Note for whom a body was that was refused, if it names a model that there is; not strangers' bodies."""
        if visit.ask is None and (visit.holder is not None or not self._access.is_on):
            name = find_model_name(visit.heard.body)
            if name in self._failover.keeper.table.models:
                visit.model = name

    def _more(self, holder: Principal | None) -> RawHeaders:
        more = self._access.headers(holder)
        return (*more, _STALE) if self._failover.keeper.is_stale else more

    @override
    def refuse(self, visit: RequestContext, refusal: Refusal) -> None:
        self._tell(visit, visit.surface.telling(), refusal)
        self._recorder.ended(visit)
        visit.forget()

    def cut_off(self) -> None:
        """End what still runs; clients are told."""
        for visit in tuple(self._visits):
            visit.cut(errors.shutting_down())

    async def keep(self, *, patience_s: float) -> None:
        """Give up clients that read nothing for so long: they hold a place at an engine."""
        while True:
            await self.clock.sleep(_SWEEP_S)
            oldest_s = self.clock.monotonic() - patience_s
            for visit in tuple(self._visits):
                if visit.sending_since_s < oldest_s:
                    visit.reply.abort()

    def _answer(
        self,
        result: WholeResponse | Refusal,
        visit: RequestContext,
        telling: ResponseTranslator | None,
    ) -> None:
        match result:
            case WholeResponse(status=status, body=body):
                if visit.reply.status:
                    self._break_off(visit, telling, engine_refusal(status, body))
                    return
                visit.outcome = "ok" if status < 400 else outcome_of(status)
                if telling is None:
                    head = _header_block(result.headers, result.target, visit)
                else:
                    headers = _header_list(result.headers, result.target, visit)
                    status, headers, body = telling.whole(status, headers, body)
                    head = header_lines(headers)
                visit.reply.whole(status, head, body)
            case Refusal():
                self._break_off(visit, telling, result)
            case _:
                assert_never(result)

    async def _stream(
        self, result: EngineStream, visit: RequestContext, telling: ResponseTranslator | None
    ) -> None:
        """Pass an engine's stream through, event by event as it comes."""
        visit.first_s, reply = self.clock.monotonic(), visit.reply
        try:
            if telling is None:
                head = _header_block(result.headers, result.target, visit)
            else:
                head = header_lines(
                    telling.begin(_header_list(result.headers, result.target, visit))
                )
            if not reply.status:
                reply.begin(result.status, head)
            while piece := await result.read():
                if reply.piece(piece if telling is None else telling.events(piece)):
                    visit.sending_since_s = self.clock.monotonic()
                    await reply.drained()
                    visit.sending_since_s = _NEVER
        except BrokenResponseError as error:
            self._break_off(visit, telling, errors.interrupted(str(error)))
            return
        finally:
            result.close()
        visit.outcome = "ok" if result.is_whole else "interrupted"
        visit.reply.end(b"" if telling is None else telling.end())

    def _tell(
        self, visit: RequestContext, telling: ResponseTranslator | None, refusal: Refusal
    ) -> None:
        status, body = refusal.status, refusal.body()
        headers = [
            *refusal.headers(),
            (b"x-request-id", visit.heard.request_id),
            (b"x-fleet-attempts", b"%d" % visit.trail.attempts),
            *visit.more,
        ]
        visit.outcome = outcome_of(status)
        if telling is not None:
            status, headers, body = telling.whole(status, headers, body)
        visit.reply.whole(status, header_lines(headers), body)

    def _break_off(
        self, visit: RequestContext, telling: ResponseTranslator | None, refusal: Refusal
    ) -> None:
        """Say why it ends: by status if there is none yet, by a last event if there is.

        No [DONE] after that event: the client must not take it for the end of the text.
        """
        if not visit.reply.is_started:
            self._tell(visit, telling, refusal)
            return
        visit.outcome = "interrupted" if visit.first_s else outcome_of(refusal.status)
        visit.reply.end(refusal.event() if telling is None else telling.broken(refusal))


def _header_block(headers: Headers, target: EngineEndpoint, visit: RequestContext) -> bytes:
    """Return the same as `_passed_on`, as it is written: most answers are told as they came."""
    found = b""
    for name, value in headers:
        if name not in _NOT_PASSED_ON and not name.startswith(b"x-fleet-"):
            found += b"%b: %b\r\n" % (name, value)
    return b"%bx-request-id: %b\r\n%bx-fleet-attempts: %d\r\n%b" % (
        found,
        visit.heard.request_id,
        target.lines,
        visit.trail.attempts,
        header_lines(visit.more) if visit.more else b"",
    )


def _header_list(headers: Headers, target: EngineEndpoint, visit: RequestContext) -> Headers:
    return [
        *[
            header
            for header in headers
            if header[0] not in _NOT_PASSED_ON and not header[0].startswith(b"x-fleet-")
        ],
        (b"x-request-id", visit.heard.request_id),
        (b"x-fleet-node", target.node.encode()),
        (b"x-fleet-replica", target.replica.encode()),
        (b"x-fleet-attempts", b"%d" % visit.trail.attempts),
        *visit.more,
    ]


def outcome_of(status: int) -> str:
    """Return how a request ended that got this status."""
    if status < 400:
        return "ok"
    if status < 500 and status != 429:
        return "refused"
    return "unavailable" if status in (429, 503) else "failed"
