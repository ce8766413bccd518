"""Places replicas one after the other: on the best single node, or all ranks on a group, or not at all. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

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
from reconciler.placement import filters, preemption, swap
from reconciler.placement.inputs import Allocation, NodeView, PlacementRequest, Rival
from reconciler.placement.load_times import load_s
from reconciler.placement.ranking import AssumedState, Ranking
from reconciler.placement.refusals import Unschedulable, collect_refusals
from reconciler.placement.swap import IdleReplica, LoadWait
from reconciler.placement.table import NodeTable
from schemas import quantity
from schemas.replica import MemoryProof, RankAssignment, Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A node for each rank of a replica."""

    ranks: tuple[RankAssignment, ...]
    form: GroupForm | None = None
    """The form in which the ranks work together; None for one rank."""

    @property
    def node(self) -> str:
        return self.ranks[0].node

    @property
    def memory(self) -> MemoryProof:
        return self.ranks[0].memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingAssignment:
    """Nodes that have room once draining replicas have ended; the room is reserved until then."""

    ranks: tuple[RankAssignment, ...]
    why: Unschedulable

    @property
    def node(self) -> str:
        return self.ranks[0].node


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptingAssignment:
    """Nodes that have room once others have ended: replicas of a lower priority, or idle ones."""

    ranks: tuple[RankAssignment, ...]
    victims: tuple[Allocation, ...]
    why: Unschedulable
    is_swap: bool = False
    """True if the victims are idle and give way to a model at zero."""

    @property
    def node(self) -> str:
        return self.ranks[0].node


PlacementOutcome: TypeAlias = Assignment | PendingAssignment | PreemptingAssignment | Unschedulable


