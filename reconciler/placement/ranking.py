"""The ranking of all nodes for one request, computed on columns. Pure.

The table holds what does not change while replicas are placed, and this file computes what depends on the assumed
state, with the formulas of inputs.py and scores.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from reconciler.placement import inputs, scores
from reconciler.placement.inputs import Allocation, NodeView, PlacementRequest
from reconciler.placement.table import Bools, EvaluatedRequest, Floats, Ints, NodeTable, Rows
from schemas.replica import MemoryProof


class AssumedState:
    """Free memory and replica counts per row, as they will be after all decisions so far; the table never changes."""

    def __init__(self, table: NodeTable) -> None:
        self.table = table
        self.free: Ints = table.allocatable - table.used
        self.ending: Ints = table.ending.copy()
        self.promised: Ints = table.promised.copy()
        self.victims: set[str] = set()
        """Replicas that are preempted."""
        self.displaced: set[int] = set()
        """The rows of preempted replicas."""
        self.touched: list[int] = []
        """Changed rows in the order of the changes; rankings read it from where they stopped."""
        self._counts: dict[str, dict[int, int]] = {}

    def counts(self, deployment: str) -> dict[int, int]:
        """Return the number of the deployment's replicas by row."""
        count = self._counts.get(deployment)
        return self.table.counts.get(deployment, {}) if count is None else count

    def is_ending(self, row: int, deployment: str) -> bool:
        """Return whether a replica of the deployment on the row is ending."""
        return any(
            allocation.deployment == deployment
            and (allocation.is_ending or allocation.replica in self.victims)
            for allocation in self.table.nodes[row].allocations
        )

    def assign(self, row: int, deployment: str, size: int) -> None:
        """Add one rank of a replica to a node."""
        self._count(row, deployment, +1)
        self.free[row] -= size
        self.touched.append(row)

    def release(self, row: int, deployment: str, size: int) -> None:
        """Undo `assign`."""
        self._count(row, deployment, -1)
        self.free[row] += size
        self.touched.append(row)

    def keep(self, row: int, size: int) -> None:
        """Count memory of a rank that leaves a node but still runs."""
        self.free[row] -= size
        self.touched.append(row)

    def discount(self, row: int, deployment: str) -> None:
        """Stop counting an ending replica as a sibling; its memory stays in use."""
        if self.counts(deployment).get(row, 0):
            self._count(row, deployment, -1)
            self.touched.append(row)

    def promise(self, row: int, size: int) -> None:
        """Reserve memory on a node for a replica that waits for others to end."""
        self.promised[row] += size
        self.touched.append(row)

    def end(self, row: int, victim: Allocation) -> None:
        """Preempt a replica: count its memory as ending on every node with a rank of it."""
        self.victims.add(victim.replica)
        rows = [self.table.rows[name] for name in victim.nodes if name in self.table.rows]
        for at in rows or [row]:
            here = self.table.nodes[at].allocations
            sizes = (
                allocation.bytes for allocation in here if allocation.replica == victim.replica
            )
            self.displaced.add(at)
            self.ending[at] += sum(sizes)
            self.touched.append(at)

    def view(self, row: int) -> NodeView:
        """Return the node with the assumed state."""
        node = self.table.nodes[row]
        replicas = dict(node.replicas)
        for deployment, rows in self._counts.items():
            replicas.pop(deployment, None)
            if rows.get(row, 0):
                replicas[deployment] = rows[row]
        return replace(
            node,
            used_bytes=node.allocatable_bytes - int(self.free[row]),
            promised_bytes=int(self.promised[row]),
            replicas=replicas,
            allocations=tuple(
                tenant._replace(is_ending=True) if tenant.replica in self.victims else tenant
                for tenant in node.allocations
            ),
        )

    def _count(self, row: int, deployment: str, change: int) -> None:
        own = self._counts.get(deployment)
        if own is None:
            own = self._counts[deployment] = dict(self.table.counts.get(deployment, {}))
        left = own.get(row, 0) + change
        if left:
            own[row] = left
        else:
            own.pop(row, None)


# Added to the score of a node that must not be chosen, and of one that may.
_NEVER: Final = np.array([-np.inf, 0.0])

# Up to this many rows are ranked one by one; ranking all rows at once costs as much as ten single ones.
_FEW: Final = 8


