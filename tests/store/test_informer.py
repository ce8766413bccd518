"""Tests of `store.informer`: the cache converges to the store, and no change is missed."""

import asyncio
import logging
import os
import shutil
import signal
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from gateway.state.table_cache import TableCache
from machinery.clock import SystemClock
from reconciler.listers.caches import make_caches
from store.errors import StoreError, UnavailableError
from store.etcd.member.binary import locate, parse_version_number, unfit_for_clusters
from store.etcd.member.embedded import EmbeddedEtcd
from store.informer import HandlerError, Informer
from store.memory import MemoryTransport
from store.port import KeyValue, Put, Transport
from tests.support.chaos_transports import WAYS, go
from tests.support.store_faults import FaultyTransport
from tests.support.store_informers import compact, delete, put, running, text_of, watchers
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.waiting import until, until_async


async def test_handlers_get_each_changed_key(transport: Transport, corner: str) -> None:
    await put(transport, f"{corner}a", "1")
    told: list[str] = []
    async with running(transport, corner) as informer, asyncio.timeout(30):
        informer.on_change(told.append)
        assert informer.staleness_s() is None
        await informer.wait_synced()
        assert (dict(informer.items), informer.synced) == ({f"{corner}a": "1"}, True)
        assert informer.staleness_s() is not None
        await put(transport, f"{corner}b", "2")
        revision = await put(transport, f"{corner}a", "3")
        await informer.reached(revision)
        assert dict(informer.items) == {f"{corner}a": "3", f"{corner}b": "2"}
        assert (informer.version(f"{corner}a"), informer.version("nothing")) == (revision, 0)
        await informer.reached(await delete(transport, f"{corner}a"))
        assert (dict(informer.items), informer.version(f"{corner}a")) == ({f"{corner}b": "2"}, 0)
    assert told == [f"{corner}a", f"{corner}b", f"{corner}a", f"{corner}a"]


async def test_a_broken_watch_resumes_without_a_list_if_revisions_can_be_trusted(
    transport: Transport, corner: str
) -> None:
    faulty = FaultyTransport(transport)
    await put(transport, f"{corner}gone", "1")
    told: list[str] = []
    async with running(faulty, corner) as informer:
        await informer.wait_synced()
        informer.on_change(told.append)
        await until(lambda: faulty.watches)
        faulty.leave()
        await delete(transport, f"{corner}gone")
        revision = await put(transport, f"{corner}new", "2")
        faulty.come_back()
        async with asyncio.timeout(30):
            await informer.reached(revision)
        assert dict(informer.items) == {f"{corner}new": "2"}
    # 3.5.1 may renumber revisions, so that only a list can be trusted after a break.
    version = parse_version_number((await transport.status()).version)
    assert faulty.lists == (2 if unfit_for_clusters(version) else 1)
    assert sorted(set(told)) == [f"{corner}gone", f"{corner}new"]


async def test_compaction_during_a_break_lists_again_and_reports_deletions(
    transport: Transport, shared_etcd: EmbeddedEtcd, corner: str
) -> None:
    faulty = FaultyTransport(transport)
    for name in ("gone", "same", "other"):
        await put(transport, f"{corner}{name}", "1")
    told: list[str] = []
    async with running(faulty, corner) as informer:
        await informer.wait_synced()
        informer.on_change(told.append)
        await until(lambda: faulty.watches)
        faulty.leave()
        await delete(transport, f"{corner}gone")
        revision = await put(transport, f"{corner}other", "2")
        await put(transport, "/test/elsewhere", "so that the history ends after ours")
        await compact(transport, shared_etcd)
        faulty.come_back()
        async with asyncio.timeout(30):
            await informer.reached(revision)
        assert dict(informer.items) == {f"{corner}same": "1", f"{corner}other": "2"}
    assert faulty.lists == 2
    assert sorted(told) == [f"{corner}gone", f"{corner}other"]


