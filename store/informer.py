"""List and watch into a local cache, as client-go's informer: read-only, and a little behind.

Handlers get keys only, at least once per change; they look into the cache for what is.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from machinery.backoff import Backoff
from machinery.clock import Clock
from store.codec import UndecodableError
from store.errors import CompactedError, ReplacedError, StoreError
from store.port import KeyValue, Listing, Transport, WatchBatch

T = TypeVar("T")
log = logging.getLogger(__name__)


class Cache(Protocol):
    """An informer of whatever type, to be run and waited for."""

    async def run(self) -> None: ...

    async def wait_synced(self) -> None: ...


class Informer(Generic[T]):
    """A cache of every key below a prefix. Run `run()` in a task group."""

    def __init__(
        self, transport: Transport, prefix: str, decode: Callable[[KeyValue], T], clock: Clock
    ) -> None:
        self._transport = transport
        self._prefix = prefix
        self._decode = decode
        self._clock = clock
        self._items: dict[str, T] = {}
        self._versions: dict[str, int] = {}
        self._handlers: list[Callable[[str], None]] = []
        self._advanced = asyncio.Event()
        self._heard_at: float | None = None
        self._store = ""
        self._synced = asyncio.Event()
        self.undecodable: set[str] = set()
        self.revision = 0

    @property
    def items(self) -> Mapping[str, T]:
        """What is below the prefix, by key; the last good value of what cannot be decoded."""
        return MappingProxyType(self._items)

    @property
    def synced(self) -> bool:
        """Whether the first list is in."""
        return self._synced.is_set()

    def staleness_s(self) -> float | None:
        """Return the seconds since the store was last heard; None before the first time."""
        return None if self._heard_at is None else self._clock.monotonic() - self._heard_at

    def version(self, key: str) -> int:
        """Return the mod_revision of a cached key; 0 if it is not there."""
        return self._versions.get(key, 0)

    def on_change(self, handler: Callable[[str], None]) -> None:
        """Have the handler called with each key that changed (or was deleted)."""
        self._handlers.append(handler)

    async def wait_synced(self) -> None:
        """Wait for the first list."""
        await self._synced.wait()

    async def reached(self, revision: int) -> None:
        """Wait until the cache shows a write below the prefix that was done at `revision`."""
        while self.revision < revision:
            await self._advanced.wait()

    async def run(self) -> None:
        """Keep the cache like the store, for ever: resume after breaks, list again when needed."""
        backoff, failures, must_list = Backoff(first_s=0.05, limit_s=1.0), 0, True
        while True:
            try:
                if must_list:
                    self._replace(await self._transport.list(self._prefix))
                    must_list = False
                watch = self._transport.watch(self._prefix, after_revision=self.revision)
                async with aclosing(watch):
                    async for batch in watch:
                        failures = 0
                        self._take(batch)
            except CompactedError as error:
                log.info("listing again", extra={"prefix": self._prefix, "why": str(error)})
                must_list = True
                if isinstance(error, ReplacedError):
                    # A store that was replaced reuses revisions: every key counts as changed.
                    self._versions = dict.fromkeys(self._versions, -1)
            except StoreError as error:
                # The first failure is often just an idle stream that was cut.
                level = logging.WARNING if failures == 1 else logging.DEBUG
                log.log(level, "watch broke", extra={"prefix": self._prefix, "why": str(error)})
            failures += 1
            await self._clock.sleep(backoff.delay_s(failures, jitter=random.random()))

    def _replace(self, listing: Listing) -> None:
        """Take over a list; what is missing in it was deleted, even if nobody told."""
        fresh = {item.key: item for item in listing.items}
        rolled_back = listing.revision < self.revision or listing.store != self._store
        self._store = listing.store
        gone = [key for key in self._versions if key not in fresh]
        changed = [
            key
            for key, item in fresh.items()
            if rolled_back or self._versions.get(key) != item.mod_revision
        ]
        for key in gone:
            self._drop(key)
        for key in changed:
            self._set(fresh[key])
        self._advance(listing.revision)
        self._synced.set()
        self._tell([*gone, *changed])

    def _take(self, batch: WatchBatch) -> None:
        if batch.store != self._store:
            raise ReplacedError("the store was replaced by another")
        for change in batch.changes:
            if change.now is None:
                self._drop(change.key)
            else:
                self._set(change.now)
        self._advance(max(self.revision, batch.revision))
        self._tell([change.key for change in batch.changes])

    def _set(self, item: KeyValue) -> None:
        self._versions[item.key] = item.mod_revision
        try:
            self._items[item.key] = self._decode(item)
            self.undecodable.discard(item.key)
        except UndecodableError as error:
            # The last good value stays: taking the object for deleted would end what runs.
            self.undecodable.add(item.key)
            log.error("a document in the store cannot be read", extra={"why": str(error)})  # noqa: TRY400 - the message says it all

    def _drop(self, key: str) -> None:
        self._items.pop(key, None)
        self._versions.pop(key, None)
        self.undecodable.discard(key)

    def _advance(self, revision: int) -> None:
        self.revision = revision
        self._heard_at = self._clock.monotonic()
        self._advanced.set()
        self._advanced = asyncio.Event()

    def _tell(self, changed: list[str]) -> None:
        for key in changed:
            for handler in self._handlers:
                handler(key)
