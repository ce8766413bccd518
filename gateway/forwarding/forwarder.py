"""Forwards a request to one endpoint after another until one succeeds, within deadline, attempts and retry budget.

The client gets no part of a response before there is a result, so every failure until then can be
retried. The first attempt runs without a task; what must wait, or begins with a failure, is a coroutine.
"""

import logging
from typing import NamedTuple, assert_never

import msgspec
from typing_extensions import override

from gateway import errors
from gateway.forwarding import model_refusals
from gateway.forwarding.admission import Activator, ClientWait, ConcurrencyLimiter, KeepAlive, Slot
from gateway.forwarding.attempt import (
    RETRYABLE_STATUSES,
    TIMEOUT_STATUS,
    AttemptOwner,
    AttemptResult,
    AttemptRunner,
    AttemptWaiter,
    EngineAttempt,
    is_loading,
    outcome_of,
)
from gateway.forwarding.engine_stream import EngineStream
from gateway.forwarding.hedge import AttemptCoroutine, race
from gateway.forwarding.model_state import ModelState, ModelStates, RequestTerms
from gateway.forwarding.on_demand import OnDemandModels
from gateway.forwarding.policy import Deadline, ForwardingPolicy
from gateway.forwarding.resumption import Resumer
from gateway.forwarding.retry_state import (
    AttemptFailures,
    ForwardClient,
    ForwardResult,
    RetryState,
    Waiting,
    WholeResponse,
)
from gateway.forwarding.router import Router
from gateway.request import InferenceRequest
from gateway.routing.selection import ChosenEndpoint, NoReadyEndpoint, RoutingChoice, UnknownModel
from gateway.routing.table import EngineEndpoint, ServedModel
from gateway.upstream.call import BrokenResponseError, UnreachableError, UpstreamError
from gateway.upstream.response_head import list_lines
from machinery.clock import NEVER
from schemas.modelpolicy import on_demand_name
from schemas.wire import headers
from schemas.wire.errors import Refusal

log = logging.getLogger(__name__)

_NO_ENDPOINTS: frozenset[EngineEndpoint] = frozenset()
_RETRY_AFTER = headers.RETRY_AFTER.encode()
_RESUME_REFUSED = frozenset({400, 409})


class Patience(NamedTuple):
    """The wait of a request for an endpoint: for which deployment, how long, and its end."""

    deployment: str
    """The deployment that it waits for."""
    seconds: float
    """From the beginning of its first wait."""
    end: WholeResponse | Refusal
    """The response if none takes it in time."""


