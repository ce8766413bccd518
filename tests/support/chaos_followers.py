"""A counter that many increment by compare-and-swap: each of them knows for certain what it did.

The value carries how often each writer incremented, so that a call without an answer can be looked
into: it happened, or it never will, or the same guarded write may be tried once more.
"""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import orjson

from machinery.clock import Clock
from store.errors import ConflictError, StoreError, UnavailableError
from store.etcd.member.binary import locate, unfit_for_clusters
from store.informer import Informer
from store.port import KeyValue, ModRevisionGuard, Put, Transport, WatchBatch


@dataclass(frozen=True, slots=True)
class Count:
    """The value of the counter: the increments of each writer."""

    by: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.by.values())

    def raised(self, name: str) -> bytes:
        """Return the document with one more increment by this writer."""
        return orjson.dumps({**self.by, name: self.by.get(name, 0) + 1})


def read(item: KeyValue | None) -> Count:
    return Count(orjson.loads(item.value)) if item is not None else Count()


class Writer:
    """Increments the counter; `done` is the number of increments known to be applied."""

    def __init__(self, name: str, transport: Transport, key: str, clock: Clock) -> None:
        self.name = name
        self.done = 0
        self.unavailable = 0
        self.ambiguous = 0
        self.conflicts = 0
        self._transport = transport
        self._key = key
        self._clock = clock
        self._is_open = False
        """True if an attempt at the current increment may have been applied, or may still be."""

    async def increment(self) -> None:
        """Increment once, and retry until the result is certain."""
        while True:
            try:
                item = await self._transport.get(self._key)
                if self._landed(item):
                    break
                await self._attempt(item)
                break
            except ConflictError:
                self.conflicts += 1
                await self._clock.sleep(random.uniform(0, 0.02))
            except UnavailableError as error:
                self.unavailable += 1
                self.ambiguous += error.ambiguous
                await self._clock.sleep(random.uniform(0.01, 0.1))
        self.done += 1
        self._is_open = False

    def _landed(self, item: KeyValue | None) -> bool:
        """Return true if an attempt that got no answer was applied after all."""
        count = read(item).by.get(self.name, 0)
        assert count in (self.done, self.done + 1), (
            f"{self.name}: {count} increments instead of {self.done}"
        )
        landed = count == self.done + 1
        assert self._is_open or not landed, f"{self.name}: a refused increment was applied"
        return landed

    async def _attempt(self, item: KeyValue | None) -> None:
        guard = ModRevisionGuard(key=self._key, mod_revision=item.mod_revision if item else 0)
        put = Put(key=self._key, value=read(item).raised(self.name))
        try:
            await self._transport.commit([guard], [put])
        except UnavailableError as error:
            self._is_open = self._is_open or error.ambiguous
            raise


class Follower:
    """Watches the counter and records every change; resumes when the watch breaks."""

    def __init__(self, transport: Transport, key: str, clock: Clock) -> None:
        self._transport = transport
        self._key = key
        self._clock = clock
        self.revision = 0
        self.seen: list[Count] = []
        self.breaks = 0

    async def run(self) -> None:
        while True:
            watch = self._transport.watch(self._key, after_revision=self.revision)
            try:
                await self._take(watch)
            except UnavailableError:
                self.breaks += 1
                await self._clock.sleep(random.uniform(0.01, 0.1))

    async def _take(self, watch: AsyncGenerator[WatchBatch]) -> None:
        async with aclosing(watch):
            async for batch in watch:
                self.seen.extend(read(change.now) for change in batch.changes)
                self.revision = max(self.revision, batch.revision)


class CachedFollower:
    """Does the same with an informer: records what it decodes, in order."""

    def __init__(self, transport: Transport, key: str, clock: Clock) -> None:
        self.seen: list[Count] = []
        self.informer = Informer(transport, key, self._note, clock)

    @property
    def revision(self) -> int:
        return self.informer.revision

    async def run(self) -> None:
        await self.informer.run()

    def _note(self, item: KeyValue) -> Count:
        self.seen.append(read(item))
        return self.seen[-1]


def gaps(seen: list[Count]) -> str:
    """Check that a watcher saw every total once, in order; return the problem, or an empty string."""
    totals = [count.total for count in seen]
    wrong = [
        (before, now)
        for before, now in zip([0, *totals], totals, strict=False)
        if now != before + 1
    ]
    return f"steps {wrong[:5]} among {len(totals)}" if wrong else ""


def informers_relist() -> bool:
    """Return whether informers list again after every break, because this etcd may renumber revisions."""
    return bool(unfit_for_clusters(locate(None).version))


def missed(watcher: Follower | CachedFollower, final: Count) -> str:
    """Check that a watcher saw every total up to the final one; return the problem, or an empty string.

    An informer that lists sees the latest total, again or later, and none in between; it never goes back.
    """
    totals = [count.total for count in watcher.seen]
    if isinstance(watcher, CachedFollower) and informers_relist():
        is_right = totals == sorted(totals) and totals[-1] == final.total
        return "" if is_right else f"{totals[-5:]} instead of {final.total}"
    return gaps(watcher.seen) or ("" if len(totals) == final.total else f"{len(totals)} totals")


async def succeeds_soon(transport: Transport, key: str, clock: Clock) -> KeyValue | None:
    """Read, and retry until it works."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await transport.get(key)
            except StoreError:
                await clock.sleep(0.1)
