"""Observes one deployment: makes the planner's frozen input from the caches. Changes nothing."""

from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

from reconciler.deployments.views import DeploymentView, PreloadView, ReplicaView
from reconciler.groups.epochs import Epoch, epoch_of, epoch_requeue_after_s, mark_given_up
from reconciler.groups.group_view import GroupView, group_shapes
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import Now
from reconciler.placement.inputs import NodeView, Rival, request_for
from schemas.deployment import ModelDeployment, Revision
from schemas.meta import Condition, ConditionStatus, ObjectKey, find_condition, is_true
from schemas.node import matches
from schemas.replica import (
    FETCHING_REASONS,
    MODEL_PRESENT,
    UNSTARTABLE,
    LeavingRank,
    RankStatus,
    Replica,
    order_of_reason,
)

# An agent kills a rank that has not ended after this long (nodeagent), plus as long again for its report to arrive.
_END_S = 30.0
_END_S_PER_GIB = 1.5


class _KeptView(NamedTuple):
    """The view of a replica, and all that it was made of."""

    replica: Replica
    report: RankStatus | None
    facts: tuple[object, ...]
    view: ReplicaView


class ReplicaViewCache:
    """The views of replicas, kept between looks at their deployments: most are the same objects as last time.

    Level-based all the same: a view is kept with what it was made of, and an empty cache gives equal views.
    """

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, _KeptView]] = {}
        """By deployment, and by replica."""

    def views_of(
        self, lister: Lister, name: str, deployment: ModelDeployment | None, now: Now
    ) -> list[ReplicaView]:
        """Return the views of a deployment's replicas; `deployment` is None if it is gone and only they are left."""
        before, kept = self._kept.pop(name, {}), dict[str, _KeptView]()
        views = []
        for replica in lister.replicas_of(name):
            if replica.spec.formation is not None:  # the state of its epoch depends on time
                views.append(_replica(lister, replica, deployment, now))
                continue
            one = _view_of(lister, replica, deployment, now, before.get(replica.name))
            kept[replica.name] = one
            views.append(one.view)
        if kept:
            self._kept[name] = kept
        return views


def _view_of(
    lister: Lister,
    replica: Replica,
    deployment: ModelDeployment | None,
    now: Now,
    before: _KeptView | None,
) -> _KeptView:
    """Return the view of a replica with one rank, and what it is made of; the one before if that is the same."""
    node = replica.spec.ranks[0].node
    report = lister.report(replica, node, 0)
    facts = (
        None if deployment is None else deployment.metadata.uid,
        lister.is_serving(replica),
        lister.is_ready(node),
        node in now.lost,
    )
    if (
        before is not None
        and before.replica is replica
        and before.report is report
        and before.facts == facts
    ):
        return before
    return _KeptView(replica, report, facts, _replica(lister, replica, deployment, now))


def observe(
    lister: Lister,
    name: str,
    now: Now,
    *,
    nodes: tuple[NodeView, ...],
    views: ReplicaViewCache | None = None,
) -> DeploymentView:
    """Return everything that the plan for a deployment depends on; `views` keeps parts of it for the next look."""
    deployment, own = lister.deployment(name), lister.replicas_of(name)
    status = lister.deployment_status(name)
    revisions = tuple(lister.revisions_of(name))
    rivals = _rivals(lister, deployment, now.lost) if deployment is not None else ()
    groups = lister.group_views(_sharding_values(deployment, own, revisions, rivals))
    found = (views or ReplicaViewCache()).views_of(lister, name, deployment, now)
    replicas = tuple(_mark_given_up(one, groups) for one in found)
    return DeploymentView(
        name=name,
        deployment=deployment,
        replicas=replicas,
        nodes=nodes,
        apart_from=_apart_from(lister, deployment) if deployment is not None else frozenset(),
        rivals=rivals,
        autoscaled_replicas=None if deployment is None else lister.desired_replicas(deployment),
        revisions=revisions,
        preloads=tuple(
            PreloadView(
                node=one.node, source=one.source, version=lister.preload_version(one.node, name)
            )
            for one in lister.preloads_of(name)
        ),
        stable_template=status.stable_template if status is not None else "",
        canary=status.canary if status is not None else None,
        groups=groups,
        requeue_after_s=_requeue_after_s(replicas, now),
    )


