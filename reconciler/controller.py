"""What is left of objects that are gone: found by a new leader, once. Pure.

Nothing of the kind comes about while everybody writes under guards; but a person may delete keys by hand, and a backup
of an earlier release may bring some back.

Wires the caches to the queue, and runs the loop while this process leads.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from machinery.clock import Clock
from machinery.control_loop import AuthorityLostError, Requeue, WorkQueue, run_loop
from machinery.version import version
from reconciler.autoscaling.autoscaler import Autoscaler
from reconciler.demand.scraper import DemandScraper
from reconciler.event_handlers import EventHandlers
from reconciler.execute import Executor
from reconciler.gitops.controller import GitOpsController
from reconciler.gitops.source_reconciler import GitFolders
from reconciler.listers.caches import make_caches
from reconciler.listers.lister import Lister
from reconciler.nodes.liveness import NodeLiveness
from reconciler.nodes.node_views import NodeViewCache
from reconciler.reconcile import LeaderState, Reconciler
from reconciler.rollout.canary import CanaryBaselines
from schemas.event import ObjectReference
from schemas.meta import ObjectKey
from store import keys
from store.errors import StoreError
from store.events import EventRecorder
from store.leases import Election, Leadership
from store.port import Transport


class Leftover(NamedTuple):
    """A document, and the key of the object that it belongs to, which is not there."""

    key: str
    owner: str


def find_leftovers(
    specs: Iterable[str], statuses: Iterable[str], ranks: Iterable[str]
) -> Iterator[Leftover]:
    """Yield statuses and agents' reports without the object that they speak of.

    A node's status is its agent's own, and needs no spec.
    """
    there = set(specs)
    for key in statuses:
        kind, name = keys.kind_and_name(key)
        owner = keys.spec_key(kind, name)
        if kind != "Node" and owner not in there:
            yield Leftover(key, owner)
    for key in ranks:
        owner = keys.spec_key("Replica", keys.replica_of(key))
        if owner not in there:
            yield Leftover(key, owner)


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
        git: GitFolders | None = None,
    ) -> None:
        """Lead under a name, once there is nobody else; without places for Git, GitSources are left to others."""
        self._transport = transport
        self._clock = clock
        self._identity = identity
        self._caches = make_caches(transport, clock)
        self._fleet = Lister(self._caches)
        self._life = NodeLiveness(grace_s)
        self._recorder = EventRecorder(transport, clock, source="reconciler")
        self._queue: WorkQueue[ObjectKey] = WorkQueue(clock)
        self._ripples = EventHandlers(self._caches, self._life, self._queue, clock)
        self._gitops = (
            None
            if git is None
            else GitOpsController(transport, clock, self._caches, self._recorder, git)
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
            except* AuthorityLostError:
                log.warning("no longer leading", extra={"epoch": leadership.epoch})
            finally:
                await leadership.resign()

    async def _lead(self, leadership: Leadership) -> None:
        executor = Executor(self._transport, self._clock, lambda: leadership.guard)
        demand = DemandScraper(
            self._transport,
            self._clock,
            needed=self._fleet.wishes.watched,
            on_change=lambda name: self._queue.add(ObjectKey("ModelDeployment", name)),
        )
        # A new leader begins with an empty memory, and so with patience.
        senses = LeaderState(
            life=self._life,
            nodes=NodeViewCache(version()),
            autoscaler=Autoscaler(),
            demand=demand,
            book=CanaryBaselines(),
            waiting_for_room=self._ripples.waiting_for_room,
        )
        reconciler = Reconciler(self._caches, senses, executor, self._recorder, self._clock)

        async def keep() -> None:
            await leadership.keep()
            raise AuthorityLostError("the lease ended")

        async def guarded(key: ObjectKey) -> Requeue | None:
            if not leadership.valid():
                raise AuthorityLostError("the lease ended")
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
        found = list(find_leftovers(caches.specs.items, caches.statuses.items, caches.ranks.items))
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
