"""Preemption: the victims that must end so that a replica of a higher priority has room. Pure.

The fewest victims, and among those the ones of the lowest priority; never one of equal priority. Of equal ones, those
whose models other nodes have on their disks: the replacements fetch the fewest bytes again. Preemption frees memory
only: it never removes a replica because of labels, taints or antiAffinity.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from reconciler.placement import inputs
from reconciler.placement.inputs import Allocation, PlacementRequest
from reconciler.placement.ranking import AssumedState, Ranking
from reconciler.placement.table import Bools, Ints, NodeTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """A node, and the replicas that must leave it."""

    row: int
    victims: tuple[Allocation, ...]


# No model has so many bytes.
_NOWHERE: Final = 2**62

RefetchBytes: TypeAlias = Callable[[Allocation], int]
"""From a replica to the bytes that its replacement would fetch."""


class _Refetches:
    """The bytes that replacements of victims would fetch again, for all nodes of a table; each model is looked at once."""

    def __init__(self, table: NodeTable) -> None:
        self._table = table
        self._least: dict[str, tuple[int, int, int]] = {}

    def on(self, row: int) -> RefetchBytes | None:
        """Return a function for replicas on the row; None if no replica anywhere costs bytes.

        The bytes are the least that another node which takes replicas lacks of the model; 0 if there is no such node.
        """
        if not self._table.lacking_models:
            return None

        def least(one: Allocation) -> int:
            if one.model not in self._table.lacking_models:
                return 0
            if one.model not in self._least:
                self._least[one.model] = self._two_least(one.model)
            best, first, second = self._least[one.model]
            return second if best == row else first

        return least

    def _two_least(self, model: str) -> tuple[int, int, int]:
        """Return the row that lacks the least, what it lacks, and the least that any other row lacks."""
        table = self._table
        coded = table.coded(inputs.ModelColumn(model))
        lacking = [table.nodes[at].missing_bytes(model) for at in coded.examples]
        takes = np.array([node.takes_replicas for node in table.nodes])
        sizes = np.where(takes, np.array(lacking, np.int64)[coded.of_node], _NOWHERE)
        best = int(sizes.argmin())
        first = int(sizes[best])
        sizes[best] = _NOWHERE
        second = int(sizes.min())
        return best, first % _NOWHERE, second % _NOWHERE


def choose_victims(
    allocations: Sequence[Allocation],
    *,
    priority: int,
    short_bytes: int,
    refetch: RefetchBytes | None = None,
) -> tuple[Allocation, ...] | None:
    """Return the victims that free `short_bytes` more; None if all lower priorities together do not."""
    lower = [
        allocation
        for allocation in allocations
        if allocation.priority < priority and not allocation.is_ending
    ]
    by_size = sorted(lower, key=lambda one: -one.bytes)
    number, freed = 0, 0
    while freed < short_bytes and number < len(by_size):
        freed += by_size[number].bytes
        number += 1
    if freed < short_bytes:
        return None
    # `number` is the smallest possible. Of all sets of this size, take the one with the lowest priorities: accept
    # each candidate as soon as the largest ones after it could still free the rest.
    chosen: list[Allocation] = []
    waiting = sorted(lower, key=lambda one: (one.priority, -one.bytes, one.replica))
    if refetch is not None:
        waiting.sort(key=lambda one: (one.priority, refetch(one)))
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
    assumed: AssumedState, request: PlacementRequest, ranking: Ranking
) -> Preemption | None:
    """Return the node with the fewest victims, then the lowest priorities, then the fewest bytes to fetch again.

    `ranking` must count ending replicas as free, so that their memory is not freed twice.
    """
    short = ranking.evaluated.need.of_node - ranking.room
    candidates = ranking.is_apart & ranking.is_below_limit & (short > 0)
    refetches = _Refetches(assumed.table)
    best: tuple[tuple[object, ...], Preemption] | None = None
    for row in _candidate_rows(assumed, request, short, candidates):
        allocations = [
            allocation
            for allocation in assumed.table.nodes[row].allocations
            if allocation.replica not in assumed.victims
        ]
        refetch = refetches.on(row)
        victims = choose_victims(
            allocations,
            priority=request.spec.priority,
            short_bytes=int(short[row]),
            refetch=refetch,
        )
        if not victims:
            continue
        highest = sorted((victim.priority for victim in victims), reverse=True)
        rank = (
            *(len(victims), highest, not ranking.evaluated.is_preferred[row]),
            *(sum(map(refetch, victims)) if refetch is not None else 0, row),
        )
        if best is None or rank < best[0]:
            best = rank, Preemption(row=row, victims=victims)
    return None if best is None else best[1]


def _candidate_rows(
    assumed: AssumedState, request: PlacementRequest, short: Ints, candidates: Bools
) -> list[int]:
    """Return the rows among which the best one is, found on columns: a few of many in a large fleet.

    If one victim is enough on some node, only the nodes where one of the lowest such priority is enough. Otherwise
    the nodes where all possible victims together free enough.
    """
    allocations = assumed.table.allocations
    may_go = (allocations.priorities < request.spec.priority) & ~allocations.is_ending
    may_go &= candidates[allocations.rows] & ~np.isin(allocations.rows, list(assumed.displaced))
    alone = may_go & (allocations.sizes >= short[allocations.rows])
    used = [row for row in sorted(assumed.displaced) if candidates[row]]
    if alone.any():
        lowest = allocations.priorities[alone].min()
        found = allocations.rows[alone & (allocations.priorities == lowest)]
    else:
        freed = np.bincount(allocations.rows[may_go], allocations.sizes[may_go], len(assumed.table))
        found = np.flatnonzero(candidates & (freed >= short))
    # On rows with victims, the columns do not show which replicas are left.
    return sorted({*map(int, found), *used})
