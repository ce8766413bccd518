"""Computes the status of every kind of object from what is observed, as conditions. Pure."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime

from reconciler.deployments.autoscaling.autoscaler import ScalingDecision
from reconciler.deployments.rollout.progress import RolloutProgress
from reconciler.deployments.views import DeploymentView, ReplicaView
from reconciler.groups.epochs import Epoch, next_attempt_text
from reconciler.groups.fabric_checks import FabricCheckView, fabric_condition, with_check
from reconciler.nodes.node_state import NodeContext, NodeState, flap_message
from reconciler.nodes.wired_limits import wired_limit_condition
from reconciler.placement.memory_proof import override_shortfall, proof_corrections
from reconciler.placement.refusals import CRASH_LOOPING, Unschedulable, is_crash_loop, summary_line
from schemas.deployment import ModelDeployment, ModelDeploymentStatus, NodeRefusal
from schemas.formation import Formation
from schemas.meta import (
    ENDED_BECAUSE,
    Condition,
    ConditionStatus,
    Status,
    find_condition,
    with_condition,
)
from schemas.node import Node, NodeLifeStatus
from schemas.pools import NodePool, NodePoolStatus
from schemas.replica import (
    MODEL_PRESENT,
    RankStatus,
    ReplicaStatus,
    order_of_reason,
)
from schemas.route import ModelRoute, ModelRouteStatus
from schemas.shardgroup import ShardGroup, ShardGroupStatus

# Start of the annotation `ENDED_BECAUSE` on a preempted replica.
_PREEMPTED = "Preempted: "


def condition(type_: str, reason: str, message: str = "", *, holds: bool) -> Condition:
    """Return a condition; `stamp_conditions` adds generation and time."""
    truth = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
    return Condition(type=type_, status=truth, reason=reason, message=message)


def stamp_conditions(
    old: Status | None, new: Sequence[Condition], *, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Return the conditions as they are written: a time changes only if the truth of its condition changes."""
    settled = old.conditions if old is not None else ()
    types = {c.type for c in new}
    settled = tuple(c for c in settled if c.type in types)
    for found in new:
        stamped = found.model_copy(
            update={"observed_generation": generation, "last_transition_time": now}
        )
        settled = with_condition(settled, stamped)
    return settled


def deployment_status(
    deployment: ModelDeployment,
    observed: DeploymentView,
    unschedulable: Unschedulable | None,
    progress: RolloutProgress,
    *,
    old: ModelDeploymentStatus | None,
    now: datetime,
) -> ModelDeploymentStatus:
    """Return the status of a deployment."""
    placed = [r for r in observed.replicas if r.is_owned and not r.is_deleting]
    ready = [r for r in placed if r.is_ready]
    conditions = [
        _available_condition(observed, ready, placed, unschedulable),
        _placed_condition(observed.desired_replicas, placed, unschedulable),
        progress.condition,
    ]
    if observed.scaling is not None:
        conditions.append(observed.scaling)
    if observed.unresolved is not None:
        conditions.append(observed.unresolved)
    if observed.preloaded is not None:
        conditions.append(observed.preloaded)
    preempted = _preempted_condition(observed, placed, old)
    if preempted is not None:
        conditions.append(preempted)
    generation = deployment.metadata.generation
    refusals = unschedulable.refusals if unschedulable is not None else ()
    concurrency, limit = _least_concurrency(placed)
    return ModelDeploymentStatus(
        observed_generation=generation,
        replicas=len(placed),
        desired_replicas=observed.desired_replicas,
        updated_replicas=progress.updated_replicas,
        ready_replicas=len(ready),
        concurrency=concurrency,
        concurrency_limit=limit,
        preload=observed.preload,
        revision=progress.revision,
        template=progress.template,
        stable_template=progress.stable_template,
        canary=progress.canary,
        progressed_at=progress.progressed_at,
        refusals=tuple(
            NodeRefusal(node=node, reason=why.reason, message=why.message) for node, why in refusals
        ),
        node_priorities={
            node.name: node.pool_priority
            for node in observed.nodes
            if node.pool_priority and any(node.name in replica.nodes for replica in placed)
        },
        conditions=stamp_conditions(old, conditions, generation=generation, now=now),
    )


def _least_concurrency(placed: Sequence[ReplicaView]) -> tuple[int, str]:
    """Return the requests at once of the replica that takes the fewest, and what limits them there."""
    if not placed:
        return 0, ""
    spec = min((one.replica.spec for one in placed), key=lambda spec: spec.concurrency)
    return spec.concurrency, spec.ranks[0].memory.concurrency_limit


