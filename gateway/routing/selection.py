"""Endpoint selection: from a model name to a backend, a version and an endpoint, with fallbacks. Pure."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from gateway.routing.load_balancer import NO_ORIGINS, Scope, can_take, pick
from gateway.routing.table import (
    EndpointHealth,
    EngineEndpoint,
    HeaderRule,
    RoutingQuery,
    RoutingTable,
    ServedModel,
    Subset,
    WeightedBackend,
)

# A draw of exactly 1 would select past the end.
_BELOW_ONE = 1 - 2**-53


class _WeightedItem(Protocol):
    @property
    def weight(self) -> float: ...


W = TypeVar("W", bound=_WeightedItem)


@dataclass(slots=True, kw_only=True)
class ChosenEndpoint:
    """A chosen endpoint. Not frozen: one is created for each request."""

    endpoint: EngineEndpoint
    wakes: str = ""
    """The scaled-to-zero deployment that a fallback stands in for; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownModel:
    """The model is not declared."""

    known: tuple[str, ...]
    nearest: str | None
    idle: frozenset[str] = frozenset()
    """Those without a ready replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReadyEndpoint:
    """The model is declared, and no endpoint is left to try."""

    reason: str
    wakes: str = ""
    """The deployment for whose first replica the request waits, from zero or after its creation; empty if there is none."""
    recovering: str = ""
    """The deployment whose replicas are starting again; empty if there is none."""


RoutingChoice: TypeAlias = ChosenEndpoint | UnknownModel | NoReadyEndpoint


def choose(table: RoutingTable, query: RoutingQuery, health: EndpointHealth) -> RoutingChoice:
    """Return the endpoint to try.

    The order is: healthy backends, fallbacks, ejected endpoints, endpoints without a lease.
    """
    model = table.models.get(query.name)
    if model is None:
        known = tuple(sorted(table.models))
        return UnknownModel(
            known=known, nearest=nearest(known, query.name), idle=idle_models(table)
        )
    matched = _matching_rule(model, query) if model.rules else model
    scope = Scope(query, health, health.ejected)
    endpoint = _from_backends(matched.backends, scope)
    if endpoint is not None:
        return ChosenEndpoint(endpoint=endpoint)
    wakes = _draw_awaited(matched, query) if matched.awaited else ""
    endpoint = _last_resort(matched, model.fallbacks, scope)
    if endpoint is None:
        return NoReadyEndpoint(reason=matched.reason, wakes=wakes, recovering=matched.recovering)
    is_asleep = not any(backend.leased for backend in matched.backends)
    return ChosenEndpoint(endpoint=endpoint, wakes=wakes if is_asleep else "")


def idle_models(table: RoutingTable) -> frozenset[str]:
    """Return the names without a ready replica."""
    return frozenset(name for name, model in table.models.items() if not model.ready())


def nearest(known: Sequence[str], name: str) -> str | None:
    """Return the most similar of these names; None if none is similar."""
    # The cost is quadratic in the length of the name, which the client chooses.
    close = difflib.get_close_matches(name[:200], known, n=1)
    return close[0] if close else None


def _matching_rule(model: ServedModel, query: RoutingQuery) -> ServedModel | HeaderRule:
    """Return the first rule that matches the request's headers, else the model itself."""
    for rule in model.rules:
        if all(
            any(name == has and (value is None or value == other) for has, other in query.headers)
            for name, value in rule.headers
        ):
            return rule
    return model


def _last_resort(
    matched: ServedModel | HeaderRule, fallbacks: Sequence[WeightedBackend], scope: Scope
) -> EngineEndpoint | None:
    """Return the least bad endpoint when no backend has a healthy one."""
    for backend in fallbacks:
        if (endpoint := _from_subsets(backend, scope)) is not None:
            return endpoint
    last_scope = Scope(scope.query, scope.health, NO_ORIGINS)
    if scope.skipped:
        if (endpoint := _from_backends(matched.backends, last_scope)) is not None:
            return endpoint
        for backend in fallbacks:
            if (endpoint := _from_subsets(backend, last_scope)) is not None:
                return endpoint
    for backend in (
        *_weighted_order(_with_weight(matched.backends), scope.query.side()[0]),
        *fallbacks,
    ):
        if (endpoint := _from_subset(backend.orphan_subset, backend, last_scope)) is not None:
            return endpoint
    return None


