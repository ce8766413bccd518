"""Plans one deployment: from its observed view to the actions that move it towards its spec. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from reconciler.deployments.actions import (
    Action,
    AdoptReplica,
    CreateReplica,
    DeleteReplica,
    EndPreload,
    MoveReplica,
    OrphanReplica,
    PreemptReplica,
    ReformReplica,
    ReleaseRanks,
    RemoveDeployment,
    RemoveReplica,
    StartPreload,
    StartRanks,
)
from reconciler.deployments.observe import DeploymentView, ReplicaView
from reconciler.deployments.placer import (
    Assignment,
    PendingAssignment,
    Placer,
    PreemptingAssignment,
    place_replica,
)
from reconciler.deployments.preload import plan_preloads
from reconciler.deployments.rollout import steps
from reconciler.deployments.rollout.revisions import collect_revisions, known_contents
from reconciler.deployments.rollout.steps import (
    RolloutGoal,
    RolloutPhase,
    RolloutStep,
    Termination,
    version_after_move,
)
from reconciler.groups.epochs import Epoch, EpochState, count_failures
from reconciler.groups.gang import given_up_refusal
from reconciler.placement.filters import find_rejection
from reconciler.placement.inputs import Allocation, NodeView, PlacementRequest, request_for
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.table import NodeTable
from schemas import quantity
from schemas.deployment import HubReference, ModelDeployment, with_content
from schemas.formation import GoldenAnswer
from schemas.meta import ORPHAN
from schemas.placement import tolerates
from schemas.replica import LeavingRank, replica_name


class ReplicaScheduler:
    """Schedules what one deployment misses; the results are its public attributes."""

    def __init__(
        self,
        observed: DeploymentView,
        deployment: ModelDeployment,
        goal: RolloutGoal,
    ) -> None:
        self._observed = observed
        self._deployment = deployment
        self._goal = goal
        self._table = observed.table
        self._contents = known_contents(observed)
        self._requests: dict[str, PlacementRequest] = {}
        self._placer: Placer | None = None
        self._idle = observed.idle if observed.waits_at_zero else None
        """Replicas that give way for the next one; None if none has to."""
        self._unfit: dict[str, Unschedulable] = {}
        """Versions that do not fit: what does not fit once does not fit again in this plan."""
        self.actions: list[Action] = []
        self.terminations: list[Termination] = []
        """Replicas that must end because their group is lost."""
        self.unschedulable: Unschedulable | None = None
        """Reason why there will be fewer replicas than desired."""
        self.stuck: Unschedulable | None = None
        """Reason why a rollout cannot add a replica of the new version."""

    @property
    def is_stuck(self) -> bool:
        """Return whether a replica could not be placed, even if it is only the surge of a rollout."""
        return bool(self._unfit)

    def schedule(self, staying: Sequence[ReplicaView], step: RolloutStep, leaving: int) -> None:
        """Reform groups, move replicas off lost nodes, then create what the rollout step asks for.

        Preempts other replicas only up to the desired number: a surge does not justify it.
        """
        observed = self._observed
        if observed.awaits_reports:
            return
        ending = {termination.replica.name for termination in step.terminations}
        views = sorted((r for r in staying if r.name not in ending), key=lambda r: r.ordinal)
        for replica in views:
            if replica.epoch is not None:
                self._schedule_epoch(replica, replica.epoch)
        for replica in views:
            if replica.is_node_lost and replica.epoch is None:
                template = version_after_move(self._goal, observed, replica)
                self._schedule(template, replica, fallback=replica.replica.spec.template)
        count = len(staying) - len(ending) + leaving
        names = free_names(observed)
        for template in step.creations:
            is_surge = count >= observed.desired_replicas
            fallback = "" if is_surge else observed.stable_template
            self._schedule(template, next(names), fallback=fallback, is_surge=is_surge)
            count += 1
        for replica in views:
            is_whole = replica.epoch is None and not replica.is_node_lost
            if is_whole and replica.cannot_start and replica.is_idle:
                self._move_elsewhere(replica)

    def _move_elsewhere(self, replica: ReplicaView) -> None:
        """Move a replica whose engine cannot be started on its node, if another one has room; otherwise it stays.

        Nodes without a replica of the deployment come first: the own node is none of them.
        """
        template = version_after_move(self._goal, self._observed, replica)
        request = self._request(template)
        apart = replace(request, apart_from=request.apart_from | {request.name})
        for option in (apart, request):
            found = self._started_placer().place(option)
            if isinstance(found, Assignment) and found.ranks[0].node not in replica.nodes:
                self.actions.append(self._assign(template, replica, found))
                return

    def _schedule(
        self, template: str, to: ReplicaView | str, *, fallback: str, is_surge: bool = False
    ) -> None:
        """Schedule one replica: a lost one to move, or a new one by its name.

        If the template fits nowhere, the fallback template keeps up the number of replicas; but not while a replica of
        the deployment ends, because its room is for the new version.
        """
        is_ending = any(r.is_deleting for r in self._observed.replicas)
        has_fallback = fallback in self._contents and fallback != template and not is_ending
        placer, name = self._started_placer(), to if isinstance(to, str) else to.name
        # Idle replicas give way for the first replica only.
        idle, self._idle = self._idle, None
        for template_hash in (template, fallback) if has_fallback else (template,):
            if template_hash in self._unfit:
                continue
            request = self._request(template_hash)
            match placer.place(request) if is_surge else placer.claim(request, idle):
                case Assignment() as assigned:
                    self.actions.append(self._assign(template_hash, to, assigned))
                    if template_hash != template:
                        self.stuck = self.stuck or self._unfit[template]
                    return
                case PreemptingAssignment(victims=victims, why=why, is_swap=is_swap):
                    self.actions.extend(
                        self._give_way(name, victim) if is_swap else self._preempt(name, victim)
                        for victim in victims
                    )
                    self.unschedulable = self.unschedulable or why
                    return
                case PendingAssignment(why=why):
                    self.unschedulable = self.unschedulable or why
                    return
                case Unschedulable() as refused:
                    self._unfit[template_hash] = refused
        if is_surge:
            self.stuck = self.stuck or self._unfit[template]
        else:
            self.unschedulable = self.unschedulable or self._unfit[template]

    def _schedule_epoch(self, replica: ReplicaView, epoch: Epoch) -> None:
        """Begin the next epoch of a replica with several ranks, if it is due."""
        formation, template = replica.replica.spec.formation, replica.replica.spec.template
        content = self._contents.get(template)
        if formation is None or content is None:
            return
        if epoch.state is EpochState.GIVEN_UP and not epoch.is_due(formation):
            refusal = given_up_refusal(formation, replica.name, epoch)
            self.unschedulable = self.unschedulable or refusal
            return
        if not epoch.is_due(formation):
            return
        found = self._started_placer().reform(self._request(template), replica.replica, epoch)
        if isinstance(found, Assignment):
            self.actions.append(next_epoch(replica, found, epoch))
            return
        self.unschedulable = self.unschedulable or found
        if content.sharding == "Auto":
            # Another group may have room, and nothing of this replica serves.
            self.terminations.append(Termination(replica=replica, because="GroupLost"))

    def fits_in_place(self, template: str, *, of: ReplicaView) -> bool:
        """Return whether a replica of the version fits where another one is, once that has ended."""
        request = self._request(template)
        freed = [without_replica(node, of) for node in self._table.named(sorted(of.nodes))]
        if request.spec.sharding == "Never":
            return any(find_rejection(request, node) is None for node in freed)
        by_name = {node.name: node for node in freed}
        nodes = [by_name.get(node.name, node) for node in self._table.nodes]
        return isinstance(place_replica(request, nodes, self._observed.groups), Assignment)

    def missing_bytes(self, template: str, *, of: ReplicaView) -> dict[str, int]:
        """Return the bytes of the version's model that the replica's nodes would fetch, without those that have all."""
        path = self._request(template).path
        nodes = self._table.named(sorted(of.nodes))
        lacking = {node.name: node.missing_bytes(path) for node in nodes}
        return {name: size for name, size in lacking.items() if size}

    def fetch_cost(self, template: str, *, of: ReplicaView) -> tuple[bool, int]:
        """Return whether a fetch on the replica's nodes fails, and the bytes that they lack."""
        path, lacking = self._request(template).path, self.missing_bytes(template, of=of)
        nodes = self._table.named(lacking)
        return any(node.fetch_problem(path) for node in nodes), sum(lacking.values())

    def source_of(self, template: str) -> HubReference | None:
        """Return the hub's commit that the version runs; None for a model in a folder."""
        return self._request(template).spec.model.hub

    def _started_placer(self) -> Placer:
        """Return the placer, after the deployments of a higher priority have claimed their nodes."""
        if self._placer is None:
            observed = self._observed
            self._placer = Placer(self._table, observed.groups)
            for rival in observed.rivals:
                self._placer.claim_missing(rival, observed.idle)
            self._placer.discount(observed.name, self._nodes_of_ending())
        return self._placer

    def _nodes_of_ending(self) -> list[str]:
        """Return the nodes of replicas that end or will be replaced: new ones are spread as if those were gone.

        With maxReplicasPerNode they count until they have ended.
        """
        if self._deployment.spec.placement.max_replicas_per_node is not None:
            return []
        kept = {self._goal.target, self._goal.canary}
        is_rolling = self._goal.phase in (RolloutPhase.ROLLING, RolloutPhase.ROLLED_BACK)
        return [
            node
            for replica in self._observed.replicas
            if replica.is_deleting or (is_rolling and replica.replica.spec.template not in kept)
            for node in sorted(replica.nodes)
        ]

    def _request(self, template: str) -> PlacementRequest:
        # One object for all replicas of a version: the placer keeps one ranking for each request object.
        if template not in self._requests:
            deployment = with_content(self._deployment, self._contents[template])
            self._requests[template] = request_for(
                deployment,
                apart_from=self._observed.apart_from,
                load_times=self._observed.load_times,
            )
        return self._requests[template]

    def _assign(self, template: str, to: ReplicaView | str, assigned: Assignment) -> Action:
        content, form = self._contents[template], assigned.form
        if form is not None:
            # A new group is checked against the golden answer of other replicas of the version.
            form = form.with_golden(self._golden_answer(template, form.model))
        if isinstance(to, str):
            return CreateReplica(name=to, ranks=assigned.ranks, form=form, content=content)
        return MoveReplica(
            name=to.name, ranks=assigned.ranks, form=form, content=content, version=to.version
        )

    def _golden_answer(self, template: str, model: str) -> GoldenAnswer | None:
        answers = (
            replica.epoch.golden
            for replica in self._observed.replicas
            if replica.epoch is not None
            and replica.replica.spec.template == template
            and replica.replica.spec.model.folder == model
        )
        return next((answer for answer in answers if answer is not None), None)

    def _preempt(self, name: str, victim: Allocation) -> PreemptReplica:
        priority = self._deployment.spec.priority
        return PreemptReplica(
            name=victim.replica,
            deployment=victim.deployment,
            version=victim.version,
            by=name,
            because=f"{name} has priority {priority}, {victim.replica} has {victim.priority}",
        )

    def _give_way(self, name: str, victim: Allocation) -> PreemptReplica:
        return PreemptReplica(
            name=victim.replica,
            deployment=victim.deployment,
            version=victim.version,
            by=name,
            reason="GaveWay",
            because=f"it is idle, and requests wait for {self._observed.name}",
        )