def scaling_condition(decided: ScalingDecision) -> Condition:
    """Return the condition Scaling, which explains the autoscaler's decision."""
    truth = ConditionStatus.UNKNOWN if decided.reason == "DemandUnknown" else ConditionStatus.TRUE
    return Condition(type="Scaling", status=truth, reason=decided.reason, message=decided.message)


def resolved_condition(reason: str, message: str) -> Condition:
    """Return the condition ModelResolved of a deployment whose hub model has no commit yet."""
    return condition("ModelResolved", reason, message, holds=False)


def _available_condition(
    observed: DeploymentView,
    ready: Sequence[ReplicaView],
    placed: Sequence[ReplicaView],
    unschedulable: Unschedulable | None,
) -> Condition:
    desired, unresolved = observed.desired_replicas, observed.unresolved
    surplus = len(ready) - desired
    count = f"{min(len(ready), desired)} of {desired} replicas ready"
    if surplus > 0:  # during a rollout, or until the replicas of a scale-down have ended
        count = f"{count}, {surplus} more {'is' if surplus == 1 else 'are'} serving"
    if len(ready) >= desired:
        reason = "AllReplicasReady" if desired else "ScaledToZero"
        return condition("Available", reason, count, holds=True)
    if unresolved is not None and not observed.has_model:
        message = f"{count}; {unresolved.message}"
        return condition("Available", unresolved.reason, message, holds=False)
    failing = next((r for r in placed if r.problem and not r.is_ready), None)
    if unschedulable is not None and is_crash_loop(unschedulable):
        return condition(
            "Available", "CrashLooping", f"{count}; {summary_line(unschedulable)}", holds=False
        )
    if unschedulable is not None:
        return condition(
            "Available", "Unschedulable", f"{count}; {summary_line(unschedulable)}", holds=False
        )
    if failing is not None:
        where = failing.name if len(failing.nodes) > 1 else f"{failing.name} on {failing.node}"
        message = f"{count}; {where}: {failing.problem}"
        return condition("Available", "ReplicaNotReady", message, holds=False)
    return condition("Available", "ReplicasStarting", count, holds=False)


def _placed_condition(
    desired: int, placed: Sequence[ReplicaView], unschedulable: Unschedulable | None
) -> Condition:
    if unschedulable is not None and not is_crash_loop(unschedulable):
        return condition("Placed", "Unschedulable", summary_line(unschedulable), holds=False)
    if len(placed) < desired:
        message = f"{len(placed)} of {desired} replicas have a node"
        return condition("Placed", "Placing", message, holds=False)
    return condition("Placed", "AllPlaced", holds=True)


def _preempted_condition(
    observed: DeploymentView, placed: Sequence[ReplicaView], old: ModelDeploymentStatus | None
) -> Condition | None:
    """Return the condition Preempted: which replicas were preempted, until all have a node again."""
    before = find_condition(old.conditions, "Preempted") if old is not None else None
    notes = [r.replica.metadata.annotations.get(ENDED_BECAUSE, "") for r in observed.replicas]
    reasons = [note.removeprefix(_PREEMPTED) for note in notes if note.startswith(_PREEMPTED)]
    if reasons:
        return condition("Preempted", "HigherPriority", "; ".join(reasons), holds=True)
    if before is None:
        return None
    if before.status is ConditionStatus.TRUE and len(placed) < observed.desired_replicas:
        return before
    return condition("Preempted", "NotPreempted", holds=False)


