"""Requests and checks of `fleetctl init-auth`, for tests with a real etcd."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fleetctl.fleets.etcd_accounts import PasswordFolder
from fleetctl.verbs.init_auth import InitAuthRequest, initialize_auth
from store.etcd import users as etcd_users
from store.etcd.grpc.admin import AuthClient
from tests.support.store_tcp_etcd import TcpEtcd

STEPS: tuple[Literal["prepare", "enable"], ...] = ("prepare", "enable")


def request(etcd: TcpEtcd, out: Path, *nodes: str, root: Path | None = None) -> InitAuthRequest:
    """Return a request to prepare; `root` is a file with root's password."""
    who = etcd_users.read_credentials(root) if root is not None else None
    where = etcd.address
    if who is not None:
        where = replace(where, username=who.user or "root", password=who.password)
    return InitAuthRequest(
        address=where,
        folder=PasswordFolder(out),
        nodes=nodes,
        rotated=frozenset(),
        step="prepare",
    )


async def run_init_auth(asked: InitAuthRequest) -> str:
    """Prepare and enable, and return the output, which must not contain a password."""
    output: list[str] = []
    with asked.folder.lock():
        for step in STEPS:
            await initialize_auth(replace(asked, step=step), output.append)
    text = "\n".join(output)
    for file in asked.folder.path.glob("*.env*"):
        assert etcd_users.read_credentials(file).password not in text
    return text


@asynccontextmanager
async def as_root(etcd: TcpEtcd, out: Path) -> AsyncIterator[AuthClient]:
    """Yield a client with root's permissions."""
    who = etcd_users.read_credentials(out / "root.env")
    accounts = AuthClient(replace(etcd.address, username=who.user, password=who.password))
    try:
        yield accounts
    finally:
        await accounts.close()


async def check_accounts(etcd: TcpEtcd, out: Path, *nodes: str) -> None:
    """Check users, roles, permissions and passwords in etcd."""
    wanted = {account.user: account for account in etcd_users.fleet_accounts(nodes)}
    async with as_root(etcd, out) as root:
        assert await root.is_on()
        assert await root.users() == {*wanted, "root"}
        assert await root.roles() == {*wanted, "root"}
        assert await root.roles_of("root") == {"root"}
        for user, account in wanted.items():
            assert await root.roles_of(user) == {user}
            assert await root.permissions_of(user) == account.permissions
            credentials = etcd_users.read_credentials(out / account.file)
            assert credentials.user == user
            assert await root.is_password(user, credentials.password)
    assert not list(out.glob("*.next"))
