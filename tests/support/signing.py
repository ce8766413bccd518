"""A fleet's store with an authority in virtual time: signers, nodes with certificates, and requests of theirs."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from typing_extensions import override

from identity.authority import LEAF_LIFETIME, Authority, new_key
from identity.authority_folder import AuthorityFolder
from identity.folder import IdentityFolder
from identity.names import Identity, Role
from identity.proof import make_proof
from identity.signer import Signer
from identity.signing_controller import SigningController
from machinery import virtual_time
from machinery.clock import Clock
from machinery.virtual_time import VirtualClock
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeStatus
from schemas.trust import CertificateRequest, FleetTrust, IssuedCertificate, RefusedRequest, TlsMode
from store import codec, keys
from store.errors import UnavailableError
from store.memory import MemoryTransport
from store.port import Guard, KeyValue, Listing, Operation, Put, Transport
from tests.support.scenes import Test, scene_test
from tests.support.waiting import until_async

UUID = "11111111-aaaa"


class OutageTransport(MemoryTransport):
    """A store that can be away."""

    is_away = False

    @override
    async def get(self, key: str) -> KeyValue | None:
        self._fail()
        return await super().get(key)

    @override
    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        self._fail()
        return await super().commit(guards, operations)

    @override
    async def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        self._fail()
        async with aclosing(super().pages(prefix)) as pages:
            async for page in pages:
                yield page

    def _fail(self) -> None:
        if self.is_away:
            raise UnavailableError("the store is away")


@asynccontextmanager
async def running(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run endless work beside the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in work]
        yield
        for task in tasks:
            task.cancel()


@dataclass
class SigningFleet:
    """One store and one authority. Make it within virtual time, or with a clock."""

    root: Path
    lifetime: timedelta = LEAF_LIFETIME
    clock: Clock = field(default_factory=VirtualClock)
    authority: Authority = field(init=False)
    store: MemoryTransport = field(init=False)
    folder: AuthorityFolder = field(init=False)

    def __post_init__(self) -> None:
        self.authority = Authority.create(self.clock.now())
        self.store = MemoryTransport(self.clock, expires_by_itself=False)
        self.folder = AuthorityFolder(self.root / "authority")
        self.folder.write(self.authority)

    def identity(self, role: Role = Role.NODE, name: str = "mac-1") -> Identity:
        return Identity(self.authority.fleet, role, name)

    async def publish(self, mode: TlsMode = TlsMode.PERMISSIVE) -> None:
        """Write the fleet's trust to the store."""
        trust = FleetTrust(fleet=self.authority.fleet, authorities=self.authority.pem, mode=mode)
        await self.put(keys.FLEET_TRUST, trust)

    async def put(self, key: str, document: Any) -> None:
        await self.store.commit([], [Put(key=key, value=codec.encode(document))])

    async def register(self, name: str = "mac-1", uuid: str = UUID) -> None:
        """Write a node as the reconciler and its agent do."""
        await self.store.commit([], node_status(name, uuid))

    async def join(self, role: Role = Role.NODE, name: str = "mac-1") -> IdentityFolder:
        """Return the folder of a process with its first certificate."""
        folder = IdentityFolder(self.root / f"{role}-{name}")
        key, request = new_key()
        signer = Signer(
            transport=self.store, clock=self.clock, authority=self.authority, lifetime=self.lifetime
        )
        issued = await signer.issue(self.identity(role, name), request, hardware_uuid=UUID)
        folder.write_identity(key, issued.certificate)
        folder.write_authorities(self.authority.pem)
        return folder

    @asynccontextmanager
    async def signers(self, *transports: Transport) -> AsyncIterator[None]:
        """Run a signer for each transport, or one."""
        controllers = [
            SigningController(transport, self.clock, self.folder, lifetime=self.lifetime)
            for transport in transports or (self.store,)
        ]
        async with running(*(controller.run() for controller in controllers)):
            yield

    async def ask(
        self,
        identity: Identity,
        folder: IdentityFolder | None,
        uuid: str = UUID,
        *,
        named: bool = False,
    ) -> CertificateRequest:
        """Write a request, signed with the key in the folder; `named` as for an external authority."""
        request = new_key(identity if named else None)[1].decode()
        proof = "" if folder is None else make_proof(folder.identity.read_bytes(), request)
        asked = CertificateRequest(request=request, hardware_uuid=uuid, proof=proof)
        await self.put(keys.request_key(identity.role, identity.name), asked)
        return asked

    async def answered(self, identity: Identity) -> None:
        """Wait until the request is gone."""
        key = keys.request_key(identity.role, identity.name)

        async def is_gone() -> bool:
            return await self.store.get(key) is None

        await until_async(is_gone, what=f"an answer to {identity.uri}")

    async def issued(self, identity: Identity) -> IssuedCertificate | None:
        item = await self.store.get(keys.issued_key(identity.role, identity.name))
        return None if item is None else codec.decode(IssuedCertificate, item)

    async def refusal(self, identity: Identity) -> RefusedRequest | None:
        item = await self.store.get(keys.refused_key(identity.role, identity.name))
        return None if item is None else codec.decode(RefusedRequest, item)


def node_status(name: str, uuid: str) -> tuple[Put, Put]:
    """Return the operations by which the reconciler and an agent write a node."""
    status = NodeStatus(
        uid=name,
        hostname=name,
        address="192.0.2.1",
        agent_version="1",
        os="Darwin",
        os_version="26.1",
        machine="Mac16,11",
        chip="Apple M4 Pro",
        cpu_cores=14,
        gpu_cores=20,
        memory_bytes=64 << 30,
        allocatable_bytes=48 << 30,
        hardware_uuid=uuid,
    )
    node = Node(metadata=ObjectMeta(name=name))
    key = keys.status_key("Node", name)
    return codec.put_spec(node), Put(key=key, value=codec.encode(status))


def on_fleet(
    test: Test | None = None, *, lifetime: timedelta = LEAF_LIFETIME
) -> Callable[..., Any]:
    """Run a test in virtual time with a fleet below `tmp_path` whose trust is published."""

    def play(scene: Callable[[SigningFleet], Coroutine[Any, Any, None]], *, tmp_path: Path) -> None:
        async def main() -> None:
            fleet = SigningFleet(tmp_path, lifetime)
            await fleet.publish()
            await scene(fleet)

        virtual_time.run(main())

    def decorate(test: Test) -> Callable[..., None]:
        return scene_test(test, play, "tmp_path")

    return decorate if test is None else decorate(test)