class Forwarder(AttemptOwner):
    """Tries endpoints in turn, each at most once for a request."""

    def __init__(
        self,
        *,
        attempts: AttemptRunner,
        model_states: ModelStates,
        activator: Activator,
        router: Router,
        resumer: Resumer,
        on_demand: OnDemandModels,
    ) -> None:
        self.table_cache, self.metrics, self.clock = (
            attempts.table_cache,
            attempts.metrics,
            attempts.clock,
        )
        self._attempts = attempts
        self._random = router.random.random
        self._outliers = attempts.load_tracker.outliers
        self._model_states = model_states
        self._activator = activator
        self._router = router
        self._decisions = router.decisions
        self._resumer = resumer
        self.on_demand = on_demand

    def start(
        self, request: InferenceRequest, state: RetryState, client: ForwardClient, now_s: float
    ) -> None:
        """Forward a request that arrived at `now_s`; `state` records the attempts. `leave` must follow.

        Raises:
            RefusedError: the request cannot be sent to the endpoint.

        """
        state.client = client
        model = self.table_cache.table.models.get(request.model)
        if model is None:
            client.wait_for(self._forward(request, state, client))
            return
        model_state = self._model_states.found.get(request.model)
        if model_state is None or model_state.routing is not model.routing:
            model_state = self._model_states.of(model)
        policy, retries = model_state.policy, model_state.retries
        if request.timeout_s == NEVER == policy.request_s:
            terms = state.terms = model_state.terms
        else:
            terms = state.terms = _terms_until(request, model_state, now_s)
        if now_s >= retries.second + 1:
            retries.advance(int(now_s))
        retries.requests += 1
        if policy.hedge_after_s < NEVER:
            model_state.hedges.count(now_s)
            client.wait_for(self._forward(request, state, client))
            return
        limiter = model_state.limiter
        if limiter is not None:
            slot = limiter.try_enter()
            if slot is None:
                client.wait_for(self._forward_when_admitted(request, state, limiter, client))
                return
            state.add_admission().slot = slot
        state.draw = draw = self._random()
        if request.model in self._activator.lines:
            client.wait_for(self._forward(request, state, client))
            return
        choice = self._router.choose(request, _NO_ENDPOINTS, draw)
        if type(choice) is not ChosenEndpoint or terms.deadline.at_s <= now_s:
            client.wait_for(self._forward(request, state, client))
            return
        if choice.wakes:
            self._activator.note_missing(choice.wakes)
        state.running = self._attempts.start(request, choice.endpoint, state, self)
        state.started += 1

    @override
    def on_result(self, attempt: EngineAttempt, result: AttemptResult) -> None:
        """Pass the result of a first attempt on, or try other endpoints."""
        state = attempt.state
        client, state.running = state.client, None
        assert client is not None
        if self._record_result(attempt, result):
            client.on_result(self._accept(result, attempt.request, state))
        else:
            client.wait_for(self._forward(attempt.request, state, client))

    @override
    def on_failure(self, attempt: EngineAttempt, error: UpstreamError) -> None:
        """Try other endpoints after a failed first attempt."""
        state = attempt.state
        client, state.running = state.client, None
        assert client is not None
        self._record_error(attempt, error)
        client.wait_for(self._forward(attempt.request, state, client))

    def abandon(self, state: RetryState) -> None:
        """End the first attempt of a request whose client left."""
        attempt, state.running = state.running, None
        if attempt is not None:
            attempt.abandon()
            attempt.record("abandoned")

    def _draw(self, state: RetryState) -> float:
        """Return the random draw for all choices of the request."""
        if state.draw < 0:
            state.draw = self._router.draw()
        return state.draw

    def leave(self, state: RetryState) -> None:
        """Free the request's slot; called when the response has ended."""
        if state.admission is None or state.admission.slot is None:
            return
        model_state = state.terms.model_state
        if model_state is not None and model_state.limiter is not None:
            model_state.limiter.leave(state.admission.slot)

    def keep_loaded(self, model: ServedModel, hold_s: float) -> None:
        """Keep the model's deployments from being scaled to zero for so long."""
        self._activator.keep(model.deployments(), hold_s)

    def claim(self, model: ServedModel) -> None:
        """Note that a request uses the model, which clients may have released before."""
        if self._activator.released:
            self._activator.claim(model.deployments())

    def has_free_slot(self, name: str) -> bool:
        """Return whether an engine of the model would begin with a request at once, as far as is known."""
        model = self.table_cache.table.models.get(name)
        backends = () if model is None else model.backends
        has_slot = self._attempts.load_tracker.has_free_slot
        return any(has_slot(endpoint) for backend in backends for endpoint in backend.leased)

    def suspend(self, state: RetryState, stream: EngineStream) -> bool:
        """Free a stream's slot if other requests wait for it; return whether it was freed.

        The stream continues once its client reads again, then without a slot of the gateway's queue: the engine has a
        queue of its own.
        """
        model_state = state.terms.model_state
        limiter = None if model_state is None else model_state.limiter
        is_awaited = limiter is not None and limiter.waiting > 0
        is_awaited = is_awaited or self._activator.is_awaited(stream.endpoint.deployment)
        if not is_awaited and not self._attempts.load_tracker.is_overbooked(stream.endpoint):
            return False
        if not stream.suspend():
            return False
        self.metrics.suspensions.add()
        self.leave(state)
        return True

    async def _forward_when_admitted(
        self,
        request: InferenceRequest,
        state: RetryState,
        limiter: ConcurrencyLimiter,
        client: ClientWait,
    ) -> ForwardResult:
        now_s, deadline = self.clock.monotonic(), state.terms.deadline
        admission = state.add_admission()
        if self._decisions is not None:
            waiting = limiter.waiting
            self._decisions.decision(request, "request waits for a slot", waiting=waiting)
        entered = await limiter.enter(client, until_s=deadline.at_s)
        admission.queued_s += self.clock.monotonic() - now_s
        if isinstance(entered, Slot):
            admission.slot = entered
            if self._decisions is not None:
                seconds = round(admission.queued_s, 3)
                self._decisions.decision(request, "request has a slot", seconds=seconds)
            return await self._forward(request, state, client)
        if self.clock.monotonic() >= deadline.at_s:
            entered = errors.request_timeout(request.model, deadline.timeout_s, 0)
        self.metrics.queue_refused.add(entered.code or "")
        if self._decisions is not None:
            self._decisions.decision(request, "request got no slot", why=entered.message)
        return entered

    async def _forward(
        self, request: InferenceRequest, state: RetryState, client: ClientWait
    ) -> ForwardResult:
        draw, deadline = self._draw(state), state.terms.deadline
        is_next = request.model not in self._activator.lines
        while True:
            now_s, failures = self.clock.monotonic(), state.failures
            if now_s >= deadline.at_s or (failures is not None and failures.is_timed_out):
                return errors.request_timeout(request.model, deadline.timeout_s, state.started)
            choice = self._router.choose(request, state.failed, draw)
            if not is_next or not isinstance(choice, ChosenEndpoint):
                released = await self._wait_for_turn(request, choice, state, client)
                if not isinstance(released, ChosenEndpoint):
                    return released
                choice = released
                is_next, now_s, failures = True, self.clock.monotonic(), state.failures
            self._activator.note_missing(choice.wakes)
            if failures is not None and not self._may_retry(request, state, failures, now_s):
                if not failures.is_rejected_for_now:
                    return self._final_response(state, failures)
                is_next = False
                continue
            result = await self._attempt(request, choice.endpoint, state, draw)
            if result is not None:
                return self._accept(result, request, state)

    def _accept(
        self, result: AttemptResult, request: InferenceRequest, state: RetryState
    ) -> AttemptResult:
        """Record the endpoint that answers."""
        if isinstance(result, EngineStream):
            self._resumer.watch(result, request, state)
        state.served_by = result.endpoint
        if state.terms.policy.hedge_after_s < NEVER:
            self._router.remember_answer(request, result.endpoint)
        return result

    async def _wait_for_turn(
        self,
        request: InferenceRequest,
        choice: RoutingChoice,
        state: RetryState,
        client: ClientWait,
    ) -> ChosenEndpoint | WholeResponse | Refusal:
        """Wait in the model's line until an endpoint can take the request; return the response if none does in time.

        A caller that gets an endpoint must begin the attempt without another wait: the next request in the line looks
        for a free slot then.
        """
        patience = self._patience(request, choice, state)
        if not isinstance(patience, Patience):
            return patience
        admission, deadline = state.add_admission(), state.terms.deadline
        began_s = self.clock.monotonic()
        if admission.waiting is None:
            keep_alive = KeepAlive(self.clock, client, self._model_states.keep_alive_s)
            admission.waiting = Waiting(began_s, keep_alive)
        waiting = admission.waiting
        place = self._activator.enter(request.model, waiting.place)
        if place is None:
            limit = self._activator.limit_of(request.model)
            wait_s = self._wait_s(patience.deployment)
            too_many = model_refusals.too_many_waiting(request.model, limit, wait_s)
            return too_many if state.failures is None else patience.end
        waiting.place = place
        if state.failures is not None:
            state.failures.excuse()
        if self._decisions is not None:
            message = "request waits for an endpoint"
            self._decisions.decision(request, message, deployment=patience.deployment)
        try:
            while True:
                place.deployment = patience.deployment
                until_s = min(waiting.since_s + patience.seconds, deadline.at_s)
                if (now_s := self.clock.monotonic()) >= until_s:
                    if now_s < deadline.at_s or state.failures is not None:
                        return patience.end
                    return errors.request_timeout(request.model, deadline.timeout_s, state.started)
                await self._activator.wait(place, waiting.keep_alive, until_s=until_s)
                failed, draw = state.failed, self._draw(state)
                if self._activator.is_first(place):
                    choice = self._router.choose_free(request, failed, draw)
                    if isinstance(choice, ChosenEndpoint):
                        return choice
                # Full endpoints are worth waiting for.
                choice = self._router.look(request, failed, draw)
                patience = self._patience(request, choice, state)
                if not isinstance(patience, Patience):
                    return patience
        finally:
            self._activator.leave(place)
            admission.queued_s += self.clock.monotonic() - began_s

    def _wait_s(self, deployment: str) -> float:
        """Return the seconds in which the first replica of a deployment is expected; 0 if that is not known."""
        forecast = self.table_cache.load_forecast(deployment)
        return 0.0 if forecast is None else forecast.remaining_s(self.clock.now())

    def _patience(
        self, request: InferenceRequest, choice: RoutingChoice, state: RetryState
    ) -> Patience | WholeResponse | Refusal:
        """Return how long a request waits that no endpoint takes now; the response if waiting is of no use."""
        name, policy, failures = request.model, state.terms.policy, state.failures
        wakes = choice.wakes if isinstance(choice, NoReadyEndpoint) else ""
        # Of engines that died, some may have died of the request: it waits for its own only.
        if failures is not None and (failures.rejection or failures.was_seen or not wakes):
            last, deployment = failures.rejection, state.attempts[-1].endpoint.deployment
            if last is None:
                assert failures.refusal is not None
                return Patience(deployment, policy.recovery_s, failures.refusal)
            end = self._final_response(state, failures)
            return Patience(deployment, policy.hold_s, end) if failures.is_rejected_for_now else end
        match choice:
            case ChosenEndpoint(endpoint=endpoint):
                end = model_refusals.all_busy(name, policy.hold_s)
                return Patience(endpoint.deployment, policy.hold_s, end)
            case NoReadyEndpoint(reason=reason) if wakes:
                end = model_refusals.model_starting(
                    name, policy.hold_s, reason, self._wait_s(wakes)
                )
                return Patience(wakes, policy.hold_s, end)
            case NoReadyEndpoint(reason=reason, recovering=recovering) if recovering:
                end = model_refusals.nothing_ready(name, reason)
                return Patience(recovering, policy.recovery_s, end)
            case _:
                return self._await_deployment(request, choice, policy)

    def _await_deployment(
        self,
        request: InferenceRequest,
        choice: UnknownModel | NoReadyEndpoint,
        policy: ForwardingPolicy,
    ) -> Patience | Refusal:
        """Return how long a request waits for a ModelDeployment that the reconciler is asked for; else the refusal."""
        name = request.model
        if not isinstance(choice, UnknownModel) or not self.on_demand.is_asked(name):
            return self._refusal(request, choice)
        refusal = self.on_demand.refusal(name)
        if refusal is not None:
            return refusal
        self.on_demand.renew(name)
        reason = "The reconciler decides whether to deploy it on demand."
        end = model_refusals.model_starting(name, policy.hold_s, reason, 0.0)
        return Patience(on_demand_name(name), policy.hold_s, end)

    def _may_retry(
        self, request: InferenceRequest, state: RetryState, failures: AttemptFailures, now_s: float
    ) -> bool:
        """Return whether another attempt is allowed by the request's limit and the model's retry budget."""
        refusal, model_state = "", None if failures.is_retry_free else state.terms.model_state
        if state.started - failures.excused >= state.terms.policy.attempts:
            refusal = "the request has no attempt left"
        elif model_state is not None and not model_state.retries.spend(now_s):
            self.metrics.attempts.add("over_budget")
            refusal = "the retry budget of the model is spent"
        else:
            self.metrics.retries.add(request.model)
        if self._decisions is not None:
            message = "request is not tried again" if refusal else "request is tried again"
            attempts = {"attempts": state.started, "free": failures.is_retry_free}
            why = {"why": refusal} if refusal else {}
            self._decisions.decision(request, message, **attempts, **why)
        return not refusal

    def _final_response(
        self, state: RetryState, failures: AttemptFailures
    ) -> WholeResponse | Refusal:
        """Return the response when no further attempt is allowed: the last engine's, with a retry-after."""
        last = failures.rejection
        if last is not None:
            if any(name == _RETRY_AFTER for name, _ in list_lines(last.passed)):
                return last
            return msgspec.structs.replace(last, passed=last.passed + b"%b: 1\r\n" % _RETRY_AFTER)
        assert failures.refusal is not None
        if state.started - failures.excused >= state.terms.policy.attempts:
            return failures.refusal
        return errors.not_retried(failures.refusal)

    def _refusal(
        self, request: InferenceRequest, choice: UnknownModel | NoReadyEndpoint
    ) -> Refusal:
        if not self.table_cache.is_synced:
            return errors.not_synced()
        match choice:
            case UnknownModel(known=known, nearest=nearest, idle=idle):
                return errors.unknown_model(request.model, known, nearest, idle)
            case NoReadyEndpoint(reason=reason):
                return model_refusals.nothing_ready(request.model, reason)
            case _:
                assert_never(choice)

    def _attempt(
        self, request: InferenceRequest, endpoint: EngineEndpoint, state: RetryState, draw: float
    ) -> AttemptCoroutine:
        if state.terms.policy.hedge_after_s == NEVER:
            return self._try_endpoint(request, endpoint, state)
        return self._race(request, endpoint, state, draw)

    async def _race(
        self, request: InferenceRequest, endpoint: EngineEndpoint, state: RetryState, draw: float
    ) -> AttemptResult | None:
        """Try one endpoint, and a second one in parallel if the first is slow."""
        policy, model_state = state.terms.policy, state.terms.model_state

        def rival() -> AttemptCoroutine | None:
            now_s = self.clock.monotonic()
            choice = self._router.choose(request, state.failed | {endpoint}, draw)
            if not isinstance(choice, ChosenEndpoint) or state.started >= policy.attempts:
                return None
            if choice.endpoint.origin in self._outliers.ejected_origins or model_state is None:
                return None
            if not model_state.hedges.spend(now_s):
                return None
            self.metrics.hedges.add("asked")
            if self._decisions is not None:
                replica = choice.endpoint.replica
                self._decisions.decision(request, "request is hedged", replica=replica)
            return self._try_endpoint(request, choice.endpoint, state)

        first = self._try_endpoint(request, endpoint, state)
        result = await race(first, rival, after_s=policy.hedge_after_s)
        if result is not None and result.endpoint != endpoint:
            self.metrics.hedges.add("won")
        return result

    async def _try_endpoint(
        self, request: InferenceRequest, endpoint: EngineEndpoint, state: RetryState
    ) -> AttemptResult | None:
        """Try one endpoint; return None if it failed, which is recorded."""
        waiter = AttemptWaiter()
        attempt = self._attempts.start(request, endpoint, state, waiter)
        state.started += 1
        try:
            result = await waiter.wait(attempt)
        except (UnreachableError, BrokenResponseError) as error:
            self._record_error(attempt, error)
            return None
        except BaseException:
            attempt.record("abandoned")
            raise
        return result if self._record_result(attempt, result) else None

    def _record_result(self, attempt: EngineAttempt, result: AttemptResult) -> bool:
        """Record the response to an attempt; return False if another endpoint may do better."""
        state = attempt.state
        if attempt.is_resumed and result.status in _RESUME_REFUSED:
            # Its model or template differs, so it may answer from the start.
            attempt.record("turned_away")
            state.add_failures().resume_log = None
            return False
        if result.status not in RETRYABLE_STATUSES:
            attempt.record("resumed" if attempt.is_resumed else "answered")
            if attempt.is_resumed:
                state.record_resumption(attempt.endpoint)
                self.metrics.resumptions.add("resumed")
            return True
        assert isinstance(result, WholeResponse)  # a stream has no such status
        if result.status == TIMEOUT_STATUS and attempt.is_timeout(result.body):
            self._record_late(attempt)
            self._record_failed(attempt, "timed_out", "", None)
        elif is_loading(attempt.endpoint, result.status, result.body):
            self._record_error(attempt, UnreachableError("it loads its model"))
        else:
            attempt.record("turned_away")
            self._record_failed(attempt, "turned_away", "", result)
        return False

    def _record_error(self, attempt: EngineAttempt, error: UpstreamError) -> None:
        """Record an attempt without a response."""
        state, outcome, why = attempt.state, outcome_of(error), str(error)
        refusal = _refusal_for(error, attempt.request, state)
        is_unreached = isinstance(error, UnreachableError)
        state.add_failures().add_error(attempt.endpoint, refusal, is_unreached=is_unreached)
        if self.clock.monotonic() >= state.terms.deadline.at_s:
            outcome = "timed_out"
            self._record_late(attempt)
        else:
            attempt.record(outcome, why)
        self._record_failed(attempt, outcome, why, None)

    def _record_late(self, attempt: EngineAttempt) -> None:
        """Record an attempt that ended at the request's deadline."""
        state = attempt.state
        state.served_by = attempt.endpoint
        state.add_failures().is_timed_out = True
        why = f"the request's {state.terms.deadline.timeout_s:g} s were over"
        attempt.record("timed_out", why)

    def _record_failed(
        self, attempt: EngineAttempt, outcome: str, why: str, rejection: WholeResponse | None
    ) -> None:
        """Record that the endpoint is not tried again for this request."""
        endpoint = attempt.endpoint
        # The first failure of a healthy endpoint is retried for free. An engine that dies, hangs or
        # drains thus causes at most as many free retries as it had requests, which cannot become a
        # retry storm.
        failures = attempt.state.add_failures()
        failures.add(endpoint, rejection=rejection, is_retry_free=attempt.is_trusted)
        if attempt.resume_log is not None:
            failures.resume_log = attempt.resume_log
        log.info(
            "engine did not serve a request; trying another",
            extra={
                "request_id": attempt.request.request_id.decode("ascii"),
                "replica": endpoint.replica,
                "node": endpoint.node,
                "outcome": outcome,
                "why": why,
            },
        )


def _terms_until(request: InferenceRequest, model_state: ModelState, now_s: float) -> RequestTerms:
    """Return the terms of a request with a deadline, its own or the model's."""
    policy, own_s = model_state.policy, request.timeout_s
    timeout_s = min(policy.request_s, own_s)
    deadline = Deadline(now_s + timeout_s, timeout_s, own_s < policy.request_s)
    return RequestTerms(model_state, policy, deadline)


def _refusal_for(error: UpstreamError, request: InferenceRequest, state: RetryState) -> Refusal:
    """Return the refusal for the case that no other endpoint answers."""
    if isinstance(error, UnreachableError):
        return errors.unreachable(request.model, state.started, str(error))
    if error.is_silence:
        return errors.upstream_silent(request.model, str(error))
    return errors.upstream_failed(request.model, state.started, str(error))
