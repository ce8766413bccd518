"""Maps changed keys to the objects that must be reconciled, and queues them. Decides and writes nothing.

A change that concerns one object queues it at once. Changes that concern many objects are collected for 50 ms: a
thousand nodes that report at the same time cost one pass over the fleet, not a thousand.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from machinery.clock import Clock
from machinery.control_loop import WorkQueue
from reconciler.listers.caches import OwnWrites, object_key
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import NodeLiveness
from schemas.meta import ObjectKey
from store import keys

_COLLECT_S = 0.05


class EventHandlers:
    """Fills the queue. Call `connect()` once, then `run()`."""

    def __init__(
        self,
        lister: Lister,
        liveness: NodeLiveness,
        queue: WorkQueue[ObjectKey],
        clock: Clock,
        *,
        own_writes: OwnWrites | None = None,
    ) -> None:
        self._own_writes = own_writes or OwnWrites()
        self._lister = lister
        self._liveness = liveness
        self._queue = queue
        self._clock = clock
        self.waiting_for_room: set[str] = set()
        """Deployments that go on as soon as there is more room; the reconciler keeps the set."""
        self._changed_nodes: set[str] = set()
        """Nodes whose deployments must be reconciled."""
        self._collected: dict[Callable[[], None], None] = {}
        self._has_collected = asyncio.Event()
        # What a changed spec concerns besides its own object, by kind.
        self._after_spec: dict[str, tuple[Callable[[], None], ...]] = {
            "Replica": (self._queue_groups,),  # their status lists the replicas
            "Node": (self._queue_after_node_change, self._queue_owners),
            "NodePool": (
                self._queue_after_node_change,
                self._queue_all_owners,
                self._queue_all_nodes,
            ),
            "ShardGroup": (self._queue_after_node_change,),
            "ModelDeployment": (self._queue_routes,),
        }

    def connect(self) -> None:
        """Register the handlers with the caches."""
        caches = self._lister.caches
        caches.specs.on_change(self._on_spec)
        caches.statuses.on_change(self._on_status)
        caches.ranks.on_change(self._on_replica)
        caches.endpoints.on_change(self._on_replica)
        caches.leases.on_change(self._on_lease)
        caches.snapshots.on_change(self._on_snapshot)
        caches.preloads.on_change(self._on_preload)

    async def run(self) -> None:
        """Queue what was collected, forever."""
        while True:
            await self._has_collected.wait()
            await self._clock.sleep(_COLLECT_S)
            self._has_collected.clear()
            collected, self._collected = self._collected, {}
            for work in collected:
                work()

    def queue_everything(self) -> None:
        """Queue every object: a new leader does not know what the last one left undone.

        Keys of earlier changes are dropped, because these include them; later changes go first.
        """
        self._queue.clear()
        self._update_liveness()
        for kind in ("ModelDeployment", "NodePool", "ShardGroup", "ModelRoute"):
            for api_object in self._lister.of_kind(kind):
                self._queue.add_to_backlog(ObjectKey(kind, api_object.name))
        for name in self._all_nodes():
            self._queue.add_to_backlog(ObjectKey("Node", name))
        for name in self._all_owners():
            self._queue.add_to_backlog(ObjectKey("ModelDeployment", name))

    def _collect(self, *work: Callable[[], None]) -> None:
        """Do the work soon and once, however often it is collected; in the order of collection."""
        self._collected.update(dict.fromkeys(work))
        self._has_collected.set()

    # Handlers of changed keys

    def _on_spec(self, key: str) -> None:
        found = object_key(key)
        if found is None:
            return
        kind, name = found
        if kind in ("Replica", "Revision"):
            self._queue_unless_own(deployment_name_of(name), self._lister.caches.specs.version(key))
        else:
            self._queue.add(found)
        if kind == "Node":
            self._changed_nodes.add(name)
        work = self._after_spec.get(kind)
        if work is not None:
            self._collect(*work)

    def _on_status(self, key: str) -> None:
        found = object_key(key)
        if found is None:
            return
        if found.kind == "Node":
            self._queue.add(found)
            self._on_node(found.name)
        # The reconciler writes the other statuses. But a write whose answer was lost may arrive late and replace a
        # newer one, and people may write by hand: so the object is reconciled again.
        elif found.kind in ("Replica", "ModelDeployment"):
            is_replica = found.kind == "Replica"
            name = deployment_name_of(found.name) if is_replica else found.name
            self._queue_unless_own(name, self._lister.caches.statuses.version(key))
        else:
            self._queue.add(found)

    def _on_replica(self, key: str) -> None:
        self._queue_deployments([deployment_name_of(keys.replica_of(key))])
        if key.startswith(keys.RANK_PREFIX) and key not in self._lister.caches.ranks.items:
            self._collect(self._queue_unplaced)  # memory became free

    def _on_snapshot(self, key: str) -> None:
        self._queue_deployments([key.removeprefix(keys.SNAPSHOT_PREFIX)])

    def _on_preload(self, key: str) -> None:
        self._queue_deployments([key.rpartition("/")[2]])

    def _on_lease(self, key: str) -> None:
        name = key.removeprefix(keys.NODE_LEASE_PREFIX)
        self._queue.add(ObjectKey("Node", name))
        self._on_node(name)

    def _on_node(self, name: str) -> None:
        self._changed_nodes.add(name)
        self._collect(self._update_liveness, self._queue_owners, self._queue_after_node_change)

    # Work that is collected

    def _update_liveness(self) -> None:
        expected, ready = self._lister.expected_nodes(), self._lister.ready_nodes()
        # From here on it is known whether a node is held back for flapping.
        changed = self._liveness.update(
            expected, ready, self._clock.monotonic(), announced=self._lister.announced_asleep()
        )
        for name in changed:
            self._queue.add(ObjectKey("Node", name))

    def _queue_owners(self) -> None:
        """Queue the deployments that have replicas on the changed nodes."""
        names, self._changed_nodes = self._changed_nodes, set()
        for name in sorted(names):
            self._queue_deployments(
                replica.spec.deployment for replica in self._lister.replicas_on(name)
            )

    def _queue_all_owners(self) -> None:
        self._queue_deployments(self._all_owners())

    def _all_owners(self) -> Iterator[str]:
        """Yield the deployments of all replicas, revisions and preloads, which may outlive their deployment."""
        yield from (replica.spec.deployment for replica in self._lister.replicas())
        yield from (
            deployment_name_of(api_object.name) for api_object in self._lister.of_kind("Revision")
        )
        yield from (key.rpartition("/")[2] for key in self._lister.caches.preloads.items)

    def _queue_after_node_change(self) -> None:
        for kind in ("NodePool", "ShardGroup"):
            self._queue_kind(kind)
        self._queue_unplaced()

    def _queue_unplaced(self) -> None:
        waiting = self._lister.unplaced_deployments() | self.waiting_for_room
        self._queue_deployments(sorted(waiting | self._lister.preloading_deployments()))

    def _queue_groups(self) -> None:
        self._queue_kind("ShardGroup")

    def _queue_routes(self) -> None:
        self._queue_kind("ModelRoute")

    def _queue_all_nodes(self) -> None:
        for name in self._all_nodes():
            self._queue.add(ObjectKey("Node", name))

    def _all_nodes(self) -> set[str]:
        """Return every node, and nodes that are gone but still have a document of the reconciler."""
        return {*self._lister.node_names(), *self._lister.described_nodes()}

    def _queue_kind(self, kind: str) -> None:
        for api_object in self._lister.of_kind(kind):
            self._queue.add(ObjectKey(kind, api_object.name))

    def _queue_unless_own(self, name: str, revision: int) -> None:
        """Queue a deployment because of a change, unless its own reconcile made that change."""
        self._own_writes.report(revision, name, partial(self._queue_deployments, [name]))

    def _queue_deployments(self, names: Iterable[str]) -> None:
        for name in names:
            self._queue.add(ObjectKey("ModelDeployment", name))


def deployment_name_of(name: str) -> str:
    """Return the deployment that a replica's or revision's name is derived from."""
    return name.rpartition("-")[0]
