"""Metrics of a process's use of the store, and the transport that takes them. No global state.

metrics = StoreMetrics(clock)
transport = MeasuredTransport(connect(address), metrics)
render([metrics])   # fleet_store_*
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Final

from machinery.clock import Clock
from machinery.prometheus import Counter, Gauge, Histogram, MetricFamily
from store.errors import (
    CompactedError,
    ConflictError,
    PermissionDeniedError,
    StoreError,
    UnavailableError,
)
from store.port import Guard, KeyValue, Listing, Operation, ServerStatus, Transport, WatchBatch

_PREFIX: Final = "fleet_store_"
# A write takes as long as the disk's fsync; calls end after some seconds.
_BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_REASONS: Final[tuple[tuple[type[StoreError], str], ...]] = (
    (ConflictError, "conflict"),
    (CompactedError, "compacted"),
    (PermissionDeniedError, "denied"),
    (UnavailableError, "unavailable"),
)


class StoreMetrics:
    """Calls to the store by their duration and failure, watches, and the age of the last answer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard_s: float | None = None
        self.revision = 0
        """The newest revision that was seen."""
        self.watches = 0
        """The number of open watches."""
        self.calls = Histogram(
            f"{_PREFIX}request_seconds",
            "Duration of calls to the store, failed ones included; of a listing, until its last page.",
            ("operation",),
            bounds=_BOUNDS_S,
        )
        self.errors = Counter(
            f"{_PREFIX}errors_total",
            "Calls and watches that failed; a conflict means that another process wrote first.",
            ("operation", "reason"),
        )

    def lines(self) -> Iterator[str]:
        """Yield the metrics in Prometheus text format."""
        for part in self._parts():
            yield from part.lines()

    def _parts(self) -> Iterator[MetricFamily]:
        yield self.calls
        yield self.errors
        yield Gauge(f"{_PREFIX}watches", "Open watches.", lambda: self.watches)
        help_ = "Newest revision of the store that was seen."
        yield Gauge(f"{_PREFIX}revision", help_, lambda: self.revision)
        age_s = self.staleness_s()
        if age_s is not None:
            help_ = "Seconds since the store last sent anything."
            yield Gauge(f"{_PREFIX}staleness_seconds", help_, lambda: round(age_s, 3))

    def staleness_s(self) -> float | None:
        """Return the seconds since the store last sent anything; None before the first time."""
        return None if self._heard_s is None else self._clock.monotonic() - self._heard_s

    def heard(self, revision: int = 0) -> None:
        """Record that the store has sent something; a revision if it told one."""
        self._heard_s = self._clock.monotonic()
        self.revision = max(self.revision, revision)

    @contextmanager
    def measure(self, operation: str) -> Iterator[None]:
        """Measure one call."""
        began_s = self._clock.monotonic()
        try:
            yield
        except StoreError as error:
            if not isinstance(error, UnavailableError):
                self.heard()
            self.count_error(operation, error)
            raise
        else:
            self.heard()
        finally:
            self.calls.observe(self._clock.monotonic() - began_s, operation)

    def count_error(self, operation: str, error: StoreError) -> None:
        """Count a failure by its reason."""
        reasons = (reason for kind, reason in _REASONS if isinstance(error, kind))
        self.errors.add(operation, next(reasons, "other"))


class MeasuredTransport:
    """A transport that takes the metrics of another one."""

    def __init__(self, transport: Transport, metrics: StoreMetrics) -> None:
        self.inner = transport
        """The measured transport."""
        self._metrics = metrics

    async def get(self, key: str) -> KeyValue | None:
        """As the measured transport."""
        with self._metrics.measure("get"):
            return await self.inner.get(key)

    async def list(self, prefix: str) -> Listing:
        """As the measured transport."""
        with self._metrics.measure("list"):
            listing = await self.inner.list(prefix)
        self._metrics.heard(listing.revision)
        return listing

    async def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        """As the measured transport."""
        with self._metrics.measure("list"):
            async with aclosing(self.inner.pages(prefix)) as pages:
                async for page in pages:
                    self._metrics.heard(page.revision)
                    yield page

    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        """As the measured transport."""
        with self._metrics.measure("commit"):
            revision = await self.inner.commit(guards, operations)
        self._metrics.heard(revision)
        return revision

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[WatchBatch]:
        """As the measured transport."""
        self._metrics.watches += 1
        try:
            watch = self.inner.watch(prefix, after_revision=after_revision)
            async with aclosing(watch):
                async for batch in watch:
                    self._metrics.heard(batch.revision)
                    yield batch
        except StoreError as error:
            self._metrics.count_error("watch", error)
            raise
        finally:
            self._metrics.watches -= 1

    async def grant(self, ttl_s: int) -> int:
        """As the measured transport."""
        with self._metrics.measure("grant"):
            return await self.inner.grant(ttl_s)

    async def keep_alive(self, lease: int) -> int:
        """As the measured transport."""
        with self._metrics.measure("keep_alive"):
            return await self.inner.keep_alive(lease)

    async def revoke(self, lease: int) -> None:
        """As the measured transport."""
        with self._metrics.measure("revoke"):
            await self.inner.revoke(lease)

    async def status(self) -> ServerStatus:
        """As the measured transport."""
        with self._metrics.measure("status"):
            server_status = await self.inner.status()
        self._metrics.heard(server_status.revision)
        return server_status

    async def close(self) -> None:
        """As the measured transport."""
        await self.inner.close()
