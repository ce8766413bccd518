"""What decides about nodes beside their own documents: the time, where they come and go, their doubles.

Kept from one look to the next, to say which nodes are to be seen anew. Level-based: a memory that is empty gives the
same answers.

Nodes as placement sees them, kept from one look to the next: what did not change is not worked out again.

Level-based all the same: what changed says where to look, what is seen there is what is in the caches now, and a
memory that is empty gives the same answer.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from reconciler.listers.caches import object_key
from reconciler.listers.lister import GroupReservations, Lister, group_reservations
from reconciler.nodes.liveness import Flapping
from reconciler.nodes.node_state import NodeContext, evaluate_node
from reconciler.nodes.quiet_hours import QuietCalendar, quiet_calendar
from reconciler.placement.table import NodeTable
from reconciler.views import Allocation, NodeView
from schemas import chips, quantity
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject, ObjectKey, Status
from schemas.node import AdapterReport, ModelReport, Node, NodeStatus, effective_labels
from schemas.pools import NodePool, in_pool
from schemas.replica import Replica
from store import keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """When somebody looks, and what that one knows that is written nowhere."""

    now: datetime
    flapping: Mapping[str, Flapping] = field(default_factory=dict)
    """Nodes that are held back because they came and went."""


class NodeContextCache:
    """What they were at the last look."""

    def __init__(self, version: str) -> None:
        """Make a memory; `version` is the reconciler's own, empty if nodes of every version will do."""
        self._version = version
        self._calendar: QuietCalendar | None = None
        self._pools: Sequence[NodePool] = ()
        self._flapping: Mapping[str, Flapping] = {}
        self._statuses: dict[str, NodeStatus] = {}

    def hold_at(self, moment: Now) -> bool:
        """Return whether the last look is still good for this moment."""
        return (
            self._calendar is not None
            and self._calendar.holds(moment.now)
            and self._flapping == moment.flapping
        )

    def move(self, pools: Sequence[NodePool], moment: Now) -> tuple[set[str], set[str]]:
        """Take note of the moment; return the pools and the nodes for which it makes a difference."""
        before = self._calendar.quiet if self._calendar is not None else {}
        is_same = len(pools) == len(self._pools) and all(map(operator.is_, pools, self._pools))
        if self._calendar is None or not is_same or not self._calendar.holds(moment.now):
            self._calendar, self._pools = quiet_calendar(pools, moment.now), pools
        quiet = {name for name, _ in before.items() ^ self._calendar.quiet.items()}
        flapping = {name for name, _ in self._flapping.items() ^ moment.flapping.items()}
        self._flapping = moment.flapping
        return quiet, flapping

    def doubles(self, fleet: Lister, names: Iterable[str]) -> set[str]:
        """Return the nodes that share, or shared, a machine with one of these, which may have changed."""
        found: set[str] = set()
        for name in names:
            before, now = self._statuses.pop(name, None), fleet.node_status(name)
            if now is not None:
                self._statuses[name] = now
            for status in (before, now):
                if status is not None:
                    found |= fleet.machines.claiming(status)
        return found

    def around(self, fleet: Lister, node: Node) -> NodeContext:
        """Return what decides about one node."""
        assert self._calendar is not None
        assert node.status is not None
        rivals = sorted(fleet.machines.claiming(node.status) - {node.name})
        return NodeContext(
            pools=tuple(pool for pool in self._pools if in_pool(pool, node)),
            calendar=self._calendar,
            version=self._version,
            flap=self._flapping.get(node.name),
            peers=tuple(fleet.node(name) for name in rivals),
        )

    def next_change_s(self, moment: Now) -> float | None:
        """Return when pools' policies say something else; None if they never will."""
        until = self._calendar.until if self._calendar is not None else None
        return None if until is None else max(0.0, (until - moment.now).total_seconds())


@dataclass(frozen=True, slots=True)
class _CachedNode:
    """A node without its tenants, and from what that was made."""

    sources: tuple[Status | None, ApiObject | None, bool, str]
    view: NodeView


@dataclass(frozen=True, slots=True)
class _CachedAllocations:
    """A replica's tenants by node, and from what they were made."""

    replica: Replica
    priority: int
    peaks: tuple[int, ...]
    allocations: tuple[tuple[str, Allocation], ...]


