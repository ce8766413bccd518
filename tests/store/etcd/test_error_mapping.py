"""Errors of connections say in plain words whether etcd is slow, silent, absent or out of reach."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from store.errors import SlowStoreError, StoreError, UnavailableError
from store.etcd.connect import connect
from store.etcd.error_mapping import connection_error
from tests.support import slow_cpu
from tests.support.store_tcp_etcd import TcpEtcd

SETTINGS = "connection attempt timed out before receiving SETTINGS frame"
JARGON = ("SETTINGS", "Deadline", "ipv4:", "RpcError", "grpc", "ClientConnector", "Timeout")


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (f"ipv4:10.0.0.1:2379: {SETTINGS}", SlowStoreError, "it is slow or stopped"),
        ("connect failed: Connection refused", UnavailableError, "no etcd listens there"),
        ("No route to host", UnavailableError, "its machine cannot be reached"),
        ("connect failed (addr): Timeout occurred: FD Shutdown", UnavailableError, "Is it up"),
    ],
)
def test_the_kind_of_trouble_is_named(text: str, kind: type[UnavailableError], words: str) -> None:
    error = connection_error("http://10.0.0.1:2379", text)
    assert type(error) is kind
    assert words in str(error)
    assert not any(word in str(error) for word in JARGON)


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[TcpEtcd]:
    async with TcpEtcd(tmp_path) as tcp_etcd:
        yield tcp_etcd


@pytest.mark.ci
@pytest.mark.etcd
async def test_a_frozen_etcd_is_there_but_slow(etcd: TcpEtcd, way: str) -> None:
    """On a connection that stood before, and on a new one."""
    address = replace(etcd.address, transport=way)  # type: ignore[arg-type]
    before, fresh = connect(address), connect(address)
    await before.get("/a")
    assert etcd.supervisor.pid is not None
    async with slow_cpu.frozen(etcd.supervisor.pid):
        for transport in (before, fresh):
            with pytest.raises(SlowStoreError, match="no answer from etcd at") as refused:
                await transport.get("/a")
            assert "slow" in str(refused.value)
            assert not any(word in str(refused.value) for word in JARGON)
    await asyncio.gather(before.close(), fresh.close())


async def test_where_nothing_listens_the_store_is_absent(tmp_path: Path, way: str) -> None:
    for address in (
        TcpEtcd(tmp_path).address,
        replace(TcpEtcd(tmp_path).address, endpoints=(), socket=tmp_path / "nowhere"),
    ):
        transport = connect(replace(address, transport=way))  # type: ignore[arg-type]
        with pytest.raises(StoreError) as refused:
            await transport.get("/a")
        await transport.close()
        assert isinstance(refused.value, UnavailableError)
        assert refused.value.absent, str(refused.value)
