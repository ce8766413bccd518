"""Observes one deployment: makes the planner's frozen input from the caches. Changes nothing."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from machinery.control_loop import soonest_s
from reconciler.groups.epochs import Epoch, epoch_of, epoch_requeue_after_s, mark_given_up
from reconciler.groups.group_view import GroupView, group_shapes
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import Now
from reconciler.placement.inputs import NodeView, Rival, request_for
from reconciler.placement.swap import IdleReplica
from reconciler.placement.table import NodeTable
from schemas.deployment import CanaryStatus, HubReference, ModelDeployment, Revision
from schemas.meta import Condition, ConditionStatus, ObjectKey, find_condition
from schemas.node import matches
from schemas.replica import (
    FETCHING_REASONS,
    MODEL_PRESENT,
    UNSTARTABLE,
    FetchStatus,
    LeavingRank,
    RankStatus,
    Replica,
    order_of_reason,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica of the deployment."""

    replica: Replica
    version: int
    """mod_revision of the replica that was read."""
    is_owned: bool = True
    """True if this deployment owns it, and not an earlier one of the same name."""
    is_ready: bool = False
    """True if it has an endpoint, which lives as long as its node's lease."""
    reported_ready: bool = False
    """True if the last report of its agent says Ready. It stays so while the agent is away: the engine may serve."""
    is_stopped: bool = False
    """True if every agent reports that its rank has stopped, or is lost."""
    cannot_start: bool = False
    """True if an agent failed several times in a row to start its engine."""
    is_node_lost: bool = False
    """True if one of its nodes has been away for longer than the grace period."""
    problem: str = ""
    """Problem that an agent reports, in one sentence."""
    epoch: Epoch | None = None
    """State of its current epoch; None for a replica with one rank."""
    away_nodes: frozenset[str] = frozenset()
    """Its nodes whose lease has expired."""
    is_asleep: bool = False
    """True if its nodes that are away sleep."""
    is_fetching: bool = False
    """True if an agent fetches its model, and bytes arrive."""
    fetch: FetchStatus | None = None
    """The fetch of its model that takes longest; None if none runs."""
    loads_since: datetime | None = None
    """Since when its engine starts and loads: its creation, or the end of the fetch."""
    has_files: bool = False
    """True if each Mac reports that it has the files of its rank. Not reported while an engine runs."""
    leaving_ranks: tuple[LeavingRank, ...] = ()
    """Ranks of its earlier epochs that may still run."""

    @property
    def awaits_files(self) -> bool:
        """Return whether its ranks must not start before all Macs have their files."""
        formation = self.replica.spec.formation
        return formation is not None and formation.awaits_files

    @property
    def name(self) -> str:
        return self.replica.metadata.name

    @property
    def node(self) -> str:
        """Return the node of rank 0, which serves HTTP."""
        return self.replica.spec.ranks[0].node

    @property
    def nodes(self) -> frozenset[str]:
        """Return the nodes of all its ranks."""
        return frozenset(rank.node for rank in self.replica.spec.ranks)

    @property
    def is_idle(self) -> bool:
        """Return whether it serves no requests, by its endpoint and by its agent's last report."""
        return not self.is_ready and not self.reported_ready

    @property
    def ordinal(self) -> int:
        """Return the number at the end of its name."""
        tail = self.name.rpartition("-")[2]
        return int(tail) if tail.isdigit() else 0

    @property
    def is_deleting(self) -> bool:
        return self.replica.metadata.deletion_timestamp is not None

    @property
    def is_orphan(self) -> bool:
        """Return whether it has no owner: its deployment was deleted with --cascade=orphan."""
        return not self.replica.metadata.owner_references


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadView:
    """A preload in the store."""

    node: str
    source: HubReference
    """The commit that the node fetches, or has."""
    version: int
    """mod_revision of the preload that was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentView:
    """Everything that the plan for one deployment depends on."""

    name: str
    deployment: ModelDeployment | None
    """None if it is gone and only replicas of it are left."""
    replicas: tuple[ReplicaView, ...] = ()
    table: NodeTable = field(default_factory=lambda: NodeTable(()))
    """All nodes."""
    apart_from: frozenset[str] = frozenset()
    """Deployments whose replicas must not share a node with its own: it or they set antiAffinity."""
    rivals: tuple[Rival, ...] = ()
    """Missing replicas that are placed before: of deployments with a higher priority, the highest first, and then of
    those with the same for which requests wait at zero, and wait longer."""
    waits_at_zero: bool = False
    """True if requests wait for it at gateways, and it has no replica."""
    idle: Mapping[str, IdleReplica] = field(default_factory=dict)
    """Idle replicas of all deployments that give way for models at zero, by name; empty unless one waits."""
    load_times: Mapping[str, float] = field(default_factory=dict)
    """Seconds in which its model last loaded, by node."""
    autoscaled_replicas: int | None = None
    """Number of replicas that the autoscaler asks for; None without an autoscaler."""
    scaling: Condition | None = None
    """Condition that explains the autoscaler's number."""
    revisions: tuple[Revision, ...] = ()
    """The stored revisions of the deployment."""
    stable_template: str = ""
    """Hash of the version whose rollout completed last; empty if none did."""
    canary: CanaryStatus | None = None
    """State of the canary analysis."""
    groups: tuple[GroupView, ...] = ()
    """ShardGroups that it names or that its replicas run on; all of them for sharding: Auto."""
    requeue_after_s: float | None = None
    """Seconds until a grace period or a wait ends; None if only changes matter."""
    preloads: tuple[PreloadView, ...] = ()
    """Preloads of its model in the store, by node."""
    unresolved: Condition | None = None
    """Condition that says why the commit of the hub model is not known; None if it is."""
    awaits_reports: bool = False
    """True if ready nodes have not inspected the model yet, so that it is too early to place."""

    @property
    def has_model(self) -> bool:
        """Return whether it is known what replicas run: not before the first commit of a hub model is resolved."""
        return self.deployment is None or self.deployment.spec.model.folder != ""

    def preparing_nodes(self) -> tuple[NodeView, ...]:
        """Return the nodes with a replica that fetch the files of another version before it is replaced."""
        folders = {preload.node: preload.source.folder for preload in self.preloads}
        busy = {
            name for replica in self.replicas if not replica.is_deleting for name in replica.nodes
        }
        return tuple(
            node
            for node in self.table.named(sorted(busy & folders.keys()))
            if node.missing_bytes(folders[node.name]) and not node.fetch_problem(folders[node.name])
        )

    @property
    def desired_replicas(self) -> int:
        """Return how many replicas there should be."""
        if self.deployment is None or self.is_ending:
            return 0
        if self.autoscaled_replicas is not None:
            return self.autoscaled_replicas
        return self.deployment.spec.replicas

    @property
    def is_ending(self) -> bool:
        """Return whether the deployment is being deleted."""
        return (
            self.deployment is not None and self.deployment.metadata.deletion_timestamp is not None
        )


