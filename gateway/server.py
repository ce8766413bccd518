"""The gateway's parts put together, and its life from listening to drained. Reads no environment."""

import asyncio
import random
import socket
from dataclasses import dataclass
from functools import partial
from typing import cast

import uvicorn

from gateway.app import make_app
from gateway.carry.failover import Failover
from gateway.carry.loads import Loads
from gateway.carry.router import Router
from gateway.carry.waiting import WaitingRoom
from gateway.clients.desk import FrontDesk
from gateway.clients.openai import PATHS, OpenAi
from gateway.clients.protocol import ClientProtocol
from gateway.known.keeper import TableKeeper
from gateway.presence import Presence
from gateway.upstream.pool import Pool
from gateway.watch.metrics import Metrics
from gateway.watch.versions import Versions
from machinery.clock import Clock
from machinery.exposition import Gauges
from machinery.web import SignalServer
from store.port import Transport

# Longer than clients keep theirs (httpx: 5 s), so that they never write into a closing one.
_KEEP_ALIVE_S = 75
_SWEEP_S = 1.0
# How long a client may take to send a request. The largest body within this is 140 kB/s.
_REQUEST_S = 60.0
# After the drain: for the last events of streams that were cut off to get out.
_CLOSE_S = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a gateway puts up with."""

    max_body_bytes: int = 8 << 20
    request_timeout_s: float = 600.0
    """The longest silence of an engine, and of a client that reads nothing."""
    drain_timeout_s: float = 30.0
    hold_timeout_s: float = 120.0
    """How long a request waits for a deployment to come back from zero."""
    hold_limit: int = 64
    """How many may wait for one deployment."""


class Gateway:
    """One gateway. `run()` is its life; `stop()` ends it after a drain, `stop()` again at once."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        entropy: random.Random,
        limits: Limits,
        *,
        url: str,
    ) -> None:
        """`url`: where the reconciler reaches us."""
        self._clock = clock
        self._limits = limits
        self.keeper = TableKeeper(transport, clock)
        self.loads = Loads()
        self.pool = Pool(clock, silence_s=limits.request_timeout_s)
        self.room = WaitingRoom(
            self.keeper, clock, limit=limits.hold_limit, patience_s=limits.hold_timeout_s
        )
        self.versions = Versions()
        id_ = f"{entropy.getrandbits(48):012x}"
        self.presence = Presence(transport, clock, id_=id_, url=url)
        self.metrics = Metrics(
            in_flight=self.loads.total,
            endpoints=lambda: self.keeper.table.endpoints,
            more=(*_gauges(self.loads, self.room), self.versions),
        )
        failover = Failover(
            keeper=self.keeper,
            upstream=self.pool,
            loads=self.loads,
            metrics=self.metrics,
            versions=self.versions,
            room=self.room,
            router=Router(keeper=self.keeper, loads=self.loads, clock=clock, random=entropy),
            clock=clock,
        )
        openai = OpenAi()
        self.desk = FrontDesk(
            failover,
            {path.encode(): openai for path in PATHS},
            max_body=limits.max_body_bytes,
            id_prefix=id_,
        )
        self._stopping = asyncio.Event()
        self._server = SignalServer(
            uvicorn.Config(
                make_app(self.keeper, self.metrics, id_),
                http=cast("type[ClientProtocol]", partial(ClientProtocol, self.desk)),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(limits.drain_timeout_s) + 1 + _CLOSE_S,
            ),
            self.stop,
        )

    def stop(self) -> None:
        """Take no more connections, finish what runs; asked again, finish nothing."""
        if self._stopping.is_set():
            self.desk.cut_off()
        self._stopping.set()

    async def run(self, listener: socket.socket) -> None:
        """Serve until stopped and drained."""
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(self.keeper.run()),
                group.create_task(self.presence.run()),
                group.create_task(self.pool.keep()),
                group.create_task(self.desk.keep(patience_s=self._limits.request_timeout_s)),
                group.create_task(self._hurry()),
                group.create_task(self._drain()),
            ]
            await self._server.serve(sockets=[listener])
            for task in background:
                task.cancel()
        self.pool.close()

    async def _hurry(self) -> None:
        """Give up clients that do not get on with their request."""
        while True:
            await self._clock.sleep(_SWEEP_S)
            now_s = self._clock.monotonic()
            for connection in tuple(self._server.server_state.connections):
                if isinstance(connection, ClientProtocol):
                    connection.late(now_s, _REQUEST_S)

    async def _drain(self) -> None:
        await self._stopping.wait()
        self._server.should_exit = True
        await self._clock.sleep(self._limits.drain_timeout_s)
        self.desk.cut_off()


def _gauges(loads: Loads, room: WaitingRoom) -> tuple[Gauges, Gauges]:
    """Return how busy deployments are."""
    return (
        Gauges(
            "fleet_gateway_deployment_in_flight",
            "Requests at engines now.",
            "deployment",
            loads.by_deployment,
        ),
        Gauges(
            "fleet_gateway_deployment_waiting",
            "Requests held because no replica is ready.",
            "deployment",
            room.waiting,
        ),
    )
