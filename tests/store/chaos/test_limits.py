"""Requests beyond the store's limits are refused by name, and everything else continues."""

import asyncio
from pathlib import Path

import pytest

from store.errors import NoSpaceError, TooLargeError
from store.port import Delete, Put, Transport
from tests.support.chaos_informers import crowd, stored
from tests.support.chaos_transports import WAYS, going
from tests.support.store_binaries import BINARIES
from tests.support.store_tcp_etcd import TcpEtcd

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300)]

# Beyond --max-request-bytes, beyond gRPC's margin on top of that, and far beyond.
_TOO_LARGE = (1_600_000, 2_200_000, 12_000_000)
_PIECE = b"x" * 250_000


@pytest.mark.parametrize("way", WAYS)
async def test_a_value_over_the_limit_breaks_nothing(way: str, tcp: TcpEtcd, corner: str) -> None:
    async with (
        crowd(way, tcp.url, corner, size=5) as watching,
        going(way, tcp.address) as transport,
    ):
        for size in _TOO_LARGE:
            with pytest.raises(TooLargeError):
                await transport.commit([], [Put(key=f"{corner}large", value=b"x" * size)])
            assert await transport.get(f"{corner}large") is None
        many = [Put(key=f"{corner}{n}", value=_PIECE) for n in range(10)]
        with pytest.raises(TooLargeError):  # each is small enough, but not all together
            await transport.commit([], many)
        end = await transport.commit([], [Put(key=f"{corner}small", value=b"x")])
        items, _ = await stored(transport, corner)
        assert set(items) == {f"{corner}small"}
        await watching.equals(items, end, limit_s=30)


@pytest.mark.parametrize("way", WAYS)
async def test_large_values_do_not_harm_concurrent_calls(
    way: str, tcp: TcpEtcd, corner: str
) -> None:
    """One connection carries all of the calls."""
    async with going(way, tcp.address) as transport:

        async def large() -> None:
            with pytest.raises(TooLargeError):
                await transport.commit([], [Put(key=f"{corner}large", value=b"x" * 2_200_000)])

        async def small(number: int) -> None:
            key = f"{corner}{number}"
            await transport.commit([], [Put(key=key, value=b"x")])
            assert await transport.get(key) is not None

        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(small(number))
                if number % 10 == 0:
                    group.create_task(large())


async def fill(transport: Transport) -> None:
    """Write until the store refuses, or up to twice its quota."""
    for number in range(70):
        await transport.commit([], [Put(key=f"/quota/{number:03}", value=_PIECE)])


@pytest.mark.ci
@pytest.mark.parametrize("binary", BINARIES)
@pytest.mark.parametrize("way", WAYS)
async def test_without_space_reads_leases_and_informers_still_work(
    way: str, tmp_path: Path, binary: Path
) -> None:
    async with (
        TcpEtcd(tmp_path, f"--quota-backend-bytes={8 * 2**20}", binary=binary) as etcd,
        going(way, etcd.address) as transport,
    ):
        lease = await transport.grant(60)
        await transport.commit([], [Put(key="/quota/leased", value=b"x", lease=lease)])
        async with crowd(way, etcd.url, "/quota/", size=5) as watching:
            with pytest.raises(NoSpaceError):
                await fill(transport)
            with pytest.raises(NoSpaceError):
                await transport.commit([], [Put(key="/quota/small", value=b"x")])
            with pytest.raises(NoSpaceError):
                await transport.grant(60)
            items, newest = await stored(transport, "/quota/")
            assert len(items) > 5
            await watching.equals(items, newest, limit_s=30)
            assert await transport.get("/quota/000") is not None
            assert await transport.keep_alive(lease) == 60
            gone = await transport.commit([], [Delete(key="/quota/000")])
            items, _ = await stored(transport, "/quota/")
            assert "/quota/000" not in items
            await watching.equals(items, gone, limit_s=30)
            await transport.revoke(lease)
            assert await transport.get("/quota/leased") is None
