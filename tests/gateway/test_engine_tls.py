"""A gateway and engines over TLS, in one process on real sockets: stolen identities, and changes of the mode under load."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from gateway.limits import GatewayLimits
from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.names import Role
from machinery.clock import SystemClock
from nodeagent.engines.tls import NodeTls
from schemas.trust import TlsMode
from schemas.wire.engine_address import EngineAddress
from store.memory import MemoryTransport
from tests.support.gateway_world import Running, World, deployment, endpoint, running_gateway
from tests.support.identities import TestAuthority
from tests.support.tls_engine import HOST, TlsEngine, on_loop, serving_tls
from tests.support.waiting import until

CLIENTS = 4


@dataclass
class Fleet:
    """Two nodes with an engine each, and one gateway; the test plays the agents."""

    authority: TestAuthority
    world: World
    running: Running
    engines: dict[str, TlsEngine]
    nodes: dict[str, NodeTls]
    folders: list[IdentityFolder]
    statuses: list[int] = field(default_factory=list)

    async def publish(self, node: str, address: EngineAddress) -> None:
        await self.world.put(endpoint(f"m-{node[-1]}", "m", address.url, node=node))

    def address(self, node: str) -> EngineAddress:
        return EngineAddress(HOST, self.engines[node].port, "", node)

    async def keep_published(self) -> None:
        """Publish what the mode asks for, as agents do."""
        published: dict[str, EngineAddress] = {}
        while True:
            for node, tls in self.nodes.items():
                address = tls.advertised(self.address(node))
                if published.get(node) != address:
                    published[node] = address
                    await self.publish(node, address)
            await asyncio.sleep(0.05)

    def dialled(self) -> set[bool]:
        """Return whether the gateway dials the engines over TLS."""
        model = self.running.gateway.table_cache.table.models.get("m")
        backends = model.backends if model is not None else ()
        return {
            bool(engine_endpoint.origin.node)
            for backend in backends
            for engine_endpoint in backend.leased
        }

    async def ask(self, session: aiohttp.ClientSession) -> tuple[int, str]:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        async with session.post(f"{self.running.url}/v1/chat/completions", json=body) as response:
            await response.read()
            return response.status, response.headers.get("x-fleet-node", "")

    async def load(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                self.statuses.append((await self.ask(session))[0])

    async def more_requests(self) -> None:
        """Wait until each client has been answered again."""
        before = len(self.statuses)
        await until(lambda: len(self.statuses) > before + 2 * CLIENTS, what="more requests")

    async def set_mode(self, mode: TlsMode) -> None:
        """Give the mode to one process after the other."""
        for folder in self.folders:
            folder.write_trust(self.authority.snapshot(mode=mode))
            await self.more_requests()


@asynccontextmanager
async def fleet(path: Path) -> AsyncIterator[Fleet]:
    authority, clock = TestAuthority(path), SystemClock()
    folders = [authority.issue(Role.NODE, "mac-1"), authority.issue(Role.NODE, "mac-2")]
    edge = authority.issue(Role.GATEWAY, "edge")
    transport = MemoryTransport(clock)
    async with AsyncExitStack() as stack:
        engines = {
            f"mac-{n}": await stack.enter_async_context(serving_tls(folder, f"m-{n}"))
            for n, folder in enumerate(folders, 1)
        }
        limits = GatewayLimits(
            drain_timeout_s=0.0, resume_timeout_s=5.0, credentials=Credentials(edge, clock)
        )
        running = await stack.enter_async_context(running_gateway(transport, limits))
        nodes = {name: NodeTls(one.credentials, clock) for name, one in engines.items()}
        world = World(transport)
        await world.put(deployment("m", replicas=2))
        # The gateway is in the middle: some engines have followed when it does, and some have not.
        everyone = [folders[0], edge, folders[1]]
        yield Fleet(authority, world, running, engines, nodes, everyone)


@pytest.mark.ci
@pytest.mark.timeout(120)
@on_loop
async def test_no_request_fails_while_the_mode_goes_to_strict_and_back(tmp_path: Path) -> None:
    async with fleet(tmp_path) as one, asyncio.TaskGroup() as group:
        tasks = [group.create_task(one.keep_published())]
        await one.running.knows("m", ready=2)
        tasks += [group.create_task(one.load()) for _ in range(CLIENTS)]
        await one.more_requests()
        assert one.dialled() == {False}
        for mode in (TlsMode.TLS, TlsMode.STRICT):
            await one.set_mode(mode)
            await until(lambda: one.dialled() == {True}, what="TLS")
            await one.more_requests()
        await one.set_mode(TlsMode.PERMISSIVE)  # at once, without the step between
        await until(lambda: one.dialled() == {False}, what="plain connections")
        await one.more_requests()
        for task in tasks:
            task.cancel()
    assert set(one.statuses) == {200}
    assert one.running.gateway.metrics.attempts.value("answered") >= len(one.statuses)


@on_loop
async def test_a_stolen_identity_of_one_node_cannot_answer_for_another(tmp_path: Path) -> None:
    """The thief has node 1's key, and node 2's password: it publishes its own engine as that of node 2."""
    async with fleet(tmp_path) as one, aiohttp.ClientSession() as session:
        thief = one.engines["mac-1"]
        address = EngineAddress(HOST, thief.port, "", "mac-2")
        await one.publish("mac-2", address)
        await one.running.knows("m", ready=1)
        status, _ = await one.ask(session)
        assert status >= 500
        assert thief.reached == 0
        assert one.running.gateway.links.dialer.tls_failures.value("UntrustedCertificate") >= 1
        await one.publish("mac-1", one.address("mac-1"))
        await one.running.knows("m", ready=2)
        # Requests go to the node that is what it says, also while both endpoints have the same address.
        for _ in range(5):
            assert await one.ask(session) == (200, "mac-1")
        await one.publish("mac-2", one.address("mac-2"))
        await until(lambda: one.engines["mac-2"].port in ports(one), what="the real endpoint")
        assert thief.reached == 5


def ports(one: Fleet) -> set[int]:
    model = one.running.gateway.table_cache.table.models["m"]
    return {e.origin.port for backend in model.backends for e in backend.leased}


@on_loop
async def test_a_gateway_that_is_refused_by_one_engine_tries_another(tmp_path: Path) -> None:
    async with fleet(tmp_path) as one, aiohttp.ClientSession() as session:
        serial = one.authority.leaves[one.authority.identity(Role.GATEWAY, "edge").uri].serial
        first = one.engines["mac-1"]
        # One engine knows of the revocation already.
        one.folders[0].write_trust(one.authority.snapshot(revoked=(serial,)))
        await until(lambda: first.credentials.trust().revoked, what="the revocation")
        for node in one.engines:
            await one.publish(node, one.address(node))
        await one.running.knows("m", ready=2)
        for _ in range(5):
            status, _ = await one.ask(session)
            assert status == 200
        assert (first.reached, one.engines["mac-2"].reached) == (0, 5)
        assert one.running.gateway.links.dialer.tls_failures.value("ClosedByEngine") >= 1
        assert first.refused["Revoked"] >= 1