def _with_weight(backends: Sequence[WeightedBackend]) -> Sequence[WeightedBackend]:
    return [backend for backend in backends if backend.weight > 0]


def _from_backends(backends: Sequence[WeightedBackend], scope: Scope) -> EngineEndpoint | None:
    """Return an endpoint of a backend drawn by weight; None if there is none."""
    if len(backends) == 1:
        return _from_subsets(backends[0], scope) if backends[0].weight else None
    weighted = _with_weight(backends)
    query = scope.query
    if query.sticky_mark and not query.session:
        # Only the affinity memory knows the backend of such a conversation.
        for backend in weighted:
            if (endpoint := _sticky_endpoint(backend, backend.subsets, scope)) is not None:
                return endpoint
    for backend in _weighted_order(weighted, query.side()[0]):
        if (endpoint := _from_subsets(backend, scope)) is not None:
            return endpoint
    return None


def _from_subsets(backend: WeightedBackend, scope: Scope) -> EngineEndpoint | None:
    subsets, query = backend.subsets, scope.query
    if not subsets:
        return None
    if len(subsets) == 1 and not query.sticky_mark and len(subsets[0].pools) == 1:
        return pick(subsets[0].pools[0], backend, scope)  # the common case
    endpoint = (
        _sticky_endpoint(backend, subsets, scope)
        if query.sticky_mark and not query.session
        else None
    )
    if endpoint is not None:
        return endpoint
    if len(subsets) == 1:
        return _from_subset(subsets[0], backend, scope)
    weighted = [subset for subset in subsets if subset.weight > 0]
    # A version with weight 0 is used only if no other endpoint remains.
    last_versions = [subset for subset in subsets if subset.weight <= 0]
    for subset in (*_weighted_order(weighted, query.side()[1]), *last_versions):
        if (endpoint := _from_subset(subset, backend, scope)) is not None:
            return endpoint
    return None


def _from_subset(subset: Subset, backend: WeightedBackend, scope: Scope) -> EngineEndpoint | None:
    query = scope.query
    if query.sticky_mark and query.session and backend.routing.sessions.enabled:
        for pool in subset.pools:
            endpoint = pool.by_mark.get(query.sticky_mark)
            if endpoint is not None and can_take(endpoint, scope):
                return endpoint
    for pool in subset.pools:
        if (endpoint := pick(pool, backend, scope)) is not None:
            return endpoint
    return None


def _sticky_endpoint(
    backend: WeightedBackend, subsets: Sequence[Subset], scope: Scope
) -> EngineEndpoint | None:
    """Return the endpoint that last served the conversation, if it may be tried and is not overloaded."""
    if not backend.routing.sessions.enabled:
        return None
    bound = backend.routing.prefix_affinity.bound
    for subset in subsets:
        for pool in subset.pools:
            endpoint = pool.by_mark.get(scope.query.sticky_mark)
            if endpoint is not None:
                may_stay = subset.weight > 0 and can_take(endpoint, scope)
                return endpoint if may_stay and scope.is_within(endpoint, pool, bound) else None
    return None


def _draw_awaited(matched: ServedModel | HeaderRule, query: RoutingQuery) -> str:
    """Return a deployment for whose first replica the request waits, drawn by weight."""
    point = query.side()[0] * sum(weight for weight, _ in matched.awaited)
    for weight, name in matched.awaited:
        point -= weight
        if point < 0:
            return name
    return matched.awaited[-1][1]


def _weighted_order(items: Sequence[W], point: float) -> Iterator[W]:
    """Yield the items in weighted random order; `point`, 0..1, is the draw."""
    remaining = list(items)
    while remaining:
        place = min(point, _BELOW_ONE) * sum(item.weight for item in remaining)
        chosen = len(remaining) - 1
        for number, item in enumerate(remaining):
            if place < item.weight:
                chosen = number
                break
            place -= item.weight
        # The rest of the draw is as good as a new one.
        point = place / remaining[chosen].weight
        yield remaining.pop(chosen)
