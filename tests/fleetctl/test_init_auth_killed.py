"""`fleetctl init-auth` interrupted: at every step, and with kill -9; it can always be run again."""

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
from tests.fleetctl.test_init_auth import as_root, done, is_sound, order
from tests.support import store_admin
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.waiting import until

pytestmark = pytest.mark.etcd

_CHANGES = {"enable", "add_user", "set_password", "grant_role", "add_role", "grant", "revoke"}


class KilledError(BaseException):
    """As kill -9: nobody catches it, nothing is tidied up."""


class Mortal:
    """Accounts that die at the n-th change: before etcd was asked, or before it could answer."""

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
    async with TcpEtcd(tmp_path_factory.mktemp("killed"), "--bcrypt-cost=4") as found:
        yield found


@pytest.fixture
async def out(etcd: TcpEtcd, tmp_path: Path) -> AsyncIterator[Path]:
    """Yield a folder; afterwards etcd has no users any more."""
    found = tmp_path / "out"
    yield found
    async with as_root(etcd, found) as root:
        await root.disable()
        for user in await root.users():
            await store_admin.delete_user(root, user)
        for role in await root.roles():
            await store_admin.delete_role(root, role)


async def first_run(address: EtcdAddress, out: Path, *, dies_at: int, is_done: bool) -> bool:
    """Do what a first run does; return whether it came to its end."""
    inner = AuthClient(address)
    mortal: Any = Mortal(inner, dies_at=dies_at, is_done=is_done)
    folder = PasswordFolder(out)
    try:
        with folder.held():
            setup = AccountSetup(mortal, folder, lambda _: None, is_on=False)
            await setup.root()
            for account in users.fleet_accounts(["mac-1"]):
                await setup.account(account)
            await mortal.enable()
    except KilledError:
        return False
    finally:
        await inner.close()
    return True


# root: 1 role, 2 user, 3 its role; then each account: role, its grants, user, role; the last one enables.
ENABLES = 4 + sum(3 + len(one.permissions) for one in users.fleet_accounts(["mac-1"]))


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("dies_at", [1, 2, 3, 4, 5, 17, 18, 40, ENABLES - 1, ENABLES])
async def test_at_any_step(etcd: TcpEtcd, out: Path, dies_at: int, is_done: bool) -> None:
    assert not await first_run(etcd.address, out, dies_at=dies_at, is_done=is_done)
    nobody = AuthClient(etcd.address)
    is_on = await nobody.is_on()
    await nobody.close()
    # Nobody is locked out: before etcd asks for root's password it is on the disk.
    assert is_on == (dies_at == ENABLES and is_done)
    await done(order(etcd, out, "mac-1"))
    await is_sound(etcd, out, "mac-1")


async def test_the_steps_are_all_there_are(etcd: TcpEtcd, out: Path) -> None:
    assert await first_run(etcd.address, out, dies_at=ENABLES + 1, is_done=False)


@pytest.mark.parametrize("user", ["root", "fleet-gateway"])
@pytest.mark.parametrize("moment", ["before etcd", "after etcd"])
async def test_while_a_password_is_renewed(
    etcd: TcpEtcd, out: Path, user: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await done(order(etcd, out, "mac-1"))
    really = AuthClient.set_password

    async def mortal(self: AuthClient, name: str, password: str) -> None:
        if moment == "after etcd":
            await really(self, name, password)
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(AuthClient, "set_password", mortal)
        wanted = replace(order(etcd, out), rotated=frozenset({user}))
        with wanted.folder.held(), pytest.raises(KilledError):
            await initialize_auth(wanted, lambda _: None)
    said = await done(order(etcd, out))
    assert f"{user}: new password" in said
    await is_sound(etcd, out, "mac-1")


async def test_with_kill_9(etcd: TcpEtcd, out: Path) -> None:
    for files in (1, 3, 5):
        await killed_at(etcd, out, files)
    await done(order(etcd, out, "mac-1"))
    await is_sound(etcd, out, "mac-1")


async def killed_at(etcd: TcpEtcd, out: Path, files: int) -> None:
    """Run the real command, and kill it as soon as so many passwords are on the disk."""
    words = ("init-auth", "--etcd", etcd.url, "--out", str(out), "--node", "mac-1")
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
