"""A real reconciler process with an authority, a real etcd with users: what a node gets, and what it may do with it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets import join_client
from fleetctl.fleets.join_client import JoinAddress
from machinery.clock import SystemClock
from schemas.records import ReconcilerLease
from schemas.wire.join import JoinAnswer
from store import codec, keys
from store.errors import PermissionDeniedError
from store.etcd.accounts import JoinedAccounts, NoRootError
from store.etcd.connect import connect
from store.etcd.users import read_credentials
from store.port import Put, Transport
from tests.support.join import JoinStand, join_body, machine
from tests.support.ports import free_port
from tests.support.store_guarded_etcd import Guarded, guarded_etcd
from tests.support.waiting import until_async

CLOCK = SystemClock()
URLS = ("https://etcd-1:2379", "https://etcd-2:2379")


@pytest.fixture(scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    async with guarded_etcd(tmp_path_factory.mktemp("guarded")) as made:
        yield made


@pytest.fixture(scope="module")
async def admin(guarded: Guarded) -> AsyncIterator[Transport]:
    transport = connect(guarded.address("admin"))
    yield transport
    await transport.close()


@asynccontextmanager
async def control_mac(
    guarded: Guarded, stand: JoinStand, folder: Path
) -> AsyncIterator[JoinAddress]:
    """Run a reconciler with the stand's authority and identity, and its own password for etcd."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "reconciler", "--etcd", guarded.etcd.url),
        *("--etcd-password-file", str(guarded.file("reconciler"))),
        *("--git-dir", str(folder / "git"), "--api-port", str(port)),
        *("--authority-dir", str(stand.authority.path)),
        *("--identity-dir", str(stand.identity.path)),
        *("--advertise-etcd", ",".join(URLS)),
        env={**os.environ, "HOME": "/nonexistent"},
        stderr=asyncio.subprocess.PIPE,
    )
    where = JoinAddress("127.0.0.1", port)

    async def listens() -> bool:
        assert process.returncode is None, "the reconciler has ended"
        try:
            await join_client.pin(where, None, CLOCK)
        except join_client.UnreachableError:
            return False
        return True

    try:
        await until_async(listens, limit_s=30, what="the join port")
        yield where
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


async def joined(stand: JoinStand, where: JoinAddress, name: str) -> JoinAnswer:
    """Join as a node with a new token."""
    token = await stand.token(entropy=os.urandom(21))
    body = join_body(token, who=machine(name, f"uuid-{name}"))
    return await join_client.join((where,), token.authority_hash, body, CLOCK, limit_s=30.0)


@pytest.mark.ci
@pytest.mark.etcd
async def test_a_node_that_joins_gets_a_password_for_its_own_keys(
    guarded: Guarded, admin: Transport, tmp_path: Path
) -> None:
    stand = await JoinStand(tmp_path / "fleet", admin).open()
    (stand.authority.path / "root.env").write_bytes(guarded.file("root").read_bytes())
    (stand.authority.path / "root.env").chmod(0o600)
    async with control_mac(guarded, stand, tmp_path) as where:

        async def is_advertised() -> bool:
            items = (await admin.list(keys.RECONCILER_LEASE_PREFIX)).items
            leases = [codec.decode(ReconcilerLease, item) for item in items]
            return f"127.0.0.1:{where.port}" in [lease.join_address for lease in leases]

        await until_async(is_advertised, limit_s=20, what="the address of the join port")
        answer = await joined(stand, where, "mac-77")
    assert answer.etcd == URLS
    assert answer.etcd_user == "fleet-node-mac-77"
    address = replace(
        guarded.etcd.address, username=answer.etcd_user, password=answer.etcd_password
    )
    transport = connect(address)
    try:
        await transport.commit([], [Put(key=keys.node_lease_key("mac-77"), value=b"{}")])
        for foreign in (keys.node_lease_key("mac-1"), keys.FLEET_TRUST, keys.SECRET_PREFIX + "x"):
            with pytest.raises(PermissionDeniedError):
                await transport.commit([], [Put(key=foreign, value=b"{}")])
        with pytest.raises(PermissionDeniedError):
            await transport.list(keys.JOIN_TOKEN_PREFIX)
    finally:
        await transport.close()


@pytest.mark.etcd
async def test_a_gateway_that_joins_gets_a_user_of_its_own_with_the_shared_rights(
    guarded: Guarded,
) -> None:
    root = read_credentials(guarded.file("root"))
    accounts = JoinedAccounts(guarded.etcd.address, root)
    assert await accounts.are_required()
    first, again = (
        await accounts.issue("gateway", "edge-1"),
        await accounts.issue("gateway", "edge-1"),
    )
    assert first.user == again.user == "fleet-gateway-edge-1"
    assert first.password != again.password
    transport = connect(replace(guarded.etcd.address, username=again.user, password=again.password))
    try:
        lease = keys.named(keys.GATEWAY_LEASE_PREFIX, "edge-1")
        await transport.commit([], [Put(key=lease, value=b"{}")])
        with pytest.raises(PermissionDeniedError):
            await transport.commit([], [Put(key=keys.endpoint_key("mac-1", "r-0"), value=b"{}")])
    finally:
        await transport.close()
    with pytest.raises(NoRootError, match=r"root\.env"):
        await JoinedAccounts(guarded.etcd.address, None).are_required()


@pytest.mark.ci
@pytest.mark.etcd
async def test_a_token_is_not_used_while_the_signer_cannot_add_users(
    guarded: Guarded, admin: Transport, tmp_path: Path
) -> None:
    stand = await JoinStand(tmp_path / "fleet", admin).open()
    async with control_mac(guarded, stand, tmp_path) as where:
        with pytest.raises(FleetctlError, match="cannot let machines join now; its log says why"):
            await joined(stand, where, "mac-78")
    items = (await admin.list(keys.JOIN_TOKEN_PREFIX)).items
    assert not any(b"mac-78" in item.value for item in items)
    assert await admin.get(keys.issued_key("node", "mac-78")) is None
