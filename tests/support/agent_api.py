"""The API of an agent with an identity, on a real socket."""

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from fastapi import FastAPI

from identity.credentials import Credentials
from identity.listeners import server_security
from identity.names import Role
from machinery.clock import SystemClock
from machinery.http_server import AdminServer
from machinery.process_log import LogRing
from models.hub.fetcher import ModelFetcher
from models.hub.hub_settings import HubSettings
from models.model_store.store import ModelStore
from nodeagent.api import server
from nodeagent.api.blobs import BlobRoutes
from nodeagent.api.hub_mirror import HubMirrorRoutes
from nodeagent.api.machine_metrics import AgentView
from nodeagent.api.prompt_routes import PromptRoutes
from nodeagent.model_store.collector import ModelCollector
from nodeagent.model_store.pulls import ModelPulls
from nodeagent.model_store.usage import ModelUsers, read_users
from schemas.node import NodeStatus
from schemas.records import Ticket
from schemas.replica import Replica
from schemas.trust import TlsMode
from store import codec, keys
from store.events import EventRecorder
from store.memory import MemoryTransport
from store.port import Put
from store.tickets import TicketChecker
from tests.support.identities import TestAuthority

CLOCK, NODE = SystemClock(), "mac-2"
ID, SECRET = "0123456789abcdef", "s" * 43
TICKET = {"authorization": f"Bearer {ID}.{SECRET}"}
STATUS = NodeStatus(
    uid="u", hostname="h", address="127.0.0.1", agent_version="1", os="Darwin", os_version="26",
    machine="Mac16,9", chip="Apple M4 Max", cpu_cores=16, gpu_cores=40, memory_bytes=2**36,
    allocatable_bytes=2**35,
)  # fmt: skip


@dataclass(slots=True)
class Replicas:
    """A cache of one replica, of which this node has rank 1."""

    items: dict[str, Replica]
    synced: bool = True
    refusal: str = ""

    def staleness_s(self) -> float | None:
        return 0.5

    def on_change(self, handler: Callable[[str], None]) -> None: ...

    async def wait_synced(self) -> None: ...

    async def run(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Api:
    """A listening API of an agent."""

    fleet: TestAuthority
    credentials: Credentials
    port: int
    store: MemoryTransport

    async def status(
        self,
        client: ssl.SSLContext,
        path: str = "/v1/vitals",
        headers: dict[str, str] = TICKET,
        *,
        method: str = "GET",
    ) -> int:
        """Return the HTTP status, 0 if the connection is refused."""
        dns_name = self.credentials.identity.dns_name
        try:
            async with (
                asyncio.timeout(20),
                aiohttp.ClientSession() as http,
                http.request(
                    method,
                    f"https://127.0.0.1:{self.port}{path}",
                    ssl=client,
                    server_hostname=dns_name,
                    headers=headers,
                ) as response,
            ):
                return response.status
        except (aiohttp.ClientError, ssl.SSLError, ConnectionError):
            return 0

    async def plain_status(self) -> int:
        async with (
            asyncio.timeout(20),
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{self.port}/health", headers=TICKET) as response,
        ):
            return response.status


async def ticketed_store() -> MemoryTransport:
    """Return a store that holds the ticket."""
    store = MemoryTransport(CLOCK)
    ticket = Ticket(hash=hashlib.sha256(SECRET.encode()).hexdigest(), user="anna@studio")
    key = keys.ticket_key(f"Node/{NODE}", ID)
    await store.commit([], [Put(key=key, value=codec.encode(ticket))])
    return store


def agent_view(root: Path, **fields: Any) -> AgentView:
    """Return what the API shows of an agent whose engines write below `root`."""
    defaults: dict[str, Any] = {
        "name": NODE, "status": STATUS, "clock": CLOCK, "started_at": CLOCK.monotonic(), "engines": {},
        "replicas": Replicas({}), "has_lease": lambda: True, "folder": root / "engines", "ring": LogRing(),
    }  # fmt: skip
    return AgentView(**defaults | fields)


@asynccontextmanager
async def listening(app: FastAPI, **options: Any) -> AsyncIterator[AdminServer]:
    """Serve an API on a port of the system's choice."""
    changed = asyncio.Event()
    api = AdminServer(app, CLOCK, ("127.0.0.1", 0), changed.set, **options)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(api.run())
        await changed.wait()
        yield api
        running.cancel()


@asynccontextmanager
async def serving(
    fleet: TestAuthority,
    mode: TlsMode = TlsMode.STRICT,
    blobs: BlobRoutes | None = None,
    prompts: PromptRoutes | None = None,
    mirror: HubMirrorRoutes | None = None,
) -> AsyncIterator[Api]:
    folder = fleet.issue(Role.NODE, NODE)
    folder.write_trust(fleet.snapshot(mode=mode))
    credentials = Credentials(folder, CLOCK)
    store = await ticketed_store()
    models = ModelStore(fleet.root / "models", CLOCK)

    async def users() -> ModelUsers:
        return await read_users(store, models.root, None)

    recorder = EventRecorder(store, CLOCK, source=f"Node/{NODE}")
    view = agent_view(
        fleet.root, started_at=0.0, blobs=blobs, prompts=prompts, mirror=mirror,
        collector=ModelCollector(models, recorder, users, node=NODE),
        pulls=ModelPulls(ModelFetcher(models, CLOCK), HubSettings(), CLOCK),
    )  # fmt: skip
    tickets = TicketChecker(store, CLOCK, f"Node/{NODE}")
    app = server.make_app(view, tickets, credentials=credentials)
    security = server_security(credentials, frozenset({Role.ADMIN, Role.NODE}), is_insecure=False)
    async with listening(app, security=security) as api:
        scheme, _, rest = api.url.partition("://")
        assert scheme == ("http" if mode is TlsMode.PERMISSIVE else "https")
        yield Api(fleet, credentials, int(rest.rpartition(":")[2]), store)
