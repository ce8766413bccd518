"""Resumption: continues the stream of a dead engine on another one. See docs/adr/0023-resumption.md.

The client keeps its stream, and the next engine sends only what is missing.
"""

import logging
from dataclasses import dataclass, field

import msgspec

from gateway.forwarding.attempt import RETRYABLE_STATUSES, AttemptRunner, AttemptWaiter, outcome_of
from gateway.forwarding.engine_stream import EngineStream
from gateway.forwarding.resume_log import ResumeLog, ResumePoint
from gateway.forwarding.retry_state import (
    LATER_STATUSES,
    RetryState,
    WholeResponse,
)
from gateway.forwarding.router import Router
from gateway.metrics.gateway_metrics import GatewayMetrics
from gateway.request import InferenceRequest
from gateway.routing.selection import ChosenEndpoint
from gateway.routing.table import EngineEndpoint
from gateway.upstream.call import BrokenResponseError, SuspendedError, UnreachableError
from machinery.backoff import Backoff
from machinery.clock import NEVER, Clock

log = logging.getLogger(__name__)

# Pauses before failed endpoints are tried again: a connection may break while its engine lives. With jitter, because
# all streams of a dead engine search at once.
_BACKOFF = Backoff(first_s=0.3, limit_s=1.5)
# Proxies drop silent connections after 30 to 60 s, impatient clients earlier.
_KEEP_ALIVE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumer:
    """Starts searches for engines that continue a stream."""

    attempts: AttemptRunner
    router: Router
    keep_alive_s: float = _KEEP_ALIVE_S
    """Interval of keep-alive events during a search."""

    @property
    def clock(self) -> Clock:
        return self.attempts.clock

    @property
    def metrics(self) -> GatewayMetrics:
        return self.attempts.metrics

    def watch(self, stream: EngineStream, request: InferenceRequest, state: RetryState) -> None:
        """Make the stream resumable, if its engine sends resume records."""
        if request.is_resumable and stream.records:
            stream.resume_log = ResumeLog(state.terms.policy.resumable_tokens)
            for record in stream.records:
                stream.resume_log.add(record)
            stream.continuation = Continuation(self, request, state)

    def give_up(self, outcome: str, error: BrokenResponseError, why: str) -> BrokenResponseError:
        """Count a stream that is not resumed, and return its error."""
        self.metrics.resumptions.add(outcome)
        return BrokenResponseError(f"{error}; it is not resumed: {why}", had_bytes=True)


@dataclass(frozen=True, slots=True)
class Continuation:
    """Continues the streams of one request."""

    resumer: Resumer
    request: InferenceRequest
    state: RetryState

    def search(self, stream: EngineStream, error: BrokenResponseError) -> "Resumption":
        """Return the search for an engine that continues the stream after the error.

        Raises:
            BrokenResponseError: the stream cannot be resumed.

        """
        resumer, request, state = self.resumer, self.request, self.state
        assert stream.resume_log is not None
        is_suspended = isinstance(error, SuspendedError)
        resume_point = stream.resume_log.resume_point(request.choices)
        obstacle = self._obstacle(resume_point)
        if obstacle is not None:
            # A stream that is not suspended goes on; it is not given up.
            raise error if is_suspended else resumer.give_up(obstacle[0], error, obstacle[1])
        assert resume_point is not None
        log.log(
            logging.INFO if is_suspended else logging.WARNING,
            "stream suspended; its engine serves others"
            if is_suspended
            else "engine died during a stream; looking for another to continue it",
            extra={
                "request_id": request.request_id.decode("ascii"),
                "replica": stream.endpoint.replica,
                "node": stream.endpoint.node,
                "tokens": resume_point.tokens,
                "why": str(error),
            },
        )
        return Resumption(
            resumer=resumer,
            request=msgspec.structs.replace(request, body=resume_point.resume_body(request.body)),
            state=state,
            resume_point=resume_point,
            error=error,
            dead=None if is_suspended else stream.endpoint,
        )

    def _obstacle(self, resume_point: ResumePoint | None) -> tuple[str, str] | None:
        """Return why a stream cannot continue, as outcome and text; None if it can."""
        state = self.state
        policy, deadline = state.terms.policy, state.terms.deadline
        if state.resumptions >= policy.resumptions:
            why = f"it continued on other replicas {state.resumptions} times already"
            return "too_often", why
        if resume_point is None or resume_point.tokens > policy.resumable_tokens:
            return "too_long", f"it has more than {policy.resumable_tokens} tokens"
        if self.resumer.clock.monotonic() >= deadline.at_s:
            return "too_late", f"the {deadline.timeout_s:g} s of the request are over"
        return None


