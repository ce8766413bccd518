"""From what the fleet is to what the planner sees. Pure but for the caches behind `Fleet`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from reconciler.groups.epochs import Epoch, epoch_of, mark_given_up
from reconciler.groups.epochs import epoch_requeue_after_s as next_epoch_look_s
from reconciler.groups.group_view import GroupView, group_shapes
from reconciler.listers import lister
from reconciler.listers.lister import Lister
from reconciler.placement.inputs import Rival, request_for
from reconciler.views import DeploymentView, NodeView, ReplicaView
from schemas.deployment import ModelDeployment, Revision
from schemas.meta import ConditionStatus, ObjectKey, find_condition, is_true
from schemas.node import matches
from schemas.pools import NodePool, in_pool
from schemas.replica import LeavingRank, RankStatus, Replica

# How long an agent lets a rank end before it kills it, and as long again for it to take note and report.
_END_S = 30.0
_END_S_PER_GIB = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """When somebody looks, and what that one knows beside the caches."""

    now: datetime
    lost: frozenset[str] = frozenset()
    """The nodes whose grace period is over."""
    requeue_after_s: float | None = None
    """When the nodes are different though nothing changes."""


def observe(
    fleet: Lister, name: str, looked: Now, *, nodes: tuple[NodeView, ...]
) -> DeploymentView:
    """Return everything that decides about one deployment."""
    found = fleet.spec(ObjectKey("ModelDeployment", name))
    deployment = found if isinstance(found, ModelDeployment) else None
    mine = fleet.replicas_of(name)
    told = fleet.wishes.status(name)
    revisions = tuple(fleet.wishes.revisions_of(name))
    rivals = _rivals(fleet, deployment) if deployment is not None else ()
    known = lister.group_views(fleet, _sharding_names(deployment, mine, revisions, rivals))
    replicas = tuple(
        _with_exhausted_fallbacks(_replica(fleet, r, deployment, looked), known) for r in mine
    )
    return DeploymentView(
        name=name,
        deployment=deployment,
        replicas=replicas,
        nodes=nodes,
        apart_from=_apart_from(fleet, deployment) if deployment is not None else frozenset(),
        rivals=rivals,
        desired=None if deployment is None else fleet.wishes.desired(deployment),
        revisions=revisions,
        stable=told.stable_template if told is not None else "",
        canary=told.canary if told is not None else None,
        groups=known,
        requeue_after_s=_next_look_s(replicas, looked, looked.requeue_after_s),
    )


def _deployments(fleet: Lister) -> list[ModelDeployment]:
    return [d for d in fleet.of_kind("ModelDeployment") if isinstance(d, ModelDeployment)]


def _apart_from(fleet: Lister, deployment: ModelDeployment) -> frozenset[str]:
    """Return the deployments to keep apart from: those it names, and those that name it."""
    return frozenset(
        other.name
        for other in _deployments(fleet)
        if other.name != deployment.name
        and (_repels(deployment, other) or _repels(other, deployment))
    )


def _repels(one: ModelDeployment, other: ModelDeployment) -> bool:
    wish = one.spec.placement.anti_affinity
    if wish is None:
        return False
    by_labels = bool(wish.match_labels) and matches(other.metadata.labels, wish.match_labels)
    return by_labels or other.name in wish.deployments


def _rivals(fleet: Lister, deployment: ModelDeployment) -> tuple[Rival, ...]:
    """Return what of a higher priority has no place yet, the highest first: it chooses before us."""
    above = [d for d in _deployments(fleet) if d.spec.priority > deployment.spec.priority]
    if not above:
        return ()
    # One that drains will be wanted again, unless it is too many.
    there = Counter(
        found.spec.deployment
        for found in fleet.replicas()
        if found.metadata.deletion_timestamp is None
    )
    found = []
    for one in sorted(above, key=lambda one: (-one.spec.priority, one.name)):
        missing = fleet.wishes.desired(one) - there[one.name]
        if missing > 0 and one.metadata.deletion_timestamp is None:
            want = request_for(one, apart_from=_apart_from(fleet, one))
            found.append(Rival(want=want, missing=missing))
    return tuple(found)


def _replica(
    fleet: Lister, replica: Replica, deployment: ModelDeployment | None, looked: Now
) -> ReplicaView:
    reports = fleet.ranks(replica)
    leading = reports[0].conditions if reports[0] is not None else ()
    ready = find_condition(leading, "Ready")
    owners = {owner.uid for owner in replica.metadata.owner_references}
    nodes = [rank.node for rank in replica.spec.ranks]
    away = frozenset(name for name in nodes if not fleet.is_ready(name))
    epoch = epoch_of(
        replica,
        reports,
        away=away,
        lost=looked.lost,
        old=fleet.status(ObjectKey("Replica", replica.name)),
        now=looked.now,
    )
    is_over = epoch is not None and epoch.over != ""
    return ReplicaView(
        replica=replica,
        version=fleet.version(replica),
        is_ours=deployment is not None and (not owners or deployment.metadata.uid in owners),
        is_ready=fleet.is_serving(replica) and not is_over,
        reported_ready=ready is not None and ready.status is ConditionStatus.TRUE and not is_over,
        is_stopped=_is_stopped(fleet, replica, looked.lost),
        is_node_lost=not looked.lost.isdisjoint(nodes),
        trouble=_problem(replica, reports, away, epoch),
        epoch=epoch,
        away=away,
        leaving_ranks=tuple(_leaving_ranks(fleet, replica, looked)),
    )


def _with_exhausted_fallbacks(view: ReplicaView, known: Sequence[GroupView]) -> ReplicaView:
    """Return the replica with whether everything that its group may run was tried."""
    formation = view.replica.spec.formation
    group = next((one for one in known if formation and one.name == formation.group), None)
    if group is None:
        return view
    return replace(
        view, epoch=mark_given_up(view.replica, view.epoch, len(group_shapes(group.spec)))
    )


def _is_stopped(fleet: Lister, replica: Replica, lost: AbstractSet[str]) -> bool:
    """Return whether nothing of it runs on any node, as far as anybody can know."""
    for number, rank in enumerate(replica.spec.ranks):
        said = fleet.report(replica, rank.node, number)
        has_stopped = said is not None and is_true(said.conditions, "Stopped")
        if not has_stopped and rank.node not in lost:
            return False
    return True


def _leaving_ranks(fleet: Lister, replica: Replica, looked: Now) -> Iterator[LeavingRank]:
    """Yield the ranks of earlier epochs that may still be there.

    Its agent removes the report of a rank that it has no more once that has ended, or reports the next one. Who does
    neither has had the time that agents give a rank, and then killed it (nodeagent/plan.py).
    """
    formation = replica.spec.formation
    if formation is None:
        return
    for one in replica.spec.leaving:
        had_s = _END_S + _END_S_PER_GIB * one.memory_bytes / 2**30
        in_time = looked.now < formation.formed_at + timedelta(seconds=had_s)
        if in_time and not _has_ended(fleet, replica, one):
            yield one


def _has_ended(fleet: Lister, replica: Replica, left: LeavingRank) -> bool:
    """Return whether the agent of a rank of an earlier epoch has done with it, by what it reports."""
    pairs = zip(replica.spec.ranks, fleet.ranks(replica), strict=True)
    for rank, report in pairs:
        if rank.node == left.node:
            # Until then it says of the next one that it is about to start.
            ready = find_condition(report.conditions, "Ready") if report is not None else None
            return ready is not None and ready.reason != "Starting"
    return fleet.report(replica, left.node, left.rank) is None


def _problem(
    replica: Replica,
    reports: Sequence[RankStatus | None],
    away: AbstractSet[str],
    epoch: Epoch | None,
) -> str:
    """Return what is wrong with the first rank that has something to say; empty if nothing is."""
    if epoch is not None and epoch.over:
        return f"{epoch.over}: {epoch.message}"
    for number, rank in enumerate(replica.spec.ranks):
        if rank.node in away:
            return f"{rank.node} is NotReady: its agent does not renew its lease"
        report = reports[number]
        ready = find_condition(report.conditions, "Ready") if report is not None else None
        if ready is not None and ready.status is not ConditionStatus.TRUE:
            return ready.message
    return ""


def _next_look_s(
    replicas: Sequence[ReplicaView], looked: Now, requeue_after_s: float | None
) -> float | None:
    """Return when something is different though nothing changes."""
    looks = [requeue_after_s]
    for one in replicas:
        looks.append(next_epoch_look_s(one.replica, one.epoch))
        formation = one.replica.spec.formation
        if one.leaving_ranks and formation is not None:
            most = max(rank.memory_bytes for rank in one.leaving_ranks)
            age_s = (looked.now - formation.formed_at) / timedelta(seconds=1)
            looks.append(max(0.0, _END_S + _END_S_PER_GIB * most / 2**30 - age_s))
    return min((look for look in looks if look is not None), default=None)


def _sharding_names(
    deployment: ModelDeployment | None,
    replicas: Sequence[Replica],
    revisions: Sequence[Revision],
    rivals: Sequence[Rival],
) -> set[str]:
    """Return everything that is said about sharding, by this deployment and those that choose before it."""
    found = {one.spec.content.sharding for one in revisions}
    found |= {rival.want.spec.sharding for rival in rivals}
    found |= {one.spec.formation.group for one in replicas if one.spec.formation is not None}
    return found if deployment is None else found | {deployment.spec.sharding}


def pool_members(fleet: Lister, pool: NodePool) -> list[str]:
    """Return the nodes that belong to the pool."""
    return [name for name in fleet.node_names() if in_pool(pool, fleet.node(name))]
