"""What an informer owes its readers and its store: whole lists, indexes, no hammering, no leftovers."""

import asyncio
import logging
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from gateway.state.table_cache import TableCache
from machinery.clock import SystemClock
from reconciler.listers.caches import make_caches
from store.errors import StoreError, UnavailableError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.informer import HandlerError, Informer
from store.memory import MemoryTransport
from store.port import KeyValue, Put, Transport
from tests.store.faults import FaultyTransport
from tests.store.informing import delete, put, running, text_of, watchers
from tests.store.tcp_etcd import TcpEtcd
from tests.support.clock import FakeClock
from tests.support.waiting import until, until_async


@pytest.fixture
def memory() -> MemoryTransport:
    return MemoryTransport(SystemClock())


@pytest.fixture
def faulty(memory: MemoryTransport) -> FaultyTransport:
    return FaultyTransport(memory)


async def fill(transport: Transport, prefix: str, count: int, value: str = "1") -> None:
    for start in range(0, count, 100):
        batch = [
            Put(key=f"{prefix}{n:05}", value=value.encode()) for n in range(start, start + 100)
        ]
        await transport.commit([], batch)


async def test_readers_never_see_half_a_list(
    memory: MemoryTransport, faulty: FaultyTransport
) -> None:
    await fill(memory, "/a/", 1200)
    sizes: set[tuple[int, int]] = set()
    async with running(faulty, "/a/") as informer:

        async def look() -> None:
            sizes.add((len(informer.items), sum(v == "2" for v in informer.items.values())))
            await asyncio.sleep(0)

        faulty.between_pages = look
        await informer.wait_synced()
        await until(lambda: faulty.watches)
        faulty.leave()
        await fill(memory, "/a/", 1200, "2")
        memory.compact()
        faulty.come_back()
        await until(lambda: set(informer.items.values()) == {"2"})
    assert faulty.lists == 2
    assert sizes == {(0, 0), (1200, 0)}


async def test_a_list_decodes_only_what_changed(
    memory: MemoryTransport, faulty: FaultyTransport
) -> None:
    await fill(memory, "/a/", 600)
    decoded: list[str] = []

    def decode(item: KeyValue) -> str:
        decoded.append(item.key)
        return text_of(item)

    informer = Informer(faulty, "/a/", decode, SystemClock())
    async with asyncio.TaskGroup() as group:
        task = group.create_task(informer.run())
        await informer.wait_synced()
        await until(lambda: faulty.watches)
        assert len(decoded) == 600
        decoded.clear()
        faulty.leave()
        await put(memory, "/a/00007", "2")
        await put(memory, "/b", "so that the history ends after ours")
        memory.compact()
        faulty.come_back()
        await until(lambda: informer.items["/a/00007"] == "2")
        task.cancel()
    assert decoded == ["/a/00007"]


async def test_an_index_finds_what_is_there_now(memory: MemoryTransport) -> None:
    await put(memory, "/a/1", "x y")
    async with running(memory, "/a/") as informer:
        informer.index("word", str.split)
        await informer.wait_synced()
        informer.index("late", str.split)
        for name in ("word", "late"):
            assert informer.by_index(name, "x") == {"/a/1": "x y"}
        await put(memory, "/a/1", "y")
        await put(memory, "/a/0", "y")
        await informer.reached(await put(memory, "/a/2", "x"))
        for name in ("word", "late"):
            assert list(informer.by_index(name, "y").items()) == [("/a/0", "y"), ("/a/1", "y")]
            assert informer.by_index(name, "x") == {"/a/2": "x"}
        await informer.reached(await put(memory, "/a/2", "bad"))
        assert informer.by_index("word", "x") == {"/a/2": "x"}  # the last good value
        await informer.reached(await delete(memory, "/a/2"))
        assert informer.by_index("word", "x") == {}
        with pytest.raises(KeyError):
            informer.by_index("unknown", "x")


