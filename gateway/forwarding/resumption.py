"""Has streams whose engine died go on at another, where the first one broke off. See docs/adr/0022-resumption.md.

The client keeps its stream, and the next engine tells only what the client has not seen. Reads nothing of live streams.
"""

import dataclasses
import logging
from dataclasses import dataclass, field
from functools import partial

from typing_extensions import override

from gateway.forwarding.attempt import TURNED_AWAY, AttemptRunner
from gateway.forwarding.engine_stream import EngineStream, ResumeSearch
from gateway.forwarding.resume_log import ResumeLog, ResumePoint
from gateway.forwarding.retry_state import Attempt, RetryState, WholeResponse
from gateway.forwarding.router import Router
from gateway.metrics.gateway_metrics import GatewayMetrics
from gateway.request import InferenceRequest
from gateway.routing.selection import ChosenEndpoint
from gateway.routing.table import EngineEndpoint
from gateway.upstream.connection import BrokenResponseError
from gateway.upstream.connection_pool import UnreachableError
from machinery.clock import Clock

log = logging.getLogger(__name__)

# How soon whoever failed is asked again, and how soon at last: a connection may break and its engine live.
_AGAIN_S, _LATER_S = 0.2, 1.0
# Proxies give up silent connections after 30 to 60 s, impatient clients earlier.
_BEAT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumer:
    """Looks for whoever goes on."""

    attempts: AttemptRunner
    router: Router
    patience_s: float
    """How long a stream waits for somebody to go on."""
    beat_s: float = _BEAT_S
    """How often its client hears meanwhile that it is not forgotten."""

    @property
    def clock(self) -> Clock:
        return self.attempts.clock

    @property
    def metrics(self) -> GatewayMetrics:
        return self.attempts.metrics

    def watch(self, stream: EngineStream, ask: InferenceRequest, trail: RetryState) -> None:
        """Have a stream go on elsewhere should its engine die, if it is one of those that can."""
        if ask.is_resumable and ResumeLog.is_marked(stream.first):
            tape = ResumeLog(trail.policy.resumable_tokens)
            stream.watch(tape, partial(self.search, ask, trail))

    def search(
        self,
        ask: InferenceRequest,
        trail: RetryState,
        stream: EngineStream,
        error: BrokenResponseError,
    ) -> ResumeSearch:
        """Return the search for somebody who goes on with the stream that broke with the error.

        Raises:
            BrokenError: there is none to be begun.

        """
        assert stream.tape is not None
        now_s, policy = self.clock.monotonic(), trail.policy
        told = stream.tape.told()
        if trail.resumptions >= policy.resumptions:
            raise self.given_up("too_often", error, f"went on elsewhere {trail.resumptions} times")
        if told is None or len(told.tokens) > policy.resumable_tokens:
            raise self.given_up("too_long", error, f"more than {policy.resumable_tokens} tokens")
        if now_s >= trail.deadline_s:
            raise self.given_up(
                "too_late", error, f"the {trail.timeout_s:g} s of the request are over"
            )
        log.warning(
            "an engine died in a stream; looking for another to go on",
            extra={
                "request_id": ask.request_id.decode("ascii"),
                "replica": stream.target.replica,
                "node": stream.target.node,
                "tokens": len(told.tokens),
                "why": str(error),
            },
        )
        return Resumption(
            resumer=self,
            ask=dataclasses.replace(ask, body=told.continued(ask.body)),
            trail=trail,
            told=told,
            error=error,
            dead=stream.target,
            began_s=now_s,
        )

    def given_up(self, outcome: str, error: BrokenResponseError, why: str) -> BrokenResponseError:
        """Count a stream that ends here, and return why it does."""
        self.metrics.resumptions.add(outcome)
        return BrokenResponseError(f"{error}; it is not resumed: {why}", had_bytes=True)


