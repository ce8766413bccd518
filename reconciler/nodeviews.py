"""Nodes as placement sees them, kept from one look to the next: what did not change is not worked out again.

Level-based all the same: every look compares with what is in the caches now, and a memory that is empty gives the
same answer.
"""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reconciler.fleet import Fleet
from reconciler.observe import NodeView, Tenant
from reconciler.placement.table import Table
from schemas import chips, quantity
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject, ObjectKey, Status
from schemas.node import ModelReport, Node, NodeStatus, effective_labels
from schemas.pools import NodePool, ShardGroup, in_pool
from schemas.replica import Replica


@dataclass(frozen=True, slots=True)
class _Seen:
    """A node without its tenants, and from what that was made."""

    sources: tuple[Status | None, ApiObject | None, bool, str]
    view: NodeView


@dataclass(frozen=True, slots=True)
class _Rented:
    """A replica's tenants by node, and from what they were made."""

    replica: Replica
    priority: int
    tenants: tuple[tuple[str, Tenant], ...]


class NodeViews:
    """The nodes as they were last seen."""

    def __init__(self) -> None:
        self._table = Table(())
        self._pools: tuple[NodePool, ...] = ()
        self._seen: dict[str, _Seen] = {}
        self._rented: dict[str, _Rented] = {}
        self._reports: dict[ModelReport, ModelReport] = {}

    def look(self, fleet: Fleet) -> Table:
        """Return all nodes as they are now."""
        pools = tuple(p for p in fleet.of_kind("NodePool") if isinstance(p, NodePool))
        if not _are_same(pools, self._pools):
            self._pools = pools
            self._seen.clear()
            self._reports.clear()  # or it would keep what models of long ago were like
        ready, groups = fleet.ready_nodes(), exclusive_groups(fleet)
        tenants = self._tenants(fleet)
        before = {node.name: node for node in self._table.nodes}
        nodes = [
            _with_tenants(
                self._node(fleet, name, is_ready=name in ready, group=groups.get(name, "")),
                tuple(tenants.get(name, ())),
                before.get(name),
            )
            for name in fleet.node_names()
        ]
        if not _are_same(nodes, self._table.nodes):
            self._table = Table(nodes, before=self._table)
        return self._table

    def _node(self, fleet: Fleet, name: str, *, is_ready: bool, group: str) -> NodeView:
        sources = (
            fleet.status(ObjectKey("Node", name)),
            fleet.spec(ObjectKey("Node", name)),
            is_ready,
            group,
        )
        old = self._seen.get(name)
        if old is not None and _are_same(old.sources, sources):
            return old.view
        node = fleet.node(name)
        assert node.status is not None
        view = replace(self._machine(node, node.status), is_ready=is_ready, reserved_by_group=group)
        self._seen[name] = _Seen(sources, view)
        return view

    def _machine(self, node: Node, status: NodeStatus) -> NodeView:
        pools = [pool for pool in self._pools if in_pool(pool, node)]
        kept = [quantity.parse(pool.spec.reserved.memory) for pool in pools if pool.spec.reserved]
        reserved = max(kept, default=0)
        chip = chips.find(status.chip, gpu_cores=status.gpu_cores, memory_bytes=status.memory_bytes)
        return NodeView(
            name=node.metadata.name,
            is_ready=False,
            is_cordoned=node.spec.unschedulable,
            allocatable_bytes=status.allocatable_bytes - reserved,
            reserved_bytes=reserved,
            labels=effective_labels(node),
            pools=frozenset(pool.name for pool in pools),
            # Equal reports become one object: a thousand Macs say the same of a model, and the table asks
            # each report once.
            models={
                report.path: self._reports.setdefault(report, report) for report in status.models
            },
            chip=status.chip,
            gpu_cores=status.gpu_cores,
            memory_bytes=status.memory_bytes,
            bandwidth_gbps=chip.bandwidth_gbps if chip is not None else 0.0,
            taints=node.spec.taints,
            pool_priority=max((pool.spec.priority for pool in pools), default=0),
        )

    def _tenants(self, fleet: Fleet) -> dict[str, list[Tenant]]:
        """Return what is assigned to each node, running or not."""
        # What belongs to nobody any more is on its way out, and outranks nobody.
        priorities = {
            one.name: one.spec.priority
            for one in fleet.of_kind("ModelDeployment")
            if isinstance(one, ModelDeployment)
        }
        rented: dict[str, _Rented] = {}
        found: dict[str, list[Tenant]] = {}
        for replica in fleet.replicas():
            priority = priorities.get(replica.spec.deployment, 0)
            one = self._rented.get(replica.name)
            if one is None or one.replica is not replica or one.priority != priority:
                one = _Rented(replica, priority, _tenants_of(fleet, replica, priority))
            rented[replica.name] = one
            for node, tenant in one.tenants:
                found.setdefault(node, []).append(tenant)
        self._rented = rented
        return found


def _tenants_of(fleet: Fleet, replica: Replica, priority: int) -> tuple[tuple[str, Tenant], ...]:
    return tuple(
        (
            rank.node,
            Tenant(
                replica=replica.name,
                deployment=replica.spec.deployment,
                bytes=rank.memory.total_bytes,
                priority=priority,
                version=fleet.version(replica),
                is_ending=replica.metadata.deletion_timestamp is not None,
            ),
        )
        for rank in replica.spec.ranks
    )


def _with_tenants(node: NodeView, tenants: tuple[Tenant, ...], before: NodeView | None) -> NodeView:
    """Return the node with its tenants; the very view that was there before, if it is the same."""
    if before is not None and _are_same(tenants, before.tenants) and before.labels is node.labels:
        return before
    return replace(
        node,
        used_bytes=sum(tenant.bytes for tenant in tenants),
        replicas=dict(Counter(tenant.deployment for tenant in tenants)),
        tenants=tenants,
    )


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether the very same objects are in both: caches make new ones of what changed."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def exclusive_groups(fleet: Fleet) -> dict[str, str]:
    """Return the nodes that a ShardGroup keeps to itself, with its name."""
    return {
        member.node: group.name
        for group in fleet.of_kind("ShardGroup")
        if isinstance(group, ShardGroup) and group.spec.reservation == "Exclusive"
        for member in group.spec.members
    }
