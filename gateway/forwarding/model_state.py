"""Forwarding state of each model: its policy, retry and hedging budgets, and concurrency limiter."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.forwarding.admission import KEEP_ALIVE_S, ConcurrencyLimiter
from gateway.forwarding.policy import (
    DEFAULT_POLICY,
    HOLD_S,
    NO_DEADLINE,
    RECOVERY_S,
    Deadline,
    ForwardingPolicy,
    policy_of,
)
from gateway.routing.table import ServedModel
from machinery.clock import Clock
from schemas.routing import Routing

WINDOW_S = 10
# For models with a request a minute, of which a fifth is nothing.
FLOOR = 10
# One hedged request now and then even at low rates, where its cost does not matter.
_HEDGE_FLOOR = 1


@dataclass(slots=True)
class RetryBudget:
    """Retry budget of one model: a percentage of the requests of the last ten seconds, plus a floor. Pure.

    Without it each failure doubles the load on the remaining engines, which makes more of them
    fail: a retry storm.
    """

    percent: float
    floor: int = FLOOR
    """Retries allowed in any ten seconds, however few requests there are."""
    second: int = 0
    """The current second, by the gateway's clock."""
    requests: int = 0
    """Requests of the current second. The forwarder counts them here, after `advance`."""
    _requests: list[int] = field(default_factory=lambda: [0] * WINDOW_S)
    _retries: list[int] = field(default_factory=lambda: [0] * WINDOW_S)
    _requests_sum: int = 0
    """Requests of the seconds before."""
    _retries_sum: int = 0

    def count(self, now_s: float) -> None:
        """Count a request."""
        self.advance(int(now_s))
        self.requests += 1

    def spend(self, now_s: float) -> bool:
        """Take one retry from the budget; return False if it is used up."""
        self.advance(int(now_s))
        requests = self._requests_sum + self.requests
        if self._retries_sum >= self.floor + requests * self.percent // 100:
            return False
        self._retries[self.second % WINDOW_S] += 1
        self._retries_sum += 1
        return True

    def advance(self, second: int) -> None:
        """Begin a new second, and drop those that left the window. Nothing happens if it has begun."""
        if second <= self.second:
            return
        self._requests[self.second % WINDOW_S] = self.requests
        self._requests_sum += self.requests
        self.requests = 0
        for old in range(max(self.second + 1, second - WINDOW_S + 1), second + 1):
            slot = old % WINDOW_S
            self._requests_sum -= self._requests[slot]
            self._retries_sum -= self._retries[slot]
            self._requests[slot] = self._retries[slot] = 0
        self.second = second


@dataclass(slots=True, eq=False)
class RequestTerms:
    """The terms of requests, never changed: of all requests without a deadline, or of one with its own."""

    model_state: "ModelState | None" = None
    """State of the requested model; None if the model is unknown."""
    policy: ForwardingPolicy = DEFAULT_POLICY
    deadline: Deadline = NO_DEADLINE


class ModelState:
    """State of one model."""

    __slots__ = ("hedges", "limiter", "policy", "retries", "routing", "start_s", "terms")

    def __init__(self, routing: Routing, policy: ForwardingPolicy) -> None:
        self.routing = routing
        self.start_s = 0.0
        """Seconds in which the model's engines started, also while none is left; 0 if unknown."""
        self.policy = policy
        self.terms = RequestTerms(self, policy)
        """The terms of requests without a deadline."""
        self.retries = RetryBudget(policy.retry_percent)
        self.hedges = RetryBudget(policy.hedge_percent, _HEDGE_FLOOR)
        self.limiter: ConcurrencyLimiter | None = None


class ModelStates:
    """State of all models, created at their first request."""

    def __init__(
        self,
        clock: Clock,
        *,
        silence_s: float,
        recovery_s: float = RECOVERY_S,
        hold_s: float = HOLD_S,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        """`silence_s`, `recovery_s`, `hold_s`: defaults of the models' policies; `keep_alive_s`: interval of keep-alive events."""
        self.keep_alive_s = keep_alive_s
        self._recovery_s, self._hold_s = recovery_s, hold_s
        self._clock = clock
        self._silence_s = silence_s
        self.found: dict[str, ModelState] = {}
        """By the model's name; their settings may be out of date, unlike what `of` returns."""

    def of(self, model: ServedModel) -> ModelState:
        """Return the state of the model with its current settings."""
        model_state = self.found.get(model.name)
        if model_state is not None and model_state.routing is model.routing:
            return model_state
        if model_state is None:
            model_state = self.found[model.name] = ModelState(model.routing, DEFAULT_POLICY)
        self._renew(model, model_state)
        return model_state

    def update(self, models: Mapping[str, ServedModel]) -> None:
        """Apply new settings, and drop models that are gone."""
        for name, model_state in tuple(self.found.items()):
            model = models.get(name)
            if model is not None:
                if model.start_s and model.start_s != model_state.start_s:
                    self._renew(model, model_state)
                else:
                    self.of(model)
            elif model_state.limiter is None or not (
                model_state.limiter.waiting or model_state.limiter.running
            ):
                del self.found[name]

    def waiting(self) -> dict[str, int]:
        """Return the number of requests that wait for a slot, for models with a queue."""
        return {
            name: model_state.limiter.waiting
            for name, model_state in self.found.items()
            if model_state.limiter is not None
        }

    def _renew(self, model: ServedModel, found: ModelState) -> None:
        """Apply the model's current settings."""
        found.start_s = model.start_s or found.start_s
        policy = policy_of(
            model.routing,
            silence_s=self._silence_s,
            recovery_s=self._recovery_s,
            hold_s=self._hold_s,
            start_s=found.start_s,
        )
        found.routing, found.policy = model.routing, policy
        found.terms = RequestTerms(found, policy)
        found.retries.percent, found.hedges.percent = policy.retry_percent, policy.hedge_percent
        if found.limiter is not None:
            found.limiter.change(policy.queue)
        elif policy.queue is not None:
            found.limiter = ConcurrencyLimiter(
                model.name, policy.queue, self._clock, self.keep_alive_s
            )
