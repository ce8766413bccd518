"""The gateway's parts put together, and its life from listening to drained. Reads no environment.

What a gateway shows of engines' standing and of its own queues. Counts nothing itself.
"""

import asyncio
import random
import socket
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from fastapi import FastAPI

from gateway.admin.admin_context import AdminContext, NodeCache
from gateway.admin.gateway_log import GatewayLog
from gateway.apis.openai import PATHS, OpenAiAdapter
from gateway.apis.registry import translated_adapters
from gateway.app import make_app
from gateway.forwarding.admission import QUIET_S, Activator
from gateway.forwarding.attempt import AttemptRunner
from gateway.forwarding.forwarder import Forwarder
from gateway.forwarding.health_checks import HealthChecker
from gateway.forwarding.load_tracker import LoadTracker
from gateway.forwarding.model_state import ModelStates
from gateway.forwarding.resumption import Resumer
from gateway.forwarding.router import Router
from gateway.handler import HandlerOptions, InferenceHandler
from gateway.handover import HandOver
from gateway.http.cors import AllowedOrigins, CorsMiddleware
from gateway.http.protocol import ClientProtocol
from gateway.metrics.gateway_metrics import ConnectionCounts, GatewayMetrics, ProcessMetrics
from gateway.metrics.version_metrics import VersionMetrics
from gateway.registration import Registration
from gateway.state.fleet_state import FleetState
from gateway.telemetry.recorder import RequestRecorder, Tracer
from gateway.telemetry.request_journal import JournalWriter, RequestJournal
from gateway.upstream.connection_pool import ConnectionPool
from machinery.clock import Clock
from machinery.http_server import SignalServer
from machinery.process_log import LogRing
from machinery.prometheus import LabelledGauge
from store.port import Transport
from store.tickets import TicketChecker

_SWEEP_S = 1.0
# Most clients have closed their idle connections by then themselves (httpx: 5 s, aiohttp: 15 s).
_GIVE_WAY_S = 15.0
# After the drain: for the last events of streams that were cut off to get out.
_CLOSE_S = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """What a gateway puts up with."""

    max_body_bytes: int = 8 << 20
    request_timeout_s: float = 600.0
    """The longest silence of an engine, and of a client that reads nothing."""
    drain_timeout_s: float = 30.0
    hold_timeout_s: float = 120.0
    """How long a request waits for a deployment to come back from zero."""
    quiet_s: float = QUIET_S
    """How long the client of a stream waits for its turn, or for a replica, without a sign of life."""
    hold_limit: int = 64
    """How many may wait for one deployment."""
    resume_timeout_s: float = 10.0
    """How long a stream whose engine died waits for another: small models are restarted within it."""
    origins: AllowedOrigins = field(default_factory=AllowedOrigins)
    """Where web pages may come from."""
    asks_for_keys: bool = False
    """Whether only holders of API keys are served."""
    state_dir: Path | None = None
    """Where what is known is kept for a start without the store; None: nowhere."""
    site: str = ""
    """Where the gateway is: engines of the same site are asked first."""
    journal_size: int = 10_000
    """How many of the last requests are kept in memory."""
    journal_file: Path | None = None
    """Where all requests are written down; None: nowhere."""
    ring: LogRing = field(default_factory=LogRing)
    """The last lines of the gateway's own log."""


