"""What this gateway knows of engines by its own requests: how many are open, who failed just now.

Nobody else's load is in it; engines' own words about theirs come with a later issue's scoring.
"""

from gateway.routing.choosing import Standing
from gateway.routing.table import Origin, Target

# Long enough to route around a restart, short enough to use a restarted engine within a second.
_PENALTY_S = 1.0
_NOBODY: frozenset[Origin] = frozenset()


class Loads:
    """Open requests by engine and by deployment, and short penalties."""

    def __init__(self) -> None:
        self._in_flight: dict[Origin, int] = {}
        self._by_deployment: dict[str, int] = {}
        self._penalties: dict[Origin, float] = {}

    def begin(self, target: Target) -> None:
        """Count a request to the engine; `end` must follow."""
        origin, deployment = target.origin, target.deployment
        self._in_flight[origin] = self._in_flight.get(origin, 0) + 1
        self._by_deployment[deployment] = self._by_deployment.get(deployment, 0) + 1

    def end(self, target: Target) -> None:
        """Count the request no more."""
        left = self._in_flight[target.origin] - 1
        if left:
            self._in_flight[target.origin] = left
        else:
            del self._in_flight[target.origin]
        self._by_deployment[target.deployment] -= 1

    def by_deployment(self) -> dict[str, int]:
        """Return how many requests are at engines; deployments that had some before with 0."""
        return dict(self._by_deployment)

    def total(self) -> int:
        """Return how many requests are at engines."""
        return sum(self._in_flight.values())

    def penalise(self, origin: Origin, now_s: float) -> None:
        """Have others asked first for a moment."""
        self._penalties[origin] = now_s + _PENALTY_S

    def standing(self, now_s: float) -> Standing:
        """Return what a choice is made from."""
        if not self._penalties:
            return Standing(in_flight=self._in_flight)
        self._penalties = {o: until for o, until in self._penalties.items() if until > now_s}
        penalised = frozenset(self._penalties) if self._penalties else _NOBODY
        return Standing(in_flight=self._in_flight, penalised=penalised)
