"""Nodes as placement sees them, cached between reconciles: only what changed is computed again.

Level-based all the same: the journal of changes says only which nodes to read again, and an empty cache gives the same
result.
"""

import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from machinery.gc_pause import freeze_survivors, pause_collection
from reconciler.listers.caches import object_key
from reconciler.listers.lister import GroupReservations, Lister
from reconciler.nodes.liveness import Flapping, Now
from reconciler.nodes.node_state import NodeContext, QuietCalendar, evaluate_node, quiet_calendar
from reconciler.placement.inputs import Allocation, NodeView
from reconciler.placement.table import NodeTable
from schemas import chips, quantity
from schemas.meta import ApiObject, ObjectKey, Status
from schemas.node import AdapterReport, ModelReport, Node, NodeStatus, effective_labels
from schemas.pools import NodePool, in_pool
from schemas.replica import Replica
from store import keys


class NodeContextCache:
    """The inputs for the state of nodes besides their documents: time, flapping, nodes on the same machine.

    Kept between reconciles to say which nodes a change concerns.
    """

    def __init__(self, version: str) -> None:
        """Start empty; `version` is the reconciler's own, empty to accept agents of every version."""
        self._version = version
        self._calendar: QuietCalendar | None = None
        self._pools: Sequence[NodePool] = ()
        self._flapping: Mapping[str, Flapping] = {}
        self._statuses: dict[str, NodeStatus] = {}

    def is_current(self, now: Now) -> bool:
        """Return whether the last update still holds."""
        return (
            self._calendar is not None
            and self._calendar.holds(now.time)
            and self._flapping == now.flapping
        )

    def update(self, pools: Sequence[NodePool], now: Now) -> tuple[set[str], set[str]]:
        """Move on to `now`; return the pools and the nodes whose state changes by it."""
        before = self._calendar.quiet if self._calendar is not None else {}
        is_same = len(pools) == len(self._pools) and all(map(operator.is_, pools, self._pools))
        if self._calendar is None or not is_same or not self._calendar.holds(now.time):
            self._calendar, self._pools = quiet_calendar(pools, now.time), pools
        quiet = {name for name, _ in before.items() ^ self._calendar.quiet.items()}
        flapping = {name for name, _ in self._flapping.items() ^ now.flapping.items()}
        self._flapping = now.flapping
        return quiet, flapping

    def same_hardware(self, lister: Lister, names: Iterable[str]) -> set[str]:
        """Return the nodes that claim the same machine as one of these nodes now, or did so before."""
        found: set[str] = set()
        for name in names:
            before, current = self._statuses.pop(name, None), lister.node_status(name)
            if current is not None:
                self._statuses[name] = current
            for status in (before, current):
                if status is not None:
                    found |= lister.same_hardware(status)
        return found

    def context_of(self, lister: Lister, node: Node) -> NodeContext:
        """Return the context of one node, as of the last update."""
        assert self._calendar is not None
        assert node.status is not None
        peers = sorted(lister.same_hardware(node.status) - {node.name})
        return NodeContext(
            pools=tuple(pool for pool in self._pools if in_pool(pool, node)),
            calendar=self._calendar,
            version=self._version,
            flapping=self._flapping.get(node.name),
            peers=tuple(lister.node(name) for name in peers),
        )

    def next_change_s(self, now: Now) -> float | None:
        """Return the seconds until quiet hours begin or end in some pool; None if they never do."""
        until = self._calendar.until if self._calendar is not None else None
        return None if until is None else max(0.0, (until - now.time).total_seconds())


class _NodeEntry(NamedTuple):
    """A node's view without its allocations, and the objects that it was computed from."""

    inputs: tuple[Status | None, ApiObject | None, bool, str]
    view: NodeView


class _ReplicaEntry(NamedTuple):
    """A replica's allocations, and the values that they were computed from."""

    inputs: tuple[Replica, int, tuple[int, ...]]
    by_node: Mapping[str, Allocation]


