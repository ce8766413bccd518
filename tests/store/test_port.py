"""The contract of `store.port`: the memory adapter and a real etcd pass the same tests."""

import asyncio
from collections.abc import Sequence

import pytest

from store.errors import CompactedError, ConflictError, LeaseLostError, TooLargeError
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import CreateRevisionGuard, Delete, KeyChange, ModRevisionGuard, Put, Transport
from tests.support.store_informers import compact
from tests.support.waiting import until_async


async def put(transport: Transport, key: str, value: bytes = b"x", lease: int = 0) -> int:
    return await transport.commit([], [Put(key=key, value=value, lease=lease)])


async def watched(
    transport: Transport, prefix: str, *, after: int, wanted: int
) -> Sequence[KeyChange]:
    changes: list[KeyChange] = []
    watch = transport.watch(prefix, after_revision=after)
    try:
        async with asyncio.timeout(20):
            async for batch in watch:
                changes.extend(batch.changes)
                if len(changes) >= wanted:
                    return changes
    finally:
        await watch.aclose()
    raise AssertionError("the watch ended")


async def test_get_returns_what_was_put(transport: Transport, corner: str) -> None:
    revision = await put(transport, f"{corner}a", "grüße 日本".encode())
    item = await transport.get(f"{corner}a")
    assert item is not None
    assert (item.value.decode(), item.mod_revision) == ("grüße 日本", revision)
    assert item.create_revision == revision
    await put(transport, f"{corner}b", b"")
    empty = await transport.get(f"{corner}b")
    assert empty is not None
    assert empty.value == b""
    assert await transport.get(f"{corner}nothing") is None


async def test_list_returns_the_prefix_only(transport: Transport, corner: str) -> None:
    for name in ("b", "a", "a/deep"):
        await put(transport, f"{corner}x/{name}")
    await put(transport, f"{corner}y")
    listing = await transport.list(f"{corner}x/")
    assert [item.key for item in listing.items] == [f"{corner}x/{n}" for n in ("a", "a/deep", "b")]


async def test_list_pages(transport: Transport, corner: str) -> None:
    names = [f"{corner}{n:04}" for n in range(1100)]
    for start in range(0, len(names), 100):
        await transport.commit([], [Put(key=k, value=b"v") for k in names[start : start + 100]])
    assert [item.key for item in (await transport.list(corner)).items] == names


async def test_creating_an_existing_key_conflicts(transport: Transport, corner: str) -> None:
    key = f"{corner}a"
    guard = ModRevisionGuard(key=key, mod_revision=0)
    await transport.commit([guard], [Put(key=key, value=b"first")])
    with pytest.raises(ConflictError):
        await transport.commit([guard], [Put(key=key, value=b"second")])
    item = await transport.get(key)
    assert item is not None
    assert item.value == b"first"


async def test_one_failed_guard_stops_the_whole_transaction(
    transport: Transport, corner: str
) -> None:
    revision = await put(transport, f"{corner}a")
    guards = [
        ModRevisionGuard(key=f"{corner}a", mod_revision=revision),
        ModRevisionGuard(key=f"{corner}b", mod_revision=99),
    ]
    with pytest.raises(ConflictError):
        await transport.commit(
            guards, [Put(key=f"{corner}c", value=b"v"), Delete(key=f"{corner}a")]
        )
    assert [item.key for item in (await transport.list(corner)).items] == [f"{corner}a"]


async def test_guards_alone_tell_whether_they_hold(transport: Transport, corner: str) -> None:
    revision = await put(transport, f"{corner}a")
    guard = ModRevisionGuard(key=f"{corner}a", mod_revision=revision)
    assert await transport.commit([guard], []) >= revision
    await put(transport, f"{corner}a", b"another")
    with pytest.raises(ConflictError):
        await transport.commit([guard], [])


async def test_a_create_revision_guard_fences(transport: Transport, corner: str) -> None:
    epoch = await put(transport, f"{corner}leader")
    await put(transport, f"{corner}leader", b"renewed")
    fence = CreateRevisionGuard(key=f"{corner}leader", create_revision=epoch)
    await transport.commit([fence], [Put(key=f"{corner}a", value=b"v")])
    await transport.commit([], [Delete(key=f"{corner}leader")])
    await put(transport, f"{corner}leader", b"another")
    with pytest.raises(ConflictError):
        await transport.commit([fence], [Put(key=f"{corner}a", value=b"late")])


