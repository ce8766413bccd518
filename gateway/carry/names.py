"""What is kept for each name that clients use: its settings, its budgets, its queue."""

from collections.abc import Mapping

from gateway.carry.budget import Budget
from gateway.carry.gate import Gate
from gateway.carry.patience import QUIET_S
from gateway.carry.policy import Policy, policy_of
from gateway.routing.table import Model
from machinery.clock import Clock
from schemas.routing import Routing

# A second request now and then, however few there are: a rare one is where nobody minds the cost.
_HEDGE_FLOOR = 1


class Named:
    """One name's."""

    __slots__ = ("gate", "hedges", "policy", "retries", "routing")

    def __init__(self, routing: Routing, policy: Policy) -> None:
        self.routing = routing
        self.policy = policy
        self.retries = Budget(policy.retry_percent)
        self.hedges = Budget(policy.hedge_percent, _HEDGE_FLOOR)
        self.gate: Gate | None = None


class Names:
    """All of them, made when they are first asked for."""

    def __init__(self, clock: Clock, *, silence_s: float, quiet_s: float = QUIET_S) -> None:
        """`silence_s`: how long an engine may say nothing where no route says so; `quiet_s`: how long we may."""
        self.quiet_s = quiet_s
        self._clock = clock
        self._silence_s = silence_s
        self._found: dict[str, Named] = {}

    def of(self, model: Model) -> Named:
        """Return what is kept for the name, by its settings of now."""
        found = self._found.get(model.name)
        if found is not None and found.routing is model.routing:
            return found
        return self._renewed(model, found)

    def keep(self, models: Mapping[str, Model]) -> None:
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

    def _renewed(self, model: Model, found: Named | None) -> Named:
        policy = policy_of(model.routing, silence_s=self._silence_s)
        if found is None:
            found = self._found[model.name] = Named(model.routing, policy)
        found.routing, found.policy = model.routing, policy
        found.retries.percent, found.hedges.percent = policy.retry_percent, policy.hedge_percent
        if found.gate is not None:
            found.gate.change(policy.lines)
        elif policy.lines is not None:
            found.gate = Gate(model.name, policy.lines, self._clock, self.quiet_s)
        return found