class NodeViewCache:
    """The table of all nodes, kept up to date."""

    def __init__(self, version: str = "") -> None:
        """Start empty; nodes whose version is too far from `version` are held back."""
        self.version = version
        self._contexts = NodeContextCache(version)
        self._table = NodeTable(())
        self._place: int | None = None
        self._pools: tuple[NodePool, ...] = ()
        self._reserved = GroupReservations({}, ())
        self._nodes: dict[str, _NodeEntry] = {}
        self._replicas: dict[str, _ReplicaEntry] = {}
        self._reports: dict[ModelReport, ModelReport] = {}
        self._adapters: dict[AdapterReport, AdapterReport] = {}

    def refresh(self, lister: Lister, now: Now) -> NodeTable:
        """Return all nodes as they are now."""
        changed, place = lister.changed_since(self._place)
        if changed is not None and not changed and self._contexts.is_current(now):
            return self._table
        self._place = None  # until this is done: after a failure, everything is read again
        if changed is not None:
            names = self._nodes_of_keys(lister, changed)
            self._read(lister, names | self._nodes_of_context(lister, names, now))
        else:
            with pause_collection():  # tens of thousands of objects, which stay
                names = self._reset(lister)
                self._read(lister, names | self._nodes_of_context(lister, names, now))
                freeze_survivors()
        self._place = place
        return self._table

    def next_change_s(self, now: Now) -> float | None:
        """Return the seconds until quiet hours begin or end in some pool; None if they never do."""
        return self._contexts.next_change_s(now)

    def _reset(self, lister: Lister) -> set[str]:
        """Drop what may be outdated, and return all nodes."""
        pools = lister.pools()
        if not _are_same(pools, self._pools):
            self._pools = pools
            self._nodes.clear()
            self._reports.clear()  # otherwise they would keep reports that no node has any more
            self._adapters.clear()
        self._reserved = lister.reservations()
        if self._replicas:
            existing = {replica.name for replica in lister.replicas()}
            self._replicas = {
                name: entry for name, entry in self._replicas.items() if name in existing
            }
        return {*lister.node_names(), *self._table.rows}

    def _nodes_of_keys(self, lister: Lister, changed: Iterable[str]) -> set[str]:
        """Return the nodes that changed keys may concern."""
        names: set[str] = set()
        for key in changed:
            if key.startswith(keys.RANK_PREFIX):
                names |= self._nodes_of_replica(lister, ObjectKey("Replica", keys.replica_of(key)))
                continue
            found = object_key(key)
            if found is None or (key.startswith(keys.STATUS_PREFIX) and found.kind != "Node"):
                continue
            match found.kind:
                case "Node":
                    names.add(found.name)
                case "NodePool":
                    return self._reset(lister)
                case "ShardGroup":
                    names |= self._nodes_of_reservations(lister)
                case "Replica":
                    names |= self._nodes_of_replica(lister, found)
                case "ModelDeployment":  # its priority is that of its replicas
                    for replica in lister.replicas_of(found.name):
                        names |= nodes_with_memory(replica)
                case _:
                    pass  # placement depends on no other kind
        return names

    def _nodes_of_reservations(self, lister: Lister) -> set[str]:
        """Return the nodes whose reservation may have changed; with a selector, all of them."""
        before, self._reserved = self._reserved, lister.reservations()
        if before.selecting or self._reserved.selecting:
            return set(self._table.rows)
        return {name for name, _ in before.listed.items() ^ self._reserved.listed.items()}

    def _nodes_of_context(self, lister: Lister, names: set[str], now: Now) -> set[str]:
        """Return the nodes that may have changed though none of their keys did."""
        pools, moved = self._contexts.update(self._pools, now)
        if pools:
            moved |= {node.name for node in self._table.nodes if not pools.isdisjoint(node.pools)}
        moved |= self._contexts.same_hardware(lister, names) - names
        for name in moved:
            self._nodes.pop(name, None)
        return moved

    def _nodes_of_replica(self, lister: Lister, key: ObjectKey) -> set[str]:
        """Return the nodes of a replica, those in the cache and those in the table."""
        entry = self._replicas.get(key.name)
        names = set(entry.by_node) if entry is not None else set()
        api_object = lister.spec(key)
        if isinstance(api_object, Replica):
            return names | nodes_with_memory(api_object)
        self._replicas.pop(key.name, None)
        return names

    def _read(self, lister: Lister, names: Collection[str]) -> None:
        """Read these nodes again; all others keep their rows."""
        rows, nodes = self._table.rows, self._table.nodes
        changed: list[NodeView] = []
        gone: set[str] = set()
        allocations = self._allocations(lister, names)
        for name in names:
            before = nodes[rows[name]] if name in rows else None
            status = lister.node_status(name)
            if status is None:
                gone.add(name)
                self._nodes.pop(name, None)
                continue
            after = self._node(lister, (name, status), allocations.get(name, ()), before)
            if after is not before:
                changed.append(after)
        # Not `gone.isdisjoint(rows)`, which looks at every row.
        if all(node.name in rows for node in changed) and rows.keys().isdisjoint(gone):
            if changed:
                self._table = NodeTable(changed, before=self._table, are_all=False)
            return
        remaining = {node.name: node for node in (*nodes, *changed) if node.name not in gone}
        self._table = NodeTable(list(remaining.values()))

    def _node(
        self,
        lister: Lister,
        reported: tuple[str, NodeStatus],
        allocations: Sequence[Allocation],
        before: NodeView | None,
    ) -> NodeView:
        """Return the node with its allocations; the same object as before if nothing changed.

        `reported` is its name, and what its agent reported.
        """
        name, status = reported
        is_ready, group = lister.is_ready(name), self._reserved.group_of(lister, name)
        spec = lister.spec(ObjectKey("Node", name))
        inputs = status, spec, is_ready, group
        entry = self._nodes.get(name)
        if entry is None or not _are_same(entry.inputs, inputs):
            node = spec if isinstance(spec, Node) else lister.node(name)
            node = node.model_copy(update={"status": status})
            context = self._contexts.context_of(lister, node)
            entry = _NodeEntry(inputs, self._view(node, context, is_ready=is_ready, group=group))
            self._nodes[name] = entry
        elif (
            before is not None
            and before.labels is entry.view.labels
            and _are_same(allocations, before.allocations)
        ):
            return before
        return replace(
            entry.view,
            used_bytes=sum([allocation.bytes for allocation in allocations]),
            replicas=dict(Counter([allocation.deployment for allocation in allocations])),
            allocations=tuple(allocations),
        )

    def _view(
        self,
        node: Node,
        context: NodeContext,
        *,
        is_ready: bool,
        group: str,
    ) -> NodeView:
        """Return the node by its spec, its agent's report and its context."""
        assert node.status is not None
        status, pools = node.status, context.pools
        state = evaluate_node(node, status, context)
        reserves = [
            quantity.parse(pool.spec.reserved.memory) for pool in pools if pool.spec.reserved
        ]
        reserved = max(reserves, default=0)
        chip = chips.find_chip(
            status.chip, gpu_cores=status.gpu_cores, memory_bytes=status.memory_bytes
        )
        measured = 0.0 if status.metal_device is None else status.metal_device.copy_gbps
        return NodeView(
            name=node.metadata.name,
            is_ready=is_ready,
            is_cordoned=node.spec.unschedulable,
            allocatable_bytes=status.allocatable_bytes - reserved,
            reserved_bytes=reserved,
            labels=effective_labels(node),
            pools=frozenset(pool.name for pool in pools),
            # Equal reports become one object: a thousand Macs report the same of a model, and the table evaluates
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
            bandwidth_gbps=chip.bandwidth_gbps if chip is not None else measured,
            disk_gbps=status.disk_read_gbps,
            taints=node.spec.taints,
            pool_priority=max((pool.spec.priority for pool in pools), default=0),
            reserved_by_group=group,
            holds=state.holds,
            leave_reason=state.leave_reason,
        )

    def _allocations(
        self, lister: Lister, names: Collection[str]
    ) -> Mapping[str, Sequence[Allocation]]:
        """Return the allocations by node, of replicas that run and that do not run yet; at least those of these nodes."""

        @cache
        def priority_of(deployment: str) -> int:
            # A replica without a deployment will end, and has the lowest priority.
            owner = lister.declared(deployment)
            return owner.spec.priority if owner is not None else 0

        def read(replica: Replica, version: int | None = None) -> Mapping[str, Allocation]:
            """Return the replica's allocations by node; `version` is that of its spec if it is known already."""
            name = replica.metadata.name
            inputs = replica, priority_of(replica.spec.deployment), lister.peaks(replica)
            entry = self._replicas.get(name)
            if entry is None or entry.inputs[0] is not replica or entry.inputs[1:] != inputs[1:]:
                if version is None:
                    version = lister.spec_version(ObjectKey("Replica", name))
                entry = self._replicas[name] = _ReplicaEntry(inputs, _allocate(*inputs, version))
            return entry.by_node

        if 2 * len(names) < len(self._table.rows):
            return {
                name: [
                    allocation
                    for replica in lister.replicas_on(name)
                    if (allocation := read(replica).get(name)) is not None
                ]
                for name in names
            }
        # Each replica once, and not once for each of its nodes.
        allocations: dict[str, list[Allocation]] = defaultdict(list)
        for replica, version in lister.versioned_replicas():
            for node, allocation in read(replica, version).items():
                allocations[node].append(allocation)
        return allocations


