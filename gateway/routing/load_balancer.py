"""Load balancing: chooses one endpoint of a pool by the backend's strategy. Pure.

Small pools are scanned. Of a large pool a few endpoints are drawn (the power of d choices): the
busiest engine has hardly more load, a request costs the same for any size, and gateways with the
same information do not all choose the same endpoint. Ties are broken by the draw; else one Mac
would get hot while its twin stands idle.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from gateway.routing.table import (
    EndpointHealth,
    EndpointPool,
    EngineEndpoint,
    RoutingQuery,
    WeightedBackend,
)
from schemas.wire.engine_address import EngineAddress

# Scores that differ by less are equal. One request more at an engine with concurrency 16 makes four
# times as much, and memory that varies by 2 % should not decide.
EQUAL_SCORES = 0.005
# Rounding error of sums and differences.
_EXACT = 1e-9
# mlx-serving's `avoid_overloaded`. Without it, the formula gives a strong Mac every request.
_OVERLOADED = 0.8
# mlx-serving takes a fifth of the GPU's percentage from the points of a Mac.
_GPU_POINTS = 20.0
# Pools up to this size are scanned.
SCAN_LIMIT = 16
# The number of endpoints drawn from larger pools, and of further draws if some cannot take the
# request.
SAMPLE_SIZE = 8
_REDRAWS = 3
NO_ORIGINS: AbstractSet[EngineAddress] = frozenset()


class Candidates:
    """The endpoints to choose from, with their load. A plain object: one is created for each request."""

    __slots__ = ("endpoints", "loads", "part", "read")

    def __init__(
        self, endpoints: Sequence[EngineEndpoint], loads: Sequence[float], part: float
    ) -> None:
        self.endpoints = endpoints
        self.loads = loads
        """Requests at each endpoint, this gateway's and others'."""
        self.part = part
        """Part of the random draw, 0..1."""
        self.read: Mapping[int, float] = {}
        """Cached part of the prompt by mark."""


def _least_loaded(
    candidates: Candidates, _share: WeightedBackend, _health: EndpointHealth
) -> EngineEndpoint:
    """Return one of the endpoints with the least load."""
    least = min(candidates.loads) + _EXACT
    ties = [
        endpoint
        for endpoint, load in zip(candidates.endpoints, candidates.loads, strict=True)
        if load <= least
    ]
    return ties[split_draw(candidates.part, len(ties))[0]]


def _scored(
    candidates: Candidates, backend: WeightedBackend, health: EndpointHealth
) -> EngineEndpoint:
    """Return one of the endpoints with the best score.

    Endpoints exist only for loaded models, so that part is equal for all. It stays so that scores
    match the proposal's.
    """
    headroom, read = health.headroom, candidates.read
    if not headroom and not read and not any(candidates.loads):
        return candidates.endpoints[split_draw(candidates.part, len(candidates.endpoints))[0]]
    loaded, memory, queue, prefix = backend.score
    # Loops instead of comprehensions, which are calls: this runs for each request.
    depths: list[float] = []
    for endpoint, load in zip(candidates.endpoints, candidates.loads, strict=True):
        depths.append(load / endpoint.concurrency)
    # A full endpoint counts 0, or the fullest if any exceeds its concurrency.
    per_depth = queue / max(1.0, *depths)
    scores: list[float] = []
    for endpoint, depth in zip(candidates.endpoints, depths, strict=True):
        score = loaded + queue - per_depth * depth
        if headroom:
            score += memory * headroom.get(endpoint.origin, 1.0)
        if read:
            score += prefix * read.get(endpoint.mark, 0.0)
        scores.append(score)
    return _highest(candidates, scores, EQUAL_SCORES)


def _hardware_aware(
    candidates: Candidates, _share: WeightedBackend, health: EndpointHealth
) -> EngineEndpoint:
    """Return one of the endpoints with the most points (schemas/chips.py), avoiding nearly full ones."""
    gpu_load = health.gpu_load
    busy = [
        load > _OVERLOADED * endpoint.concurrency
        for endpoint, load in zip(candidates.endpoints, candidates.loads, strict=True)
    ]
    spares_none = all(busy)
    points = [
        endpoint.points
        + max(0.0, 50 - 5 * load)
        + 30
        - _GPU_POINTS * gpu_load.get(endpoint.node, 0.0)
        if spares_none or not full
        else -1.0
        for endpoint, load, full in zip(candidates.endpoints, candidates.loads, busy, strict=True)
    ]
    return _highest(candidates, points, _EXACT)


def _power_of_two(
    candidates: Candidates, _share: WeightedBackend, _health: EndpointHealth
) -> EngineEndpoint:
    """Draw two endpoints and return the one with less load."""
    count = len(candidates.endpoints)
    if count == 1:
        return candidates.endpoints[0]
    first, rest = split_draw(candidates.part, count)
    second = (first + 1 + split_draw(rest, count - 1)[0]) % count
    return candidates.endpoints[
        first if candidates.loads[first] <= candidates.loads[second] else second
    ]


def _highest(candidates: Candidates, scores: Sequence[float], equal: float) -> EngineEndpoint:
    top = max(scores) - equal
    ties: list[EngineEndpoint] = []
    for endpoint, score in zip(candidates.endpoints, scores, strict=True):
        if score >= top:
            ties.append(endpoint)
    return ties[0] if len(ties) == 1 else ties[split_draw(candidates.part, len(ties))[0]]


def split_draw(draw: float, count: int) -> tuple[int, float]:
    """Return one of `count` indexes by a draw from 0 to 1, and a draw for another choice that is independent of it."""
    place = draw * count
    index = min(int(place), count - 1)
    return index, place - index


Chooser: TypeAlias = Callable[[Candidates, WeightedBackend, EndpointHealth], EngineEndpoint]
# RoundRobin and Random are missing because they ignore load; `pick` handles them.
BY_NAME: Mapping[str, Chooser] = {
    "Scored": _scored,
    "HardwareAware": _hardware_aware,
    "LeastLoaded": _least_loaded,
    "PowerOfTwo": _power_of_two,
}


class Scope:
    """The scope of one choice: query, health and ejected endpoints.

    A plain object: one is created for each request.
    """

    __slots__ = ("_others", "_ours", "has_others", "health", "query", "skipped")

    def __init__(
        self, query: RoutingQuery, health: EndpointHealth, skipped: AbstractSet[EngineAddress]
    ) -> None:
        self.query = query
        self.health = health
        self.skipped = skipped
        """Endpoints that are left out because they failed a moment ago."""
        self.has_others = False
        """True if the endpoints of the last `loads` have requests of other gateways."""
        self._ours = self._others = 1.0

    def loads(self, endpoints: Sequence[EngineEndpoint]) -> list[float]:
        """Return the load of each endpoint, this gateway's requests and others'."""
        # A loop instead of a comprehension, which is a call: this runs for each request.
        ours, others = self.health.in_flight, self.health.others_in_flight
        own: list[float] = []
        reported: list[float] = []
        others_sum = 0.0
        for endpoint in endpoints:
            origin = endpoint.origin
            own.append(ours.get(origin, 0))
            if others:
                other = others.get(origin, 0.0)
                reported.append(other)
                others_sum += other
        self.has_others = others_sum > 0
        if not others_sum:
            self._ours = self._others = 1.0
            return own
        self._ours, self._others = load_weights(sum(own), others_sum)
        return [
            self._ours * one + self._others * other
            for one, other in zip(own, reported, strict=True)
        ]

    def load(self, endpoint: EngineEndpoint) -> float:
        """Return the load of one endpoint, on the scale of the last `loads`."""
        health, origin = self.health, endpoint.origin
        own = self._ours * health.in_flight.get(origin, 0)
        return own + self._others * health.others_in_flight.get(origin, 0.0)

    def is_within(self, endpoint: EngineEndpoint, pool: EndpointPool, bound: int) -> bool:
        """Return whether one more request keeps the endpoint within `bound` percent of the average load."""
        if len(pool.endpoints) == 1:
            return True
        loads = self.loads(eligible_endpoints(pool.endpoints, self))
        return self.load(endpoint) + 1 <= allowed(loads, bound)


def load_weights(own_sum: float, others_sum: float) -> tuple[float, float]:
    """Return the weights of this gateway's requests and of others' in the load of an endpoint, given their sums.

    Reports of others' load are a moment old and equal at every gateway. If each gateway compensated for all
    imbalance, they would overshoot together. Each therefore compensates for its own part: others' requests are
    weighted by this gateway's part of the total, and the sum is kept.
    """
    part = (own_sum + 1) / (own_sum + 1 + others_sum)
    ours = (own_sum + others_sum) / (own_sum + part * others_sum)
    return ours, part * ours


def can_take(endpoint: EngineEndpoint, scope: Scope) -> bool:
    """Return whether the endpoint may be tried."""
    failed, skipped = scope.query.failed, scope.skipped
    return not (failed and endpoint in failed) and not (skipped and endpoint.origin in skipped)


def allowed(loads: Sequence[float], bound: int) -> int:
    """Return the largest load, new request included, up to which affinity wins.

    As in "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup, Zadimoghaddam 2018). Rounded
    up, else the first request would fit nowhere.
    """
    return math.ceil(bound * (sum(loads) + 1) / (100 * len(loads)))


def pick(pool: EndpointPool, backend: WeightedBackend, scope: Scope) -> EngineEndpoint | None:
    """Return the endpoint that the backend's strategy chooses; None if none may be tried."""
    endpoints, query, routing = pool.endpoints, scope.query, backend.routing
    if len(endpoints) == 1:
        return endpoints[0] if can_take(endpoints[0], scope) else None
    if routing.strategy == "RoundRobin":
        return _next(endpoints, scope)
    if len(endpoints) > SCAN_LIMIT or query.failed or scope.skipped:
        eligible = eligible_endpoints(endpoints, scope)
        if not eligible:
            return None
    else:
        eligible = endpoints
    part = query.endpoint_draw
    if routing.strategy == "Random":
        return eligible[split_draw(part, len(eligible))[0]]
    loads = scope.loads(eligible)
    readers = (
        _cached_endpoints(pool, loads, backend, scope)
        if query.cached and backend.uses_prefixes
        else ()
    )
    candidates = Candidates(eligible, loads, part)
    if scope.has_others and 2 < len(endpoints) <= SCAN_LIMIT:
        candidates = _drop_quarter(candidates)
    if readers:
        if routing.strategy != "Scored":
            return readers[0][0]
        _add_cached(candidates, readers, len(endpoints))
    return BY_NAME[routing.strategy](candidates, backend, scope.health)


