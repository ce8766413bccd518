"""The controller of GitSources: says whom a change concerns, and has sources looked at while this process leads."""

import asyncio
import logging

from machinery.clock import Clock
from machinery.loop import Again, LostError, run_loop
from machinery.workqueue import WorkQueue
from reconciler.gitops import release
from reconciler.gitops.fenced import Fenced
from reconciler.gitops.sources import Places, Sources
from reconciler.known.caches import BY_KIND, Caches, object_key
from store.election import Leadership
from store.errors import FencedError, StoreError
from store.events import EventRecorder
from store.port import Transport

log = logging.getLogger(__name__)

# A source that is away holds up nobody but itself, and so do three of them.
_AT_ONCE = 4


class GitOps:
    """Keeps the fleet to what Git says. `connect()` once; `lead()` for as long as this process leads."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        caches: Caches,
        recorder: EventRecorder,
        places: Places,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._caches = caches
        self._recorder = recorder
        self._places = places
        self._queue: WorkQueue[str] = WorkQueue(clock)
        self._sources: Sources | None = None

    def connect(self) -> None:
        """Hear of what changes from now on."""
        self._caches.specs.on_change(self._changed)
        self._caches.statuses.on_change(self._changed)

    def _changed(self, key: str) -> None:
        if self._sources is None:
            return  # who leads next looks at everything
        found = object_key(key)
        if found is not None and found.kind == "GitSource":
            self._queue.add(found.name)
        for name, concerned in self._sources.concerns.items():
            if key in concerned:
                self._queue.add(name)

    async def lead(self, leadership: Leadership) -> None:
        """Look at sources for ever.

        Raises:
            LostError: this process may write no more (in a group of them).

        """
        transport = Fenced(self._transport, leadership.guard)
        sources = Sources(transport, self._clock, self._recorder, self._places)

        async def guarded(name: str) -> Again | None:
            if not leadership.valid():
                raise LostError("the lease ended")
            try:
                return await sources.look(name, self._version_of)
            except FencedError as error:
                raise LostError(str(error)) from error

        self._sources = sources
        try:
            await self._everything(transport)
            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(run_loop(self._queue, guarded, transient=(StoreError,)))
        finally:
            self._sources = None

    def _version_of(self, key: str) -> int:
        return self._caches.specs.version(key)

    async def _everything(self, transport: Transport) -> None:
        """Queue every source, and those that left something when they went."""
        for source in self._caches.specs.by_index(BY_KIND, "GitSource").values():
            self._queue.add(source.name)
        while True:
            try:
                for name in await release.orphans(transport):
                    self._queue.add(name)
            except StoreError as error:
                log.info("apply sets cannot be read yet", extra={"why": str(error)})
                await self._clock.sleep(1.0)
            else:
                return