async def test_a_replaced_store_at_a_higher_revision_changes_every_key(
    memory: MemoryTransport, faulty: FaultyTransport
) -> None:
    new = MemoryTransport(SystemClock())
    await put(memory, "/a", "old")
    await put(memory, "/b", "x")
    told: list[str] = []
    async with running(faulty, "/") as informer:
        await informer.wait_synced()
        informer.on_change(told.append)
        await until(lambda: faulty.watches)
        faulty.leave()
        assert await put(new, "/a", "new") == informer.version("/a")  # the same revision: ABA
        faulty.inner = new

        async def overtake() -> None:
            for n in range(10):
                await put(new, f"/later/{n}", "x")

        faulty.before_list = overtake
        faulty.come_back()
        await until(lambda: informer.items.get("/a") == "new", what="the new store's value")
    assert {"/a", "/b"} <= set(told)


@pytest.mark.etcd
@pytest.mark.parametrize("way", WAYS)
async def test_a_kill_under_load_loses_no_event(etcd: EmbeddedEtcd, way: str) -> None:
    transport = go(way, etcd.address)
    faulty = FaultyTransport(transport)
    told: set[str] = set()
    acknowledged: set[str] = set()

    async def write(worker: int) -> None:
        for n in range(60):
            await until_async(partial(written, f"/load/{worker}/{n}"), limit_s=20)

    async def written(key: str) -> bool:
        try:
            await put(transport, key, "v")
        except StoreError:
            return False
        acknowledged.add(key)
        return True

    async with running(faulty, "/load/") as informer, asyncio.TaskGroup() as group:
        informer.on_change(told.add)
        await informer.wait_synced()
        keeping = group.create_task(etcd.supervisor.run())
        async with asyncio.TaskGroup() as load:
            for worker in range(8):
                load.create_task(write(worker))
            await until(lambda: len(acknowledged) > 100)
            assert etcd.supervisor.pid
            os.kill(etcd.supervisor.pid, signal.SIGKILL)
        last = await put(transport, "/load/last", "v")
        async with asyncio.timeout(20):
            await informer.reached(last)
        keeping.cancel()
        listed = {item.key for item in (await transport.list("/load/")).items}
    await transport.close()
    assert listed == acknowledged | {"/load/last"} == told == set(informer.items)
    if locate(None).warning == "":  # 3.5.1 may renumber revisions, and then a list is needed
        assert (faulty.lists, etcd.supervisor.restarts) == (1, 1)


async def _put_or_none(transport: Transport, key: str, value: str) -> int | None:
    """Return the revision, or None while the client waits before it connects again."""
    try:
        return await put(transport, key, value)
    except UnavailableError:
        return None


@pytest.mark.etcd
@pytest.mark.parametrize("way", WAYS)
async def test_a_wiped_store_changes_every_key(
    etcd: EmbeddedEtcd, tmp_path: Path, way: str
) -> None:
    transport = go(way, etcd.address)
    told: list[str] = []
    before = await put(transport, "/r/a", "old")
    for n in range(20):
        await put(transport, f"/r/{n}", "x")
    async with running(transport, "/r/") as informer:
        await informer.wait_synced()
        informer.on_change(told.append)
        await etcd.supervisor.end()
        shutil.rmtree(tmp_path / "member")
        await etcd.start()
        assert await until_async(lambda: _put_or_none(transport, "/r/a", "new")) == before
        await until(lambda: dict(informer.items) == {"/r/a": "new"}, limit_s=15, what="the relist")
    await transport.close()
    assert {"/r/a", *(f"/r/{n}" for n in range(20))} <= set(told)


