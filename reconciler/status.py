"""What is true of each object, as conditions computed from what is seen. Pure."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime

from reconciler.autoscaling.decision import Decision
from reconciler.observe import Observed, ReplicaView
from reconciler.placement.refusals import Unschedulable, is_crash_loop, one_line
from reconciler.rollout.progress import Progress
from schemas.deployment import (
    ModelDeployment,
    ModelDeploymentStatus,
    NodeRefusal,
)
from schemas.meta import (
    ENDED_BECAUSE,
    Condition,
    Status,
    Truth,
    find_condition,
    with_condition,
)
from schemas.pools import NodePool, NodePoolStatus
from schemas.route import ModelRoute, ModelRouteStatus
from schemas.shardgroup import ShardGroup, ShardGroupStatus

# As `ENDED_BECAUSE` begins on a replica that was displaced.
_PREEMPTED = "Preempted: "


def condition(type_: str, reason: str, message: str = "", *, holds: bool) -> Condition:
    """Return a condition; generation and time are put in by settle()."""
    truth = Truth.TRUE if holds else Truth.FALSE
    return Condition(type=type_, status=truth, reason=reason, message=message)


def settle(
    old: Status | None, new: Sequence[Condition], *, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Return the conditions as they are written: times move only where the truth moved."""
    settled = old.conditions if old is not None else ()
    wanted = {c.type for c in new}
    settled = tuple(c for c in settled if c.type in wanted)
    for found in new:
        stamped = found.model_copy(
            update={"observed_generation": generation, "last_transition_time": now}
        )
        settled = with_condition(settled, stamped)
    return settled


def of_deployment(
    deployment: ModelDeployment,
    seen: Observed,
    unschedulable: Unschedulable | None,
    progress: Progress,
    *,
    old: ModelDeploymentStatus | None,
    now: datetime,
) -> ModelDeploymentStatus:
    """Return the status of a deployment."""
    placed = [r for r in seen.replicas if r.is_ours and not r.is_deleting]
    ready = [r for r in placed if r.is_ready]
    conditions = [
        _available(seen.wanted, ready, placed, unschedulable),
        _placed(seen.wanted, placed, unschedulable),
        progress.condition,
    ]
    if seen.scaling is not None:
        conditions.append(seen.scaling)
    preempted = _preempted(seen, placed, old)
    if preempted is not None:
        conditions.append(preempted)
    generation = deployment.metadata.generation
    refusals = unschedulable.refusals if unschedulable is not None else ()
    return ModelDeploymentStatus(
        observed_generation=generation,
        replicas=len(placed),
        desired_replicas=seen.wanted,
        updated_replicas=progress.updated_replicas,
        ready_replicas=len(ready),
        revision=progress.revision,
        template=progress.template,
        stable_template=progress.stable_template,
        canary=progress.canary,
        progressed_at=progress.progressed_at,
        refusals=tuple(
            NodeRefusal(node=node, reason=why.reason, message=why.message) for node, why in refusals
        ),
        conditions=settle(old, conditions, generation=generation, now=now),
    )


def of_scaling(decided: Decision) -> Condition:
    """Return why autoscaling wants as many replicas as it does."""
    truth = Truth.UNKNOWN if decided.reason == "DemandUnknown" else Truth.TRUE
    return Condition(type="Scaling", status=truth, reason=decided.reason, message=decided.message)


def _available(
    wanted: int,
    ready: Sequence[ReplicaView],
    placed: Sequence[ReplicaView],
    unschedulable: Unschedulable | None,
) -> Condition:
    count = f"{len(ready)} of {wanted} replicas ready"
    if len(ready) >= wanted:
        reason = "AllReplicasReady" if wanted else "ScaledToZero"
        return condition("Available", reason, count, holds=True)
    troubled = next((r for r in placed if r.trouble and not r.is_ready), None)
    if unschedulable is not None and is_crash_loop(unschedulable):
        return condition(
            "Available", "CrashLooping", f"{count}; {one_line(unschedulable)}", holds=False
        )
    if unschedulable is not None:
        return condition(
            "Available", "Unschedulable", f"{count}; {one_line(unschedulable)}", holds=False
        )
    if troubled is not None:
        message = f"{count}; {troubled.name} on {troubled.node}: {troubled.trouble}"
        return condition("Available", "ReplicaNotReady", message, holds=False)
    return condition("Available", "ReplicasStarting", count, holds=False)


