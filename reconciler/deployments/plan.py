"""Plans one deployment: from its observed view to the actions that move it towards its spec. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reconciler.deployments.actions import (
    Action,
    AdoptReplica,
    DeleteReplica,
    EndPreload,
    OrphanReplica,
    ReleaseRanks,
    RemoveDeployment,
    RemoveReplica,
    StartPreload,
    StartRanks,
)
from reconciler.deployments.preload import plan_preloads
from reconciler.deployments.rollout import steps
from reconciler.deployments.rollout.revisions import collect_revisions
from reconciler.deployments.rollout.steps import Termination
from reconciler.deployments.scheduling import ReplicaScheduler
from reconciler.deployments.views import DeploymentView, ReplicaView
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.table import NodeTable
from schemas import quantity
from schemas.deployment import HubReference, ModelDeployment
from schemas.meta import ORPHAN
from schemas.placement import tolerates


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
