"""Swap: the idle replicas that end so that a model at zero, for which requests wait, has room. Pure.

The least value in sum goes first: the seconds that loading it again takes, by the time until its next use. Only idle
replicas may go, each after its minimum residence, and never one of a higher priority.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Final

from reconciler.placement.inputs import Allocation, PlacementRequest
from reconciler.placement.preemption import Preemption
from reconciler.placement.ranking import AssumedState, Ranking

# Someone reads an answer and writes the next question within a minute. Loading takes at most a fifth of the time.
_LEAST_RESIDENCE_S, _RESIDENCE_PER_LOAD = 60.0, 4.0
# Small beside every other value, so that those on demand are still in order among each other.
_ON_DEMAND_PART: Final = 1e-6

USES_HALF_LIFE_S: Final = 3600.0
"""A use counts half as much after this time."""
_MEAN_GAP_S: Final = USES_HALF_LIFE_S / log(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleReplica:
    """A replica without requests that may give way, and what ending it costs."""

    load_s: float
    """Seconds to load its model again from this disk."""
    next_use_s: float
    """Seconds in which its next use is expected."""
    stays_s: float = 0.0
    """Seconds until its minimum residence is over; it may go from 0 on."""
    is_on_demand: bool = False
    """True if its model is not declared: it goes before the models that are."""

    @property
    def value(self) -> float:
        """Return the share of the time until its next use that loading it again takes."""
        value = self.load_s / self.next_use_s
        return value * _ON_DEMAND_PART if self.is_on_demand else value


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWait:
    """The expected wait of a model at zero for room and its load."""

    seconds: float
    gives_way: tuple[str, ...] = ()
    """The replicas that end for it."""


def residence_s(load_s: float) -> float:
    """Return the seconds for which a replica serves at least before it may give way."""
    return max(_LEAST_RESIDENCE_S, _RESIDENCE_PER_LOAD * load_s)


def next_use_s(uses: float, idle_s: float) -> float:
    """Return the seconds in which a model's next use is expected.

    `uses` are its minutes with requests, of which each counts half after an hour. Time without requests counts twice:
    people and agents use a model for a while, and then another.
    """
    return 2 * idle_s + _MEAN_GAP_S / max(uses, 0.01)


def victims(
    allocations: Sequence[Allocation],
    idle: Mapping[str, IdleReplica],
    *,
    priority: int,
    short_bytes: int,
) -> tuple[Allocation, ...] | None:
    """Return the idle replicas of the least value that free `short_bytes` more; None if all of them do not."""

    def value(allocation: Allocation) -> float:
        return idle[allocation.replica].value

    candidates = sorted(
        (
            allocation
            for allocation in allocations
            if allocation.replica in idle
            and idle[allocation.replica].stays_s <= 0
            and allocation.priority <= priority
            and not allocation.is_ending
        ),
        key=lambda allocation: (value(allocation), allocation.replica),
    )
    chosen: list[Allocation] = []
    freed = 0
    for allocation in candidates:
        if freed >= short_bytes:
            break
        chosen.append(allocation)
        freed += allocation.bytes
    if freed < short_bytes:
        return None
    # The last replicas may have made earlier ones unnecessary: the most valuable of those stay.
    for allocation in reversed(chosen[:]):
        if freed - allocation.bytes >= short_bytes:
            chosen.remove(allocation)
            freed -= allocation.bytes
    alone = next((a for a in candidates if a.bytes >= short_bytes), None)
    if alone is not None and value(alone) < sum(map(value, chosen)):
        return (alone,)
    return tuple(chosen)


def choose_swap(
    assumed: AssumedState,
    request: PlacementRequest,
    ranking: Ranking,
    idle: Mapping[str, IdleReplica],
) -> Preemption | None:
    """Return the node whose victims have the least value in sum, then the fewest victims.

    `ranking` must count ending replicas as free, so that their memory is not freed twice.
    """
    short = ranking.evaluated.need.of_node - ranking.room
    passes = ranking.is_apart & ranking.is_below_limit & (short > 0)
    best: tuple[tuple[object, ...], Preemption] | None = None
    for row, node in enumerate(assumed.table.nodes):
        if not passes[row]:
            continue
        allocations = [a for a in node.allocations if a.replica not in assumed.victims]
        chosen = victims(
            allocations, idle, priority=request.spec.priority, short_bytes=int(short[row])
        )
        if not chosen:
            continue
        value = sum(idle[victim.replica].value for victim in chosen)
        rank = (value, len(chosen), not ranking.evaluated.is_preferred[row], row)
        if best is None or rank < best[0]:
            best = rank, Preemption(row=row, victims=chosen)
    return None if best is None else best[1]
