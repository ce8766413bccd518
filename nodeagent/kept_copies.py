"""Caches of what the leader copies for agents, while it does; of everything that they would be copied from else.

docs/adr/0004-one-writer-per-key.md has the rules.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from typing_extensions import override

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from store import keys
from store.errors import StoreError
from store.informer import Informer
from store.port import Transport

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

log = logging.getLogger(__name__)

# The mark ends with its leader, and the next one writes it within seconds. Thousands of agents miss it at one moment.
LOOK: Final = Backoff(first_s=30.0, limit_s=240.0)
_POLL_S: Final = 0.5


class ObjectCache(Protocol[T_co]):
    """A cache of objects in the store (`store.informer.Informer` is one)."""

    @property
    def items(self) -> Mapping[str, T_co]: ...

    @property
    def synced(self) -> bool: ...

    @property
    def refusal(self) -> str: ...

    def staleness_s(self) -> float | None: ...

    def on_change(self, handler: Callable[[str], None]) -> None: ...

    async def wait_synced(self) -> None: ...

    async def run(self) -> None: ...


class CacheView(Generic[T]):
    """The state of another cache; subclasses are an `ObjectCache` with its objects in their own way."""

    def __init__(self, cache: ObjectCache[T]) -> None:
        self._cache = cache
        self._handlers: list[Callable[[str], None]] = []

    @property
    def synced(self) -> bool:
        return self._cache.synced

    @property
    def refusal(self) -> str:
        return self._cache.refusal

    def staleness_s(self) -> float | None:
        return self._cache.staleness_s()

    def on_change(self, handler: Callable[[str], None]) -> None:
        self._handlers.append(handler)

    def _tell(self, key: str) -> None:
        for handler in self._handlers:
            handler(key)

    async def wait_synced(self) -> None:
        await self._cache.wait_synced()


class RenamedCache(CacheView[T]):
    """A cache (`ObjectCache`) with the objects of an informer under other keys."""

    def __init__(self, cache: Informer[T], rename: Callable[[str], str]) -> None:
        super().__init__(cache)
        self._rename = rename
        self._items: dict[str, T] = {}
        cache.on_change(self._changed)

    @property
    def items(self) -> Mapping[str, T]:
        return self._items

    async def run(self) -> None:
        """Keep the cache in sync until cancelled."""
        await self._cache.run()

    def _changed(self, key: str) -> None:
        name, found = self._rename(key), self._cache.items.get(key)
        if found is None:
            self._items.pop(name, None)
        else:
            self._items[name] = found
        self._tell(name)


class KeptCopies(CacheView[T]):
    """A cache (`ObjectCache`) that reads the leader's copies while they are kept, and all objects else."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        mark: str,
        copies: Callable[[], ObjectCache[T]],
        everything: Callable[[], ObjectCache[T]],
        look: Backoff = LOOK,
    ) -> None:
        """Prepare; `run()` reads.

        `mark` is the key that exists while the leader keeps the copies. Both caches have the same keys. `look`: the waits
        before a missing mark means that the leader keeps no copies.
        """
        self._mark = Informer(transport, mark, lambda item: item.key, clock)
        super().__init__(cast("ObjectCache[T]", self._mark))  # until the first list
        self._transport = transport
        self._mark_key = mark
        self._copies = copies
        self._everything = everything
        self._looks = Retries(look, clock)
        self._mark_changed = asyncio.Event()
        self._mark.on_change(lambda _: self._mark_changed.set())
        self._served: ObjectCache[T] | None = None
        self._items: Mapping[str, T] = {}
        self._synced = asyncio.Event()
        self.is_narrow = False
        """True while only copies are watched."""

    @property
    def items(self) -> Mapping[str, T]:
        return self._items

    @property
    @override
    def synced(self) -> bool:
        """True once the first list is complete."""
        return self._synced.is_set()

    @override
    async def wait_synced(self) -> None:
        await self._synced.wait()

    async def run(self) -> None:
        """Keep the cache in sync until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mark.run())
            await _has_list(self._mark)
            may_be_narrow, watching = True, None
            while True:
                is_narrow = may_be_narrow and self._is_kept
                cache = self._new_cache(is_narrow=is_narrow)
                if not self.synced:
                    self._cache = cache
                task = group.create_task(cache.run())
                # While the new cache is read, the one before serves.
                if is_narrow and not await _has_list(cache):
                    task.cancel()  # its role may not read the copies
                    if self.synced:
                        await self._looks.wait()
                    may_be_narrow = self.synced
                    continue
                await cache.wait_synced()
                # Serve the cache, and tell what differs from the one before.
                before = self._items
                self._cache = self._served = cache
                self.is_narrow, self._items = is_narrow, cache.items
                self._synced.set()
                of = "copies" if is_narrow else "all objects"
                log.info("watching what a leader keeps", extra={"mark": self._mark_key, "of": of})
                for key in {**before, **self._items}:
                    if before.get(key) != self._items.get(key):
                        self._tell(key)
                if watching is not None:
                    watching.cancel()
                watching = task
                if is_narrow:
                    await self._until_not_kept()
                elif may_be_narrow:
                    await self._until_kept()
                else:
                    await self._looks.wait()  # the right may be granted later
                may_be_narrow = True

    @property
    def _is_kept(self) -> bool:
        return bool(self._mark.items)

    def _new_cache(self, *, is_narrow: bool) -> ObjectCache[T]:
        cache = self._copies() if is_narrow else self._everything()
        cache.on_change(lambda key: self._tell(key) if cache is self._served else None)
        return cache

    async def _until_kept(self) -> None:
        while not self._is_kept:
            self._mark_changed.clear()
            await self._mark_changed.wait()

    async def _until_not_kept(self) -> None:
        """Return once a process leads that keeps no copies. Without any leader, nothing changes."""
        while True:
            self._mark_changed.clear()
            if self._is_kept:
                self._looks.reset()
                await self._mark_changed.wait()
                continue
            try:
                async with asyncio.timeout(self._looks.next_delay_s()):
                    await self._mark_changed.wait()
            except TimeoutError:
                if await self._is_led_without_copies():
                    return

    async def _is_led_without_copies(self) -> bool:
        try:
            leader = await self._transport.get(keys.ELECTION_RECONCILER)
            return leader is not None and await self._transport.get(self._mark_key) is None
        except StoreError as error:
            log.debug("the election was not read", extra={"why": str(error)})
            return False


async def _has_list(cache: ObjectCache[Any]) -> bool:
    """Wait for the first list of a cache; return False if the store refuses it."""
    while not cache.synced and not cache.refusal:
        try:
            async with asyncio.timeout(_POLL_S):
                await cache.wait_synced()
        except TimeoutError:
            continue
    return cache.synced
