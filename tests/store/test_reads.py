"""Tests of `store.reads`: a list is read in pages at one revision, and again after a compaction."""

import asyncio
from contextlib import aclosing

import pytest

from machinery.clock import SystemClock
from store import reads
from store.errors import CompactedError, ReplacedError
from store.etcd.member.embedded import EmbeddedEtcd
from store.memory import MemoryTransport
from store.port import Delete, KeyValue, Listing, Put, Transport
from tests.support.store_faults import FaultyTransport
from tests.support.store_informers import compact


async def fill(transport: Transport, corner: str, count: int) -> list[str]:
    names = [f"{corner}{n:05}" for n in range(count)]
    for start in range(0, count, 100):
        batch = [Put(key=key, value=b"before") for key in names[start : start + 100]]
        await transport.commit([], batch)
    return names


@pytest.mark.parametrize(("count", "expected"), [(0, [0]), (1, [1]), (500, [500]), (501, [500, 1])])
async def test_pages_have_at_most_500_keys_and_there_is_at_least_one(
    transport: Transport, corner: str, count: int, expected: list[int]
) -> None:
    names = await fill(transport, corner, count)
    pages = [page async for page in transport.pages(corner)]
    assert [len(page.items) for page in pages] == expected
    assert [item.key for page in pages for item in page.items] == names


async def test_all_pages_have_the_first_ones_revision(transport: Transport, corner: str) -> None:
    names = await fill(transport, corner, 1200)
    listings: list[Listing] = []
    async for page in transport.pages(corner):
        listings.append(page)
        await transport.commit([], [Put(key=names[-1], value=b"after"), Delete(key=names[-2])])
        await transport.commit([], [Put(key=f"{corner}new", value=b"after")])
    assert len(listings) > 1
    assert len({(page.revision, page.store) for page in listings}) == 1
    items = [item for page in listings for item in page.items]
    assert [item.key for item in items] == names
    assert {item.value for item in items} == {b"before"}
    assert max(item.mod_revision for item in items) <= listings[0].revision


async def test_compaction_between_pages_is_an_error(
    transport: Transport, shared_etcd: EmbeddedEtcd, corner: str
) -> None:
    names = await fill(transport, corner, 600)

    async def read() -> None:
        async for _ in transport.pages(corner):
            await transport.commit([], [Put(key=names[0], value=b"after")])
            await compact(transport, shared_etcd)

    with pytest.raises(CompactedError):
        await read()


@pytest.mark.parametrize(("losses", "lists"), [(0, 1), (1, 2), (3, 4), (4, None)])
async def test_a_list_restarts_at_most_three_times(losses: int, lists: int | None) -> None:
    memory = MemoryTransport(SystemClock())
    names = await fill(memory, "/a/", 600)
    faulty = FaultyTransport(memory)
    left = losses

    async def lose() -> None:
        nonlocal left
        if left:
            left -= 1
            await memory.commit([], [Put(key=names[0], value=f"{left}".encode())])
            memory.compact()

    faulty.between_pages = lose
    if lists is None:
        with pytest.raises(CompactedError):
            await faulty.list("/a/")
        return
    listing = await faulty.list("/a/")
    assert faulty.lists == lists
    assert [item.key for item in listing.items] == names
    assert listing == await memory.list("/a/")


async def test_a_store_replaced_between_pages_is_an_error() -> None:
    item = KeyValue(key="/a/1", value=b"", create_revision=2, mod_revision=2)
    asked: list[tuple[str, int]] = []

    async def fetch(*, start: str, revision: int, limit: int) -> reads.Page:
        asked.append((start, revision))
        return reads.Page(items=(item,), revision=7 + len(asked), store=str(len(asked)), more=True)

    async with aclosing(reads.pages("/a/", fetch)) as pages:
        first = await anext(pages)
        with pytest.raises(ReplacedError):
            await anext(pages)
    assert (first.revision, first.store) == (8, "1")
    assert asked == [("/a/", 0), ("/a/1\0", 8)]


async def test_leaving_early_closes_everything(transport: Transport, corner: str) -> None:
    await fill(transport, corner, 600)
    async with asyncio.timeout(30), aclosing(transport.pages(corner)) as pages:
        assert len((await anext(pages)).items) == 500
    assert len((await transport.list(corner)).items) == 600
