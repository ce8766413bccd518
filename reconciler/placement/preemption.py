"""Who has to go, so that a replica of a higher priority has room. Pure.

The fewest, and of those the lowest in priority; never an equal. Only memory is made room for: nobody is displaced
because of a label.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reconciler.placement.assumed_state import AssumedState
from reconciler.placement.inputs import PlacementRequest
from reconciler.placement.ranking import Ranking
from reconciler.placement.table import Bools, Ints
from reconciler.views import Allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """A node, and who has to leave it."""

    row: int
    victims: tuple[Allocation, ...]


def choose_victims(
    allocations: Sequence[Allocation], *, priority: int, short_bytes: int
) -> tuple[Allocation, ...] | None:
    """Return whom to displace so that `short_bytes` more are free; None if that cannot be had."""
    lower = [one for one in allocations if one.priority < priority and not one.is_ending]
    by_size = sorted(lower, key=lambda one: -one.bytes)
    number, freed = 0, 0
    while freed < short_bytes and number < len(by_size):
        freed += by_size[number].bytes
        number += 1
    if freed < short_bytes:
        return None
    # No fewer will do. Of all sets of so many the one whose members are lowest: each is taken as soon
    # as the largest of those after it could still make up the rest.
    chosen: list[Allocation] = []
    waiting = sorted(lower, key=lambda one: (one.priority, -one.bytes, one.replica))
    while len(chosen) < number:
        for at, one in enumerate(waiting):
            rest = sorted((other.bytes for other in waiting[at + 1 :]), reverse=True)
            had = sum(other.bytes for other in chosen) + one.bytes
            left = number - len(chosen) - 1
            if len(rest) >= left and had + sum(rest[:left]) >= short_bytes:
                chosen.append(one)
                waiting = waiting[at + 1 :]
                break
    return tuple(chosen)


def choose_preemption(
    draft: AssumedState, want: PlacementRequest, ranking: Ranking
) -> Preemption | None:
    """Return the node where the fewest have to go, of those the one where they are lowest.

    `ranking` is that after endings: memory on its way back need not be freed again.
    """
    short = ranking.judged.need.of_node - ranking.room
    candidates = ranking.is_apart & ranking.is_below_limit & (short > 0)
    best: tuple[tuple[object, ...], Preemption] | None = None
    for row in _worth_a_look(draft, want, short, candidates):
        allocations = [
            one for one in draft.table.nodes[row].allocations if one.replica not in draft.victims
        ]
        victims = choose_victims(
            allocations, priority=want.spec.priority, short_bytes=int(short[row])
        )
        if not victims:
            continue
        highest = sorted((one.priority for one in victims), reverse=True)
        rank = (len(victims), highest, not ranking.judged.is_preferred[row], row)
        if best is None or rank < best[0]:
            best = rank, Preemption(row=row, victims=victims)
    return None if best is None else best[1]


def _worth_a_look(
    draft: AssumedState, want: PlacementRequest, short: Ints, candidates: Bools
) -> list[int]:
    """Return the nodes among which the best one is, found by columns: in a big fleet few of many.

    Where one victim will do somewhere, only nodes where one of the lowest such priority will do; else those
    where all who may be displaced give back enough.
    """
    allocations = draft.table.allocations
    may_go = (allocations.priorities < want.spec.priority) & ~allocations.is_ending
    may_go &= candidates[allocations.rows] & ~np.isin(allocations.rows, list(draft.displaced))
    alone = may_go & (allocations.sizes >= short[allocations.rows])
    used = [row for row in sorted(draft.displaced) if candidates[row]]
    if alone.any():
        lowest = allocations.priorities[alone].min()
        found = allocations.rows[alone & (allocations.priorities == lowest)]
    else:
        freed = np.bincount(allocations.rows[may_go], allocations.sizes[may_go], len(draft.table))
        found = np.flatnonzero(candidates & (freed >= short))
    # Where somebody was displaced already, columns do not say who is left.
    return sorted({*map(int, found), *used})
