"""Where requests to models are answered: read, have carried, told. One `serve` is one request's life."""

import asyncio
import itertools
from collections.abc import Mapping
from typing import assert_never

from typing_extensions import override

from gateway import errors
from gateway.carry.failover import Failover
from gateway.carry.trail import Result, Streaming, Whole
from gateway.clients.protocol import Desk
from gateway.clients.surface import Surface, Telling
from gateway.clients.visit import Visit
from gateway.errors import Refusal, RefusedError
from gateway.routing.table import Target
from gateway.upstream.exchange import BrokenError, Headers
from gateway.upstream.sse import whole_events

_NEVER = float("inf")
_SWEEP_S = 1.0

# Hop by hop, or set by ourselves; x-fleet-* is ours to say.
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
        b"x-request-id",
    }
)


class FrontDesk(Desk):
    """Answers every request to a model."""

    def __init__(
        self,
        failover: Failover,
        surfaces: Mapping[bytes, Surface],
        *,
        max_body: int,
        id_prefix: str,
    ) -> None:
        self._failover = failover
        self.clock = failover.clock
        self.surfaces = surfaces
        self.max_body = max_body
        self._id_prefix = id_prefix
        self._count = itertools.count(1)
        self._visits: set[Visit] = set()

    @override
    def next_id(self) -> bytes:
        return f"{self._id_prefix}-{next(self._count):x}".encode()

    @override
    async def serve(self, visit: Visit, surface: Surface) -> None:
        self._visits.add(visit)
        telling = surface.telling()
        try:
            ask, telling = surface.read(visit.heard)
            if ask.model in self._failover.keeper.table.models:
                visit.model = ask.model
            result = await self._failover.serve(ask, visit.trail)
            await self._answer(result, visit, telling)
        except RefusedError as error:
            self._tell(visit, telling, error.refusal)
        except asyncio.CancelledError:
            # Its client left, or it is cut off; nothing else cancels it.
            if visit.ending is not None and not visit.reply.is_gone:
                self._break_off(visit, telling, visit.ending)
        finally:
            self._visits.discard(visit)
            self._failover.metrics.requests.add(visit.model, visit.outcome)

    @override
    def refuse(self, visit: Visit, surface: Surface, refusal: Refusal) -> None:
        self._tell(visit, surface.telling(), refusal)
        self._failover.metrics.requests.add(visit.model, visit.outcome)

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

    async def _answer(self, result: Result, visit: Visit, telling: Telling | None) -> None:
        if not isinstance(result, Refusal):
            waited_s = self.clock.monotonic() - visit.began_s
            self._failover.metrics.first_byte.observe(waited_s, visit.model)
        match result:
            case Streaming():
                try:
                    await self._stream(result, visit, telling)
                finally:
                    result.held.close()
            case Whole():
                headers, body = _passed_on(result.headers, result.target, visit), result.body
                if telling is not None:
                    headers, body = telling.whole(result.status, headers, body)
                visit.outcome = outcome(result.status)
                visit.reply.whole(result.status, headers, body)
            case Refusal():
                self._tell(visit, telling, result)
            case _:
                assert_never(result)

    async def _stream(self, result: Streaming, visit: Visit, telling: Telling | None) -> None:
        """Pass an engine's stream through, event by event as it comes."""
        answer = result.answer
        headers = _passed_on(answer.headers, result.held.target, visit)
        visit.reply.begin(answer.status, headers if telling is None else telling.begin(headers))
        await self._piece(visit, telling, result.first)
        rest, last, lines = result.rest, result.first, 0
        try:
            while piece := await answer.read():
                whole, rest = whole_events(rest, piece)
                if whole:
                    # The cheapest way to learn how many events there were, two lines each; nothing
                    # more may be made of the content here.
                    last = whole
                    lines += whole.count(b"\n")
                    await self._piece(visit, telling, whole)
        except BrokenError as error:
            self._failover.interrupted(result.held)
            self._break_off(visit, telling, errors.interrupted(str(error)))
            return
        result.held.ended(lines, last + rest, self.clock.monotonic())
        visit.outcome = "ok"
        visit.reply.end(rest if telling is None else telling.events(rest) + telling.end())

    async def _piece(self, visit: Visit, telling: Telling | None, data: bytes) -> None:
        visit.sending_since_s = self.clock.monotonic()
        await visit.reply.piece(data if telling is None else telling.events(data))
        visit.sending_since_s = _NEVER

    def _tell(self, visit: Visit, telling: Telling | None, refusal: Refusal) -> None:
        body = refusal.body() if telling is None else telling.refusal(refusal)
        headers = [
            *refusal.headers(),
            (b"x-request-id", visit.heard.request_id),
            (b"x-fleet-attempts", b"%d" % visit.trail.attempts),
        ]
        visit.outcome = outcome(refusal.status)
        visit.reply.whole(refusal.status, headers, body)

    def _break_off(self, visit: Visit, telling: Telling | None, refusal: Refusal) -> None:
        """Say why it ends: by status if there is none yet, by a last event if there is.

        No [DONE] after that event: the client must not take it for the end of the text.
        """
        if not visit.reply.is_started:
            self._tell(visit, telling, refusal)
            return
        visit.outcome = "interrupted"
        visit.reply.end(refusal.event() if telling is None else telling.broken(refusal))


def _passed_on(headers: Headers, target: Target, visit: Visit) -> Headers:
    return [
        *(
            (name, value)
            for name, value in headers
            if name not in _NOT_PASSED_ON and not name.startswith(b"x-fleet-")
        ),
        (b"x-request-id", visit.heard.request_id),
        (b"x-fleet-node", target.node.encode()),
        (b"x-fleet-replica", target.replica.encode()),
        (b"x-fleet-attempts", b"%d" % visit.trail.attempts),
    ]


def outcome(status: int) -> str:
    """Return how a request ended that got this status."""
    if status < 400:
        return "ok"
    if status < 500 and status != 429:
        return "refused"
    return "unavailable" if status in (429, 503) else "failed"
