"""Regular checks of the cables of ShardGroups: when one is due, its result against the group's own history. Pure.

The history is a part of the group's status: a new leader continues where the last one stopped.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median
from typing import Final

from schemas import duration, fabric_verdict
from schemas.fabric_verdict import JUDGED_BYTES
from schemas.fabrictest import FabricRank
from schemas.meta import Condition, ConditionStatus
from schemas.shardgroup import MOST_CHECKS, Backend, FabricCheck, ShardGroup

FABRIC_HEALTHY: Final = "FabricHealthy"
SLOWER: Final = "SlowerThanUsual"
# A cable that carries a half of what it did is loose, damaged, or fell back to a slower generation.
_LEAST_SHARE: Final = 0.5
_LEAST_BASELINE: Final = 3
# Groups that were created together, or whose leader was away for long, are spread over this part of the interval.
_JITTER: Final = 0.1
# A check that failed, or found a fault, is repeated sooner: a repair shows within the hour.
_REPEAT_S: Final = 3600.0
_MOST_MESSAGE: Final = 300
_TRUTHS: Final = {
    "Healthy": ConditionStatus.TRUE,
    "Unhealthy": ConditionStatus.FALSE,
    "Failed": ConditionStatus.UNKNOWN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricCheckView:
    """The checks of a group that its status does not hold yet."""

    finished: FabricCheck | None = None
    waits_for: str = ""
    """Reason why a due check waits; empty if none does."""


def next_check_at(
    group: ShardGroup, history: Sequence[FabricCheck], now: datetime
) -> datetime | None:
    """Return when the next check is due, with a jitter that is fixed for each check; None without regular checks."""
    if group.spec.fabric is None:
        return None
    interval_s = float(duration.parse(group.spec.fabric.check_interval))
    last = history[-1] if history else None
    if last is None:
        created = group.metadata.creation_timestamp or now
        return min(created, now) + timedelta(seconds=interval_s * _jitter(group, created))
    if last.at > now:
        return now  # the clock was wrong once, and the result is as good as none
    wait_s = interval_s if last.outcome == "Healthy" else min(interval_s, _REPEAT_S)
    return last.at + timedelta(seconds=wait_s * (1 + _jitter(group, last.at)))


def _jitter(group: ShardGroup, since: datetime) -> float:
    """Return a share of the interval that is the same for every leader, and another one for the next check."""
    seed = f"{group.metadata.uid}/{group.name}/{since.isoformat()}"
    return _JITTER * hashlib.sha256(seed.encode()).digest()[0] / 256


def measured_check(
    ranks: Sequence[FabricRank],
    backend: Backend,
    history: Sequence[FabricCheck],
    at: datetime,
) -> FabricCheck:
    """Return the result of a check that finished; its speed is compared with the earlier ones of the same Macs."""
    nodes = tuple(rank.node for rank in ranks)
    rows = fabric_verdict.summarize_ranks(ranks)
    speed = next((row.average_gb_s for row in rows if row.size == JUDGED_BYTES), None)
    usual = _usual_speed(history, nodes, backend)
    verdict = fabric_verdict.judge(rows, backend)
    reason, message, is_healthy = verdict.reason, verdict.message, verdict.is_healthy
    if is_healthy and speed is not None and usual is not None and speed < _LEAST_SHARE * usual:
        reason, is_healthy = SLOWER, False
        message = (
            f"{speed:.2f} GB/s at 64 MB, and {usual:.2f} were usual between these Macs: look for a loose or damaged "
            "cable, and compare `fleetctl fabric check`"
        )
    return FabricCheck(
        at=at,
        nodes=nodes,
        backend=backend,
        outcome="Healthy" if is_healthy else "Unhealthy",
        reason=reason,
        message=message[:_MOST_MESSAGE],
        gb_per_second=None if speed is None else _rounded(speed),
        usual_gb_per_second=None if usual is None else _rounded(usual),
    )


def failed_check(
    nodes: tuple[str, ...], backend: Backend, message: str, at: datetime
) -> FabricCheck:
    """Return the result of a check that did not finish."""
    return FabricCheck(
        at=at,
        nodes=nodes,
        backend=backend,
        outcome="Failed",
        reason="TestBrokeOff",
        message=message[:_MOST_MESSAGE],
    )


def _rounded(speed: float) -> float:
    return float(f"{speed:.3g}")


def _usual_speed(
    history: Sequence[FabricCheck], nodes: tuple[str, ...], backend: Backend
) -> float | None:
    """Return the median of the healthy checks of the same Macs; the last known one if all of them were dropped."""
    same = [check for check in history if check.nodes == nodes and check.backend == backend]
    speeds = [
        check.gb_per_second
        for check in same
        if check.outcome == "Healthy" and check.gb_per_second is not None
    ]
    if len(speeds) >= _LEAST_BASELINE:
        return median(speeds)
    known = [check.usual_gb_per_second for check in same if check.usual_gb_per_second is not None]
    return known[-1] if known else None


def with_check(history: Sequence[FabricCheck], new: FabricCheck) -> tuple[FabricCheck, ...]:
    """Return the history with one more check; of failures in a row only the last one is kept."""
    fabric_checks = list(history)
    if fabric_checks and fabric_checks[-1].at == new.at:
        return tuple(fabric_checks)
    if fabric_checks and fabric_checks[-1].outcome == new.outcome == "Failed":
        fabric_checks.pop()
    return (*fabric_checks, new)[-MOST_CHECKS:]


def fabric_condition(
    group: ShardGroup, history: Sequence[FabricCheck], waits_for: str
) -> Condition | None:
    """Return the condition FabricHealthy of a group with regular checks; `waits_for` says why a due check waits."""
    if group.spec.fabric is None:
        return None
    waits = f"; a check is due and waits: {waits_for}" if waits_for else ""
    if not history:
        message = f"its cables were not measured yet{waits}"
        return _condition(ConditionStatus.UNKNOWN, "NotMeasured", message)
    last = history[-1]
    return _condition(_TRUTHS[last.outcome], last.reason, f"{last.message}{waits}")


def _condition(truth: ConditionStatus, reason: str, message: str) -> Condition:
    return Condition(type=FABRIC_HEALTHY, status=truth, reason=reason, message=message)
