"""Tests of `store.etcd.adapter`, with users: expired tokens are renewed, denials and wrong passwords are named."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from machinery.clock import SystemClock
from store.errors import PermissionDeniedError, StoreError, UnauthenticatedError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.grpc.admin import AuthClient
from store.etcd.users import Right, prefix_permission
from store.informer import Informer
from store.port import KeyChange, Put, Transport, WatchBatch
from tests.support import store_admin
from tests.support.store_binaries import FOUND
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.waiting import until

pytestmark = pytest.mark.etcd

# A jwt expires at a whole second, up to one second early; etcd checks every second for expired simple tokens. With a
# shorter time, a token could expire before it is used on a busy machine.
_TTL_S = 3
_OVER_S = 4.5


async def set_up(address: EtcdAddress, *, enable: bool = True) -> None:
    """Make users root and fleet; fleet may write below /ours/ only."""
    accounts = AuthClient(address)
    await accounts.add_user("root", "r")
    await accounts.add_role("root")
    await accounts.grant_role("root", "root")
    await accounts.add_user("fleet", "f")
    await accounts.add_role("fleet")
    await accounts.grant("fleet", prefix_permission("/ours/", Right.READWRITE))
    await accounts.grant_role("fleet", "fleet")
    if enable:
        await accounts.enable()
    await accounts.close()


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[TcpEtcd]:
    """An etcd of its own for the test, which may kill it."""
    # Simple tokens live in etcd's memory: a restart makes them stale, as expiry would.
    async with TcpEtcd(tmp_path, "--auth-token=simple", "--bcrypt-cost=4") as etcd:
        await set_up(etcd.address)
        yield etcd


@pytest.fixture(scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TcpEtcd]:
    async with TcpEtcd(tmp_path_factory.mktemp("users"), "--bcrypt-cost=4") as etcd:
        await set_up(etcd.address)
        yield etcd


def jwt_flag(folder: Path) -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = serialization.Encoding.PEM
    (folder / "private.pem").write_bytes(
        key.private_bytes(
            pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    (folder / "public.pem").write_bytes(
        key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    keys = f"pub-key={folder / 'public.pem'},priv-key={folder / 'private.pem'}"
    return f"--auth-token=jwt,{keys},sign-method=RS256,ttl={_TTL_S}s"


@pytest.fixture(scope="module")
async def forgetful(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, TcpEtcd]]:
    """Etcds with tokens that expire soon, of both types; all started at once, to wait only once."""
    async with AsyncExitStack() as stack:
        found = {}
        for binary in FOUND:
            for kind in ("simple", "jwt"):
                folder = tmp_path_factory.mktemp(kind)
                simple = ("--auth-token=simple", f"--auth-token-ttl={_TTL_S}")
                flags = simple if kind == "simple" else (jwt_flag(folder),)
                etcd = TcpEtcd(folder, "--bcrypt-cost=4", *flags, binary=binary.path)
                await stack.enter_async_context(etcd)
                await set_up(etcd.address)
                found[f"{binary.text} {kind}"] = etcd
        yield found


def fleet(etcd: TcpEtcd, way: str = "grpc", *, password: str = "f") -> EtcdAddress:
    address = replace(etcd.address, username="fleet", password=password)
    return replace(address, transport="http" if way == "http" else "grpc")


def root(etcd: TcpEtcd) -> AuthClient:
    return AuthClient(replace(etcd.address, username="root", password="r"))


@asynccontextmanager
async def opened(address: EtcdAddress) -> AsyncIterator[Transport]:
    transport = connect(address)
    try:
        yield transport
    finally:
        await transport.close()


async def restart(etcd: TcpEtcd) -> None:
    assert etcd.supervisor.pid
    os.kill(etcd.supervisor.pid, signal.SIGKILL)
    await until(lambda: not etcd.supervisor.running)
    await etcd.start()


async def test_expired_tokens_are_renewed(forgetful: dict[str, TcpEtcd]) -> None:
    """Check calls, renewals, watches that are opened late, and watches that were open all the time."""
    async with asyncio.TaskGroup() as group:
        for name, etcd in forgetful.items():
            for way in ("grpc", "http"):
                group.create_task(
                    outlive_tokens(fleet(etcd, way), f"/ours/{way}/"), name=f"{name} {way}"
                )


async def outlive_tokens(address: EtcdAddress, prefix: str) -> None:
    async with opened(address) as transport, opened(address) as late:
        lease = await transport.grant(30)
        revision = await transport.commit([], [Put(key=f"{prefix}a", value=b"1", lease=lease)])
        assert await transport.keep_alive(lease) > 0
        assert await late.get(f"{prefix}a") is not None
        async with aclosing(transport.watch(prefix, after_revision=revision)) as standing:
            await anext(standing)
            await asyncio.sleep(_OVER_S)
            assert await transport.keep_alive(lease) > 0
            # A gateway has only watches: nothing else would notice the expired token.
            await until_watched(late, prefix, after_revision=revision)
            await transport.commit([], [Put(key=f"{prefix}b", value=b"2")])
            async with asyncio.timeout(30):
                assert [c.key for c in await next_changes(standing)] == [f"{prefix}b"]
        await transport.revoke(lease)


async def next_changes(watch: AsyncIterator[WatchBatch]) -> tuple[KeyChange, ...]:
    """Return the changes of the next batch that has some."""
    async for batch in watch:
        if batch.changes:
            return batch.changes
    raise AssertionError("the watch ended")


async def until_watched(transport: Transport, prefix: str, *, after_revision: int) -> None:
    """Open a watch; the first one may be refused because of a stale token, the second may not."""
    for attempt in (1, 2):
        async with aclosing(transport.watch(prefix, after_revision=after_revision)) as watch:
            try:
                await anext(watch)
            except StoreError:
                assert attempt == 1
                continue
            return


async def test_a_change_of_users_disturbs_no_client(forgetful: dict[str, TcpEtcd]) -> None:
    """Tokens of type jwt expire with each change of users and roles: adding a node must not interrupt clients."""
    for name, etcd in forgetful.items():
        for way in ("grpc", "http"):
            try:
                await work_while_users_come_and_go(etcd, way)
            except StoreError as error:
                raise AssertionError(f"{name} {way}: {error}") from error


async def work_while_users_come_and_go(etcd: TcpEtcd, way: str) -> None:
    accounts = root(etcd)
    async with opened(fleet(etcd, way)) as transport:
        for n in range(5):
            await accounts.add_user(f"new-{way}-{n}", "x")
            revision = await transport.commit([], [Put(key="/ours/a", value=b"1")])
            async with aclosing(transport.watch("/ours/", after_revision=revision)) as watch:
                await anext(watch)
            await store_admin.delete_user(accounts, f"new-{way}-{n}")
            assert await transport.get("/ours/a") is not None
    await accounts.close()


async def test_a_stale_token_is_renewed(guarded: TcpEtcd, way: str) -> None:
    async with opened(fleet(guarded, way)) as transport:
        await transport.commit([], [Put(key="/ours/a", value=b"1")])
        await restart(guarded)
        assert await transport.get("/ours/a") is not None  # new connections, and a new token
        async with asyncio.TaskGroup() as group:
            for n in range(50):
                group.create_task(transport.commit([], [Put(key=f"/ours/{n}", value=b"2")]))


async def test_a_watch_recovers_from_a_stale_token_without_other_calls(
    guarded: TcpEtcd, way: str
) -> None:
    address = fleet(guarded, way)
    async with opened(address) as watching, opened(address) as writing:
        informer = Informer(watching, "/ours/", lambda item: item.value, SystemClock())
        async with asyncio.TaskGroup() as group:
            task = group.create_task(informer.run())
            await informer.wait_synced()
            await restart(guarded)
            assert await writing.get("/ours/a") is None
            revision = await writing.commit([], [Put(key="/ours/a", value=b"1")])
            async with asyncio.timeout(15):
                await informer.reached(revision)
            task.cancel()


async def test_a_wrong_and_a_missing_password_are_named(shared: TcpEtcd, way: str) -> None:
    async with opened(fleet(shared, way, password="x")) as wrong:
        with pytest.raises(PermissionDeniedError, match=r"etcd refuses user 'fleet': .*password"):
            await wrong.get("/ours/a")
        async with aclosing(wrong.watch("/ours/", after_revision=0)) as watch:
            with pytest.raises(PermissionDeniedError, match="etcd refuses user 'fleet'"):
                await anext(watch)
    async with opened(replace(fleet(shared, way), username="", password="")) as nobody:
        with pytest.raises(UnauthenticatedError, match=r"requires a user.*user name is empty"):
            await nobody.get("/ours/a")


async def test_a_concurrently_changed_password_is_named(shared: TcpEtcd, way: str) -> None:
    accounts = root(shared)
    async with opened(fleet(shared, way)) as transport:
        lease = await transport.grant(30)
        await transport.commit([], [Put(key="/ours/a", value=b"1", lease=lease)])
        await accounts.set_password("fleet", "changed")
        for _ in range(2):
            with pytest.raises(
                PermissionDeniedError, match=r"etcd refuses user 'fleet': .*password"
            ):
                await transport.get("/ours/a")
        with pytest.raises(PermissionDeniedError, match="etcd refuses user 'fleet'"):
            await transport.commit([], [Put(key="/ours/a", value=b"2")])
        await accounts.set_password("fleet", "f")
        assert await transport.get("/ours/a") is not None
    await accounts.close()


async def test_authentication_can_be_enabled_while_processes_run(tmp_path: Path, way: str) -> None:
    """Clients with a password continue, clients without one get an error."""
    async with TcpEtcd(tmp_path, "--bcrypt-cost=4") as etcd:
        await set_up(etcd.address, enable=False)
        nobody = replace(fleet(etcd, way), username="", password="")
        async with opened(fleet(etcd, way)) as ready, opened(nobody) as late:
            lease = await ready.grant(30)
            for transport in (ready, late):
                await transport.commit([], [Put(key="/ours/a", value=b"1", lease=lease)])
            revision = (await ready.status()).revision
            async with aclosing(ready.watch("/ours/", after_revision=revision)) as standing:
                await anext(standing)
                accounts = AuthClient(etcd.address)
                await accounts.enable()
                await accounts.close()
                await ready.commit([], [Put(key="/ours/a", value=b"2")])
                async with asyncio.timeout(30):
                    assert (await anext(standing)).changes
            assert await ready.keep_alive(lease) > 0
            with pytest.raises(UnauthenticatedError, match="requires a user"):
                await late.get("/ours/a")
            await ready.revoke(lease)