def free_names(observed: DeploymentView) -> Iterator[str]:
    """Yield unused replica names, the lowest number first: creating the same replica twice collides."""
    used = {r.name for r in observed.replicas}
    ordinal = 0
    while True:
        name = replica_name(observed.name, ordinal)
        if name not in used:
            yield name
        ordinal += 1


def next_epoch(replica: ReplicaView, to: Assignment, epoch: Epoch) -> ReformReplica:
    """Return the action that begins the next epoch on the assigned Macs."""
    formation = replica.replica.spec.formation
    assert formation is not None
    assert to.form is not None
    is_same_model = to.form.model == replica.replica.spec.model.folder
    return ReformReplica(
        name=replica.name,
        ranks=to.ranks,
        form=to.form.with_golden(epoch.golden if is_same_model else None),
        failures=count_failures(formation, epoch),
        because=epoch.message or epoch.over,
        leaving=tuple(_leaving_after(replica, to)),
        version=replica.version,
    )


def _leaving_after(replica: ReplicaView, to: Assignment) -> Iterator[LeavingRank]:
    """Yield the ranks of earlier epochs that may still run; ranks on a Mac that is away are not counted."""
    new = {(rank.node, number): rank for number, rank in enumerate(to.ranks)}
    yield from (
        leaving_rank
        for leaving_rank in replica.leaving_ranks
        if (leaving_rank.node, leaving_rank.rank) not in new
    )
    for number, rank in enumerate(replica.replica.spec.ranks):
        size, after = rank.memory.total_bytes, new.get((rank.node, number))
        stays = after is not None and after.memory.total_bytes >= size
        if not stays and rank.node not in replica.away_nodes:
            yield LeavingRank(node=rank.node, rank=number, memory_bytes=size)


