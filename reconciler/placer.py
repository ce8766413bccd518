"""Where replicas go: the best of the nodes that fit, all ranks or none, or why not. Pure, deterministic."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from reconciler.groups.epochs import Epoch, next_shapes
from reconciler.groups.formation import FormedGroup
from reconciler.groups.gang import (
    DeferredPlacement,
    FormationOptions,
    GangPlacer,
    formation_options,
    no_such_group,
)
from reconciler.groups.group_view import GroupForm, GroupView, by_size, group_shapes
from reconciler.placement import filters, preemption
from reconciler.placement.assumed_state import AssumedState
from reconciler.placement.inputs import PlacementRequest
from reconciler.placement.ranking import Ranking
from reconciler.placement.refusals import Unschedulable, collect_refusals
from reconciler.placement.table import NodeTable
from reconciler.views import Allocation, NodeView
from schemas import quantity
from schemas.replica import MemoryProof, RankAssignment, Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A node for each rank."""

    ranks: tuple[RankAssignment, ...]
    form: GroupForm | None = None
    """How they work together; None where there is one."""

    @property
    def node(self) -> str:
        return self.ranks[0].node

    @property
    def memory(self) -> MemoryProof:
        return self.ranks[0].memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingAssignment:
    """There will be room once what drains has ended; until then it is kept free."""

    ranks: tuple[RankAssignment, ...]
    why: Unschedulable

    @property
    def node(self) -> str:
        return self.ranks[0].node


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptingAssignment:
    """Replicas of a lower priority have to end first."""

    ranks: tuple[RankAssignment, ...]
    victims: tuple[Allocation, ...]
    why: Unschedulable

    @property
    def node(self) -> str:
        return self.ranks[0].node


PlacementOutcome: TypeAlias = Assignment | PendingAssignment | PreemptingAssignment | Unschedulable


