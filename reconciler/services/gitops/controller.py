"""The controller of GitSources: queues sources whose keys changed, and reconciles them while this process leads."""

import logging

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from machinery.control_loop import WorkQueue
from reconciler.leader_loop import FencedTransport, run_as_leader
from reconciler.listers.caches import BY_KIND, Caches, object_key
from reconciler.services.gitops import applier
from reconciler.services.gitops.credentials import GitSettings
from reconciler.services.gitops.source_reconciler import GitSourceReconciler
from store.errors import PermissionDeniedError, StoreError
from store.events import EventRecorder
from store.leases import Leadership
from store.port import Transport

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

        self._sources = sources
        try:
            await self._queue_everything(transport)
            await run_as_leader(
                self._queue,
                lambda name: sources.reconcile(name, self._caches.specs.version),
                leadership,
                workers=_AT_ONCE,
            )
        finally:
            self._sources = None

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
