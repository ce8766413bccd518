"""The dashboard process: caches, model, keys, registration and HTTP server, and the tasks that run them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dashboard.app import AppContext, make_app
from dashboard.auth import login_required
from dashboard.collector import FigureCollector
from dashboard.energy import ShareCounter
from dashboard.fleet_figures import FleetFigures
from dashboard.fleet_model import IN_FLIGHT, FleetModel
from dashboard.history.database import HistoryLimits, Restored
from dashboard.history.object_recorder import ObjectRecorder
from dashboard.history.recorder import HistoryRecorder
from dashboard.history.writer import HistoryWriter
from dashboard.objectives import ObjectiveMonitor
from dashboard.record_views import ChangeLog, show_join_requests
from dashboard.saved_keys import SavedKeys
from dashboard.sessions import Sessions
from dashboard.store_probe import StoreProbe
from dashboard.traffic import Traffic
from dashboard.updates import UpdateEvents
from gateway.auth.access_control import AccessControl
from gateway.auth.keyring import Keyring
from gateway.state.key_cache import GatewayCounter, KeyCache
from identity.credentials import TlsReporter, no_report
from identity.dialer import Dialer
from identity.log_access import LogAccess
from insight.fleet_caches import make_fleet_caches
from machinery.clock import Clock
from machinery.http_server import AdminServer, ConnectionLimits, ServerSecurity
from machinery.process_log import LogRing
from machinery.state_disk import StateDisk
from machinery.version import version
from schemas.records import ApiKey, DashboardLease
from schemas.wire.requests import EndedRequest
from store import codec, keys
from store.leases import hold_published
from store.metrics import MeasuredTransport, StoreMetrics
from store.port import Transport
from store.tickets import TicketChecker

# A page has one stream and a few requests; each connection serves one request. Many people may share a proxy.
_LIMITS = ConnectionLimits(connections=512, per_address=128, has_websockets=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardSettings:
    """Options of one dashboard."""

    address: tuple[str, int]
    """Host and port to listen on; port 0 for any."""
    asks_for_keys: bool
    can_write: bool = False
    """True if the page may change the fleet."""
    hosts: tuple[str, ...] = ()
    """Further names by which clients address the process."""
    session_secret: bytes
    state_dir: Path | None = None
    """Folder of the history; None: nothing is kept on disk."""
    history: HistoryLimits = field(default_factory=HistoryLimits)
    security: ServerSecurity
    has_store_password: bool = False
    dialer: Dialer = field(default_factory=Dialer)
    """Decides how to dial gateways and agents."""
    ring: LogRing = field(default_factory=LogRing)
    """The dashboard's own log."""
    tls: TlsReporter = no_report
    """Reports the TLS of this process."""


def _history_writer(settings: DashboardSettings, clock: Clock) -> HistoryWriter | None:
    """Return the writer of the history; None without a folder for it."""
    if settings.state_dir is None:
        return None
    return HistoryWriter(settings.state_dir, clock, settings.history)


def _saved_keys(cache: KeyCache, settings: DashboardSettings, clock: Clock) -> SavedKeys:
    """Return the keys of the state folder; an older file than the history is not used."""
    return SavedKeys(
        cache=cache, clock=clock, folder=settings.state_dir, max_age_s=settings.history.kept_s
    )


def _totals(found: Restored) -> list[tuple[int, int, Sequence[float]]]:
    """Return begin, seconds and sums of the requests of each recorded interval."""
    return [(at_s, seconds, sums.totals()) for at_s, seconds, sums in found.sums]


