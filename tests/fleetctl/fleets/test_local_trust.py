"""Authority, users and identities of a local fleet: on a real etcd, also after interruptions."""

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.data_dir import DataDir
from fleetctl.fleets.fleet_trust import Machine
from fleetctl.fleets.local_trust import LocalTrust
from identity.authority import addresses_of, identity_of, load_certificate
from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.names import Role
from machinery.clock import SystemClock
from schemas.trust import FleetTrust, IssuedCertificate, TlsMode
from store import codec, keys
from store.errors import PermissionDeniedError
from store.etcd import users
from store.etcd.connect import connect
from store.etcd.grpc.admin import AuthClient
from store.etcd.member.embedded import EmbeddedEtcd
from tests.support.etcd import running_etcd

pytestmark = pytest.mark.etcd

MACHINE = Machine(hostname="Anna's Mac.local", hardware_uuid="4711", address="10.0.0.5")
NODES = ("node-1", "node-2")


@pytest.fixture
def folder(tmp_path: Path) -> DataDir:
    made = DataDir(tmp_path / "data")
    made.prepare()
    return made


@pytest.fixture
async def etcd(folder: DataDir) -> AsyncIterator[EmbeddedEtcd]:
    async with running_etcd(folder.etcd) as embedded_etcd:
        yield embedded_etcd


def trust_of(folder: DataDir, machine: Machine = MACHINE) -> LocalTrust:
    """Return the trust as a new supervisor opens it."""
    return LocalTrust(folder, SystemClock(), machine)


def silent(_: str) -> None:
    pass


def identities(folder: DataDir) -> dict[str, IdentityFolder]:
    roles = (Role.ETCD, Role.RECONCILER, Role.GATEWAY, Role.ADMIN)
    paths = {str(role): folder.identity(role) for role in roles}
    paths |= {name: folder.node_identity(name) for name in NODES}
    return {name: IdentityFolder(path) for name, path in paths.items()}


@pytest.mark.ci
async def test_an_interrupted_preparation_is_finished_by_the_next(
    folder: DataDir, etcd: EmbeddedEtcd
) -> None:
    for limit_s in (0.02, 0.1, 0.2, 0.4, 0.8):
        trust = trust_of(folder)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await trust.prepare(etcd.address, NODES, silent)
                break
    await trust_of(folder).prepare(etcd.address, NODES, silent)
    trust = trust_of(folder)
    before = {name: one.read_identity() for name, one in identities(folder).items()}
    await trust.prepare(etcd.address, NODES, silent)
    assert {name: one.read_identity() for name, one in identities(folder).items()} == before
    names = {
        identity_of(load_certificate(identity.certificate()))
        .uri.partition("//")[2]
        .partition("/")[2]
        for identity in identities(folder).values()
    }
    assert {"etcd/anna-s-mac", "gateway/anna-s-mac", "reconciler/anna-s-mac"} <= names
    assert {"node/node-1", "node/node-2"} <= names
    for one in identities(folder).values():
        assert Credentials(one, SystemClock()).mode is TlsMode.STRICT
    await check_store(folder, trust, etcd)


async def check_store(folder: DataDir, trust: LocalTrust, etcd: EmbeddedEtcd) -> None:
    anonymous = connect(etcd.address)
    with pytest.raises(PermissionDeniedError):
        await anonymous.get(keys.FLEET_TRUST)
    await anonymous.close()
    who = users.read_credentials(trust.password_file("node-node-1"))
    transport = connect(replace(etcd.address, username=who.user, password=who.password))
    item = await transport.get(keys.FLEET_TRUST)
    assert item is not None
    assert codec.decode(FleetTrust, item).mode is TlsMode.STRICT
    item = await transport.get(keys.issued_key("node", "node-1"))
    assert item is not None
    assert codec.decode(IssuedCertificate, item).hardware_uuid == "4711"
    with pytest.raises(PermissionDeniedError):
        await transport.get(keys.API_KEY_PREFIX)
    await transport.close()
    for secret in (folder.authority / "ca.key", folder.authority / "root.env"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700


@pytest.mark.ci
async def test_a_new_address_gets_new_certificates(folder: DataDir, etcd: EmbeddedEtcd) -> None:
    await trust_of(folder).prepare(etcd.address, (), silent)
    moved = trust_of(folder, replace(MACHINE, address="10.0.0.6"))
    await moved.prepare(etcd.address, (), silent)
    served = IdentityFolder(folder.identity("etcd")).certificate()
    assert "10.0.0.6" in addresses_of(load_certificate(served))


@pytest.mark.ci
async def test_the_authority_of_another_fleet_is_refused(
    folder: DataDir, etcd: EmbeddedEtcd
) -> None:
    await trust_of(folder).prepare(etcd.address, (), silent)
    (folder.authority / "ca.pem").unlink()
    with pytest.raises(FleetctlError, match="Give the folder that belongs to the store"):
        await trust_of(folder).prepare(etcd.address, (), silent)


async def test_a_lost_password_of_root_is_named(folder: DataDir, etcd: EmbeddedEtcd) -> None:
    await trust_of(folder).prepare(etcd.address, (), silent)
    (folder.authority / "root.env").unlink()
    with pytest.raises(FleetctlError, match=r"root\.env does not exist"):
        await trust_of(folder).prepare(etcd.address, (), silent)


async def test_the_dashboard_may_write_as_the_last_start_says(
    folder: DataDir, etcd: EmbeddedEtcd
) -> None:
    for can_write in (False, True, False):
        trust = LocalTrust(folder, SystemClock(), MACHINE, can_dashboard_write=can_write)
        await trust.prepare(etcd.address, NODES, silent)
        client = AuthClient(trust.as_root(etcd.address))
        try:
            permissions = await client.permissions_of("fleet-dashboard")
        finally:
            await client.close()
        assert users.dashboard_may_write(permissions) is can_write