# An agent kills a rank that has not ended after this long (nodeagent), plus as long again for its report to arrive.
_END_S = 30.0
_END_S_PER_GIB = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderFacts:
    """Facts about a deployment that only the leader's memory holds; commands that read the store have none."""

    autoscaled_replicas: int | None = None
    """Number of replicas that the autoscaler asks for; None without an autoscaler."""
    scaling: Condition | None = None
    unresolved: Condition | None = None
    awaits_reports: bool = False
    waiting_at_zero: tuple[str, ...] = ()
    """Deployments for which requests wait and that have no replica, the longest wait first."""
    idle: Mapping[str, IdleReplica] = field(default_factory=dict)
    """Idle replicas that give way for those, by name."""
    load_times: Mapping[str, float] = field(default_factory=dict)
    """Seconds in which the deployment's model last loaded, by node."""
    requeue_after_s: float | None = None
    """Seconds until one of the leader's waits ends; None if only changes matter."""


def observe(
    lister: Lister, name: str, now: Now, *, table: NodeTable, facts: LeaderFacts | None = None
) -> DeploymentView:
    """Return everything that the plan for a deployment depends on."""
    facts = facts or LeaderFacts()
    deployment, own = lister.deployment(name), lister.replicas_of(name)
    status = lister.deployment_status(name)
    revisions = tuple(lister.revisions_of(name))
    waiting = facts.waiting_at_zero
    rivals = _rivals(lister, deployment, now.lost, waiting) if deployment is not None else ()
    shardings = {revision.spec.content.sharding for revision in revisions}
    shardings |= {rival.request.spec.sharding for rival in rivals}
    shardings |= {r.spec.formation.group for r in own if r.spec.formation is not None}
    if deployment is not None:
        shardings.add(deployment.spec.sharding)
    groups = lister.group_views(shardings)
    replicas = tuple(_replica_view(lister, replica, deployment, groups, now) for replica in own)
    autoscaled = facts.autoscaled_replicas
    if autoscaled is None and deployment is not None:
        autoscaled = lister.desired_replicas(deployment)
    return DeploymentView(
        name=name,
        deployment=deployment,
        replicas=replicas,
        table=table,
        apart_from=_apart_from(lister, deployment) if deployment is not None else frozenset(),
        rivals=rivals,
        waits_at_zero=name in waiting,
        idle=facts.idle,
        load_times=facts.load_times,
        autoscaled_replicas=autoscaled,
        scaling=facts.scaling,
        revisions=revisions,
        preloads=tuple(
            PreloadView(
                node=preload.node,
                source=preload.source,
                version=lister.preload_version(preload.node, name),
            )
            for preload in lister.preloads_of(name)
        ),
        stable_template=status.stable_template if status is not None else "",
        canary=status.canary if status is not None else None,
        groups=groups,
        unresolved=facts.unresolved,
        awaits_reports=facts.awaits_reports,
        requeue_after_s=soonest_s(facts.requeue_after_s, *_changes_s(replicas, now)),
    )


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
    lister: Lister, deployment: ModelDeployment, lost: AbstractSet[str], waiting: Sequence[str]
) -> tuple[Rival, ...]:
    """Return the missing replicas that are placed before those of the deployment.

    They are of deployments with a higher priority, the highest first, and then of those with the same that wait at zero
    for longer.
    A replica on a lost node is missing, too: it moves to the room that it preempted, which must not be taken before.
    """
    above = lister.deployments_above(deployment.spec.priority)
    # A draining replica does not count: another one replaces it, unless it is surplus.
    active = Counter(
        replica.spec.deployment
        for rival in above
        for replica in lister.replicas_of(rival.name)
        if replica.metadata.deletion_timestamp is None
        and not any(rank.node in lost for rank in replica.spec.ranks)
    )
    rivals = []
    for rival in sorted(above, key=lambda rival: (-rival.spec.priority, rival.name)):
        missing = lister.desired_replicas(rival) - active[rival.name]
        if missing > 0 and rival.metadata.deletion_timestamp is None:
            request = request_for(rival, apart_from=_apart_from(lister, rival))
            waits = rival.name in waiting
            rivals.append(Rival(request=request, missing=missing, waits_at_zero=waits))
    at = waiting.index(deployment.name) if deployment.name in waiting else len(waiting)
    for name in waiting[:at]:
        earlier = lister.deployment(name)
        if earlier is not None and earlier.spec.priority == deployment.spec.priority:
            request = request_for(earlier, apart_from=_apart_from(lister, earlier))
            rivals.append(Rival(request=request, missing=1, waits_at_zero=True))
    return tuple(rivals)


