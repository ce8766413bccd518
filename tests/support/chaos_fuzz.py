"""One seed of trouble between a client and etcd: what may go wrong, and what may never.

`python -m tests.support.chaos_fuzz WAY SEED [COUNT]` runs seeds again, with an etcd of its own.
"""

import asyncio
import random
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import TypeVar

from machinery.clock import SystemClock
from store.errors import UnavailableError
from store.etcd.adapter import CALL_S, CONNECT_S
from store.etcd.address import EtcdAddress
from store.informer import Informer
from store.port import Delete, KeyValue, Operation, Put, Transport
from tests.support.chaos_followers import CachedFollower, Follower, Writer, gaps, read
from tests.support.chaos_transports import going
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.tcp_proxy import TcpProxy, proxied, random_plan, undisturbed
from tests.support.waiting import until

T = TypeVar("T")

# The interval of etcd's progress reports: a watch without any event for IDLE_S is broken.
FLAGS = ("--experimental-watch-progress-notify-interval=300ms",)
IDLE_S = 1.2
_WRITERS, _INCREMENTS, _KEYS = 3, 3, 6
# How much longer a call may take on a busy machine.
_SLACK_S = 30.0
# A stalled connection is detected by keep-alive: grpc pings after 10 s and waits 5 s for the answer.
_CONVERGES_S = 60.0