class NodeViewCache:
    """The nodes as they were last seen."""

    def __init__(self, version: str = "") -> None:
        """Remember nothing yet; nodes whose version is too far from `version` are held back."""
        self.version = version
        self._circumstances = NodeContextCache(version)
        self._table = NodeTable(())
        self._place: int | None = None
        self._pools: tuple[NodePool, ...] = ()
        self._reserved = GroupReservations({}, ())
        self._seen: dict[str, _CachedNode] = {}
        self._rented: dict[str, _CachedAllocations] = {}
        self._reports: dict[ModelReport, ModelReport] = {}
        self._adapters: dict[AdapterReport, AdapterReport] = {}

    def look(self, fleet: Lister, moment: Now) -> NodeTable:
        """Return all nodes as they are now."""
        changed, place = fleet.changed_since(self._place)
        if changed is not None and not changed and self._circumstances.hold_at(moment):
            return self._table
        self._place = None  # until the look is done: after one that failed, look at everything
        names = self._all(fleet) if changed is None else self._touched(fleet, changed)
        self._renew(fleet, names | self._moved(fleet, names, moment))
        self._place = place
        return self._table

    def _all(self, fleet: Lister) -> set[str]:
        """Return all nodes, for a look at each."""
        pools = tuple(p for p in fleet.of_kind("NodePool") if isinstance(p, NodePool))
        if not _are_same(pools, self._pools):
            self._pools = pools
            self._seen.clear()
            self._reports.clear()  # or it would keep what models of long ago were like
            self._adapters.clear()
        self._reserved = group_reservations(fleet)
        there = {replica.name for replica in fleet.replicas()}
        self._rented = {name: one for name, one in self._rented.items() if name in there}
        return {*fleet.node_names(), *self._table.rows}

    def _touched(self, fleet: Lister, changed: Iterable[str]) -> set[str]:
        """Return the nodes that may be different now that these keys changed."""
        names: set[str] = set()
        for key in changed:
            if key.startswith(keys.RANK_PREFIX):
                names |= self._homes(fleet, ObjectKey("Replica", keys.replica_of(key)))
                continue
            found = object_key(key)
            if found is None or (key.startswith(keys.STATUS_PREFIX) and found.kind != "Node"):
                continue
            match found.kind:
                case "Node":
                    names.add(found.name)
                case "NodePool":
                    return self._all(fleet)
                case "ShardGroup":
                    names |= self._reserved_anew(fleet)
                case "Replica":
                    names |= self._homes(fleet, found)
                case "ModelDeployment":  # its priority is its replicas'
                    for replica in fleet.replicas_of(found.name):
                        names |= nodes_with_memory(replica)
                case _:
                    pass  # placement sees no other kind
        return names

    def _reserved_anew(self, fleet: Lister) -> set[str]:
        """Return the nodes that may be reserved for others than they were; a selector may mean any."""
        before, self._reserved = self._reserved, group_reservations(fleet)
        if before.selecting or self._reserved.selecting:
            return set(self._table.rows)
        return {name for name, _ in before.listed.items() ^ self._reserved.listed.items()}

    def _moved(self, fleet: Lister, names: set[str], moment: Now) -> set[str]:
        """Return the nodes that may be different though nothing was written about them."""
        pools, moved = self._circumstances.move(self._pools, moment)
        if pools:
            moved |= {node.name for node in self._table.nodes if not pools.isdisjoint(node.pools)}
        moved |= self._circumstances.doubles(fleet, names) - names
        for name in moved:
            self._seen.pop(name, None)
        return moved

    def next_change_s(self, moment: Now) -> float | None:
        """Return when a policy of some pool says something else; None if none ever will."""
        return self._circumstances.next_change_s(moment)

    def _homes(self, fleet: Lister, key: ObjectKey) -> set[str]:
        """Return where a replica was when it was last seen, and where it is."""
        before = self._rented.get(key.name)
        names = {node for node, _ in before.allocations} if before is not None else set()
        now = fleet.spec(key)
        if isinstance(now, Replica):
            return names | nodes_with_memory(now)
        self._rented.pop(key.name, None)
        return names

    def _renew(self, fleet: Lister, names: Iterable[str]) -> None:
        """Look at these nodes; the others are what they were."""
        rows, nodes = self._table.rows, self._table.nodes
        news: list[NodeView] = []
        gone: set[str] = set()
        for name in names:
            before = nodes[rows[name]] if name in rows else None
            if fleet.node_status(name) is None:
                gone.add(name)
                self._seen.pop(name, None)
                continue
            after = _with_tenants(self._node(fleet, name), self._tenants(fleet, name), before)
            if after is not before:
                news.append(after)
        if all(node.name in rows for node in news) and gone.isdisjoint(rows):
            if news:
                self._table = NodeTable(news, before=self._table, are_all=False)
            return
        there = {node.name: node for node in (*nodes, *news) if node.name not in gone}
        self._table = NodeTable(list(there.values()))

    def _node(self, fleet: Lister, name: str) -> NodeView:
        """Return the node without its tenants."""
        is_ready, group = fleet.is_ready(name), self._reserved.group_of(fleet, name)
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
        around = self._circumstances.around(fleet, node)
        state = evaluate_node(node, node.status, around)
        view = replace(
            self._machine(node, node.status, around.pools),
            is_ready=is_ready,
            reserved_by_group=group,
            holds=state.holds,
            leave=state.leave,
        )
        self._seen[name] = _CachedNode(sources, view)
        return view

    def _machine(self, node: Node, status: NodeStatus, pools: Sequence[NodePool]) -> NodeView:
        kept = [quantity.parse(pool.spec.reserved.memory) for pool in pools if pool.spec.reserved]
        reserved = max(kept, default=0)
        chip = chips.find_chip(
            status.chip, gpu_cores=status.gpu_cores, memory_bytes=status.memory_bytes
        )
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
            adapters={
                report.path: self._adapters.setdefault(report, report) for report in status.adapters
            },
            chip=status.chip,
            gpu_cores=status.gpu_cores,
            memory_bytes=status.memory_bytes,
            bandwidth_gbps=chip.bandwidth_gbps if chip is not None else 0.0,
            taints=node.spec.taints,
            pool_priority=max((pool.spec.priority for pool in pools), default=0),
        )

    def _tenants(self, fleet: Lister, name: str) -> tuple[Allocation, ...]:
        """Return what is assigned to a node, running or not, by name."""
        return tuple(
            tenant
            for replica in fleet.replicas_on(name)
            for node, tenant in self._rent(fleet, replica)
            if node == name
        )

    def _rent(self, fleet: Lister, replica: Replica) -> tuple[tuple[str, Allocation], ...]:
        """Return the replica's tenants by node."""
        owner = fleet.spec(ObjectKey("ModelDeployment", replica.spec.deployment))
        # What belongs to nobody any more is on its way out, and outranks nobody.
        priority = owner.spec.priority if isinstance(owner, ModelDeployment) else 0
        peaks = fleet.machines.peaks(replica)
        one = self._rented.get(replica.name)
        if (
            one is None
            or one.replica is not replica
            or (one.priority, one.peaks) != (priority, peaks)
        ):
            allocations = _tenants_of(replica, priority, peaks, fleet.version(replica))
            one = self._rented[replica.name] = _CachedAllocations(
                replica, priority, peaks, allocations
            )
        return one.allocations


