"""A process that is the sharing part of one agent: API over TLS, lease, exchange and pulls, without engines.

Arguments: the process's settings as JSON (`Settings`). It pulls the references that it reads from standard input, one
as JSON in each line; after the line "busy" its engine generates, as far as files are concerned. It prints the reports of its pulls when they change.
"""

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

from fastapi import FastAPI
from typing_extensions import override

from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.listeners import server_security
from identity.names import Role
from machinery.clock import SystemClock
from machinery.http_server import AdminServer
from models.hub.fetcher import FetchLimits, ModelFetcher
from models.hub.hub_settings import HubSettings
from models.model_store.store import ModelStore
from nodeagent.api.blobs import BlobRoutes
from nodeagent.api.cable_listeners import CableListeners
from nodeagent.api.server import on_refused
from nodeagent.hardware.linux import read_fabric
from nodeagent.model_store.pulls import ModelPulls
from nodeagent.peers.links import link_rate
from nodeagent.peers.model_exchange import ModelExchange
from nodeagent.peers.uploads import Uploads
from schemas.deployment import HubReference
from schemas.node import NodeFabric
from schemas.wire.errors import RefusedError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.leases import LEASE_TTL_S, LeaseSession
from store.port import Transport

CLOCK: Final = SystemClock()
_REPORT_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of the process."""

    name: str
    root: str
    """The models folder."""
    identity: str
    address: str
    port: int
    etcd: str
    """A URL, or the path of a socket."""
    attempts: int = 4
    """Consecutive failures of a request to the hub before a pull fails."""
    speed_mbps: int = 0
    """The speed of its network: that of an interface here does not tell the limit."""

    @property
    def words(self) -> str:
        """Return the command line's only argument."""
        return json.dumps(asdict(self))


class Renewals:
    """A transport that records how late the renewals of a lease end, beside their plan."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._planned_at = float("inf")
        self.count = 0
        self.latest_s = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    async def keep_alive(self, lease: int) -> int:
        lives_s = await self._transport.keep_alive(lease)
        now = CLOCK.monotonic()
        self.latest_s = max(self.latest_s, now - self._planned_at)
        self._planned_at = now + LEASE_TTL_S / 3
        self.count += 1
        return lives_s


class Lease:
    """The node's lease, a new one after each loss."""

    def __init__(self, transport: Transport) -> None:
        self.renewals = Renewals(transport)
        self._transport = cast("Transport", self.renewals)
        self.losses = 0
        self.id: int | None = None

    async def keep(self) -> None:
        while True:
            session = LeaseSession(self._transport, CLOCK, ttl_s=LEASE_TTL_S)
            await session.open()
            self.id = session.id
            await session.keep()
            self.losses += 1
            self.id = None


class OrderedPulls(ModelPulls):
    """Pulls that count how often one was ordered: a report that was printed before is told from one after."""

    orders = 0

    @override
    def start(self, source: HubReference) -> None:
        super().start(source)
        self.orders += 1


async def main(settings: Settings) -> None:
    credentials = Credentials(IdentityFolder(Path(settings.identity)), CLOCK)
    is_socket = settings.etcd.startswith("/")
    transport = connect(
        EtcdAddress(socket=Path(settings.etcd))
        if is_socket
        else EtcdAddress(endpoints=(settings.etcd,))
    )
    store, uploads = ModelStore(Path(settings.root), CLOCK), Uploads(CLOCK)
    exchange = ModelExchange(transport, CLOCK, credentials, store, uploads)
    limits = FetchLimits(attempts=settings.attempts, rate_limit_wait_s=0.0)
    fetcher = ModelFetcher(store, CLOCK, limits=limits)
    pulls = OrderedPulls(fetcher, HubSettings(), CLOCK, exchange=exchange)
    app = FastAPI()
    app.add_exception_handler(RefusedError, on_refused)
    blobs = BlobRoutes(
        node=settings.name, store=store, uploads=uploads, piece_lists=exchange.piece_lists
    )
    blobs.add_to(app)
    security = server_security(credentials, frozenset({Role.NODE}), is_insecure=False)
    server = AdminServer(
        app, CLOCK, (settings.address, settings.port), lambda: None, security=security
    )
    cables = CableListeners(
        blobs=blobs,
        credentials=credentials,
        clock=CLOCK,
        address=settings.address,
        port=settings.port,
        fabric=read_fabric,
    )
    uploads.link_rate = lambda address: link_rate(_with_speed(read_fabric(), settings), address)
    exchange.cable_urls, exchange.share.fabric = cables.urls, read_fabric
    lease = Lease(transport)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.run())
        group.create_task(cables.run())
        group.create_task(lease.keep())
        group.create_task(pulls.run())
        url = f"https://{settings.address}:{settings.port}"
        group.create_task(
            exchange.run(lambda: lease.id, lambda: url if server.url and lease.id else "")
        )
        group.create_task(_report(pulls, exchange, lease))
        await _obey(pulls, uploads)


def _with_speed(fabric: NodeFabric, settings: Settings) -> NodeFabric:
    update = {"speed_mbps": settings.speed_mbps}
    interfaces = tuple(interface.model_copy(update=update) for interface in fabric.interfaces)
    return fabric.model_copy(update={"interfaces": interfaces})


async def _obey(pulls: ModelPulls, uploads: Uploads) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        if line == b"busy\n":
            uploads.is_busy = lambda: True
            continue
        pulls.start(HubReference.model_validate_json(line))


async def _report(pulls: OrderedPulls, exchange: ModelExchange, lease: Lease) -> None:
    last = ""
    while True:
        reports = [json.loads(report.model_dump_json(by_alias=False)) for report in pulls.reports()]
        state = {
            "ready": exchange.is_ready,
            "pulls": reports,
            "orders": pulls.orders,
            "banned": sorted(exchange.share.banned),
            "renewals": lease.renewals.count,
            "late_s": lease.renewals.latest_s,
            "losses": lease.losses,
        }
        line = json.dumps(state)
        if line != last:
            print(line, flush=True)
            last = line
        await asyncio.sleep(_REPORT_S)


if __name__ == "__main__":
    asyncio.run(main(Settings(**json.loads(sys.argv[1]))))