def _replica_view(
    lister: Lister,
    replica: Replica,
    deployment: ModelDeployment | None,
    groups: Sequence[GroupView],
    now: Now,
) -> ReplicaView:
    """Return a replica with what its agents report, and what their leases say."""
    reports, formation = lister.ranks(replica), replica.spec.formation
    owners = {owner.uid for owner in replica.metadata.owner_references}
    nodes = [rank.node for rank in replica.spec.ranks]
    away = frozenset(name for name in nodes if not lister.is_ready(name))
    epoch = None
    if formation is not None:
        old = lister.status(ObjectKey("Replica", replica.name))
        epoch = epoch_of(replica, reports, away=away, lost=now.lost, old=old, now=now.time)
        group = next((group for group in groups if group.name == formation.group), None)
        if group is not None:  # given up if all shapes of the group have failed
            epoch = mark_given_up(replica, epoch, len(group_shapes(group.spec)))
    is_over = epoch is not None and epoch.over != ""
    true = [_true_types(report) for report in reports]
    is_stopped = True
    for number, rank in enumerate(replica.spec.ranks):
        types = true[number]
        if reports[number] is None:  # the report may be one of an earlier epoch
            types = _true_types(lister.report(replica, rank.node, number))
        is_stopped = is_stopped and ("Stopped" in types or rank.node in now.lost)
    serves = all("Ready" in types for types in true)
    is_ready = lister.is_serving(replica) and not is_over
    return ReplicaView(
        replica=replica,
        version=lister.spec_version(ObjectKey("Replica", replica.name)),
        is_owned=deployment is not None and (not owners or deployment.metadata.uid in owners),
        is_ready=is_ready,
        reported_ready="Ready" in true[0] and not is_over,
        is_stopped=is_stopped,
        cannot_start=any(UNSTARTABLE in types for types in true),
        is_node_lost=not now.lost.isdisjoint(nodes),
        is_fetching=any(
            condition.type == MODEL_PRESENT and condition.reason in FETCHING_REASONS
            for report in reports
            if report is not None
            for condition in report.conditions
        ),
        fetch=max(
            (report.fetch for report in reports if report is not None and report.fetch is not None),
            key=lambda fetch: fetch.eta_seconds or 0,
            default=None,
        ),
        loads_since=None if is_ready else _loads_since(lister, replica),
        has_files=all(MODEL_PRESENT in types for types in true),
        problem=""
        if serves and not away and not is_over
        else _problem(replica, reports, away, epoch, now.asleep),
        epoch=epoch,
        away_nodes=away,
        is_asleep=bool(away) and away <= now.asleep,
        leaving_ranks=tuple(_leaving_ranks(lister, replica, reports, now)) if formation else (),
    )