def _placed(
    wanted: int, placed: Sequence[ReplicaView], unschedulable: Unschedulable | None
) -> Condition:
    if unschedulable is not None and not is_crash_loop(unschedulable):
        return condition("Placed", "Unschedulable", one_line(unschedulable), holds=False)
    if len(placed) < wanted:
        message = f"{len(placed)} of {wanted} replicas have a node"
        return condition("Placed", "Placing", message, holds=False)
    return condition("Placed", "AllPlaced", holds=True)


def _preempted(
    seen: Observed, placed: Sequence[ReplicaView], old: ModelDeploymentStatus | None
) -> Condition | None:
    """Return who made way for others, until all have a node again."""
    before = find_condition(old.conditions, "Preempted") if old is not None else None
    notes = [r.replica.metadata.annotations.get(ENDED_BECAUSE, "") for r in seen.replicas]
    told = [note.removeprefix(_PREEMPTED) for note in notes if note.startswith(_PREEMPTED)]
    if told:
        return condition("Preempted", "HigherPriority", "; ".join(told), holds=True)
    if before is None:
        return None
    if before.status is Truth.TRUE and len(placed) < seen.wanted:
        return before
    return condition("Preempted", "NotPreempted", holds=False)


def of_pool(
    pool: NodePool, members: Sequence[str], ready: set[str], *, old: Status | None, now: datetime
) -> NodePoolStatus:
    """Return the status of a pool."""
    alive = [name for name in members if name in ready]
    message = f"{len(alive)} of {len(members)} nodes ready"
    own = condition("Ready", "NodesReady" if alive else "NoNodes", message, holds=bool(alive))
    generation = pool.metadata.generation
    return NodePoolStatus(
        observed_generation=generation,
        nodes=len(members),
        ready_nodes=len(alive),
        conditions=settle(old, (own,), generation=generation, now=now),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSurroundings:
    """What beside itself decides about a ShardGroup."""

    members: Sequence[str]
    """The nodes that belong to it."""
    known: AbstractSet[str]
    """All nodes that ever joined."""
    ready: AbstractSet[str]
    """Those whose agents are alive."""
    replicas: Sequence[str] = ()
    """What runs on it."""


def of_group(
    group: ShardGroup, around: GroupSurroundings, *, old: Status | None, now: datetime
) -> ShardGroupStatus:
    """Return the status of a group: ready if as many of its members are as a model is split over."""
    members, known, ready = around.members, around.known, around.ready
    alive = [name for name in members if name in ready]
    unknown = [name for name in members if name not in known]
    away = [name for name in members if name in known and name not in ready]
    size = group.spec.wanted_size
    # Whoever is missing is told, also where there are spares for it.
    notes = [f"no such node: {', '.join(unknown)}"] if unknown else []
    notes += [f"not ready: {', '.join(away)}"] if away else []
    if len(alive) >= size:
        own = condition("Ready", "MembersReady", "; ".join(notes), holds=True)
    else:
        notes.insert(0, f"{len(alive)} of {size} members ready")
        reason = "UnknownNode" if unknown else "MemberNotReady"
        own = condition("Ready", reason, "; ".join(notes), holds=False)
    generation = group.metadata.generation
    return ShardGroupStatus(
        observed_generation=generation,
        members=len(members),
        ready_members=len(alive),
        replicas=tuple(around.replicas),
        conditions=settle(old, (own,), generation=generation, now=now),
    )


def of_route(
    route: ModelRoute, deployments: set[str], *, old: Status | None, now: datetime
) -> ModelRouteStatus:
    """Return the status of a route: accepted if every deployment that it names exists."""
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
        conditions=settle(old, (own,), generation=generation, now=now),
    )