def pool_status(
    pool: NodePool, members: Sequence[str], ready: set[str], *, old: Status | None, now: datetime
) -> NodePoolStatus:
    """Return the status of a pool."""
    alive = [name for name in members if name in ready]
    message = f"{len(alive)} of {len(members)} nodes ready"
    found = set(members)
    if missing := [name for name in pool.spec.nodes if name not in found]:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        message += f"; of spec.nodes these do not exist: {', '.join(missing[:5])}{more}"
    own = condition("Ready", "NodesReady" if alive else "NoNodes", message, holds=bool(alive))
    generation = pool.metadata.generation
    return NodePoolStatus(
        observed_generation=generation,
        nodes=len(members),
        ready_nodes=len(alive),
        conditions=stamp_conditions(old, (own,), generation=generation, now=now),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupContext:
    """The inputs for the status of a ShardGroup besides the group itself."""

    members: Sequence[str]
    """Nodes of the group."""
    known: AbstractSet[str]
    """All nodes that ever joined."""
    ready: AbstractSet[str]
    """Nodes that hold a lease."""
    replicas: Sequence[str] = ()
    """Replicas that run on the group."""
    fabric: FabricCheckView = field(default_factory=FabricCheckView)
    """Checks of its cables that the status does not hold yet."""


def group_status(
    group: ShardGroup, context: GroupContext, *, old: Status | None, now: datetime
) -> ShardGroupStatus:
    """Return the status of a group: ready if as many members are ready as a model is split over."""
    members, known, ready = context.members, context.known, context.ready
    alive = [name for name in members if name in ready]
    unknown = [name for name in members if name not in known]
    away = [name for name in members if name in known and name not in ready]
    size = group.spec.wanted_size
    # Missing members are named even if there are spares.
    notes = [f"no such node: {', '.join(unknown)}"] if unknown else []
    notes += [f"not ready: {', '.join(away)}"] if away else []
    if len(alive) >= size:
        own = condition("Ready", "MembersReady", "; ".join(notes), holds=True)
    else:
        notes.insert(0, f"{len(alive)} of {size} members ready")
        reason = "UnknownNode" if unknown else "MemberNotReady"
        own = condition("Ready", reason, "; ".join(notes), holds=False)
    checks = old.fabric_checks if isinstance(old, ShardGroupStatus) else ()
    if context.fabric.finished is not None:
        checks = with_check(checks, context.fabric.finished)
    fabric = fabric_condition(group, checks, context.fabric.waits_for)
    found = (own,) if fabric is None else (own, fabric)
    generation = group.metadata.generation
    return ShardGroupStatus(
        observed_generation=generation,
        members=len(members),
        ready_members=len(alive),
        replicas=tuple(context.replicas),
        fabric_checks=checks,
        conditions=stamp_conditions(old, found, generation=generation, now=now),
    )


def route_status(
    route: ModelRoute, deployments: set[str], *, old: Status | None, now: datetime
) -> ModelRouteStatus:
    """Return the status of a route: accepted if all deployments that it names exist."""
    named = dict.fromkeys(route.spec.deployments().values())
    missing = [name for name in named if name not in deployments]
    if missing:
        message = f"no such ModelDeployment: {', '.join(missing)}"
        own = condition("Accepted", "BackendNotFound", message, holds=False)
    else:
        own = condition("Accepted", "BackendsFound", holds=True)
    generation = route.metadata.generation
    return ModelRouteStatus(
        observed_generation=generation,
        conditions=stamp_conditions(old, (own,), generation=generation, now=now),
    )


# Ends of an engine whose cause may be too little memory.
_MEMORY_REASONS = frozenset({"ModelUnusable", "EngineEnded", "MemoryExceeded"})


def replica_status(
    view: ReplicaView,
    reports: Sequence[RankStatus | None],
    *,
    old: Status | None,
    now: datetime,
) -> ReplicaStatus:
    """Return the status of a replica; `reports` are the reports on its ranks in this epoch."""
    found = [_replica_ready(view, reports)]
    found += _model_present(view, reports)
    corrected = proof_corrections(view.replica, reports) if view.is_ready else ""
    if corrected:
        found.append(condition("ProofCorrected", "MeasuredMore", corrected, holds=True))
    formation = view.replica.spec.formation
    if formation is not None and view.epoch is not None:
        found += _epoch_conditions(formation, view.epoch)
    generation = view.replica.metadata.generation
    return ReplicaStatus(
        observed_generation=generation,
        fetches=tuple(
            one.fetch
            for one in reports
            if one is not None and one.fetch is not None and one.node not in view.away_nodes
        ),
        conditions=stamp_conditions(old, found, generation=generation, now=now),
    )


def _model_present(view: ReplicaView, reports: Sequence[RankStatus | None]) -> Iterator[Condition]:
    """Yield ModelPresent of a hub model: that of the first rank without its files, else true once all have them."""
    found = [
        (number, report.node, one)
        for number, report in enumerate(reports)
        if report is not None and (one := find_condition(report.conditions, MODEL_PRESENT))
    ]
    missing = [one for one in found if one[2].status is not ConditionStatus.TRUE]
    missing.sort(key=lambda one: order_of_reason(one[2].reason))
    if not missing and len(found) < len(reports):
        return
    for number, node, one in (missing or found)[:1]:
        is_one_of_many = len(view.replica.spec.ranks) > 1 and missing
        head = f"rank {number} on {node}: " if is_one_of_many and one.message else ""
        yield one.model_copy(update={"message": f"{head}{one.message}"})


def _replica_ready(view: ReplicaView, reports: Sequence[RankStatus | None]) -> Condition:
    """Return the condition Ready: Serving, or the reason of the first rank that is not ready."""
    if view.is_ready:
        return condition("Ready", "Serving", holds=True)
    if view.epoch is not None and view.epoch.over:
        return condition("Ready", view.epoch.over, view.epoch.message, holds=False)
    ranks = view.replica.spec.ranks
    prefix = [f"rank {number} on {rank.node}: " for number, rank in enumerate(ranks)]
    # The last report of an agent that is away is about the time before.
    away = [
        rank.node
        for rank, report in zip(ranks, reports, strict=True)
        if report is not None and rank.node in view.away_nodes
    ]
    if away:
        return _agent_away(away)
    ready = [
        (number, found)
        for number, report in enumerate(reports)
        if report is not None and (found := find_condition(report.conditions, "Ready"))
    ]
    ready.sort(key=lambda one: order_of_reason(one[1].reason))
    for number, found in ready:
        if found.status is not ConditionStatus.TRUE:
            head = prefix[number] if len(ranks) > 1 and found.message else ""
            shortfall = override_shortfall(ranks[number].memory, len(ranks))
            advice = f". {shortfall}" if shortfall and found.reason in _MEMORY_REASONS else ""
            return condition("Ready", found.reason, f"{head}{found.message}{advice}", holds=False)
    if reports[0] is not None and ready:
        return _agent_away([view.node])
    silent = [rank.node for rank, one in zip(ranks, reports, strict=True) if one is None]
    agent = "its agent" if len(ranks) == 1 else f"the agent on {', '.join(silent)}"
    message = f"{agent} has not reported yet"
    return condition("Ready", "WaitingForAgent", message, holds=False)


def _agent_away(nodes: Sequence[str]) -> Condition:
    message = f"its agent on {', '.join(nodes)} is away; the engine may still serve"
    return condition("Ready", "AgentAway", message, holds=False)


def _epoch_conditions(formation: Formation, epoch: Epoch) -> Iterator[Condition]:
    """Yield the conditions of an epoch, which later reconciles read back."""
    number = f"epoch {formation.epoch}"
    if epoch.over:
        yield condition("EpochOver", epoch.over, f"{number}: {epoch.message}", holds=True)
    else:
        yield condition("EpochOver", "GoesOn", number, holds=False)
    yield condition("Steady", "Served" if epoch.is_steady else "New", number, holds=epoch.is_steady)
    if epoch.is_given_up:
        message = f"{epoch.message}. {next_attempt_text(formation, epoch)}"
        yield condition(CRASH_LOOPING, "TriedEverything", message, holds=True)
    else:
        yield condition(CRASH_LOOPING, "MayGoOn", holds=False)


def node_life_status(
    node: Node,
    state: NodeState,
    context: NodeContext,
    *,
    is_ready: bool,
    old: Status | None,
    now: datetime,
) -> NodeLifeStatus:
    """Return the reconciler's document about a node; equal to `old` if nothing changed.

    Its condition Ready records since when; whether a node is ready is decided by its lease.
    """
    conditions: tuple[Condition, ...] = (
        _node_ready(is_ready=is_ready),
        _flapping(context),
        _version_skew(state),
        _held(state, "DuplicateHardware", "DuplicateHardware", other="SameHardware"),
        _held(state, "Withheld", "NodeWithheld", other="PoolPolicy"),
    )
    limit = None if node.status is None else wired_limit_condition(node, node.status, context.pools)
    if limit is not None:
        conditions = (*conditions, limit)
    generation = node.metadata.generation
    return NodeLifeStatus(
        observed_generation=generation,
        conditions=stamp_conditions(old, conditions, generation=generation, now=now),
    )


def _node_ready(*, is_ready: bool) -> Condition:
    if is_ready:
        return condition("Ready", "LeaseHeld", holds=True)
    return condition("Ready", "LeaseLost", "its agent does not renew its lease", holds=False)


def _flapping(context: NodeContext) -> Condition:
    if context.flapping is None:
        return condition("Flapping", "Steady", holds=False)
    return condition("Flapping", "CameBackTooOften", flap_message(context.flapping), holds=True)


def _version_skew(state: NodeState) -> Condition:
    if not state.skew:
        return condition("VersionSkew", "VersionsAgree", holds=False)
    reason = "AgentVersion" if state.hold("VersionSkew") is not None else "MlxLmVersion"
    return condition("VersionSkew", reason, state.skew, holds=True)


def _held(state: NodeState, type_: str, reason: str, *, other: str) -> Condition:
    hold = state.hold(reason)
    if hold is None:
        return condition(type_, "NothingFound", holds=False)
    return condition(type_, other, hold.message, holds=True)
