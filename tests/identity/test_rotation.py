"""Rotation under load: certificates and authorities change while new connections are made, and none fails."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest

from identity import authority_exchange
from identity.authority import is_signed_by, load_certificate
from identity.credentials import Credentials
from identity.names import Role
from identity.peers import peer_of
from identity.renewal import Applicant, Renewal
from identity.trust_sync import TrustSync
from machinery import virtual_time
from machinery.clock import SystemClock
from schemas.trust import TlsMode
from tests.support.identities import handshake
from tests.support.signing import UUID, SigningFleet, running
from tests.support.waiting import until

NODES = frozenset({Role.NODE})
ANY = frozenset(Role)
APPLICANTS = (
    Applicant(role=Role.NODE, name="mac-1", hardware_uuid=UUID),
    Applicant(role=Role.NODE, name="mac-2", hardware_uuid=UUID),
    Applicant(role=Role.GATEWAY, name="edge"),
)


class Process:
    """One process: its identity with all the work that keeps it current, a listener and clients."""

    def __init__(self, fleet: SigningFleet, credentials: Credentials, applicant: Applicant) -> None:
        self.credentials = credentials
        self.listener = credentials.server(ANY)
        self.client = credentials.client(NODES)
        self.renewal = Renewal(
            fleet.store, fleet.clock, credentials.folder, applicant, spread_s=2.0
        )
        sync = TrustSync(fleet.store, fleet.clock, credentials.folder)
        self.work = (self.renewal.run(), sync.run(), credentials.watch())
        self.port = 0

    async def listen(self) -> None:
        """Accept TLS connections on a real socket, each with the context of its moment, and answer a line."""
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
            async with asyncio.TaskGroup() as group:
                while True:
                    accepted, _ = await loop.sock_accept(listener)
                    group.create_task(self._serve(accepted))

    async def _serve(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, accepted, ssl=self.listener.context
        )
        try:
            assert peer_of(transport.get_extra_info("ssl_object")) is not None
            transport.write(await reader.readline())
        finally:
            transport.close()


async def in_memory(client: Process, server: Process) -> None:
    """Make one handshake in memory."""
    handshake(client.client.context, server.listener.context, server.credentials.identity.dns_name)


async def over_sockets(client: Process, server: Process) -> None:
    """Make one connection, and use it."""
    name = server.credentials.identity.dns_name
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=client.client.context, server_hostname=name
    )
    try:
        writer.write(b"hello\n")
        await writer.drain()
        assert await reader.readline() == b"hello\n"
    finally:
        writer.close()


Connect = Callable[[Process, Process], Awaitable[None]]


class Load:
    """Connections between all processes, one after the other, until it is stopped. The first failure ends it."""

    def __init__(self, processes: list[Process], connect: Connect, every_s: float) -> None:
        self._pairs = [
            (client, server)
            for client in processes
            for server in processes[:2]
            if client is not server
        ]
        self._connect = connect
        self._every_s = every_s
        self.connections = 0

    async def run(self) -> None:
        for number in count():
            await self._connect(*self._pairs[number % len(self._pairs)])
            self.connections += 1
            await asyncio.sleep(self._every_s)


async def world(fleet: SigningFleet) -> list[Process]:
    await fleet.publish(TlsMode.STRICT)
    processes = []
    for applicant in APPLICANTS:
        folder = await fleet.join(applicant.role, applicant.name)
        processes.append(Process(fleet, Credentials(folder, fleet.clock), applicant))
    return processes


async def rotate(fleet: SigningFleet, connect: Connect, seconds: float, every_s: float) -> int:
    """Let the leaves of three processes end again and again under load; return the number of connections."""
    processes = await world(fleet)
    load = Load(processes, connect, every_s)
    work = [task for process in processes for task in process.work]
    if connect is over_sockets:
        work += [process.listen() for process in processes]
    async with fleet.signers(), running(*work):
        if connect is over_sockets:
            await until(lambda: all(process.port for process in processes))
        async with running(load.run()):
            await asyncio.sleep(seconds)
    least = int(seconds / (fleet.lifetime.total_seconds() * 2 / 3)) - 1
    assert all(process.renewal.renewals >= least for process in processes)
    assert not any(process.listener.verifier.refused for process in processes)
    return load.connections


async def exchange(fleet: SigningFleet, connect: Connect, settle_s: float, every_s: float) -> int:
    """Exchange the authority under load; return the number of connections."""
    processes = await world(fleet)
    old = fleet.authority.certificate
    load = Load(processes, connect, every_s)
    work = [task for process in processes for task in process.work]
    if connect is over_sockets:
        work += [process.listen() for process in processes]
    async with fleet.signers(), running(*work):
        if connect is over_sockets:
            await until(lambda: all(process.port for process in processes))
        async with running(load.run()):
            await asyncio.sleep(1)
            settle = timedelta(seconds=settle_s)
            await authority_exchange.begin(fleet.store, fleet.clock, fleet.folder)
            await asyncio.sleep(settle_s + 0.1)
            await authority_exchange.activate(fleet.store, fleet.clock, fleet.folder, settle)
            await until(
                lambda: all(process.renewal.renewals == 1 for process in processes), limit_s=60
            )
            await authority_exchange.finish(fleet.store, fleet.clock)
            await until(
                lambda: all(
                    process.credentials.folder.read_authorities().count("BEGIN") == 1
                    for process in processes
                )
            )
            await asyncio.sleep(3)
    for process in processes:
        certificate = load_certificate(process.credentials.folder.certificate())
        assert not is_signed_by(certificate, old)
    assert not any(process.listener.verifier.refused for process in processes)
    return load.connections


def test_leaves_of_twenty_seconds_rotate_for_five_minutes(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = SigningFleet(tmp_path, timedelta(seconds=20))
        assert await rotate(fleet, in_memory, seconds=300, every_s=2.0) >= 145

    virtual_time.run(test())


def test_an_authority_is_exchanged_under_load(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = SigningFleet(tmp_path)
        assert await exchange(fleet, in_memory, settle_s=300, every_s=3.0) > 100

    virtual_time.run(test())


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_leaves_rotate_for_five_minutes_on_real_sockets(tmp_path: Path) -> None:
    fleet = SigningFleet(tmp_path, timedelta(seconds=20), clock=SystemClock())
    made = await rotate(fleet, over_sockets, seconds=300, every_s=0.02)
    print(f"{made} connections, 0 failed")


@pytest.mark.full
async def test_an_authority_is_exchanged_under_load_on_real_sockets(tmp_path: Path) -> None:
    fleet = SigningFleet(tmp_path, clock=SystemClock())
    made = await exchange(fleet, over_sockets, settle_s=5, every_s=0.01)
    print(f"{made} connections, 0 failed")
