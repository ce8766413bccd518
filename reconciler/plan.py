"""The reconciler's decision about one deployment: from what is seen to what to do. Pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from reconciler.actions import (
    Action,
    CreateReplica,
    DeleteReplica,
    MoveReplica,
    RemoveDeployment,
    RemoveReplica,
)
from reconciler.observe import NodeView, Observed, ReplicaView
from reconciler.placement.place import Placed, Unschedulable, place, with_replica
from schemas.deployment import ModelDeployment, served_names
from schemas.replica import replica_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, and why something could not be placed."""

    actions: tuple[Action, ...] = ()
    unschedulable: Unschedulable | None = None
    requeue_after_s: float | None = None


def plan(seen: Observed) -> Plan:
    """Return the actions that bring the deployment's replicas nearer to what is wanted.

    Every action can be done or left undone by itself: planning again from where it stopped goes on.
    """
    wanted = wanted_names(seen.deployment)
    gone = [RemoveReplica(name=r.name, version=r.version) for r in seen.replicas if is_gone(r)]
    kept = [r for r in seen.replicas if not is_gone(r)]
    retired = _retire(seen.deployment, kept, wanted)
    placed, unschedulable = _place(seen, wanted)
    finished: list[Action] = []
    if seen.deployment is not None and _is_deleting(seen.deployment) and not seen.replicas:
        version = int(seen.deployment.metadata.resource_version or 0)
        finished = [RemoveDeployment(name=seen.name, version=version)]
    return Plan(
        actions=(*gone, *retired, *placed, *finished),
        unschedulable=unschedulable,
        requeue_after_s=seen.next_look_s,
    )


def wanted_names(deployment: ModelDeployment | None) -> tuple[str, ...]:
    """Return the names of the replicas that should be there."""
    if deployment is None or _is_deleting(deployment):
        return ()
    name = deployment.metadata.name
    return tuple(replica_name(name, ordinal) for ordinal in range(deployment.spec.replicas))


def template(deployment: ModelDeployment) -> str:
    """Return a hash of everything an engine is started with: when it moves, replicas must roll."""
    spec = deployment.spec
    parts = [spec.model.path, *served_names(deployment), spec.context_length, spec.concurrency]
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:12]


def is_gone(replica: ReplicaView) -> bool:
    """Return whether nothing of a deleted replica runs any more, as far as anybody can know."""
    return replica.is_deleting and (replica.is_stopped or replica.is_node_lost)


def _is_deleting(deployment: ModelDeployment) -> bool:
    return deployment.metadata.deletion_timestamp is not None


def _retire(
    deployment: ModelDeployment | None, kept: Sequence[ReplicaView], wanted: Sequence[str]
) -> list[DeleteReplica]:
    """Return the replicas to drain: surplus ones now, outdated ones a step at a time."""
    active = [r for r in kept if not r.is_deleting]
    surplus = [r for r in active if r.name not in wanted or not r.is_ours]
    retired = [
        DeleteReplica(
            name=r.name, because="ScaledDown" if r.is_ours else "OwnerReplaced", version=r.version
        )
        for r in surplus
    ]
    if deployment is None:
        return retired
    current = template(deployment)
    outdated = [
        r
        for r in active
        # One on a lost node is moved, which renews it.
        if r not in surplus and not r.is_node_lost and r.replica.spec.template != current
    ]
    # Those that serve go one at a time, and only while all the others serve.
    idle = [r for r in outdated if not r.is_ready]
    serving = [r for r in outdated if r.is_ready]
    others_serve = len(active) == len(wanted) and all(r.is_ready for r in active)
    chosen = idle or (serving[:1] if others_serve else [])
    return [
        *retired,
        *(DeleteReplica(name=r.name, because="Outdated", version=r.version) for r in chosen),
    ]


def _place(seen: Observed, wanted: Sequence[str]) -> tuple[list[Action], Unschedulable | None]:
    """Return placements for missing replicas and moves for those on lost nodes."""
    if seen.deployment is None or seen.awaits_reports:
        return [], None
    nodes = {node.name: node for node in seen.nodes}
    actions: list[Action] = []
    by_name = {r.name: r for r in seen.replicas}
    for name in wanted:
        there = by_name.get(name)
        if there is not None and not _can_move(there):
            continue
        verdict = place(seen.deployment, _sorted(nodes))
        if isinstance(verdict, Unschedulable):
            return actions, verdict
        actions.append(_assign(name, there, verdict))
        chosen = nodes[verdict.node]
        nodes[verdict.node] = with_replica(chosen, seen.deployment, verdict.memory)
    return actions, None


def _can_move(replica: ReplicaView) -> bool:
    return replica.is_node_lost and replica.is_ours and not replica.is_deleting


def _assign(name: str, lost: ReplicaView | None, to: Placed) -> Action:
    if lost is None:
        return CreateReplica(name=name, node=to.node, memory=to.memory)
    return MoveReplica(name=name, node=to.node, memory=to.memory, version=lost.version)


def _sorted(nodes: dict[str, NodeView]) -> list[NodeView]:
    return sorted(nodes.values(), key=lambda node: node.name)
