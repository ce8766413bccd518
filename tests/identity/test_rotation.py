"""Rotation under load: certificates and authorities change while new connections are made, and none fails."""

import asyncio
from datetime import timedelta
from itertools import count, permutations

from identity import authority_exchange
from identity.authority import is_signed_by, load_certificate
from identity.credentials import Credentials
from identity.names import Role
from identity.renewal import Applicant, Renewal
from identity.trust_sync import TrustSync
from schemas.trust import TlsMode
from tests.support.identities import handshake
from tests.support.signing import UUID, SigningFleet, on_fleet, running
from tests.support.waiting import until

APPLICANTS = (
    Applicant(role=Role.NODE, name="mac-1", hardware_uuid=UUID),
    Applicant(role=Role.NODE, name="mac-2", hardware_uuid=UUID),
    Applicant(role=Role.GATEWAY, name="edge"),
)


class Process:
    """One process: its identity with all the work that keeps it current, a listener and clients."""

    def __init__(self, fleet: SigningFleet, credentials: Credentials, applicant: Applicant) -> None:
        self.credentials = credentials
        self.listener = credentials.server(frozenset(Role))
        self.client = credentials.client(frozenset({Role.NODE}))
        folder = credentials.folder
        self.renewal = Renewal(fleet.store, fleet.clock, folder, applicant, spread_s=2.0)
        sync = TrustSync(fleet.store, fleet.clock, folder)
        self.work = (self.renewal.run(), sync.run(), credentials.watch())


class Load:
    """Connections between all processes, one after the other, until it is stopped. The first failure ends it."""

    def __init__(self, processes: list[Process], every_s: float) -> None:
        self._pairs = [pair for pair in permutations(processes, 2) if pair[1] in processes[:2]]
        self._every_s = every_s
        self.connections = 0

    async def run(self) -> None:
        for number in count():
            client, server = self._pairs[number % len(self._pairs)]
            name = server.credentials.identity.dns_name
            handshake(client.client.context, server.listener.context, name)
            self.connections += 1
            await asyncio.sleep(self._every_s)


async def started(fleet: SigningFleet) -> list[Process]:
    await fleet.publish(TlsMode.STRICT)
    processes = []
    for applicant in APPLICANTS:
        folder = await fleet.join(applicant.role, applicant.name)
        processes.append(Process(fleet, Credentials(folder, fleet.clock), applicant))
    return processes


@on_fleet(lifetime=timedelta(seconds=20))
async def test_leaves_of_twenty_seconds_rotate_for_five_minutes(fleet: SigningFleet) -> None:
    processes = await started(fleet)
    load = Load(processes, every_s=2.0)
    work = [task for process in processes for task in process.work]
    async with fleet.signers(), running(*work), running(load.run()):
        await asyncio.sleep(300)
    least = int(300 / (fleet.lifetime.total_seconds() * 2 / 3)) - 1
    assert all(process.renewal.renewals >= least for process in processes)
    assert not any(process.listener.verifier.refused for process in processes)
    assert load.connections >= 145


@on_fleet
async def test_an_authority_is_exchanged_under_load(fleet: SigningFleet) -> None:
    processes = await started(fleet)
    old, load = fleet.authority.certificate, Load(processes, every_s=3.0)
    work = [task for process in processes for task in process.work]

    def authorities(process: Process) -> int:
        return process.credentials.folder.read_authorities().count("BEGIN")

    async with fleet.signers(), running(*work), running(load.run()):
        await asyncio.sleep(1)
        await authority_exchange.begin(fleet.store, fleet.clock, fleet.folder)
        await asyncio.sleep(300.1)
        settle = timedelta(seconds=300)
        await authority_exchange.activate(fleet.store, fleet.clock, fleet.folder, settle)
        await until(lambda: all(p.renewal.renewals == 1 for p in processes), limit_s=60)
        await authority_exchange.finish(fleet.store, fleet.clock)
        await until(lambda: all(authorities(process) == 1 for process in processes))
        await asyncio.sleep(3)
    for process in processes:
        certificate = load_certificate(process.credentials.folder.certificate())
        assert not is_signed_by(certificate, old)
        assert not process.listener.verifier.refused
    assert load.connections > 100
