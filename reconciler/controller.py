"""Wires the caches to the queue, and runs the loop while this process leads."""

import asyncio
import logging

from machinery.clock import Clock
from machinery.loop import Again, LostError, run_loop
from machinery.version import version
from machinery.workqueue import WorkQueue
from reconciler.autoscaling.autoscaler import Autoscaler
from reconciler.demand.watch import DemandWatch
from reconciler.deployments import Senses
from reconciler.execute import Executor
from reconciler.garbage import leftovers
from reconciler.gitops.leading import GitOps
from reconciler.gitops.sources import Places
from reconciler.known.caches import make_caches
from reconciler.known.fleet import Fleet
from reconciler.nodes.life import NodeLife
from reconciler.nodes.views import NodeViews
from reconciler.reconcile import Reconciler
from reconciler.ripples import Ripples
from reconciler.rollout.canary import CanaryBook
from schemas.event import ObjectReference
from schemas.meta import ObjectKey
from store import keys
from store.election import Election, Leadership
from store.errors import StoreError
from store.events import EventRecorder
from store.port import Transport

log = logging.getLogger(__name__)

# A new leader within 5 s of the old one's death (docs/architecture.md, section 7): the lease's
# time to live, and half a second in which etcd notices that it ran out.
_ELECTION_TTL_S = 4


class Controller:
    """The reconciler's process: campaigns, leads, and campaigns again when it lost."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        identity: str,
        grace_s: float,
        git: Places | None = None,
    ) -> None:
        """Lead under a name, once there is nobody else; without places for Git, GitSources are left to others."""
        self._transport = transport
        self._clock = clock
        self._identity = identity
        self._caches = make_caches(transport, clock)
        self._fleet = Fleet(self._caches)
        self._life = NodeLife(grace_s)
        self._recorder = EventRecorder(transport, clock, source="reconciler")
        self._queue: WorkQueue[ObjectKey] = WorkQueue(clock)
        self._ripples = Ripples(self._caches, self._life, self._queue, clock)
        self._gitops = (
            None if git is None else GitOps(transport, clock, self._caches, self._recorder, git)
        )

    async def run(self) -> None:
        """Run for ever."""
        self._ripples.connect()
        if self._gitops is not None:
            self._gitops.connect()
        async with asyncio.TaskGroup() as group:
            for informer in self._caches.all():
                group.create_task(informer.run())
            group.create_task(self._recorder.run())
            group.create_task(self._ripples.run())
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
        demand = DemandWatch(
            self._transport,
            self._clock,
            needed=self._fleet.wishes.watched,
            on_change=lambda name: self._queue.add(ObjectKey("ModelDeployment", name)),
        )
        # A new leader begins with an empty memory, and so with patience.
        senses = Senses(
            life=self._life,
            nodes=NodeViews(version()),
            autoscaler=Autoscaler(),
            demand=demand,
            book=CanaryBook(),
            short_of_room=self._ripples.short_of_room,
        )
        reconciler = Reconciler(self._caches, senses, executor, self._recorder, self._clock)

        async def keep() -> None:
            await leadership.keep()
            raise LostError("the lease ended")

        async def guarded(key: ObjectKey) -> Again | None:
            if not leadership.valid():
                raise LostError("the lease ended")
            return await reconciler.reconcile(key)

        self._ripples.everything()
        async with asyncio.TaskGroup() as group:
            group.create_task(keep())
            group.create_task(run_loop(self._queue, guarded, transient=(StoreError,)))
            group.create_task(self._announce_nodes())
            group.create_task(demand.run())
            group.create_task(self._sweep(executor))
            if self._gitops is not None:
                group.create_task(self._gitops.lead(leadership))

    async def _sweep(self, executor: Executor) -> None:
        """Remove what is left of objects that are gone; what cannot be now is left to the next leader."""
        caches = self._caches
        found = list(leftovers(caches.specs.items, caches.statuses.items, caches.ranks.items))
        for key, owner in found:
            version = caches.statuses.version(key) or caches.ranks.version(key)
            try:
                await executor.sweep(key, version=version, owner=owner)
            except StoreError as error:
                log.info("leftover stays", extra={"key": key, "why": str(error)})
            else:
                log.info("leftover removed", extra={"key": key})

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
