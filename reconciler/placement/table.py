"""All nodes at once, as columns: what planning asks thousands of times, and changes never. Pure.

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

from reconciler.observe import NodeView
from reconciler.placement import columns, filters, scores
from reconciler.placement.columns import Both, Column
from reconciler.placement.filters import Filter, Rejected
from reconciler.placement.want import Want
from schemas.replica import MemoryProof

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Codes: TypeAlias = NDArray[np.intp]
Rows: TypeAlias = slice | Codes

# Sizes beyond this are somebody's mistake, and would not fit into an array.
_HUGE = 2**62
# Answers outlive a snapshot if no node changed; each takes some 10 bytes a node, and deployments come and go.
_MOST_ANSWERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A column: for each node a number, and for each number one node that has it."""

    of_node: Codes
    examples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one filter says: for each node the number of its refusal; `refusals[0]` is none."""

    of_node: Codes
    passes: Bools
    refusals: tuple[Rejected | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one rank takes on each node; 0 where nobody knows, and nobody asks."""

    of_node: Ints
    codes: Codes
    proofs: tuple[MemoryProof | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What does not change about a want while replicas are placed."""

    passes: Bools
    """The nodes that no filter refuses."""
    verdicts: tuple[Verdict, ...]
    """In the order of the filters."""
    need: Need
    is_preferred: Bools
    weighed: Floats
    """The sum of the weighed scores that do not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """Everybody who is assigned somewhere, as columns."""

    rows: Codes
    sizes: Ints
    priorities: Ints
    is_ending: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What was asked once, by what it depends on of a want."""

    coded: dict[Column | Both, Coded] = field(default_factory=dict)
    verdicts: dict[Hashable, Verdict] = field(default_factory=dict)
    needs: dict[Hashable, Need] = field(default_factory=dict)
    preferred: dict[Hashable, Bools] = field(default_factory=dict)
    scores: dict[Hashable, Floats] = field(default_factory=dict)

    def number(self) -> int:
        """Return how many there are."""
        judged = len(self.verdicts) + len(self.needs) + len(self.preferred)
        return len(self.coded) + judged + len(self.scores)


class Table:
    """The nodes of one snapshot, in the order of their names."""

    def __init__(self, nodes: Sequence[NodeView], *, before: "Table | None" = None) -> None:
        """Make the columns; what `before` knew of nodes that are what they were is taken over."""
        self.nodes = tuple(sorted(nodes, key=lambda node: node.name))
        self.answers = Answers()
        self._tenants: Tenants | None = None
        if before is not None and _same_machines(before.nodes, self.nodes):
            self._take_over(before)
            return
        self.allocatable = _ints([node.allocatable_bytes for node in self.nodes])
        self.used = _ints([node.used_bytes for node in self.nodes])
        self.promised = _ints([node.promised_bytes for node in self.nodes])
        self.ending = _ints([node.ending_bytes if node.tenants else 0 for node in self.nodes])
        self.counts: dict[str, dict[int, int]] = {}
        for row, node in enumerate(self.nodes):
            for name, there in node.replicas.items():
                self.counts.setdefault(name, {})[row] = there

    def _take_over(self, before: "Table") -> None:
        """Take what does not move as it is, and of what moves look at the nodes that changed alone."""
        if before.answers.number() <= _MOST_ANSWERS:
            self.answers = before.answers
        self.allocatable, self.counts = before.allocatable, dict(before.counts)
        self.used, self.promised = before.used.copy(), before.promised.copy()
        self.ending = before.ending.copy()
        own: set[str] = set()
        for row, (old, new) in enumerate(zip(before.nodes, self.nodes, strict=True)):
            if old is new:
                continue
            self.used[row], self.promised[row] = new.used_bytes, new.promised_bytes
            self.ending[row] = new.ending_bytes
            for name in {*old.replicas, *new.replicas}:
                if name not in own:
                    own.add(name)
                    self.counts[name] = dict(self.counts.get(name, {}))
                self.counts[name].pop(row, None)
                if new.replicas.get(name, 0):
                    self.counts[name][row] = new.replicas[name]

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def tenants(self) -> Tenants:
        """Return who is assigned where; made when it is first asked for."""
        if self._tenants is None:
            everybody = [(row, one) for row, node in enumerate(self.nodes) for one in node.tenants]
            self._tenants = Tenants(
                rows=np.array([row for row, _ in everybody], np.intp),
                sizes=_ints([one.bytes for _, one in everybody]),
                priorities=_ints([one.priority for _, one in everybody]),
                is_ending=np.array([one.is_ending for _, one in everybody], np.bool_),
            )
        return self._tenants

    def coded(self, column: Column | Both) -> Coded:
        """Return the column; made when it is first asked for."""
        found = self.answers.coded.get(column)
        if found is None:
            if isinstance(column, Both):
                found = _paired(self.coded(column.one), self.coded(column.other))
            else:
                found = _coded(columns.read(column, self.nodes))
            self.answers.coded[column] = found
        return found

    def judged(self, want: Want) -> Judged:
        """Return what does not change about the want."""
        verdicts = tuple(self._verdict(want, one) for one in filters.FIXED)
        passes = np.ones(len(self), np.bool_)
        for verdict in verdicts:
            if len(verdict.refusals) > 1:
                passes &= verdict.passes
        return Judged(
            passes=passes,
            verdicts=verdicts,
            need=self._need(want),
            is_preferred=self._is_preferred(want),
            weighed=self._weighed(want),
        )

    def _verdict(self, want: Want, one: Filter) -> Verdict:
        key = one.check, one.aspect(want)
        found = self.answers.verdicts.get(key)
        if found is None:
            refusals: list[Rejected | None] = [None]

            def ask(node: NodeView) -> int:
                rejected = one.check(want, node)
                if rejected is None:
                    return 0
                refusals.append(rejected)
                return len(refusals) - 1

            of_node = self._answers(one.column(want), ask).astype(np.intp)
            found = Verdict(of_node=of_node, passes=of_node == 0, refusals=tuple(refusals))
            self.answers.verdicts[key] = found
        return found

    def _need(self, want: Want) -> Need:
        key = want.path, want.spec.context_length, want.spec.concurrency, want.ranks
        found = self.answers.needs.get((key, want.override_bytes))
        if found is None:
            coded = self.coded(columns.Model(want.path))
            reports = [self.nodes[example].models.get(want.path) for example in coded.examples]
            proofs = tuple(
                filters.proof_of(want, self.nodes[example])
                if report is not None and report.geometry is not None
                else None
                for example, report in zip(coded.examples, reports, strict=True)
            )
            sizes = _ints([0 if proof is None else proof.total_bytes for proof in proofs])
            found = Need(of_node=sizes[coded.of_node], codes=coded.of_node, proofs=proofs)
            self.answers.needs[key, want.override_bytes] = found
        return found

    def _is_preferred(self, want: Want) -> Bools:
        key = want.path, want.spec.placement.tier
        found = self.answers.preferred.get(key)
        if found is None:
            column = Both(columns.Model(want.path), columns.HARDWARE)
            found = self._answers(column, lambda node: int(scores.is_preferred(want, node))) > 0
            self.answers.preferred[key] = found
        return found

    def _weighed(self, want: Want) -> Floats:
        weights = scores.weights_of(want)
        parts = [(one, weights.get(one.name, 0)) for one in scores.FIXED]
        key = tuple((one.name, one.aspect(want), weight) for one, weight in parts if weight > 0)
        found = self.answers.scores.get(key)
        if found is None:
            found = np.zeros(len(self), np.float64)
            for one, weight in parts:
                if weight > 0:
                    found += weight * self._score(want, one)
            self.answers.scores[key] = found
        return found

    def _score(self, want: Want, one: scores.FixedScore) -> Floats:
        key = one.name, one.aspect(want)
        found = self.answers.scores.get(key)
        if found is None:
            coded = self.coded(one.column)
            values = [one.score(want, self.nodes[example]) for example in coded.examples]
            found = np.array(values, np.float64)[coded.of_node]
            self.answers.scores[key] = found
        return found

    def _answers(self, column: Column | Both, ask: Callable[[NodeView], int]) -> Ints:
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


def _same_machines(before: Sequence[NodeView], after: Sequence[NodeView]) -> bool:
    """Return whether the nodes are the same but for what is assigned to them."""
    if len(before) != len(after):
        return False
    for old, new in zip(before, after, strict=True):
        if old is not new and any(
            getattr(old, name) != getattr(new, name) for name in _FIXED_FIELDS
        ):
            return False
    return True


def _coded(values: Sequence[Hashable]) -> Coded:
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
    return Coded(of_node=np.array(of_node, np.intp), examples=tuple(examples))


def _paired(one: Coded, other: Coded) -> Coded:
    pairs = one.of_node * max(1, len(other.examples)) + other.of_node
    _, examples, of_node = np.unique(pairs, return_index=True, return_inverse=True)
    return Coded(of_node=of_node.astype(np.intp), examples=tuple(map(int, examples)))


def _ints(values: Sequence[int]) -> Ints:
    return np.array([max(-_HUGE, min(_HUGE, value)) for value in values], np.int64)