class Dashboard:
    """One dashboard process. `run()` is its life."""

    def __init__(
        self, transport: Transport, clock: Clock, settings: DashboardSettings, *, id_: str
    ) -> None:
        """`id_` names this run: ids of streams and the lease carry it."""
        store_metrics = StoreMetrics(clock)
        transport = MeasuredTransport(transport, store_metrics)
        self._settings = settings
        self._clock = clock
        caches, probe = make_fleet_caches(transport, clock), StoreProbe(transport, clock)
        self.model = FleetModel(caches, clock, probe, epoch=id_)
        keyring = Keyring(clock)
        self._gateways = GatewayCounter(transport, clock)
        self._keys: KeyCache | None = None
        self._saved_keys: SavedKeys | None = None
        if settings.asks_for_keys:
            self._keys = KeyCache(transport, clock, keyring, self._gateways)
            self._saved_keys = _saved_keys(self._keys, settings, clock)
        access = AccessControl(
            keyring, clock, is_on=settings.asks_for_keys, refuse_keyless=login_required
        )
        sessions = Sessions(settings.session_secret, clock, self.known_keys, settings.state_dir)
        self.traffic = Traffic(clock.now().timestamp())
        self.views = FleetFigures(self.model, self.traffic, clock, clock.now())
        self.history = _history_writer(settings, clock)
        self._collector = FigureCollector(
            transport=transport,
            caches=self.model.caches,
            traffic=self.traffic,
            clock=clock,
            dialer=settings.dialer,
        )
        self.changes = ChangeLog(transport, self.model, clock)
        self.objectives = ObjectiveMonitor(self.model, clock)
        self.shares = ShareCounter()
        self._collector.on_ended = self._record_requests
        self._collector.wants_progress = partial(self.model.is_read, IN_FLIGHT)
        self._updates = UpdateEvents(self.views)
        tickets = TicketChecker(transport, clock, f"Dashboard/{id_}")
        context = AppContext(
            transport=transport,
            model=self.model,
            views=self.views,
            changes=self.changes,
            access=access,
            sessions=sessions,
            tickets=tickets,
            log=LogAccess(process="dashboard", ring=settings.ring, tickets=tickets, clock=clock),
            dialer=settings.dialer,
            history=self.history,
            objectives=self.objectives,
            can_write=settings.can_write,
            store_metrics=store_metrics,
        )
        self.app = make_app(context)
        self.server = AdminServer(
            self.app,
            clock,
            settings.address,
            lambda: None,
            limits=_LIMITS,
            security=replace(settings.security, allowed_hosts=settings.hosts),
        )
        self._transport = transport
        self._state_disk = StateDisk(settings.state_dir, clock)
        self._lease_key = keys.named(keys.DASHBOARD_LEASE_PREFIX, id_)

    def known_keys(self) -> Mapping[str, ApiKey] | None:
        """Return the API keys with which logins are checked, by name; None if none are known yet."""
        return None if self._saved_keys is None else self._saved_keys.known()

    def _lease(self) -> bytes:
        """Return the document by which gateways and fleetctl find this dashboard."""
        lease = DashboardLease(
            url=self.server.url,
            version=version(),
            asks_for_keys=self._settings.asks_for_keys,
            has_store_password=self._settings.has_store_password,
            tls=self._settings.tls(),
            full_disk=self._state_disk.full_folder,
        )
        return codec.encode(lease)

    def _record_requests(self, ended: Sequence[EndedRequest], cursors: Mapping[str, str]) -> None:
        self.objectives.count(ended)
        self.shares.count(ended)
        if self.history is not None:
            self.history.add_requests(ended, cursors)

    async def _collect(self) -> None:
        """Take what an earlier run recorded, then gather figures forever."""
        restored = None if self.history is None else await self.history.opened()
        if restored is not None:
            self.traffic.restore(
                restored.requests, restored.macs, _totals(restored), restored.steps
            )
            self._collector.cursors.update(restored.cursors)
            self.objectives.restore(restored.deployments)
        await self._collector.run()

    async def _rebuild_figures(self, history: HistoryWriter) -> None:
        """Take figures from the history whenever the clock jumped, forever.

        A clock that is a day ahead pushes the day before out of the sums, and one that is set back forgets what came.
        """
        while True:
            await self._collector.clock_jumped.wait()
            self._collector.clock_jumped.clear()
            restored, since = await history.reread()
            if restored is not None:
                self.traffic.rebuild(_totals(restored), restored.steps, since)
                self.objectives.rebuild(restored.deployments, since)

    async def run(self) -> None:
        """Serve forever. While the store is away, the last known state is shown with its age."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.model.run())
            group.create_task(self.server.run())
            group.create_task(self._state_disk.run())
            if self.history is not None:
                group.create_task(self.history.run())
                group.create_task(self._rebuild_figures(self.history))
                recorder = HistoryRecorder(
                    self.model, self.traffic, self.history, self._clock, self.shares
                )
                group.create_task(recorder.run())
                objects = ObjectRecorder(self.model.caches, self.history, self._clock)
                group.create_task(objects.run())
            group.create_task(self._collect())
            group.create_task(self._updates.run())
            group.create_task(self.changes.run())
            group.create_task(show_join_requests(self._transport, self.model, self._clock))
            group.create_task(self.objectives.run())
            leased = hold_published(self._transport, self._clock, self._lease_key, self._lease)
            group.create_task(leased)
            if self._keys is not None and self._saved_keys is not None:
                group.create_task(self._gateways.run())
                group.create_task(self._keys.run())
                group.create_task(self._saved_keys.run())
