"""Has streams whose engine died go on at another, where the first one broke off. See docs/adr/0022-resumption.md.

The client keeps its stream, and the next engine tells only what the client has not seen. Reads nothing of live streams.
"""

import dataclasses
import logging
from dataclasses import dataclass, field
from functools import partial

from typing_extensions import override

from gateway.asks import Ask
from gateway.carry.attempt import TURNED_AWAY, Attempts
from gateway.carry.marks import Tape, Told
from gateway.carry.router import Router
from gateway.carry.streaming import Search, Streaming
from gateway.carry.trail import Trail, Tried, Whole
from gateway.routing.choosing import Chosen
from gateway.routing.table import Target
from gateway.upstream.exchange import BrokenError
from gateway.upstream.pool import UnreachableError
from gateway.watch.metrics import Metrics
from machinery.clock import Clock

log = logging.getLogger(__name__)

# How soon whoever failed is asked again, and how soon at last: a connection may break and its engine live.
_AGAIN_S, _LATER_S = 0.2, 1.0
# Proxies give up silent connections after 30 to 60 s, impatient clients earlier.
_BEAT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumer:
    """Looks for whoever goes on."""

    attempts: Attempts
    router: Router
    patience_s: float
    """How long a stream waits for somebody to go on."""
    beat_s: float = _BEAT_S
    """How often its client hears meanwhile that it is not forgotten."""

    @property
    def clock(self) -> Clock:
        return self.attempts.clock

    @property
    def metrics(self) -> Metrics:
        return self.attempts.metrics

    def watch(self, stream: Streaming, ask: Ask, trail: Trail) -> None:
        """Have a stream go on elsewhere should its engine die, if it is one of those that can."""
        if ask.is_resumable and Tape.is_marked(stream.first):
            tape = Tape(trail.policy.resumable_tokens)
            stream.watch(tape, partial(self.search, ask, trail))

    def search(self, ask: Ask, trail: Trail, stream: Streaming, error: BrokenError) -> Search:
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

    def given_up(self, outcome: str, error: BrokenError, why: str) -> BrokenError:
        """Count a stream that ends here, and return why it does."""
        self.metrics.resumptions.add(outcome)
        return BrokenError(f"{error}; it is not resumed: {why}", had_bytes=True)


@dataclass(slots=True, kw_only=True)
class Resumption(Search):
    """The search for an engine that goes on with one stream."""

    resumer: Resumer
    ask: Ask
    """What whoever goes on is asked."""
    trail: Trail
    told: Told
    error: BrokenError
    """How the stream broke."""
    dead: Target
    began_s: float
    _failed: set[Target] = field(default_factory=set)
    """Who is not asked just now."""
    _unfit: set[Target] = field(default_factory=set)
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
    async def step(self) -> Streaming | None:
        clock, router = self.resumer.clock, self.resumer.router
        now_s = clock.monotonic()
        beat_s = now_s + self.resumer.beat_s
        while now_s < self._until_s:
            if now_s >= self._again_s:
                self._failed, self._again_s = set(self._unfit), now_s + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LATER_S)
            choice = router.choose(self.ask, self._failed, self._draw)
            if isinstance(choice, Chosen):
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

    async def _try(self, target: Target) -> Streaming | None:
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
        except BrokenError as error:
            outcome, why = "silent" if error.is_silence else "broken", str(error)
            self._died(target, error)
        finally:
            self._failed.add(target)
            resumer.metrics.attempts.add(outcome)
            trail.tried.append(Tried(target, outcome, began_s, resumer.clock.monotonic(), why))
        return result if isinstance(result, Streaming) and outcome == "resumed" else None

    def _is_fit(self, result: Streaming | Whole) -> bool:
        """Return whether an engine goes on; if not, it is noted why."""
        if isinstance(result, Streaming):
            if Tape.is_marked(result.first):
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

    def _died(self, target: Target, error: BrokenError) -> None:
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

    def _goes_on(self, found: Streaming) -> None:
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