class Ranking:
    """The nodes by score for a request, kept up to date with the assumed state.

    With `after_endings`, the memory of draining replicas counts as free.
    """

    def __init__(
        self, assumed: AssumedState, request: PlacementRequest, *, after_endings: bool = False
    ) -> None:
        self._assumed = assumed
        self.request = request
        self._after_endings = after_endings
        self.evaluated: EvaluatedRequest = assumed.table.evaluate(request)
        self._need: Ints = self.evaluated.need.of_node
        self._unpreferred: Floats = _NEVER[self.evaluated.is_preferred.astype(np.intp)]
        self._weights = scores.weights_of(request)
        self._weight = max(1, sum(weight for weight in self._weights.values() if weight > 0))
        self._limit = request.spec.placement.max_replicas_per_node
        self._domains = [
            assumed.table.coded(inputs.LabelsColumn((key,))).of_node
            for key in request.spec.placement.spread_by
        ]
        self._score: Floats = np.zeros(len(assumed.table), np.float64)
        self._preferred: Floats = np.zeros(len(assumed.table), np.float64)
        self._capacity: Ints = np.maximum(1, assumed.table.allocatable)
        self._start()

    def _start(self) -> None:
        """Compute all rows from the assumed state."""
        request, assumed = self.request, self._assumed
        self._passes: Bools = self.evaluated.passes.copy()
        for other in request.apart_from:
            self._passes[list(assumed.counts(other))] = False
        self._count: Ints = np.zeros(len(assumed.table), np.int64)
        self._movement: Floats = np.zeros(len(assumed.table), np.float64)
        for row, count in assumed.counts(request.name).items():
            self._count[row] = count
        # Also on rows where ending replicas are not counted any more.
        for row in assumed.table.counts.get(request.name, {}):
            self._movement[row] = self._moves(row)
        self._spread_counts = [
            np.bincount(codes, weights=self._count, minlength=1) for codes in self._domains
        ]
        self._read_touched = len(assumed.touched)
        self._rank(slice(None))

    def best(self, *, without: Sequence[int] = ()) -> int | None:
        """Return the row of the best node except `without`; of equal nodes the first by name."""
        self._catch_up()
        for row in without:
            self._score[row] = self._preferred[row] = -np.inf
        found = next(filter(None, map(_highest, (self._preferred, self._score))), None)
        for row in without:
            self._rank(row)
        return None if found is None else found[0]

    def proof(self, row: int) -> MemoryProof:
        """Return the memory proof for a node that fits."""
        memory_proof = self.evaluated.need.proofs[int(self.evaluated.need.codes[row])]
        assert memory_proof is not None
        return memory_proof

    @property
    def is_apart(self) -> Bools:
        """Return the nodes that pass the fixed filters and antiAffinity."""
        self._catch_up()
        return self._passes

    @property
    def is_below_limit(self) -> Bools:
        """Return the nodes below maxReplicasPerNode."""
        self._catch_up()
        return self._is_below_limit(slice(None))

    @property
    def room(self) -> Ints:
        """Return the bytes that may be assigned on each node."""
        return self._room(slice(None))

    def _catch_up(self) -> None:
        touched = self._assumed.touched
        if self._read_touched == len(touched):
            return
        if len(touched) - self._read_touched > _FEW:
            self._start()
            return
        for row in set(touched[self._read_touched :]):
            self._touch(row)
        self._read_touched = len(touched)

    def _touch(self, row: int) -> None:
        count = self._assumed.counts(self.request.name).get(row, 0)
        change = count - self._count.item(row)
        self._count[row] = count
        self._movement[row] = self._moves(row)
        for other in self.request.apart_from:
            if self._assumed.counts(other).get(row, 0):
                self._passes[row] = False
        if not change or not self._domains:
            self._rank(row)
            return
        same_domain = np.zeros(len(self._assumed.table), np.bool_)
        for codes, spread_counts in zip(self._domains, self._spread_counts, strict=True):
            spread_counts[codes[row]] += change
            same_domain |= codes == codes[row]
        self._rank(np.flatnonzero(same_domain))

    def _is_below_limit(self, rows: Rows | int) -> Bools:
        if self._limit is None:
            return np.ones_like(self._passes[rows])
        below: Bools = self._count[rows] < self._limit
        return below

    def _room(self, rows: Rows | int) -> Ints:
        assumed = self._assumed
        free, ending = assumed.free[rows], assumed.ending[rows]
        promised = assumed.promised[rows]
        room: Ints = (
            inputs.room_bytes(free + ending, 0, promised)
            if self._after_endings
            else inputs.room_bytes(free, ending, promised)
        )
        return room

    def _rank(self, rows: Rows | int) -> None:
        """Compute the scores of the rows."""
        fits = self._passes[rows] & (self._need[rows] <= self._room(rows))
        if self._limit is not None:
            fits &= self._is_below_limit(rows)
        free = self._assumed.free[rows]
        if self._after_endings:
            free = free + self._assumed.ending[rows]
        changing = scores.changing_scores(
            left=free - self._need[rows],
            capacity=self._capacity[rows],
            siblings=self._count[rows],
            neighbours=[
                counts[codes[rows]]
                for codes, counts in zip(self._domains, self._spread_counts, strict=True)
            ],
            movement=self._movement[rows],
        )
        total = scores.add_weighted(self.evaluated.weighted[rows], changing, self._weights)
        # Multiplying would turn -inf into nan; a sum that is -inf stays so.
        score = total / self._weight + _NEVER[fits.astype(np.intp)]
        self._score[rows] = score
        self._preferred[rows] = score + self._unpreferred[rows]

    def _moves(self, row: int) -> float:
        return 100.0 if self._assumed.is_ending(row, self.request.name) else 0.0


def _highest(scores: Floats) -> tuple[int] | None:
    if not len(scores):
        return None
    row = int(scores.argmax())
    return (row,) if scores[row] > -np.inf else None
