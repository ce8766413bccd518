"""Plans one deployment: from its observed view to the actions that move it towards its spec. Pure."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from reconciler.deployments.actions import (
    Action,
    AdoptReplica,
    DeleteReplica,
    OrphanReplica,
    ReleaseRanks,
    RemoveDeployment,
    RemoveReplica,
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
    nodes = table.named({name for one in active for name in one.nodes})
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
    found: EvictionGroups, observed: DeploymentView, deployment: ModelDeployment, *, is_stuck: bool
) -> tuple[Termination, ...]:
    """Return the terminations of leaving replicas that may drain now.

    All of them once their replacements are ready. With `is_stuck` there is no node for a replacement: then as many as
    minAvailable allows.
    """
    idle = [r for r in found.leaving if r.is_idle]
    ready = [r for r in found.leaving if r.is_ready]
    elsewhere = sum(r.is_ready for r in found.staying)
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


def plan(observed: DeploymentView, table: NodeTable | None = None) -> DeploymentPlan:
    """Return the actions that move the deployment towards its spec.

    Each action is independent: if execution stops between two of them, the next plan continues.
    `table` holds the nodes of `observed` as columns; without it, it is computed here.
    """
    gone = [RemoveReplica(name=r.name, version=r.version) for r in observed.replicas if is_gone(r)]
    deployment = observed.deployment
    if deployment is None or observed.is_ending:
        ended = plan_preloads(observed, table, {})
        actions = (
            *(*gone, *_wind_down(observed), *collect_revisions(observed)),
            *(*ended, *_finished(observed)),
        )
        return DeploymentPlan(actions=actions, requeue_after_s=observed.requeue_after_s)
    if not observed.has_model:
        return DeploymentPlan(actions=tuple(gone), requeue_after_s=observed.requeue_after_s)
    kept = [r for r in observed.replicas if not is_gone(r)]
    # A draining replica needs no owner, and each replica gets one action at most.
    adopted = [
        AdoptReplica(name=r.name, version=r.version)
        for r in kept
        if r.is_orphan and not r.is_deleting
    ]
    if adopted:
        return DeploymentPlan(actions=(*gone, *adopted), requeue_after_s=observed.requeue_after_s)
    foreign = [r for r in kept if not r.is_owned and not r.is_deleting]
    active = [r for r in kept if r.is_owned and not r.is_deleting]
    table = table or NodeTable(observed.nodes)
    found = group_by_eviction(deployment, active, table)
    goal = steps.rollout_goal(observed, deployment)
    step = steps.next_step(goal, observed, deployment, found.staying)
    scheduler = ReplicaScheduler(observed, deployment, goal, table)
    scheduler.schedule(found.staying, step, len(found.leaving))
    terminations = [
        *(Termination(replica=r, because="OwnerReplaced") for r in foreign),
        *(Termination(replica=r, because="Evicted") for r in found.evicted),
        *step.terminations,
        *scheduler.terminations,
        *evictable_now(found, observed, deployment, is_stuck=scheduler.is_stuck),
    ]
    first = None
    # A replica that is created now is not ready yet: until then, no other may end in place.
    if not terminations and not found.leaving and not scheduler.actions:
        first = _first_in_place(observed, deployment, found.staying, scheduler)
    if first is not None and not first.needed:
        terminations.append(Termination(replica=first.replica, because="OutdatedInPlace"))
    done = (*gone, *collect_revisions(observed), *map(_delete, terminations), *scheduler.actions)
    done = (*done, *_released(kept, {action.name for action in done}))
    return DeploymentPlan(
        actions=(
            *(*done, *_started(kept, {action.name for action in done})),
            *plan_preloads(observed, table, {} if first is None else first.needed),
        ),
        unschedulable=scheduler.unschedulable,
        stuck=None if terminations else scheduler.stuck,
        requeue_after_s=observed.requeue_after_s,
    )


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
    fit = [one for one in old if scheduler.fits_in_place(template, of=one)]
    if not fit:
        return None
    first = min(fit, key=lambda one: scheduler.fetch_cost(template, of=one))
    source = scheduler.source_of(template)
    lacking = scheduler.missing_bytes(template, of=first)
    return _InPlace(replica=first, needed={} if source is None else dict.fromkeys(lacking, source))


def _released(replicas: Sequence[ReplicaView], busy: AbstractSet[str]) -> list[ReleaseRanks]:
    """Release ranks of earlier epochs that have ended, except of replicas with another action."""
    return [
        ReleaseRanks(name=r.name, leaving=r.leaving_ranks, version=r.version)
        for r in replicas
        if r.leaving_ranks != r.replica.spec.leaving and r.name not in busy
    ]


def _started(replicas: Sequence[ReplicaView], busy: AbstractSet[str]) -> list[StartRanks]:
    """Start the ranks of epochs whose files are all there, except of replicas with another action."""
    return [
        StartRanks(name=r.name, version=r.version)
        for r in replicas
        if r.awaits_files and r.has_files and not r.is_deleting and r.name not in busy
    ]


def is_gone(replica: ReplicaView) -> bool:
    """Return whether a deleted replica has stopped on all its nodes."""
    return replica.is_deleting and replica.is_stopped


def _wind_down(observed: DeploymentView) -> list[DeleteReplica | OrphanReplica]:
    """Return the actions for replicas whose deployment is deleted: they end, or are orphaned on request."""
    active = [r for r in observed.replicas if not r.is_deleting and not r.is_orphan]
    if observed.deployment is not None and ORPHAN in observed.deployment.metadata.finalizers:
        return [OrphanReplica(name=r.name, version=r.version) for r in active if r.is_owned]
    return [_delete(Termination(replica=r, because="OwnerDeleted")) for r in active]


def _finished(observed: DeploymentView) -> list[RemoveDeployment]:
    """Remove a deployment that is being deleted, once it has no replicas."""
    if observed.deployment is None or any(not r.is_orphan for r in observed.replicas):
        return []
    version = int(observed.deployment.metadata.resource_version or 0)
    return [RemoveDeployment(name=observed.name, version=version)]


def _delete(ending: Termination) -> DeleteReplica:
    replica = ending.replica
    return DeleteReplica(name=replica.name, because=ending.because, version=replica.version)
