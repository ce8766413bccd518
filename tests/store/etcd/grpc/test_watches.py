"""Tests of `store.etcd.grpc.watches`, on a real etcd: watches share a stream, and disturb each other in nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path

import pytest

from store.errors import CompactedError, PermissionDeniedError, UnavailableError
from store.etcd.connect import connect
from store.etcd.grpc import watches
from store.etcd.grpc.admin import MaintenanceClient
from store.port import Delete, KeyChange, Put, Transport, WatchBatch
from tests.support.chaos_transports import going
from tests.support.store_guarded_etcd import guarded_etcd
from tests.support.store_metrics import call_counts, gauges
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.waiting import until_async

pytestmark = pytest.mark.etcd

WATCHERS, STREAMS = "etcd_debugging_mvcc_watcher_total", "etcd_debugging_mvcc_watch_stream_total"


@pytest.fixture
async def transport(tcp: TcpEtcd) -> AsyncIterator[Transport]:
    async with going("grpc", tcp.address) as made:
        yield made


async def put(transport: Transport, key: str, value: bytes = b"x") -> int:
    return await transport.commit([], [Put(key=key, value=value)])


async def take(watch: AsyncIterator[WatchBatch], wanted: int) -> list[KeyChange]:
    """Return so many changes."""
    key_changes: list[KeyChange] = []
    async with asyncio.timeout(30):
        while len(key_changes) < wanted:
            key_changes.extend((await anext(watch)).changes)
    return key_changes


async def watchers(tcp: TcpEtcd) -> tuple[float, float]:
    """Return how many watches and streams etcd has."""
    found = await gauges(tcp.url)
    return found[WATCHERS], found[STREAMS]


async def until_watchers(tcp: TcpEtcd, *, wanted: tuple[float, float]) -> None:
    async def is_so() -> bool:
        return await watchers(tcp) == wanted

    await until_async(is_so)


async def test_equal_watches_are_one_of_etcd(tcp: TcpEtcd, transport: Transport) -> None:
    after = await put(transport, "/equal/start")
    before = (await call_counts(tcp.url)).begun["Watch"]
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(aclosing(transport.watch(prefix, after_revision=after)))
            for prefix in ("/equal/",) * 20 + ("/other/",)
        ]
        await asyncio.gather(*map(anext, opened))
        await until_watchers(tcp, wanted=(2, 1))
        assert (await call_counts(tcp.url)).begun["Watch"] == before + 1
        for number in range(5):
            await put(transport, f"/equal/{number}")
        expected = [f"/equal/{number}" for number in range(5)]
        for watch in opened[:-1]:
            assert [change.key for change in await take(watch, 5)] == expected
    await until_watchers(tcp, wanted=(0, 0))


async def test_a_late_watch_gets_its_own_history(tcp: TcpEtcd, transport: Transport) -> None:
    first = await put(transport, "/late/a")
    second = await put(transport, "/late/b")
    async with aclosing(transport.watch("/late/", after_revision=second)) as current:
        await anext(current)
        third = await put(transport, "/late/c")
        assert [change.mod_revision for change in await take(current, 1)] == [third]
        async with aclosing(transport.watch("/late/", after_revision=first)) as behind:
            assert [change.mod_revision for change in await take(behind, 2)] == [second, third]
            async with aclosing(transport.watch("/late/", after_revision=third)) as joined:
                await anext(joined)
                await until_watchers(tcp, wanted=(2, 1))
                fourth = await transport.commit([], [Delete(key="/late/a")])
                for watch in (current, behind, joined):
                    assert [c.mod_revision for c in await take(watch, 1)] == [fourth]


async def test_a_cancelled_watch_leaves_the_others(tcp: TcpEtcd, transport: Transport) -> None:
    after = await put(transport, "/cancel/start")
    async with aclosing(transport.watch("/cancel/", after_revision=after)) as staying:
        await anext(staying)
        for prefix in ("/cancel/", "/cancel/other/"):
            leaving = transport.watch(prefix, after_revision=after)
            await anext(leaving)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(leaving)
            await leaving.aclose()
        await until_watchers(tcp, wanted=(1, 1))
        await put(transport, "/cancel/a")
        assert [change.key for change in await take(staying, 1)] == ["/cancel/a"]


async def test_a_compacted_watch_leaves_the_others(transport: Transport, tcp: TcpEtcd) -> None:
    first = await put(transport, "/compact/a")
    last = await put(transport, "/compact/b")
    maintenance = MaintenanceClient(tcp.address)
    await maintenance.compact(last)
    await maintenance.close()
    async with aclosing(transport.watch("/compact/", after_revision=last)) as staying:
        await anext(staying)
        async with aclosing(transport.watch("/compact/", after_revision=first - 1)) as behind:
            with pytest.raises(CompactedError):
                await take(behind, 2)
        await put(transport, "/compact/c")
        assert [change.key for change in await take(staying, 1)] == ["/compact/c"]


async def test_a_report_takes_a_quiet_watch_past_a_compaction(tmp_path: Path) -> None:
    flag = "--experimental-watch-progress-notify-interval=500ms"
    async with TcpEtcd(tmp_path, flag) as etcd, going("grpc", etcd.address) as transport:
        start = await put(transport, "/quiet/a")
        async with aclosing(transport.watch("/quiet/", after_revision=start)) as watch:
            await anext(watch)
            last = await put(transport, "/elsewhere")
            reached = start
            async with asyncio.timeout(30):
                while reached < last:
                    reached = (await anext(watch)).revision
        maintenance = MaintenanceClient(etcd.address)
        await maintenance.compact(last)
        await maintenance.close()
        async with aclosing(transport.watch("/quiet/", after_revision=reached)) as resumed:
            await anext(resumed)
            await put(transport, "/quiet/b")
            assert [change.key for change in await take(resumed, 1)] == ["/quiet/b"]


async def test_a_watch_that_nobody_reads_ends_alone(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches, "_MOST_UNREAD", 50)
    after = await put(transport, "/unread/start")
    async with (
        aclosing(transport.watch("/unread/", after_revision=after)) as reading,
        aclosing(transport.watch("/unread/", after_revision=after)) as sleeping,
    ):
        await anext(reading)
        await anext(sleeping)
        for number in range(60):
            await put(transport, f"/unread/{number}")
            assert await take(reading, 1)
        with pytest.raises(UnavailableError, match="were not read"):
            await take(sleeping, 60)
        await put(transport, "/unread/end")
        assert [change.key for change in await take(reading, 1)] == ["/unread/end"]


async def test_a_refused_watch_leaves_the_others(tmp_path: Path) -> None:
    async with guarded_etcd(tmp_path) as guarded:
        transport = connect(guarded.address("gateway"))
        admin = connect(guarded.address("admin"))
        prefix = "/mlx-fleet/v1/spec/ModelDeployment/"
        after = await put(admin, f"{prefix}start")
        async with aclosing(transport.watch(prefix, after_revision=after)) as staying:
            await anext(staying)
            for _ in range(2):
                async with aclosing(
                    transport.watch("/foreign/", after_revision=after)
                ) as forbidden:
                    with pytest.raises(PermissionDeniedError):
                        await anext(forbidden)
            async with aclosing(transport.watch(prefix, after_revision=after)) as another:
                await anext(another)
                await put(admin, f"{prefix}a")
                for watch in (staying, another):
                    assert [change.key for change in await take(watch, 1)] == [f"{prefix}a"]
        await admin.close()
        await transport.close()


async def test_closing_the_transport_ends_its_watches(transport: Transport) -> None:
    after = await put(transport, "/closing/start")
    async with aclosing(transport.watch("/closing/", after_revision=after)) as watch:
        await anext(watch)
        await transport.close()
        with pytest.raises(UnavailableError):
            await take(watch, 1)
