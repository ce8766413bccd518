"""Has a request answered by one engine after another until one does. Sends nothing to the client.

Until this returns, the client has seen nothing of an answer, so that every failure may be tried elsewhere.
"""

import logging
import math
from collections.abc import Coroutine
from typing import Any, assert_never

from gateway import errors
from gateway.asks import Ask, RawHeaders
from gateway.carry import hedging, refusals
from gateway.carry.attempt import TURNED_AWAY, Attempts, is_timeout
from gateway.carry.gate import Gate
from gateway.carry.names import Names
from gateway.carry.patience import Patience, Vigil
from gateway.carry.queueing import Place
from gateway.carry.resuming import Resumer
from gateway.carry.router import Router
from gateway.carry.streaming import Streaming
from gateway.carry.trail import Result, Trail, Tried, Whole
from gateway.carry.waiting import WaitingRoom
from gateway.errors import Refusal
from gateway.routing.choosing import Chosen, NothingReady, UnknownModel
from gateway.routing.table import Target
from gateway.upstream.exchange import BrokenError
from gateway.upstream.pool import UnreachableError

log = logging.getLogger(__name__)

# How often a request for which everybody is dead looks whether a probe found somebody alive: as often as they ask.
_LOOK_S = 0.5
# The engine's own bound (nodeagent/engine/api/headers.py).
_LONGEST_TIMEOUT_S = 86_400.0
_TIMEOUT = refusals.TIMEOUT.encode()
_NEVER = float("inf")