def soonest_s(*delays_s: float | None) -> float | None:
    """Return the shortest of the delays; None if all are None."""
    return min((delay_s for delay_s in delays_s if delay_s is not None), default=None)


def _apart_from(lister: Lister, deployment: ModelDeployment) -> frozenset[str]:
    """Return the deployments that it repels, and those that repel it."""
    has_rule = deployment.spec.placement.anti_affinity is not None
    return frozenset(
        other.name
        for other in (lister.deployments() if has_rule else lister.repelling_deployments())
        if other.name != deployment.name
        and (_repels(deployment, other) or _repels(other, deployment))
    )


def _repels(one: ModelDeployment, other: ModelDeployment) -> bool:
    rule = one.spec.placement.anti_affinity
    if rule is None:
        return False
    by_labels = bool(rule.match_labels) and matches(other.metadata.labels, rule.match_labels)
    return by_labels or other.name in rule.deployments


def _rivals(
    lister: Lister, deployment: ModelDeployment, lost: AbstractSet[str]
) -> tuple[Rival, ...]:
    """Return the missing replicas of deployments with a higher priority, the highest first.

    A replica on a lost node is missing, too: it moves to the room that it preempted, which must not be taken before.
    """
    above = lister.deployments_above(deployment.spec.priority)
    # A draining replica does not count: another one replaces it, unless it is surplus.
    active = Counter(
        found.spec.deployment
        for one in above
        for found in lister.replicas_of(one.name)
        if found.metadata.deletion_timestamp is None
        and not any(rank.node in lost for rank in found.spec.ranks)
    )
    found = []
    for one in sorted(above, key=lambda one: (-one.spec.priority, one.name)):
        missing = lister.desired_replicas(one) - active[one.name]
        if missing > 0 and one.metadata.deletion_timestamp is None:
            request = request_for(one, apart_from=_apart_from(lister, one))
            found.append(Rival(request=request, missing=missing))
    return tuple(found)


def _replica(
    lister: Lister, replica: Replica, deployment: ModelDeployment | None, now: Now
) -> ReplicaView:
    reports = lister.ranks(replica)
    first = reports[0].conditions if reports[0] is not None else ()
    ready = find_condition(first, "Ready")
    owners = {owner.uid for owner in replica.metadata.owner_references}
    nodes = [rank.node for rank in replica.spec.ranks]
    away = frozenset(name for name in nodes if not lister.is_ready(name))
    epoch = epoch_of(
        replica,
        reports,
        away=away,
        lost=now.lost,
        old=lister.status(ObjectKey("Replica", replica.name)),
        now=now.time,
    )
    is_over = epoch is not None and epoch.over != ""
    return ReplicaView(
        replica=replica,
        version=lister.spec_version(ObjectKey("Replica", replica.name)),
        is_owned=deployment is not None and (not owners or deployment.metadata.uid in owners),
        is_ready=lister.is_serving(replica) and not is_over,
        reported_ready=ready is not None and ready.status is ConditionStatus.TRUE and not is_over,
        is_stopped=_is_stopped(lister, replica, reports, now.lost),
        cannot_start=any(
            report is not None and is_true(report.conditions, UNSTARTABLE) for report in reports
        ),
        is_node_lost=not now.lost.isdisjoint(nodes),
        is_fetching=any(
            report is not None and _is_fetching(report.conditions) for report in reports
        ),
        has_files=all(
            report is not None and is_true(report.conditions, MODEL_PRESENT) for report in reports
        ),
        problem=_problem(replica, reports, away, epoch),
        epoch=epoch,
        away_nodes=away,
        leaving_ranks=tuple(_leaving_ranks(lister, replica, now)),
    )


def _is_fetching(conditions: Sequence[Condition]) -> bool:
    found = find_condition(conditions, MODEL_PRESENT)
    return found is not None and found.reason in FETCHING_REASONS


def _mark_given_up(view: ReplicaView, groups: Sequence[GroupView]) -> ReplicaView:
    """Mark the epoch of a replica as given up if all shapes of its group have failed."""
    formation = view.replica.spec.formation
    group = next((one for one in groups if formation and one.name == formation.group), None)
    if group is None:
        return view
    return replace(
        view, epoch=mark_given_up(view.replica, view.epoch, len(group_shapes(group.spec)))
    )


