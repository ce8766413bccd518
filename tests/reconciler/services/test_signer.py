"""`fleet-reconciler --authority-dir` as a process, at an etcd with users."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from identity.authority import load_certificate, new_key
from identity.authority_folder import AuthorityFolder
from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.names import Role
from identity.renewal import Applicant, Renewal
from identity.signer import Signer, revoke
from identity.trust_sync import TrustSync
from machinery.clock import SystemClock
from reconciler.services.signer import signer_address
from store import keys
from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.port import Put
from tests.support.identities import TestAuthority
from tests.support.signing import UUID, node_status, running
from tests.support.store_guarded_etcd import Guarded, guarded_etcd
from tests.support.waiting import until, until_async


@asynccontextmanager
async def part(etcd: Guarded, module: str, user: str, *flags: str) -> AsyncIterator[None]:
    """Run a part of the fleet with its own user of the store."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--etcd", str(etcd.etcd.address)),
        *("--etcd-password-file", str(etcd.file(user)), *flags),
    )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


def signing_reconciler(
    etcd: Guarded, folder: AuthorityFolder, *flags: str
) -> AbstractAsyncContextManager[None]:
    """Run a reconciler; root's password is in the folder of the authority alone."""
    (folder.path / "root.env").write_bytes(etcd.file("root").read_bytes())
    (folder.path / "root.env").chmod(0o600)
    given = ("--authority-dir", str(folder.path), *flags)
    return part(etcd, "reconciler", "reconciler", *given)


@pytest.mark.ci
@pytest.mark.etcd
async def test_an_agent_gets_and_renews_its_certificate_with_the_rights_of_its_user(
    tmp_path: Path,
) -> None:
    fleet = TestAuthority(tmp_path)
    folder = fleet.authority_folder()
    async with guarded_etcd(tmp_path / "etcd") as etcd:
        root = connect(etcd.address("root"))
        await fleet.publish(root)
        spec, status = node_status("mac-1", UUID)
        await root.commit([], [spec, status])
        agent = connect(etcd.address("node-mac-1"))
        own = IdentityFolder(tmp_path / "own")
        applicant = Applicant(role=Role.NODE, name="mac-1", hardware_uuid=UUID)
        renewal = Renewal(agent, SystemClock(), own, applicant)
        sync = TrustSync(agent, SystemClock(), own)
        async with signing_reconciler(etcd, folder), running(sync.run()):
            await until(own.trust.exists)
            assert await renewal.renew()
            first = load_certificate(own.certificate())
            assert await renewal.renew()
            second = load_certificate(own.certificate())
        assert first.serial_number != second.serial_number
        assert await agent.get(keys.request_key("node", "mac-1")) is None
        for transport in (root, agent):
            await transport.close()


@pytest.mark.ci
@pytest.mark.etcd
async def test_every_part_gets_its_certificate_while_the_fleet_is_being_secured(
    tmp_path: Path,
) -> None:
    fleet = TestAuthority(tmp_path)
    folders = {role: IdentityFolder(tmp_path / role) for role in (Role.GATEWAY, Role.RECONCILER)}
    state = tmp_path / "state"
    folders[Role.NODE] = IdentityFolder(state / "identity")  # its default
    agent = ("--name", "mac-1", "--state-dir", str(state), "--api-port", "0")
    async with guarded_etcd(tmp_path / "etcd") as etcd, AsyncExitStack() as parts:
        root = connect(etcd.address("root"))
        given = {role: ("--identity-dir", str(folder.path)) for role, folder in folders.items()}
        for manager in (
            signing_reconciler(etcd, fleet.authority_folder(), *given[Role.RECONCILER]),
            part(etcd, "nodeagent", "node-mac-1", *agent),
            part(etcd, "gateway", "gateway", "--port", "0", *given[Role.GATEWAY]),
        ):
            await parts.enter_async_context(manager)
        await fleet.publish(root)
        await until(lambda: all(folder.is_issued for folder in folders.values()), limit_s=60)
        await until(lambda: all(folder.trust.exists() for folder in folders.values()))
        await root.close()
    for role, folder in folders.items():
        identity = Credentials(folder, SystemClock()).identity
        assert identity.role is role
    assert Credentials(folders[Role.NODE], SystemClock()).identity.name == "mac-1"


def test_only_the_signer_uses_roots_password(tmp_path: Path) -> None:
    folder = TestAuthority(tmp_path).authority_folder()
    own = EtcdAddress(endpoints=("http://127.0.0.1:1",), username="fleet-reconciler", password="x")
    assert signer_address(folder, own) == own
    (folder.path / "root.env").write_text("FLEET_ETCD_USER=root\nFLEET_ETCD_PASSWORD=y\n")
    (folder.path / "root.env").chmod(0o600)
    address = signer_address(folder, own)
    assert (address.username, address.password, address.endpoints) == ("root", "y", own.endpoints)


@pytest.mark.ci
@pytest.mark.etcd
async def test_a_revoked_node_loses_its_user_and_its_lease(tmp_path: Path) -> None:
    fleet = TestAuthority(tmp_path)
    folder = fleet.authority_folder()
    async with guarded_etcd(tmp_path / "etcd") as etcd:
        root, agent = connect(etcd.address("root")), connect(etcd.address("node-mac-1"))
        await fleet.publish(root)
        signer = Signer(transport=root, clock=SystemClock(), authority=fleet.authority)
        identity = fleet.identity(Role.NODE, "mac-1")
        await signer.issue(identity, new_key()[1], hardware_uuid=UUID)
        lease, key = await agent.grant(60), keys.node_lease_key("mac-1")
        await agent.commit([], [Put(key=key, value=b"{}", lease=lease)])
        async with signing_reconciler(etcd, folder):
            await revoke(root, SystemClock(), identity, "stolen")

            async def is_gone() -> bool:
                return await root.get(key) is None

            await until_async(is_gone, what="the end of the node's lease")
        with pytest.raises(StoreError):
            await agent.get(keys.spec_key("Replica", "tiny-0"))
        for transport in (root, agent):
            await transport.close()
