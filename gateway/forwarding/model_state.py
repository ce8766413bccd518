"""How many requests may be repeated: a part of those that came in lately, and a few. Pure; told the time.

Without it every failure doubles the load on what is left, which fails the more: a retry storm.

What is kept for each name that clients use: its settings, its budgets, its queue.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.forwarding.admission import QUIET_S, ConcurrencyLimiter
from gateway.forwarding.policy import ForwardingPolicy, policy_of
from gateway.routing.table import ServedModel
from machinery.clock import Clock
from schemas.routing import Routing

WINDOW_S = 10
# For fleets with a request a minute, of which a fifth is nothing.
FLOOR = 10


@dataclass(slots=True)
class RetryBudget:
    """One name's, counted in whole seconds of the last ten."""

    percent: float
    floor: int = FLOOR
    """What may be repeated in any ten seconds, however few requests there are."""
    _second: int = 0
    _asked: list[int] = field(default_factory=lambda: [0] * WINDOW_S)
    _spent: list[int] = field(default_factory=lambda: [0] * WINDOW_S)
    _asked_sum: int = 0
    _spent_sum: int = 0

    def asked(self, now_s: float) -> None:
        """Count a request."""
        second = int(now_s)
        if second != self._second:
            self._turn(second)
        self._asked[second % WINDOW_S] += 1
        self._asked_sum += 1

    def spend(self, now_s: float) -> bool:
        """Take a repetition out of it; return False if there is none left."""
        second = int(now_s)
        if second != self._second:
            self._turn(second)
        if self._spent_sum >= self.floor + self._asked_sum * self.percent // 100:
            return False
        self._spent[second % WINDOW_S] += 1
        self._spent_sum += 1
        return True

    def _turn(self, second: int) -> None:
        """Forget the seconds that are ten seconds old by now."""
        for old in range(max(self._second + 1, second - WINDOW_S + 1), second + 1):
            place = old % WINDOW_S
            self._asked_sum -= self._asked[place]
            self._spent_sum -= self._spent[place]
            self._asked[place] = self._spent[place] = 0
        self._second = max(second, self._second)


# A second request now and then, however few there are: a rare one is where nobody minds the cost.
_HEDGE_FLOOR = 1


class ModelState:
    """One name's."""

    __slots__ = ("gate", "hedges", "policy", "retries", "routing")

    def __init__(self, routing: Routing, policy: ForwardingPolicy) -> None:
        self.routing = routing
        self.policy = policy
        self.retries = RetryBudget(policy.retry_percent)
        self.hedges = RetryBudget(policy.hedge_percent, _HEDGE_FLOOR)
        self.gate: ConcurrencyLimiter | None = None


class ModelStates:
    """All of them, made when they are first asked for."""

    def __init__(self, clock: Clock, *, silence_s: float, quiet_s: float = QUIET_S) -> None:
        """`silence_s`: how long an engine may say nothing where no route says so; `quiet_s`: how long we may."""
        self.quiet_s = quiet_s
        self._clock = clock
        self._silence_s = silence_s
        self._found: dict[str, ModelState] = {}

    def of(self, model: ServedModel) -> ModelState:
        """Return what is kept for the name, by its settings of now."""
        found = self._found.get(model.name)
        if found is not None and found.routing is model.routing:
            return found
        return self._renewed(model, found)

    def keep(self, models: Mapping[str, ServedModel]) -> None:
        """Go by new settings, also where nobody asks just now; forget names that are gone."""
        for name, named in tuple(self._found.items()):
            model = models.get(name)
            if model is not None:
                self.of(model)
            elif named.gate is None or named.gate.is_empty:
                del self._found[name]

    def waiting(self) -> dict[str, int]:
        """Return how many requests wait for their turn, by name; only of names that have queues."""
        return {
            name: named.gate.waiting
            for name, named in self._found.items()
            if named.gate is not None
        }

    def _renewed(self, model: ServedModel, found: ModelState | None) -> ModelState:
        policy = policy_of(model.routing, silence_s=self._silence_s)
        if found is None:
            found = self._found[model.name] = ModelState(model.routing, policy)
        found.routing, found.policy = model.routing, policy
        found.retries.percent, found.hedges.percent = policy.retry_percent, policy.hedge_percent
        if found.gate is not None:
            found.gate.change(policy.lines)
        elif policy.lines is not None:
            found.gate = ConcurrencyLimiter(model.name, policy.lines, self._clock, self.quiet_s)
        return found
