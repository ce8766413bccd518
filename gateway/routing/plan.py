"""Plan of a model name: what is the same for all of its requests, worked out once for each routing table. Pure.

Most names have one backend with one version and a few endpoints, of which the one with the best score answers. Their
plan chooses with the fewest steps. Every other choice is left to `selection.choose`; where both can choose, they choose
the same endpoint for the same draw.
"""

from collections.abc import Sequence
from operator import truediv

from gateway.routing.load_balancer import EQUAL_SCORES, SCAN_LIMIT, allowed, load_weights
from gateway.routing.selection import ChosenEndpoint
from gateway.routing.table import EndpointHealth, EndpointPool, RoutingQuery, ServedModel

# Of larger pools a part is left out while other gateways send requests, too.
_UNDIVIDED = 2


class RoutePlan:
    """The plan of one model. A plain object: it is read for each request."""

    __slots__ = (
        "_bound",
        "_choices",
        "_concurrency",
        "_has_sessions",
        "_origins",
        "_places",
        "_score",
        "_uses_prefixes",
        "_zeros",
        "is_usual",
        "model",
        "takes_turns",
    )

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        ruled = (backend for rule in model.rules for backend in rule.backends)
        self.takes_turns = any(
            backend.routing.strategy == "RoundRobin"
            for backend in (*model.backends, *model.fallbacks, *ruled)
        )
        """True if a choice depends on the number of earlier requests."""
        pool = _only_pool(model)
        self.is_usual = pool is not None
        """True if the plan can choose."""
        if pool is None:
            return
        backend = model.backends[0]
        self._origins = [endpoint.origin for endpoint in pool.endpoints]
        self._zeros = [0] * len(pool.endpoints)
        self._concurrency = [endpoint.concurrency for endpoint in pool.endpoints]
        self._choices = [ChosenEndpoint(endpoint=endpoint) for endpoint in pool.endpoints]
        self._places = {endpoint.mark: place for place, endpoint in enumerate(pool.endpoints)}
        self._score = backend.score
        self._bound = backend.routing.prefix_affinity.bound
        self._has_sessions = backend.routing.sessions.enabled
        self._uses_prefixes = backend.uses_prefixes

    def pick(self, query: RoutingQuery, health: EndpointHealth) -> ChosenEndpoint | None:
        """Return the endpoint to try; None if the choice is left to `selection.choose`."""
        if not self.is_usual or query.failed or health.ejected:
            return None
        choices = self._choices
        if len(choices) == 1:
            return choices[0]
        # Maps instead of loops: this runs for each request.
        loads: list[float] = list(map(health.in_flight.get, self._origins, self._zeros))
        others = health.others_in_flight
        if others and (others_sum := sum(map(others.get, self._origins, self._zeros))) > 0:
            if len(loads) > _UNDIVIDED:
                return None  # chance decides, because other gateways send requests, too
            ours, theirs = load_weights(sum(loads), others_sum)
            reported = map(others.get, self._origins, self._zeros)
            loads = [ours * one + theirs * two for one, two in zip(loads, reported, strict=True)]
        if query.sticky_mark and self._has_sessions:
            place = self._places.get(query.sticky_mark, -1)
            if place >= 0 and (query.session or loads[place] + 1 <= allowed(loads, self._bound)):
                return choices[place]
        scores = self._scores(loads, health, query.cached)
        top = max(scores) - EQUAL_SCORES
        ties = [place for place, score in enumerate(scores) if score >= top]
        if len(ties) == 1:
            return choices[ties[0]]
        return choices[ties[min(int(query.draw * 997 % 1 * len(ties)), len(ties) - 1)]]

    def _scores(
        self,
        loads: list[float],
        health: EndpointHealth,
        cached: Sequence[tuple[int, float]],
    ) -> list[float]:
        """Return the score of each endpoint, by its place. `cached`: as in `RoutingQuery`."""
        loaded, memory, queue, prefix = self._score
        depths = list(map(truediv, loads, self._concurrency))
        base, per_depth = loaded + queue, queue / max(1.0, *depths)
        scores = [base - per_depth * depth for depth in depths]
        headroom = health.headroom
        if headroom:
            for place, origin in enumerate(self._origins):
                scores[place] += memory * headroom.get(origin, 1.0)
        if cached and self._uses_prefixes:
            most, places, found = allowed(loads, self._bound), self._places, 0
            for mark, part in cached:
                place = places.get(mark, -1)
                # Of several cached beginnings at an endpoint that is not too busy for them, the longest counts.
                if place >= 0 and not found >> place & 1 and loads[place] + 1 <= most:
                    found |= 1 << place
                    scores[place] += prefix * part
        return scores


def _only_pool(model: ServedModel) -> EndpointPool | None:
    """Return the pool of a model whose choices are usual; None for any other model."""
    if len(model.backends) != 1 or model.rules:
        return None
    backend = model.backends[0]
    if not backend.weight or len(backend.subsets) != 1 or backend.routing.strategy != "Scored":
        return None
    subset = backend.subsets[0]
    if subset.weight <= 0 or len(subset.pools) != 1:
        return None
    pool = subset.pools[0]
    return pool if len(pool.by_mark) == len(pool.endpoints) <= SCAN_LIMIT else None
