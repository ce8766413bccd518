"""What was asked about the nodes of a table, so that it is asked once. Pure.

A question that depends on one property of a node is asked once for all nodes that have it in common
(columns.py); and what it depends on of a want is asked once for all wants that have that in common.

All nodes at once, as columns: what planning asks thousands of times, and changes never. Pure.

A question that depends on one property of a node is asked once for all nodes that have it in common
(columns.py), with the very functions that judge a single node; and what it depends on of a want is asked once for
all wants that have that in common. What moves while replicas are placed is draft.py's.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from reconciler.placement import columns, filters, scores
from reconciler.placement.columns import AnyColumn, ColumnPair
from reconciler.placement.filters import NodeFilter
from reconciler.placement.inputs import PlacementRequest, Rejection
from reconciler.views import NodeView
from schemas.replica import MemoryProof

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Codes: TypeAlias = NDArray[np.intp]
Rows: TypeAlias = slice | Codes


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedColumn:
    """A column: for each node a number, and for each number one node that has it."""

    of_node: Codes
    examples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterVerdict:
    """What one filter says: for each node the number of its refusal; `refusals[0]` is none."""

    of_node: Codes
    passes: Bools
    refusals: tuple[Rejection | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What one rank takes on each node; 0 where nobody knows, and nobody asks."""

    of_node: Ints
    codes: Codes
    proofs: tuple[MemoryProof | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCache:
    """What was asked once: by the column that it depends on, and by what it depends on of a want."""

    coded: dict[AnyColumn, EncodedColumn] = field(default_factory=dict)
    verdicts: dict[tuple[AnyColumn, Hashable], FilterVerdict] = field(default_factory=dict)
    needs: dict[tuple[AnyColumn, Hashable], MemoryNeed] = field(default_factory=dict)
    preferred: dict[tuple[AnyColumn, Hashable], Bools] = field(default_factory=dict)
    scores: dict[tuple[AnyColumn, Hashable], Floats] = field(default_factory=dict)
    sums: dict[Hashable, Floats] = field(default_factory=dict)
    """Of scores; they depend on the columns of all of them."""

    def number(self) -> int:
        """Return how many there are."""
        judged = len(self.verdicts) + len(self.needs) + len(self.preferred)
        return len(self.coded) + judged + len(self.scores) + len(self.sums)

    def still_good(self, changed: Sequence[tuple[NodeView, NodeView]]) -> "AnswerCache":
        """Return the answers that hold though these nodes are others now: (before, after)."""
        stale: set[AnyColumn] = {column for column in self.coded if _moved(column, changed)}
        if not stale:
            return self
        summed = any(one.column in stale for one in scores.FIXED)
        return AnswerCache(
            coded={column: found for column, found in self.coded.items() if column not in stale},
            verdicts={key: one for key, one in self.verdicts.items() if key[0] not in stale},
            needs={key: one for key, one in self.needs.items() if key[0] not in stale},
            preferred={key: one for key, one in self.preferred.items() if key[0] not in stale},
            scores={key: one for key, one in self.scores.items() if key[0] not in stale},
            sums={} if summed else self.sums.copy(),
        )


def _moved(column: AnyColumn, changed: Sequence[tuple[NodeView, NodeView]]) -> bool:
    """Return whether one of the nodes has another value in the column."""
    if isinstance(column, ColumnPair):
        return _moved(column.one, changed) or _moved(column.other, changed)
    return any(
        columns.read_column(column, [old]) != columns.read_column(column, [new])
        for old, new in changed
    )


def encode_column(values: Sequence[Hashable]) -> EncodedColumn:
    numbers: dict[Hashable, int] = {}
    # Reports of a model are long to hash, and many nodes hold the very same object.
    known: dict[int, int] = {}
    examples: list[int] = []
    of_node: list[int] = []
    for row, value in enumerate(values):
        code = known.get(id(value))
        if code is None:
            code = numbers.setdefault(value, len(numbers))
            known[id(value)] = code
            if code == len(examples):
                examples.append(row)
        of_node.append(code)
    return EncodedColumn(of_node=np.array(of_node, np.intp), examples=tuple(examples))


def pair_columns(one: EncodedColumn, other: EncodedColumn) -> EncodedColumn:
    pairs = one.of_node * max(1, len(other.examples)) + other.of_node
    _, examples, of_node = np.unique(pairs, return_index=True, return_inverse=True)
    return EncodedColumn(of_node=of_node.astype(np.intp), examples=tuple(map(int, examples)))


# Sizes beyond this are somebody's mistake, and would not fit into an array.
_HUGE = 2**62
# Answers outlive a snapshot if no node changed; each takes some 10 bytes a node, and deployments come and go.
_MOST_ANSWERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedRequest:
    """What does not change about a want while replicas are placed."""

    passes: Bools
    """The nodes that no filter refuses."""
    verdicts: tuple[FilterVerdict, ...]
    """In the order of the filters."""
    need: MemoryNeed
    is_preferred: Bools
    weighed: Floats
    """The sum of the weighed scores that do not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationColumns:
    """Everybody who is assigned somewhere, as columns."""

    rows: Codes
    sizes: Ints
    priorities: Ints
    is_ending: Bools


class NodeTable:
    """The nodes of one snapshot, in the order of their names."""

    def __init__(
        self, nodes: Sequence[NodeView], *, before: "NodeTable | None" = None, are_all: bool = True
    ) -> None:
        """Make the columns; what `before` knew of nodes that are what they were is taken over.

        Unless they `are_all`, the nodes that are not given are as before; the given ones were there.
        """
        self.answers = AnswerCache()
        self._tenants: AllocationColumns | None = None
        if before is not None and not are_all:
            after = list(before.nodes)
            for node in nodes:
                after[before.rows[node.name]] = node
            self.nodes: tuple[NodeView, ...] = tuple(after)
            self._take_over(before, [before.rows[node.name] for node in nodes])
            return
        self.nodes = tuple(sorted(nodes, key=lambda node: node.name))
        if before is not None and [n.name for n in before.nodes] == [n.name for n in self.nodes]:
            pairs = zip(before.nodes, self.nodes, strict=True)
            self._take_over(before, [at for at, (old, new) in enumerate(pairs) if old is not new])
            return
        self.rows: dict[str, int] = {node.name: row for row, node in enumerate(self.nodes)}
        self.allocatable = _ints([node.allocatable_bytes for node in self.nodes])
        self.used = _ints([node.used_bytes for node in self.nodes])
        self.promised = _ints([node.promised_bytes for node in self.nodes])
        self.ending = _ints([node.ending_bytes if node.allocations else 0 for node in self.nodes])
        self.counts: dict[str, dict[int, int]] = {}
        for row, node in enumerate(self.nodes):
            for name, there in node.replicas.items():
                self.counts.setdefault(name, {})[row] = there

    def _take_over(self, before: "NodeTable", rows: Sequence[int]) -> None:
        """Take what did not change as it is; look at the nodes in `rows` alone."""
        changed = [(before.nodes[row], self.nodes[row]) for row in rows]
        if before.answers.number() <= _MOST_ANSWERS:
            self.answers = before.answers.still_good([p for p in changed if _differ(*p)])
        self.rows, self.counts = before.rows, dict(before.counts)
        self.allocatable, self.used = before.allocatable.copy(), before.used.copy()
        self.promised, self.ending = before.promised.copy(), before.ending.copy()
        own: set[str] = set()
        for row, (old, new) in zip(rows, changed, strict=True):
            self.allocatable[row], self.used[row] = _sized(new.allocatable_bytes, new.used_bytes)
            self.promised[row], self.ending[row] = _sized(new.promised_bytes, new.ending_bytes)
            for name in {*old.replicas, *new.replicas}:
                if name not in own:
                    own.add(name)
                    self.counts[name] = dict(self.counts.get(name, {}))
                self.counts[name].pop(row, None)
                if new.replicas.get(name, 0):
                    self.counts[name][row] = new.replicas[name]
                if not self.counts[name]:
                    del self.counts[name]
                    own.discard(name)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def allocations(self) -> AllocationColumns:
        """Return who is assigned where; made when it is first asked for."""
        if self._tenants is None:
            everybody = [
                (row, one) for row, node in enumerate(self.nodes) for one in node.allocations
            ]
            self._tenants = AllocationColumns(
                rows=np.array([row for row, _ in everybody], np.intp),
                sizes=_ints([one.bytes for _, one in everybody]),
                priorities=_ints([one.priority for _, one in everybody]),
                is_ending=np.array([one.is_ending for _, one in everybody], np.bool_),
            )
        return self._tenants

    def where(self, column: AnyColumn, holds: Callable[[NodeView], bool]) -> tuple[NodeView, ...]:
        """Return the nodes for which something holds that depends on the column alone."""
        found = self.coded(column)
        held = [code for code, at in enumerate(found.examples) if holds(self.nodes[at])]
        if not held:
            return ()
        return tuple(self.nodes[row] for row in np.flatnonzero(np.isin(found.of_node, held)))

    def coded(self, column: AnyColumn) -> EncodedColumn:
        """Return the column; made when it is first asked for."""
        found = self.answers.coded.get(column)
        if found is None:
            if isinstance(column, ColumnPair):
                found = pair_columns(self.coded(column.one), self.coded(column.other))
            else:
                found = encode_column(columns.read_column(column, self.nodes))
            self.answers.coded[column] = found
        return found

    def judged(self, want: PlacementRequest) -> EvaluatedRequest:
        """Return what does not change about the want."""
        verdicts = tuple(self._verdict(want, one) for one in filters.FIXED)
        passes = np.ones(len(self), np.bool_)
        for verdict in verdicts:
            if len(verdict.refusals) > 1:
                passes &= verdict.passes
        return EvaluatedRequest(
            passes=passes,
            verdicts=verdicts,
            need=self._need(want),
            is_preferred=self._is_preferred(want),
            weighed=self._weighed(want),
        )

    def _verdict(self, want: PlacementRequest, one: NodeFilter) -> FilterVerdict:
        column = one.column(want)
        key = column, (one.check, one.aspect(want))
        found = self.answers.verdicts.get(key)
        if found is None:
            refusals: list[Rejection | None] = [None]

            def ask(node: NodeView) -> int:
                rejected = one.check(want, node)
                if rejected is None:
                    return 0
                refusals.append(rejected)
                return len(refusals) - 1

            of_node = self._answers(column, ask).astype(np.intp)
            found = FilterVerdict(of_node=of_node, passes=of_node == 0, refusals=tuple(refusals))
            self.answers.verdicts[key] = found
        return found

    def _need(self, want: PlacementRequest) -> MemoryNeed:
        column, spec = filters.source_columns(want), want.spec
        guesses = spec.model.draft.tokens if spec.model.draft is not None else 0
        sizes_of = spec.context_length, spec.concurrency, spec.kv_cache, guesses
        key = column, (*sizes_of, want.override_bytes)
        found = self.answers.needs.get(key)
        if found is None:
            coded = self.coded(column)
            examples = [self.nodes[at] for at in coded.examples]
            proofs = tuple(
                filters.proof_of(want, node) if filters.has_all(want, node) is None else None
                for node in examples
            )
            sizes = _ints([0 if proof is None else proof.total_bytes for proof in proofs])
            found = MemoryNeed(of_node=sizes[coded.of_node], codes=coded.of_node, proofs=proofs)
            self.answers.needs[key] = found
        return found

    def _is_preferred(self, want: PlacementRequest) -> Bools:
        column = ColumnPair(columns.ModelColumn(want.path), columns.HARDWARE)
        key = column, want.spec.placement.tier
        found = self.answers.preferred.get(key)
        if found is None:
            found = self._answers(column, lambda node: int(scores.is_preferred(want, node))) > 0
            self.answers.preferred[key] = found
        return found

    def _weighed(self, want: PlacementRequest) -> Floats:
        weights = scores.weights_of(want)
        parts = [(one, weights.get(one.name, 0)) for one in scores.FIXED]
        key = tuple((one.name, one.aspect(want), weight) for one, weight in parts if weight > 0)
        found = self.answers.sums.get(key)
        if found is None:
            found = np.zeros(len(self), np.float64)
            for one, weight in parts:
                if weight > 0:
                    found += weight * self._score(want, one)
            self.answers.sums[key] = found
        return found

    def _score(self, want: PlacementRequest, one: scores.FixedScore) -> Floats:
        key = one.column, (one.name, one.aspect(want))
        found = self.answers.scores.get(key)
        if found is None:
            coded = self.coded(one.column)
            values = [one.score(want, self.nodes[example]) for example in coded.examples]
            found = np.array(values, np.float64)[coded.of_node]
            self.answers.scores[key] = found
        return found

    def _answers(self, column: AnyColumn, ask: Callable[[NodeView], int]) -> Ints:
        """Ask once for each value in the column."""
        coded = self.coded(column)
        answers: Ints = np.array([ask(self.nodes[at]) for at in coded.examples], np.int64)
        spread: Ints = answers[coded.of_node]
        return spread


# All fields of a node but those that move with what is assigned to it.
_FIXED_FIELDS: Final = tuple(
    one.name
    for one in dataclasses.fields(NodeView)
    if one.name not in ("used_bytes", "replicas", "tenants", "promised_bytes")
)


def _differ(old: NodeView, new: NodeView) -> bool:
    """Return whether more than what is assigned to the node changed."""
    return any(getattr(old, name) != getattr(new, name) for name in _FIXED_FIELDS)


def _sized(*values: int) -> tuple[int, ...]:
    return tuple(max(-_HUGE, min(_HUGE, value)) for value in values)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(_sized(*values), np.int64)
