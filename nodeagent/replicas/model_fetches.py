"""The fetches of hub models on this node: one task for each commit, which goes on where an earlier one ended.

A fetch runs beside the control loop; the planner sees its state only. Must not decide whether a model is wanted.
"""

import asyncio
import logging
import random
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal, TypeAlias

from machinery.backoff import Backoff
from machinery.clock import Clock
from machinery.prometheus import Counter, Gauge, Histogram
from models.hub.bandwidth import BandwidthLimit
from models.hub.blob_source import BlobSources
from models.hub.errors import FetchReason, HubRateLimitedError, ModelFetchError
from models.hub.fetcher import FetchRequest, ModelFetcher, ModelPart
from models.hub.file_selection import DEFAULT_PATTERNS
from models.hub.hub_settings import HubFactory, HubSettings
from models.hub.model_hub import ModelHub
from models.hub.progress import FetchMonitor, FetchProgress
from models.model_store.store import ModelStore, StoredModel
from nodeagent.hub_grants import HubGrants
from nodeagent.peers.model_exchange import ModelExchange
from nodeagent.replicas.model_parts import HeadersUnknownError, ModelParts
from nodeagent.replicas.observation import FetchState, NextStart, ObservedFetch
from schemas import duration, sizes
from schemas.deployment import HubReference
from schemas.replica import Replica
from store.errors import StoreError
from store.port import Transport

log = logging.getLogger(__name__)

_TRANSIENT: Final = Backoff(first_s=1.0, limit_s=60.0)
# A person must act: free the disk, accept terms, mend a mirror.
_PERMANENT: Final = Backoff(first_s=20.0, limit_s=300.0)
# Reasons that a token cures, which the reconciler may hand out a moment later.
_TOKEN_REASONS: Final = frozenset({"Unauthorized", "Gated", "NotFound"})
# Each report is a write that wakes all watchers: a step of 5 %, or ten seconds.
_STEP_PERCENT: Final = 5
_STEP_S: Final = 10.0
_LEAST_STEP_S: Final = 2.0
# A small model takes seconds, the largest take hours.
_DURATION_BOUNDS_S: Final = (10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 10800.0)


_FetchKey: TypeAlias = tuple[str, str, frozenset[str] | None]
"""Repository, commit, and the weight files of a rank; None for all of them."""


@dataclass(kw_only=True)
class _Fetch:
    """The files of one commit that are, or were, fetched."""

    source: HubReference
    request: FetchRequest
    deployment: str
    users: set[str] = field(default_factory=set)
    """Replicas and preloads that wait for it."""
    task: asyncio.Task[None] | None = None
    monitor: FetchMonitor
    shown: FetchProgress | None = None
    """The progress that was reported last."""
    shown_at: float = 0.0
    counted_bytes: int = 0
    """Bytes of this attempt that the counter of all bytes has."""
    began_at: float = 0.0
    """The time of the first attempt, by the monotonic clock."""
    received_bytes: int = 0
    """Bytes of all attempts that ended."""
    outcome: str = ""
    """Sentence about a fetch that has succeeded: size, source and duration."""
    failures: int = 0
    reason: str = ""
    message: str = ""
    retry: tuple[float, NextStart] | None = None
    """The next attempt: by the monotonic clock, and for people."""