class Gateway:
    """One gateway. `run()` is its life; `stop()` ends it after a drain, `stop()` again at once."""

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
        """`url`: where the reconciler reaches us; `tracer`: who records traces."""
        self._clock = clock
        self._limits = limits
        self.known = FleetState(
            transport,
            clock,
            asks_for_keys=limits.asks_for_keys,
            state_dir=limits.state_dir,
            site=limits.site,
        )
        self.keeper = self.known.keeper
        self.loads = LoadTracker(entropy)
        self.pool = ConnectionPool(clock, silence_s=limits.request_timeout_s)
        self.room = Activator(
            self.keeper, clock, limit=limits.hold_limit, patience_s=limits.hold_timeout_s
        )
        names = ModelStates(clock, silence_s=limits.request_timeout_s, quiet_s=limits.quiet_s)
        self.versions = VersionMetrics()
        id_ = f"{entropy.getrandbits(48):012x}"
        asks = limits.asks_for_keys
        self.presence = Registration(transport, clock, id_=id_, url=url, asks_for_keys=asks)
        self.recorder = self._recorder(id_, names, tracer)
        self.metrics = self.recorder.metrics
        self.known.access.on_refusal(self.metrics.limited.add)
        router = Router(keeper=self.keeper, loads=self.loads, clock=clock, random=entropy)
        failover = self._failover(names, router)
        openai = OpenAiAdapter()
        self.desk = InferenceHandler(
            failover,
            {
                **{path.encode(): openai for path in PATHS},
                **translated_adapters(self.keeper, clock),
            },
            self.known.access,
            self.recorder,
            HandlerOptions(max_body=limits.max_body_bytes, origins=limits.origins, id_prefix=id_),
        )
        self._stopping = asyncio.Event()
        self._server = self._listening(make_app(self._sight(transport, id_, names)))

    def _sight(self, transport: Transport, id_: str, names: ModelStates) -> AdminContext:
        """Return what the admin API looks at."""
        clock = self._clock
        return AdminContext(
            id=id_,
            known=self.known,
            loads=self.loads,
            room=self.room,
            names=names,
            recorder=self.recorder,
            nodes=NodeCache(transport, clock),
            log=GatewayLog(
                ring=self._limits.ring,
                tickets=TicketChecker(transport, clock, f"Gateway/{id_}"),
                clock=clock,
                is_stopping=lambda: self.desk.is_stopping,
            ),
            clock=clock,
        )

    def _recorder(self, id_: str, names: ModelStates, tracer: Tracer | None) -> RequestRecorder:
        """Return who writes requests down."""
        file = (
            JournalWriter(self._limits.journal_file, self._clock, gateway=id_)
            if self._limits.journal_file
            else None
        )
        process = ProcessMetrics(
            self._clock,
            ConnectionCounts(
                clients=lambda: len(self._server.server_state.connections),
                engines=self.pool.connections,
            ),
        )
        metrics = GatewayMetrics(
            in_flight=self.loads.total,
            endpoints=lambda: self.keeper.table.endpoints,
            more=(*_deployment_gauges(self.loads, self.room), self.versions),
            others=(
                self.known.keyring,
                process,
                *([file] if file else ()),
                *_forwarding_gauges(self.loads, names, self._clock),
            ),
        )
        return RequestRecorder(
            keeper=self.keeper,
            metrics=metrics,
            clock=self._clock,
            journal=RequestJournal(self._limits.journal_size),
            process=process,
            file=file,
            tracer=tracer,
        )

    def _failover(self, names: ModelStates, router: Router) -> Forwarder:
        """Return who carries requests to engines."""
        attempts = AttemptRunner(
            upstream=self.pool,
            loads=self.loads,
            versions=self.versions,
            keeper=self.keeper,
            metrics=self.metrics,
            clock=self._clock,
        )
        self.prober = HealthChecker(attempts, self.pool, names)
        return Forwarder(
            attempts=attempts,
            names=names,
            room=self.room,
            router=router,
            resumer=Resumer(
                attempts=attempts, router=router, patience_s=self._limits.resume_timeout_s
            ),
        )

    def _listening(self, app: FastAPI) -> SignalServer:
        """Return the server of clients' connections."""
        return SignalServer(
            uvicorn.Config(
                CorsMiddleware(app, self._limits.origins),
                http=cast("type[ClientProtocol]", partial(ClientProtocol, self.desk)),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=int(self._limits.drain_timeout_s) + 1 + _CLOSE_S,
            ),
            self.stop,
        )

    def stop(self) -> None:
        """Take no more connections, finish what runs; asked again, finish nothing."""
        if self._stopping.is_set():
            self.desk.cut_off()
        self.desk.is_stopping = True
        self._stopping.set()

    def give_way(self) -> None:
        """Stop: another gateway serves on the same socket now, so that clients need not hurry."""
        self.desk.linger_s = min(_GIVE_WAY_S, self._limits.drain_timeout_s)
        self.stop()

    async def run(self, listener: socket.socket, handover: HandOver | None = None) -> None:
        """Serve until stopped and drained, or until the next gateway does."""
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(self.known.run()),
                group.create_task(self.presence.run()),
                group.create_task(self.pool.keep()),
                group.create_task(self.prober.run()),
                group.create_task(self.recorder.keep()),
                group.create_task(self.desk.keep(patience_s=self._limits.request_timeout_s)),
                group.create_task(self._hurry()),
                group.create_task(self._drain()),
            ]
            # Until then connections wait in the socket, which refuses none.
            await self.known.settled()
            if handover is not None:
                await handover.until(self._is_ready)
                background.append(group.create_task(handover.run(self.give_way)))
            await self._server.serve(sockets=[listener])
            for task in background:
                task.cancel()
        self.pool.close()

    def _is_ready(self) -> bool:
        knows_keys = self.known.keyring.is_known or not self._limits.asks_for_keys
        return (self.keeper.is_synced and knows_keys) or self._stopping.is_set()

    async def _hurry(self) -> None:
        """Give up clients that do not get on with their request."""
        while True:
            await self._clock.sleep(_SWEEP_S)
            now_s = self._clock.monotonic()
            for connection in tuple(self._server.server_state.connections):
                if isinstance(connection, ClientProtocol) and connection.deadline_s < now_s:
                    connection.late(now_s)

    async def _drain(self) -> None:
        await self._stopping.wait()
        self._server.should_exit = True
        await self._clock.sleep(self._limits.drain_timeout_s)
        self.desk.cut_off()


def _deployment_gauges(loads: LoadTracker, room: Activator) -> tuple[LabelledGauge, LabelledGauge]:
    """Return how busy deployments are."""
    return (
        LabelledGauge(
            "fleet_gateway_deployment_in_flight",
            "Requests at engines now.",
            "deployment",
            loads.by_deployment,
        ),
        LabelledGauge(
            "fleet_gateway_deployment_waiting",
            "Requests held because no replica is ready.",
            "deployment",
            room.waiting,
        ),
    )


def _forwarding_gauges(
    loads: LoadTracker, names: ModelStates, clock: Clock
) -> tuple[LabelledGauge, LabelledGauge]:
    """Return who is asked last, and how many wait for their turn."""
    return (
        LabelledGauge(
            "fleet_gateway_endpoint_breaker",
            "0 closed; 1 half open, one request may try it; 2 open: others are asked first.",
            "replica",
            lambda: loads.circuits.phases(clock.monotonic()),
        ),
        LabelledGauge(
            "fleet_gateway_queue_waiting",
            "Requests that wait for their turn here.",
            "model",
            names.waiting,
        ),
    )