class Placer:
    """Places replicas one after the other; each decision counts for the next one."""

    def __init__(self, table: NodeTable, groups: Sequence[GroupView] = ()) -> None:
        self.assumed = AssumedState(table)
        self._groups = {group.name: group for group in groups}
        self._rankings: dict[tuple[str, bool], Ranking] = {}

    def place(self, request: PlacementRequest) -> Assignment | Unschedulable:
        """Assign nodes to all ranks of one more replica, or return why that is not possible."""
        options = self._options(request)
        if isinstance(options, Unschedulable):
            return options
        if options is not None:
            found = GangPlacer(self.assumed).try_now(request, options, waits=True)
            return found if isinstance(found, Unschedulable) else _assignment_of(found)
        ranking = self._ranking(request)
        row = ranking.best()
        if row is None:
            return collect_refusals(self.assumed, request, ranking)
        memory = ranking.proof(row)
        self.assumed.assign(row, request.name, memory.total_bytes)
        return Assignment(ranks=(self._rank(row, memory),))

    def claim(
        self, request: PlacementRequest, idle: Mapping[str, IdleReplica] | None = None
    ) -> PlacementOutcome:
        """Place one more replica; if there is no room, wait for draining replicas or preempt others.

        `idle` are the replicas that give way for it, by name; None if requests do not wait for its deployment at zero.
        """
        outcome, options = self.place(request), self._options(request)
        if isinstance(outcome, Assignment) or isinstance(options, Unschedulable):
            return outcome
        if options is None:
            return (
                self._wait(request, outcome, loads=idle is not None)
                or self._swap(request, outcome, idle or {})
                or self._preempt(request, outcome)
                or (outcome if idle is None else self._note_wait(request, outcome, idle))
            )
        deferred = GangPlacer(self.assumed).try_after(request, options, outcome)
        return outcome if deferred is None else self._deferred(deferred)

    def claim_missing(self, rival: Rival, idle: Mapping[str, IdleReplica]) -> None:
        """Claim the replicas that a deployment misses which is placed before, as far as they fit."""
        for number in range(rival.missing):
            is_first = number == 0 and rival.waits_at_zero
            if isinstance(self.claim(rival.request, idle if is_first else None), Unschedulable):
                return

    def reform(
        self, request: PlacementRequest, replica: Replica, epoch: Epoch
    ) -> Assignment | Unschedulable:
        """Assign nodes to the next epoch of a replica with several ranks, or return why not."""
        formation = replica.spec.formation
        assert formation is not None
        group = self._groups.get(formation.group)
        if group is None:
            return no_such_group(formation.group)
        shapes = group_shapes(group.spec)
        options = [(group, shapes[at]) for at in next_shapes(formation, epoch, len(shapes))]
        found = GangPlacer(self.assumed).reform(request, replica, options)
        return found if isinstance(found, Unschedulable) else _assignment_of(found)

    def discount(self, deployment: str, nodes: Iterable[str]) -> None:
        """Stop counting replicas on these nodes as siblings, because they will end. Call it before placing."""
        for name in nodes:
            row = self.assumed.table.rows.get(name)
            if row is not None:
                self.assumed.discount(row, deployment)

    def _ranking(self, request: PlacementRequest, *, after_endings: bool = False) -> Ranking:
        key = request.name, after_endings
        ranking = self._rankings.get(key)
        if ranking is None or ranking.request is not request:
            ranking = Ranking(self.assumed, request, after_endings=after_endings)
            self._rankings[key] = ranking
        return ranking

    def _options(self, request: PlacementRequest) -> FormationOptions | Unschedulable | None:
        """Return the groups and shapes to try; None for a replica on a single Mac."""
        sharding = request.spec.sharding
        if sharding == "Never" or (sharding == "Auto" and self._fits_some_node(request)):
            return None
        if sharding == "Auto":
            # Without a group, the rejections of the single nodes are the reason.
            return formation_options(by_size(list(self._groups.values()))) or None
        group = self._groups.get(sharding)
        return no_such_group(sharding) if group is None else formation_options([group])

    def _fits_some_node(self, request: PlacementRequest) -> bool:
        """Return whether some Mac could take the whole replica if it were empty and healthy."""
        evaluated = self.assumed.table.evaluate(request)
        fits = evaluated.need.of_node <= self.assumed.table.allocatable
        for node_filter, verdict in zip(filters.FIXED, evaluated.verdicts, strict=True):
            if not node_filter.is_passing:
                fits &= verdict.passes
        return bool(fits.any())

    def _rank(self, row: int, memory: MemoryProof) -> RankAssignment:
        return RankAssignment(node=self.assumed.table.nodes[row].name, memory=memory)

    def _deferred(self, deferred: DeferredPlacement) -> PendingAssignment | PreemptingAssignment:
        """Return the replicas that a placement on a group waits for."""
        ranks, names = (
            deferred.formed.ranks,
            ", ".join(victim.replica for victim in deferred.victims),
        )
        if deferred.victims:
            freed = quantity.show(sum(victim.bytes for victim in deferred.victims))
            why = deferred.why.noting(f"preempts {names}, which frees {freed}")
            return PreemptingAssignment(ranks=ranks, victims=deferred.victims, why=why)
        nodes = [self.assumed.view(self.assumed.table.rows[rank.node]) for rank in ranks]
        ending = sorted(
            {
                allocation.replica
                for n in nodes
                for allocation in n.allocations
                if allocation.is_ending
            }
        )
        note = f"waits until {', '.join(ending)} has ended"
        return PendingAssignment(ranks=ranks, why=deferred.why.noting(note))

    def _wait(
        self, request: PlacementRequest, why: Unschedulable, *, loads: bool
    ) -> PendingAssignment | None:
        """Reserve the best node that has room once draining replicas have ended; None if there is none.

        With `loads` the note says how long the model loads then.
        """
        if not self.assumed.ending.any():
            return None
        ranking = self._ranking(request, after_endings=True)
        row = ranking.best()
        if row is None:
            return None
        memory = ranking.proof(row)
        self.assumed.promise(row, memory.total_bytes)
        node = self.assumed.view(row)
        ending = ", ".join(
            sorted(allocation.replica for allocation in node.allocations if allocation.is_ending)
        )
        note, wait = f"waits until {ending} on {node.name} has ended", None
        if loads:
            note += f", and then {_load_text(request, node, memory)}"
            wait = _load_wait(request, node, memory, tuple(ending.split(", ")))
        return PendingAssignment(ranks=(self._rank(row, memory),), why=why.noting(note, wait))

    def _swap(
        self, request: PlacementRequest, why: Unschedulable, idle: Mapping[str, IdleReplica]
    ) -> PreemptingAssignment | None:
        """Let idle replicas on one node give way, and reserve their room; None if that is not enough."""
        if not idle:
            return None
        ranking = self._ranking(request, after_endings=True)
        choice = swap.choose_swap(self.assumed, request, ranking, idle)
        if choice is None:
            return None
        memory = self._reserve(ranking, choice)
        node = self.assumed.table.nodes[choice.row]
        names = tuple(victim.replica for victim in choice.victims)
        note = f"{_load_text(request, node, memory)}: {', '.join(names)} on {node.name} gives way"
        wait = _load_wait(request, node, memory, names)
        ranks = (self._rank(choice.row, memory),)
        return PreemptingAssignment(
            ranks=ranks, victims=choice.victims, why=why.noting(note, wait), is_swap=True
        )

    def _preempt(
        self, request: PlacementRequest, why: Unschedulable
    ) -> PreemptingAssignment | None:
        """Preempt replicas of a lower priority on one node, and reserve their room; None if that is not enough."""
        ranking = self._ranking(request, after_endings=True)
        found = preemption.choose_preemption(self.assumed, request, ranking)
        if found is None:
            return None
        memory = self._reserve(ranking, found)
        name = self.assumed.table.nodes[found.row].name
        freed = quantity.show(sum(victim.bytes for victim in found.victims))
        names = ", ".join(victim.replica for victim in found.victims)
        note = f"preempts {names} on {name}, which frees {freed}"
        ranks = (self._rank(found.row, memory),)
        return PreemptingAssignment(ranks=ranks, victims=found.victims, why=why.noting(note))

    def _note_wait(
        self, request: PlacementRequest, why: Unschedulable, idle: Mapping[str, IdleReplica]
    ) -> Unschedulable:
        """Note what a model at zero waits for, if some node would have room without its replicas."""
        ranking = self._ranking(request, after_endings=True)
        fits = ranking.evaluated.need.of_node <= self.assumed.table.allocatable
        rows = np.flatnonzero(ranking.is_apart & fits)
        if not len(rows):
            return why
        staying = sorted(name for name, replica in idle.items() if replica.stays_s > 0)
        if not staying:
            return why.noting("waits until a replica that may give way is idle")
        row, first = int(rows[0]), min(staying, key=lambda name: idle[name].stays_s)
        wait = _load_wait(request, self.assumed.view(row), ranking.proof(row), (first,))
        if wait is not None:
            wait = replace(wait, seconds=wait.seconds + idle[first].stays_s)
        names = ", ".join(staying[:3])
        return why.noting(f"waits until {names} has served for its minimum time", wait)

    def _reserve(self, ranking: Ranking, choice: preemption.Preemption) -> MemoryProof:
        """Count the victims as ending, and promise their room; return the proof of what comes."""
        for victim in choice.victims:
            self.assumed.end(choice.row, victim)
        memory = ranking.proof(choice.row)
        self.assumed.promise(choice.row, memory.total_bytes)
        return memory


