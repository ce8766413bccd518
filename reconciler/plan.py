"""Who leaves a node: at once where a taint drives it out, else when it can be spared. Pure.

The reconciler's decision about one deployment: from what is seen to what to do. Pure.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from reconciler.actions import (
    Action,
    AdoptReplica,
    DeleteReplica,
    OrphanReplica,
    ReleaseRanks,
    RemoveDeployment,
    RemoveReplica,
)
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.table import NodeTable
from reconciler.rollout import steps
from reconciler.rollout.revisions import collect_revisions
from reconciler.rollout.steps import Termination
from reconciler.scheduling import ReplicaScheduler
from reconciler.views import DeploymentView, ReplicaView
from schemas import quantity
from schemas.deployment import ModelDeployment
from schemas.meta import ORPHAN
from schemas.placement import tolerates


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionGroups:
    """The replicas of a deployment by whether they may stay where they are."""

    staying: tuple[ReplicaView, ...]
    leaving: tuple[ReplicaView, ...]
    """On nodes that are drained or withheld: to be replaced elsewhere first."""
    driven_out: tuple[ReplicaView, ...]
    """On nodes with a taint NoExecute that the deployment does not tolerate."""


def group_by_eviction(
    seen: DeploymentView, deployment: ModelDeployment, active: Sequence[ReplicaView]
) -> EvictionGroups:
    """Sort the replicas that do not drain yet; what is on a lost node is moved, and counts as staying."""
    tolerations = deployment.spec.placement.tolerations
    drives_out = {
        node.name
        for node in seen.nodes
        for taint in node.taints
        if taint.effect == "NoExecute" and not tolerates(tolerations, taint)
    }
    to_leave = {node.name for node in seen.nodes if node.leave}
    driven_out = [r for r in active if r.nodes & drives_out and not r.is_node_lost]
    leaving = [
        r for r in active if r.nodes & to_leave and r not in driven_out and not r.is_node_lost
    ]
    return EvictionGroups(
        staying=tuple(r for r in active if r not in driven_out and r not in leaving),
        leaving=tuple(sorted(leaving, key=lambda r: r.ordinal)),
        driven_out=tuple(driven_out),
    )


def evictable_now(
    found: EvictionGroups, seen: DeploymentView, deployment: ModelDeployment, *, is_stuck: bool
) -> tuple[Termination, ...]:
    """Return who of those that leave may drain now.

    All of them once their replacements answer. `is_stuck`: there is no place for a replacement; then as many as
    minAvailable allows.
    """
    idle = [r for r in found.leaving if r.is_idle]
    ready = [r for r in found.leaving if r.is_ready]
    elsewhere = sum(r.is_ready for r in found.staying)
    if elsewhere < seen.wanted:
        least = quantity.resolve_amount(deployment.spec.min_available, seen.wanted, round_up=True)
        ready = ready[: max(0, elsewhere + len(ready) - least)] if is_stuck else []
    return tuple(Termination(replica=r, because="Evicted") for r in (*idle, *ready))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """What to do, and why something could not be placed."""

    actions: tuple[Action, ...] = ()
    unschedulable: Unschedulable | None = None
    """Why there are fewer replicas than wanted."""
    stuck: Unschedulable | None = None
    """Why a rollout cannot go on, though there are as many replicas as wanted."""
    requeue_after_s: float | None = None


def plan(seen: DeploymentView, table: NodeTable | None = None) -> DeploymentPlan:
    """Return the actions that bring the deployment's replicas nearer to what is wanted.

    Every action can be done or left undone by itself: planning again from where it stopped goes on.
    `table` are the nodes of `seen` as columns, if somebody has them already.
    """
    gone = [RemoveReplica(name=r.name, version=r.version) for r in seen.replicas if is_gone(r)]
    deployment = seen.deployment
    if deployment is None or seen.is_ending:
        actions = (*gone, *_wind_down(seen), *collect_revisions(seen), *_finished(seen))
        return DeploymentPlan(actions=actions, requeue_after_s=seen.requeue_after_s)
    kept = [r for r in seen.replicas if not is_gone(r)]
    # Not the draining ones: they need no owner any more, and one name gets one action.
    adopted = [
        AdoptReplica(name=r.name, version=r.version)
        for r in kept
        if r.is_orphan and not r.is_deleting
    ]
    if adopted:
        return DeploymentPlan(actions=(*gone, *adopted), requeue_after_s=seen.requeue_after_s)
    strangers = [r for r in kept if not r.is_ours and not r.is_deleting]
    active = [r for r in kept if r.is_ours and not r.is_deleting]
    found = group_by_eviction(seen, deployment, active)
    goal = steps.rollout_goal(seen, deployment)
    step = steps.next_step(goal, seen, deployment, found.staying)
    placing = ReplicaScheduler(seen, deployment, goal, table)
    placing.place(found.staying, step, len(found.leaving))
    endings = [
        *(Termination(replica=r, because="OwnerReplaced") for r in strangers),
        *(Termination(replica=r, because="Evicted") for r in found.driven_out),
        *step.endings,
        *placing.endings,
        *evictable_now(found, seen, deployment, is_stuck=placing.is_stuck),
    ]
    # What is made now does not answer yet: until it does nobody else may end in its place.
    if not endings and not found.leaving and not placing.actions:
        has_surge = steps.surge_limits(deployment, seen.wanted)[0] > 0
        old = steps.replaceable_in_place(
            goal, seen, found.staying, has_surge=has_surge, is_stuck=placing.is_stuck
        )
        # One whose place the new version could not take would end for nothing.
        fit = [r for r in old if placing.fits_instead(goal.trial or goal.target, of=r)]
        endings.extend(Termination(replica=r, because="OutdatedInPlace") for r in fit[:1])
    done = (*gone, *collect_revisions(seen), *map(_delete, endings), *placing.actions)
    return DeploymentPlan(
        actions=(*done, *_released(kept, {action.name for action in done})),
        unschedulable=placing.why,
        stuck=None if endings else placing.no_room,
        requeue_after_s=seen.requeue_after_s,
    )


def _released(replicas: Sequence[ReplicaView], busy: AbstractSet[str]) -> list[ReleaseRanks]:
    """Return which replicas no longer hold what ranks of earlier epochs did; one name gets one action."""
    return [
        ReleaseRanks(name=r.name, leaving=r.leaving_ranks, version=r.version)
        for r in replicas
        if r.leaving_ranks != r.replica.spec.leaving and r.name not in busy
    ]


def is_gone(replica: ReplicaView) -> bool:
    """Return whether nothing of a deleted replica runs any more, as far as anybody can know."""
    return replica.is_deleting and replica.is_stopped


def _wind_down(seen: DeploymentView) -> list[DeleteReplica | OrphanReplica]:
    """Return what ends because its deployment goes, or went; or what is left behind on purpose."""
    active = [r for r in seen.replicas if not r.is_deleting and not r.is_orphan]
    if seen.deployment is not None and ORPHAN in seen.deployment.metadata.finalizers:
        return [OrphanReplica(name=r.name, version=r.version) for r in active if r.is_ours]
    return [_delete(Termination(replica=r, because="OwnerDeleted")) for r in active]


def _finished(seen: DeploymentView) -> list[RemoveDeployment]:
    """Return the last word on a deployment that is being deleted, once nothing of it is left."""
    if seen.deployment is None or any(not r.is_orphan for r in seen.replicas):
        return []
    version = int(seen.deployment.metadata.resource_version or 0)
    return [RemoveDeployment(name=seen.name, version=version)]


def _delete(ending: Termination) -> DeleteReplica:
    replica = ending.replica
    return DeleteReplica(name=replica.name, because=ending.because, version=replica.version)
