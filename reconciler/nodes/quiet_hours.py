"""Quiet hours, in which Macs belong to their owners: whether they hold now, and when that changes. Pure.

Windows follow the wall clock of their time zone. When clocks go back, a window may come twice; when they go forward, it
may not come at all.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from schemas.pools import NodePool, QuietHours

_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
# A window comes at least once a week, or once in two weeks if clocks go forward over it.
_HORIZON: Final = timedelta(days=16)
_MINUTE: Final = timedelta(minutes=1)


def is_quiet(hours: QuietHours, now: datetime) -> bool:
    """Return whether `now` is inside the window."""
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
    """Return when the window next begins or ends; None if it never does."""
    was = is_quiet(hours, now)
    first = now.astimezone(ZoneInfo(hours.time_zone)).date() - timedelta(days=1)
    instants = (
        at
        for number in range(_HORIZON.days + 1)
        for at in _instants(hours, first + timedelta(days=number))
    )
    return next((at for at in sorted(instants) if at > now and is_quiet(hours, at) != was), None)


def _instants(hours: QuietHours, day: date) -> Iterator[datetime]:
    """Yield the instants of a day at which the answer may change: both ends of the window, and a clock change."""
    zone = ZoneInfo(hours.time_zone)
    for text in (hours.start, hours.end):
        for fold in (0, 1):
            wall = datetime.combine(day, time.fromisoformat(text).replace(fold=fold), zone)
            yield wall.astimezone(UTC)
    yield from _clock_change(day, zone)


def _clock_change(day: date, zone: ZoneInfo) -> Iterator[datetime]:
    """Yield the minute of that day at which the zone's offset changes, if it does."""
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
    """Return when quiet hours end, and the time zone for it; `now` outside of them, None if no end is in sight."""
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
    """The pools that are in quiet hours, and how long that holds."""

    quiet: dict[str, str]
    """Message by name of a pool in quiet hours."""
    since: datetime
    until: datetime | None
    """The time at which the calendar must be computed again; None if no pool has quiet hours."""

    def holds(self, now: datetime) -> bool:
        """Return whether the calendar is valid at `now`; it is not after the clock was set back."""
        return self.since <= now and (self.until is None or now < self.until)


def quiet_calendar(pools: Iterable[NodePool], now: datetime) -> QuietCalendar:
    """Return which of the pools are in quiet hours at `now`."""
    quiet: dict[str, str] = {}
    changes: list[datetime] = []
    for pool in pools:
        windows = pool.spec.policy.quiet_hours if pool.spec.policy else ()
        # A window without a change is checked again after the horizon of the search.
        changes.extend(next_change(one, now) or now + _HORIZON for one in windows)
        if any(is_quiet(one, now) for one in windows):
            quiet[pool.name] = f"quiet hours{_end_text(quiet_until(windows, now))}"
    return QuietCalendar(quiet=quiet, since=now, until=min(changes, default=None))


def _end_text(until: tuple[datetime, str] | None) -> str:
    if until is None:
        return " that do not end"
    at, zone = until
    return f" until {at.astimezone(ZoneInfo(zone)):%Y-%m-%d %H:%M} {zone}"
