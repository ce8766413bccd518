"""Router: chooses an endpoint from the table, the endpoints' load and health, and the affinity memory.

Load is this gateway's requests exactly, and other gateways' requests as engines report them.
"""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import truediv
from types import MappingProxyType
from typing import TYPE_CHECKING

from gateway.forwarding.decision_log import DecisionLog
from gateway.forwarding.outlier_detection import OutlierDetector
from gateway.request import InferenceRequest
from gateway.routing.affinity import AffinityMemory
from gateway.routing.load_balancer import (
    EQUAL_SCORES,
    SCAN_LIMIT,
    allowed,
    load_weights,
    split_draw,
)
from gateway.routing.selection import ChosenEndpoint, RoutingChoice, choose
from gateway.routing.table import (
    EndpointHealth,
    EndpointPool,
    EngineEndpoint,
    RoutingQuery,
    ServedModel,
)
from gateway.state.table_cache import TableCache
from machinery.clock import Clock
from machinery.engine_link import EngineGauges
from schemas.wire.engine_address import EngineAddress

if TYPE_CHECKING:  # it watches the load
    from gateway.forwarding.admission import Activator

# A reported load is valid for about as long as the reported requests take.
_REPORT_TTL_S = 3.0
# With more names than this, gone ones included, round-robin positions start anew.
_MOST_TURNS = 10_000
# Of larger pools a part is left out while other gateways send requests, too.
_UNDIVIDED = 2
_NO_LOADS: Mapping[str, float] = MappingProxyType({})


class LoadTracker:
    """Requests in flight by engine and by deployment. `outliers` knows the ejected endpoints."""

    def __init__(self, entropy: random.Random, gpu_load: Mapping[str, float] = _NO_LOADS) -> None:
        """`gpu_load`: a live view of the GPU load by node."""
        self.draw = entropy.random
        """Returns a random number, 0..1."""
        self.outliers = OutlierDetector(entropy)
        self._in_flight: dict[EngineAddress, int] = {}
        self._by_deployment: dict[str, int] = {}
        self._others_in_flight: dict[EngineAddress, float] = {}
        self._headroom: dict[EngineAddress, float] = {}
        self._kv_used: dict[EngineAddress, float] = {}
        self._reported_s: dict[EngineAddress, float] = {}
        self.waiting: Activator | None = None
        """Holder of the requests that wait for a slot; None while none does."""
        # Its members change in place: a new object for each request would be most of the cost of a
        # choice.
        self.healthy = EndpointHealth(
            in_flight=self._in_flight,
            others_in_flight=self._others_in_flight,
            headroom=self._headroom,
            ejected=self.outliers.ejected(0.0),
            gpu_load=gpu_load,
        )
        """The input of a choice while no endpoint has failed lately."""

    def begin(self, endpoint: EngineEndpoint) -> None:
        """Count a request to the engine; `end` must follow."""
        origin, deployment = endpoint.origin, endpoint.deployment
        self._in_flight[origin] = self._in_flight.get(origin, 0) + 1
        self._by_deployment[deployment] = self._by_deployment.get(deployment, 0) + 1

    def end(self, endpoint: EngineEndpoint) -> None:
        """Count the request no more."""
        origin = endpoint.origin
        left = self._in_flight[origin] - 1
        if left:
            self._in_flight[origin] = left
        else:
            del self._in_flight[origin]
        self._by_deployment[endpoint.deployment] -= 1
        if self.waiting is not None:
            self.waiting.wake_first()

    def has_free_slot(self, endpoint: EngineEndpoint) -> bool:
        """Return whether the endpoint would begin with a request at once, as far as is known."""
        origin = endpoint.origin
        load = self._in_flight.get(origin, 0) + self._others_in_flight.get(origin, 0.0)
        return load < endpoint.concurrency and origin not in self.outliers.ejected_origins

    def record_gauges(self, origin: EngineAddress, gauges: EngineGauges, now_s: float) -> None:
        """Record the load and the memory that an engine reports."""
        others = gauges.in_flight + gauges.queued - self._in_flight.get(origin, 0)
        self._others_in_flight[origin] = others if others > 0 else 0.0
        self._reported_s[origin] = now_s
        if gauges.memory_free is not None:
            self._headroom[origin] = min(max(gauges.memory_free, 0.0), 1.0)
        if gauges.kv_used is not None:
            self._kv_used[origin] = min(max(gauges.kv_used, 0.0), 1.0)

    def kv_used(self, origins: Collection[EngineAddress]) -> float | None:
        """Return the mean part of the memory for KV caches that engines use, 0..1; None if none has reported it."""
        found = [self._kv_used[origin] for origin in origins if origin in self._kv_used]
        return sum(found) / len(found) if found else None

    def is_overbooked(self, endpoint: EngineEndpoint) -> bool:
        """Return whether the engine has more requests than it processes at once, as far as is known."""
        origin = endpoint.origin
        others = self._others_in_flight.get(origin, 0.0)
        return self._in_flight.get(origin, 0) + others > endpoint.concurrency

    def set_endpoints(self, origins: Collection[EngineAddress]) -> None:
        """Drop the memory values of endpoints that are gone."""
        for values in (self._headroom, self._kv_used):
            for origin in values.keys() - origins:
                del values[origin]

    def drop_old(self, now_s: float) -> None:
        """Drop outdated load values and failures."""
        for origin, reported_s in tuple(self._reported_s.items()):
            if reported_s < now_s - _REPORT_TTL_S:
                del self._reported_s[origin]
                del self._others_in_flight[origin]
        self.outliers.drop_old(now_s)

    def by_deployment(self) -> dict[str, int]:
        """Return the requests in flight by deployment; 0 for deployments that had some before."""
        return dict(self._by_deployment)

    def total(self) -> int:
        """Return the number of requests in flight."""
        return sum(self._in_flight.values())

    def health(self, now_s: float) -> EndpointHealth:
        """Return the input of a choice: always the same object, with current values."""
        if self.outliers.breakers:
            self.outliers.ejected(now_s)
        return self.healthy


