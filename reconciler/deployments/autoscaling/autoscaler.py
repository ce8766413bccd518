"""The autoscaler: how many replicas a deployment should have for its load. Reads no clock.

Decides as Kubernetes' HorizontalPodAutoscaler does: a tolerance of a tenth, and windows that delay changes.
"""

import math
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Literal, TypeAlias

from reconciler.deployments.autoscaling.schedule import ReplicaBounds, bounds_at
from reconciler.deployments.demand.gateway_metrics import Demand
from reconciler.placement import swap
from schemas import duration, quantity
from schemas.autoscaling import Autoscaling
from schemas.deployment import (
    ModelDeployment,
    ModelDeploymentSpec,
    ModelDeploymentStatus,
)

ScalingReason: TypeAlias = Literal[
    "Fixed",
    "Steady",
    "ScaledUp",
    "ScaledDown",
    "Stabilizing",
    "Idle",
    "GaveWay",
    "Asleep",
    "Unloaded",
    "Woken",
    "AtMinimum",
    "AtMaximum",
    "DemandUnknown",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """The number of replicas that there should be, and the reason."""

    desired: int
    reason: ScalingReason
    """Reason code of the condition Scaling."""
    message: str
    """Message of the condition; it contains figures only if the number changes."""
    requeue_after_s: float | None = None
    """Seconds until the decision may change by itself; None if only changes matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingInputs:
    """The inputs of one decision."""

    current: int
    demand: Demand | None
    target: int
    """Requests that one replica should serve at once."""
    bounds: ReplicaBounds
    lowest: int
    """The lowest recommendation within the window for scaling up."""
    highest: int
    """The highest recommendation within the window for scaling down."""
    is_idle: bool
    """True if there was certainly no request for the idle time."""


def recommended_replicas(demand: Demand | None, current: int, target: int) -> int:
    """Return how many replicas the load needs now, without bounds.

    A difference of a tenth from the target is ignored, as in Kubernetes. From zero it is one: whether more are needed
    is known once one serves. With incomplete demand the number never decreases.
    """
    if demand is None:
        return current
    if current == 0:
        return min(demand.requests, 1)
    expected = current * target
    if abs(demand.requests - expected) * 10 <= expected:
        return current
    needed = -(-demand.requests // target)
    return needed if demand.is_complete else max(needed, current)


def decide(inputs: ScalingInputs, recommended: int) -> ScalingDecision:
    """Return how many replicas there should be; `recommended` is the result of `recommended_replicas`."""
    low, high, current = inputs.bounds.low, inputs.bounds.high, inputs.current
    is_woken = current == 0 and recommended > 0
    stable = recommended if is_woken else min(max(current, inputs.lowest), inputs.highest)
    may_be_zero = low == 0 and (current == 0 or inputs.is_idle)
    floor = low if may_be_zero else max(low, 1)
    desired = min(max(stable, floor), high)
    reason, message = _explain(inputs, desired, recommended, stable)
    return ScalingDecision(desired=desired, reason=reason, message=message)


def _explain(
    inputs: ScalingInputs, desired: int, recommended: int, stable: int
) -> tuple[ScalingReason, str]:
    if desired == inputs.bounds.high and stable > desired:
        return (
            "AtMaximum",
            f"the load needs more, but {inputs.bounds.high}{_window(inputs)} is the maximum",
        )
    if desired == inputs.bounds.low and stable < desired and desired >= inputs.current:
        return "AtMinimum", f"{inputs.bounds.low}{_window(inputs)} is the minimum"
    if desired != inputs.current:
        if inputs.current == 0:
            return "Woken", "a request waits for a replica"
        if desired == 0:
            return "Idle", "there was no request for idleTime"
        requests = inputs.demand.requests if inputs.demand is not None else 0
        load = f"{requests} requests, and a replica should serve {inputs.target}"
        return "ScaledUp" if desired > inputs.current else "ScaledDown", load
    return _explain_kept(inputs, desired, recommended, stable)


def _explain_kept(
    inputs: ScalingInputs, desired: int, recommended: int, stable: int
) -> tuple[ScalingReason, str]:
    if inputs.demand is None or not inputs.demand.is_complete:
        return "DemandUnknown", _unknown_text(inputs.demand)
    if desired == 0:
        return "Idle", "the first request starts a replica"
    if recommended != desired and stable == desired:
        more = "more" if recommended > desired else "fewer"
        return "Stabilizing", f"the load needs {more} replicas, but not for long enough yet"
    return "Steady", "the load fits the replicas"


def _window(inputs: ScalingInputs) -> str:
    if inputs.bounds.window is None:
        return ""
    return f" (autoscaling.schedule[{inputs.bounds.window}] is open)"


def _unknown_text(demand: Demand | None) -> str:
    if demand is None:
        return "the gateways have not been scraped yet, so no replica is removed"
    if demand.silent:
        return f"no answer from {', '.join(demand.silent[:3])}, so no replica is removed"
    return "no gateway is registered, so no replica is removed"


# With more changes in a window, neighbours are merged, so that an unsteady load costs no memory.
_LIMIT = 128


@dataclass(frozen=True, slots=True)
class _HistoryEntry:
    """The recommendation was between `low` and `high` from `since_s` until the next entry."""

    since_s: float
    low: int
    high: int


class ReplicaHistory:
    """The recommendations over time, as a step function.

    It begins with the current number, so that nothing changes before a window is over.
    """

    def __init__(self, current: int, now_s: float) -> None:
        self._entries = [_HistoryEntry(now_s, current, current)]

    def add(self, recommended: int, now_s: float) -> None:
        """Record the recommendation that holds from now on."""
        last = self._entries[-1]
        if (last.low, last.high) != (recommended, recommended):
            self._entries.append(_HistoryEntry(now_s, recommended, recommended))
        if len(self._entries) > _LIMIT:
            # Merge the two neighbours that are nearest in time; the result covers both ranges.
            entries = self._entries
            gaps = [after.since_s - e.since_s for e, after in pairwise(entries)]
            # Never the last entry, which still holds.
            at = min(range(len(gaps) - 1), key=lambda i: gaps[i])
            entry, other = entries[at], entries[at + 1]
            entries[at : at + 2] = [
                _HistoryEntry(entry.since_s, min(entry.low, other.low), max(entry.high, other.high))
            ]

    def trim(self, window_s: float, now_s: float) -> None:
        """Drop entries that are older than a window."""
        entries, first = self._entries, 0
        while first + 1 < len(entries) and entries[first + 1].since_s <= now_s - window_s:
            first += 1
        del entries[:first]

    def lowest(self, window_s: float, now_s: float) -> int:
        """Return the lowest recommendation in the window."""
        return min(entry.low for entry in self._within(window_s, now_s))

    def highest(self, window_s: float, now_s: float) -> int:
        """Return the highest recommendation in the window."""
        return max(entry.high for entry in self._within(window_s, now_s))

    def changes_in_s(self, window_s: float, now_s: float) -> float | None:
        """Return the seconds until the oldest entry leaves the window; None if it never does."""
        entries = self._within(window_s, now_s)
        return entries[1].since_s + window_s - now_s if len(entries) > 1 else None

    def _within(self, window_s: float, now_s: float) -> list[_HistoryEntry]:
        """Return the entries that held in the window; the last one always does."""
        oldest_s = now_s - window_s
        entries = [e for e, after in pairwise(self._entries) if after.since_s > oldest_s]
        return [*entries, self._entries[-1]]


# Requests of one minute are one use: a burst does not keep a model longer than steady work does.
_USE_S = 60.0
# A timer that fires slightly early would find no change, and fire again.
_SLACK_S = 0.05


class Autoscaler:
    """Decides the number of replicas of every deployment.

    A new leader's history is empty, so it cannot scale down at once.
    """

    def __init__(self) -> None:
        self.histories: dict[str, _DeploymentHistory] = {}

    def desired(
        self,
        deployment: ModelDeployment,
        status: ModelDeploymentStatus | None,
        demand: Demand | None,
        now: datetime,
        now_s: float,
    ) -> ScalingDecision:
        """Return how many replicas there should be; `demand` is None until it is known."""
        spec, name = deployment.spec, deployment.metadata.name
        if spec.autoscaling is None:
            self.histories.pop(name, None)
            return ScalingDecision(
                desired=spec.replicas, reason="Fixed", message="set by spec.replicas"
            )
        # Before the first status there is no earlier number.
        is_begun = status is not None and status.template != ""
        current = status.desired_replicas if status is not None and is_begun else spec.replicas
        own = self.histories.get(name)
        if own is None:
            bounds = bounds_at(spec.autoscaling, now)
            own = _DeploymentHistory(
                spec.autoscaling, bounds, now, ReplicaHistory(current, now_s), now_s
            )
            self.histories[name] = own
        own.record(spec.autoscaling, demand, now, now_s)
        target = target_requests(spec, status)
        return own.decision(target, current, demand, now, now_s)

    def after_unload(self, name: str, decided: ScalingDecision) -> ScalingDecision:
        """Return the decision for a deployment that an operator unloads: no replica, until a request comes."""
        entry = self.histories.get(name)
        if not decided.desired or entry is None or entry.bounds.low > 0:
            return decided
        return replace(decided, desired=0, reason="Unloaded", message="a client unloaded the model")

    def after_swap(self, name: str, decided: ScalingDecision, *, remaining: int) -> ScalingDecision:
        """Return the decision for a deployment whose idle replicas gave way: it stays at the remaining ones until a request comes."""
        entry = self.histories.get(name)
        if decided.desired <= remaining or entry is None or entry.bounds.low > remaining:
            return decided
        message = "idle replicas gave way to a model for which requests wait"
        return replace(decided, desired=remaining, reason="GaveWay", message=message)

    def awaited(self) -> list[str]:
        """Return the deployments for which requests wait at gateways, the longest wait first."""
        waits = {
            name: entry.waits_since_s
            for name, entry in self.histories.items()
            if entry.waits_since_s is not None
        }
        return sorted(waits, key=lambda name: (waits[name], name))

    def swappable(self) -> list[str]:
        """Return the deployments whose idle replicas may give way."""
        return [
            name
            for name, entry in self.histories.items()
            if entry.autoscaling.swap == "Allowed" and entry.bounds.low == 0
        ]

    def use(self, name: str, now_s: float) -> tuple[float, float]:
        """Return a deployment's minutes with requests, older ones counted less, and the seconds since the last."""
        entry = self.histories[name]
        return entry.uses_at(now_s), now_s - entry.busy_s


def target_requests(spec: ModelDeploymentSpec, status: ModelDeploymentStatus | None) -> int:
    """Return how many requests one replica should serve at once, with room for a burst."""
    given = spec.autoscaling.target_requests if spec.autoscaling is not None else None
    reported = 0 if status is None else status.concurrency
    return given or max(1, quantity.requests_at_once(spec.concurrency, reported) * 3 // 4)


@dataclass(slots=True)
class _DeploymentHistory:
    """The history of one deployment."""

    autoscaling: Autoscaling
    bounds: ReplicaBounds
    bounds_of: datetime
    history: ReplicaHistory
    busy_s: float
    """The last time with a request, or with incomplete demand."""
    finished: int = 0
    waits_since_s: float | None = None
    """Since when requests wait at gateways; None if none does."""
    uses: float = 0.0
    used_s: float = -math.inf
    """The last minute with a request began then."""

    def uses_at(self, now_s: float) -> float:
        """Return the minutes with requests; one of an hour ago counts half."""
        return self.uses * math.exp2((self.used_s - now_s) / swap.USES_HALF_LIFE_S)

    def record(
        self, autoscaling: Autoscaling, demand: Demand | None, now: datetime, now_s: float
    ) -> None:
        """Record the demand and the bounds of now."""
        is_over = self.bounds.until is not None and now >= self.bounds.until
        # Cron expressions are slow to evaluate, and nothing changes between two of their times.
        if autoscaling != self.autoscaling or is_over or now < self.bounds_of:
            self.autoscaling = autoscaling
            self.bounds, self.bounds_of = bounds_at(autoscaling, now), now
        if demand is None or not demand.is_complete or demand.requests:
            self.busy_s = now_s
        if demand is None:
            return
        if demand.requests or demand.finished != self.finished:
            self.finished, self.busy_s = demand.finished, now_s
            if now_s - self.used_s >= _USE_S:
                self.uses, self.used_s = self.uses_at(now_s) + 1, now_s
        if not demand.waiting:
            self.waits_since_s = None
        elif self.waits_since_s is None:
            self.waits_since_s = now_s

    def decision(
        self,
        target: int,
        current: int,
        demand: Demand | None,
        now: datetime,
        now_s: float,
    ) -> ScalingDecision:
        """Decide, and compute when the decision could change by itself."""
        up_s = duration.parse(self.autoscaling.scale_up_stabilization)
        down_s = duration.parse(self.autoscaling.scale_down_stabilization)
        recommended = recommended_replicas(demand, current, target)
        self.history.add(recommended, now_s)
        self.history.trim(max(up_s, down_s), now_s)
        idle_left_s = self.busy_s + duration.parse(self.autoscaling.idle_time) - now_s
        inputs = ScalingInputs(
            current=current,
            demand=demand,
            target=target,
            bounds=self.bounds,
            lowest=self.history.lowest(up_s, now_s),
            highest=self.history.highest(down_s, now_s),
            is_idle=idle_left_s <= 0,
        )
        decided = decide(inputs, recommended)
        least = max(self.bounds.low, 1)
        delays_s = [
            self.history.changes_in_s(up_s, now_s) if recommended > decided.desired else None,
            self.history.changes_in_s(down_s, now_s)
            if max(recommended, least) < decided.desired
            else None,
            idle_left_s if self.bounds.low == 0 and decided.desired > 0 else None,
            (self.bounds.until - now).total_seconds() if self.bounds.until is not None else None,
        ]
        soonest_s = min((s for s in delays_s if s is not None and s > 0), default=None)
        return replace(decided, requeue_after_s=soonest_s and soonest_s + _SLACK_S)
