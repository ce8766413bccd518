"""Tests of `store.etcd.grpc.admin`, on real etcds: users, roles, permissions, and maintenance of a member."""

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from store.errors import AuthOffError, StoreError, UnauthenticatedError, UnavailableError
from store.etcd import accounts as store_accounts
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.grpc.admin import AuthClient, MaintenanceClient, member_addresses
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from store.etcd.users import Permission, Right, key_permission, prefix_permission
from store.port import Put
from tests.support import store_admin
from tests.support.etcd import running_etcd
from tests.support.ports import free_port
from tests.support.store_binaries import BINARIES
from tests.support.store_tcp_etcd import TcpEtcd

pytestmark = pytest.mark.etcd


@pytest.fixture(scope="module", params=BINARIES)
async def etcd(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TcpEtcd]:
    folder = tmp_path_factory.mktemp("accounts")
    async with TcpEtcd(folder, "--bcrypt-cost=4", binary=request.param) as tcp_etcd:
        yield tcp_etcd


@pytest.fixture
async def accounts(etcd: TcpEtcd) -> AsyncIterator[AuthClient]:
    """An etcd without users and roles."""
    auth_client = AuthClient(etcd.address)
    for user in await auth_client.users():
        await store_admin.delete_user(auth_client, user)
    for role in await auth_client.roles():
        await store_admin.delete_role(auth_client, role)
    yield auth_client
    await auth_client.close()


async def test_permissions_are_read_back(accounts: AuthClient) -> None:
    await accounts.add_role("agent")
    assert await accounts.permissions_of("agent") == frozenset()
    wanted = {
        prefix_permission("/a/", Right.READ),
        prefix_permission("/b/", Right.READWRITE),
        key_permission("/c", Right.WRITE),
        key_permission("/d/\udcff", Right.READ),  # a key need not be UTF-8
    }
    for permission in wanted:
        await accounts.grant("agent", permission)
    assert await accounts.permissions_of("agent") == wanted
    assert await accounts.roles() == {"agent"}


async def test_two_ranges_that_begin_at_one_key_are_both_kept(accounts: AuthClient) -> None:
    """A property of etcd, because of which `init-auth` reads roles twice."""
    await accounts.add_role("agent")
    for right in (Right.READWRITE, Right.READ):
        for permission in (prefix_permission("/a/", right), key_permission("/a/", right)):
            await accounts.grant("agent", permission)
    assert key_permission("/a/", Right.READWRITE) in await accounts.permissions_of("agent")
    await accounts.revoke("agent", key_permission("/a/", Right.READWRITE))
    assert await accounts.permissions_of("agent") == {prefix_permission("/a/", Right.READ)}


async def test_revoking_a_permission_keeps_the_others(accounts: AuthClient) -> None:
    await accounts.add_role("agent")
    permissions = {key_permission("/a/", Right.READ), prefix_permission("/b/", Right.READ)}
    for permission in (*permissions, prefix_permission("/a/", Right.READ)):
        await accounts.grant("agent", permission)
    await accounts.revoke("agent", prefix_permission("/a/", Right.READ))
    assert await accounts.permissions_of("agent") == permissions
    with pytest.raises(StoreError, match="permission"):
        await accounts.revoke("agent", Permission(key="/z", right=Right.READ))


async def test_users_get_and_lose_roles(accounts: AuthClient) -> None:
    await accounts.add_user("a", "1")
    for role in ("x", "y"):
        await accounts.add_role(role)
        await accounts.grant_role("a", role)
    assert await accounts.users() == {"a"}
    assert await accounts.roles_of("a") == {"x", "y"}
    await accounts.revoke_role("a", "x")
    assert await accounts.roles_of("a") == {"y"}
    await store_admin.delete_role(accounts, "y")
    assert await accounts.roles_of("a") == frozenset()
    await store_admin.delete_user(accounts, "a")
    assert await accounts.users() == frozenset()


async def test_a_request_of_a_killed_set_up_may_arrive_late(accounts: AuthClient) -> None:
    await accounts.add_user("a", "1")
    await accounts.add_role("x")
    await store_accounts.add_user(accounts, "a", "2")
    await store_accounts.add_role(accounts, "x")
    assert await accounts.users() == {"a"}
    with pytest.raises(StoreError):
        await store_accounts.add_user(accounts, "", "2")