class RoutePlan:
    """Facts that are the same for all requests of a model, worked out once for each routing table.

    Most names have one backend with one version and a few endpoints, of which the one with the best score answers. Their
    plan chooses with the fewest steps. Every other choice is left to `selection.choose`; where both can choose, they
    choose the same endpoint for the same draw.
    """

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
        choices, origins, zeros = self._choices, self._origins, self._zeros
        count = len(choices)
        if count == 1:
            return choices[0]
        # Maps instead of loops: this runs for each request.
        loads: list[float] = list(map(health.in_flight.get, origins, zeros))
        others = health.others_in_flight
        if others and (others_sum := sum(map(others.get, origins, zeros))) > 0:
            if count > _UNDIVIDED:
                return None  # chance decides, because other gateways send requests, too
            ours, theirs = load_weights(sum(loads), others_sum)
            reported = map(others.get, origins, zeros)
            loads = [ours * one + theirs * two for one, two in zip(loads, reported, strict=True)]
        mark = query.sticky_mark
        if mark and self._has_sessions:
            place = self._places.get(mark, -1)
            if place >= 0 and (query.session or loads[place] + 1 <= allowed(loads, self._bound)):
                return choices[place]
        scores = self._scores(loads, health.headroom, query.cached)
        least, ties = max(scores) - EQUAL_SCORES, []
        for place, score in enumerate(scores):
            if score >= least:
                ties.append(place)
        count = len(ties)
        if count == 1:
            return choices[ties[0]]
        return choices[ties[split_draw(query.endpoint_draw, count)[0]]]

    def _scores(
        self,
        loads: list[float],
        headroom: Mapping[EngineAddress, float],
        cached: Sequence[tuple[int, float]],
    ) -> list[float]:
        """Return the score of each endpoint, by its place. `cached`: as in `RoutingQuery`."""
        loaded, memory, queue, prefix = self._score
        depths = list(map(truediv, loads, self._concurrency))
        base, per_depth = loaded + queue, queue / max(1.0, *depths)
        scores: list[float] = []
        for depth in depths:
            scores.append(base - per_depth * depth)  # noqa: PERF401 - a comprehension is a call
        if headroom:
            for place, origin in enumerate(self._origins):
                scores[place] += memory * headroom.get(origin, 1.0)
        if cached and self._uses_prefixes:
            # As `allowed`.
            most = math.ceil(self._bound * (sum(loads) + 1) / (100 * len(loads)))
            places, found = self._places, 0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Chooses endpoints for one gateway; `gateway.routing` decides and has no state."""

    table_cache: TableCache
    load_tracker: LoadTracker
    clock: Clock
    random: random.Random
    memory: AffinityMemory = field(default_factory=AffinityMemory)
    decisions: DecisionLog | None = field(default_factory=DecisionLog.if_enabled)
    """None unless debug lines are written."""
    _turns: dict[str, int] = field(default_factory=dict)
    _plans: dict[str, RoutePlan] = field(default_factory=dict)

    def draw(self) -> float:
        """Return the random draw for all choices of one request."""
        return self.random.random()

    def choose(
        self, request: InferenceRequest, failed: AbstractSet[EngineEndpoint], draw: float
    ) -> RoutingChoice:
        """Return the endpoint to try, given the endpoints that failed. The choice is remembered for affinity.

        It is remembered now and not with the response: of two requests with equal prompts, the
        second often arrives before the first is answered.
        """
        now_s, tracker, table = self.clock.monotonic(), self.load_tracker, self.table_cache.table
        name, memory = request.model, self.memory
        health = tracker.health(now_s) if tracker.outliers.breakers else tracker.healthy
        query = RoutingQuery(name, draw, failed, request.headers)
        model = table.models.get(name)
        if model is None:
            choice = choose(table, query, health)
            if self.decisions is not None:
                self.decisions.choice(request, None, health, failed, choice)
            return choice
        plan = self._plans.get(name)
        if plan is None or plan.model is not model:
            models = self.table_cache.table.models
            for gone in self._plans.keys() - models.keys():
                del self._plans[gone]
            plan = self._plans[model.name] = RoutePlan(model)
        memory.recall(request, model, query, now_s)
        picked = plan.pick(query, health)
        if picked is None:
            if plan.takes_turns:
                query.turn = self._turn(name, is_first=not failed)
            choice = choose(table, query, health)
        else:
            choice = picked
        if self.decisions is not None:
            self.decisions.choice(request, model, health, failed, choice)
        if type(choice) is ChosenEndpoint:
            memory.remember(query, model, choice.endpoint, now_s)
        return choice

    def choose_free(
        self, request: InferenceRequest, failed: AbstractSet[EngineEndpoint], draw: float
    ) -> RoutingChoice:
        """Return an endpoint as `choose` does, but only one with a free slot that did not fail a moment ago."""
        model, tracker = self.table_cache.table.models.get(request.model), self.load_tracker
        tracker.outliers.ejected(self.clock.monotonic())
        backends = () if model is None else model.all_backends()
        busy = {
            endpoint
            for backend in backends
            for endpoint in (*backend.leased, *backend.orphans)
            if not tracker.has_free_slot(endpoint)
        }
        return self.choose(request, failed | busy, draw)

    def look(
        self, request: InferenceRequest, failed: AbstractSet[EngineEndpoint], draw: float
    ) -> RoutingChoice:
        """Return what `choose` would for a new conversation; nothing is remembered."""
        health = self.load_tracker.health(self.clock.monotonic())
        query = RoutingQuery(request.model, draw, failed, request.headers)
        return choose(self.table_cache.table, query, health)

    def remember_answer(self, request: InferenceRequest, endpoint: EngineEndpoint) -> None:
        """Remember the endpoint that answered, which may not be the one chosen last if the request was hedged."""
        model = self.table_cache.table.models.get(request.model)
        if model is not None and model.routing.hedging is not None:
            now_s = self.clock.monotonic()
            query = RoutingQuery(request.model, 0.0)
            self.memory.recall(request, model, query, now_s)
            self.memory.remember(query, model, endpoint, now_s)

    def _turn(self, name: str, *, is_first: bool) -> int:
        """Return the round-robin position of the model. It starts at random, because gateways are many."""
        turn = self._turns.get(name)
        if turn is None:
            if len(self._turns) >= _MOST_TURNS:
                self._turns.clear()
            turn = self.random.getrandbits(16)
        if is_first:
            self._turns[name] = turn + 1
        return turn