def place_replica(
    request: PlacementRequest, nodes: Sequence[NodeView], groups: Sequence[GroupView] = ()
) -> Assignment | Unschedulable:
    """Return where one more replica would go, or why it cannot go anywhere."""
    return Placer(NodeTable(nodes), groups).place(request)


def _load_s(request: PlacementRequest, node: NodeView, memory: MemoryProof) -> float:
    last_s = request.load_times.get(node.name, 0.0)
    return load_s(memory.weights_bytes, node.disk_gbps, last_s)


def _load_wait(
    request: PlacementRequest, node: NodeView, memory: MemoryProof, gives_way: tuple[str, ...]
) -> LoadWait | None:
    """Return the wait until the model serves on the node; None if it is fetched first, for how long is not known."""
    if node.missing_bytes(request.path):
        return None
    return LoadWait(seconds=_load_s(request, node, memory), gives_way=gives_way)


def _load_text(request: PlacementRequest, node: NodeView, memory: MemoryProof) -> str:
    """Return how long the model loads on the node."""
    seconds = _load_s(request, node, memory)
    fetched = node.missing_bytes(request.path)
    return f"loads in {seconds:.0f} s" + (
        f" after a fetch of {quantity.show(fetched)}" if fetched else ""
    )


def _assignment_of(found: FormedGroup) -> Assignment:
    return Assignment(ranks=found.ranks, form=found.form)