@dataclass(slots=True, kw_only=True)
class Resumption(ResumeSearch):
    """The search for an engine that goes on with one stream."""

    resumer: Resumer
    ask: InferenceRequest
    """What whoever goes on is asked."""
    trail: RetryState
    told: ResumePoint
    error: BrokenResponseError
    """How the stream broke."""
    dead: EngineEndpoint
    began_s: float
    _failed: set[EngineEndpoint] = field(default_factory=set)
    """Who is not asked just now."""
    _unfit: set[EngineEndpoint] = field(default_factory=set)
    """Who is not asked at all."""
    _again_s: float = 0.0
    _pause_s: float = 2 * _AGAIN_S
    _until_s: float = 0.0
    _draw: float = 0.0
    _deaths: int = 0
    _words: str = ""
    """What was last said by somebody who did not go on."""

    def __post_init__(self) -> None:
        """Begin without the one that died; one that hangs would hang again."""
        self._failed.add(self.dead)
        if self.error.is_silence:
            self._unfit.add(self.dead)
        self._again_s = self.began_s + _AGAIN_S
        self._until_s = min(self.began_s + self.resumer.patience_s, self.trail.deadline_s)
        self._draw = self.resumer.router.draw()

    @property
    @override
    def is_finished(self) -> bool:
        return self.told.is_finished

    @override
    async def step(self) -> EngineStream | None:
        clock, router = self.resumer.clock, self.resumer.router
        now_s = clock.monotonic()
        beat_s = now_s + self.resumer.beat_s
        while now_s < self._until_s:
            if now_s >= self._again_s:
                self._failed, self._again_s = set(self._unfit), now_s + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LATER_S)
            choice = router.choose(self.ask, self._failed, self._draw)
            if isinstance(choice, ChosenEndpoint):
                found = await self._try(choice.target)
                if found is not None:
                    self._goes_on(found)
                    return found
            elif now_s >= beat_s:
                return None
            else:
                until_s = min(self._until_s, self._again_s, beat_s)
                await self.resumer.attempts.keeper.changed(within_s=until_s - now_s)
            now_s = clock.monotonic()
        spent_s = now_s - self.began_s
        said = f" (the last said: {self._words})" if self._words else ""
        why = f"no replica of '{self.ask.model}' could go on with it within {spent_s:.0f} s{said}"
        raise self.resumer.given_up("refused" if self._words else "nobody", self.error, why)

    async def _try(self, target: EngineEndpoint) -> EngineStream | None:
        """Ask one engine; return None if it does not go on, which is then noted."""
        trail, resumer = self.trail, self.resumer
        trail.attempts += 1
        began_s = resumer.clock.monotonic()
        outcome, why, result = "abandoned", "", None
        try:
            result = await resumer.attempts.ask(self.ask, target, trail)
            outcome = "resumed" if self._is_fit(result) else "turned_away"
            why = "" if outcome == "resumed" else self._words
        except UnreachableError as error:
            outcome, why = "unreachable", str(error)
        except BrokenResponseError as error:
            outcome, why = "silent" if error.is_silence else "broken", str(error)
            self._died(target, error)
        finally:
            self._failed.add(target)
            resumer.metrics.attempts.add(outcome)
            trail.tried.append(Attempt(target, outcome, began_s, resumer.clock.monotonic(), why))
        return result if isinstance(result, EngineStream) and outcome == "resumed" else None

    def _is_fit(self, result: EngineStream | WholeResponse) -> bool:
        """Return whether an engine goes on; if not, it is noted why."""
        if isinstance(result, EngineStream):
            if ResumeLog.is_marked(result.first):
                return True
            # It began anew: what it says is not what comes next.
            result.close()
            self._unfit.add(result.target)
            self._words = "it knows no resumption"
        elif result.status not in TURNED_AWAY:
            # Such as 409, prompt_differs: another model or template has the same name there.
            self._unfit.add(result.target)
            self._words = result.body[:300].decode(errors="replace")
        return False

    def _died(self, target: EngineEndpoint, error: BrokenResponseError) -> None:
        """Note that an engine died of it.

        Raises:
            BrokenError: too many did.

        """
        self._deaths += 1
        if error.is_silence:
            self._unfit.add(target)
        if self.trail.resumptions + self._deaths > self.trail.policy.resumptions:
            why = f"{self._deaths} more replicas broke off before they went on"
            raise self.resumer.given_up("too_often", self.error, why)

    def _goes_on(self, found: EngineStream) -> None:
        trail, resumer = self.trail, self.resumer
        trail.resumptions += 1
        trail.served_by = found.target
        resumer.metrics.resumptions.add("resumed")
        resumer.router.took(self.ask, found.target)
        log.info(
            "another engine goes on with a stream",
            extra={
                "request_id": self.ask.request_id.decode("ascii"),
                "replica": found.target.replica,
                "node": found.target.node,
                "tokens": len(self.told.tokens),
                "seconds": round(resumer.clock.monotonic() - self.began_s, 3),
            },
        )
