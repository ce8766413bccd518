"""Metrics of the reconciler: leadership, reconciles by kind and result, actions and writes, and what is not placed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from machinery.clock import Clock
from machinery.prometheus import Counter, Gauge, Histogram, MetricFamily, build_info
from schemas.deployment import ModelDeploymentStatus
from schemas.meta import Status
from store import keys
from store.errors import ConflictError, StoreError

_PREFIX: Final = "fleet_reconciler_"
QUEUE_DEPTH: Final = f"{_PREFIX}queue_depth"
_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class ReconcilerMetrics:
    """Counters of one reconciler; `bind` connects the figures that other objects keep."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.is_leader = False
        self.reconciles = Histogram(
            f"{_PREFIX}reconcile_seconds",
            "Duration of one pass of the control loop over one object.",
            ("kind",),
            bounds=_BOUNDS_S,
        )
        self.results = Counter(
            f"{_PREFIX}reconciles_total",
            "Passes by result: ok, conflict (another process wrote first), store (it failed) or error (a defect).",
            ("kind", "result"),
        )
        self.actions = Counter(
            f"{_PREFIX}actions_total", "Actions of plans that were carried out.", ("action",)
        )
        self.writes = Counter(f"{_PREFIX}writes_total", "Transactions that were written.")
        self.conflicts = Counter(
            f"{_PREFIX}conflicts_total",
            "Transactions that were refused because an object had changed.",
        )
        self._bound: tuple[MetricFamily, ...] = ()

    def bind(
        self,
        *,
        queue_depth: Callable[[], int],
        statuses: Callable[[], Mapping[str, Status]],
        lag_s: Callable[[], float],
    ) -> None:
        """Set what is read at a scrape. `lag_s` is the time since the slowest informer has heard from the store."""
        self._bound = (
            Gauge(QUEUE_DEPTH, "Objects that wait for the control loop.", queue_depth),
            Gauge(
                f"{_PREFIX}watch_lag_seconds",
                "Seconds since the store last sent anything to the slowest of the caches.",
                lambda: round(lag_s(), 3),
            ),
            Gauge(
                f"{_PREFIX}replicas_unplaced",
                "Replicas that should exist and fit on no node.",
                lambda: unplaced_replicas(statuses()),
                labels=("deployment",),
            ),
        )

    @contextmanager
    def reconciling(self, kind: str) -> Iterator[None]:
        """Measure one pass over one object."""
        began_s, result = self._clock.monotonic(), "error"
        try:
            yield
            result = "ok"
        except ConflictError:
            result = "conflict"
            raise
        except StoreError:
            result = "store"
            raise
        finally:
            self.reconciles.observe(self._clock.monotonic() - began_s, kind)
            self.results.add(kind, result)

    def lines(self) -> Iterator[str]:
        """Yield the metrics in Prometheus text format."""
        parts: tuple[MetricFamily, ...] = (
            build_info("reconciler"),
            Gauge(f"{_PREFIX}leader", "Whether this reconciler leads.", lambda: self.is_leader),
            self.reconciles,
            self.results,
            self.actions,
            self.writes,
            self.conflicts,
            *self._bound,
        )
        for part in parts:
            yield from part.lines()


def unplaced_replicas(statuses: Mapping[str, Status]) -> dict[str, float]:
    """Return the number of replicas that each deployment lacks, 0 included. `statuses` are by key. Pure."""
    return {
        keys.kind_and_name(key)[1]: float(max(0, one.desired_replicas - one.replicas))
        for key, one in statuses.items()
        if isinstance(one, ModelDeploymentStatus)
    }
