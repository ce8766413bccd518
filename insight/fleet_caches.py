"""Caches of everything in a fleet's store but secrets, for processes that show a fleet to people.

caches = make_fleet_caches(transport, clock)
group.create_task(caches.run())        # a recorder follows the store
await caches.list_once()               # a command reads it once
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from machinery.clock import Clock
from reconciler.listers.caches import Caches, make_caches
from schemas.event import Event
from schemas.records import DashboardLease, GatewayLease, ReconcilerLease
from store import codec, keys
from store.informer import AnyInformer, Informer
from store.memory import MemoryTransport
from store.port import KeyValue, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCaches:
    """The informers over one fleet, one per key prefix."""

    objects: Caches
    """Specs, statuses, rank reports, leases of nodes, endpoints and node lives: those of the reconciler."""
    gateways: Informer[GatewayLease]
    reconcilers: Informer[ReconcilerLease]
    dashboards: Informer[DashboardLease]
    events: Informer[Event]
    leader: Informer[str]
    """The identity of the leading reconciler; empty if none leads."""

    def all(self) -> tuple[AnyInformer, ...]:
        """Return every informer."""
        return (
            *self.objects.all(),
            *(self.gateways, self.reconcilers, self.dashboards, self.events, self.leader),
        )

    @property
    def is_synced(self) -> bool:
        """True once every first list is complete."""
        return all(informer.synced for informer in self.informers())

    @property
    def revision(self) -> int:
        """The newest revision of the store that any cache has seen."""
        return max(informer.revision for informer in self.informers())

    @property
    def refusal(self) -> str:
        """The first reason why the store refuses this process; empty if it does not."""
        return next((informer.refusal for informer in self.informers() if informer.refusal), "")

    def staleness_s(self) -> float | None:
        """Return the seconds since the store last sent anything; None before every first list."""
        ages = [informer.staleness_s() for informer in self.informers()]
        known = [age for age in ages if age is not None]
        return min(known) if len(known) == len(ages) else None

    def silent_s(self) -> float:
        """Return the seconds since the store stopped to answer; 0.0 while it answers."""
        return min(informer.broken_s() for informer in self.informers())

    def on_change(self, handler: Callable[[str], None]) -> None:
        """Call the handler with each key that changes from now on."""
        for informer in self.informers():
            informer.on_change(handler)

    async def wait_synced(self) -> None:
        """Wait for every first list."""
        for informer in self.all():
            await informer.wait_synced()

    async def list_once(self) -> None:
        """Fill the caches from one list each, without watches.

        Raises:
            StoreError: the store does not answer, or refuses.

        """
        try:
            async with asyncio.TaskGroup() as group:
                for informer in self.all():
                    group.create_task(informer.list_once())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def run(self) -> None:
        """Keep every cache current, forever."""
        async with asyncio.TaskGroup() as group:
            for informer in self.all():
                group.create_task(informer.run())

    def informers(self) -> tuple[Informer[object], ...]:
        """Return every informer, with its keys and their versions."""
        return tuple(informer for informer in self.all() if isinstance(informer, Informer))


def make_fleet_caches(transport: Transport, clock: Clock) -> FleetCaches:
    """Return the caches of a fleet; their informers do not run yet."""
    return FleetCaches(
        objects=make_caches(transport, clock),
        gateways=Informer(
            transport,
            keys.GATEWAY_LEASE_PREFIX,
            lambda item: codec.decode(GatewayLease, item),
            clock,
        ),
        reconcilers=Informer(
            transport,
            keys.RECONCILER_LEASE_PREFIX,
            lambda item: codec.decode(ReconcilerLease, item),
            clock,
        ),
        dashboards=Informer(
            transport,
            keys.DASHBOARD_LEASE_PREFIX,
            lambda item: codec.decode(DashboardLease, item),
            clock,
        ),
        events=Informer(
            transport, keys.EVENT_PREFIX, lambda item: codec.decode_object(Event, item), clock
        ),
        leader=Informer(transport, keys.ELECTION_RECONCILER, _text, clock),
    )


def copy_caches(caches: FleetCaches, clock: Clock) -> FleetCaches:
    """Return caches that hold the same objects, for suppositions."""
    copied = make_fleet_caches(MemoryTransport(clock), clock)
    for informer, other in zip(copied.informers(), caches.informers(), strict=True):
        informer.copy_from(other)
    return copied


def caches_of(items: Iterable[KeyValue], clock: Clock) -> FleetCaches:
    """Return caches that hold these documents: a fleet at an earlier moment, or one that does not exist."""
    caches = make_fleet_caches(MemoryTransport(clock), clock)
    informers = caches.informers()
    for item in items:
        for informer in informers:
            if item.key.startswith(informer.prefix):
                informer.suppose(item)
                break
    return caches


def _text(item: KeyValue) -> str:
    return item.value.decode("utf-8", "replace")
