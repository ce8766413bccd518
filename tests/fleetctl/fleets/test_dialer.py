"""The way of commands to a real agent: what a recorder in between reads, and which processes are dialled."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.dialer import open_dialer
from identity.folder import IdentityFolder
from identity.names import Role
from insight import process_client
from insight.errors import ProcessUnreachableError
from insight.tickets import issue_ticket
from machinery.clock import SystemClock
from schemas.records import GatewayLease
from schemas.trust import FleetTrust, RevokedCertificate, TlsMode
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put
from tests.support.agent_api import NODE, STATUS, serving
from tests.support.identities import TestAuthority, now
from tests.support.tcp_server import tcp_server


@dataclass
class Recorder:
    """A listener between a command and an agent, which keeps every byte."""

    port: int = 0
    seen: bytearray = field(default_factory=bytearray)

    @asynccontextmanager
    async def between(self, port: int) -> AsyncIterator["Recorder"]:
        async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while piece := await reader.read(1 << 16):
                    self.seen += piece
                    writer.write(piece)
            except ConnectionError:
                pass
            finally:
                writer.close()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

        async with tcp_server(serve) as self.port:
            yield self


@pytest.fixture
def fleet(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "a")


def options(folder: IdentityFolder | None) -> dict[str, Any]:
    return {"identity_dir": folder and folder.path, "gateway_ca": None}


async def put_node(store: MemoryTransport, url: str, name: str = NODE) -> None:
    status = STATUS.model_copy(update={"agent_url": url})
    await store.commit([], [Put(key=keys.status_key("Node", name), value=codec.encode(status))])


async def put_trust(store: MemoryTransport, fleet: TestAuthority, mode: TlsMode) -> None:
    trust = FleetTrust(fleet=fleet.authority.fleet, authorities=fleet.authority.pem, mode=mode)
    await store.commit([], [Put(key=keys.FLEET_TRUST, value=codec.encode(trust))])


async def read_agent(store: MemoryTransport, folder: IdentityFolder | None) -> tuple[str, bytes]:
    """Return the ticket of a command and what it reads with it from the agent."""
    dialer = await open_dialer(options(folder), store)
    agent = await process_client.find_agent(store, NODE, dialer)
    async with issue_ticket(store, agent.key) as bearer:
        return bearer, await process_client.fetch(agent, "/v1/vitals", bearer=bearer)


async def test_a_recorder_in_between_reads_neither_ticket_nor_answer(fleet: TestAuthority) -> None:
    admin = fleet.issue(Role.ADMIN, "anna")
    async with serving(fleet, TlsMode.TLS) as api, Recorder().between(api.port) as recorder:
        for scheme, is_readable in (("http", True), ("https", False)):
            await put_node(api.store, f"{scheme}://127.0.0.1:{recorder.port}")
            recorder.seen.clear()
            ticket, answer = await read_agent(api.store, admin)
            assert b"totalBytes" in answer
            assert recorder.seen
            for secret in (ticket.encode(), ticket.partition(".")[2].encode(), b"totalBytes"):
                assert (secret in recorder.seen) is is_readable


async def test_an_address_of_another_node_is_not_sent_a_ticket(fleet: TestAuthority) -> None:
    """A thief with the password of mac-1 publishes its own address as that of mac-2."""
    admin = fleet.issue(Role.ADMIN, "anna")
    async with serving(fleet) as api:
        thief = f"https://127.0.0.1:{api.port}"
        await put_node(api.store, thief, name="mac-1")
        dialer = await open_dialer(options(admin), api.store)
        agent = await process_client.find_agent(api.store, "mac-1", dialer)
        with pytest.raises(ProcessUnreachableError, match=r"not valid for 'mac-1\.node"):
            await process_client.fetch(agent, "/v1/vitals", bearer="secret")


async def test_an_agent_with_tls_needs_an_identity_here(fleet: TestAuthority) -> None:
    async with serving(fleet) as api:
        await put_node(api.store, f"https://127.0.0.1:{api.port}")
        with pytest.raises(ProcessUnreachableError, match="--identity-dir"):
            await read_agent(api.store, None)


async def test_mode_and_revocations_of_the_store_count_at_once(fleet: TestAuthority) -> None:
    admin = fleet.issue(Role.ADMIN, "anna")
    async with serving(fleet) as api:
        await put_trust(api.store, fleet, TlsMode.STRICT)
        await put_node(api.store, f"https://127.0.0.1:{api.port}")
        await read_agent(api.store, admin)
        dialer = await open_dialer(options(admin), api.store)
        plain = process_client.gateway_address(
            dialer, "g", GatewayLease(url="http://192.0.2.7:4000", version="1")
        )
        with pytest.raises(ProcessUnreachableError, match="TLS mode is strict"):
            await process_client.fetch(plain, "/health")
        serial = fleet.leaves[api.credentials.identity.uri].serial
        entry = RevokedCertificate(
            identity=api.credentials.identity.uri, revoked=now(), not_after=now()
        )
        key = keys.named(keys.REVOKED_PREFIX, serial)
        await api.store.commit([], [Put(key=key, value=codec.encode(entry))])
        with pytest.raises(ProcessUnreachableError, match="revoked"):
            await read_agent(api.store, admin)


async def test_a_folder_without_a_certificate_is_an_error(tmp_path: Path) -> None:
    folder = IdentityFolder(tmp_path / "empty")
    with pytest.raises(FleetctlError, match="holds no certificate"):
        await open_dialer(options(folder), MemoryTransport(SystemClock()))
