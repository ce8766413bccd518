"""The table of all nodes as columns, with cached answers of filters and scores. Pure.

A function that depends on one column is called once for all nodes with an equal value there (inputs.py), and once for
all requests that are equal in what it depends on. Values that change while replicas are placed are in ranking.py.
"""

import dataclasses
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from reconciler.placement import filters, inputs, memory_proof, scores
from reconciler.placement.filters import NodeFilter
from reconciler.placement.inputs import AnyColumn, ColumnPair, NodeView, PlacementRequest, Rejection
from schemas.deployment import ModelSource
from schemas.placement import SizeMinimum
from schemas.replica import MemoryProof

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Answer = TypeVar("Answer")
Codes: TypeAlias = NDArray[np.intp]
Rows: TypeAlias = slice | Codes


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedColumn:
    """A column as codes: a number for each node, and for each number one example node."""

    of_node: Codes
    examples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterVerdict:
    """The answer of one filter: for each node the index of its refusal; `refusals[0]` is None."""

    of_node: Codes
    passes: Bools
    refusals: tuple[Rejection | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """The memory of one rank on each node; 0 where a filter rejects the node anyway."""

    of_node: Ints
    codes: Codes
    proofs: tuple[MemoryProof | None, ...]


class AnswerCache:
    """Answers by the column that they depend on, and by what they are about: at 5,000 nodes a bind without it takes 30 ms."""

    def __init__(self, by_column: dict[AnyColumn, dict[Hashable, Any]] | None = None) -> None:
        self.by_column: dict[AnyColumn, dict[Hashable, Any]] = by_column or {}
        self.sums: dict[Hashable, Floats] = {}
        """Weighted sums of fixed scores; they depend on the columns of all these scores."""

    def find(self, column: AnyColumn, about: Hashable, compute: Callable[[], Answer]) -> Answer:
        """Return an answer; computed at the first call."""
        answers = self.by_column.setdefault(column, {})
        if about not in answers:
            answers[about] = compute()
        answer: Answer = answers[about]
        return answer

    def number(self) -> int:
        """Return the number of cached answers."""
        return len(self.sums) + sum(map(len, self.by_column.values()))

    def valid_after(self, changed: Sequence[tuple[NodeView, NodeView]]) -> "AnswerCache":
        """Return the answers that hold after these nodes changed: pairs of (before, after)."""
        stale = {column for column in self.by_column if _is_changed(column, changed)}
        if not stale:
            return self
        valid = AnswerCache(
            {column: dict(a) for column, a in self.by_column.items() if column not in stale}
        )
        if not any(score.column in stale for score in scores.FIXED):
            valid.sums = self.sums.copy()
        return valid


def _is_changed(column: AnyColumn, changed: Sequence[tuple[NodeView, NodeView]]) -> bool:
    """Return whether a node changed its value in the column."""
    if isinstance(column, ColumnPair):
        return _is_changed(column.one, changed) or _is_changed(column.other, changed)
    return any(
        inputs.read_column(column, [old]) != inputs.read_column(column, [new])
        for old, new in changed
    )


def encode_column(values: Sequence[Hashable]) -> EncodedColumn:
    """Encode the distinct values of a column as numbers."""
    numbers: dict[Hashable, int] = {}
    # Model reports are slow to hash, and many nodes share one object.
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
    """Encode the distinct pairs of values of two columns as numbers."""
    pairs = one.of_node * max(1, len(other.examples)) + other.of_node
    _, examples, of_node = np.unique(pairs, return_index=True, return_inverse=True)
    return EncodedColumn(of_node=of_node.astype(np.intp), examples=tuple(map(int, examples)))


# Larger sizes are mistakes, and would not fit into an array.
_HUGE = 2**62
# Answers are kept while nodes do not change. Each takes about 10 bytes per node, and deployments come and go.
_MOST_ANSWERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedRequest:
    """The answers for one request that do not change while replicas are placed."""

    passes: Bools
    """The nodes that no filter rejects."""
    verdicts: tuple[FilterVerdict, ...]
    """In the order of the filters."""
    need: MemoryNeed
    is_preferred: Bools
    weighted: Floats
    """The weighted sum of the fixed scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationColumns:
    """All allocations on all nodes, as columns."""

    rows: Codes
    sizes: Ints
    priorities: Ints
    is_ending: Bools


class NodeTable:
    """The nodes at one moment, ordered by name. Rows are indexes into all columns."""

    def __init__(
        self, nodes: Sequence[NodeView], *, before: "NodeTable | None" = None, are_all: bool = True
    ) -> None:
        """Make the columns; reuse the rows and answers of `before` for nodes that did not change.

        Without `are_all`, `nodes` are only the changed nodes, and each of them must exist in `before`.
        """
        self.answers = AnswerCache()
        self._allocations: AllocationColumns | None = None
        self._lacking_models: frozenset[str] | None = None
        if before is not None and not are_all:
            after = list(before.nodes)
            for node in nodes:
                after[before.rows[node.name]] = node
            self.nodes: tuple[NodeView, ...] = tuple(after)
            self._reuse(before, [before.rows[node.name] for node in nodes])
            return
        self.nodes = tuple(sorted(nodes, key=lambda node: node.name))
        if before is not None and [n.name for n in before.nodes] == [n.name for n in self.nodes]:
            pairs = zip(before.nodes, self.nodes, strict=True)
            self._reuse(before, [at for at, (old, new) in enumerate(pairs) if old is not new])
            return
        self.rows: dict[str, int] = {node.name: row for row, node in enumerate(self.nodes)}
        self.allocatable = _ints([node.allocatable_bytes for node in self.nodes])
        self.used = _ints([node.used_bytes for node in self.nodes])
        self.promised = _ints([node.promised_bytes for node in self.nodes])
        self.ending = _ints([node.ending_bytes if node.allocations else 0 for node in self.nodes])
        self.counts: dict[str, dict[int, int]] = {}
        for row, node in enumerate(self.nodes):
            for name, count in node.replicas.items():
                self.counts.setdefault(name, {})[row] = count

    def _reuse(self, before: "NodeTable", rows: Sequence[int]) -> None:
        """Copy the columns of `before`, and update only `rows`."""
        changed = [(before.nodes[row], self.nodes[row]) for row in rows]
        if before.answers.number() <= _MOST_ANSWERS:
            self.answers = before.answers.valid_after([p for p in changed if _differ(*p)])
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

    def named(self, names: Iterable[str]) -> list[NodeView]:
        """Return the nodes with these names; names without a node are skipped."""
        return [self.nodes[self.rows[name]] for name in names if name in self.rows]

    def awaits_reports(self, source: ModelSource) -> bool:
        """Return whether a ready node has not inspected every folder of the model."""
        is_ready: Bools | None = None
        for column in inputs.source_columns(source):
            coded = self.coded(column)
            values = inputs.read_column(column, [self.nodes[at] for at in coded.examples])
            if None in values:
                is_ready = self._is_ready() if is_ready is None else is_ready
                if (is_ready & (coded.of_node == values.index(None))).any():
                    return True
        return False

    def _is_ready(self) -> Bools:
        return self._answers(inputs.READY, lambda node: int(node.is_ready)) > 0

    @property
    def allocations(self) -> AllocationColumns:
        """Return all allocations; computed at the first call."""
        if self._allocations is None:
            pairs = [
                (row, allocation)
                for row, node in enumerate(self.nodes)
                for allocation in node.allocations
            ]
            self._allocations = AllocationColumns(
                rows=np.array([row for row, _ in pairs], np.intp),
                sizes=_ints([one.bytes for _, one in pairs]),
                priorities=_ints([one.priority for _, one in pairs]),
                is_ending=np.array([one.is_ending for _, one in pairs], np.bool_),
            )
        return self._allocations

    @property
    def lacking_models(self) -> frozenset[str]:
        """Return the models of which some node lacks bytes; computed at the first call."""
        if self._lacking_models is None:
            self._lacking_models = frozenset(
                path
                for node in self.nodes
                for path, report in node.models.items()
                if report.missing_bytes
            )
        return self._lacking_models

    def coded(self, column: AnyColumn) -> EncodedColumn:
        """Return the encoded column; computed at the first call."""
        if isinstance(column, ColumnPair):
            pair = column
            return self.answers.find(
                column, None, lambda: pair_columns(self.coded(pair.one), self.coded(pair.other))
            )
        simple = column
        return self.answers.find(
            column, None, lambda: encode_column(inputs.read_column(simple, self.nodes))
        )

    def evaluate(self, request: PlacementRequest) -> EvaluatedRequest:
        """Evaluate filters, memory and fixed scores of a request for all nodes."""
        verdicts = tuple(self._verdict(request, rule) for rule in filters.FIXED)
        passes = np.ones(len(self), np.bool_)
        for verdict in verdicts:
            if len(verdict.refusals) > 1:
                passes &= verdict.passes
        return EvaluatedRequest(
            passes=passes,
            verdicts=verdicts,
            need=self._need(request),
            is_preferred=self._is_preferred(request),
            weighted=self._weighted(request),
        )

    def _verdict(self, request: PlacementRequest, one: NodeFilter) -> FilterVerdict:
        column = one.column(request)

        def compute() -> FilterVerdict:
            refusals: list[Rejection | None] = [None]

            def check(node: NodeView) -> int:
                rejected = one.check(request, node)
                if rejected is None:
                    return 0
                refusals.append(rejected)
                return len(refusals) - 1

            of_node = self._answers(column, check).astype(np.intp)
            return FilterVerdict(of_node=of_node, passes=of_node == 0, refusals=tuple(refusals))

        return self.answers.find(column, (one.check, one.aspect(request)), compute)

    def _need(self, request: PlacementRequest) -> MemoryNeed:
        column, spec = filters.source_columns(request), request.spec
        if spec.concurrency == "Auto":
            # The number of requests, and with it the memory, depends on the Mac.
            for more in (inputs.BANDWIDTH, inputs.GPU_CORES, inputs.ALLOCATABLE):
                column = ColumnPair(column, more)
        guess_tokens = spec.model.guess_tokens
        sizes_of = (
            spec.context_length,
            spec.concurrency,
            spec.kv_cache,
            guess_tokens,
            spec.prefixes,
        )

        def compute() -> MemoryNeed:
            coded = self.coded(column)
            examples = [self.nodes[at] for at in coded.examples]
            proofs = tuple(
                memory_proof.proof_of(request, node)
                if filters.has_folders(request, node) is None
                else None
                for node in examples
            )
            sizes = _ints([0 if proof is None else proof.total_bytes for proof in proofs])
            return MemoryNeed(of_node=sizes[coded.of_node], codes=coded.of_node, proofs=proofs)

        about = "need", *sizes_of, spec.model.vision, request.override_bytes
        return self.answers.find(column, about, compute)

    def _is_preferred(self, request: PlacementRequest) -> Bools:
        tier = request.spec.placement.tier
        column = ColumnPair(inputs.ModelColumn(request.path), inputs.HARDWARE)
        if isinstance(tier, SizeMinimum) and tier.preferred_nodes:
            column = ColumnPair(column, inputs.NAME)

        def compute() -> Bools:
            return self._answers(column, lambda n: int(scores.is_preferred(request, n))) > 0

        return self.answers.find(column, ("preferred", tier), compute)

    def _weighted(self, request: PlacementRequest) -> Floats:
        weights = scores.weights_of(request)
        parts = [(score, weights.get(score.name, 0)) for score in scores.FIXED]
        key = tuple((one.name, one.aspect(request), weight) for one, weight in parts if weight > 0)
        total = self.answers.sums.get(key)
        if total is None:
            total = np.zeros(len(self), np.float64)
            for one, weight in parts:
                if weight > 0:
                    total += weight * self._score(request, one)
            self.answers.sums[key] = total
        weight = weights.get("locality", 0)
        return total + weight * self._locality(request) if weight > 0 else total

    def _locality(self, request: PlacementRequest) -> Floats | float:
        """Return the score for each node; one number if all nodes have, or all lack, the same bytes.

        It is not kept: it depends on the model, and one sum for each model would push other answers out.
        """
        coded = self.coded(inputs.ModelColumn(request.path))
        values = [scores.locality(request, self.nodes[at]) for at in coded.examples]
        if len(set(values)) < 2:
            return values[0] if values else 0.0
        spread: Floats = np.array(values, np.float64)[coded.of_node]
        return spread

    def _score(self, request: PlacementRequest, one: scores.FixedScore) -> Floats:
        def compute() -> Floats:
            coded = self.coded(one.column)
            values = [one.score(request, self.nodes[example]) for example in coded.examples]
            of_node: Floats = np.array(values, np.float64)[coded.of_node]
            return of_node

        return self.answers.find(one.column, (one.name, one.aspect(request)), compute)

    def _answers(self, column: AnyColumn, ask: Callable[[NodeView], int]) -> Ints:
        """Call a function once for each distinct value in the column."""
        coded = self.coded(column)
        answers: Ints = np.array([ask(self.nodes[at]) for at in coded.examples], np.int64)
        spread: Ints = answers[coded.of_node]
        return spread


# All fields of a node except those that change with its allocations. Tuples take equal objects for equal at once.
_fixed_values: Final = operator.attrgetter(
    *(
        field.name
        for field in dataclasses.fields(NodeView)
        if field.name not in ("used_bytes", "replicas", "allocations", "promised_bytes")
    )
)


def _differ(old: NodeView, new: NodeView) -> bool:
    """Return whether more than the node's allocations changed."""
    return bool(_fixed_values(old) != _fixed_values(new))


def _sized(*values: int) -> tuple[int, ...]:
    return tuple(max(-_HUGE, min(_HUGE, value)) for value in values)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(_sized(*values), np.int64)
