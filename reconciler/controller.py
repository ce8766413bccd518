"""The reconciler process: campaigns for leadership, runs the control loop while it leads, removes leftovers."""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from identity.dialer import Dialer
from machinery.clock import Clock
from machinery.control_loop import AuthorityLostError, Requeue, WorkQueue
from machinery.version import version
from models.hub.fleet_hub import FleetListings
from models.hub.hub_settings import HubSettings
from reconciler.deployments.demand.scraper import DemandScraper
from reconciler.deployments.execute import Executor
from reconciler.deployments.lookup_problems import LookupProblems
from reconciler.deployments.reconcile import LeaderState
from reconciler.event_handlers import EventHandlers
from reconciler.leader_loop import FencedTransport, run_as_leader
from reconciler.listers.caches import OwnWrites, make_caches
from reconciler.listers.lister import Lister
from reconciler.metrics import ReconcilerMetrics
from reconciler.nodes.liveness import NodeLiveness
from reconciler.nodes.node_views import NodeViewCache
from reconciler.reconcile import Reconciler
from reconciler.services.assignments import assignment_keeper
from reconciler.services.change_retention import ChangeRetention
from reconciler.services.fabric.checker import FabricChecker
from reconciler.services.gitops.controller import GitOpsController
from reconciler.services.gitops.credentials import GitSettings
from reconciler.services.model_snapshots import SnapshotController
from reconciler.services.model_uses import model_use_keeper
from reconciler.services.on_demand import OnDemandController
from reconciler.services.power import PowerController
from schemas.event import ObjectReference
from schemas.meta import ObjectKey
from store import keys
from store.errors import StoreError
from store.events import EventRecorder
from store.leases import Election, Leadership
from store.model_listings import read_listings
from store.port import Delete, ModRevisionGuard, Transport

log = logging.getLogger(__name__)

# Another one must bind a replica within 5 s of the leader's death: etcd notices an expiry up to half a second late, and
# the first look at 5,000 nodes takes half a second. A leader that loses the lead in a stall only loses its memory.
_LEADER_TTL_S = 3
# One plans and acts at a time (`Reconciler`); the others wait for the store to take their statuses.
_WORKERS = 4
_SETTLE_S = 0.2


class Leftover(NamedTuple):
    """A stored document, and the key of its object, which does not exist."""

    key: str
    owner: str


