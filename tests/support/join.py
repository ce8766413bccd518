"""A join port for tests: a store with the fleet's trust, an authority's folder, and the port's application."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from starlette.applications import Starlette

from fleetctl.fleets.join_client import JoinAddress
from identity.authority import new_key, read_request, spki_hash
from identity.authority_folder import AuthorityFolder
from identity.credentials import Credentials
from identity.join_token import JoinToken
from identity.listeners import server_security
from identity.names import Role
from identity.token_store import TokenOptions, create_token
from machinery.clock import Clock, SystemClock
from machinery.http_server import AdminServer
from machinery.rate_limit import SourceRateLimit
from reconciler.services.join.admission import Admission
from reconciler.services.join.port import JoinPort
from reconciler.services.join.rejoin import RejoinPort
from reconciler.services.join.requests import PendingRequests
from schemas.event import Event
from schemas.trust import FleetTrust, TlsMode
from schemas.wire.join import JOIN_PATH, JoinBody, Machine
from store import codec, keys, objects
from store.etcd.users import Credentials as StoreCredentials
from store.events import EventRecorder
from store.memory import MemoryTransport
from store.port import Put, Transport
from tests.support.identities import TestAuthority

UUID, OTHER_UUID = "11111111-aaaa", "22222222-bbbb"
_ENTROPY = bytes(range(21))


class RecordedAccounts:
    """A store with users, which remembers for whom a password was made."""

    def __init__(self) -> None:
        self.issued: list[str] = []

    async def are_required(self) -> bool:
        return True

    async def issue(self, component: str, name: str) -> StoreCredentials:
        self.issued.append(f"{component}/{name}")
        return StoreCredentials(user=f"fleet-{component}-{name}", password="new")


class NoAccounts:
    """A store without users."""

    async def are_required(self) -> bool:
        return False

    async def issue(self, component: str, name: str) -> StoreCredentials:
        raise AssertionError("the store has no users")


@dataclass
class JoinStand:
    """One reconciler's join port, without a socket."""

    folder: Path
    transport: Transport = field(default_factory=lambda: MemoryTransport(SystemClock()))
    clock: Clock = field(default_factory=SystemClock)
    most_per_minute: int = 10_000
    accounts: object = field(default_factory=NoAccounts)

    def __post_init__(self) -> None:
        self.ca = TestAuthority(self.folder)
        self.authority = AuthorityFolder(self.folder / "authority")
        self.authority.write(self.ca.authority)
        self.identity = self.ca.issue(Role.RECONCILER, "control-1")
        self.admission = Admission(
            transport=self.transport,
            clock=self.clock,
            authority=self.authority,
            accounts=self.accounts,  # type: ignore[arg-type]  # any of the two
            etcd=("https://127.0.0.1:2379",),
        )
        self.credentials = Credentials(self.identity, self.clock)
        events = EventRecorder(self.transport, self.clock, source="reconciler")
        self.requests = PendingRequests(self.admission, events, per_minute=self.most_per_minute)
        self.again = RejoinPort(self.admission, events, per_minute=self.most_per_minute)
        self.port = JoinPort(
            self.admission,
            self.credentials,
            events,
            SourceRateLimit(
                self.clock,
                per_minute=self.most_per_minute,
                total_per_minute=self.most_per_minute * 4,
            ),
        )

    @property
    def app(self) -> Starlette:
        parts = (self.port, self.again, self.requests)
        return Starlette(routes=[route for part in parts for route in part.routes()])

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[JoinAddress]:
        """Serve the port over TLS on a real socket, as a reconciler does."""
        security = server_security(self.credentials, frozenset(Role), is_insecure=False)
        listening = asyncio.Event()
        server = AdminServer(
            self.app, SystemClock(), ("127.0.0.1", 0), listening.set, security=security
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(server.run())
            await listening.wait()
            yield JoinAddress("127.0.0.1", int(server.url.rpartition(":")[2]))
            task.cancel()

    async def open(self) -> "JoinStand":
        """Write the fleet's trust into the store."""
        trust = FleetTrust(
            fleet=self.ca.authority.fleet, authorities=self.ca.authority.pem, mode=TlsMode.STRICT
        )
        await self.transport.commit([], [Put(key=keys.FLEET_TRUST, value=codec.encode(trust))])
        return self

    async def token(
        self, options: TokenOptions | None = None, entropy: bytes = _ENTROPY
    ) -> JoinToken:
        """Return a new token."""
        options = options or TokenOptions(labels={})
        return await create_token(
            self.transport, self.clock, self.ca.authority.spki_hash, entropy, options
        )

    async def post(
        self, body: JoinBody | bytes, path: str = JOIN_PATH, *, source: str = "10.0.0.7"
    ) -> httpx.Response:
        """Send a body to the application, as over TLS."""
        raw = body if isinstance(body, bytes) else body.model_dump_json(by_alias=True).encode()
        transport = httpx.ASGITransport(self.app, client=(source, 50_000))
        async with httpx.AsyncClient(transport=transport, base_url="https://join") as client:
            return await client.post(path, content=raw)

    async def call(self, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
        """Send a request without a body, as over TLS."""
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="https://join") as client:
            return await client.request(method, path, headers=headers)

    async def get(self, path: str) -> dict[str, object]:
        """Return the document at a path."""
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="https://join") as client:
            answered = await client.get(path)
        assert answered.status_code == 200, answered.text
        found: dict[str, object] = answered.json()
        return found

    async def events(self) -> Sequence[tuple[str, str]]:
        """Return reason and message of all events."""
        found = await objects.list_all(self.transport, Event)
        return sorted((event.spec.reason, event.spec.message) for event in found)


def machine(
    name: str | None = None, uuid: str = UUID, addresses: tuple[str, ...] = ("10.0.0.7",)
) -> Machine:
    return Machine(name=name, default_name="studio", hardware_uuid=uuid, addresses=addresses)


def join_body(
    token: JoinToken, request: bytes | None = None, who: Machine | None = None, secret: str = ""
) -> JoinBody:
    """Return the body of a machine that joins with the token."""
    request = request or new_key()[1]
    return JoinBody(
        id=token.id,
        secret=secret or token.secret_text,
        request=request.decode(),
        machine=who or machine(),
    )


def key_hash(request: bytes) -> str:
    """Return the hash of the key in a request."""
    return spki_hash(read_request(request)).hex()
