"""Which engine gets a request. Pure: no clock, no randomness, no I/O; all of that arrives."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from gateway.routing.load_balancer import NO_ORIGINS, Scope, can_take, pick
from gateway.routing.query import EndpointHealth, RoutingQuery
from gateway.routing.table import (
    EngineEndpoint,
    HeaderRule,
    RoutingTable,
    ServedModel,
    Subset,
    WeightedBackend,
)

# A draw of exactly 1 would be beyond the last.
_BELOW_ONE = 1 - 2**-53


class _WeightedItem(Protocol):
    @property
    def weight(self) -> float: ...


W = TypeVar("W", bound=_WeightedItem)


@dataclass(slots=True, kw_only=True)
class ChosenEndpoint:
    """Not frozen: one is made for each request."""

    target: EngineEndpoint
    wakes: str = ""
    """The deployment at zero that should have answered, and a fallback does instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownModel:
    """Nobody declared the name."""

    known: tuple[str, ...]
    nearest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoReadyEndpoint:
    """The name is declared, and there is nobody (left) to ask."""

    reason: str
    wakes: str = ""
    """The deployment that a replica is started of for whoever waits; empty if waiting is of no use."""


RoutingChoice: TypeAlias = ChosenEndpoint | UnknownModel | NoReadyEndpoint


def choose(table: RoutingTable, wish: RoutingQuery, standing: EndpointHealth) -> RoutingChoice:
    """Return the engine to ask.

    Fallbacks come before those who failed a moment ago, and after both those whose lease is lost.
    """
    model = table.models.get(wish.name)
    if model is None:
        return UnknownModel(known=tuple(sorted(table.models)), nearest=nearest(table, wish.name))
    way = _matching_rule(model, wish) if model.rules else model
    grounds = Scope(wish, standing, standing.penalised)
    target = _from_backends(way.shares, grounds)
    if target is not None:
        return ChosenEndpoint(target=target)
    wakes = _scaled_to_zero(way, wish) if way.sleepers else ""
    target = _last_resort(way, model.fallbacks, grounds)
    if target is None:
        return NoReadyEndpoint(reason=way.reason, wakes=wakes)
    is_asleep = not any(share.leased for share in way.shares)
    return ChosenEndpoint(target=target, wakes=wakes if is_asleep else "")


def nearest(table: RoutingTable, name: str) -> str | None:
    """Return the known name that is spelled most alike; None if none is near."""
    # Quadratic in the name's length, and the name is a stranger's.
    close = difflib.get_close_matches(name[:200], sorted(table.models), n=1)
    return close[0] if close else None


def _matching_rule(model: ServedModel, wish: RoutingQuery) -> ServedModel | HeaderRule:
    """Return the first rule that the request's headers match; without one what goes for everybody."""
    for rule in model.rules:
        if all(
            any(name == has and (value is None or value == other) for has, other in wish.headers)
            for name, value in rule.headers
        ):
            return rule
    return model


def _last_resort(
    way: ServedModel | HeaderRule, fallbacks: Sequence[WeightedBackend], grounds: Scope
) -> EngineEndpoint | None:
    """Return who may be asked when none of the backends is well, the least bad first."""
    for share in fallbacks:
        if (target := _from_subsets(share, grounds)) is not None:
            return target
    desperate = Scope(grounds.wish, grounds.standing, NO_ORIGINS)
    if grounds.skipped:
        if (target := _from_backends(way.shares, desperate)) is not None:
            return target
        for share in fallbacks:
            if (target := _from_subsets(share, desperate)) is not None:
                return target
    for share in (*_weighted_order(_weighty(way.shares), grounds.wish.side()[0]), *fallbacks):
        if (target := _from_subset(share.last, share, desperate)) is not None:
            return target
    return None


def _weighty(shares: Sequence[WeightedBackend]) -> Sequence[WeightedBackend]:
    return [share for share in shares if share.weight > 0]


def _from_backends(shares: Sequence[WeightedBackend], grounds: Scope) -> EngineEndpoint | None:
    """Return who is asked of the shares, drawn by their weights; None if nobody can be."""
    if len(shares) == 1:
        return _from_subsets(shares[0], grounds) if shares[0].weight else None
    some = _weighty(shares)
    wish = grounds.wish
    if wish.stays and not wish.session:
        # Nothing but our memory says on which side such a conversation is.
        for share in some:
            if (target := _sticky_endpoint(share, share.arms, grounds)) is not None:
                return target
    for share in _weighted_order(some, wish.side()[0]):
        if (target := _from_subsets(share, grounds)) is not None:
            return target
    return None


def _from_subsets(share: WeightedBackend, grounds: Scope) -> EngineEndpoint | None:
    arms, wish = share.arms, grounds.wish
    if not arms:
        return None
    if len(arms) == 1 and not wish.stays and len(arms[0].pools) == 1:
        return pick(arms[0].pools[0], share, grounds)  # as nearly always
    target = _sticky_endpoint(share, arms, grounds) if wish.stays and not wish.session else None
    if target is not None:
        return target
    if len(arms) == 1:
        return _from_subset(arms[0], share, grounds)
    some = [arm for arm in arms if arm.weight > 0]
    # A version that gets nothing is asked before nobody is.
    none = [arm for arm in arms if arm.weight <= 0]
    for arm in (*_weighted_order(some, wish.side()[1]), *none):
        if (target := _from_subset(arm, share, grounds)) is not None:
            return target
    return None


def _from_subset(arm: Subset, share: WeightedBackend, grounds: Scope) -> EngineEndpoint | None:
    wish = grounds.wish
    if wish.stays and wish.session and share.routing.sessions.enabled:
        for pool in arm.pools:
            target = pool.by_mark.get(wish.stays)
            if target is not None and can_take(target, grounds):
                return target
    for pool in arm.pools:
        if (target := pick(pool, share, grounds)) is not None:
            return target
    return None


def _sticky_endpoint(
    share: WeightedBackend, arms: Sequence[Subset], grounds: Scope
) -> EngineEndpoint | None:
    """Return who had the conversation last, if it still may; not if that would be far too much for it."""
    if not share.routing.sessions.enabled:
        return None
    bound = share.routing.prefix_affinity.bound
    for arm in arms:
        for pool in arm.pools:
            target = pool.by_mark.get(grounds.wish.stays)
            if target is not None:
                may_stay = arm.weight > 0 and can_take(target, grounds)
                return target if may_stay and grounds.is_within(target, pool, bound) else None
    return None


def _scaled_to_zero(way: ServedModel | HeaderRule, wish: RoutingQuery) -> str:
    """Return one of those that a request brings back, by weight."""
    point = wish.side()[0] * sum(weight for weight, _ in way.sleepers)
    for weight, name in way.sleepers:
        point -= weight
        if point < 0:
            return name
    return way.sleepers[-1][1]


def _weighted_order(items: Sequence[W], point: float) -> Iterator[W]:
    """Yield the items, each drawn by weight from those that are left; `point` in 0..1 decides."""
    left = list(items)
    while left:
        place = min(point, _BELOW_ONE) * sum(item.weight for item in left)
        chosen = len(left) - 1
        for number, item in enumerate(left):
            if place < item.weight:
                chosen = number
                break
            place -= item.weight
        # What is left of the draw is as good as a new one.
        point = place / left[chosen].weight
        yield left.pop(chosen)
