"""Two engines asked for one answer: the first that answers counts, the other is cut. Chooses nobody.

Has a request answered by one engine after another until one does. Sends nothing to the client.

Until this returns, the client has seen nothing of an answer, so that every failure may be tried elsewhere.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, assert_never

from gateway import errors
from gateway.errors import Refusal
from gateway.forwarding import admission
from gateway.forwarding.admission import Activator, ClientWait, ConcurrencyLimiter, KeepAlive, Slot
from gateway.forwarding.attempt import TURNED_AWAY, AttemptRunner, is_timeout
from gateway.forwarding.engine_stream import EngineStream
from gateway.forwarding.model_state import ModelStates
from gateway.forwarding.resumption import Resumer
from gateway.forwarding.retry_state import Attempt, ForwardResult, RetryState, WholeResponse
from gateway.forwarding.router import Router
from gateway.request import InferenceRequest, RawHeaders
from gateway.routing.selection import ChosenEndpoint, NoReadyEndpoint, UnknownModel
from gateway.routing.table import EngineEndpoint
from gateway.upstream.connection import BrokenResponseError
from gateway.upstream.connection_pool import UnreachableError

AttemptResult: TypeAlias = EngineStream | WholeResponse | None
"""None: the engine did not serve, which is noted already."""
AttemptCoroutine: TypeAlias = Coroutine[Any, Any, AttemptResult]


async def race(
    first: AttemptCoroutine, rival: Callable[[], AttemptCoroutine | None], *, after_s: float
) -> AttemptResult:
    """Wait for the first; after so long ask for a rival, and return what comes first of the two.

    `rival` returns None if there is none. One that fails leaves it to the other.
    """
    tasks: list[asyncio.Task[AttemptResult]] = []
    winner: asyncio.Task[AttemptResult] | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks.append(group.create_task(first))
            await asyncio.wait(tasks, timeout=after_s)
            other = None if tasks[0].done() else rival()
            if other is not None:
                tasks.append(group.create_task(other))
            winner = await _first_result(tasks)
            for task in tasks:
                task.cancel()
    finally:
        for task in tasks:
            if task is not winner:
                _discard(task)
    return winner.result()


async def _first_result(tasks: list[asyncio.Task[AttemptResult]]) -> asyncio.Task[AttemptResult]:
    """Return the first that answered; the last if none did."""
    left = list(tasks)
    while True:
        await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in left if task.done()]:
            left.remove(task)
            if task.result() is not None or not left:
                return task


def _discard(task: asyncio.Task[AttemptResult]) -> None:
    """Close what nobody wants: it may have come in the very moment in which another won, or the client left."""
    if task.cancelled() or task.exception() is not None:
        return
    result = task.result()
    if isinstance(result, EngineStream):
        result.close()


log = logging.getLogger(__name__)

# How often a request for which everybody is dead looks whether a probe found somebody alive: as often as they ask.
_LOOK_S = 0.5
# The engine's own bound (engine/api/web.py).
_LONGEST_TIMEOUT_S = 86_400.0
_TIMEOUT = admission.TIMEOUT.encode()
_NEVER = float("inf")


class Forwarder:
    """Tries engines in turn; each at most once for a request."""

    def __init__(
        self,
        *,
        attempts: AttemptRunner,
        names: ModelStates,
        room: Activator,
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

    def serve(
        self, ask: InferenceRequest, trail: RetryState, patience: ClientWait
    ) -> Coroutine[Any, Any, ForwardResult]:
        """Return the first answer, or why there is none; `trail` tells what was tried. `leave` must follow.

        Raises:
            RefusedError: a header of the request makes no sense.

        """
        # No coroutine itself: each one more is one more to go through whenever anything comes.
        self._begin(ask, trail)
        if trail.named is not None and trail.named.gate is not None:
            return self._in_line(ask, trail, trail.named.gate, patience)
        return self._carry(ask, trail, patience)

    async def _in_line(
        self,
        ask: InferenceRequest,
        trail: RetryState,
        gate: ConcurrencyLimiter,
        patience: ClientWait,
    ) -> ForwardResult:
        refusal = await self._wait_in_line(ask, trail, gate, patience)
        return await self._carry(ask, trail, patience) if refusal is None else refusal

    def _served(
        self, result: EngineStream | WholeResponse, ask: InferenceRequest, trail: RetryState
    ) -> EngineStream | WholeResponse:
        """Note who answers."""
        if isinstance(result, EngineStream):
            self._resumer.watch(result, ask, trail)
        trail.served_by = result.target
        if trail.policy.hedge_after_s < _NEVER:
            self._router.took(ask, result.target)
        return result

    def leave(self, trail: RetryState) -> None:
        """Make room for the next request; called when the answer has ended, however it did."""
        if trail.place is not None and trail.named is not None and trail.named.gate is not None:
            trail.named.gate.leave(trail.place)

    def _begin(self, ask: InferenceRequest, trail: RetryState) -> None:
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
        self,
        ask: InferenceRequest,
        trail: RetryState,
        gate: ConcurrencyLimiter,
        patience: ClientWait,
    ) -> Refusal | None:
        now_s = self.clock.monotonic()
        entered = await gate.enter(patience, until_s=trail.deadline_s)
        trail.queued_s += self.clock.monotonic() - now_s
        if isinstance(entered, Slot):
            trail.place = entered
            return None
        if self.clock.monotonic() >= trail.deadline_s:
            entered = admission.request_timeout(ask.model, trail.timeout_s, 0)
        self.metrics.queue_refused.add(entered.code or "")
        return entered

    async def _carry(
        self, ask: InferenceRequest, trail: RetryState, patience: ClientWait
    ) -> ForwardResult:
        draw = self._router.draw()
        look_until_s: float | None = None
        while True:
            now_s = self.clock.monotonic()
            if now_s >= trail.deadline_s or trail.is_timed_out:
                return admission.request_timeout(ask.model, trail.timeout_s, trail.attempts)
            choice = self._router.choose(ask, trail.failed, draw)
            if isinstance(choice, ChosenEndpoint):
                self._room.miss(choice.wakes)
                if trail.attempts and not self._may_repeat(ask, trail, now_s):
                    return self._last_words(trail)
                result = await self._asking(ask, choice.target, trail, draw)
                if result is not None:
                    return self._served(result, ask, trail)
                continue
            if isinstance(choice, NoReadyEndpoint) and choice.wakes and trail.may_wait():
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

    async def _somebody_came(self, trail: RetryState, until_s: float) -> bool:
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
        self,
        ask: InferenceRequest,
        choice: NoReadyEndpoint,
        trail: RetryState,
        patience: ClientWait,
    ) -> Refusal | None:
        now_s = self.clock.monotonic()
        trail.waits_since_s = trail.waits_since_s or now_s
        vigil = trail.vigil = trail.vigil or KeepAlive(self.clock, patience, self._names.quiet_s)
        began_s = trail.waits_since_s
        said = await self._room.hold(
            ask.model, choice, vigil, began_s=began_s, until_s=trail.deadline_s
        )
        trail.queued_s += self.clock.monotonic() - now_s
        return said

    def _may_repeat(self, ask: InferenceRequest, trail: RetryState, now_s: float) -> bool:
        """Return whether one more may be asked: so many for a request, and so many for all of them together."""
        if trail.attempts >= trail.policy.attempts:
            return False
        named = None if trail.is_repeat_free else trail.named
        if named is not None and not named.retries.spend(now_s):
            self.metrics.attempts.add("over_budget")
            return False
        self.metrics.retries.add(ask.model)
        return True

    def _last_words(self, trail: RetryState) -> WholeResponse | Refusal:
        """Return what to say when no more may be asked: what the last said, and when to come again."""
        said = trail.turned_away
        if said is not None:
            if any(name == b"retry-after" for name, _ in said.headers):
                return said
            headers = [*said.headers, (b"retry-after", b"1")]
            return WholeResponse(
                target=said.target, status=said.status, headers=headers, body=said.body
            )
        assert trail.refusal is not None
        if trail.attempts >= trail.policy.attempts:
            return trail.refusal
        return admission.not_repeated(trail.refusal)

    def _refusal(self, ask: InferenceRequest, choice: UnknownModel | NoReadyEndpoint) -> Refusal:
        if not self.keeper.is_synced:
            return errors.not_synced()
        match choice:
            case UnknownModel(known=known, nearest=nearest):
                return errors.unknown_model(ask.model, known, nearest)
            case NoReadyEndpoint(reason=reason):
                return errors.nothing_ready(ask.model, reason)
            case _:
                assert_never(choice)

    def _asking(
        self, ask: InferenceRequest, target: EngineEndpoint, trail: RetryState, draw: float
    ) -> AttemptCoroutine:
        if trail.policy.hedge_after_s == _NEVER:
            return self._try(ask, target, trail)
        return self._race(ask, target, trail, draw)

    async def _race(
        self, ask: InferenceRequest, target: EngineEndpoint, trail: RetryState, draw: float
    ) -> EngineStream | WholeResponse | None:
        """Ask one engine, and another beside it if it takes too long."""

        def rival() -> AttemptCoroutine | None:
            now_s = self.clock.monotonic()
            choice = self._router.choose(ask, trail.failed | {target}, draw)
            if not isinstance(choice, ChosenEndpoint) or trail.attempts >= trail.policy.attempts:
                return None
            named = trail.named
            if choice.target.origin in self._circuits.live or named is None:
                return None
            if not named.hedges.spend(now_s):
                return None
            self.metrics.hedges.add("asked")
            return self._try(ask, choice.target, trail)

        after_s = trail.policy.hedge_after_s
        result = await race(self._try(ask, target, trail), rival, after_s=after_s)
        if result is not None and result.target != target:
            self.metrics.hedges.add("won")
        return result

    async def _try(
        self, ask: InferenceRequest, target: EngineEndpoint, trail: RetryState
    ) -> EngineStream | WholeResponse | None:
        """Ask one engine; return None if it failed, which is then noted."""
        trail.attempts += 1
        began_s = self.clock.monotonic()
        is_trusted = target.origin not in self._circuits.live
        outcome, why, is_late = "abandoned", "", False
        try:
            result = await self._attempts.ask(ask, target, trail)
            outcome = "turned_away" if result.status in TURNED_AWAY else "answered"
            is_late = outcome == "turned_away" and is_timeout(result, trail)
        except (UnreachableError, BrokenResponseError) as error:
            outcome, why, result = _outcome(error), str(error), None
            is_late = self.clock.monotonic() >= trail.deadline_s
            trail.refusal = _told(error, ask, trail)
            trail.is_seen = trail.is_seen or isinstance(error, BrokenResponseError)
            if isinstance(error, UnreachableError):
                trail.unreached.add(target)
        finally:
            if is_late:
                outcome, why = "timed_out", f"the {trail.timeout_s:g} s of the request were over"
                trail.served_by, trail.is_timed_out = target, True
            self.metrics.attempts.add(outcome)
            trail.tried.append(Attempt(target, outcome, began_s, self.clock.monotonic(), why))
        if outcome == "answered":
            return result
        if isinstance(result, WholeResponse) and not is_late:
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


def _outcome(error: UnreachableError | BrokenResponseError) -> str:
    if isinstance(error, UnreachableError):
        return "unreachable"
    return "silent" if error.is_silence else "broken"


def _told(
    error: UnreachableError | BrokenResponseError, ask: InferenceRequest, trail: RetryState
) -> Refusal:
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
                raise admission.bad_timeout(text, _LONGEST_TIMEOUT_S)
            return seconds
    return _NEVER