def without_replica(node: NodeView, replica: ReplicaView) -> NodeView:
    """Return a node as it will be once the replica has ended."""
    name = replica.replica.spec.deployment
    sizes = [
        allocation.bytes for allocation in node.allocations if allocation.replica == replica.name
    ]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionGroups:
    """The replicas of a deployment, by whether they may stay on their nodes."""

    staying: tuple[ReplicaView, ...]
    leaving: tuple[ReplicaView, ...]
    """Replicas on nodes that are drained or withheld: they end once their replacements serve."""
    evicted: tuple[ReplicaView, ...]
    """Replicas on nodes with a taint NoExecute that the deployment does not tolerate: they end at once."""


def group_by_eviction(
    deployment: ModelDeployment, active: Sequence[ReplicaView], table: NodeTable
) -> EvictionGroups:
    """Group the replicas that do not drain yet; a replica on a lost node is moved, and counts as staying."""
    tolerations = deployment.spec.placement.tolerations
    nodes = table.named({name for replica in active for name in replica.nodes})
    evicting = {
        node.name
        for node in nodes
        for taint in node.taints
        if taint.effect == "NoExecute" and not tolerates(tolerations, taint)
    }
    to_leave = {node.name for node in nodes if node.leave_reason}
    evicted = [r for r in active if r.nodes & evicting and not r.is_node_lost]
    leaving = [r for r in active if r.nodes & to_leave and r not in evicted and not r.is_node_lost]
    return EvictionGroups(
        staying=tuple(r for r in active if r not in evicted and r not in leaving),
        leaving=tuple(sorted(leaving, key=lambda r: r.ordinal)),
        evicted=tuple(evicted),
    )


