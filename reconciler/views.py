"""From what the fleet is to what the planner sees. Pure but for the caches behind `Fleet`."""

from collections import Counter
from dataclasses import replace

from reconciler.fleet import Fleet
from reconciler.observe import NodeView, Observed, ReplicaView
from schemas import quantity
from schemas.deployment import ModelDeployment
from schemas.meta import ObjectKey, Truth, find_condition, is_true
from schemas.node import effective_labels
from schemas.pools import NodePool, ShardGroup, in_pool
from schemas.replica import Replica


def observe(
    fleet: Fleet, name: str, *, lost: frozenset[str], next_look_s: float | None
) -> Observed:
    """Return everything that decides about one deployment.

    `lost` are the nodes whose grace period is over.
    """
    found = fleet.spec(ObjectKey("ModelDeployment", name))
    deployment = found if isinstance(found, ModelDeployment) else None
    mine = [r for r in fleet.replicas() if r.spec.deployment == name]
    return Observed(
        name=name,
        deployment=deployment,
        replicas=tuple(_replica(fleet, r, deployment, lost) for r in mine),
        nodes=nodes(fleet),
        next_look_s=next_look_s,
    )


def _replica(
    fleet: Fleet, replica: Replica, deployment: ModelDeployment | None, lost: frozenset[str]
) -> ReplicaView:
    rank = fleet.rank(replica)
    conditions = rank.conditions if rank is not None else ()
    ready = find_condition(conditions, "Ready")
    owners = {owner.uid for owner in replica.metadata.owner_references}
    return ReplicaView(
        replica=replica,
        version=fleet.version(replica),
        is_ours=deployment is not None and deployment.metadata.uid in owners,
        is_ready=fleet.is_serving(replica),
        is_stopped=is_true(conditions, "Stopped"),
        is_node_lost=replica.spec.ranks[0].node in lost,
        trouble="" if ready is None or ready.status is Truth.TRUE else ready.message,
    )


def nodes(fleet: Fleet) -> tuple[NodeView, ...]:
    """Return every node as placement sees it."""
    ready = fleet.ready_nodes()
    used, counts = _assigned(fleet)
    groups = _exclusive_groups(fleet)
    return tuple(
        replace(
            _node(fleet, name, is_ready=name in ready),
            used_bytes=used[name],
            replicas=counts.get(name, {}),
            reserved_by_group=groups.get(name, ""),
        )
        for name in fleet.node_names()
    )


def _node(fleet: Fleet, name: str, *, is_ready: bool) -> NodeView:
    status = fleet.node_status(name)
    assert status is not None
    node = fleet.node(name)
    pools = [
        pool
        for pool in fleet.of_kind("NodePool")
        if isinstance(pool, NodePool) and in_pool(pool, node)
    ]
    reserved = [quantity.parse(p.spec.reserved.memory) for p in pools if p.spec.reserved]
    return NodeView(
        name=name,
        is_ready=is_ready,
        is_cordoned=node.spec.unschedulable,
        allocatable_bytes=status.allocatable_bytes - max(reserved, default=0),
        reserved_bytes=max(reserved, default=0),
        labels=effective_labels(node),
        pools=frozenset(pool.name for pool in pools),
        models={report.path: report for report in status.models},
    )


def pool_members(fleet: Fleet, pool: NodePool) -> list[str]:
    """Return the nodes that belong to the pool."""
    return [name for name in fleet.node_names() if in_pool(pool, fleet.node(name))]


def _assigned(fleet: Fleet) -> tuple[Counter[str], dict[str, dict[str, int]]]:
    used: Counter[str] = Counter()
    counts: dict[str, dict[str, int]] = {}
    for found in fleet.replicas():
        for rank in found.spec.ranks:
            used[rank.node] += rank.memory.total_bytes
            of_node = counts.setdefault(rank.node, {})
            of_node[found.spec.deployment] = of_node.get(found.spec.deployment, 0) + 1
    return used, counts


def _exclusive_groups(fleet: Fleet) -> dict[str, str]:
    return {
        member.node: group.name
        for group in fleet.of_kind("ShardGroup")
        if isinstance(group, ShardGroup) and group.spec.reservation == "Exclusive"
        for member in group.spec.members
    }