def eligible_endpoints(
    endpoints: Sequence[EngineEndpoint], scope: Scope
) -> Sequence[EngineEndpoint]:
    """Return the endpoints to consider: all that may be tried, or a sample of them."""
    count, failed, skipped = len(endpoints), scope.query.failed, scope.skipped
    if count <= SCAN_LIMIT:
        if not failed and not skipped:
            return endpoints
        return [endpoint for endpoint in endpoints if can_take(endpoint, scope)]
    # Steps of one length from one start: any two endpoints are as good as drawn independently.
    bits = int(scope.query.draw * 2**53)
    begin, step = bits % count, 1 + bits // count % (count - 1)
    if not failed and not skipped:
        return [endpoints[n % count] for n in range(begin, begin + SAMPLE_SIZE * step, step)]
    engine_endpoints: list[EngineEndpoint] = []
    for n in range(begin, begin + SAMPLE_SIZE * (1 + _REDRAWS) * step, step):
        endpoint = endpoints[n % count]
        if can_take(endpoint, scope):
            engine_endpoints.append(endpoint)
            if len(engine_endpoints) == SAMPLE_SIZE:
                return engine_endpoints
    if engine_endpoints:
        return engine_endpoints
    # The last resort, and the only scan of a large pool.
    left = [endpoint for endpoint in endpoints if can_take(endpoint, scope)]
    begin = bits % len(left) if left else 0
    return (left[begin:] + left[:begin])[:SCAN_LIMIT]