async def test_what_a_newer_fleet_wrote_is_told_apart(memory: MemoryTransport) -> None:
    async with running(memory, "/a/") as informer:
        await informer.wait_synced()
        for value, undecodable, newer in (
            ("newer", {"/a/1"}, {"/a/1"}),
            ("bad", {"/a/1"}, set[str]()),
            ("newer", {"/a/1"}, {"/a/1"}),
            ("good", set[str](), set[str]()),
            ("newer", {"/a/1"}, {"/a/1"}),
        ):
            await informer.reached(await put(memory, "/a/1", value))
            assert (informer.undecodable, informer.newer) == (undecodable, newer)
        await informer.reached(await delete(memory, "/a/1"))
        assert (informer.undecodable, informer.newer) == (set(), set())


@pytest.mark.parametrize("error", [ValueError("a bug"), UnavailableError("asked in a handler")])
async def test_a_handler_that_raises_ends_the_informer_loudly(
    memory: MemoryTransport, error: Exception
) -> None:
    informer = Informer(memory, "/a/", text_of, SystemClock())

    def handler(key: str) -> None:
        raise error

    informer.on_change(handler)
    await put(memory, "/a/1", "x")
    expected = HandlerError if isinstance(error, StoreError) else ValueError
    with pytest.raises(expected) as caught:
        async with asyncio.timeout(30):
            await informer.run()
    assert error in (caught.value, caught.value.__cause__)


async def test_a_write_on_the_last_good_value_has_not_seen_the_newest(
    memory: MemoryTransport,
) -> None:
    async with running(memory, "/a/") as informer:
        await informer.wait_synced()
        good = await put(memory, "/a/1", "good")
        await put(memory, "/a/1", "newer")
        await put(memory, "/a/2", "bad")
        await informer.reached(await put(memory, "/a/1", "bad"))
        assert (informer.items["/a/1"], informer.version("/a/1")) == ("good", good)
        assert informer.version("/a/2") == 0
        better = await put(memory, "/a/1", "better")
        await informer.reached(better)
        assert informer.version("/a/1") == better


async def test_values_are_not_queued(memory: MemoryTransport) -> None:
    """A reader that comes late finds the last value, told of by keys."""
    told: list[str] = []
    async with running(memory, "/a/") as informer:
        await informer.wait_synced()
        informer.on_change(told.append)
        for n in range(500):
            await put(memory, "/a/1", str(n))
        await informer.reached(await put(memory, "/a/1", "last"))
        assert informer.items["/a/1"] == "last"
    assert set(told) == {"/a/1"}


async def opened_at(
    clock: FakeClock, stands_s: float, for_s: float, *, jitter: float
) -> list[float]:
    """Return when an informer opened watches that each stand for so long."""
    faulty = FaultyTransport(MemoryTransport(clock))
    opened: list[float] = []

    async def break_them() -> None:
        while True:
            seen = faulty.watches
            while faulty.watches == seen:
                await clock.sleep(0.001)
            opened.append(clock.monotonic())
            await clock.sleep(stands_s)
            faulty.leave()
            faulty.come_back()

    async with asyncio.TaskGroup() as group:
        breaking = group.create_task(break_them())
        await asyncio.sleep(0)
        async with running(faulty, "/a/", clock, jitter=lambda: jitter):
            await clock.advance(for_s)
        breaking.cancel()
    return opened


async def test_a_watch_that_breaks_at_once_is_not_hammered() -> None:
    opened = await opened_at(FakeClock(), 0.0, 4.0, jitter=1.0)
    gaps = [after - before for before, after in pairwise(opened)]
    assert gaps == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0], abs=0.01)


async def test_a_watch_that_stood_for_long_is_opened_again_soon() -> None:
    opened = await opened_at(FakeClock(), 6.0, 60.0, jitter=1.0)
    gaps = [after - before for before, after in pairwise(opened)]
    assert gaps == pytest.approx([6.05] * 9, abs=0.02)


async def test_a_herd_comes_back_spread_over_the_whole_delay() -> None:
    opened = await opened_at(FakeClock(), 0.0, 1.0, jitter=0.1)
    assert opened[1] - opened[0] == pytest.approx(0.005, abs=0.002)


