"""Where replicas go: the best of the nodes that fit, all ranks or none, or why not. Pure, deterministic."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from reconciler.groups.epochs import Epoch, next_shapes
from reconciler.groups.form import Formed
from reconciler.groups.gang import Gang, Later, Tries, no_such_group, tries_of
from reconciler.groups.view import Form, GroupView, by_size, shapes
from reconciler.observe import NodeView, Tenant
from reconciler.placement import filters, preempt
from reconciler.placement.draft import Draft
from reconciler.placement.ranking import Ranking
from reconciler.placement.refusals import Unschedulable, refusals
from reconciler.placement.table import Table
from reconciler.placement.want import Want
from schemas import quantity
from schemas.replica import MemoryProof, RankAssignment, Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A node for each rank."""

    ranks: tuple[RankAssignment, ...]
    form: Form | None = None
    """How they work together; None where there is one."""

    @property
    def node(self) -> str:
        return self.ranks[0].node

    @property
    def memory(self) -> MemoryProof:
        return self.ranks[0].memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """There will be room once what drains has ended; until then it is kept free."""

    ranks: tuple[RankAssignment, ...]
    why: Unschedulable

    @property
    def node(self) -> str:
        return self.ranks[0].node


@dataclass(frozen=True, slots=True, kw_only=True)
class Displaces:
    """Replicas of a lower priority have to end first."""

    ranks: tuple[RankAssignment, ...]
    victims: tuple[Tenant, ...]
    why: Unschedulable

    @property
    def node(self) -> str:
        return self.ranks[0].node


Outcome: TypeAlias = Placed | Waits | Displaces | Unschedulable


class Placer:
    """Places one replica after the other, each knowing of those before it."""

    def __init__(self, table: Table, groups: Sequence[GroupView] = ()) -> None:
        """Place on these nodes, and these groups of them."""
        self.draft = Draft(table)
        self._groups = {group.name: group for group in groups}
        self._gang = Gang(self.draft)
        self._rankings: dict[tuple[str, bool], Ranking] = {}

    def place(self, want: Want) -> Placed | Unschedulable:
        """Return nodes for all ranks of one more replica, and count them as taken; or why not."""
        tries = self._tries(want)
        if tries is None:
            return self._single(want) or refusals(self.draft, want, self._ranking(want))
        if isinstance(tries, Unschedulable):
            return tries
        found = self._gang.now(want, tries, waits=True)
        return found if isinstance(found, Unschedulable) else _placed(found)

    def claim(self, want: Want) -> Outcome:
        """Place one more replica, if need be at the cost of others of a lower priority."""
        outcome, tries = self.place(want), self._tries(want)
        if isinstance(outcome, Placed) or isinstance(tries, Unschedulable):
            return outcome
        if tries is None:
            return self._wait(want, outcome) or self._displace(want, outcome) or outcome
        later = self._gang.later(want, tries, outcome)
        return outcome if later is None else self._told(later)

    def again(self, want: Want, replica: Replica, epoch: Epoch) -> Placed | Unschedulable:
        """Return where the next epoch of a replica of several ranks runs; or why nowhere."""
        formation = replica.spec.formation
        assert formation is not None
        group = self._groups.get(formation.group)
        if group is None:
            return no_such_group(formation.group)
        known = shapes(group.spec)
        tries = [(group, known[at]) for at in next_shapes(formation, epoch, len(known))]
        found = self._gang.again(want, replica, tries)
        return found if isinstance(found, Unschedulable) else _placed(found)

    def discount(self, deployment: str, nodes: Iterable[str]) -> None:
        """Let replicas on these nodes count as no siblings, for they will end: before anything is placed."""
        for name in nodes:
            row = self.draft.table.rows.get(name)
            if row is not None:
                self.draft.discount(row, deployment)

    def _ranking(self, want: Want, *, after_endings: bool = False) -> Ranking:
        key = want.name, after_endings
        found = self._rankings.get(key)
        if found is None or found.want is not want:
            found = Ranking(self.draft, want, after_endings=after_endings)
            self._rankings[key] = found
        return found

    def _tries(self, want: Want) -> Tries | Unschedulable | None:
        """Return what to try on which groups; None for a replica that has one Mac for itself."""
        wish = want.spec.sharding
        if wish == "Never" or (wish == "Auto" and self._fits_some_node(want)):
            return None
        if wish == "Auto":
            # Without a group the nodes' own refusals say why.
            return tries_of(by_size(list(self._groups.values()))) or None
        group = self._groups.get(wish)
        return no_such_group(wish) if group is None else tries_of([group])

    def _fits_some_node(self, want: Want) -> bool:
        """Return whether some Mac could ever take the whole replica: with nothing else on it, and all well."""
        judged = self.draft.table.judged(want)
        fits = judged.need.of_node <= self.draft.table.allocatable
        for one, verdict in zip(filters.FIXED, judged.verdicts, strict=True):
            if not one.is_passing:
                fits &= verdict.passes
        return bool(fits.any())

    def _single(self, want: Want) -> Placed | None:
        """Put a replica that has one rank onto the best node."""
        ranking = self._ranking(want)
        row = ranking.best()
        if row is None:
            return None
        memory = ranking.proof(row)
        self.draft.assign(row, want.name, memory.total_bytes)
        return Placed(ranks=(self._rank(row, memory),))

    def _rank(self, row: int, memory: MemoryProof) -> RankAssignment:
        return RankAssignment(node=self.draft.table.nodes[row].name, memory=memory)

    def _told(self, later: Later) -> Waits | Displaces:
        """Return what a replica of several ranks waits for."""
        ranks, names = later.formed.ranks, ", ".join(one.replica for one in later.victims)
        if later.victims:
            freed = quantity.show(sum(one.bytes for one in later.victims))
            note = f"displaces {names}, which gives back {freed}"
            why = later.why.noting(note)
            return Displaces(ranks=ranks, victims=later.victims, why=why)
        nodes = [self.draft.view(self.draft.table.rows[rank.node]) for rank in ranks]
        ending = sorted({t.replica for node in nodes for t in node.tenants if t.is_ending})
        note = f"waits until {', '.join(ending)} has ended"
        return Waits(ranks=ranks, why=later.why.noting(note))

    def _wait(self, want: Want, why: Unschedulable) -> Waits | None:
        if not self.draft.ending.any():
            return None
        ranking = self._ranking(want, after_endings=True)
        row = ranking.best()
        if row is None:
            return None
        memory = ranking.proof(row)
        self.draft.promise(row, memory.total_bytes)
        node = self.draft.view(row)
        ending = ", ".join(sorted(one.replica for one in node.tenants if one.is_ending))
        note = f"waits until {ending} on {node.name} has ended"
        return Waits(ranks=(self._rank(row, memory),), why=why.noting(note))

    def _displace(self, want: Want, why: Unschedulable) -> Displaces | None:
        ranking = self._ranking(want, after_endings=True)
        found = preempt.choose(self.draft, want, ranking)
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
        return Displaces(ranks=ranks, victims=found.victims, why=why.noting(note))


def place(
    want: Want, nodes: Sequence[NodeView], groups: Sequence[GroupView] = ()
) -> Placed | Unschedulable:
    """Return where one more replica would go, or why it cannot."""
    return Placer(Table(nodes), groups).place(want)


def _placed(found: Formed) -> Placed:
    return Placed(ranks=found.ranks, form=found.form)