def _next(endpoints: Sequence[EngineEndpoint], scope: Scope) -> EngineEndpoint | None:
    """Return the next endpoint in turn that may be tried."""
    count, turn = len(endpoints), scope.query.turn
    for step in range(count):
        endpoint = endpoints[(turn + step) % count]
        if can_take(endpoint, scope):
            return endpoint
    return None


def _cached_endpoints(
    pool: EndpointPool, loads: Sequence[float], backend: WeightedBackend, scope: Scope
) -> list[tuple[EngineEndpoint, float, float]]:
    """Return the endpoints with a cached beginning of the prompt, unless too busy, with load and cached part.

    The longest match comes first; an endpoint's longest match counts.
    """
    cached_endpoints: list[tuple[EngineEndpoint, float, float]] = []
    most = -1
    seen: set[int] = set()
    for mark, part in scope.query.cached:
        if mark in seen:
            continue
        seen.add(mark)
        endpoint = pool.by_mark.get(mark)
        if endpoint is None or not can_take(endpoint, scope):
            continue
        if most < 0:
            most = allowed(loads, backend.routing.prefix_affinity.bound)
        load = scope.load(endpoint)
        if load + 1 <= most:
            cached_endpoints.append((endpoint, load, part))
    return cached_endpoints


def _drop_quarter(candidates: Candidates) -> Candidates:
    """Leave out a random quarter if other gateways send requests too, so that not all choose the same endpoint.

    Large pools are sampled anyway.
    """
    count = len(candidates.endpoints)
    begin, rest = split_draw(candidates.part, count)
    end = begin + (3 * count + 2) // 4
    endpoints, loads = (
        (*candidates.endpoints, *candidates.endpoints),
        (*candidates.loads, *candidates.loads),
    )
    return Candidates(endpoints[begin:end], loads[begin:end], rest)


def _add_cached(
    candidates: Candidates, readers: Sequence[tuple[EngineEndpoint, float, float]], count: int
) -> None:
    """Add the endpoints with cached prefixes to the candidates. `count`: the size of the pool."""
    candidates.read = read = {}
    for endpoint, _, part in readers:
        read[endpoint.mark] = part
    if len(candidates.endpoints) == count:
        return  # all are candidates already
    there = {endpoint.mark for endpoint in candidates.endpoints}
    more = [(endpoint, load) for endpoint, load, _ in readers if endpoint.mark not in there]
    candidates.endpoints = [*candidates.endpoints, *(endpoint for endpoint, _ in more)]
    candidates.loads = [*candidates.loads, *(load for _, load in more)]