async def test_a_burst_loses_nothing(transport: Transport, corner: str) -> None:
    start = await put(transport, f"{corner}start")
    # All 200 at once may take longer on a busy machine than a call may.
    at_once = asyncio.Semaphore(40)

    async def one(number: int) -> None:
        async with at_once:
            await put(transport, f"{corner}{number}")

    async with asyncio.TaskGroup() as group:
        task = group.create_task(watched(transport, corner, after=start, wanted=200))
        for n in range(200):
            group.create_task(one(n))
    assert {change.key for change in task.result()} == {f"{corner}{n}" for n in range(200)}
    revisions = [change.mod_revision for change in task.result()]
    assert revisions == sorted(revisions)


async def test_catching_up_is_in_order(transport: Transport, corner: str) -> None:
    start = await put(transport, f"{corner}start")
    for n in range(1500):
        if n % 100 == 0:
            batch = [Put(key=f"{corner}{m}", value=b"v") for m in range(n, n + 100)]
            await transport.commit([], batch)
    middle = (await watched(transport, corner, after=start, wanted=700))[699]
    rest = await watched(transport, corner, after=middle.mod_revision - 1, wanted=100)
    assert rest[0].mod_revision == middle.mod_revision


async def test_a_watch_reports_deletions(transport: Transport, corner: str) -> None:
    start = await put(transport, f"{corner}a")
    await transport.commit([], [Delete(key=f"{corner}a")])
    (change,) = await watched(transport, corner, after=start, wanted=1)
    assert (change.key, change.now) == (f"{corner}a", None)


async def test_a_large_value_passes_and_a_larger_is_refused(
    transport: Transport, corner: str
) -> None:
    start = await put(transport, f"{corner}start")
    await put(transport, f"{corner}large", b"x" * 1_000_000)
    (change,) = await watched(transport, corner, after=start, wanted=1)
    assert change.now is not None
    assert len(change.now.value) == 1_000_000
    with pytest.raises(TooLargeError):
        await put(transport, f"{corner}larger", b"x" * 1_600_000)
    with pytest.raises(TooLargeError):
        await transport.commit([], [Put(key=f"{corner}{n}", value=b"") for n in range(129)])


async def test_revoking_a_lease_deletes_its_keys(transport: Transport, corner: str) -> None:
    lease = await transport.grant(60)
    await put(transport, f"{corner}a", lease=lease)
    assert await transport.keep_alive(lease) == 60
    await transport.revoke(lease)
    assert await transport.get(f"{corner}a") is None
    assert await transport.keep_alive(lease) == 0
    await transport.revoke(lease)


async def test_an_expired_lease_deletes_its_keys_and_wakes_watches(
    transport: Transport, corner: str
) -> None:
    lease = await transport.grant(2)
    start = await put(transport, f"{corner}a", lease=lease)
    (change,) = await watched(transport, corner, after=start, wanted=1)
    assert change.now is None


async def test_a_key_moves_to_a_new_lease(transport: Transport, corner: str) -> None:
    first, second = await transport.grant(60), await transport.grant(60)
    await put(transport, f"{corner}a", lease=first)
    await put(transport, f"{corner}a", lease=second)
    await transport.revoke(first)
    assert await transport.get(f"{corner}a") is not None


async def test_a_lost_lease_is_named(transport: Transport, corner: str) -> None:
    with pytest.raises(LeaseLostError):
        await put(transport, f"{corner}a", lease=12345)


async def test_a_watch_from_the_future_is_refused(transport: Transport, corner: str) -> None:
    now = await put(transport, f"{corner}a")

    async def from_the_future() -> bool:
        try:
            await watched(transport, corner, after=now + 1_000_000, wanted=1)
        except CompactedError:
            return True
        return False

    assert await until_async(from_the_future)


async def test_a_deletion_at_the_compacted_revision_is_not_lost(
    transport: Transport, shared_etcd: EmbeddedEtcd, corner: str
) -> None:
    """etcd 3.4 itself would let the watch begin there, and never report the deletion (etcd issue 18089)."""
    seen = await put(transport, f"{corner}a")
    await transport.commit([], [Delete(key=f"{corner}a")])
    await compact(transport, shared_etcd)
    with pytest.raises(CompactedError):
        await watched(transport, corner, after=seen, wanted=1)
