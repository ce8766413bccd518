"""Candidates of a choice: each endpoint that a request for a model could get now, with the parts of its score. Pure.

It shows what `load_balancer.py` weighs, for a request without a session and without a cached prompt. It is for people and
costs a scan of the pool; no request goes through here.
"""

from dataclasses import dataclass, field

from gateway.routing.load_balancer import NO_ORIGINS, Scope
from gateway.routing.table import (
    EndpointHealth,
    EngineEndpoint,
    RoutingQuery,
    ServedModel,
    WeightedBackend,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One endpoint as a choice sees it."""

    endpoint: EngineEndpoint
    is_leased: bool
    is_ejected: bool
    """True if it failed a moment ago: it is used only if no other remains."""
    in_flight: int
    """Requests of this gateway there."""
    others_in_flight: float
    """Requests of other gateways, as the engine reported a moment ago."""
    load: float
    """Both together, weighted against overshooting."""
    headroom: float | None
    """Free part of its memory, 0..1; None if it is unknown, which counts as 1."""
    gpu_load: float | None = None
    """Busy part of the GPU of its Mac, 0..1; None if it is unknown, which costs nothing."""
    parts: dict[str, float] = field(default_factory=dict)
    """The parts of its score; empty for strategies without one."""

    @property
    def score(self) -> float | None:
        """The sum of the parts; None for strategies without a score."""
        return sum(self.parts.values()) if self.parts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCandidates:
    """The candidates of one backend, the best score or the least load first."""

    deployments: tuple[str, ...]
    weight: int
    strategy: str
    is_fallback: bool
    candidates: tuple[Candidate, ...]


def list_candidates(model: ServedModel, health: EndpointHealth) -> tuple[BackendCandidates, ...]:
    """Return the candidates of every backend of a model, fallbacks last."""
    return (
        *(_of_backend(backend, health, is_fallback=False) for backend in model.backends),
        *(_of_backend(backend, health, is_fallback=True) for backend in model.fallbacks),
    )


def _of_backend(
    backend: WeightedBackend, health: EndpointHealth, *, is_fallback: bool
) -> BackendCandidates:
    strategy = backend.routing.strategy
    endpoints = (*backend.leased, *backend.orphans)
    scope = Scope(RoutingQuery("", 0.0), health, NO_ORIGINS)
    loads = scope.loads(endpoints)
    depths = [load / endpoint.concurrency for endpoint, load in zip(endpoints, loads, strict=True)]
    deepest = max(1.0, *depths) if depths else 1.0
    candidates = [
        Candidate(
            endpoint=endpoint,
            is_leased=endpoint in backend.leased,
            is_ejected=endpoint.origin in health.ejected,
            in_flight=health.in_flight.get(endpoint.origin, 0),
            others_in_flight=health.others_in_flight.get(endpoint.origin, 0.0),
            load=load,
            headroom=health.headroom.get(endpoint.origin),
            gpu_load=health.gpu_load.get(endpoint.node),
            parts=_parts(backend, endpoint, health, depth / deepest)
            if strategy == "Scored"
            else {},
        )
        for endpoint, load, depth in zip(endpoints, loads, depths, strict=True)
    ]
    candidates.sort(key=_order)
    return BackendCandidates(
        deployments=backend.deployments,
        weight=backend.weight,
        strategy=strategy,
        is_fallback=is_fallback,
        candidates=tuple(candidates),
    )


def _parts(
    backend: WeightedBackend, endpoint: EngineEndpoint, health: EndpointHealth, depth: float
) -> dict[str, float]:
    """Return the parts of a score. `depth` is the load against that of the fullest, 1 for a full endpoint."""
    loaded, memory, queue, _ = backend.score
    return {
        "modelLoaded": loaded,
        "memory": memory * health.headroom.get(endpoint.origin, 1.0),
        "queue": queue * (1 - depth),
    }


def _order(one: Candidate) -> tuple[bool, bool, float, float, str]:
    score = one.score
    return (
        one.is_ejected,
        not one.is_leased,
        0.0 if score is None else -score,
        one.load,
        one.endpoint.replica,
    )
