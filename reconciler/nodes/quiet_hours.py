"""Times in which Macs belong to their owners: is it one now, and when does that change? Pure; time is an argument.

What a clock on the wall in the window's time zone shows is what counts. So in the night in which clocks go back a
window may come twice, and in the one in which they go forward it may not come at all.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from schemas.pools import NodePool, QuietHours

_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
# A window comes once a week at least; where clocks go forward over it, once in two weeks.
_HORIZON: Final = timedelta(days=16)
_MINUTE: Final = timedelta(minutes=1)


def is_quiet(hours: QuietHours, now: datetime) -> bool:
    """Return whether it is a time of the window."""
    local = now.astimezone(ZoneInfo(hours.time_zone))
    clock, today = local.time().isoformat("minutes"), local.date()
    if hours.start < hours.end:
        return hours.start <= clock < hours.end and _begins_on(hours, today)
    if clock >= hours.start and _begins_on(hours, today):
        return True
    return clock < hours.end and _begins_on(hours, today - timedelta(days=1))


def _begins_on(hours: QuietHours, day: date) -> bool:
    return not hours.days or _DAYS[day.weekday()] in hours.days


def next_change(hours: QuietHours, now: datetime) -> datetime | None:
    """Return when the window begins or ends next; None if it never does."""
    was = is_quiet(hours, now)
    first = now.astimezone(ZoneInfo(hours.time_zone)).date() - timedelta(days=1)
    instants = (
        at
        for number in range(_HORIZON.days + 1)
        for at in _instants(hours, first + timedelta(days=number))
    )
    return next((at for at in sorted(instants) if at > now and is_quiet(hours, at) != was), None)


def _instants(hours: QuietHours, day: date) -> Iterator[datetime]:
    """Return when something may change on that day: at both times of it, and where clocks are put."""
    zone = ZoneInfo(hours.time_zone)
    for text in (hours.start, hours.end):
        for fold in (0, 1):
            wall = datetime.combine(day, time.fromisoformat(text).replace(fold=fold), zone)
            yield wall.astimezone(UTC)
    yield from _clock_put(day, zone)


def _clock_put(day: date, zone: ZoneInfo) -> Iterator[datetime]:
    """Return the minute of that day from which on clocks show another time of the zone, if there is one."""
    low = datetime.combine(day, time(), zone).astimezone(UTC)
    high = datetime.combine(day + timedelta(days=1), time(), zone).astimezone(UTC)

    def offset(at: datetime) -> timedelta | None:
        return at.astimezone(zone).utcoffset()

    before = offset(low)
    if offset(high) == before:
        return
    while high - low > _MINUTE:
        middle = low + (high - low) // _MINUTE // 2 * _MINUTE
        low, high = (middle, high) if offset(middle) == before else (low, middle)
    yield high


def quiet_until(windows: Sequence[QuietHours], now: datetime) -> tuple[datetime, str] | None:
    """Return when it is quiet no more, in which time zone; `now` itself if it is not, None if that is not in sight."""
    until, zone = now, "UTC"
    while until - now < _HORIZON:
        active = [one for one in windows if is_quiet(one, until)]
        if not active:
            return until, zone
        ends = [(end, one.time_zone) for one in active if (end := next_change(one, until))]
        if len(ends) < len(active):
            return None
        until, zone = max(ends)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuietCalendar:
    """Which pools are quiet, and how long that is true."""

    quiet: dict[str, str]
    """Those that are, by name, with the words for it."""
    since: datetime
    until: datetime | None
    """When to look again; None if there is nothing to look at."""

    def holds(self, now: datetime) -> bool:
        """Return whether it is still true; a clock that was put back makes it doubtful as well."""
        return self.since <= now and (self.until is None or now < self.until)


def quiet_calendar(pools: Iterable[NodePool], now: datetime) -> QuietCalendar:
    """Return which of the pools are quiet at `now`."""
    quiet: dict[str, str] = {}
    changes: list[datetime] = []
    for pool in pools:
        windows = pool.spec.policy.quiet_hours if pool.spec.policy else ()
        # Even a window that never changes is looked at again: the horizon of the search is not for ever.
        changes.extend(next_change(one, now) or now + _HORIZON for one in windows)
        if any(is_quiet(one, now) for one in windows):
            quiet[pool.name] = f"quiet hours{_shown(quiet_until(windows, now))}"
    return QuietCalendar(quiet=quiet, since=now, until=min(changes, default=None))


def _shown(until: tuple[datetime, str] | None) -> str:
    if until is None:
        return " that do not end"
    at, zone = until
    return f" until {at.astimezone(ZoneInfo(zone)):%Y-%m-%d %H:%M} {zone}"