@pytest.mark.etcd
@pytest.mark.parametrize("way", ["grpc", "http"])
async def test_cancelling_leaves_no_watch_in_etcd(tmp_path: Path, way: str) -> None:
    async with TcpEtcd(tmp_path) as etcd:
        transport = connect(EtcdAddress(endpoints=(etcd.url,), transport=way))  # type: ignore[arg-type]

        async def count(expected: int) -> bool:
            return await watchers(etcd.url) == expected

        async with running(transport, "/a/"), running(transport, "/b/"):
            await until_async(lambda: count(2), what="two watches")
        await until_async(lambda: count(0), what="the end of both watches")
        assert await put(transport, "/a/1", "x")  # the transport itself lives on
        await transport.close()


def test_a_process_watches_each_prefix_once(memory: MemoryTransport) -> None:
    """The agent has two informers, of two kinds (nodeagent/agent.py)."""
    caches = make_caches(memory, SystemClock())
    held = (getattr(caches, field.name) for field in fields(caches))
    reconciler = [one._prefix for one in held if isinstance(one, Informer)]
    gateway = [informer._prefix for informer in TableCache(memory, SystemClock())._informers]
    for prefixes in (reconciler, gateway):
        assert len(prefixes) >= 4
        assert not [(a, b) for a in prefixes for b in prefixes if a is not b and a.startswith(b)]


class TestRenumbering:
    """etcd 3.5.0 to 3.5.2 may give a write another revision after a crash: nothing is resumed."""

    @pytest.mark.parametrize(
        ("before", "after", "lists"),
        [
            ("3.5.1", "3.5.1", 2),
            ("3.5.2", "3.5.16", 2),
            ("3.5.16", "3.5.0-rc.1", 2),
            ("3.5.3", "3.5.16", 1),
            ("3.4.23", "3.4.23", 1),
        ],
    )
    async def test_after_a_break_such_a_store_is_listed_again(
        self, before: str, after: str, lists: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        memory = MemoryTransport(SystemClock(), version=before)
        faulty = FaultyTransport(memory)
        await put(memory, "/a/same", "1")
        told: list[str] = []
        async with running(faulty, "/a/") as informer:
            await informer.wait_synced()
            await until(lambda: faulty.watches)
            informer.on_change(told.append)
            faulty.leave()
            memory._version = after
            revision = await put(memory, "/a/new", "1")
            faulty.come_back()
            await informer.reached(revision)
            await until(lambda: faulty.watches == 2)
        assert faulty.lists == lists
        assert told == ["/a/new"]
        assert "renumbering" not in caplog.text

    @pytest.mark.parametrize(
        "after",
        [
            # What was written before, in order, to a store that then had two writes more.
            pytest.param([("lost", "1"), ("b", "2"), ("c", "3")], id="all as it was"),
            pytest.param(
                [("b", "2"), ("c", "3"), ("d", "4")], id="one lost, the others moved back"
            ),
            pytest.param(
                [("lost", "1"), ("b", "2"), ("c", "other")], id="the same revision reused"
            ),
        ],
    )
    async def test_moved_revisions_change_every_key(
        self, after: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
    ) -> None:
        old, new = (MemoryTransport(SystemClock(), version="3.5.1") for _ in range(2))
        for name, value in [("lost", "1"), ("b", "2"), ("c", "3")]:
            await put(old, f"/a/{name}", value)
        for name, value in [*after, ("later", "5"), ("latest", "6")]:
            await put(new, f"/a/{name}", value)
        faulty = FaultyTransport(old)
        told: set[str] = set()
        async with running(faulty, "/a/") as informer:
            await informer.wait_synced()
            await until(lambda: faulty.watches)
            informer.on_change(told.add)
            faulty.leave()
            faulty.inner = new
            with caplog.at_level(logging.WARNING):
                faulty.come_back()
                await until(lambda: "/a/latest" in informer.items)
            there = {item.key: item.value.decode() for item in (await new.list("/a/")).items}
            assert dict(informer.items) == there
        is_intact = [name for name, _ in after] == ["lost", "b", "c"] and after[-1][1] == "3"
        assert ("renumbering detected" in caplog.text) != is_intact
        assert told == ({"/a/later", "/a/latest"} if is_intact else {*there, "/a/lost"})
