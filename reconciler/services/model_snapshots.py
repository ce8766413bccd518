"""Pins the hub models of deployments: the leader resolves a branch once, and reads what the memory proof needs.

A lookup reads small files only. Its answer is stored, so that a later leader, a moved branch or a hub that is away
changes nothing. Must not plan: `lister.Lister` gives the planner deployments with their pins.
"""

import logging
import random
from contextlib import AsyncExitStack
from typing import Final

from machinery.backoff import Backoff
from machinery.clock import Clock
from machinery.control_loop import Requeue, WorkQueue
from models.hub.errors import HubRateLimitedError, ModelFetchError
from models.hub.hub_settings import HubFactory, HubSettings
from reconciler.deployments.lookup_problems import LookupProblems
from reconciler.event_handlers import deployment_name_of
from reconciler.leader_loop import FencedTransport, run_as_leader
from reconciler.listers.caches import Caches, object_key
from reconciler.listers.lister import Lister
from reconciler.services.hub_grants import TokenGrants, token_for
from reconciler.services.model_lookup import LOOKUP_ERRORS, look_up, reason_of
from schemas.deployment import HubReference, ModelDeployment
from schemas.event import ObjectReference
from schemas.model_snapshot import ModelSnapshot
from store import codec, keys
from store.events import EventRecorder
from store.leases import Leadership
from store.port import Delete, ModRevisionGuard, Put, Transport

log = logging.getLogger(__name__)

# A hub that is slow delays three other deployments at most.
_AT_ONCE: Final = 4
_TRANSIENT: Final = Backoff(first_s=1.0, limit_s=60.0)
# Only a person can mend it; their change of the deployment is looked at without a wait.
_PERMANENT: Final = Backoff(first_s=15.0, limit_s=300.0)


class SnapshotController:
    """Keeps a snapshot for each deployment of a hub model. Call `connect()` once, and `lead()` while leading."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        caches: Caches,
        recorder: EventRecorder,
        *,
        hubs: HubSettings,
        problems: LookupProblems,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._lister = Lister(caches)
        self._caches = caches
        self._recorder = recorder
        self._hubs = hubs
        self._problems = problems
        self._grants = TokenGrants(self._lister, hubs)
        self._queue: WorkQueue[str] = WorkQueue(clock)
        self._is_leading = False

    def connect(self) -> None:
        """Register the handlers with the caches."""
        self._caches.specs.on_change(self._spec_changed)
        self._caches.ranks.on_change(self._rank_changed)
        self._caches.preloads.on_change(lambda key: self._add(key.rpartition("/")[2]))
        self._caches.statuses.on_change(self._status_changed)
        self._caches.snapshots.on_change(
            lambda key: self._add(key.removeprefix(keys.SNAPSHOT_PREFIX))
        )

    def _spec_changed(self, key: str) -> None:
        found = object_key(key)
        if found is not None and found.kind == "ModelDeployment":
            self._add(found.name)
        if found is not None and found.kind == "Replica":
            self._add(deployment_name_of(found.name))

    def _rank_changed(self, key: str) -> None:
        self._add(deployment_name_of(keys.replica_of(key)))

    def _status_changed(self, key: str) -> None:
        found = object_key(key)
        if found is not None and found.kind == "Node":
            for preload in self._lister.preloads_on(found.name):
                self._add(preload.deployment)

    def _add(self, name: str) -> None:
        declared = self._lister.declared(name)
        has_work = declared is None or declared.spec.model.hub is not None
        has_work = has_work or self._lister.snapshot(name) is not None
        if self._is_leading and has_work:  # the next leader queues everything
            self._queue.add(name)

    async def lead(self, leadership: Leadership) -> None:
        """Resolve models forever.

        Raises:
            AuthorityLostError: this process leads no longer (in an exception group).

        """
        transport = FencedTransport(self._transport, leadership.guard)
        async with AsyncExitStack() as stack:
            factory = await stack.enter_async_context(self._hubs.open())
            self._is_leading = True
            try:
                for key in self._caches.snapshots.items:
                    self._add(key.removeprefix(keys.SNAPSHOT_PREFIX))
                for deployment in self._lister.declared_deployments():
                    self._add(deployment.name)
                await run_as_leader(
                    self._queue,
                    lambda name: self._reconcile(name, transport, factory),
                    leadership,
                    workers=_AT_ONCE,
                )
            finally:
                self._is_leading = False

    async def _reconcile(
        self, name: str, transport: Transport, factory: HubFactory
    ) -> Requeue | None:
        """Resolve the model of one deployment unless that is done; remove the snapshot of one that has no hub model."""
        deployment, stored = self._lister.declared(name), self._lister.snapshot(name)
        source = None if deployment is None else deployment.spec.model.hub
        if deployment is None or source is None:
            self._problems.forget(name)
            await self._grants.remove(name, transport)
            key = keys.named(keys.SNAPSHOT_PREFIX, name)
            version = self._caches.snapshots.version(key)
            if version:
                guard = ModRevisionGuard(key=key, mod_revision=version)
                await transport.commit([guard], [Delete(key=key)])
            return None
        await self._grants.reconcile(deployment, source, transport)
        is_done = stored is not None and stored.resolves(deployment)
        if is_done or deployment.metadata.deletion_timestamp is not None:
            self._problems.forget(name)
            return None
        try:
            endpoint = self._hubs.endpoint_of(source)
            token = await token_for(transport, endpoint)
            hub = factory(source, token)
            snapshot = await look_up(hub, deployment, endpoint=endpoint, now=self._clock.now())
        except LOOKUP_ERRORS as error:
            return await self._note(deployment, source, error)
        await self._write(snapshot, transport)
        self._problems.forget(name)
        message = f"{source.repo}@{source.revision} is commit {snapshot.commit}"
        await self._recorder.record(_about(deployment), "ModelResolved", message)
        return None

    async def _note(
        self, deployment: ModelDeployment, source: HubReference, error: Exception
    ) -> Requeue:
        reason, message = reason_of(error)
        problem = self._problems.remember(deployment.name, source, reason, message)
        is_transient = isinstance(error, TimeoutError) or (
            isinstance(error, ModelFetchError) and error.is_transient
        )
        if problem.failures == 1:
            log.warning(
                "model not resolved", extra={"deployment": deployment.name, "reason": reason}
            )
            await self._recorder.record(_about(deployment), reason, message, type_="Warning")
        policy = _TRANSIENT if is_transient else _PERMANENT
        after_s = policy.delay_s(problem.failures, jitter=random.random())
        if isinstance(error, HubRateLimitedError):
            after_s = max(after_s, error.retry_after_s)
        return Requeue(after_s=after_s)

    async def _write(self, found: ModelSnapshot, transport: Transport) -> None:
        key = keys.named(keys.SNAPSHOT_PREFIX, found.deployment)
        guard = ModRevisionGuard(key=key, mod_revision=self._caches.snapshots.version(key))
        await transport.commit([guard], [Put(key=key, value=codec.encode(found))])


def _about(deployment: ModelDeployment) -> ObjectReference:
    return ObjectReference(
        kind="ModelDeployment", name=deployment.name, uid=deployment.metadata.uid
    )
