"""How many replicas a load asks for, as Kubernetes' HorizontalPodAutoscaler would say. Pure.

How many replicas would have been of use, as far back as a stabilisation window looks. Reads no clock.

Remembers what it takes to decide about every deployment's number of replicas. Reads no clock.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Literal, TypeAlias

from reconciler.autoscaling.schedule import ReplicaBounds, bounds_at
from reconciler.demand.gateway_metrics import Demand
from schemas import duration
from schemas.autoscaling import Autoscaling
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelDeploymentStatus

ScalingReason: TypeAlias = Literal[
    "Fixed",
    "Steady",
    "ScaledUp",
    "ScaledDown",
    "Stabilizing",
    "Idle",
    "Woken",
    "AtMinimum",
    "AtMaximum",
    "DemandUnknown",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """How many replicas there should be, and why."""

    desired: int
    reason: ScalingReason
    """For machines."""
    message: str
    """For people; figures are in it only if the number changes."""
    requeue_after_s: float | None = None
    """When to ask again though nothing changed; None if only changes matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingInputs:
    """Everything that one decision is made from."""

    current: int
    demand: Demand | None
    target: int
    """Requests that one replica should have."""
    bounds: ReplicaBounds
    lowest: int
    """The least that was of use within the window for scaling up."""
    highest: int
    """The most that was of use within the window for scaling down."""
    is_idle: bool
    """Whether there is known to have been no request for the idle time."""


