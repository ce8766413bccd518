"""Has a request answered by one engine after another until one does. Sends nothing to the client.

Until this returns, the client has seen nothing, so that every failure may be tried elsewhere.
"""

import logging
from dataclasses import dataclass
from typing import assert_never

from gateway import errors
from gateway.asks import Ask
from gateway.carry.held import Held
from gateway.carry.loads import Loads
from gateway.carry.router import Router
from gateway.carry.trail import Result, Streaming, Trail, Whole
from gateway.carry.waiting import WaitingRoom
from gateway.errors import Refusal
from gateway.known.keeper import TableKeeper
from gateway.routing.choosing import Chosen, NothingReady, UnknownModel
from gateway.routing.table import Target
from gateway.upstream import request
from gateway.upstream.exchange import BrokenError
from gateway.upstream.pool import Answer, UnreachableError, Upstream
from gateway.upstream.sse import whole_events
from gateway.watch.metrics import Metrics
from gateway.watch.versions import Versions
from machinery.clock import Clock

log = logging.getLogger(__name__)

# An engine that says so cannot serve this request now; another may. 500 too: engines use it only
# where they are to blame themselves.
_TURNED_AWAY = frozenset({429, 500, 502, 503, 504})
# How long a request waits for the table to show somebody new when everybody known is dead.
_LAST_LOOK_S = 2.0
# Answers that are not streamed are kept until they are complete; no real one is near this.
_WHOLE_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Failover:
    """Tries engines in turn; each at most once for a request."""

    keeper: TableKeeper
    upstream: Upstream
    loads: Loads
    metrics: Metrics
    versions: Versions
    room: WaitingRoom
    router: Router
    clock: Clock

    async def serve(self, ask: Ask, trail: Trail) -> Result:
        """Return the first answer, or why there is none; `trail` tells what was tried."""
        draw = self.router.draw()
        deadline_s: float | None = None
        while not trail.is_over:
            now_s = self.clock.monotonic()
            choice = self.router.choose(ask, trail.failed, draw)
            if isinstance(choice, Chosen):
                result = await self._try(ask, choice.target, trail)
                if result is not None:
                    return result
                continue
            if isinstance(choice, NothingReady) and choice.wakes and trail.may_wait():
                trail.waits_since_s = trail.waits_since_s or now_s
                said = await self.room.hold(ask.model, choice, trail.waits_since_s)
                if said is None:
                    continue
                return said
            if trail.refusal is None or trail.turned_away is not None:
                return trail.turned_away or self._refusal(ask, choice)
            # All of them are dead: perhaps a restarted engine is about to be published.
            deadline_s = deadline_s or now_s + _LAST_LOOK_S
            if now_s >= deadline_s or not await self.keeper.changed(within_s=deadline_s - now_s):
                break
        assert trail.refusal is not None
        return trail.refusal

    def interrupted(self, held: Held) -> None:
        """Note that an engine died in the middle of a stream."""
        target = held.target
        held.failed()
        self.metrics.attempts.add("interrupted")
        self.loads.penalise(target.origin, self.clock.monotonic())
        self.keeper.drop_orphan(target)

    def _refusal(self, ask: Ask, choice: UnknownModel | NothingReady) -> Refusal:
        if not self.keeper.is_synced:
            return errors.not_synced()
        match choice:
            case UnknownModel(known=known, nearest=nearest):
                return errors.unknown_model(ask.model, known, nearest)
            case NothingReady(reason=reason):
                return errors.nothing_ready(ask.model, reason)
            case _:
                assert_never(choice)

    async def _try(self, ask: Ask, target: Target, trail: Trail) -> Streaming | Whole | None:
        """Ask one engine; return None if it failed, which is then noted."""
        trail.attempts += 1
        try:
            result = await self._attempt(ask, target)
        except UnreachableError as error:
            refusal = errors.unreachable(ask.model, trail.attempts, str(error))
            self._failed(ask, target, trail, ("unreachable", refusal))
            return None
        except BrokenError as error:
            trail.is_seen = True
            if error.is_silence:
                trail.is_over = True
                refusal = errors.upstream_silent(ask.model, str(error))
            else:
                refusal = errors.upstream_failed(ask.model, trail.attempts, str(error))
            self._failed(ask, target, trail, ("broken", refusal))
            return None
        if isinstance(result, Whole) and result.status in _TURNED_AWAY:
            trail.turned_away = result
            self._failed(ask, target, trail, ("turned_away", None))
            return None
        trail.served_by = target
        self.router.took(ask, target)
        self.metrics.attempts.add("answered")
        return result

    def _failed(
        self, ask: Ask, target: Target, trail: Trail, what: tuple[str, Refusal | None]
    ) -> None:
        outcome, refusal = what
        trail.failed.add(target)
        trail.refusal = refusal or trail.refusal
        self.metrics.attempts.add(outcome)
        self.loads.penalise(target.origin, self.clock.monotonic())
        if refusal is not None:
            self.keeper.drop_orphan(target)
        log.info(
            "an engine did not serve a request; trying another",
            extra={
                "request_id": ask.request_id.decode("ascii"),
                "replica": target.replica,
                "node": target.node,
                "outcome": outcome,
                "why": refusal.message if refusal is not None else "",
            },
        )

    async def _attempt(self, ask: Ask, target: Target) -> Streaming | Whole:
        """Ask one engine.

        Raises:
            UnreachableError, BrokenError: it did not answer, or not to the end.

        """
        held = Held(target, self.clock.monotonic(), self.loads, self.versions.of(target))
        self.loads.begin(target)
        try:
            answer = await self.upstream.request(target.origin, request.encode(ask, target))
            held.answer = answer
            _check_identity(answer, target)
            if _is_stream(answer):
                first, rest = await _first_event(answer)
                held.begun(self.clock.monotonic())
                return Streaming(held=held, answer=answer, first=first, rest=rest)
            body = await _whole_body(answer)
        except (UnreachableError, BrokenError):
            held.failed()
            held.close()
            raise
        except BaseException:
            held.close()
            raise
        held.answered(answer.status, body, self.clock.monotonic())
        held.close()
        return Whole(target=target, status=answer.status, headers=answer.headers, body=body)


def _check_identity(answer: Answer, target: Target) -> None:
    """Refuse the answer of somebody else: ports of engines that are gone are used again."""
    replica = dict(answer.headers).get(b"x-fleet-replica", b"").decode("latin-1")
    if replica not in ("", target.replica):
        raise BrokenError(f"{replica} answers there, not {target.replica}", had_bytes=True)


def _is_stream(answer: Answer) -> bool:
    if answer.status in _TURNED_AWAY:
        return False
    return dict(answer.headers).get(b"content-type", b"").startswith(b"text/event-stream")


async def _first_event(answer: Answer) -> tuple[bytes, bytes]:
    """Read up to the end of the first event, so that a death before it can still be mended.

    Returns it, and the beginning of the next one.
    """
    first, rest = b"", b""
    while not first:
        piece = await answer.read()
        if not piece:
            return rest, b""
        first, rest = whole_events(rest, piece)
    return first, rest


async def _whole_body(answer: Answer) -> bytes:
    parts = bytearray()
    while piece := await answer.read():
        parts += piece
        if len(parts) > _WHOLE_LIMIT:
            raise BrokenError(f"the answer is larger than {_WHOLE_LIMIT} bytes", had_bytes=True)
    return bytes(parts)