class ModelFetches:
    """Fetches models into the store of this node. `run()` must run before a fetch can start."""

    def __init__(
        self,
        fetcher: ModelFetcher,
        hubs: HubSettings,
        transport: Transport,
        clock: Clock,
        *,
        parts: ModelParts,
        exchange: ModelExchange | None = None,
    ) -> None:
        """`exchange`: the other agents as sources of files; None: the hub alone."""
        self.exchange: Final = exchange
        self._fetcher = fetcher
        self._hubs = hubs
        self._clock = clock
        self._grants = HubGrants(store=transport, node=parts.node, hubs=hubs)
        self._factory: HubFactory | None = None
        self._group: asyncio.TaskGroup | None = None
        self._parts = parts
        self._requests: dict[str, FetchRequest | None] = {}
        """The needs of each replica, as they were observed last; None while they are not known."""
        self._fetches: dict[_FetchKey, _Fetch] = {}
        self._failures = Counter(
            "fleet_model_fetch_failures_total", "Fetches that failed, by reason.", ("reason",)
        )
        self._fetched = Counter(
            "fleet_model_fetch_bytes_total",
            "Bytes that came from hubs and other agents, by repository.",
            ("repo",),
        )
        self._durations = Histogram(
            "fleet_model_fetch_duration_seconds",
            "Time from the first attempt of a fetch until the model was whole and verified.",
            (),
            bounds=_DURATION_BOUNDS_S,
        )
        self._gauges = self._new_gauges()

    def _new_gauges(self) -> tuple[Gauge, ...]:
        return (
            Gauge(
                "fleet_model_fetch_present_bytes",
                "Bytes on the disk of models that are being fetched.",
                lambda: {name: one.monitor.present_bytes for name, one in self._running()},
                labels=("model",),
            ),
            Gauge(
                "fleet_model_fetch_total_bytes",
                "Bytes of models that are being fetched.",
                lambda: {name: one.monitor.total_bytes for name, one in self._running()},
                labels=("model",),
            ),
            Gauge(
                "fleet_model_fetch_bytes_per_second",
                "Rate of fetches that run, over the last ten seconds.",
                lambda: {
                    name: int(one.monitor.snapshot().bytes_per_s) for name, one in self._running()
                },
                labels=("model",),
            ),
            Gauge(
                "fleet_model_fetch_eta_seconds",
                "Seconds until fetches that run end, at this rate; absent while nothing arrives.",
                self._etas,
                labels=("model",),
            ),
        )

    @property
    def store(self) -> ModelStore:
        return self._fetcher.store

    @property
    def bandwidth(self) -> BandwidthLimit:
        """Return the limit of what this node's fetches receive together."""
        return self._fetcher.bandwidth

    async def run(self) -> None:
        """Run the fetches that are started, forever."""
        async with self._hubs.open() as factory, asyncio.TaskGroup() as group:
            self._factory, self._group = factory, group
            try:
                await asyncio.Event().wait()
            finally:
                self._factory = self._group = None
                for fetch in self._fetches.values():
                    if fetch.task is not None:
                        fetch.task.cancel()

    async def observe(self, replica: Replica) -> ObservedFetch | None:
        """Return the state of the replica's model on this disk; None for a model that no hub has.

        Raises:
            OSError: the disk failed.

        """
        source = replica.spec.model.hub
        if source is None:
            return None
        thread = await asyncio.to_thread(self.store.find, source.repo, source.revision)
        try:
            part = await asyncio.to_thread(self._parts.part_of, replica, thread)
        except HeadersUnknownError:
            self._requests[replica.name] = None
            return ObservedFetch(state=FetchState.NOT_STARTED)
        request = self._requests[replica.name] = _request(source, part)
        return self._state(thread, request)

    async def find(self, source: HubReference) -> ObservedFetch:
        """Return the state of a whole commit on this disk. Raises OSError."""
        thread = await asyncio.to_thread(self.store.find, source.repo, source.revision)
        return self._state(thread, _request(source, None))

    def _state(self, found: StoredModel | None, request: FetchRequest) -> ObservedFetch:
        fetch = self._fetches.get(_key(request))
        if found is not None and request.is_met_by(found):
            outcome = fetch.outcome if fetch is not None else ""
            return ObservedFetch(
                state=FetchState.PRESENT,
                size_bytes=found.size_bytes,
                message=outcome,
                is_partial=found.is_partial,
            )
        if fetch is not None and fetch.task is not None and not fetch.task.done():
            return ObservedFetch(state=FetchState.RUNNING, progress=self._shown_progress(fetch))
        if fetch is None or not fetch.reason:
            return ObservedFetch(state=FetchState.NOT_STARTED)
        return ObservedFetch(
            state=FetchState.FAILED,
            reason=fetch.reason,
            message=fetch.message,
            next_attempt=self._next_attempt(fetch),
        )

    def _shown_progress(self, fetch: _Fetch) -> FetchProgress:
        """Return the progress to report, which changes in steps."""
        now, current = self._clock.monotonic(), fetch.monitor.snapshot()
        since_s, shown = now - fetch.shown_at, fetch.shown
        is_new = (
            shown is None
            or shown.phase != current.phase
            or bool(shown.waiting) != bool(current.waiting)
            or since_s >= _STEP_S
            or (since_s >= _LEAST_STEP_S and current.percent - shown.percent >= _STEP_PERCENT)
        )
        if shown is None or is_new:
            fetch.shown, fetch.shown_at = current, now
            return current
        return shown

    def _next_attempt(self, fetch: _Fetch) -> NextStart | None:
        if fetch.retry is None:
            return None
        at, shown = fetch.retry
        left_s = at - self._clock.monotonic()
        return NextStart(in_s=left_s, at=shown.at) if left_s > 0 else None

    def start(self, replica: Replica) -> None:
        """Start to fetch the replica's model, or wait for the fetch that runs."""
        source = replica.spec.model.hub
        assert source is not None
        request = self._requests.get(replica.name, _request(source, None))
        if request is None:
            return
        if (request.repo, request.commit) != (source.repo, source.revision):
            request = _request(source, None)
        self._want(source, request, user=replica.name, deployment=replica.spec.deployment)

    def want(self, source: HubReference, *, user: str, deployment: str) -> None:
        """Start to fetch a whole commit for a user, until `release`; the token is that of the deployment."""
        self._want(source, _request(source, None), user=user, deployment=deployment)

    def _want(
        self, source: HubReference, request: FetchRequest, *, user: str, deployment: str
    ) -> None:
        key = _key(request)
        self._leave(user, {other for other in self._fetches if other != key})
        fetch = self._fetches.get(key)
        if fetch is None:
            fetch = _Fetch(
                source=source,
                request=request,
                deployment=deployment,
                monitor=FetchMonitor(self._clock),
                began_at=self._clock.monotonic(),
            )
            self._fetches[key] = fetch
        fetch.users.add(user)
        is_running = fetch.task is not None and not fetch.task.done()
        if is_running or self._group is None:
            return
        # Replicas of several deployments may want one commit: the token is that of the one that asks now.
        fetch.source, fetch.deployment = source, deployment
        fetch.monitor, fetch.counted_bytes = FetchMonitor(self._clock), 0
        fetch.task = self._group.create_task(self._fetch(fetch))
        log.info("fetching a model", extra={"model": source.folder, "for": user})

    def release(self, replica: str) -> None:
        """Forget that a replica waits; a fetch for which none waits ends, and what it brought stays on the disk."""
        self._requests.pop(replica, None)
        self._leave(replica, set(self._fetches))

    def _leave(self, replica: str, left: AbstractSet[_FetchKey]) -> None:
        """Take the replica from the users of fetches."""
        for key in left:
            fetch = self._fetches[key]
            fetch.users.discard(replica)
            if not fetch.users:
                del self._fetches[key]
                if fetch.task is not None and not fetch.task.done():
                    fetch.task.cancel()
                    extra = {"model": fetch.source.folder, "replica": replica}
                    log.info("fetch cancelled", extra=extra)

    async def record_load(self, replica: Replica) -> bool:
        """Record that an engine loads the replica's model now; False if a collection has just removed it."""
        source = replica.spec.model.hub
        if source is None:
            return True
        return await asyncio.to_thread(self.store.record_load, source.folder)

    async def _fetch(self, fetch: _Fetch) -> None:
        """Fetch one commit, and keep the failure for the planner."""
        source, factory = fetch.source, self._factory
        assert factory is not None
        token = ""
        try:
            token = await self._grants.token(source, fetch.deployment)
            hub = factory(source, token)
            async with self._sources(hub, fetch) as sources:
                await self._fetcher.fetch(
                    hub, fetch.request, monitor=fetch.monitor, sources=sources
                )
        except (ModelFetchError, StoreError, OSError, ValueError) as error:
            self._note(fetch, error, has_token=bool(token))
        else:
            fetch.failures, fetch.reason, fetch.message, fetch.retry = 0, "", "", None
            self._note_success(fetch)
        finally:
            self._count(fetch)
            fetch.received_bytes += fetch.monitor.fetched_bytes

    def _note_success(self, fetch: _Fetch) -> None:
        took_s = self._clock.monotonic() - fetch.began_at
        received = fetch.received_bytes + fetch.monitor.fetched_bytes
        if received:  # else another fetch on this Mac brought it
            total, source = sizes.show(fetch.monitor.total_bytes), fetch.monitor.source
            fetch.outcome = (
                f"{total} in {duration.show(took_s)}, {sizes.show(received)} of it from {source}"
            )
            self._durations.observe(took_s)
        log.info(
            "model fetched",
            extra={"model": fetch.source.folder, "bytes": received, "duration_s": round(took_s)},
        )

    def _count(self, fetch: _Fetch) -> None:
        """Add the bytes that arrived since the last time to the counter."""
        now = fetch.monitor.fetched_bytes
        self._fetched.add(fetch.source.repo, count=now - fetch.counted_bytes)
        fetch.counted_bytes = now

    def _sources(
        self, hub: ModelHub, fetch: _Fetch
    ) -> AbstractAsyncContextManager[BlobSources | None]:
        """Return the sources of the files; None of it means the hub alone."""
        if self.exchange is None:
            return nullcontext()
        source = fetch.source
        return self.exchange.sources(hub, source.repo, source.revision, fetch.monitor)

    def _note(self, fetch: _Fetch, error: Exception, *, has_token: bool) -> None:
        fetch.failures += 1
        fetch.reason, fetch.message = _reason_of(error), str(error)
        is_transient = isinstance(error, StoreError) or (
            isinstance(error, ModelFetchError) and error.is_transient
        )
        may_get_token = not has_token and fetch.reason in _TOKEN_REASONS
        policy = _TRANSIENT if is_transient or may_get_token else _PERMANENT
        after_s = policy.delay_s(fetch.failures, jitter=random.random())
        if isinstance(error, HubRateLimitedError):
            after_s = max(after_s, error.retry_after_s)
        at = self._clock.now() + timedelta(seconds=after_s)
        fetch.retry = (self._clock.monotonic() + after_s, NextStart(in_s=after_s, at=at))
        self._failures.add(fetch.reason)
        log.warning(
            "model not fetched",
            extra={"model": fetch.source.folder, "reason": fetch.reason, "retry_s": round(after_s)},
        )

    @property
    def is_busy(self) -> bool:
        """True if a fetch runs."""
        return next(self._running(), None) is not None

    def _running(self) -> Iterator[tuple[str, _Fetch]]:
        for fetch in self._fetches.values():
            if fetch.task is not None and not fetch.task.done():
                yield fetch.source.folder, fetch

    def _etas(self) -> dict[str, int]:
        found = {name: one.monitor.snapshot().eta_s for name, one in self._running()}
        return {name: round(eta_s) for name, eta_s in found.items() if eta_s is not None}

    def lines(self) -> Iterator[str]:
        """Yield the metrics of the fetches in Prometheus' text format."""
        for _, fetch in self._running():
            self._count(fetch)
        for counted in (self._failures, self._fetched, self._durations):
            yield from counted.lines()
        for gauge in self._gauges:
            yield from gauge.lines()
        if self.exchange is not None:
            yield from self.exchange.lines()


def _request(source: HubReference, part: ModelPart | None) -> FetchRequest:
    patterns = source.files or DEFAULT_PATTERNS
    return FetchRequest(repo=source.repo, commit=source.revision, patterns=patterns, part=part)


def _key(request: FetchRequest) -> _FetchKey:
    part = request.part
    return request.repo, request.commit, None if part is None else part.files


LocalReason: TypeAlias = Literal["StoreUnreachable", "DiskFailed"]
"""Reasons of failures on the Mac itself."""


def _reason_of(error: Exception) -> FetchReason | LocalReason:
    match error:
        case ModelFetchError():
            return error.reason
        case StoreError():
            return "StoreUnreachable"
        case OSError():
            return "DiskFailed"
        case _:
            return "ListingRefused"
