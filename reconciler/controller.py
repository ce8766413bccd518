"""Wires the caches to the queue, and runs the loop while this process leads."""

import asyncio
import logging

from machinery.clock import Clock
from machinery.loop import Again, LostError, run_loop
from machinery.workqueue import WorkQueue
from reconciler.caches import make_caches, object_key
from reconciler.execute import Executor
from reconciler.fleet import Fleet
from reconciler.nodelife import NodeLife
from reconciler.reconcile import Reconciler
from schemas.event import ObjectReference
from schemas.meta import ObjectKey
from store import keys
from store.election import Election, Leadership
from store.errors import StoreError
from store.events import EventRecorder
from store.port import Transport

log = logging.getLogger(__name__)

# A new leader within 5 s of the old one's death (docs/architecture.md, section 6): the lease's
# time to live, and half a second in which etcd notices that it ran out.
_ELECTION_TTL_S = 4


class Controller:
    """The reconciler's process: campaigns, leads, and campaigns again when it lost."""

    def __init__(
        self, transport: Transport, clock: Clock, *, identity: str, grace_s: float
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._identity = identity
        self._caches = make_caches(transport, clock)
        self._fleet = Fleet(self._caches)
        self._life = NodeLife(grace_s)
        self._recorder = EventRecorder(transport, clock, source="reconciler")
        self._queue: WorkQueue[ObjectKey] = WorkQueue(clock)

    async def run(self) -> None:
        """Run for ever."""
        self._connect()
        async with asyncio.TaskGroup() as group:
            for informer in self._caches.all():
                group.create_task(informer.run())
            group.create_task(self._campaign())

    async def _campaign(self) -> None:
        for informer in self._caches.all():
            await informer.wait_synced()
        election = Election(
            self._transport, self._clock, key=keys.ELECTION_RECONCILER, ttl_s=_ELECTION_TTL_S
        )
        while True:
            leadership = await election.campaign(self._identity)
            log.info("leading", extra={"epoch": leadership.epoch})
            try:
                await self._lead(leadership)
            except* LostError:
                log.warning("no longer leading", extra={"epoch": leadership.epoch})
            finally:
                await leadership.resign()

    async def _lead(self, leadership: Leadership) -> None:
        executor = Executor(self._transport, self._clock, lambda: leadership.guard)
        reconciler = Reconciler(self._caches, self._life, executor, self._recorder, self._clock)

        async def keep() -> None:
            await leadership.keep()
            raise LostError("the lease ended")

        async def guarded(key: ObjectKey) -> Again | None:
            if not leadership.valid():
                raise LostError("the lease ended")
            return await reconciler.reconcile(key)

        self._enqueue_all()
        async with asyncio.TaskGroup() as group:
            group.create_task(keep())
            group.create_task(run_loop(self._queue, guarded, transient=(StoreError,)))
            group.create_task(self._announce_nodes())

    def _connect(self) -> None:
        """Turn changes into keys: who might be affected is looked at again."""
        self._caches.specs.on_change(self._spec_changed)
        self._caches.statuses.on_change(self._status_changed)
        self._caches.ranks.on_change(self._replica_changed)
        self._caches.endpoints.on_change(self._replica_changed)
        self._caches.leases.on_change(self._lease_changed)

    def _spec_changed(self, key: str) -> None:
        found = object_key(key)
        if found is None:
            return
        kind, name = found
        if kind == "Replica":
            self._queue.add(ObjectKey("ModelDeployment", deployment_of(name)))
            return
        self._queue.add(found)
        if kind in ("Node", "NodePool", "ShardGroup"):
            self._nodes_changed()
        if kind == "ModelDeployment":
            self._enqueue("ModelRoute")

    def _status_changed(self, key: str) -> None:
        found = object_key(key)
        if found is None or found.kind != "Node":
            return
        self._queue.add(found)
        self._look_at_nodes()
        self._enqueue_owners(on=found.name)
        self._nodes_changed()

    def _replica_changed(self, key: str) -> None:
        self._queue.add(ObjectKey("ModelDeployment", deployment_of(keys.replica_of(key))))
        # What one gives up another may take.
        self._enqueue_unplaced()

    def _lease_changed(self, _: str) -> None:
        self._look_at_nodes()
        self._nodes_changed()
        self._enqueue_owners()

    def _look_at_nodes(self) -> None:
        expected, ready = self._fleet.expected_nodes(), self._fleet.ready_nodes()
        self._life.look(expected, ready, self._clock.monotonic())

    def _enqueue_owners(self, *, on: str | None = None) -> None:
        """Look at the deployments that have replicas, on one node or anywhere."""
        for replica in self._fleet.replicas():
            if on is None or any(rank.node == on for rank in replica.spec.ranks):
                self._queue.add(ObjectKey("ModelDeployment", replica.spec.deployment))

    def _nodes_changed(self) -> None:
        for kind in ("NodePool", "ShardGroup"):
            self._enqueue(kind)
        self._enqueue_unplaced()

    def _enqueue_unplaced(self) -> None:
        for name in sorted(self._fleet.unplaced()):
            self._queue.add(ObjectKey("ModelDeployment", name))

    def _enqueue(self, kind: str) -> None:
        for found in self._fleet.of_kind(kind):
            self._queue.add(ObjectKey(kind, found.name))

    def _enqueue_all(self) -> None:
        self._look_at_nodes()
        for kind in ("ModelDeployment", "NodePool", "ShardGroup", "ModelRoute"):
            self._enqueue(kind)
        for name in self._fleet.node_names():
            self._queue.add(ObjectKey("Node", name))
        # Replicas whose deployment is gone have nobody else who would look after them.
        self._enqueue_owners()

    async def _announce_nodes(self) -> None:
        """Say when nodes come and go; what was so at the start is no news."""
        before = self._fleet.ready_nodes()
        while True:
            await self._caches.leases.reached(self._caches.leases.revision + 1)
            ready = self._fleet.ready_nodes()
            for name in sorted(before - ready):
                about = ObjectReference(kind="Node", name=name)
                message = "its agent stopped renewing its lease"
                await self._recorder.record(about, "NodeNotReady", message, type_="Warning")
            for name in sorted(ready - before):
                about = ObjectReference(kind="Node", name=name)
                await self._recorder.record(about, "NodeReady", "its agent is there")
            before = ready


def deployment_of(replica: str) -> str:
    """Return the deployment that a replica's name was derived from."""
    return replica.rpartition("-")[0]