class Seed:
    """One client behind proxies whose faults come from the seed."""

    def __init__(self, seed: int, way: str, url: str, *, corner: str = "") -> None:
        self._seed = seed
        self._way = way
        self._url = url
        self._dice = random.Random(seed)
        self._prefix = f"{corner}/fuzz/{way}/{seed}/"
        self._clock = SystemClock()
        self._counts: Counter[str] = Counter()

    async def run(self) -> Counter[str]:
        """Run the client; return counts of what happened.

        Raises:
            AssertionError: An invariant was broken; the message names the seed.

        """
        try:
            async with asyncio.timeout(180):
                await self._run()
        except Exception as error:
            hint = f"seed={self._seed} way={self._way}: {error!r}"
            error.add_note(hint)
            raise AssertionError(hint) from error
        return self._counts

    async def _run(self) -> None:
        async with AsyncExitStack() as stack:
            proxies: list[TcpProxy] = []
            for number in range(self._dice.choice((1, 1, 2))):
                proxy = await stack.enter_async_context(proxied(self._url))
                proxy.plan = random_plan(self._seed * 10 + number)
                proxies.append(proxy)
            address = EtcdAddress(endpoints=tuple(proxy.url for proxy in proxies))
            direct = await stack.enter_async_context(
                going(self._way, EtcdAddress(endpoints=(self._url,)))
            )
            async with going(self._way, address, idle_s=IDLE_S) as transport:
                await self._live(transport, direct, proxies)
            await until(
                lambda: not any(proxy.open_connections for proxy in proxies),
                limit_s=_SLACK_S,
                what="the end of every connection",
            )
            self._counts["connections"] += sum(proxy.accepted for proxy in proxies)

    async def _live(self, transport: Transport, direct: Transport, proxies: list[TcpProxy]) -> None:
        key = f"{self._prefix}counter"
        writers = [Writer(f"w{n}", transport, key, self._clock) for n in range(_WRITERS)]
        watchers: list[Follower | CachedFollower] = [
            Follower(transport, key, self._clock),
            CachedFollower(transport, key, self._clock),
        ]
        informer = Informer(transport, f"{self._prefix}k", lambda item: item, self._clock)
        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(runner.run()) for runner in (*watchers, informer)]
            async with asyncio.TaskGroup() as work:
                for writer in writers:
                    work.create_task(self._increments(writer))
                work.create_task(self._stir(transport))
                work.create_task(self._read_along(transport))
            for proxy in proxies:
                proxy.plan = undisturbed
            await self._converge(informer, direct)
            await self._judge(writers, watchers, direct)
            for task in watching:
                task.cancel()

    async def _increments(self, writer: Writer) -> None:
        for _ in range(_INCREMENTS):
            await writer.increment()
        self._counts["ambiguous"] += writer.ambiguous
        self._counts["unavailable"] += writer.unavailable

    async def _stir(self, transport: Transport) -> None:
        """Put and delete some keys, and ignore the results."""
        for _ in range(8):
            key = f"{self._prefix}k{self._dice.randrange(_KEYS)}"
            is_deleted = self._dice.random() < 0.4
            operation: Operation = Delete(key=key) if is_deleted else Put(key=key, value=b"x" * 300)
            await self._limited(CALL_S, partial(transport.commit, [], [operation]))

    async def _read_along(self, transport: Transport) -> None:
        """Call every other method; each must end in time and raise only errors of the store."""
        lease = await self._limited(CALL_S, lambda: transport.grant(60))
        for _ in range(2):
            await self._limited(6 * CALL_S, lambda: transport.list(self._prefix))
            await self._limited(3 * CALL_S, lambda: transport.get(f"{self._prefix}nothing"))
            await self._limited(3 * CALL_S, transport.status)
            if lease is not None:
                lives_s = await self._limited(CALL_S, lambda: transport.keep_alive(lease))
                assert lives_s in (60, None), "a lease was given up for lost"
        await self._limited(IDLE_S + CALL_S, lambda: self._first_batch(transport))
        if lease is not None:
            await self._limited(CALL_S, lambda: transport.revoke(lease))

    async def _first_batch(self, transport: Transport) -> None:
        async with aclosing(transport.watch(self._prefix, after_revision=0)) as watch:
            await anext(watch)

    async def _limited(self, limit_s: float, call: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of the call, or None if the store is unavailable; fail if it takes too long."""
        self._counts["calls"] += 1
        started_at = self._clock.monotonic()
        try:
            async with asyncio.timeout(limit_s + CONNECT_S + _SLACK_S):
                return await call()
        except UnavailableError:
            self._counts["unavailable"] += 1
            return None
        except TimeoutError:
            took_s = self._clock.monotonic() - started_at
            raise AssertionError(
                f"a call hung for {took_s:.1f} s, its limit is {limit_s}"
            ) from None

    async def _converge(self, informer: Informer[KeyValue], direct: Transport) -> None:
        """Check that the cache becomes equal to the store after the faults end."""
        end = await direct.commit([], [Put(key=f"{self._prefix}kend", value=b"")])
        try:
            async with asyncio.timeout(_CONVERGES_S):
                await informer.reached(end)
        except TimeoutError:
            raise AssertionError(f"the cache is at {informer.revision}, not at {end}") from None
        listing = await direct.list(f"{self._prefix}k")
        assert dict(informer.items) == {item.key: item for item in listing.items}

    async def _judge(
        self, writers: list[Writer], watchers: list[Follower | CachedFollower], direct: Transport
    ) -> None:
        """Check that acknowledged writes count once and that watchers saw every value once."""
        count = read(await direct.get(f"{self._prefix}counter"))
        assert count.by == {writer.name: _INCREMENTS for writer in writers}

        def all_seen() -> bool:
            return all(w.seen and w.seen[-1].total >= count.total for w in watchers)

        await until(all_seen, limit_s=_CONVERGES_S, what="the watchers' sight of the last value")
        for watcher in watchers:
            totals = [seen.total for seen in watcher.seen]
            if isinstance(watcher, Follower):
                assert not gaps(watcher.seen), gaps(watcher.seen)
            # An informer may list again: it may skip or repeat values, but never go back.
            assert totals == sorted(totals), f"{type(watcher).__name__} went back: {totals}"


async def run_seeds(seeds: range, way: str, url: str, *, at_once: int = 16) -> Counter[str]:
    """Run many seeds in parallel, below keys of their own; return the sum of their counts."""
    corner = f"/{secrets.token_hex(8)}"
    places = asyncio.Semaphore(at_once)
    total: Counter[str] = Counter()
    left_over: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: left_over.append(str(context)))
    before = asyncio.all_tasks()

    async def one(seed: int) -> None:
        async with places:
            total.update(await Seed(seed, way, url, corner=corner).run())

    try:
        async with asyncio.TaskGroup() as group:
            for seed in seeds:
                group.create_task(one(seed))
        await until(lambda: asyncio.all_tasks() <= before, what="the end of every task")
    finally:
        loop.set_exception_handler(None)
    assert not left_over, left_over[:3]
    return total


async def _main(way: str, first: int, count: int) -> None:
    async with TcpEtcd(Path(tempfile.mkdtemp()), *FLAGS) as etcd:
        clock = SystemClock()
        started_at = clock.monotonic()
        total = await run_seeds(range(first, first + count), way, etcd.url)
        print(f"{count} seeds in {clock.monotonic() - started_at:.1f} s: {dict(total)}")


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1))
