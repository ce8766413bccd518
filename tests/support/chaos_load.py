"""The load under which a cluster is damaged: 50 writers, 20 watchers, and owners of leases."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from machinery.clock import Clock, SystemClock
from store.leases import LeaseSession
from store.port import Put, Transport
from tests.support.chaos_followers import (
    CachedFollower,
    Follower,
    Writer,
    missed,
    read,
    succeeds_soon,
)
from tests.support.chaos_transports import go
from tests.support.cluster import Cluster
from tests.support.waiting import until

WRITERS, WATCHERS, OWNERS = 50, 20, 6
# Twice the TTL of node agents and reconcilers: elections take longer on a busy machine.
_TTL_S = 8
# Watchers of a frozen member must notice within a test; members report progress twice a second.
IDLE_S = 2.0
PROGRESS = "--experimental-watch-progress-notify-interval=500ms"
_PAUSE_S = 1.5


class Load:
    """The clients that run against a cluster, and the results they are checked against."""

    def __init__(self, transports: Sequence[Transport], corner: str, clock: Clock) -> None:
        self._transports = transports
        self._clock = clock
        self._corner = corner
        key = f"{corner}counter"
        self._key = key
        self._stopping = asyncio.Event()
        self._stopped = 0
        self.writers = [Writer(f"w{n}", self._any(n), key, clock) for n in range(WRITERS)]
        half = WATCHERS // 2
        self.watchers: list[Follower | CachedFollower] = [
            *(Follower(self._any(n), key, clock) for n in range(half)),
            *(CachedFollower(self._any(n), key, clock) for n in range(half, WATCHERS)),
        ]
        self.owners: list[LeaseSession] = []

    def _any(self, number: int) -> Transport:
        return self._transports[number % len(self._transports)]

    @property
    def acknowledged(self) -> int:
        return sum(writer.done for writer in self.writers)

    @property
    def troubles(self) -> int:
        return sum(writer.unavailable for writer in self.writers)

    async def run(self) -> None:
        """Run writers until `settle()`, and watchers until they are cancelled."""
        async with asyncio.TaskGroup() as group:
            for watcher in self.watchers:
                group.create_task(watcher.run())
            for writer in self.writers:
                group.create_task(self._write(writer))

    async def _write(self, writer: Writer) -> None:
        while not await self._stops_within(random.uniform(0, 2 * _PAUSE_S)):
            await writer.increment()
        self._stopped += 1

    async def _stops_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def goes_on(self, increments: int = 15, *, limit_s: float = 60) -> None:
        """Wait until this many more writes are acknowledged and every watcher has seen them."""
        wanted = self.acknowledged + increments
        await until(lambda: self.acknowledged >= wanted, limit_s=limit_s, what="progress")
        await self._watchers_see(wanted, limit_s=limit_s)

    async def _watchers_see(self, total: int, *, limit_s: float) -> None:
        def all_see() -> bool:
            return all(w.seen and w.seen[-1].total >= total for w in self.watchers)

        await until(all_see, limit_s=limit_s, what=f"every watcher's sight of {total}")

    async def notices(self) -> None:
        """Wait until writers get an error because the store is unavailable."""
        before = self.troubles
        await until(lambda: self.troubles >= before + 5, limit_s=60, what="trouble")

    async def settle(self) -> None:
        """Wait until every writer knows its results and every watcher has seen the last value."""
        self._stopping.set()
        await until(lambda: self._stopped == WRITERS, limit_s=60, what="the writers' end")
        await self._watchers_see(self.acknowledged, limit_s=60)

    async def check(self) -> None:
        """Check that no acknowledged write was lost or counted twice, and no watcher missed a value."""
        final = read(await succeeds_soon(self._transports[0], self._key, self._clock))
        assert final.by == {writer.name: writer.done for writer in self.writers}
        for number, watcher in enumerate(self.watchers):
            assert not missed(watcher, final), f"watcher {number}: {missed(watcher, final)}"

    @asynccontextmanager
    async def leases(self) -> AsyncIterator[None]:
        """Hold leases during the block; at the end each must still be held, with its key."""
        self.owners = [LeaseSession(self._any(n), self._clock, ttl_s=_TTL_S) for n in range(OWNERS)]
        keeping: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as group:
            for owner in self.owners:
                await owner.open()
                keeping.append(group.create_task(owner.keep()))
                put = Put(key=self._lease_key(owner), value=b"alive", lease=owner.id)
                await self._transports[0].commit([], [put])
            yield
            await self._check_leases()
            for task in keeping:
                task.cancel()
        for owner in self.owners:
            await owner.close()

    async def _check_leases(self) -> None:
        for number, owner in enumerate(self.owners):
            assert owner.valid(), f"the lease of owner {number} was lost"
            item = await succeeds_soon(self._transports[0], self._lease_key(owner), self._clock)
            assert item is not None, f"the key of owner {number} is gone"
            assert item.lease == owner.id

    def _lease_key(self, owner: LeaseSession) -> str:
        return f"{self._corner}lease/{owner.id}"


@asynccontextmanager
async def loaded(way: str, cluster: Cluster, corner: str) -> AsyncIterator[Load]:
    """Run the load during the block, and check the results at its end."""
    clock = SystemClock()
    turns = len(cluster.members)
    transports = [go(way, cluster.address(n % turns), idle_s=IDLE_S) for n in range(2 * turns)]
    load = Load(transports, corner, clock)
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(load.run())
            await load.goes_on()
            yield load
            await load.settle()
            running.cancel()
        await load.check()
    finally:
        for transport in transports:
            await transport.close()