def _loads_since(lister: Lister, replica: Replica) -> datetime | None:
    """Return since when the replica's engine starts: the end of the fetch, by its status, or its creation."""
    status = lister.status(ObjectKey("Replica", replica.name))
    present = None if status is None else find_condition(status.conditions, MODEL_PRESENT)
    if present is not None and present.status is ConditionStatus.TRUE:
        return present.last_transition_time
    return replica.metadata.creation_timestamp


def _true_types(report: RankStatus | None) -> set[str]:
    """Return the types of the conditions that are true; a set, because a plan looks at each replica."""
    if report is None:
        return set()
    return {c.type for c in report.conditions if c.status is ConditionStatus.TRUE}


def _leaving_ranks(
    lister: Lister, replica: Replica, reports: Sequence[RankStatus | None], now: Now
) -> Iterator[LeavingRank]:
    """Yield the ranks of earlier epochs that may still run.

    An agent removes the report of such a rank once it has ended, or replaces it by that of the next rank. Without
    either, the rank counts until the agent must have killed it.
    """
    formation = replica.spec.formation
    if formation is None:
        return
    next_reports = {
        rank.node: report for rank, report in zip(replica.spec.ranks, reports, strict=True)
    }
    for rank in replica.spec.leaving:
        if now.time >= formation.formed_at + timedelta(seconds=_end_s(rank.memory_bytes)):
            continue
        if rank.node in next_reports:
            # The next rank on the node is Starting until the earlier one has ended.
            report = next_reports[rank.node]
            ready = find_condition(report.conditions, "Ready") if report is not None else None
            has_ended = ready is not None and ready.reason != "Starting"
        else:
            has_ended = lister.report(replica, rank.node, rank.rank) is None
        if not has_ended:
            yield rank


def _end_s(memory_bytes: int) -> float:
    """Return the seconds in which a rank of that size has ended for certain."""
    return _END_S + _END_S_PER_GIB * memory_bytes / 2**30


def _problem(
    replica: Replica,
    reports: Sequence[RankStatus | None],
    away: AbstractSet[str],
    epoch: Epoch | None,
    asleep: AbstractSet[str],
) -> str:
    """Return the problem of the first rank that has one; empty if none has."""
    if epoch is not None and epoch.over:
        return f"{epoch.over}: {epoch.message}"
    unready: list[tuple[int, str, Condition]] = []
    for number, rank in enumerate(replica.spec.ranks):
        if rank.node in asleep:
            return f"{rank.node} sleeps; a request wakes it"
        if rank.node in away:
            return f"{rank.node} is NotReady: its agent does not renew its lease"
        report = reports[number]
        ready = find_condition(report.conditions, "Ready") if report is not None else None
        if ready is not None and ready.status is not ConditionStatus.TRUE:
            unready.append((number, rank.node, ready))
    first = min(unready, key=lambda rank: order_of_reason(rank[2].reason), default=None)
    if first is None:
        return ""
    number, node, ready = first
    is_one_of_many = len(replica.spec.ranks) > 1 and ready.message
    return f"rank {number} on {node}: {ready.message}" if is_one_of_many else ready.message


def _changes_s(replicas: Sequence[ReplicaView], now: Now) -> Iterator[float | None]:
    """Yield the seconds until views of replicas with several ranks change though no key does."""
    for view in replicas:
        formation = view.replica.spec.formation
        if formation is None:
            continue
        yield epoch_requeue_after_s(view.replica, view.epoch)
        if view.leaving_ranks:
            most_bytes = max(rank.memory_bytes for rank in view.leaving_ranks)
            age_s = (now.time - formation.formed_at) / timedelta(seconds=1)
            yield max(0.0, _end_s(most_bytes) - age_s)
