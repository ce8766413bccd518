"""Composition and life of one gateway, from listening to drained. Reads no environment."""

import asyncio
import random
import socket
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI

from compat.names import rename
from gateway.admin.admin_context import AdminContext, NodeCache
from gateway.admin.in_flight import InFlightSource
from gateway.apis.openai import PATHS, OpenAiAdapter
from gateway.apis.registry import translated_adapters
from gateway.app import make_app
from gateway.auth.rate_limits import Limits
from gateway.batches.database import BatchStore
from gateway.batches.runner import BatchGateway, BatchRunner
from gateway.disk_calls import open_store
from gateway.floating_address.holder import AddressHolder, make_holder
from gateway.forwarding.admission import Activator
from gateway.forwarding.attempt import AttemptRunner
from gateway.forwarding.forwarder import Forwarder
from gateway.forwarding.health_checks import HealthChecker, all_endpoints
from gateway.forwarding.load_gauges import deployment_gauges, forwarding_gauges
from gateway.forwarding.model_state import ModelStates
from gateway.forwarding.on_demand import OnDemandModels
from gateway.forwarding.resumption import Resumer
from gateway.forwarding.router import LoadTracker, Router
from gateway.handler import InferenceHandler
from gateway.handover import HandOver
from gateway.http.cors import CorsMiddleware
from gateway.http.handler_options import HandlerOptions
from gateway.http.limits import USUAL_CONNECTIONS, BodyMemory, FileLimit
from gateway.http.protocol import ClientProtocol
from gateway.http.tls import tls_options
from gateway.limits import GatewayLimits
from gateway.metrics.gateway_metrics import ConnectionCounts, GatewayMetrics, ProcessMetrics
from gateway.metrics.version_metrics import VersionMetrics
from gateway.responses.database import ResponseDatabase
from gateway.responses.stateful import StatefulResponses
from gateway.stalled_clients import release_stalled
from gateway.state.endpoint_filter import EngineAccess
from gateway.state.fleet_state import FleetState
from gateway.telemetry.recorder import RequestRecorder, Tracer
from gateway.telemetry.request_journal import JournalWriter, RequestJournal
from gateway.telemetry.saved_journal import SavedJournal
from gateway.upstream.dialer import Dialer
from gateway.upstream.engine_links import EngineLinks
from gateway.upstream.tls import EngineTls
from identity.log_access import LogAccess
from identity.metrics_access import MetricsAccess
from identity.names import Role, worker_id
from identity.renewal import Applicant, own_addresses
from identity.upkeep import IdentityUpkeep
from machinery.clock import Clock
from machinery.connection_limits import AddressLimit, ConnectionLimiter
from machinery.http_server import HttpServer
from machinery.prometheus import Gauge
from machinery.state_disk import StateDisk
from store import codec, keys
from store.leases import hold_published
from store.metrics import MeasuredTransport, StoreMetrics
from store.port import Transport
from store.tickets import TicketChecker

_SWEEP_S = 1.0
# Most clients have closed their idle connections by then (httpx: 5 s, aiohttp: 15 s).
_HANDOVER_LINGER_S = 15.0
# Time after the drain to write the last events of streams that were cut off.
_LAST_EVENTS_S = 2


def _id(limits: GatewayLimits) -> str:
    """Return the name that the gateway's certificate proves, so that nothing else can register as it; "" without."""
    if limits.credentials is None:
        return ""
    name = limits.credentials.identity.name
    return name if limits.place is None else worker_id(name, limits.place.number)


def _upkeep(
    transport: Transport, clock: Clock, limits: GatewayLimits, url: str
) -> IdentityUpkeep | None:
    """Return the upkeep of the gateway's certificate; None without a folder for it.

    Of several workers, one renews the certificate that all of them use.
    """
    if limits.identity_folder is None or not (limits.place is None or limits.place.is_first):
        return None
    addresses = own_addresses(*limits.identity_addresses, urlsplit(url).hostname or "")
    applicant = Applicant(role=Role.GATEWAY, addresses=lambda: addresses)
    return IdentityUpkeep(transport, clock, limits.identity_folder, applicant, limits.credentials)