def _allocate(
    replica: Replica, priority: int, peaks: Sequence[int], version: int
) -> dict[str, Allocation]:
    """Return the memory that a replica holds on each of its nodes."""
    # A peak above the proof counts. A peak below it does not: the engine may still grow.
    spec, meta = replica.spec, replica.metadata
    sizes = {
        rank.node: max(rank.memory.total_bytes, peak)
        for rank, peak in zip(spec.ranks, peaks, strict=True)
    }
    # On one node a rank of an earlier epoch ends before the next one starts, so the larger counts.
    for leaving_rank in spec.leaving:
        sizes[leaving_rank.node] = max(leaving_rank.memory_bytes, sizes.get(leaving_rank.node, 0))
    nodes = tuple(sizes) if len(sizes) > 1 else ()
    is_ending, model = meta.deletion_timestamp is not None, spec.model.folder
    # By position: this runs for every replica when a leader starts.
    return {
        node: Allocation(
            meta.name, spec.deployment, size, priority, version, is_ending, model, nodes
        )
        for node, size in sizes.items()
    }


def nodes_with_memory(replica: Replica) -> set[str]:
    """Return the nodes on which the replica has memory."""
    leaving = {leaving_rank.node for leaving_rank in replica.spec.leaving}
    return leaving | {rank.node for rank in replica.spec.ranks}


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether both hold the same objects: the caches make a new object for every change."""
    return len(some) == len(others) and all(map(operator.is_, some, others))
