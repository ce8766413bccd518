"""The controller of GitSources: queues sources whose keys changed, and reconciles them while this process leads."""

import asyncio
import logging
from collections.abc import Sequence

from typing_extensions import override

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from machinery.control_loop import AuthorityLostError, Requeue, WorkQueue, run_loop
from reconciler.listers.caches import BY_KIND, Caches, object_key
from reconciler.services.gitops import applier
from reconciler.services.gitops.credentials import GitSettings
from reconciler.services.gitops.source_reconciler import GitSourceReconciler
from store.errors import ConflictError, FencedError, PermissionDeniedError, StoreError
from store.events import EventRecorder
from store.forwarding import ForwardedCalls
from store.leases import Leadership
from store.port import CreateRevisionGuard, Guard, Operation, Transport


class FencedTransport(ForwardedCalls):
    """A transport whose commits succeed only while this process leads.

    Raises:
        FencedError: another process leads, even if this process has not noticed it yet.

    """

    def __init__(self, inner: Transport, fence: Guard) -> None:
        self.inner = inner
        self._fence = fence

    @override
    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        try:
            return await self.inner.commit([self._fence, *guards], operations)
        except ConflictError as error:
            # The failed guard decides: retry for one of the caller's, stop for the fence.
            if await self._holds():
                raise
            raise FencedError("another reconciler leads now") from error

    async def _holds(self) -> bool:
        item = await self.inner.get(self._fence.key)
        if item is None or not isinstance(self._fence, CreateRevisionGuard):
            return False
        return item.create_revision == self._fence.create_revision

    @override
    async def close(self) -> None:
        """Do nothing: the inner transport is closed by its owner."""


log = logging.getLogger(__name__)

# Up to three repositories that do not answer delay no other source.
_AT_ONCE = 4
_BACKOFF = Backoff(first_s=0.5, limit_s=4.0)


class GitOpsController:
    """Keeps the fleet equal to its GitSources. Call `connect()` once, and `lead()` while this process leads."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        caches: Caches,
        recorder: EventRecorder,
        git: GitSettings,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._caches = caches
        self._recorder = recorder
        self._git = git
        self._queue: WorkQueue[str] = WorkQueue(clock)
        self._sources: GitSourceReconciler | None = None

    def connect(self) -> None:
        """Register the handlers with the caches."""
        self._caches.specs.on_change(self._changed)
        self._caches.statuses.on_change(self._changed)

    def _changed(self, key: str) -> None:
        if self._sources is None:
            return  # the next leader queues every source
        found = object_key(key)
        if found is not None and found.kind == "GitSource":
            self._queue.add(found.name)
        for name, watched in self._sources.watched_keys.items():
            if key in watched:
                self._queue.add(name)

    async def lead(self, leadership: Leadership) -> None:
        """Reconcile sources forever.

        Raises:
            AuthorityLostError: this process leads no longer (in an exception group).

        """
        transport = FencedTransport(self._transport, leadership.guard)
        sources = GitSourceReconciler(
            transport, self._clock, self._recorder, self._git, self._queue.add
        )

        async def reconcile_as_leader(name: str) -> Requeue | None:
            if not leadership.valid():
                raise AuthorityLostError("the lease ended")
            try:
                return await sources.reconcile(name, self._version_of)
            except FencedError as error:
                raise AuthorityLostError(str(error)) from error

        self._sources = sources
        try:
            await self._queue_everything(transport)
            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(
                        run_loop(self._queue, reconcile_as_leader, transient=(StoreError,))
                    )
        finally:
            self._sources = None

    def _version_of(self, key: str) -> int:
        return self._caches.specs.version(key)

    async def _queue_everything(self, transport: Transport) -> None:
        """Queue every source, and removed sources that still hold objects."""
        for source in self._caches.specs.by_index(BY_KIND, "GitSource").values():
            self._queue.add(source.name)
        retries = Retries(_BACKOFF, self._clock)
        while True:
            try:
                for name in await applier.orphans(transport):
                    self._queue.add(name)
            except StoreError as error:
                log.info("apply sets cannot be read yet", extra={"why": str(error)})
                await retries.wait(is_refused=isinstance(error, PermissionDeniedError))
            else:
                return
