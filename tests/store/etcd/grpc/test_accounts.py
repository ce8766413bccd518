"""Users, roles and permissions in real etcds: what is written is what is read."""

from collections.abc import AsyncIterator

import pytest

from store.errors import AuthOffError, StoreError, UnauthenticatedError, UnavailableError
from store.etcd.address import EtcdAddress
from store.etcd.grpc.admin import AuthClient
from store.etcd.users import Permission, Right, key_permission, prefix_permission
from tests.store.binaries import BINARIES
from tests.store.tcp_etcd import TcpEtcd
from tests.support.ports import free_port

pytestmark = pytest.mark.etcd


@pytest.fixture(scope="module", params=BINARIES)
async def etcd(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TcpEtcd]:
    folder = tmp_path_factory.mktemp("accounts")
    async with TcpEtcd(folder, "--bcrypt-cost=4", binary=request.param) as found:
        yield found


@pytest.fixture
async def accounts(etcd: TcpEtcd) -> AsyncIterator[AuthClient]:
    """An etcd without users and roles."""
    found = AuthClient(etcd.address)
    for user in await found.users():
        await found.delete_user(user)
    for role in await found.roles():
        await found.delete_role(role)
    yield found
    await found.close()


async def test_permissions_are_read_back(accounts: AuthClient) -> None:
    await accounts.add_role("agent")
    assert await accounts.permissions_of("agent") == frozenset()
    wanted = {
        prefix_permission("/a/", Right.READ),
        prefix_permission("/b/", Right.READWRITE),
        key_permission("/c", Right.WRITE),
        key_permission("/d/\udcff", Right.READ),  # a key need not be text
    }
    for permission in wanted:
        await accounts.grant("agent", permission)
    assert await accounts.permissions_of("agent") == wanted
    assert await accounts.roles() == {"agent"}


async def test_a_right_to_the_same_range_is_replaced(accounts: AuthClient) -> None:
    await accounts.add_role("agent")
    for right in (Right.READ, Right.READWRITE, Right.WRITE):
        await accounts.grant("agent", prefix_permission("/a/", right))
        await accounts.grant("agent", key_permission("/b/", right))
        assert await accounts.permissions_of("agent") == {
            prefix_permission("/a/", right),
            key_permission("/b/", right),
        }


async def test_but_not_where_two_ranges_begin_at_one_key(accounts: AuthClient) -> None:
    """A fact of etcd's, for which `init-auth` looks twice."""
    await accounts.add_role("agent")
    for right in (Right.READWRITE, Right.READ):
        for permission in (prefix_permission("/a/", right), key_permission("/a/", right)):
            await accounts.grant("agent", permission)
    assert key_permission("/a/", Right.READWRITE) in await accounts.permissions_of("agent")
    await accounts.revoke("agent", key_permission("/a/", Right.READWRITE))
    assert await accounts.permissions_of("agent") == {prefix_permission("/a/", Right.READ)}


async def test_a_permission_is_taken_away_and_no_other(accounts: AuthClient) -> None:
    await accounts.add_role("agent")
    kept = {key_permission("/a/", Right.READ), prefix_permission("/b/", Right.READ)}
    for permission in (*kept, prefix_permission("/a/", Right.READ)):
        await accounts.grant("agent", permission)
    await accounts.revoke("agent", prefix_permission("/a/", Right.READ))
    assert await accounts.permissions_of("agent") == kept
    with pytest.raises(StoreError, match="permission"):
        await accounts.revoke("agent", Permission(key="/z", right=Right.READ))


async def test_users_and_their_roles(accounts: AuthClient) -> None:
    await accounts.add_user("a", "1")
    for role in ("x", "y"):
        await accounts.add_role(role)
        await accounts.grant_role("a", role)
    assert await accounts.users() == {"a"}
    assert await accounts.roles_of("a") == {"x", "y"}
    await accounts.revoke_role("a", "x")
    assert await accounts.roles_of("a") == {"y"}
    await accounts.delete_role("y")
    assert await accounts.roles_of("a") == frozenset()
    await accounts.delete_user("a")
    assert await accounts.users() == frozenset()


async def test_what_is_there_or_not_is_said(accounts: AuthClient) -> None:
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
        await accounts.enable()  # nobody could mend anything any more


async def test_enable_and_disable(etcd: TcpEtcd, accounts: AuthClient) -> None:
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
    with pytest.raises(UnauthenticatedError, match="asks for a user"):
        await accounts.users()
    root = AuthClient(EtcdAddress(endpoints=etcd.address.endpoints, username="root", password="r"))
    await root.enable()  # once more changes nothing
    assert await root.users() == {"root"}
    await root.disable()
    assert not await accounts.is_on()
    assert await root.users() == {"root"}
    await root.close()


async def test_nobody_there() -> None:
    accounts = AuthClient(EtcdAddress(endpoints=(f"http://127.0.0.1:{free_port()}",)))
    with pytest.raises(UnavailableError, match="refused"):
        await accounts.is_on()
    await accounts.close()