def recommended_replicas(demand: Demand | None, current: int, target: int) -> int:
    """Return how many replicas would be of use now, whatever the bounds.

    A tenth more or less than the target is left alone, as in Kubernetes. From none it is one: whether
    it takes more is seen once one can answer. Who does not know takes nothing away.
    """
    if demand is None:
        return current
    if current == 0:
        return min(demand.requests, 1)
    usual = current * target
    if abs(demand.requests - usual) * 10 <= usual:
        return current
    wanted = -(-demand.requests // target)
    return wanted if demand.is_complete else max(wanted, current)


def decide(at: ScalingInputs, wanted: int) -> ScalingDecision:
    """Return how many replicas there should be; `wanted` is what `recommended` says now."""
    low, high, current = at.bounds.low, at.bounds.high, at.current
    is_woken = current == 0 and wanted > 0
    stable = wanted if is_woken else min(max(current, at.lowest), at.highest)
    may_be_zero = low == 0 and (current == 0 or at.is_idle)
    floor = low if may_be_zero else max(low, 1)
    desired = min(max(stable, floor), high)
    reason, message = _why(at, desired, wanted, stable)
    return ScalingDecision(desired=desired, reason=reason, message=message)


def _why(at: ScalingInputs, desired: int, wanted: int, stable: int) -> tuple[ScalingReason, str]:
    if desired == at.bounds.high and stable > desired:
        return "AtMaximum", f"more would be of use, but {at.bounds.high}{_window(at)} is the most"
    if desired == at.bounds.low and stable < desired and desired >= at.current:
        return "AtMinimum", f"{at.bounds.low}{_window(at)} is the least"
    if desired != at.current:
        return _moved(at, desired)
    return _kept(at, desired, wanted, stable)


def _kept(at: ScalingInputs, desired: int, wanted: int, stable: int) -> tuple[ScalingReason, str]:
    if at.demand is None or not at.demand.is_complete:
        return "DemandUnknown", _unknown(at.demand)
    if desired == 0:
        return "Idle", "the first request brings a replica back"
    if wanted != desired and stable == desired:
        more = "more" if wanted > desired else "fewer"
        return "Stabilizing", f"{more} would do, but not for long enough yet"
    return "Steady", "the load fits the replicas"


def _moved(at: ScalingInputs, desired: int) -> tuple[ScalingReason, str]:
    if at.current == 0:
        return "Woken", "a request waits for a replica"
    if desired == 0:
        return "Idle", "there was no request for idleTime"
    requests = at.demand.requests if at.demand is not None else 0
    load = f"{requests} requests, and a replica should have {at.target}"
    return "ScaledUp" if desired > at.current else "ScaledDown", load


def _window(at: ScalingInputs) -> str:
    if at.bounds.window is None:
        return ""
    return f" (autoscaling.schedule[{at.bounds.window}] is open)"


def _unknown(demand: Demand | None) -> str:
    if demand is None:
        return "the gateways have not been asked yet, so no replica is taken away"
    if demand.silent:
        return f"no word from {', '.join(demand.silent[:3])}, so no replica is taken away"
    return "no gateway is registered, so no replica is taken away"


# Beyond so many changes within a window neighbours are merged, so that a nervous load costs no memory.
_LIMIT = 128


@dataclass(frozen=True, slots=True)
class _HistoryEntry:
    """From `since_s` to the next entry it was between `low` and `high`."""

    since_s: float
    low: int
    high: int


class ReplicaHistory:
    """A step function of time. Begins with what was there, so that nothing changes before its window."""

    def __init__(self, current: int, now_s: float) -> None:
        self._entries = [_HistoryEntry(now_s, current, current)]

    def add(self, wanted: int, now_s: float) -> None:
        """Note that so many would be of use from now on."""
        last = self._entries[-1]
        if (last.low, last.high) != (wanted, wanted):
            self._entries.append(_HistoryEntry(now_s, wanted, wanted))
        if len(self._entries) > _LIMIT:
            self._merge()

    def trim(self, window_s: float, now_s: float) -> None:
        """Forget what no window of this length sees."""
        entries, first = self._entries, 0
        while first + 1 < len(entries) and entries[first + 1].since_s <= now_s - window_s:
            first += 1
        del entries[:first]

    def lowest(self, window_s: float, now_s: float) -> int:
        """Return the least that was of use at any moment of the window."""
        return min(entry.low for entry in self._within(window_s, now_s))

    def highest(self, window_s: float, now_s: float) -> int:
        """Return the most that was of use at any moment of the window."""
        return max(entry.high for entry in self._within(window_s, now_s))

    def changes_in_s(self, window_s: float, now_s: float) -> float | None:
        """Return after how many seconds the oldest entry leaves the window; None if it never does."""
        left = self._within(window_s, now_s)
        return left[1].since_s + window_s - now_s if len(left) > 1 else None

    def _within(self, window_s: float, now_s: float) -> list[_HistoryEntry]:
        """Return the entries that held at some moment of the window; the last one always does."""
        oldest_s = now_s - window_s
        seen = [e for e, after in pairwise(self._entries) if after.since_s > oldest_s]
        return [*seen, self._entries[-1]]

    def _merge(self) -> None:
        """Make one of the two neighbours that are nearest in time; it covers what both said."""
        entries = self._entries
        gaps = [after.since_s - e.since_s for e, after in pairwise(entries)]
        # Never the last, which goes on.
        at = min(range(len(gaps) - 1), key=lambda i: gaps[i])
        one, other = entries[at], entries[at + 1]
        entries[at : at + 2] = [
            _HistoryEntry(one.since_s, min(one.low, other.low), max(one.high, other.high))
        ]


# A timer that fires a little early would find nothing changed, and fire again.
_SLACK_S = 0.05


class Autoscaler:
    """One for a leader's time: a new leader begins with nothing, and so cannot scale down at once."""

    def __init__(self) -> None:
        self._memories: dict[str, _Memory] = {}

    def desired(
        self,
        deployment: ModelDeployment,
        status: ModelDeploymentStatus | None,
        demand: Demand | None,
        now: datetime,
        now_s: float,
    ) -> ScalingDecision:
        """Return how many replicas there should be; `demand` is None as long as nobody knows."""
        spec, name = deployment.spec, deployment.metadata.name
        if spec.autoscaling is None:
            self.forget(name)
            return ScalingDecision(
                desired=spec.replicas, reason="Fixed", message="spec.replicas says so"
            )
        # Until the deployment was looked at once there is no number to go on from.
        is_begun = status is not None and status.template != ""
        current = status.desired_replicas if status is not None and is_begun else spec.replicas
        memory = self._memories.get(name)
        if memory is None:
            bounds = bounds_at(spec.autoscaling, now)
            memory = _Memory(spec.autoscaling, bounds, now, ReplicaHistory(current, now_s), now_s)
            self._memories[name] = memory
        memory.look(spec.autoscaling, demand, now, now_s)
        return memory.decision(spec, current, demand, now, now_s)

    def forget(self, name: str) -> None:
        """Remember nothing of a deployment that is gone."""
        self._memories.pop(name, None)


def target_requests(spec: ModelDeploymentSpec) -> int:
    """Return how many requests one replica should have; room is left for a burst."""
    given = spec.autoscaling.target_requests if spec.autoscaling is not None else None
    return given or max(1, spec.concurrency * 3 // 4)


@dataclass(slots=True)
class _Memory:
    """What is known of one deployment's past."""

    autoscaling: Autoscaling
    bounds: ReplicaBounds
    bounds_of: datetime
    history: ReplicaHistory
    busy_s: float
    """When a request was last seen, or could have been there unseen."""
    finished: int = 0

    def look(
        self, autoscaling: Autoscaling, demand: Demand | None, now: datetime, now_s: float
    ) -> None:
        """Note what is so now."""
        is_over = self.bounds.until is not None and now >= self.bounds.until
        # Cron takes a while to work out, and nothing changes between two of its edges.
        if autoscaling != self.autoscaling or is_over or now < self.bounds_of:
            self.autoscaling = autoscaling
            self.bounds, self.bounds_of = bounds_at(autoscaling, now), now
        if demand is None or not demand.is_complete or demand.requests:
            self.busy_s = now_s
        if demand is not None and demand.finished != self.finished:
            self.finished, self.busy_s = demand.finished, now_s

    def decision(
        self,
        spec: ModelDeploymentSpec,
        current: int,
        demand: Demand | None,
        now: datetime,
        now_s: float,
    ) -> ScalingDecision:
        """Decide, and say when something could change by itself."""
        up_s = duration.parse(self.autoscaling.scale_up_stabilization)
        down_s = duration.parse(self.autoscaling.scale_down_stabilization)
        target = target_requests(spec)
        wanted = recommended_replicas(demand, current, target)
        self.history.add(wanted, now_s)
        self.history.trim(max(up_s, down_s), now_s)
        idle_left_s = self.busy_s + duration.parse(self.autoscaling.idle_time) - now_s
        at = ScalingInputs(
            current=current,
            demand=demand,
            target=target,
            bounds=self.bounds,
            lowest=self.history.lowest(up_s, now_s),
            highest=self.history.highest(down_s, now_s),
            is_idle=idle_left_s <= 0,
        )
        decided = decide(at, wanted)
        least = max(self.bounds.low, 1)
        looks = [
            self.history.changes_in_s(up_s, now_s) if wanted > decided.desired else None,
            self.history.changes_in_s(down_s, now_s)
            if max(wanted, least) < decided.desired
            else None,
            idle_left_s if self.bounds.low == 0 and decided.desired > 0 else None,
            (self.bounds.until - now).total_seconds() if self.bounds.until is not None else None,
        ]
        soonest_s = min((s for s in looks if s is not None and s > 0), default=None)
        return replace(decided, requeue_after_s=soonest_s and soonest_s + _SLACK_S)
