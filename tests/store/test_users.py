"""etcd with users: stale tokens are renewed, roles are respected, wrong passwords are named."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from machinery.clock import SystemClock
from store.address import EtcdAddress
from store.errors import PermissionDeniedError, UnauthenticatedError
from store.http.route import EtcdRoute
from store.http.transport import HttpTransport
from store.http.wire import b64
from store.informer import Informer
from store.port import Put
from tests.store.tcp_etcd import TcpEtcd
from tests.support.waiting import until

pytestmark = pytest.mark.etcd


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[TcpEtcd]:
    """An etcd with users root and fleet; fleet may write below /ours/ only."""
    # Simple tokens live in etcd's memory: a restart makes them stale, as their time would.
    async with TcpEtcd(tmp_path, "--auth-token=simple", "--bcrypt-cost=4") as etcd:
        route = EtcdRoute(etcd.address)
        permission = {"permType": "READWRITE", "key": b64("/ours/"), "range_end": b64("/ours0")}
        for path, body in (
            ("user/add", {"name": "root", "password": "r"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": "fleet", "password": "f"}),
            ("role/add", {"name": "fleet"}),
            ("user/grant", {"user": "fleet", "role": "fleet"}),
            ("role/grant", {"name": "fleet", "perm": permission}),
            ("enable", {}),
        ):
            await route.call(f"/auth/{path}", body)
        await route.close()
        yield etcd


def fleet(etcd: TcpEtcd) -> EtcdAddress:
    return replace(etcd.address, username="fleet", password="f")


async def restart(etcd: TcpEtcd) -> None:
    assert etcd.supervisor.pid
    os.kill(etcd.supervisor.pid, signal.SIGKILL)
    await until(lambda: not etcd.supervisor.running)
    await etcd.start()


async def test_a_stale_token_is_renewed(guarded: TcpEtcd) -> None:
    transport = HttpTransport(fleet(guarded))
    await transport.commit([], [Put(key="/ours/a", value=b"1")])
    await restart(guarded)
    assert await transport.get("/ours/a") is not None  # fresh connections, and a fresh token
    async with asyncio.TaskGroup() as group:
        for n in range(50):
            group.create_task(transport.commit([], [Put(key=f"/ours/{n}", value=b"2")]))
    await transport.close()


async def test_a_watch_recovers_from_a_stale_token_without_other_calls(
    guarded: TcpEtcd,
) -> None:
    """A gateway has watches only: nothing else would notice that the token is stale."""
    watching, writing = HttpTransport(fleet(guarded)), HttpTransport(fleet(guarded))
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
    await watching.close()
    await writing.close()


async def test_what_the_role_does_not_allow_is_denied(guarded: TcpEtcd) -> None:
    transport = HttpTransport(fleet(guarded))
    for call in (transport.get("/theirs/a"), transport.list("/theirs/")):
        with pytest.raises(PermissionDeniedError, match="permission denied"):
            await call
    with pytest.raises(PermissionDeniedError):
        await transport.commit([], [Put(key="/theirs/a", value=b"1")])
    async with aclosing(transport.watch("/ours/", after_revision=0)) as watch:
        await anext(watch)
    await transport.close()


async def test_a_wrong_password_and_no_password_are_named(guarded: TcpEtcd) -> None:
    wrong = HttpTransport(replace(fleet(guarded), password="x"))
    with pytest.raises(PermissionDeniedError, match=r"etcd refuses user 'fleet': .*password"):
        await wrong.get("/ours/a")
    await wrong.close()
    nobody = HttpTransport(guarded.address)
    with pytest.raises(UnauthenticatedError, match="user name is empty"):
        await nobody.get("/ours/a")
    await nobody.close()