def _is_stopped(
    lister: Lister,
    replica: Replica,
    reports: Sequence[RankStatus | None],
    lost: AbstractSet[str],
) -> bool:
    """Return whether each rank is reported as stopped, or is on a lost node; `reports` are those of its epoch."""
    for number, rank in enumerate(replica.spec.ranks):
        report = reports[number] or lister.report(replica, rank.node, number)
        has_stopped = report is not None and is_true(report.conditions, "Stopped")
        if not has_stopped and rank.node not in lost:
            return False
    return True


def _leaving_ranks(lister: Lister, replica: Replica, now: Now) -> Iterator[LeavingRank]:
    """Yield the ranks of earlier epochs that may still run.

    An agent removes the report of such a rank once it has ended, or replaces it by that of the next rank. Without
    either, the rank counts until the agent must have killed it.
    """
    formation = replica.spec.formation
    if formation is None:
        return
    for one in replica.spec.leaving:
        is_in_time = now.time < formation.formed_at + timedelta(seconds=_end_s(one.memory_bytes))
        if is_in_time and not _has_ended(lister, replica, one):
            yield one


def _end_s(memory_bytes: int) -> float:
    """Return the seconds in which a rank of that size has ended for certain."""
    return _END_S + _END_S_PER_GIB * memory_bytes / 2**30


def _has_ended(lister: Lister, replica: Replica, left: LeavingRank) -> bool:
    """Return whether the reports of its agent say that a rank of an earlier epoch has ended."""
    pairs = zip(replica.spec.ranks, lister.ranks(replica), strict=True)
    for rank, report in pairs:
        if rank.node == left.node:
            # The next rank on the node is Starting until the earlier one has ended.
            ready = find_condition(report.conditions, "Ready") if report is not None else None
            return ready is not None and ready.reason != "Starting"
    return lister.report(replica, left.node, left.rank) is None


def _problem(
    replica: Replica,
    reports: Sequence[RankStatus | None],
    away: AbstractSet[str],
    epoch: Epoch | None,
) -> str:
    """Return the problem of the first rank that has one; empty if none has."""
    if epoch is not None and epoch.over:
        return f"{epoch.over}: {epoch.message}"
    found: list[tuple[int, str, Condition]] = []
    for number, rank in enumerate(replica.spec.ranks):
        if rank.node in away:
            return f"{rank.node} is NotReady: its agent does not renew its lease"
        report = reports[number]
        ready = find_condition(report.conditions, "Ready") if report is not None else None
        if ready is not None and ready.status is not ConditionStatus.TRUE:
            found.append((number, rank.node, ready))
    first = min(found, key=lambda one: order_of_reason(one[2].reason), default=None)
    if first is None:
        return ""
    number, node, ready = first
    is_one_of_many = len(replica.spec.ranks) > 1 and ready.message
    return f"rank {number} on {node}: {ready.message}" if is_one_of_many else ready.message


def _requeue_after_s(replicas: Sequence[ReplicaView], now: Now) -> float | None:
    """Return the seconds until the view changes though no key does."""
    delays_s = [now.requeue_after_s]
    for one in replicas:
        delays_s.append(epoch_requeue_after_s(one.replica, one.epoch))
        formation = one.replica.spec.formation
        if one.leaving_ranks and formation is not None:
            most_bytes = max(rank.memory_bytes for rank in one.leaving_ranks)
            age_s = (now.time - formation.formed_at) / timedelta(seconds=1)
            delays_s.append(max(0.0, _end_s(most_bytes) - age_s))
    return soonest_s(*delays_s)


def _sharding_values(
    deployment: ModelDeployment | None,
    replicas: Sequence[Replica],
    revisions: Sequence[Revision],
    rivals: Sequence[Rival],
) -> set[str]:
    """Return all values of spec.sharding that matter: of this deployment, its revisions, replicas and rivals."""
    found = {one.spec.content.sharding for one in revisions}
    found |= {rival.request.spec.sharding for rival in rivals}
    found |= {one.spec.formation.group for one in replicas if one.spec.formation is not None}
    return found if deployment is None else found | {deployment.spec.sharding}
