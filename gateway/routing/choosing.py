"""Which engine gets a request. Pure: no clock, no randomness, no I/O; all of that arrives."""

import difflib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from gateway.routing.table import Origin, Share, Table, Target, Trial

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    target: Target


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownModel:
    """Nobody declared the name."""

    known: tuple[str, ...]
    nearest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingReady:
    """The name is declared, and there is nobody (left) to ask."""

    reason: str
    wakes: str = ""
    """The deployment that a replica is started of for whoever waits; empty if waiting is of no use."""


Choice: TypeAlias = Chosen | UnknownModel | NothingReady


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How the engines stand with this gateway right now."""

    in_flight: Mapping[Origin, int] = field(default_factory=lambda: MappingProxyType({}))
    penalised: AbstractSet[Origin] = frozenset()
    """Those that failed a moment ago: asked only if nobody else is left."""


def choose(
    table: Table,
    name: str,
    standing: Standing,
    *,
    draw: float,
    failed: AbstractSet[Target] = frozenset(),
) -> Choice:
    """Return the engine to ask; `draw` in 0..1 decides between weights, and between equals.

    `failed` are the engines that this very request has tried: never chosen again.
    """
    model = table.models.get(name)
    if model is None:
        return UnknownModel(known=tuple(sorted(table.models)), nearest=nearest(table, name))
    weighted = [share for share in model.shares if share.weight > 0]
    ranked = [_tiers(share, standing.penalised, failed) for share in weighted]
    for tier in zip(*ranked, strict=True):
        able = [(s.weight, found) for s, found in zip(weighted, tier, strict=True) if found]
        if able:
            found = _drawn(able, draw)
            # Another part of the same draw, so that it has nothing to do with the weights.
            target = _least_loaded(found, standing.in_flight, draw * 997 % 1)
            trial = table.trials.get(target.deployment)
            if trial is not None:
                target = _tried(trial, target, found, standing, draw)
            return Chosen(target=target)
    wakes = _drawn(model.sleepers, draw) if model.sleepers else ""
    return NothingReady(reason=model.reason, wakes=wakes)


def nearest(table: Table, name: str) -> str | None:
    """Return the known name that is spelled most alike; None if none is near."""
    # Quadratic in the name's length, and the name is a stranger's.
    close = difflib.get_close_matches(name[:200], sorted(table.models), n=1)
    return close[0] if close else None


def _tiers(
    share: Share, penalised: AbstractSet[Origin], failed: AbstractSet[Target]
) -> tuple[Sequence[Target], ...]:
    """Return who may be asked: rather these, else those, and as the last resort the orphans."""
    leased: Sequence[Target] = share.leased
    orphans: Sequence[Target] = share.orphans
    if failed:
        leased = [target for target in leased if target not in failed]
        orphans = [target for target in orphans if target not in failed]
    if not penalised:
        return leased, (), orphans
    return [target for target in leased if target.origin not in penalised], leased, orphans


def _drawn(able: Sequence[tuple[int, T]], draw: float) -> T:
    if len(able) == 1:
        return able[0][1]
    point = draw * sum(weight for weight, _ in able)
    for weight, found in able:
        point -= weight
        if point < 0:
            return found
    return able[-1][1]


def _tried(
    trial: Trial, target: Target, found: Sequence[Target], standing: Standing, draw: float
) -> Target:
    """Return who of the target's deployment is asked while a new version of it is on trial.

    Where only one of the versions can be asked, it gets everything.
    """
    mine = [other for other in found if other.deployment == target.deployment]
    new = [other for other in mine if other.template == trial.template]
    if not new or len(new) == len(mine):
        return target
    old = [other for other in mine if other.template != trial.template]
    # Large factors: these parts of the draw must not follow from those that were used already.
    side = new if draw * 1_000_003 % 1 * 100 < trial.weight else old
    return _least_loaded(side, standing.in_flight, draw * 1_000_000_007 % 1)


def _least_loaded(
    targets: Sequence[Target], in_flight: Mapping[Origin, int], part: float
) -> Target:
    """Return one of those with the least to do; `part` in 0..1 decides between equals.

    Not always the first of them: at low load one Mac would get hot while its twin stands idle.
    """
    least = min(in_flight.get(target.origin, 0) for target in targets)
    idle = [target for target in targets if in_flight.get(target.origin, 0) == least]
    idle.sort(key=lambda t: (t.replica, t.origin, t.version))
    return idle[int(part * len(idle))]
