"""The reconciler's decision about one deployment: from what is seen to what to do. Pure."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from reconciler import eviction
from reconciler.actions import (
    Action,
    AdoptReplica,
    DeleteReplica,
    OrphanReplica,
    ReleaseRanks,
    RemoveDeployment,
    RemoveReplica,
)
from reconciler.observe import Observed, ReplicaView
from reconciler.placement.refusals import Unschedulable
from reconciler.placement.table import Table
from reconciler.placing import Placing
from reconciler.rollout import steps
from reconciler.rollout.revisions import keep_books
from reconciler.rollout.steps import Ending
from schemas.meta import ORPHAN


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, and why something could not be placed."""

    actions: tuple[Action, ...] = ()
    unschedulable: Unschedulable | None = None
    """Why there are fewer replicas than wanted."""
    stuck: Unschedulable | None = None
    """Why a rollout cannot go on, though there are as many replicas as wanted."""
    requeue_after_s: float | None = None


def plan(seen: Observed, table: Table | None = None) -> Plan:
    """Return the actions that bring the deployment's replicas nearer to what is wanted.

    Every action can be done or left undone by itself: planning again from where it stopped goes on.
    `table` are the nodes of `seen` as columns, if somebody has them already.
    """
    gone = [RemoveReplica(name=r.name, version=r.version) for r in seen.replicas if is_gone(r)]
    deployment = seen.deployment
    if deployment is None or seen.is_ending:
        actions = (*gone, *_wind_down(seen), *keep_books(seen), *_finished(seen))
        return Plan(actions=actions, requeue_after_s=seen.next_look_s)
    kept = [r for r in seen.replicas if not is_gone(r)]
    # Not the draining ones: they need no owner any more, and one name gets one action.
    adopted = [
        AdoptReplica(name=r.name, version=r.version)
        for r in kept
        if r.is_orphan and not r.is_deleting
    ]
    if adopted:
        return Plan(actions=(*gone, *adopted), requeue_after_s=seen.next_look_s)
    strangers = [r for r in kept if not r.is_ours and not r.is_deleting]
    active = [r for r in kept if r.is_ours and not r.is_deleting]
    found = eviction.sort(seen, deployment, active)
    goal = steps.goal_of(seen, deployment)
    step = steps.next_step(goal, seen, deployment, found.staying)
    placing = Placing(seen, deployment, goal, table)
    placing.place(found.staying, step, len(found.leaving))
    endings = [
        *(Ending(replica=r, because="OwnerReplaced") for r in strangers),
        *(Ending(replica=r, because="Evicted") for r in found.driven_out),
        *step.endings,
        *placing.endings,
        *eviction.spared(found, seen, deployment, is_stuck=placing.is_stuck),
    ]
    # What is made now does not answer yet: until it does nobody else may end in its place.
    if not endings and not found.leaving and not placing.actions:
        has_surge = steps.limits(deployment, seen.wanted)[0] > 0
        old = steps.replaceable(
            goal, seen, found.staying, has_surge=has_surge, is_stuck=placing.is_stuck
        )
        # One whose place the new version could not take would end for nothing.
        fit = [r for r in old if placing.fits_instead(goal.trial or goal.target, of=r)]
        endings.extend(Ending(replica=r, because="OutdatedInPlace") for r in fit[:1])
    done = (*gone, *keep_books(seen), *map(_delete, endings), *placing.actions)
    return Plan(
        actions=(*done, *_released(kept, {action.name for action in done})),
        unschedulable=placing.why,
        stuck=None if endings else placing.no_room,
        requeue_after_s=seen.next_look_s,
    )


def _released(replicas: Sequence[ReplicaView], busy: AbstractSet[str]) -> list[ReleaseRanks]:
    """Return which replicas no longer hold what ranks of earlier epochs did; one name gets one action."""
    return [
        ReleaseRanks(name=r.name, leaving=r.unended, version=r.version)
        for r in replicas
        if r.unended != r.replica.spec.leaving and r.name not in busy
    ]


def is_gone(replica: ReplicaView) -> bool:
    """Return whether nothing of a deleted replica runs any more, as far as anybody can know."""
    return replica.is_deleting and replica.is_stopped


def _wind_down(seen: Observed) -> list[DeleteReplica | OrphanReplica]:
    """Return what ends because its deployment goes, or went; or what is left behind on purpose."""
    active = [r for r in seen.replicas if not r.is_deleting and not r.is_orphan]
    if seen.deployment is not None and ORPHAN in seen.deployment.metadata.finalizers:
        return [OrphanReplica(name=r.name, version=r.version) for r in active if r.is_ours]
    return [_delete(Ending(replica=r, because="OwnerDeleted")) for r in active]


def _finished(seen: Observed) -> list[RemoveDeployment]:
    """Return the last word on a deployment that is being deleted, once nothing of it is left."""
    if seen.deployment is None or any(not r.is_orphan for r in seen.replicas):
        return []
    version = int(seen.deployment.metadata.resource_version or 0)
    return [RemoveDeployment(name=seen.name, version=version)]


def _delete(ending: Ending) -> DeleteReplica:
    replica = ending.replica
    return DeleteReplica(name=replica.name, because=ending.because, version=replica.version)
