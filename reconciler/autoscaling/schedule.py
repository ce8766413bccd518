"""Which bounds hold when: the deployment's own, or those of a window of its schedule. Pure.

cronsim lives here; it knows daylight saving as Debian's cron does.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim

from schemas.autoscaling import Autoscaling, ScheduleWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBounds:
    """Fewest and most replicas at a moment."""

    low: int
    high: int
    until: datetime | None = None
    """When they may change; None if they never do."""
    window: int | None = None
    """Which window of the schedule they are from, by its place; None for the deployment's own."""


def bounds_at(autoscaling: Autoscaling, now: datetime) -> ReplicaBounds:
    """Return the bounds that hold now: of open windows the last in the list counts."""
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
    """Return whether the window was last opened rather than closed; both at once leaves it open."""
    opened = last_occurrence(window.start, window.time_zone, now)
    closed = last_occurrence(window.end, window.time_zone, now)
    return opened is not None and (closed is None or opened >= closed)


def last_occurrence(cron: str, time_zone: str, now: datetime) -> datetime | None:
    """Return the last moment up to now that the expression names; None within the last 50 years."""
    local = _local(now + timedelta(seconds=1), time_zone)
    found = next(CronSim(cron, local, reverse=True), None)
    # In the hour that comes twice cronsim reads the clock on the wall, and misses what was before.
    while found is not None:
        after = next(CronSim(cron, found), None)
        if after is None or after.astimezone(UTC) > now:
            break
        found = after
    return None if found is None else found.astimezone(UTC)


def next_occurrence(cron: str, time_zone: str, now: datetime) -> datetime | None:
    """Return the first moment after now that the expression names; None in the next 50 years."""
    for found in CronSim(cron, _local(now, time_zone)):
        if found.astimezone(UTC) > now:
            return found.astimezone(UTC)
    return None


def _local(moment: datetime, time_zone: str) -> datetime:
    return moment.replace(microsecond=0).astimezone(ZoneInfo(time_zone))


def _of_window(autoscaling: Autoscaling, window: ScheduleWindow) -> tuple[int, int]:
    """Return the window's bounds; what it says stretches what it leaves to the deployment."""
    low, high = window.min_replicas, window.max_replicas
    if low is None:
        low = autoscaling.min_replicas if high is None else min(autoscaling.min_replicas, high)
    if high is None:
        high = max(autoscaling.max_replicas, low)
    return min(low, high), high
