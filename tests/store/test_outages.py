"""Tests of retry loops: an outage of the store of a minute ends in recovery within seconds, and without more load."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest
from typing_extensions import override

from machinery import virtual_time
from machinery.clock import Clock
from machinery.control_loop import WorkQueue, run_loop
from machinery.virtual_time import VirtualClock
from nodeagent.hollow import HollowMac, SharedCaches, hollow_status, models_on_disk
from reconciler.controller import Controller
from store import keys
from store.errors import PermissionDeniedError, StoreError
from store.informer import Informer
from store.leases import LEASE_TTL_S, Election
from store.memory import MemoryTransport
from store.port import Put
from tests.support.store_faults import FaultyTransport

OUTAGE_S = 60
RECOVERY_S = 10
# A watch that breaks is opened again after 1 to 2 s, 1.5 s on average.
RETRIES = OUTAGE_S * 2 // 3


class CountingTransport(FaultyTransport):
    """A store that counts the requests of one process."""

    def __init__(self, clock: Clock, inner: MemoryTransport) -> None:
        super().__init__(inner)
        self._clock = clock
        self.asked_at: list[float] = []
        self.refuses = False

    @override
    def _check(self) -> None:
        self.asked_at.append(self._clock.monotonic())
        if self.refuses:
            raise PermissionDeniedError("etcd requires a user and a password, and got none")
        super()._check()

    def asked_since(self, start_s: float) -> int:
        """Return the number of requests since the time."""
        return sum(at >= start_s for at in self.asked_at)


@dataclass(kw_only=True)
class Peer:
    """A process beside its store."""

    clock: Clock
    store: CountingTransport
    is_well: Callable[[], Awaitable[bool]]
    watches: int


@asynccontextmanager
async def informer(clock: Clock, store: CountingTransport) -> AsyncIterator[Peer]:
    cache = Informer(store, "/a/", lambda item: item.value, clock)

    async def is_well() -> bool:
        revision = await store.inner.commit([], [Put(key="/a/1", value=b"x")])
        await cache.reached(revision)
        return True

    async with asyncio.TaskGroup() as group:
        task = group.create_task(cache.run())
        yield Peer(clock=clock, store=store, is_well=is_well, watches=1)
        task.cancel()


@asynccontextmanager
async def leader(clock: Clock, store: CountingTransport) -> AsyncIterator[Peer]:
    terms = 0

    async def lead() -> None:
        nonlocal terms
        while True:
            found = await Election(store, clock, key="/leader", ttl_s=LEASE_TTL_S).campaign("a")
            terms += 1
            await found.keep()

    async def is_well() -> bool:
        while terms < 2:
            await clock.sleep(0.1)
        return True

    async with asyncio.TaskGroup() as group:
        task = group.create_task(lead())
        yield Peer(clock=clock, store=store, is_well=is_well, watches=1)
        task.cancel()


@asynccontextmanager
async def control_loop(clock: Clock, store: CountingTransport) -> AsyncIterator[Peer]:
    queue: WorkQueue[str] = WorkQueue(clock)
    done: list[float] = []

    async def reconcile(key: str) -> None:
        await store.get(key)
        done.append(clock.monotonic())
        queue.add_after(key, 4)

    async def is_well() -> bool:
        since = clock.monotonic()
        while not done or done[-1] < since:
            await clock.sleep(0.1)
        return True

    async with asyncio.TaskGroup() as group:
        task = group.create_task(run_loop(queue, reconcile, transient=(StoreError,)))
        queue.add("/a")
        yield Peer(clock=clock, store=store, is_well=is_well, watches=0)
        task.cancel()


@asynccontextmanager
async def agent(clock: Clock, store: CountingTransport) -> AsyncIterator[Peer]:
    mac = HollowMac(clock=clock, status=hollow_status("a"), models=models_on_disk({}))
    caches = SharedCaches(store, clock)

    async def is_well() -> bool:
        while await store.inner.get(keys.node_lease_key("a")) is None:
            await clock.sleep(0.1)
        return True

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(caches.run()), group.create_task(mac.agent(store, caches).run())]
        yield Peer(clock=clock, store=store, is_well=is_well, watches=3)
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def reconciler(clock: Clock, store: CountingTransport) -> AsyncIterator[Peer]:
    controller = Controller(store, clock, identity="a", grace_s=30)

    async def is_well() -> bool:
        while await store.inner.get(keys.ELECTION_RECONCILER) is None:
            await clock.sleep(0.1)
        return True

    async with asyncio.TaskGroup() as group:
        task = group.create_task(controller.run())
        yield Peer(clock=clock, store=store, is_well=is_well, watches=8)
        task.cancel()


Loop = Callable[[Clock, CountingTransport], AbstractAsyncContextManager[Peer]]
LOOPS = [informer, leader, control_loop, agent, reconciler]


def in_virtual_time(loop: Loop, test: Callable[[Peer], Awaitable[None]]) -> None:
    async def main() -> None:
        random.seed(1)
        clock = VirtualClock()
        store = CountingTransport(clock, MemoryTransport(clock))
        async with loop(clock, store) as peer:
            await clock.sleep(30)  # the start
            await test(peer)

    virtual_time.run(main())


@pytest.mark.parametrize("loop", LOOPS)
def test_an_outage_of_a_minute_heals_within_seconds_and_without_more_load(loop: Loop) -> None:
    async def test(peer: Peer) -> None:
        clock, store = peer.clock, peer.store
        await clock.sleep(OUTAGE_S)
        quiet = store.asked_since(clock.monotonic() - OUTAGE_S)
        store.leave()
        await clock.sleep(OUTAGE_S)
        during = store.asked_since(clock.monotonic() - OUTAGE_S)
        store.come_back()
        healed_at = clock.monotonic()
        async with asyncio.timeout(RECOVERY_S):
            assert await peer.is_well()
        await clock.sleep(healed_at + OUTAGE_S - clock.monotonic())
        after = store.asked_since(healed_at)
        print(f"quiet {quiet}, during {during}, after {after} requests a minute")
        most = 2 * quiet + RETRIES * peer.watches
        assert during <= most
        assert after <= most

    in_virtual_time(loop, test)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_refused_process_asks_ever_more_rarely(loop: Loop) -> None:
    async def test(peer: Peer) -> None:
        clock, store = peer.clock, peer.store
        store.refuses = True
        store.leave()
        store.come_back()
        await clock.sleep(300)
        asked = store.asked_since(clock.monotonic() - 60)
        loops = max(1, peer.watches) + 2
        assert asked <= 8 * loops

    in_virtual_time(loop, test)