@pytest.mark.etcd
@pytest.mark.parametrize("way", WAYS)
async def test_another_cluster_at_the_same_address_is_noticed(tmp_path: Path, way: str) -> None:
    """Two informers of one transport, and the new cluster is ahead: only its id differs."""
    async with TcpEtcd(tmp_path / "first", "--initial-cluster-token=first") as first:
        transport = go(way, first.address)
        assert await put(transport, "/r/a", "old") == 2
        assert await put(transport, "/s/a", "old") == 3
        async with running(transport, "/r/") as informer, running(transport, "/s/") as other:
            await informer.wait_synced()
            await other.wait_synced()
            await first.supervisor.stop()
            second = TcpEtcd(
                tmp_path / "second", "--initial-cluster-token=second", probe=first.address
            )
            # On another port first, so that it is ahead before a client connects.
            async with second:
                for key in ("/r/a", "/s/a"):
                    await put(transport, key, "new")
                for _ in range(5):
                    await put(transport, "/elsewhere", "x")
                await until(lambda: informer.items.get("/r/a") == "new")
                await until(lambda: other.items.get("/s/a") == "new")
        await transport.close()


@pytest.mark.etcd
@pytest.mark.parametrize("way", WAYS)
async def test_a_start_before_etcd_waits_for_it(tmp_path: Path, way: str) -> None:
    etcd = EmbeddedEtcd(locate(None), tmp_path, SystemClock())
    transport = go(way, etcd.address)
    async with running(transport, "/r/") as informer:
        with pytest.raises(UnavailableError):
            await transport.get("/r/a")
        assert not informer.synced
        await etcd.start()
        async with asyncio.timeout(30):
            await informer.wait_synced()
            await informer.reached(await put(transport, "/r/a", "1"))
    await transport.close()
    await etcd.supervisor.stop()


@pytest.mark.etcd
@pytest.mark.parametrize("way", WAYS)
async def test_a_frozen_etcd_is_noticed_within_the_idle_limit(tmp_path: Path, way: str) -> None:
    clock = SystemClock()
    async with TcpEtcd(tmp_path) as etcd:
        transport = go(way, etcd.address, idle_s=1.5)
        pid = etcd.supervisor.pid
        assert pid
        batches: list[float] = []

        async def watching() -> None:
            async for batch in transport.watch("/r/", after_revision=0):
                assert not batch.changes
                batches.append(clock.monotonic())

        async def freezing() -> float:
            # Answers to the question whether etcd is there keep an idle watch open for longer than the limit.
            await until(lambda: batches and batches[-1] - batches[0] > 2.0)
            os.kill(pid, signal.SIGSTOP)
            return clock.monotonic()

        async with asyncio.TaskGroup() as group:
            frozen = group.create_task(freezing())
            with pytest.raises(UnavailableError):
                await watching()
        assert 1.0 < clock.monotonic() - frozen.result() < 10.0
        os.kill(pid, signal.SIGCONT)
        await transport.close()


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


async def test_an_index_finds_current_objects(memory: MemoryTransport) -> None:
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


async def test_documents_of_newer_releases_are_marked(memory: MemoryTransport) -> None:
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
async def test_an_exception_in_a_handler_ends_the_informer(
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


async def test_a_write_based_on_the_last_good_value_conflicts(memory: MemoryTransport) -> None:
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


@pytest.mark.etcd
@pytest.mark.parametrize("way", WAYS)
async def test_cancelling_leaves_no_watch_in_etcd(tmp_path: Path, way: str) -> None:
    async with TcpEtcd(tmp_path) as etcd:
        transport = go(way, etcd.address)

        async def count(expected: int) -> bool:
            return await watchers(etcd.url) == expected

        async with running(transport, "/a/"), running(transport, "/b/"):
            await until_async(lambda: count(2), what="two watches")
        await until_async(lambda: count(0), what="the end of both watches")
        assert await put(transport, "/a/1", "x")  # the transport is still usable
        await transport.close()


def test_a_process_watches_each_prefix_once(memory: MemoryTransport) -> None:
    """The agent has two informers, of two kinds (nodeagent/agent.py)."""
    caches = make_caches(memory, SystemClock())
    held = (getattr(caches, field.name) for field in fields(caches))
    reconciler = [one.prefix for one in held if isinstance(one, Informer)]
    gateway = [informer.prefix for informer in TableCache(memory, SystemClock())._informers]
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
    async def test_an_affected_store_is_listed_after_a_break(
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
            # The same writes in order, in a store with two more writes before them.
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