def _tenants_of(
    replica: Replica, priority: int, peaks: Sequence[int], version: int
) -> tuple[tuple[str, Allocation], ...]:
    # What was measured is not given away, whatever was proven; less may still become more.
    sizes = {
        rank.node: max(rank.memory.total_bytes, peak)
        for rank, peak in zip(replica.spec.ranks, peaks, strict=True)
    }
    # On one Mac a rank of an earlier epoch ends before the next one starts.
    for left in replica.spec.leaving:
        sizes[left.node] = max(left.memory_bytes, sizes.get(left.node, 0))
    return tuple(
        (
            node,
            Allocation(
                replica=replica.name,
                deployment=replica.spec.deployment,
                bytes=size,
                priority=priority,
                version=version,
                is_ending=replica.metadata.deletion_timestamp is not None,
                nodes=tuple(sizes) if len(sizes) > 1 else (),
            ),
        )
        for node, size in sizes.items()
    )


def nodes_with_memory(replica: Replica) -> set[str]:
    """Return the nodes on which the replica has memory."""
    left = {one.node for one in replica.spec.leaving}
    return left | {rank.node for rank in replica.spec.ranks}


def _with_tenants(
    node: NodeView, allocations: tuple[Allocation, ...], before: NodeView | None
) -> NodeView:
    """Return the node with its tenants; the very view that was there before, if it is the same."""
    if (
        before is not None
        and _are_same(allocations, before.allocations)
        and before.labels is node.labels
    ):
        return before
    return replace(
        node,
        used_bytes=sum(tenant.bytes for tenant in allocations),
        replicas=dict(Counter(tenant.deployment for tenant in allocations)),
        allocations=allocations,
    )


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether the very same objects are in both: caches make new ones of what changed."""
    return len(some) == len(others) and all(map(operator.is_, some, others))