@dataclass(slots=True, kw_only=True)
class Resumption:
    """The search for an engine that continues one stream."""

    resumer: Resumer
    request: InferenceRequest
    """The request to the next engine."""
    state: RetryState
    resume_point: ResumePoint
    error: BrokenResponseError
    """The error that broke the stream."""
    dead: EngineEndpoint | None
    """The endpoint that is not tried for the moment; None if it lives."""
    _failed: set[EngineEndpoint] = field(default_factory=set)
    """Endpoints that are not tried for the moment."""
    _unfit: set[EngineEndpoint] = field(default_factory=set)
    """Endpoints that are never tried."""
    _began_s: float = NEVER
    """Time of the first step: a suspended stream may wait long for its client."""
    _retry_s: float = 0.0
    _pauses: int = 0
    """The number of pauses so far."""
    _until_s: float = 0.0
    _draw: float = 0.0
    _deaths: int = 0
    _last_reason: str = ""
    """The last answer of an engine that refused to continue."""

    def __post_init__(self) -> None:
        """Exclude the dead engine for a moment, and a hanging one for good."""
        if self.dead is not None:
            self._failed.add(self.dead)
            if self.error.is_silence:
                self._unfit.add(self.dead)
        self._draw = self.resumer.router.draw()

    async def step(self) -> EngineStream | None:
        """Return the rest of the stream; None if a keep-alive event is due.

        Raises:
            BrokenResponseError: no engine continues the stream.

        """
        clock, router = self.resumer.clock, self.resumer.router
        now_s = clock.monotonic()
        if self._began_s == NEVER:
            self._began_s = now_s
            self._retry_s = now_s + self._next_pause_s()
            terms = self.state.terms
            self._until_s = min(now_s + terms.policy.recovery_s, terms.deadline.at_s)
        keep_alive_s = now_s + self.resumer.keep_alive_s
        while now_s < self._until_s:
            if now_s >= self._retry_s:
                self._failed, self._retry_s = set(self._unfit), now_s + self._next_pause_s()
            choice = router.choose(self.request, self._failed, self._draw)
            if isinstance(choice, ChosenEndpoint) and choice.endpoint.external is not None:
                # Another model, which would begin anew.
                self._unfit.add(choice.endpoint)
                self._failed.add(choice.endpoint)
                continue
            if isinstance(choice, ChosenEndpoint):
                engine_stream = await self._try_endpoint(choice.endpoint)
                if engine_stream is not None:
                    state, resumer = self.state, self.resumer
                    state.record_resumption(engine_stream.endpoint)
                    resumer.metrics.resumptions.add("resumed")
                    resumer.router.remember_answer(self.request, engine_stream.endpoint)
                    log.info(
                        "stream continues on another engine",
                        extra={
                            "request_id": self.request.request_id.decode("ascii"),
                            "replica": engine_stream.endpoint.replica,
                            "node": engine_stream.endpoint.node,
                            "tokens": self.resume_point.tokens,
                            "seconds": round(resumer.clock.monotonic() - self._began_s, 3),
                        },
                    )
                    return engine_stream
            elif now_s >= keep_alive_s:
                return None
            else:
                until_s = min(self._until_s, self._retry_s, keep_alive_s)
                await self.resumer.attempts.table_cache.changed(within_s=until_s - now_s)
            now_s = clock.monotonic()
        spent_s = now_s - self._began_s
        reason = f" (the last answered: {self._last_reason})" if self._last_reason else ""
        why = (
            f"no replica of '{self.request.model}' could continue it within {spent_s:.0f} s{reason}"
        )
        raise self.resumer.give_up("refused" if self._last_reason else "nobody", self.error, why)

    def _next_pause_s(self) -> float:
        self._pauses += 1
        return _BACKOFF.delay_s(self._pauses, jitter=self.resumer.router.draw())

    async def _try_endpoint(self, endpoint: EngineEndpoint) -> EngineStream | None:
        """Try one endpoint; return None if it does not continue, which is recorded."""
        waiter = AttemptWaiter()
        attempt = self.resumer.attempts.start(self.request, endpoint, self.state, waiter)
        self.state.started += 1
        outcome, why, result = "abandoned", "", None
        try:
            result = await waiter.wait(attempt)
            outcome = "resumed" if self._is_fit(result) else "turned_away"
            why = "" if outcome == "resumed" else self._last_reason
        except (UnreachableError, BrokenResponseError) as error:
            outcome, why = outcome_of(error), str(error)
            if isinstance(error, BrokenResponseError):
                self._record_death(endpoint, error)
        finally:
            self._failed.add(endpoint)
            attempt.record(outcome, why)
        return result if isinstance(result, EngineStream) and outcome == "resumed" else None

    def _is_fit(self, result: EngineStream | WholeResponse) -> bool:
        """Return whether the engine continues; if not, record the reason."""
        if isinstance(result, EngineStream):
            if result.records:
                return True
            # It started anew, so its text is not the continuation.
            result.close()
            self._unfit.add(result.endpoint)
            self._last_reason = "it does not support resumption"
        elif result.status not in RETRYABLE_STATUSES:
            # Such as 409, prompt_differs: the model or template has changed there.
            self._unfit.add(result.endpoint)
            self._last_reason = result.body[:300].decode(errors="replace")
        elif result.status in LATER_STATUSES:
            # It lives and has no slot: the stream waits for one as long as a new request would.
            terms = self.state.terms
            until_s = min(self._began_s + terms.policy.hold_s, terms.deadline.at_s)
            self._until_s = max(self._until_s, until_s)
        return False

    def _record_death(self, endpoint: EngineEndpoint, error: BrokenResponseError) -> None:
        """Record that an engine died during the search.

        Raises:
            BrokenResponseError: too many died.

        """
        self._deaths += 1
        if error.is_silence:
            self._unfit.add(endpoint)
        if self.state.resumptions + self._deaths > self.state.terms.policy.resumptions:
            why = f"{self._deaths} more replicas failed before they continued it"
            raise self.resumer.give_up("too_often", self.error, why)
