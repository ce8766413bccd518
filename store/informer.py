"""What is in the store, kept in memory and up to date: list, watch, find.

A list on its way into a cache, page by page: says what is to change in it. Changes nothing.

List and watch into a local cache, as client-go's informer: read-only, and a little behind.

Handlers get keys only, at least once per change; they look into the cache for what is.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

from machinery.backoff import Backoff
from machinery.clock import Clock
from machinery.gc_pause import freeze_survivors, pause_collection
from store.codec import UndecodableError
from store.errors import CompactedError, PermissionDeniedError, ReplacedError, StoreError
from store.object_cache import ObjectCache
from store.port import KeyValue, Listing, Transport, WatchBatch
from store.reads import PAGE

T = TypeVar("T")


class Relist(Generic[T]):
    """What a list says that the cache does not have; holds that, decoded, and no raw value.

    `versions` are the mod_revisions of the cache, or empty if they are not to be relied on.
    """

    def __init__(
        self, versions: Mapping[str, int], decode: Callable[[KeyValue], T | UndecodableError]
    ) -> None:
        self._cached = versions
        self._decode = decode
        self.revision = 0
        self.store = ""
        self.versions: dict[str, int] = {}
        """The mod_revision of every key that was listed."""
        self.changed: dict[str, T | UndecodableError] = {}

    def take(self, page: Listing) -> None:
        """Decode what changed on a page; what did not is not even looked at."""
        self.revision, self.store = page.revision, page.store
        with pause_collection():
            for item in page.items:
                self.versions[item.key] = item.mod_revision
                if self._cached.get(item.key) != item.mod_revision:
                    self.changed[item.key] = self._decode(item)

    def renumbered(self, versions: Mapping[str, int], items: Mapping[str, T]) -> bool:
        """Return whether revisions mean other writes than they did in the cache.

        Everything must have been decoded. If it is not so, only what differs stays changed.
        """
        moved_back = any(now < versions.get(key, 0) for key, now in self.versions.items())
        differing = {
            key: value
            for key, value in self.changed.items()
            if self.versions[key] != versions.get(key) or value != items.get(key)
        }
        reused = any(
            self.versions[key] == versions.get(key) and not isinstance(value, UndecodableError)
            for key, value in differing.items()
        )
        if moved_back or reused:
            return True
        self.changed = differing
        return False


log = logging.getLogger(__name__)

_BACKOFF = Backoff(first_s=0.05, limit_s=1.0)
# A watch that stood for so long was a good one: the next break is a first failure again. One that
# stands and breaks at once is not, or a sick store would be asked twenty times a second.
_STEADY_S = 5.0
# etcd issue 13766: after kill -9 these have the same write under another revision.
_RENUMBERING = ("3.5.0", "3.5.1", "3.5.2")


class HandlerError(Exception):
    """A handler raised an error of the store's, which must not be taken for a broken watch."""


class AnyInformer(Protocol):
    """An informer of whatever type, to be run and waited for."""

    async def run(self) -> None: ...

    async def list_once(self) -> None: ...

    async def wait_synced(self) -> None: ...