class Placer:
    """Places one replica after the other, each knowing of those before it."""

    def __init__(self, table: NodeTable, groups: Sequence[GroupView] = ()) -> None:
        """Place on these nodes, and these groups of them."""
        self.draft = AssumedState(table)
        self._groups = {group.name: group for group in groups}
        self._gang = GangPlacer(self.draft)
        self._rankings: dict[tuple[str, bool], Ranking] = {}

    def place(self, want: PlacementRequest) -> Assignment | Unschedulable:
        """Return nodes for all ranks of one more replica, and count them as taken; or why not."""
        tries = self._tries(want)
        if tries is None:
            return self._single(want) or collect_refusals(self.draft, want, self._ranking(want))
        if isinstance(tries, Unschedulable):
            return tries
        found = self._gang.now(want, tries, waits=True)
        return found if isinstance(found, Unschedulable) else _assignment_of(found)

    def claim(self, want: PlacementRequest) -> PlacementOutcome:
        """Place one more replica, if need be at the cost of others of a lower priority."""
        outcome, tries = self.place(want), self._tries(want)
        if isinstance(outcome, Assignment) or isinstance(tries, Unschedulable):
            return outcome
        if tries is None:
            return self._wait(want, outcome) or self._displace(want, outcome) or outcome
        later = self._gang.later(want, tries, outcome)
        return outcome if later is None else self._told(later)

    def again(
        self, want: PlacementRequest, replica: Replica, epoch: Epoch
    ) -> Assignment | Unschedulable:
        """Return where the next epoch of a replica of several ranks runs; or why nowhere."""
        formation = replica.spec.formation
        assert formation is not None
        group = self._groups.get(formation.group)
        if group is None:
            return no_such_group(formation.group)
        known = group_shapes(group.spec)
        tries = [(group, known[at]) for at in next_shapes(formation, epoch, len(known))]
        found = self._gang.again(want, replica, tries)
        return found if isinstance(found, Unschedulable) else _assignment_of(found)

    def discount(self, deployment: str, nodes: Iterable[str]) -> None:
        """Let replicas on these nodes count as no siblings, for they will end: before anything is placed."""
        for name in nodes:
            row = self.draft.table.rows.get(name)
            if row is not None:
                self.draft.discount(row, deployment)

    def _ranking(self, want: PlacementRequest, *, after_endings: bool = False) -> Ranking:
        key = want.name, after_endings
        found = self._rankings.get(key)
        if found is None or found.want is not want:
            found = Ranking(self.draft, want, after_endings=after_endings)
            self._rankings[key] = found
        return found

    def _tries(self, want: PlacementRequest) -> FormationOptions | Unschedulable | None:
        """Return what to try on which groups; None for a replica that has one Mac for itself."""
        wish = want.spec.sharding
        if wish == "Never" or (wish == "Auto" and self._fits_some_node(want)):
            return None
        if wish == "Auto":
            # Without a group the nodes' own refusals say why.
            return formation_options(by_size(list(self._groups.values()))) or None
        group = self._groups.get(wish)
        return no_such_group(wish) if group is None else formation_options([group])

    def _fits_some_node(self, want: PlacementRequest) -> bool:
        """Return whether some Mac could ever take the whole replica: with nothing else on it, and all well."""
        judged = self.draft.table.judged(want)
        fits = judged.need.of_node <= self.draft.table.allocatable
        for one, verdict in zip(filters.FIXED, judged.verdicts, strict=True):
            if not one.is_passing:
                fits &= verdict.passes
        return bool(fits.any())

    def _single(self, want: PlacementRequest) -> Assignment | None:
        """Put a replica that has one rank onto the best node."""
        ranking = self._ranking(want)
        row = ranking.best()
        if row is None:
            return None
        memory = ranking.proof(row)
        self.draft.assign(row, want.name, memory.total_bytes)
        return Assignment(ranks=(self._rank(row, memory),))

    def _rank(self, row: int, memory: MemoryProof) -> RankAssignment:
        return RankAssignment(node=self.draft.table.nodes[row].name, memory=memory)

    def _told(self, later: DeferredPlacement) -> PendingAssignment | PreemptingAssignment:
        """Return what a replica of several ranks waits for."""
        ranks, names = later.formed.ranks, ", ".join(one.replica for one in later.victims)
        if later.victims:
            freed = quantity.show(sum(one.bytes for one in later.victims))
            note = f"displaces {names}, which gives back {freed}"
            why = later.why.noting(note)
            return PreemptingAssignment(ranks=ranks, victims=later.victims, why=why)
        nodes = [self.draft.view(self.draft.table.rows[rank.node]) for rank in ranks]
        ending = sorted({t.replica for node in nodes for t in node.allocations if t.is_ending})
        note = f"waits until {', '.join(ending)} has ended"
        return PendingAssignment(ranks=ranks, why=later.why.noting(note))

    def _wait(self, want: PlacementRequest, why: Unschedulable) -> PendingAssignment | None:
        if not self.draft.ending.any():
            return None
        ranking = self._ranking(want, after_endings=True)
        row = ranking.best()
        if row is None:
            return None
        memory = ranking.proof(row)
        self.draft.promise(row, memory.total_bytes)
        node = self.draft.view(row)
        ending = ", ".join(sorted(one.replica for one in node.allocations if one.is_ending))
        note = f"waits until {ending} on {node.name} has ended"
        return PendingAssignment(ranks=(self._rank(row, memory),), why=why.noting(note))

    def _displace(self, want: PlacementRequest, why: Unschedulable) -> PreemptingAssignment | None:
        ranking = self._ranking(want, after_endings=True)
        found = preemption.choose_preemption(self.draft, want, ranking)
        if found is None:
            return None
        for victim in found.victims:
            self.draft.end(found.row, victim)
        memory = ranking.proof(found.row)
        self.draft.promise(found.row, memory.total_bytes)
        name = self.draft.table.nodes[found.row].name
        freed = quantity.show(sum(victim.bytes for victim in found.victims))
        names = ", ".join(victim.replica for victim in found.victims)
        note = f"displaces {names} on {name}, which gives back {freed}"
        ranks = (self._rank(found.row, memory),)
        return PreemptingAssignment(ranks=ranks, victims=found.victims, why=why.noting(note))


def place_replica(
    want: PlacementRequest, nodes: Sequence[NodeView], groups: Sequence[GroupView] = ()
) -> Assignment | Unschedulable:
    """Return where one more replica would go, or why it cannot."""
    return Placer(NodeTable(nodes), groups).place(want)


def _assignment_of(found: FormedGroup) -> Assignment:
    return Assignment(ranks=found.ranks, form=found.form)
