"""The best node for one more replica of a want, for all nodes at once. Pure.

The same decision as filters.py and scores.py make node by node: tests/reconciler/placement/test_table.py holds them
together. Only what moves is computed here; the rest comes from the table.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from reconciler.placement import columns, scores
from reconciler.placement.assumed_state import AssumedState
from reconciler.placement.inputs import PlacementRequest
from reconciler.placement.table import Bools, EvaluatedRequest, Floats, Ints, Rows
from schemas.replica import MemoryProof

Numbers: TypeAlias = float | NDArray[Any]

# What is added to the score of a node that does not do, and of one that does.
_NEVER: Final = np.array([-np.inf, 0.0])

# Up to so many rows are ranked anew one by one; all of them at once cost as much as ten of them.
_FEW: Final = 8


class Ranking:
    """The nodes by how good they are for a want, kept up to date with the draft.

    With `after_endings`, memory of replicas that drain counts as free: where could it go soon?
    """

    def __init__(
        self, draft: AssumedState, want: PlacementRequest, *, after_endings: bool = False
    ) -> None:
        self._draft = draft
        self.want = want
        self._after_endings = after_endings
        self.judged: EvaluatedRequest = draft.table.judged(want)
        self._need: Ints = self.judged.need.of_node
        self._unpreferred: Floats = _NEVER[self.judged.is_preferred.astype(np.intp)]
        self._weights = scores.weights_of(want)
        self._weight = max(1, sum(weight for weight in self._weights.values() if weight > 0))
        self._limit = want.spec.placement.max_replicas_per_node
        self._domains = [
            draft.table.coded(columns.LabelsColumn((key,))).of_node
            for key in want.spec.placement.spread_by
        ]
        self._score: Floats = np.zeros(len(draft.table), np.float64)
        self._preferred: Floats = np.zeros(len(draft.table), np.float64)
        self._start()

    def _start(self) -> None:
        """Take everything from the draft as it is now."""
        want, draft = self.want, self._draft
        self._passes: Bools = self.judged.passes.copy()
        for other in want.apart_from:
            self._passes[list(draft.counts(other))] = False
        self._count: Ints = np.zeros(len(draft.table), np.int64)
        self._movement: Floats = np.zeros(len(draft.table), np.float64)
        for row, there in draft.counts(want.name).items():
            self._count[row] = there
        # Also where what ends is not counted any more.
        for row in draft.table.counts.get(want.name, {}):
            self._movement[row] = self._moves(row)
        self._crowds = [
            np.bincount(codes, weights=self._count, minlength=1) for codes in self._domains
        ]
        self._seen = len(draft.touched)
        self._rank(slice(None))

    def best(self, *, without: Sequence[int] = ()) -> int | None:
        """Return the row of the best node but those; of equally good ones the first by name."""
        self._catch_up()
        for row in without:
            self._score[row] = self._preferred[row] = -np.inf
        found = next(filter(None, map(_highest, (self._preferred, self._score))), None)
        for row in without:
            self._rank_one(row)
        return None if found is None else found[0]

    def proof(self, row: int) -> MemoryProof:
        """Return what one rank needs on a node that fits."""
        found = self.judged.need.proofs[int(self.judged.need.codes[row])]
        assert found is not None
        return found

    @property
    def is_apart(self) -> Bools:
        """Return the nodes that are not refused, and run nothing to keep apart from."""
        self._catch_up()
        return self._passes

    @property
    def is_below_limit(self) -> Bools:
        """Return the nodes that may have one more replica of the deployment."""
        self._catch_up()
        return self._is_below_limit(slice(None))

    @property
    def room(self) -> Ints:
        """Return how many bytes may be assigned on each node."""
        return self._room(slice(None))

    def _catch_up(self) -> None:
        touched = self._draft.touched
        if self._seen == len(touched):
            return
        if len(touched) - self._seen > _FEW:
            self._start()
            return
        for row in set(touched[self._seen :]):
            self._touch(row)
        self._seen = len(touched)

    def _touch(self, row: int) -> None:
        there = self._draft.counts(self.want.name).get(row, 0)
        change = there - self._count.item(row)
        self._count[row] = there
        self._movement[row] = self._moves(row)
        for other in self.want.apart_from:
            if self._draft.counts(other).get(row, 0):
                self._passes[row] = False
        if not change or not self._domains:
            self._rank_one(row)
            return
        alike = np.zeros(len(self._draft.table), np.bool_)
        for codes, crowd in zip(self._domains, self._crowds, strict=True):
            crowd[codes[row]] += change
            alike |= codes == codes[row]
        self._rank(np.flatnonzero(alike))

    def _is_below_limit(self, rows: Rows) -> Bools:
        if self._limit is None:
            return np.ones_like(self._passes[rows])
        below: Bools = self._count[rows] < self._limit
        return below

    def _free(self, rows: Rows) -> Ints:
        free: Ints = self._draft.free[rows]
        if self._after_endings:
            free = free + self._draft.ending[rows]
        return free

    def _room(self, rows: Rows) -> Ints:
        soon: Ints = self._draft.free[rows] + self._draft.ending[rows] - self._draft.promised[rows]
        room: Ints = np.minimum(self._free(rows), soon)
        return room

    def _rank(self, rows: Rows) -> None:
        """Work out the rows anew."""
        fits = self._passes[rows] & (self._need[rows] <= self._room(rows))
        if self._limit is not None:
            fits &= self._is_below_limit(rows)
        # Multiplying would turn -inf into nan; a sum that is -inf stays so.
        total = self._total(
            self.judged.weighed[rows],
            self._headroom(rows),
            self._count[rows],
            self._spreading(rows),
            self._movement[rows],
        )
        score = total + _NEVER[fits.astype(np.intp)]
        self._score[rows] = score
        self._preferred[rows] = score + self._unpreferred[rows]

    def _rank_one(self, row: int) -> None:
        """Work out one row anew, with plain numbers: an array of one costs five times as much."""
        draft = self._draft
        free, ending = draft.free.item(row), draft.ending.item(row)
        soon = free + ending - draft.promised.item(row)
        if self._after_endings:
            free += ending
        need, count = self._need.item(row), self._count.item(row)
        is_below_limit = self._limit is None or count < self._limit
        score: Numbers = -np.inf
        if self._passes.item(row) and is_below_limit and need <= min(free, soon):
            allocatable = draft.table.allocatable.item(row)
            left = 100.0 * max(0, free - need) / max(1, allocatable)
            weighed = self.judged.weighed.item(row)
            moves = self._movement.item(row)
            score = self._total(weighed, left, count, self._spreading(row), moves)
        self._score[row] = score
        self._preferred[row] = score + self._unpreferred.item(row)

    def _moves(self, row: int) -> float:
        if self._weights.get("movement", 0) <= 0:
            return 0.0
        return 100.0 if self._draft.is_ending(row, self.want.name) else 0.0

    def _total(
        self, weighed: Numbers, left: Numbers, count: Numbers, spread: Numbers, moves: Numbers
    ) -> Numbers:
        """Return 0..100, of one node or of many, added up in the order of scores.parts_of."""
        weights, total = self._weights, weighed
        if weights.get("headroom", 0) > 0:
            total = total + weights["headroom"] * left
        if weights.get("packing", 0) > 0:
            total = total + weights["packing"] * (100.0 - left)
        if weights.get("siblings", 0) > 0:
            total = total + weights["siblings"] * (100.0 / (1 + count))
        if weights.get("spreading", 0) > 0:
            total = total + weights["spreading"] * spread
        if weights.get("movement", 0) > 0:
            total = total + weights["movement"] * moves
        return total / self._weight

    def _headroom(self, rows: Rows) -> Floats:
        left = np.maximum(0, self._free(rows) - self._need[rows])
        share: Floats = 100.0 * left / np.maximum(1, self._draft.table.allocatable[rows])
        return share

    def _spreading(self, rows: Rows | int) -> Numbers:
        if not self._domains:
            return 100.0
        total: Numbers = 0.0
        for codes, crowd in zip(self._domains, self._crowds, strict=True):
            total = total + 100.0 / (1 + crowd[codes[rows]])
        return total / len(self._domains)


def _highest(scores: Floats) -> tuple[int] | None:
    if not len(scores):
        return None
    row = int(scores.argmax())
    return (row,) if scores[row] > -np.inf else None
