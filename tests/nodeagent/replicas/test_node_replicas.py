"""A node's cache of Replicas: its own copies while a leader keeps them, all Replicas else."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from typing_extensions import override

from machinery.backoff import Backoff
from machinery.clock import SystemClock
from nodeagent.replicas.node_replicas import NodeReplicas
from store import codec, keys
from store.errors import PermissionDeniedError
from store.memory import MemoryTransport
from store.port import Delete, KeyValue, Listing, Put
from tests.support.assignments import leading, replica, until_copied, write
from tests.support.waiting import until, until_async

CLOCK = SystemClock()
LOOK = Backoff(first_s=0.05, limit_s=0.1)


class CountingTransport(MemoryTransport):
    """Counts the looks at the election."""

    looks = 0

    @override
    async def get(self, key: str) -> KeyValue | None:
        self.looks += key == keys.ELECTION_RECONCILER
        return await super().get(key)


class Node:
    """The cache of node `a`, and the names that its handler was told."""

    def __init__(self, store: MemoryTransport) -> None:
        self.cache = NodeReplicas(store, CLOCK, "a", look=LOOK)
        self.told: list[str] = []
        self.cache.on_change(lambda key: self.told.append(key.rpartition("/")[2]))

    @property
    def names(self) -> list[str]:
        assert all(
            key == keys.spec_key("Replica", one.name) for key, one in self.cache.items.items()
        )
        return sorted(item.name for item in self.cache.items.values())


@asynccontextmanager
async def watching(store: MemoryTransport) -> AsyncIterator[Node]:
    node = Node(store)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(node.cache.run())
        await node.cache.wait_synced()
        yield node
        task.cancel()


async def test_an_agent_watches_its_own_replicas_as_soon_as_a_leader_keeps_copies() -> None:
    store = MemoryTransport(CLOCK)
    await write(store, replica("mine-0", "a"), replica("other-0", "b"))
    async with watching(store) as node:
        assert node.names == ["mine-0", "other-0"]
        assert sorted(node.told) == ["mine-0", "other-0"]
        async with leading(store):
            await until(lambda: node.cache.is_narrow)
            assert node.names == ["mine-0"]
            node.told.clear()
            await write(store, replica("other-0", "c"), replica("mine-0", "a", leaving=("d",)))
            await until(lambda: node.told == ["mine-0"])
            assert node.names == ["mine-0"]
            await write(store, replica("mine-0", "b"))
            await until(lambda: node.names == [])
            assert node.told == ["mine-0", "mine-0"]


async def test_without_a_leader_it_goes_on_and_under_one_that_keeps_none_it_watches_all() -> None:
    store = CountingTransport(CLOCK)
    await write(store, replica("mine-0", "a"), replica("other-0", "b"))
    async with leading(store):
        await until_copied(store, "a/mine-0", "b/other-0")
        await until_async(lambda: store.get(keys.ASSIGNMENTS_KEPT))
        async with watching(store) as node:
            assert node.cache.is_narrow
            await store.commit([], [Delete(key=keys.ASSIGNMENTS_KEPT)])
            await store.commit([], [Delete(key=keys.ELECTION_RECONCILER)])
            before = store.looks
            await until(lambda: store.looks > before + 2)
            assert node.cache.is_narrow
            # A leader of an earlier release writes no copies.
            await store.commit([], [Put(key=keys.ELECTION_RECONCILER, value=b"host/2 0.0.9")])
            await write(store, replica("late-0", "a"))
            await until(lambda: node.names == ["late-0", "mine-0", "other-0"])
            assert not node.cache.is_narrow


class RefusingTransport(MemoryTransport):
    """Refuses the copies of node `a`, and counts what is listed."""

    def __init__(self) -> None:
        super().__init__(CLOCK)
        self.is_refusing = True
        self.refused = self.lists_of_all = 0

    @override
    async def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        if prefix == keys.assignment_prefix("a") and self.is_refusing:
            self.refused += 1
            raise PermissionDeniedError("permission denied")
        self.lists_of_all += prefix == keys.spec_prefix("Replica")
        async for page in super().pages(prefix):
            yield page


async def test_a_node_that_may_not_read_its_copies_watches_all_until_it_may() -> None:
    store = RefusingTransport()
    await write(store, replica("mine-0", "a"))
    await store.commit([], [Put(key=keys.ASSIGNMENTS_KEPT, value=b"1")])
    async with watching(store) as node:
        assert node.names == ["mine-0"]
        await until(lambda: store.refused > 3)
        # It asks again with backoff, and what it serves is not read again.
        assert (node.cache.is_narrow, store.lists_of_all) == (False, 1)
        store.is_refusing = False
        await until(lambda: node.cache.is_narrow)


async def test_a_copy_without_a_version_is_not_served() -> None:
    store = MemoryTransport(CLOCK)
    bad = codec.encode_spec(replica("mine-0", "a"))
    puts = [
        Put(key=keys.ASSIGNMENTS_KEPT, value=b"1"),
        Put(key=keys.assignment_key("a", "mine-0"), value=bad),
    ]
    await store.commit([], puts)
    async with watching(store) as node:
        assert node.cache.is_narrow
        assert node.names == []