async def test_existing_and_missing_names_are_errors(accounts: AuthClient) -> None:
    await accounts.add_user("a", "1")
    await accounts.add_role("x")
    with pytest.raises(StoreError, match="user name already exists"):
        await accounts.add_user("a", "2")
    with pytest.raises(StoreError, match="role name already exists"):
        await accounts.add_role("x")
    with pytest.raises(StoreError, match="user name not found"):
        await accounts.roles_of("b")
    with pytest.raises(StoreError, match="role name not found"):
        await accounts.permissions_of("z")
    with pytest.raises(StoreError, match="root user"):
        await accounts.enable()  # without a root user no one could repair anything


async def test_authentication_is_enabled_and_disabled(etcd: TcpEtcd, accounts: AuthClient) -> None:
    assert not await accounts.is_on()
    with pytest.raises(AuthOffError):
        await accounts.is_password("root", "r")
    await accounts.add_user("root", "r")
    await accounts.add_role("root")
    await accounts.grant_role("root", "root")
    await accounts.enable()
    assert await accounts.is_on()
    assert await accounts.is_password("root", "r")
    assert not await accounts.is_password("root", "x")
    assert not await accounts.is_password("nobody", "r")
    with pytest.raises(UnauthenticatedError, match="requires a user"):
        await accounts.users()
    root = AuthClient(EtcdAddress(endpoints=etcd.address.endpoints, username="root", password="r"))
    await root.enable()  # enabling again changes nothing
    assert await root.users() == {"root"}
    await root.disable()
    assert not await accounts.is_on()
    assert await root.users() == {"root"}
    await root.close()


async def test_an_unreachable_etcd_is_unavailable() -> None:
    accounts = AuthClient(EtcdAddress(endpoints=(f"http://127.0.0.1:{free_port()}",)))
    with pytest.raises(UnavailableError, match="refused"):
        await accounts.is_on()
    await accounts.close()


@pytest.fixture
async def member_etcd(tmp_path: Path) -> AsyncIterator[EmbeddedEtcd]:
    """A fresh embedded etcd."""
    async with running_etcd(tmp_path) as own:
        yield own


@asynccontextmanager
async def maintaining(address: EtcdAddress) -> AsyncIterator[MaintenanceClient]:
    member = MaintenanceClient(address)
    try:
        yield member
    finally:
        await member.close()


@pytest.mark.etcd
async def test_a_member_reports_status_and_takes_maintenance(member_etcd: EmbeddedEtcd) -> None:
    transport = connect(member_etcd.address)
    await transport.commit([], [Put(key="/a", value=b"v")])
    await transport.close()
    async with maintaining(member_etcd.address) as member:
        status = await member.status()
        assert status.version == locate(None).text
        assert status.leader == status.member != 0
        assert status.revision == 2
        assert 0 < status.db_size_in_use_bytes <= status.db_size_bytes
        assert (status.is_learner, status.has_alarms) == (False, False)
        assert await member.alarms() == ()
        await member.compact(2)
        await member.defragment()
        buffer = io.BytesIO()
        taken = await member.snapshot(buffer)
        # Read after defragmenting: the size in use before says nothing about the file now.
        after = await member.status()
    assert taken.size_bytes == len(buffer.getvalue()) > after.db_size_in_use_bytes


@pytest.mark.etcd
async def test_an_unreachable_member_is_unavailable(tmp_path: Path) -> None:
    async with maintaining(EtcdAddress(socket=tmp_path / "none")) as member:
        with pytest.raises(UnavailableError):
            await member.status()
        with pytest.raises(UnavailableError):
            await member.snapshot(io.BytesIO())


def test_maintenance_needs_a_single_endpoint() -> None:
    three = EtcdAddress(endpoints=("http://a:1", "http://b:1", "http://c:1"), username="u")
    assert [address.endpoints for address in member_addresses(three)] == [
        ("http://a:1",), ("http://b:1",), ("http://c:1",),
    ]  # fmt: skip
    assert {address.username for address in member_addresses(three)} == {"u"}
    with pytest.raises(ValueError, match="one endpoint"):
        MaintenanceClient(three)