def evictable_now(
    groups: EvictionGroups, observed: DeploymentView, deployment: ModelDeployment, *, is_stuck: bool
) -> tuple[Termination, ...]:
    """Return the terminations of leaving replicas that may drain now.

    All of them once their replacements are ready. With `is_stuck` there is no node for a replacement: then as many as
    minAvailable allows.
    """
    idle = [r for r in groups.leaving if r.is_idle]
    ready = [r for r in groups.leaving if r.is_ready]
    elsewhere = sum(r.is_ready for r in groups.staying)
    if elsewhere < observed.desired_replicas:
        least = quantity.resolve_amount(
            deployment.spec.min_available, observed.desired_replicas, round_up=True
        )
        ready = ready[: max(0, elsewhere + len(ready) - least)] if is_stuck else []
    return tuple(Termination(replica=r, because="Evicted") for r in (*idle, *ready))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """The actions for one deployment, and the reasons why replicas could not be placed."""

    actions: tuple[Action, ...] = ()
    unschedulable: Unschedulable | None = None
    """Reason why there are fewer replicas than desired."""
    stuck: Unschedulable | None = None
    """Reason why a rollout cannot go on, though there are as many replicas as desired."""
    requeue_after_s: float | None = None


def plan(observed: DeploymentView) -> DeploymentPlan:
    """Return the actions that move the deployment towards its spec.

    Each action is independent: if execution stops between two of them, the next plan continues.
    """
    deployment, after_s = observed.deployment, observed.requeue_after_s
    actions: list[Action] = [
        RemoveReplica(name=replica.name, version=replica.version)
        for replica in observed.replicas
        if is_gone(replica)
    ]
    if deployment is None or observed.is_ending:
        actions += _wind_down(observed)
        actions += collect_revisions(observed)
        actions += _preloads(observed, {})
        if deployment is not None and all(replica.is_orphan for replica in observed.replicas):
            version = int(deployment.metadata.resource_version or 0)
            actions.append(RemoveDeployment(name=observed.name, version=version))
        return DeploymentPlan(actions=tuple(actions), requeue_after_s=after_s)
    if not observed.has_model:
        return DeploymentPlan(actions=tuple(actions), requeue_after_s=after_s)
    remaining = [replica for replica in observed.replicas if not is_gone(replica)]
    # A draining replica needs no owner, and each replica gets one action at most.
    orphans = [replica for replica in remaining if replica.is_orphan and not replica.is_deleting]
    if orphans:
        actions += [AdoptReplica(name=r.name, version=r.version) for r in orphans]
        return DeploymentPlan(actions=tuple(actions), requeue_after_s=after_s)
    foreign = [r for r in remaining if not r.is_owned and not r.is_deleting]
    active = [r for r in remaining if r.is_owned and not r.is_deleting]
    groups = group_by_eviction(deployment, active, observed.table)
    goal = steps.rollout_goal(observed, deployment)
    step = steps.next_step(goal, observed, deployment, groups.staying)
    scheduler = ReplicaScheduler(observed, deployment, goal)
    scheduler.schedule(groups.staying, step, len(groups.leaving))
    terminations = [Termination(replica=replica, because="OwnerReplaced") for replica in foreign]
    terminations += [Termination(replica=r, because="Evicted") for r in groups.evicted]
    terminations += step.terminations
    terminations += scheduler.terminations
    terminations += evictable_now(groups, observed, deployment, is_stuck=scheduler.is_stuck)
    needed: dict[str, HubReference] = {}
    # A replica that is created now is not ready yet: until then, no other may end in place.
    if not terminations and not groups.leaving and not scheduler.actions:
        in_place = _first_in_place(observed, deployment, groups.staying, scheduler)
        if in_place is not None:
            needed = in_place.needed
            if not needed:
                terminations.append(
                    Termination(replica=in_place.replica, because="OutdatedInPlace")
                )
    actions += collect_revisions(observed)
    actions += map(_delete, terminations)
    actions += scheduler.actions
    busy = {action.name for action in actions}
    for replica in remaining:
        if replica.name in busy:
            continue
        if replica.leaving_ranks != replica.replica.spec.leaving:
            # Ranks of earlier epochs have ended.
            actions.append(
                ReleaseRanks(
                    name=replica.name, leaving=replica.leaving_ranks, version=replica.version
                )
            )
        elif replica.awaits_files and replica.has_files and not replica.is_deleting:
            actions.append(StartRanks(name=replica.name, version=replica.version))
    actions += _preloads(observed, needed)
    return DeploymentPlan(
        actions=tuple(actions),
        unschedulable=scheduler.unschedulable,
        stuck=None if terminations else scheduler.stuck,
        requeue_after_s=after_s,
    )


