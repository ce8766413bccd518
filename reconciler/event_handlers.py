"""Whom a change may concern: turns keys that changed into keys to look at. Decides nothing, writes nothing.

What concerns a single object is looked at at once. What reaches far is gathered for a moment: a thousand nodes that
report at the same time cost one look at the fleet, not a thousand.
"""

import asyncio
from collections.abc import Callable

from machinery.clock import Clock
from machinery.control_loop import WorkQueue
from reconciler.listers.caches import Caches, object_key
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import NodeLiveness
from schemas.meta import ObjectKey
from store import keys

_GATHER_S = 0.05


class EventHandlers:
    """Fills the queue. `connect()` once, then `run()`."""

    def __init__(
        self, caches: Caches, life: NodeLiveness, queue: WorkQueue[ObjectKey], clock: Clock
    ) -> None:
        self._caches = caches
        self._fleet = Lister(caches)
        self._life = life
        self._queue = queue
        self._clock = clock
        self._due: dict[Callable[[], None], None] = {}
        self.waiting_for_room: set[str] = set()
        """Deployments that would go on if there were more room; who looks at them keeps it."""
        self._nodes: set[str] = set()
        """Nodes whose deployments are to be looked at."""
        self._news = asyncio.Event()

    def connect(self) -> None:
        """Hear of what changes from now on."""
        self._caches.specs.on_change(self._spec_changed)
        self._caches.statuses.on_change(self._status_changed)
        self._caches.ranks.on_change(self._replica_changed)
        self._caches.endpoints.on_change(self._replica_changed)
        self._caches.leases.on_change(self._lease_changed)

    async def run(self) -> None:
        """Pass on what was gathered, for ever."""
        while True:
            await self._news.wait()
            await self._clock.sleep(_GATHER_S)
            self._news.clear()
            due, self._due = self._due, {}
            for work in due:
                work()

    def everything(self) -> None:
        """Look at all there is: nobody knows what an earlier leader left undone."""
        self._look_at_nodes()
        for kind in ("ModelDeployment", "NodePool", "ShardGroup", "ModelRoute"):
            self._enqueue(kind)
        self._all_nodes()
        # What lost its deployment has nobody else who would look after it.
        self._all_owners()
        self._all_revised()

    def _soon(self, *work: Callable[[], None]) -> None:
        """Do this in a moment, once, however often it is asked for; in the order of asking."""
        self._due.update(dict.fromkeys(work))
        self._news.set()

    def _spec_changed(self, key: str) -> None:
        found = object_key(key)
        if found is None:
            return
        kind, name = found
        if kind in ("Replica", "Revision"):
            self._queue.add(ObjectKey("ModelDeployment", deployment_name_of(name)))
            if kind == "Replica":
                self._soon(self._groups)  # they say what runs on them
            return
        self._queue.add(found)
        if kind in ("Node", "NodePool", "ShardGroup"):
            self._soon(self._nodes_changed)
        if kind == "Node":
            self._nodes.add(name)
            self._soon(self._owners)
        if kind == "NodePool":
            self._soon(self._all_owners, self._all_nodes)
        if kind == "ModelDeployment":
            self._soon(self._routes)

    def _status_changed(self, key: str) -> None:
        found = object_key(key)
        if found is None:
            return
        if found.kind != "Node":
            # Ours to write. But a write of ours whose answer was lost may come late, over a newer one, and
            # people may write by hand: whoever it is about is looked at again.
            is_replica = found.kind == "Replica"
            name = deployment_name_of(found.name) if is_replica else found.name
            self._queue.add(ObjectKey("ModelDeployment", name) if is_replica else found)
            return
        self._queue.add(found)
        self._nodes.add(found.name)
        self._soon(self._look_at_nodes, self._owners, self._nodes_changed)

    def _replica_changed(self, key: str) -> None:
        self._queue.add(ObjectKey("ModelDeployment", deployment_name_of(keys.replica_of(key))))
        if key.startswith(keys.RANK_PREFIX) and key not in self._caches.ranks.items:
            self._soon(self._unplaced)  # what one gives up another may take

    def _lease_changed(self, key: str) -> None:
        name = key.removeprefix(keys.NODE_LEASE_PREFIX)
        self._queue.add(ObjectKey("Node", name))
        self._nodes.add(name)
        self._soon(self._look_at_nodes, self._owners, self._nodes_changed)
        if self._fleet.is_ready(name):
            self._soon(self._all_owners)  # whoever could not go on for want of room may now

    def _look_at_nodes(self) -> None:
        expected, ready = self._fleet.expected_nodes(), self._fleet.ready_nodes()
        # Whether a node is held back because it came and went is known from here on.
        for name in self._life.look(expected, ready, self._clock.monotonic()):
            self._queue.add(ObjectKey("Node", name))

    def _owners(self) -> None:
        """Look at the deployments that have replicas on the nodes that changed."""
        names, self._nodes = self._nodes, set()
        for name in sorted(names):
            for replica in self._fleet.replicas_on(name):
                self._queue.add(ObjectKey("ModelDeployment", replica.spec.deployment))

    def _all_owners(self) -> None:
        for replica in self._fleet.replicas():
            self._queue.add(ObjectKey("ModelDeployment", replica.spec.deployment))

    def _all_revised(self) -> None:
        for revision in self._fleet.of_kind("Revision"):
            self._queue.add(ObjectKey("ModelDeployment", deployment_name_of(revision.name)))

    def _nodes_changed(self) -> None:
        for kind in ("NodePool", "ShardGroup"):
            self._enqueue(kind)
        self._unplaced()

    def _unplaced(self) -> None:
        for name in sorted(self._fleet.wishes.unplaced() | self.waiting_for_room):
            self._queue.add(ObjectKey("ModelDeployment", name))

    def _groups(self) -> None:
        self._enqueue("ShardGroup")

    def _routes(self) -> None:
        self._enqueue("ModelRoute")

    def _enqueue(self, kind: str) -> None:
        for found in self._fleet.of_kind(kind):
            self._queue.add(ObjectKey(kind, found.name))

    def _all_nodes(self) -> None:
        """Look at every node, and at what was written about others that may be gone."""
        for name in {*self._fleet.node_names(), *self._fleet.machines.described()}:
            self._queue.add(ObjectKey("Node", name))


def deployment_name_of(replica: str) -> str:
    """Return the deployment that a replica's or a revision's name was derived from."""
    return replica.rpartition("-")[0]