class Gateway:
    """One gateway. `run()` is its life; `stop()` ends it after a drain, a second `stop()` ends it at once."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        entropy: random.Random,
        limits: GatewayLimits,
        *,
        url: str,
        tracer: Tracer | None = None,
    ) -> None:
        """`url`: the address at which the reconciler reaches this gateway."""
        self._store_metrics = StoreMetrics(clock)
        transport = MeasuredTransport(transport, self._store_metrics)
        self._clock = clock
        self._limits = limits
        self.fleet_state = FleetState(
            transport,
            clock,
            anonymous=None if limits.asks_for_keys else limits.anonymous or Limits(),
            state_dir=limits.state_dir,
            site=limits.site,
            access=EngineAccess(sockets=limits.engine_sockets, credentials=limits.credentials),
        )
        self.table_cache = self.fleet_state.table_cache
        self.load_tracker = LoadTracker(entropy, self.fleet_state.gpu_loads.by_node)
        self.links = self._engine_links()
        self.activator = Activator(
            self.table_cache, self.load_tracker, clock, limit=limits.hold_limit
        )
        self.on_demand = OnDemandModels(transport, clock)
        model_states = limits.model_states(clock)
        self.versions = VersionMetrics()
        instance = f"{entropy.getrandbits(48):012x}"
        id_ = _id(limits) or instance
        self._state_disk = StateDisk(limits.state_dir, clock)
        # So that the reconciler finds its metrics. Serving does not depend on it.
        key = keys.named(keys.GATEWAY_LEASE_PREFIX, id_)
        self._registration = partial(
            hold_published, transport, clock, key, partial(self._lease, url)
        )
        self._upkeep = _upkeep(transport, clock, limits, url)
        self._holder = make_holder(transport, clock, limits.floating, instance)
        self.recorder = self._recorder(id_, instance, model_states, tracer)
        self.fleet_state.access.refusals = self.metrics.limited
        router = Router(
            table_cache=self.table_cache,
            load_tracker=self.load_tracker,
            clock=clock,
            random=entropy,
        )
        self.forwarder = forwarder = self._forwarder(model_states, router)
        openai, store = OpenAiAdapter(), open_store(BatchStore, limits.state_dir, "batches")
        database = open_store(ResponseDatabase, limits.state_dir, "responses")
        stateful = StatefulResponses(database, clock)
        self.handler = InferenceHandler(
            forwarder,
            {
                **{path.encode(): openai for path in PATHS},
                **translated_adapters(self.table_cache, clock),
            },
            self.fleet_state.access,
            self.recorder,
            self._handler_options(instance),
            stateful,
        )
        self.links.dialer.clients = self.handler.connections
        self._stopping, self._gives_way = asyncio.Event(), False
        self._batches = None if store is None else self._batch_runner(store, model_states)
        context, handler = self._admin_context(transport, id_, model_states), self.handler
        requests = InFlightSource(running=handler.running, cancel=handler.cancel, links=self.links)
        app = make_app(context, requests, store, stateful, has_compat_names=limits.has_compat_names)
        self._server = self._http_server(app)

    @property
    def metrics(self) -> GatewayMetrics:
        """All metrics of the gateway."""
        return self.recorder.metrics

    def _lease(self, url: str) -> bytes:
        disk = self._state_disk.full_folder
        return codec.encode(self._limits.lease(url).model_copy(update={"full_disk": disk}))

    def _engine_links(self) -> EngineLinks:
        """Return the links to engines, which follow the table and the gateway's identity."""
        limits, credentials = self._limits, self._limits.credentials
        tls = None if credentials is None else EngineTls(credentials)
        dialer = Dialer(self._clock, tls)
        silence_s = limits.request_timeout_s
        links = EngineLinks(self._clock, dialer, self.load_tracker, silence_s=silence_s)
        self.table_cache.on_change(lambda: links.set_engines(all_endpoints(self.table_cache.table)))
        if credentials is not None:
            credentials.on_change(links.close_revoked)
        return links

    def _handler_options(self, id_: str) -> HandlerOptions:
        """Return the options that apply to every request and connection of clients."""
        limits, on_shed = self._limits, self.metrics.shed.add
        limit_of_address = limits.max_connections_per_address
        self.file_limit = FileLimit(
            self._clock,
            max_files=limits.max_files,
            count_files=self.recorder.process.count_files,
            count_engines=self.links.connections,
            on_shed=on_shed,
        )
        return HandlerOptions(
            max_body=limits.max_body_bytes,
            body_memory=BodyMemory(limits.max_body_memory_bytes, limits.max_body_bytes, on_shed),
            connections=ConnectionLimiter(
                AddressLimit(
                    USUAL_CONNECTIONS if limit_of_address is None else limit_of_address,
                    is_local_free=limit_of_address is None,
                    on_refuse=partial(on_shed, "address"),
                ),
                self.file_limit.has_room,
                self.file_limit.count,
            ),
            hosts=limits.hosts,
            origins=limits.origins,
            id_prefix=id_,
            draw=self.load_tracker.draw,
            count_mirrored=self.metrics.mirrored.add,
            store_wait_s=limits.resume_timeout_s,
            store_wait_limit=limits.store_wait_limit,
            default_model=limits.default_model,
            rename=rename if limits.has_compat_names else None,
        )

    def _admin_context(
        self, transport: Transport, id_: str, model_states: ModelStates
    ) -> AdminContext:
        """Return the context of the admin API."""
        clock, security = self._clock, self._limits.security
        tickets = TicketChecker(transport, clock, f"Gateway/{id_}")
        return AdminContext(
            id=id_,
            metrics_access=MetricsAccess(
                tickets=tickets,
                roles=frozenset({Role.RECONCILER, Role.ADMIN, Role.DASHBOARD}),
                token=security.metrics_token,
                is_open=security.has_open_metrics,
            ),
            fleet_state=self.fleet_state,
            load_tracker=self.load_tracker,
            activator=self.activator,
            on_demand=self.on_demand,
            model_states=model_states,
            recorder=self.recorder,
            nodes=NodeCache(transport, clock),
            log=LogAccess(
                process="gateway",
                ring=self._limits.ring,
                tickets=tickets,
                clock=clock,
                is_stopping=lambda: self.handler.is_stopping,
            ),
            clock=clock,
        )

    def _recorder(
        self, id_: str, run: str, model_states: ModelStates, tracer: Tracer | None
    ) -> RequestRecorder:
        """Return the recorder of finished requests; `run` names this run of the gateway."""
        file = (
            JournalWriter(self._limits.journal_file, self._clock, gateway=id_)
            if self._limits.journal_file
            else None
        )
        journal = RequestJournal(self._limits.journal_size, run)
        self._saved_journal = self._restore(journal)
        process = ProcessMetrics(
            self._clock,
            ConnectionCounts(
                clients=lambda: len(self._server.server_state.connections),
                engines=self.links.connections,
            ),
        )
        metrics = GatewayMetrics(
            in_flight=self.load_tracker.total,
            endpoints=lambda: self.table_cache.table.endpoints,
            refused=lambda: self.table_cache.table.refused,
            more=(
                *deployment_gauges(self.load_tracker, self.activator),
                self.versions,
                self.on_demand.gauge(),
            ),
            others=(
                self._store_metrics,
                self.fleet_state.keyring,
                process,
                self.links.dialer.tls_failures,
                *([self._upkeep] if self._upkeep else ()),
                *([file] if file else ()),
                *([self._saved_journal] if self._saved_journal else ()),
                Gauge(
                    "fleet_gateway_body_bytes",
                    "Memory of large request bodies, until their requests have ended.",
                    lambda: self.handler.body_memory.used,
                ),
                *forwarding_gauges(self.load_tracker, model_states, self._clock),
            ),
        )
        return RequestRecorder(
            table_cache=self.table_cache,
            counted_metrics=metrics,
            clock=self._clock,
            counted_journal=journal,
            process=process,
            file=file,
            tracer=tracer,
        )

    def _restore(self, journal: RequestJournal) -> SavedJournal | None:
        """Fill the journal with what an earlier run saved; return what saves it from now on."""
        path, size = self._limits.saved_journal, self._limits.journal_size
        if path is None:
            return None
        saved = SavedJournal(path, journal, self._clock, size=size)
        saved.restore()
        return saved

    def _forwarder(self, model_states: ModelStates, router: Router) -> Forwarder:
        """Return the forwarder of requests to engines."""
        attempts = AttemptRunner(
            upstream=self.links,
            load_tracker=self.load_tracker,
            versions=self.versions,
            table_cache=self.table_cache,
            metrics=self.metrics,
            clock=self._clock,
        )
        self.health_checker = HealthChecker(attempts, self.links, model_states)
        return Forwarder(
            attempts=attempts,
            model_states=model_states,
            activator=self.activator,
            router=router,
            resumer=Resumer(attempts=attempts, router=router),
            on_demand=self.on_demand,
        )

    def _batch_runner(self, store: BatchStore, model_states: ModelStates) -> BatchRunner:
        """Return what runs the batches of the state folder while Macs are idle."""
        gateway = BatchGateway(
            handler=self.handler,
            fleet_state=self.fleet_state,
            load_tracker=self.load_tracker,
            model_states=model_states,
        )
        return BatchRunner(store, gateway, gone_key_s=self._limits.gone_key_s)

    def _http_server(self, app: FastAPI) -> HttpServer:
        """Return the HTTP or HTTPS server for clients."""
        limits = self._limits
        config = uvicorn.Config(
            CorsMiddleware(app, limits.origins),
            http=cast("type[ClientProtocol]", partial(ClientProtocol, self.handler)),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(limits.drain_timeout_s) + 1 + _LAST_EVENTS_S,
        )
        options = tls_options(
            limits.certificate,
            limits.credentials,
            accepts_plain=limits.certificate is None and limits.accepts_plain,
            max_files=limits.max_files,
            on_shed=partial(self.metrics.shed.add, "handshake"),
        )
        return HttpServer(config, self.stop, None if options is None else options.acceptor)

    def stop(self) -> None:
        """Accept no more connections and finish running requests; if called again, cut them off."""
        if self._stopping.is_set():
            self.handler.cut_off()
        self.handler.is_stopping = True
        self._stopping.set()

    def give_way(self) -> None:
        """Stop because another gateway now serves on the same socket: clients get time to finish."""
        self.handler.linger_s = min(_HANDOVER_LINGER_S, self._limits.drain_timeout_s)
        self._gives_way = True
        self.stop()

    async def run(
        self,
        listener: socket.socket,
        handover: HandOver | None = None,
        *,
        own: socket.socket | None = None,
    ) -> None:
        """Serve until stopped and drained, or until a successor takes over.

        `own`: a second socket, at which this process answers although others accept connections on `listener`.
        """
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(self.fleet_state.run()),
                group.create_task(self.on_demand.run()),
                group.create_task(self._registration()),
                group.create_task(self._state_disk.run()),
                group.create_task(self.links.run()),
                group.create_task(self.health_checker.run()),
                group.create_task(self.recorder.run()),
                group.create_task(
                    release_stalled(
                        self.handler.running,
                        self.forwarder,
                        yield_s=self._limits.yield_timeout_s,
                        timeout_s=self._limits.send_timeout_s,
                    )
                ),
                group.create_task(self._close_late()),
                group.create_task(self._drain()),
            ]
            if self._saved_journal is not None:
                background.append(group.create_task(self._saved_journal.run(self.recorder.count)))
            if self._batches is not None:
                background.append(group.create_task(self._batches.run()))
            if self._limits.certificate is not None:
                watch = self._limits.certificate.watch(self._clock)
                background.append(group.create_task(watch))
            if self._upkeep is not None:
                background.append(group.create_task(self._upkeep.run()))
            elif self._limits.credentials is not None:
                background.append(group.create_task(self._limits.credentials.watch()))
            # Until then connections wait in the socket's queue, which refuses none.
            await self.fleet_state.wait_settled()
            if handover is not None:
                await handover.wait_ready(self._is_ready)
                background.append(group.create_task(handover.run(self.give_way)))
            if self._holder is not None:
                background.append(group.create_task(self._hold_address(self._holder)))
            await self._server.serve(sockets=[listener] if own is None else [listener, own])
            for task in background:
                task.cancel()
        self.handler.mirror.close()
        self.links.close()

    async def _hold_address(self, holder: AddressHolder) -> None:
        """Take part in holding the floating address while clients are accepted."""
        async with asyncio.TaskGroup() as group:
            holding = group.create_task(holder.run())
            await self._stopping.wait()
            # The successor on this machine serves behind the same address; otherwise another machine takes it now.
            if not self._gives_way:
                holding.cancel()

    def _is_ready(self) -> bool:
        knows_keys = self.fleet_state.keyring.is_known or not self._limits.asks_for_keys
        return (self.table_cache.is_synced and knows_keys) or self._stopping.is_set()

    async def _close_late(self) -> None:
        """Close connections of clients that do not complete their request in time, and count open files."""
        while True:
            self.file_limit.measure(len(self._server.server_state.connections))
            await self._clock.sleep(_SWEEP_S)
            now_s = self._clock.monotonic()
            for connection in tuple(self._server.server_state.connections):
                if isinstance(connection, ClientProtocol) and connection.deadline_s < now_s:
                    connection.on_deadline(now_s)

    async def _drain(self) -> None:
        await self._stopping.wait()
        self._server.should_exit = True
        await self._clock.sleep(self._limits.drain_timeout_s)
        self.handler.cut_off()
