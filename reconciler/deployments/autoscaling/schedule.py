"""Replica bounds by time: the deployment's own, or those of an open window of its schedule. Pure.

The only user of cronsim, which handles daylight saving as Debian's cron does.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim

from schemas.autoscaling import Autoscaling, ScheduleWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBounds:
    """Minimum and maximum of replicas at one moment."""

    low: int
    high: int
    until: datetime | None = None
    """Time at which they may change; None if they never do."""
    window: int | None = None
    """Index of the schedule's window that they come from; None for the deployment's own."""


def bounds_at(autoscaling: Autoscaling, now: datetime) -> ReplicaBounds:
    """Return the bounds that hold now: of several open windows the last in the list counts."""
    edges = [
        edge
        for window in autoscaling.schedule
        for cron in (window.start, window.end)
        if (edge := next_occurrence(cron, window.time_zone, now)) is not None
    ]
    until = min(edges, default=None)
    for place, window in reversed(list(enumerate(autoscaling.schedule))):
        if is_open(window, now):
            low, high = _of_window(autoscaling, window)
            return ReplicaBounds(low=low, high=high, until=until, window=place)
    low, high = autoscaling.min_replicas, autoscaling.max_replicas
    return ReplicaBounds(low=low, high=high, until=until)


def is_open(window: ScheduleWindow, now: datetime) -> bool:
    """Return whether the window opened later than it closed; both at once leaves it open."""
    opened = last_occurrence(window.start, window.time_zone, now)
    closed = last_occurrence(window.end, window.time_zone, now)
    return opened is not None and (closed is None or opened >= closed)


def last_occurrence(cron: str, time_zone: str, now: datetime) -> datetime | None:
    """Return the last time up to now that the expression matches; None if there is none within 50 years."""
    local = _local(now + timedelta(seconds=1), time_zone)
    moment = next(CronSim(cron, local, reverse=True), None)
    # In the hour that daylight saving repeats, cronsim reads the wall clock and misses the first pass.
    while moment is not None:
        after = next(CronSim(cron, moment), None)
        if after is None or after.astimezone(UTC) > now:
            break
        moment = after
    return None if moment is None else moment.astimezone(UTC)


def next_occurrence(cron: str, time_zone: str, now: datetime) -> datetime | None:
    """Return the first time after now that the expression matches; None if there is none within 50 years."""
    for moment in CronSim(cron, _local(now, time_zone)):
        if moment.astimezone(UTC) > now:
            return moment.astimezone(UTC)
    return None


def _local(moment: datetime, time_zone: str) -> datetime:
    return moment.replace(microsecond=0).astimezone(ZoneInfo(time_zone))


def _of_window(autoscaling: Autoscaling, window: ScheduleWindow) -> tuple[int, int]:
    """Return the window's bounds; a bound that it leaves out comes from the deployment, and yields to the other one."""
    low, high = window.min_replicas, window.max_replicas
    if low is None:
        low = autoscaling.min_replicas if high is None else min(autoscaling.min_replicas, high)
    if high is None:
        high = max(autoscaling.max_replicas, low)
    return min(low, high), high