def find_leftovers(
    specs: Iterable[str], statuses: Iterable[str], ranks: Iterable[str]
) -> Iterator[Leftover]:
    """Yield statuses and rank reports whose object does not exist.

    Guarded writes leave none behind, but a person may delete keys by hand, and a restored backup may bring some
    back. The status of a node is written by its agent and needs no spec.
    """
    existing = set(specs)
    for key in statuses:
        kind, name = keys.kind_and_name(key)
        owner = keys.spec_key(kind, name)
        if kind != "Node" and owner not in existing:
            yield Leftover(key, owner)
    for key in ranks:
        owner = keys.spec_key("Replica", keys.replica_of(key))
        if owner not in existing:
            yield Leftover(key, owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundSettings:
    """Settings of the connections to gateways and model hubs."""

    dialer: Dialer | None = None
    hubs: HubSettings = field(default_factory=HubSettings)


class Controller:
    """The reconciler process: campaigns, leads, and campaigns again after it lost the lead."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        identity: str,
        grace_s: float,
        git: GitSettings | None = None,
        outbound: OutboundSettings | None = None,
    ) -> None:
        """Prepare to lead as `identity`; without folders for Git, GitSources are not reconciled."""
        outbound = outbound or OutboundSettings()
        self._dialer = outbound.dialer
        self._transport = transport
        self._clock = clock
        self._identity = identity
        self._own_writes = OwnWrites()
        self._caches = make_caches(transport, clock)
        self._lister = Lister(self._caches)
        self._liveness = NodeLiveness(grace_s)
        self._recorder = EventRecorder(transport, clock, source="reconciler")
        self._queue: WorkQueue[ObjectKey] = WorkQueue(clock)
        self._handlers = EventHandlers(
            self._lister, self._liveness, self._queue, clock, own_writes=self._own_writes
        )
        self.metrics = ReconcilerMetrics(clock)
        self.metrics.bind(
            queue_depth=lambda: len(self._queue),
            statuses=lambda: self._caches.statuses.items,
            lag_s=lambda: self.lag_s() or 0.0,
        )
        self._assignments = assignment_keeper(transport, clock, self._caches.specs)
        self._uses = model_use_keeper(transport, clock, self._caches.specs)
        self._lookups = LookupProblems(self._queue.add)
        listings = FleetListings(read=partial(read_listings, transport), errors=(StoreError,))
        self._hubs = replace(outbound.hubs, fleet=listings)
        self._snapshots = SnapshotController(
            transport,
            clock,
            self._caches,
            self._recorder,
            hubs=self._hubs,
            problems=self._lookups,
        )
        self._gitops = (
            None
            if git is None
            else GitOpsController(transport, clock, self._caches, self._recorder, git)
        )

    @property
    def is_synced(self) -> bool:
        """True once the state of the fleet is known."""
        return all(informer.synced for informer in self._caches.all())

    @property
    def refusal(self) -> str:
        """The reason why the store refuses this process; empty if it does not."""
        return next(filter(None, (informer.refusal for informer in self._caches.all())), "")

    def lag_s(self) -> float | None:
        """Return the seconds since the slowest cache heard from the store; None before each has."""
        ages = [informer.staleness_s() for informer in self._caches.all()]
        known = [age for age in ages if age is not None]
        return max(known) if len(known) == len(ages) else None

    async def run(self) -> None:
        """Run forever."""
        self._handlers.connect()
        self._snapshots.connect()
        self._assignments.connect()
        self._uses.connect()
        if self._gitops is not None:
            self._gitops.connect()
        async with asyncio.TaskGroup() as group:
            for informer in self._caches.all():
                group.create_task(informer.run())
            group.create_task(self._recorder.run())
            group.create_task(self._handlers.run())
            group.create_task(self._campaign())

    async def _campaign(self) -> None:
        for informer in self._caches.all():
            await informer.wait_synced()
        election = Election(
            self._transport, self._clock, key=keys.ELECTION_RECONCILER, ttl_s=_LEADER_TTL_S
        )
        while True:
            leadership = await election.campaign(self._identity)
            log.info("leading", extra={"epoch": leadership.epoch})
            self.metrics.is_leader = True
            try:
                await self._lead(leadership)
            except* AuthorityLostError:
                log.warning("no longer leading", extra={"epoch": leadership.epoch})
            finally:
                self.metrics.is_leader = False
                await leadership.resign()

    async def _lead(self, leadership: Leadership) -> None:
        executor = Executor(
            self._transport,
            self._clock,
            lambda: leadership.guard,
            self.metrics,
            own_writes=self._own_writes,
        )
        demand = DemandScraper(
            self._transport,
            self._clock,
            needed=self._lister.scraped_deployments,
            on_change=lambda name: self._queue.add(ObjectKey("ModelDeployment", name)),
            is_needed=lambda: bool(self._lister.policies()),
            dialer=self._dialer,
        )
        fabric = FabricChecker(
            self._lister,
            self._transport,
            self._clock,
            fence=lambda: leadership.guard,
            on_change=self._queue.add,
        )
        # A new leader starts with an empty memory, so it waits before it replaces or scales down anything.
        state = LeaderState(
            liveness=self._liveness,
            nodes=NodeViewCache(version()),
            demand=demand,
            lookups=self._lookups,
            waiting_for_room=self._handlers.waiting_for_room,
        )
        power = PowerController(
            lister=self._lister,
            liveness=self._liveness,
            transport=self._transport,
            clock=self._clock,
            recorder=self._recorder,
            demand=demand.demand,
            table=lambda: state.nodes.refresh(
                self._lister, self._liveness.now(self._lister, self._clock)
            ),
            unplaced=lambda: state.waiting_for_room,
            fence=lambda: leadership.guard,
            on_change=self._queue.add,
        )
        reconciler = Reconciler(
            self._lister, state, executor, self._recorder, self._clock, fabric=fabric.view
        )

        on_demand = OnDemandController(
            leadership=leadership,
            transport=FencedTransport(self._transport, leadership.guard),
            lister=self._lister,
            recorder=self._recorder,
            executor=executor,
            gateways=demand,
            hubs=self._hubs,
            clock=self._clock,
        )

        async def reconcile(key: ObjectKey) -> Requeue | None:
            with self.metrics.reconciling(key.kind):
                return await reconciler.reconcile(key)

        async def keep() -> None:
            await leadership.keep()
            raise AuthorityLostError("the lease ended")

        self._handlers.queue_everything()
        async with asyncio.TaskGroup() as group:
            group.create_task(keep())
            group.create_task(run_as_leader(self._queue, reconcile, leadership, workers=_WORKERS))
            group.create_task(self._record_node_events())
            group.create_task(demand.run())
            group.create_task(fabric.run())
            group.create_task(power.run())
            group.create_task(on_demand.run())
            group.create_task(self._sweep(executor))
            group.create_task(ChangeRetention(self._transport, self._clock).run())
            group.create_task(self._snapshots.lead(leadership))
            group.create_task(self._assignments.lead(leadership))
            group.create_task(self._uses.lead(leadership))
            if self._gitops is not None:
                group.create_task(self._gitops.lead(leadership))

    async def _sweep(self, executor: Executor) -> None:
        """Remove leftovers once; what cannot be removed now is left to the next leader."""
        caches = self._caches
        leftovers = list(
            find_leftovers(caches.specs.items, caches.statuses.items, caches.ranks.items)
        )
        for key, owner in leftovers:
            version = caches.statuses.version(key) or caches.ranks.version(key)
            guards = [
                ModRevisionGuard(key=owner, mod_revision=0),
                ModRevisionGuard(key=key, mod_revision=version),
            ]
            try:
                await executor.commit(guards, [Delete(key=key)])
            except StoreError as error:
                log.info("leftover was not removed", extra={"key": key, "why": str(error)})
            else:
                log.info("leftover removed", extra={"key": key})

    async def _record_node_events(self) -> None:
        """Record an event when a node becomes ready or not ready; the state at the start is no event."""
        before = self._lister.ready_nodes()
        while True:
            await self._caches.leases.reached(self._caches.leases.revision + 1)
            ready = self._lister.ready_nodes()
            if before - ready:
                await self._clock.sleep(_SETTLE_S)  # a status may arrive after the end of a lease
            asleep = self._liveness.asleep(self._lister)
            for name in sorted(before - ready - asleep):
                about = ObjectReference(kind="Node", name=name)
                message = "its agent stopped renewing its lease"
                await self._recorder.record(about, "NodeNotReady", message, type_="Warning")
            for name in sorted(asleep & before - ready):
                about = ObjectReference(kind="Node", name=name)
                await self._recorder.record(about, "NodeAsleep", "it sleeps until it is needed")
            for name in sorted(ready - before):
                about = ObjectReference(kind="Node", name=name)
                await self._recorder.record(about, "NodeReady", "its agent renews its lease")
            before = ready
