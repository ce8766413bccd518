"""Interrupted account setups: at every step, and by kill -9; `init-auth` can always run again."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetctl.fleets.etcd_accounts import AccountSetup, PasswordFolder
from fleetctl.verbs.init_auth import initialize_auth
from store.etcd import users
from store.etcd.address import EtcdAddress
from store.etcd.grpc.admin import AuthClient
from tests.support import store_admin
from tests.support.fleetctl_init_auth import as_root, check_accounts, request, run_init_auth
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.waiting import until

pytestmark = pytest.mark.etcd

_CHANGES = {"enable", "add_user", "set_password", "grant_role", "add_role", "grant", "revoke"}


class KilledError(BaseException):
    """Simulated kill -9: no handler catches it, and nothing is cleaned up."""


class MortalClient:
    """A client that dies at the n-th change: before etcd receives it, or before etcd answers."""

    def __init__(self, inner: AuthClient, *, dies_at: int, is_done: bool) -> None:
        self._inner = inner
        self._left = dies_at
        self._is_done = is_done

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        call: Callable[..., Awaitable[Any]] = getattr(self._inner, name)
        if name not in _CHANGES:
            return call

        async def change(*words: object) -> object:
            self._left -= 1
            if self._left == 0 and not self._is_done:
                raise KilledError
            found = await call(*words)
            if self._left == 0:
                raise KilledError
            return found

        return change


@pytest.fixture(scope="module")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TcpEtcd]:
    async with TcpEtcd(tmp_path_factory.mktemp("killed"), "--bcrypt-cost=4") as tcp_etcd:
        yield tcp_etcd


@pytest.fixture
async def out(etcd: TcpEtcd, tmp_path: Path) -> AsyncIterator[Path]:
    """Yield a folder; delete all users of etcd afterwards."""
    path = tmp_path / "out"
    yield path
    async with as_root(etcd, path) as root:
        await root.disable()
        for user in await root.users():
            await store_admin.delete_user(root, user)
        for role in await root.roles():
            await store_admin.delete_role(root, role)


async def first_run(address: EtcdAddress, out: Path, *, dies_at: int, is_done: bool) -> bool:
    """Run the steps of a first run; return whether it finished."""
    inner = AuthClient(address)
    mortal: Any = MortalClient(inner, dies_at=dies_at, is_done=is_done)
    folder = PasswordFolder(out)
    try:
        with folder.lock():
            setup = AccountSetup(mortal, folder, lambda _: None, is_on=False)
            await setup.create_root()
            for account in users.fleet_accounts(["mac-1"]):
                await setup.set_up_account(account)
            await mortal.enable()
    except KilledError:
        return False
    finally:
        await inner.close()
    return True


# root: role, user, grant of the role; each account: role, permissions, user, grant; finally enable.
ENABLES = 4 + sum(3 + len(account.permissions) for account in users.fleet_accounts(["mac-1"]))


@pytest.mark.ci
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("dies_at", [1, 2, 3, 4, 5, 17, 18, 40, ENABLES - 1, ENABLES])
async def test_a_run_can_be_repeated_after_any_step(
    etcd: TcpEtcd, out: Path, dies_at: int, is_done: bool
) -> None:
    assert not await first_run(etcd.address, out, dies_at=dies_at, is_done=is_done)
    anonymous = AuthClient(etcd.address)
    is_on = await anonymous.is_on()
    await anonymous.close()
    # No lockout: root's password is on disk before etcd enforces passwords.
    assert is_on == (dies_at == ENABLES and is_done)
    await run_init_auth(request(etcd, out, "mac-1"))
    await check_accounts(etcd, out, "mac-1")


async def test_a_first_run_has_no_further_steps(etcd: TcpEtcd, out: Path) -> None:
    assert await first_run(etcd.address, out, dies_at=ENABLES + 1, is_done=False)


@pytest.mark.parametrize("user", ["root", "fleet-gateway"])
@pytest.mark.parametrize("moment", ["before etcd", "after etcd"])
async def test_an_interrupted_rotation_can_be_repeated(
    etcd: TcpEtcd, out: Path, user: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_init_auth(request(etcd, out, "mac-1"))
    really = AuthClient.set_password

    async def mortal(self: AuthClient, name: str, password: str) -> None:
        if moment == "after etcd":
            await really(self, name, password)
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(AuthClient, "set_password", mortal)
        wanted = replace(request(etcd, out), rotated=frozenset({user}))
        with wanted.folder.lock(), pytest.raises(KilledError):
            await initialize_auth(wanted, lambda _: None)
    output = await run_init_auth(request(etcd, out))
    assert f"{user}: new password" in output
    await check_accounts(etcd, out, "mac-1")


@pytest.mark.ci
async def test_a_killed_process_can_be_repeated(etcd: TcpEtcd, out: Path) -> None:
    for files in (1, 3, 5):
        await killed_at(etcd, out, files)
    await run_init_auth(request(etcd, out, "mac-1"))
    await check_accounts(etcd, out, "mac-1")


async def killed_at(etcd: TcpEtcd, out: Path, files: int) -> None:
    """Run the real command, and kill it when `files` passwords are on disk."""
    words = ("init-auth", "--prepare", "--etcd", etcd.url, "--out", str(out), "--node", "mac-1")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", *words),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    await until(
        lambda: process.returncode is not None or len(list(out.glob("*.env"))) >= files,
        limit_s=20,
    )
    if process.returncode is None:
        process.kill()
    await process.wait()