class Failover:
    """Tries engines in turn; each at most once for a request."""

    def __init__(
        self,
        *,
        attempts: Attempts,
        names: Names,
        room: WaitingRoom,
        router: Router,
        resumer: Resumer,
    ) -> None:
        self.keeper, self.metrics, self.clock = attempts.keeper, attempts.metrics, attempts.clock
        self._attempts = attempts
        self._circuits = attempts.loads.circuits
        self._names = names
        self._room = room
        self._router = router
        self._resumer = resumer

    def serve(self, ask: Ask, trail: Trail, patience: Patience) -> Coroutine[Any, Any, Result]:
        """Return the first answer, or why there is none; `trail` tells what was tried. `leave` must follow.

        Raises:
            RefusedError: a header of the request makes no sense.

        """
        # No coroutine itself: each one more is one more to go through whenever anything comes.
        self._begin(ask, trail)
        if trail.named is not None and trail.named.gate is not None:
            return self._in_line(ask, trail, trail.named.gate, patience)
        return self._carry(ask, trail, patience)

    async def _in_line(self, ask: Ask, trail: Trail, gate: Gate, patience: Patience) -> Result:
        refusal = await self._wait_in_line(ask, trail, gate, patience)
        return await self._carry(ask, trail, patience) if refusal is None else refusal

    def _served(self, result: Streaming | Whole, ask: Ask, trail: Trail) -> Streaming | Whole:
        """Note who answers."""
        if isinstance(result, Streaming):
            self._resumer.watch(result, ask, trail)
        trail.served_by = result.target
        if trail.policy.hedge_after_s < _NEVER:
            self._router.took(ask, result.target)
        return result

    def leave(self, trail: Trail) -> None:
        """Make room for the next request; called when the answer has ended, however it did."""
        if trail.place is not None and trail.named is not None and trail.named.gate is not None:
            trail.named.gate.leave(trail.place)

    def _begin(self, ask: Ask, trail: Trail) -> None:
        """Learn what counts for the request."""
        now_s = self.clock.monotonic()
        model = self.keeper.table.models.get(ask.model)
        if model is None:
            return
        named = trail.named = self._names.of(model)
        policy = trail.policy = named.policy
        own_s = _timeout_s(ask.headers)
        trail.is_clients_time = own_s < policy.request_s
        trail.timeout_s = min(policy.request_s, own_s)
        trail.deadline_s = now_s + trail.timeout_s
        named.retries.asked(now_s)
        if policy.hedge_after_s < _NEVER:
            named.hedges.asked(now_s)

    async def _wait_in_line(
        self, ask: Ask, trail: Trail, gate: Gate, patience: Patience
    ) -> Refusal | None:
        now_s = self.clock.monotonic()
        entered = await gate.enter(patience, until_s=trail.deadline_s)
        trail.queued_s += self.clock.monotonic() - now_s
        if isinstance(entered, Place):
            trail.place = entered
            return None
        if self.clock.monotonic() >= trail.deadline_s:
            entered = refusals.request_timeout(ask.model, trail.timeout_s, 0)
        self.metrics.queue_refused.add(entered.code or "")
        return entered

    async def _carry(self, ask: Ask, trail: Trail, patience: Patience) -> Result:
        draw = self._router.draw()
        look_until_s: float | None = None
        while True:
            now_s = self.clock.monotonic()
            if now_s >= trail.deadline_s or trail.is_timed_out:
                return refusals.request_timeout(ask.model, trail.timeout_s, trail.attempts)
            choice = self._router.choose(ask, trail.failed, draw)
            if isinstance(choice, Chosen):
                self._room.miss(choice.wakes)
                if trail.attempts and not self._may_repeat(ask, trail, now_s):
                    return self._last_words(trail)
                result = await self._asking(ask, choice.target, trail, draw)
                if result is not None:
                    return self._served(result, ask, trail)
                continue
            if isinstance(choice, NothingReady) and choice.wakes and trail.may_wait():
                said = await self._hold(ask, choice, trail, patience)
                if said is None:
                    continue
                return said
            if trail.refusal is None or trail.turned_away is not None:
                return trail.turned_away or self._refusal(ask, choice)
            # All of them are dead: as streams that broke, it waits for one that is restarted.
            look_until_s = look_until_s or min(now_s + self._resumer.patience_s, trail.deadline_s)
            if not await self._somebody_came(trail, look_until_s):
                return trail.refusal

    async def _somebody_came(self, trail: Trail, until_s: float) -> bool:
        """Wait until somebody may be asked again; return whether that was in time.

        By the table, or by a probe's word that one lives who was not there: that one never saw the request. Who
        broke off may have died of it, and is asked again only when it is published anew.
        """
        while (left_s := until_s - self.clock.monotonic()) > 0:
            has_changed = await self.keeper.changed(within_s=min(left_s, _LOOK_S))
            back = {one for one in trail.unreached if not self._circuits.is_open(one.origin)}
            trail.failed -= back
            trail.unreached -= back
            if has_changed or back:
                return True
        return False

    async def _hold(
        self, ask: Ask, choice: NothingReady, trail: Trail, patience: Patience
    ) -> Refusal | None:
        now_s = self.clock.monotonic()
        trail.waits_since_s = trail.waits_since_s or now_s
        vigil = trail.vigil = trail.vigil or Vigil(self.clock, patience, self._names.quiet_s)
        began_s = trail.waits_since_s
        said = await self._room.hold(
            ask.model, choice, vigil, began_s=began_s, until_s=trail.deadline_s
        )
        trail.queued_s += self.clock.monotonic() - now_s
        return said

    def _may_repeat(self, ask: Ask, trail: Trail, now_s: float) -> bool:
        """Return whether one more may be asked: so many for a request, and so many for all of them together."""
        if trail.attempts >= trail.policy.attempts:
            return False
        named = None if trail.is_repeat_free else trail.named
        if named is not None and not named.retries.spend(now_s):
            self.metrics.attempts.add("over_budget")
            return False
        self.metrics.retries.add(ask.model)
        return True

    def _last_words(self, trail: Trail) -> Whole | Refusal:
        """Return what to say when no more may be asked: what the last said, and when to come again."""
        said = trail.turned_away
        if said is not None:
            if any(name == b"retry-after" for name, _ in said.headers):
                return said
            headers = [*said.headers, (b"retry-after", b"1")]
            return Whole(target=said.target, status=said.status, headers=headers, body=said.body)
        assert trail.refusal is not None
        if trail.attempts >= trail.policy.attempts:
            return trail.refusal
        return refusals.not_repeated(trail.refusal)

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

    def _asking(self, ask: Ask, target: Target, trail: Trail, draw: float) -> hedging.Asking:
        if trail.policy.hedge_after_s == _NEVER:
            return self._try(ask, target, trail)
        return self._race(ask, target, trail, draw)

    async def _race(
        self, ask: Ask, target: Target, trail: Trail, draw: float
    ) -> Streaming | Whole | None:
        """Ask one engine, and another beside it if it takes too long."""

        def rival() -> hedging.Asking | None:
            now_s = self.clock.monotonic()
            choice = self._router.choose(ask, trail.failed | {target}, draw)
            if not isinstance(choice, Chosen) or trail.attempts >= trail.policy.attempts:
                return None
            named = trail.named
            if choice.target.origin in self._circuits.live or named is None:
                return None
            if not named.hedges.spend(now_s):
                return None
            self.metrics.hedges.add("asked")
            return self._try(ask, choice.target, trail)

        after_s = trail.policy.hedge_after_s
        result = await hedging.raced(self._try(ask, target, trail), rival, after_s=after_s)
        if result is not None and result.target != target:
            self.metrics.hedges.add("won")
        return result

    async def _try(self, ask: Ask, target: Target, trail: Trail) -> Streaming | Whole | None:
        """Ask one engine; return None if it failed, which is then noted."""
        trail.attempts += 1
        began_s = self.clock.monotonic()
        is_trusted = target.origin not in self._circuits.live
        outcome, why, is_late = "abandoned", "", False
        try:
            result = await self._attempts.ask(ask, target, trail)
            outcome = "turned_away" if result.status in TURNED_AWAY else "answered"
            is_late = outcome == "turned_away" and is_timeout(result, trail)
        except (UnreachableError, BrokenError) as error:
            outcome, why, result = _outcome(error), str(error), None
            is_late = self.clock.monotonic() >= trail.deadline_s
            trail.refusal = _told(error, ask, trail)
            trail.is_seen = trail.is_seen or isinstance(error, BrokenError)
            if isinstance(error, UnreachableError):
                trail.unreached.add(target)
        finally:
            if is_late:
                outcome, why = "timed_out", f"the {trail.timeout_s:g} s of the request were over"
                trail.served_by, trail.is_timed_out = target, True
            self.metrics.attempts.add(outcome)
            trail.tried.append(Tried(target, outcome, began_s, self.clock.monotonic(), why))
        if outcome == "answered":
            return result
        if isinstance(result, Whole) and not is_late:
            trail.turned_away = result
        trail.failed.add(target)
        # Whoever fails loses its standing, so that an engine gives away no more repetitions than it had requests when
        # it died, hung or began to drain: those must all be answered elsewhere, and cannot become a storm.
        trail.is_repeat_free = is_trusted
        log.info(
            "an engine did not serve a request; trying another",
            extra={
                "request_id": ask.request_id.decode("ascii"),
                "replica": target.replica,
                "node": target.node,
                "outcome": outcome,
                "why": why,
            },
        )
        return None


def _outcome(error: UnreachableError | BrokenError) -> str:
    if isinstance(error, UnreachableError):
        return "unreachable"
    return "silent" if error.is_silence else "broken"


def _told(error: UnreachableError | BrokenError, ask: Ask, trail: Trail) -> Refusal:
    """Return what the client is told if nobody else answers."""
    if isinstance(error, UnreachableError):
        return errors.unreachable(ask.model, trail.attempts, str(error))
    if error.is_silence:
        return errors.upstream_silent(ask.model, str(error))
    return errors.upstream_failed(ask.model, trail.attempts, str(error))


def _timeout_s(headers: RawHeaders) -> float:
    """Return how long the client waits, by its header, which engines know, too; for ever if it does not say.

    Raises:
        RefusedError: it makes no sense.

    """
    for name, value in headers:
        if name == _TIMEOUT:
            text = value.decode("latin-1")
            try:
                seconds = float(text)
            except ValueError:
                seconds = math.nan
            if not 0 < seconds <= _LONGEST_TIMEOUT_S:
                raise refusals.bad_timeout(text, _LONGEST_TIMEOUT_S)
            return seconds
    return _NEVER
