"""A read-only local cache of a prefix, kept up to date by list and watch, as client-go's informer.

Handlers get keys only, at least once per change, and read the current object from the cache.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from machinery.gc_pause import freeze_survivors, pause_collection
from store.errors import (
    CompactedError,
    PermissionDeniedError,
    ReplacedError,
    StoreError,
    UndecodableError,
)
from store.object_cache import ObjectCache
from store.port import KeyValue, Listing, Transport, WatchBatch
from store.read_ahead import read_ahead
from store.reads import PAGE

T = TypeVar("T")


class Relist(Generic[T]):
    """The differences between a list and the cache: holds them decoded, and no raw value.

    `versions` are the mod_revisions of the cache, or empty if they cannot be trusted.
    """

    def __init__(
        self, versions: Mapping[str, int], decode: Callable[[KeyValue], T | UndecodableError]
    ) -> None:
        self._cached = versions
        self._decode = decode
        self.revision = 0
        self.store = ""
        self.versions: dict[str, int] = {}
        """The mod_revision of every listed key."""
        self.changed: dict[str, T | UndecodableError] = {}

    def take(self, page: Listing) -> None:
        """Decode the changed keys of a page; unchanged ones are skipped."""
        self.revision, self.store = page.revision, page.store
        with pause_collection():
            for item in page.items:
                self.versions[item.key] = item.mod_revision
                if self._cached.get(item.key) != item.mod_revision:
                    self.changed[item.key] = self._decode(item)

    def renumbered(self, versions: Mapping[str, int], items: Mapping[str, T]) -> bool:
        """Return whether revisions stand for other writes than they did in the cache.

        Every key must have been decoded. If the answer is no, only keys that differ stay in `changed`.
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

_BACKOFF = Backoff(first_s=0.1, limit_s=5.0)
# After a watch of this length, the next break counts as a first failure. A watch that breaks sooner counts as a
# further failure, or a sick store would be asked twenty times a second.
_STEADY_S = 5.0
# etcd issue 13766: after kill -9 these versions may have the same write under another revision.
_RENUMBERING = ("3.5.0", "3.5.1", "3.5.2")


class HandlerError(Exception):
    """A handler raised a StoreError, which must not be taken for a broken watch."""


class AnyInformer(Protocol):
    """An informer of any type, for code that runs it or waits for it."""

    async def run(self) -> None: ...

    async def list_once(self) -> None: ...

    async def wait_synced(self) -> None: ...

    @property
    def synced(self) -> bool: ...

    @property
    def refusal(self) -> str: ...

    def staleness_s(self) -> float | None: ...