def _preloads(
    observed: DeploymentView, needed: dict[str, HubReference]
) -> Iterable[StartPreload | EndPreload]:
    deployment = observed.deployment
    has_any = deployment is not None and deployment.spec.preload is not None
    return plan_preloads(observed, needed) if has_any or needed or observed.preloads else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _InPlace:
    """The next replica to be replaced in place."""

    replica: ReplicaView
    needed: dict[str, HubReference]
    """Its nodes that lack files of the new version: they fetch while it goes on serving."""


def _first_in_place(
    observed: DeploymentView,
    deployment: ModelDeployment,
    staying: Sequence[ReplicaView],
    scheduler: ReplicaScheduler,
) -> _InPlace | None:
    """Return the replica whose nodes lack the fewest bytes of the new version; None if no node can take that.

    A node whose fetch fails comes last.
    """
    goal = steps.rollout_goal(observed, deployment)
    has_surge = steps.surge_limits(deployment, observed.desired_replicas)[0] > 0
    old = steps.replaceable_in_place(
        goal, observed, staying, has_surge=has_surge, is_stuck=scheduler.is_stuck
    )
    template = goal.canary or goal.target
    # Skip a replica whose node cannot take the new version: it would end for nothing.
    fitting = [replica for replica in old if scheduler.fits_in_place(template, of=replica)]
    if not fitting:
        return None
    first = min(fitting, key=lambda replica: scheduler.fetch_cost(template, of=replica))
    source = scheduler.source_of(template)
    lacking = scheduler.missing_bytes(template, of=first)
    return _InPlace(replica=first, needed={} if source is None else dict.fromkeys(lacking, source))


def is_gone(replica: ReplicaView) -> bool:
    """Return whether a deleted replica has stopped on all its nodes."""
    return replica.is_deleting and replica.is_stopped


def _wind_down(observed: DeploymentView) -> list[DeleteReplica | OrphanReplica]:
    """Return the actions for replicas whose deployment is deleted: they end, or are orphaned on request."""
    active = [r for r in observed.replicas if not r.is_deleting and not r.is_orphan]
    if observed.deployment is not None and ORPHAN in observed.deployment.metadata.finalizers:
        return [OrphanReplica(name=r.name, version=r.version) for r in active if r.is_owned]
    return [_delete(Termination(replica=r, because="OwnerDeleted")) for r in active]


def _delete(ending: Termination) -> DeleteReplica:
    replica = ending.replica
    return DeleteReplica(name=replica.name, because=ending.because, version=replica.version)