class Informer(ObjectCache[T]):
    """A cache of every key below a prefix. Run `run()` in a task group.

    One per prefix and process, shared by all who read it: each has a watch of its own in etcd, and
    its own copy of the objects. Whoever must know adds a handler; whoever must find, an index.

    Memory: the cache, and while it lists, one page of at most 500 raw values and what changed,
    decoded. Values are never queued: handlers are called with keys as they change, so a slow reader
    sees the latest value later, not each value in turn.

    A list takes effect all at once: no reader sees half of it. A handler, an index or a decoder that
    raises (anything but `UndecodableError`) ends `run()` with that error: it is a defect of ours,
    and a process that went on would be deaf without anybody noticing.
    """

    def __init__(
        self,
        transport: Transport,
        prefix: str,
        decode: Callable[[KeyValue], T],
        clock: Clock,
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(decode)
        self._jitter = jitter
        self._transport = transport
        self._prefix = prefix
        self._clock = clock
        self._handlers: list[Callable[[str], None]] = []
        self._advanced = asyncio.Event()
        self._heard_at: float | None = None
        self._watching_since = float("inf")
        self._store = ""
        self._must_list = True
        self._may_renumber = True  # until the store has said what it is
        self._synced = asyncio.Event()
        self.revision = 0

    @property
    def synced(self) -> bool:
        """Whether the first list is in."""
        return self._synced.is_set()

    def staleness_s(self) -> float | None:
        """Return the seconds since the store was last heard; None before the first time."""
        return None if self._heard_at is None else self._clock.monotonic() - self._heard_at

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

    async def list_once(self) -> None:
        """Fill the cache from one list, for who looks once and goes; instead of `run()`, without a watch.

        Raises:
            StoreError: as Transport.pages.

        """
        self._replace(await self._list(doubtful=False))

    def suppose(self, item: KeyValue) -> None:
        """Have the cache show a value that the store does not have: to plan with what is not written yet.

        Only after `list_once()`: what is heard of the store would take it back.
        """
        self._set(item.key, item.mod_revision, self._decoded(item))
        self._tell([item.key])

    async def run(self) -> None:
        """Keep the cache like the store, for ever: resume after breaks, list again when needed."""
        failures = 0
        while True:
            self._watching_since = float("inf")
            try:
                await self._connect()
                await self._follow()
            except CompactedError as error:
                log.info("listing again", extra={"prefix": self._prefix, "why": str(error)})
                self._must_list = True
                if isinstance(error, ReplacedError):
                    # A store that was replaced reuses revisions: every key counts as changed.
                    self._versions = dict.fromkeys(self._versions, -1)
            except StoreError as error:
                # The first failure is often just an idle stream that was cut.
                level = logging.WARNING if failures == 1 else logging.DEBUG
                log.log(level, "watch broke", extra={"prefix": self._prefix, "why": str(error)})
            stood_s = self._clock.monotonic() - self._watching_since
            failures = 1 if stood_s >= _STEADY_S else failures + 1
            # Full jitter: after a restart of etcd all watches of a fleet come back at once.
            await self._clock.sleep(_BACKOFF.delay_s(failures) * self._jitter())

    async def _connect(self) -> None:
        """List at first, when the history is gone, and when the store may have renumbered it."""
        if not self.synced:
            self._replace(await self._list(doubtful=False))
            self._must_list = False
            self._may_renumber = await self._store_may_renumber()
            return
        may_renumber = await self._store_may_renumber()
        # The one that broke counts as well as the one that came back: it may have been upgraded.
        doubtful = may_renumber or self._may_renumber
        if not (self._must_list or doubtful):
            return
        relist = await self._list(doubtful=doubtful)
        if doubtful and relist.renumbered(self._versions, self._items):
            log.warning(
                "renumbering detected: etcd has writes under other revisions than before; every "
                "key counts as changed. Upgrade etcd to 3.5.5 or later",
                extra={"prefix": self._prefix},
            )
        self._replace(relist)
        self._must_list, self._may_renumber = False, may_renumber

    async def _store_may_renumber(self) -> bool:
        try:
            version = (await self._transport.status()).version
        except PermissionDeniedError:
            return False  # none of the versions in question makes it a secret
        return version.partition("-")[0] in _RENUMBERING

    async def _list(self, *, doubtful: bool) -> Relist[T]:
        """Return what the store has; `doubtful` decodes also what seems unchanged."""
        relist: Relist[T] | None = None
        async with aclosing(self._transport.pages(self._prefix)) as pages:
            async for page in pages:
                if relist is None:
                    same = page.store == self._store and page.revision >= self.revision
                    trusted = self._versions if same and not doubtful else {}
                    relist = Relist(trusted, self._decoded)
                relist.take(page)
                if not self.synced and len(page.items) >= PAGE:
                    freeze_survivors()  # a large first list: what it brought stays for long
        assert relist is not None
        return relist

    def _replace(self, relist: Relist[T]) -> None:
        """Take over a list; what is missing in it was deleted, even if nobody told."""
        self._store = relist.store
        gone = [key for key in self._versions if key not in relist.versions]
        for key in gone:
            self._drop(key)
        for key, value in relist.changed.items():
            self._set(key, relist.versions[key], value)
        self._advance(relist.revision)
        self._synced.set()
        self._tell([*gone, *relist.changed])

    async def _follow(self) -> None:
        """Watch until it breaks."""
        self._watching_since = self._clock.monotonic()
        watch = self._transport.watch(self._prefix, after_revision=self.revision)
        async with aclosing(watch):
            async for batch in watch:
                self._take(batch)

    def _take(self, batch: WatchBatch) -> None:
        if batch.store != self._store:
            raise ReplacedError("the store was replaced by another")
        for change in batch.changes:
            if change.now is None:
                self._drop(change.key)
            else:
                self._set(change.key, change.mod_revision, self._decoded(change.now))
        self._advance(max(self.revision, batch.revision))
        self._tell([change.key for change in batch.changes])

    def _advance(self, revision: int) -> None:
        self.revision = revision
        self._heard_at = self._clock.monotonic()
        self._advanced.set()
        self._advanced = asyncio.Event()

    def _tell(self, changed: list[str]) -> None:
        for key in changed:
            for handler in self._handlers:
                try:
                    handler(key)
                except StoreError as error:
                    raise HandlerError(f"a handler of {self._prefix} failed at {key}") from error