class Informer(ObjectCache[T]):
    """A cache of every key below a prefix. Run `run()` in a task group.

    Share one per prefix and process: each has its own watch in etcd, and its own copy of the objects. Add a
    handler to be notified of changes, and an index to find objects.

    Memory: the cache, and during a list one page of at most 500 raw values and the decoded changes. Values are
    not queued: handlers get keys, so a slow reader sees the latest value later, not each value in turn.

    A list takes effect atomically: no reader sees half of it. A handler, an index or a decoder that raises
    anything but `UndecodableError` ends `run()` with that error. It is a bug, and a process that continued would
    miss changes without a sign.
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
        self._transport = transport
        self.prefix = prefix
        """The first characters of its keys."""
        self._clock = clock
        self._retries = Retries(_BACKOFF, clock, jitter=jitter)
        self._handlers: list[Callable[[str], None]] = []
        self._advanced = asyncio.Event()
        self._last_received_at: float | None = None
        self._watching_since = float("inf")
        self._broken_at: float | None = None
        self._store = ""
        self._must_list = True
        self._may_renumber = True  # until the store has reported its version
        self._synced = asyncio.Event()
        self.revision = 0
        self.refusal = ""
        """Reason why the store refuses this process; "" if it does not, or if nothing is known."""

    @property
    def synced(self) -> bool:
        """True once the first list is complete."""
        return self._synced.is_set()

    def staleness_s(self) -> float | None:
        """Return the seconds since the store last sent anything; None before the first time."""
        return (
            None
            if self._last_received_at is None
            else self._clock.monotonic() - self._last_received_at
        )

    def broken_s(self) -> float:
        """Return the seconds since the watch broke, while the store has not answered since; 0.0 if it has."""
        return 0.0 if self._broken_at is None else self._clock.monotonic() - self._broken_at

    def on_change(self, handler: Callable[[str], None]) -> None:
        """Call the handler with each key that is changed or deleted from now on."""
        self._handlers.append(handler)

    async def wait_synced(self) -> None:
        """Wait for the first list."""
        await self._synced.wait()

    async def reached(self, revision: int) -> None:
        """Wait until the cache includes a write below the prefix at `revision`."""
        while self.revision < revision:
            await self._advanced.wait()

    async def list_once(self) -> None:
        """Fill the cache from one list, without a watch; instead of `run()`, for commands that read once.

        Raises:
            StoreError: as Transport.pages raises.

        """
        self._replace(await self._list(doubtful=False))

    def suppose(self, item: KeyValue) -> None:
        """Put a value into the cache that the store does not have, to plan with a write that has not happened.

        Only after `list_once()`: a watch would overwrite it.
        """
        self._set(item.key, item.mod_revision, self._decoded(item))
        self._notify([item.key])

    async def run(self) -> None:
        """Keep the cache in sync until cancelled: resume after breaks, list again when needed."""
        while True:
            self._watching_since = float("inf")
            # No error may stay in a variable here: its traceback would hold the connection after `close()`.
            try:
                await self._connect()
                self._broken_at = None
                await self._follow()
            except CompactedError as error:
                is_refused = False
                self._reset_if_steady()
                log.info("listing again", extra={"prefix": self.prefix, "why": str(error)})
                self._must_list = True
                if isinstance(error, ReplacedError):
                    # A replaced store reuses revisions: every key counts as changed.
                    self._versions = dict.fromkeys(self._versions, -1)
            except StoreError as error:
                is_refused = isinstance(error, PermissionDeniedError)
                why = str(error)
                self._reset_if_steady()
                if self._broken_at is None:
                    self._broken_at = self._clock.monotonic()
                self.refusal = why if is_refused else ""
                # The first failure is often just an idle stream that was cut; a refusal never is.
                is_news = self._retries.failures == (0 if is_refused else 1)
                log.log(
                    logging.WARNING if is_news else logging.DEBUG,
                    "watch broke",
                    extra={"prefix": self.prefix, "why": why},
                )
            else:
                continue
            await self._retries.wait(is_refused=is_refused)

    def _reset_if_steady(self) -> None:
        if self._clock.monotonic() - self._watching_since >= _STEADY_S:
            self._retries.reset()

    async def _connect(self) -> None:
        """List the first time, when the history is gone, and when the store may have renumbered its writes."""
        if not self.synced:
            self._replace(await self._list(doubtful=False))
            self._must_list = False
            self._may_renumber = await self._store_may_renumber()
            return
        may_renumber = await self._store_may_renumber()
        # The version before the break counts as well as the one after: etcd may have been upgraded.
        doubtful = may_renumber or self._may_renumber
        if not (self._must_list or doubtful):
            return
        relist = await self._list(doubtful=doubtful)
        if doubtful and relist.renumbered(self._versions, self._items):
            log.warning(
                "renumbering detected: etcd has writes under other revisions than before; every "
                "key counts as changed. Upgrade etcd to 3.5.5 or later",
                extra={"prefix": self.prefix},
            )
        self._replace(relist)
        self._must_list, self._may_renumber = False, may_renumber

    async def _store_may_renumber(self) -> bool:
        try:
            version = (await self._transport.status()).version
        except PermissionDeniedError:
            return False  # none of the affected versions restricts its status
        return version.partition("-")[0] in _RENUMBERING

    async def _list(self, *, doubtful: bool) -> Relist[T]:
        """List the store; with `doubtful`, decode keys that seem unchanged as well."""
        relist: Relist[T] | None = None
        async with read_ahead(self._transport.pages(self.prefix)) as pages:
            async for page in pages:
                if relist is None:
                    same = page.store == self._store and page.revision >= self.revision
                    trusted = self._versions if same and not doubtful else {}
                    relist = Relist(trusted, self._decoded)
                relist.take(page)
                if not self.synced and len(page.items) >= PAGE:
                    freeze_survivors()  # the objects of a large first list live long
        assert relist is not None
        return relist

    def _replace(self, relist: Relist[T]) -> None:
        """Apply a list to the cache; keys that are missing in it were deleted."""
        self._store = relist.store
        gone = [key for key in self._versions if key not in relist.versions]
        for key in gone:
            self._drop(key)
        for key, value in relist.changed.items():
            self._set(key, relist.versions[key], value)
        self._advance(relist.revision)
        self._synced.set()
        self._notify([*gone, *relist.changed])

    async def _follow(self) -> None:
        """Watch until the watch breaks."""
        self._watching_since = self._clock.monotonic()
        watch = self._transport.watch(self.prefix, after_revision=self.revision)
        async with aclosing(watch):
            async for batch in watch:
                self._take(batch)

    def _take(self, batch: WatchBatch) -> None:
        if batch.store != self._store:
            raise ReplacedError("the store was replaced by another one")
        for change in batch.changes:
            if change.now is None:
                self._drop(change.key)
            else:
                self._set(change.key, change.mod_revision, self._decoded(change.now))
        self._advance(max(self.revision, batch.revision))
        self._notify([change.key for change in batch.changes])

    def _advance(self, revision: int) -> None:
        self.revision = revision
        self._last_received_at = self._clock.monotonic()
        self.refusal = ""
        self._advanced.set()
        self._advanced = asyncio.Event()

    def _notify(self, changed: list[str]) -> None:
        for key in changed:
            for handler in self._handlers:
                try:
                    handler(key)
                except StoreError as error:
                    raise HandlerError(f"a handler of {self.prefix} failed at {key}") from error
