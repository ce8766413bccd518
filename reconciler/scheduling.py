"""The next epoch of a replica as an action: its ranks, and what of the ones before may still be there. Pure.

Places for what a deployment misses: what can be placed becomes an action, what cannot is remembered. Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from reconciler.actions import Action, CreateReplica, MoveReplica, PreemptReplica, ReformReplica
from reconciler.groups.epochs import Epoch, count_failures
from reconciler.groups.gang import given_up_refusal
from reconciler.placement.filters import find_rejection
from reconciler.placement.inputs import PlacementRequest, request_for
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.table import NodeTable
from reconciler.placer import (
    Assignment,
    PendingAssignment,
    Placer,
    PreemptingAssignment,
    place_replica,
)
from reconciler.rollout import steps
from reconciler.rollout.revisions import known_contents, with_content
from reconciler.rollout.steps import RolloutGoal, RolloutPhase, Termination
from reconciler.views import Allocation, DeploymentView, NodeView, ReplicaView
from schemas.deployment import ModelDeployment, RevisionTemplate
from schemas.replica import LeavingRank, replica_name


def next_epoch(replica: ReplicaView, to: Assignment, epoch: Epoch) -> ReformReplica:
    """Return what begins the next epoch on these Macs."""
    formation = replica.replica.spec.formation
    assert formation is not None
    assert to.form is not None
    is_same_model = to.form.model == replica.replica.spec.model.path
    return ReformReplica(
        name=replica.name,
        ranks=to.ranks,
        form=to.form.with_golden(epoch.golden if is_same_model else None),
        failures=count_failures(formation, epoch),
        because=epoch.message or epoch.over,
        leaving=tuple(_leaving(replica, to)),
        version=replica.version,
    )


def _leaving(replica: ReplicaView, to: Assignment) -> Iterator[LeavingRank]:
    """Yield the ranks that may still be there, and are not to be; on a Mac that is away nobody can tell."""
    new = {(rank.node, number): rank for number, rank in enumerate(to.ranks)}
    yield from (one for one in replica.leaving_ranks if (one.node, one.rank) not in new)
    for number, rank in enumerate(replica.replica.spec.ranks):
        size, after = rank.memory.total_bytes, new.get((rank.node, number))
        stays = after is not None and after.memory.total_bytes >= size
        if not stays and rank.node not in replica.away:
            yield LeavingRank(node=rank.node, rank=number, memory_bytes=size)


def without_replica(node: NodeView, replica: ReplicaView) -> NodeView:
    """Return a node as it will be once the replica has ended."""
    name = replica.replica.spec.deployment
    sizes = [one.bytes for one in node.allocations if one.replica == replica.name]
    proven = [
        rank.memory.total_bytes for rank in replica.replica.spec.ranks if rank.node == node.name
    ]
    others = {**node.replicas, name: node.replicas.get(name, 1) - 1}
    return replace(
        node,
        used_bytes=node.used_bytes - (sum(sizes) or sum(proven)),
        replicas={other: count for other, count in others.items() if count},
        allocations=tuple(one for one in node.allocations if one.replica != replica.name),
    )


class ReplicaScheduler:
    """Finds places for what is missing, and remembers what it could not place."""

    def __init__(
        self,
        seen: DeploymentView,
        deployment: ModelDeployment,
        goal: RolloutGoal,
        table: NodeTable | None,
    ) -> None:
        self._seen = seen
        self._deployment = deployment
        self._goal = goal
        self._table = table
        self._contents = known_contents(seen)
        self._wants: dict[str, PlacementRequest] = {}
        self._placer: Placer | None = None
        self.actions: list[Action] = []
        self.why: Unschedulable | None = None
        """Why there will be fewer replicas than wanted."""
        self.no_room: Unschedulable | None = None
        """Why one more than wanted could not be placed."""
        self._unfit: dict[str, Unschedulable] = {}
        self.endings: list[Termination] = []
        """Replicas that can be placed elsewhere only as others."""

    @property
    def is_stuck(self) -> bool:
        """Whether something could not be placed, be it only one more than wanted."""
        return bool(self._unfit)

    def place(self, staying: Sequence[ReplicaView], step: steps.RolloutStep, leaving: int) -> None:
        """Move what is on lost nodes, then make what the step says.

        Only up to the wanted number may others be displaced: a surge is a convenience.
        """
        seen = self._seen
        if seen.awaits_reports:
            return
        ending = {one.replica.name for one in step.endings}
        kept = sorted((r for r in staying if r.name not in ending), key=lambda r: r.ordinal)
        for replica in (r for r in kept if r.epoch is not None):
            self._next_epoch(replica, replica.epoch)
        for replica in (r for r in kept if r.is_node_lost and r.epoch is None):
            renewed = steps.version_after_move(self._goal, seen, replica)
            self._needed(renewed, replica.replica.spec.template, replica)
        there = len(staying) - len(ending) + leaving
        names = _free_names(seen)
        for template in step.makes:
            if there < seen.wanted:
                self._needed(template, seen.stable, next(names))
            elif not self._one(template, next(names), is_extra=True):
                self.no_room = self.no_room or self._unfit.get(template)
            there += 1

    def _needed(self, template: str, before: str, what: ReplicaView | str) -> None:
        """Place what is wanted; where the new version fits nowhere, the one before keeps up the number.

        Not while one of ours still ends: its room is what the new version waits for.
        """
        if self._one(template, what, is_extra=False) or template not in self._unfit:
            return
        is_of_use = before in self._contents and before != template
        ends = any(r.is_deleting for r in self._seen.replicas)
        if is_of_use and not ends and self._one(before, what, is_extra=False):
            self.no_room = self.no_room or self._unfit[template]
        else:
            self.why = self.why or self._unfit[template]

    def _next_epoch(self, replica: ReplicaView, epoch: Epoch | None) -> None:
        """Begin the next epoch of a replica whose ranks cannot go on together, once it is time."""
        formation = replica.replica.spec.formation
        content = self._contents.get(replica.replica.spec.template)
        if epoch is None or formation is None or content is None or not epoch.over:
            return
        if epoch.is_given_up:
            self.why = self.why or given_up_refusal(formation, replica.name, epoch)
            return
        if epoch.wait_s(formation) > 0:
            return
        want = self._want(replica.replica.spec.template, content)
        found = self._placer_for().again(want, replica.replica, epoch)
        if isinstance(found, Assignment):
            self.actions.append(next_epoch(replica, found, epoch))
            return
        self.why = self.why or found
        if content.sharding == "Auto":
            # Another group may do; nothing of it serves, so it is no loss.
            self.endings.append(Termination(replica=replica, because="GroupLost"))

    def fits_instead(self, template: str, *, of: ReplicaView) -> bool:
        """Return whether a replica of the version would fit where another is, once that has ended."""
        want = self._want(template, self._contents[template])
        there = [without_replica(node, of) for node in self._seen.nodes if node.name in of.nodes]
        if want.spec.sharding == "Never":
            return any(find_rejection(want, node) is None for node in there)
        left = {node.name: node for node in there}
        nodes = [left.get(node.name, node) for node in self._seen.nodes]
        return isinstance(place_replica(want, nodes, self._seen.groups), Assignment)

    def _one(self, template: str, what: ReplicaView | str, *, is_extra: bool) -> bool:
        """Place one replica; return whether it has a node now."""
        if template in self._unfit:
            return False  # what does not fit once does not fit again
        content = self._contents[template]
        placer, want = self._placer_for(), self._want(template, content)
        outcome = placer.place(want) if is_extra else placer.claim(want)
        name = what if isinstance(what, str) else what.name
        match outcome:
            case Assignment():
                self.actions.append(_assign(what, self._checked(outcome, template), content))
                return True
            case PreemptingAssignment(victims=victims, why=why):
                self.actions.extend(self._preempt(name, victim) for victim in victims)
                self.why = self.why or why
            case PendingAssignment(why=why):
                self.why = self.why or why
            case Unschedulable():
                self._unfit[template] = outcome
        return False

    def _checked(self, placed: Assignment, template: str) -> Assignment:
        """Return the same with the answer that other replicas of the version gave, to check a group's first by."""
        if placed.form is None:
            return placed
        model = placed.form.model
        known = (
            one.epoch.golden
            for one in self._seen.replicas
            if one.epoch is not None
            and one.replica.spec.template == template
            and one.replica.spec.model.path == model
        )
        golden = next((one for one in known if one is not None), None)
        return replace(placed, form=placed.form.with_golden(golden))

    def _placer_for(self) -> Placer:
        """Return who places, after those of a higher priority have chosen."""
        if self._placer is None:
            self._placer = Placer(self._table or NodeTable(self._seen.nodes), self._seen.groups)
            for rival in self._seen.rivals:
                for _ in range(rival.missing):
                    if isinstance(self._placer.claim(rival.want), Unschedulable):
                        break
            self._placer.discount(self._seen.name, self._soon_free())
        return self._placer

    def _soon_free(self) -> list[str]:
        """Return the nodes of replicas that end or are about to be replaced: what comes is spread without them.

        A limit of replicas on one node counts them as long as they are there.
        """
        if self._deployment.spec.placement.max_replicas_per_node is not None:
            return []
        kept = {self._goal.target, self._goal.trial}
        is_rolling = self._goal.phase in (RolloutPhase.ROLLING, RolloutPhase.ROLLED_BACK)
        return [
            node
            for one in self._seen.replicas
            if one.is_deleting or (is_rolling and one.replica.spec.template not in kept)
            for node in sorted(one.nodes)
        ]

    def _want(self, template: str, content: RevisionTemplate) -> PlacementRequest:
        # One object for all of a version's replicas: the placer ranks the nodes once for each.
        if template not in self._wants:
            told = with_content(self._deployment, content)
            self._wants[template] = request_for(told, apart_from=self._seen.apart_from)
        return self._wants[template]

    def _preempt(self, name: str, victim: Allocation) -> PreemptReplica:
        priority = self._deployment.spec.priority
        return PreemptReplica(
            name=victim.replica,
            deployment=victim.deployment,
            version=victim.version,
            by=name,
            because=f"{name} has priority {priority}, {victim.replica} has {victim.priority}",
        )


def _free_names(seen: DeploymentView) -> Iterator[str]:
    """Yield names that no replica has, the lowest first: derived, so that making one twice collides."""
    taken = {r.name for r in seen.replicas}
    ordinal = 0
    while True:
        name = replica_name(seen.name, ordinal)
        if name not in taken:
            yield name
        ordinal += 1


def _assign(what: ReplicaView | str, to: Assignment, content: RevisionTemplate) -> Action:
    if isinstance(what, str):
        return CreateReplica(name=what, ranks=to.ranks, form=to.form, content=content)
    return MoveReplica(
        name=what.name, ranks=to.ranks, form=to.form, content=content, version=what.version
    )
