"""Quiet hours over midnight, on some days and at clock changes, compared with a scan of every minute."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.nodes.node_state import is_within, next_change, quiet_calendar, quiet_until
from schemas.pools import DailyWindow, NodePool
from tests.support import reconciler_world

_MINUTE = timedelta(minutes=1)
_NIGHT = {"start": "22:00", "end": "07:00"}


def hours(**spec: object) -> DailyWindow:
    return DailyWindow.model_validate({**_NIGHT, **spec})


def at(text: str, zone: str = "UTC") -> datetime:
    """Return the instant at which the zone's clocks show this."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)


@pytest.mark.parametrize(
    ("window", "now", "is_now", "change"),
    [
        # 2026-03-02 is a Monday.
        (hours(), "2026-03-02T21:59", False, "2026-03-02T22:00"),
        (hours(), "2026-03-02T22:00", True, "2026-03-03T07:00"),
        (hours(), "2026-03-03T06:59", True, "2026-03-03T07:00"),
        (hours(), "2026-03-03T07:00", False, "2026-03-03T22:00"),
        (hours(start="09:00", end="17:00"), "2026-03-02T12:00", True, "2026-03-02T17:00"),
        (hours(days=("Mon",)), "2026-03-03T06:00", True, "2026-03-03T07:00"),
        (hours(days=("Tue",)), "2026-03-03T06:00", False, "2026-03-03T22:00"),
        (hours(days=("Sun",)), "2026-03-02T08:00", False, "2026-03-08T22:00"),
        (hours(start="08:00", end="08:00", days=("Mon",)), "2026-03-03T07:59", True, "2026-03-03T08:00"),
        (hours(start="08:00", end="08:00"), "2026-03-03T07:59", True, None),
    ],
)  # fmt: skip
def test_windows(window: DailyWindow, now: str, change: str | None, *, is_now: bool) -> None:
    assert is_within(window, at(now)) is is_now
    assert next_change(window, at(now)) == (None if change is None else at(change))


@pytest.mark.parametrize(
    ("window", "now", "change"),
    [
        # Clocks go from 2:00 to 3:00 on 2026-03-29 in Berlin: a window that ends in between ends at 3:00.
        (hours(end="02:30"), "2026-03-29T01:30+01:00", "2026-03-29T03:00+02:00"),
        # One that would be within comes the night after.
        (hours(start="02:10", end="02:50"), "2026-03-29T01:30+01:00", "2026-03-30T02:10+02:00"),
        # They go from 3:00 to 2:00 on 2026-10-25: what ends at 2:30 ends twice.
        (hours(end="02:30"), "2026-10-25T02:15+02:00", "2026-10-25T02:30+02:00"),
        (hours(end="02:30"), "2026-10-25T02:40+02:00", "2026-10-25T02:00+01:00"),
        (hours(end="02:30"), "2026-10-25T02:15+01:00", "2026-10-25T02:30+01:00"),
    ],
)
def test_where_clocks_are_put(window: DailyWindow, now: str, change: str) -> None:
    berlin = window.model_copy(update={"time_zone": "Europe/Berlin"})
    assert next_change(berlin, datetime.fromisoformat(now)) == datetime.fromisoformat(change)


_ZONES = (
    "UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu",
    "America/Santiago", "Asia/Beirut", "Pacific/Auckland",
)  # fmt: skip
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
times = st.builds("{:02}:{:02}".format, st.integers(0, 23), st.integers(0, 59))
windows = st.builds(
    hours,
    start=times,
    end=times,
    days=st.lists(st.sampled_from(_DAYS), unique=True, max_size=7).map(tuple),
    time_zone=st.sampled_from(_ZONES),
)
# Often around the nights in which clocks are put somewhere.
nights = st.sampled_from(
    [datetime(2026, month, day, tzinfo=UTC) for month, day in
     [(3, 8), (3, 28), (3, 29), (4, 4), (4, 5), (9, 6), (9, 27), (10, 4), (10, 25), (11, 1), (6, 15)]]
)  # fmt: skip
moments = st.builds(
    lambda night, minutes, seconds: night + timedelta(minutes=minutes, seconds=seconds),
    nights,
    st.integers(-1440, 2880),
    st.integers(0, 59),
)


@given(windows, moments)
def test_the_next_change_equals_a_scan_of_every_minute(window: DailyWindow, now: datetime) -> None:
    was, moment = is_within(window, now), next_change(window, now)
    scan = now.replace(second=0)
    for _ in range(30 * 60):
        scan += _MINUTE
        if is_within(window, scan) != was:
            assert moment == scan
            return
    assert moment is None or moment > scan


@given(st.lists(windows, max_size=3), moments)
def test_the_end_is_the_first_minute_without_any_window(
    several: list[DailyWindow], now: datetime
) -> None:
    found = quiet_until(several, now)
    scan = now
    for _ in range(30 * 60):
        if not any(is_within(quiet_hours, scan) for quiet_hours in several):
            assert found is not None
            assert found[0] == scan
            return
        scan = scan.replace(second=0) + _MINUTE
    assert found is None or found[0] > scan - _MINUTE


def pool(name: str, *quiet_hours: DailyWindow) -> NodePool:
    return reconciler_world.pool(name, policy={"quiet_hours": quiet_hours})


def test_a_calendar_holds_until_something_changes() -> None:
    noon = hours(start="12:00", end="13:00", time_zone="Europe/Berlin")
    pools = [pool("desk", hours(), noon), pool("lab"), pool("late", hours(start="23:00"))]
    evening = quiet_calendar(pools, at("2026-03-02T22:30"))
    assert evening.quiet == {"desk": "quiet hours until 2026-03-03 07:00 UTC"}
    assert evening.until == at("2026-03-02T23:00")
    assert evening.holds(at("2026-03-02T22:59"))
    assert not evening.holds(at("2026-03-02T23:00"))
    assert not evening.holds(at("2026-03-02T22:29"))
    lunch = quiet_calendar(pools, at("2026-03-02T11:30"))
    assert lunch.quiet == {"desk": "quiet hours until 2026-03-02 13:00 Europe/Berlin"}
    always = quiet_calendar([pool("off", hours(start="07:00"))], at("2026-03-02T22:30"))
    assert always.quiet == {"off": "quiet hours that do not end"}
    assert always.until is not None
    assert quiet_calendar([], at("2026-03-02T22:30")).until is None


@given(st.lists(windows, max_size=3), moments, st.floats(0, 1))
def test_within_a_calendar_nothing_changes(
    several: list[DailyWindow], now: datetime, part: float
) -> None:
    pools = [pool(f"p{number}", one) for number, one in enumerate(several)]
    calendar = quiet_calendar(pools, now)
    if calendar.until is not None:
        assert calendar.until > now
        later = now + (calendar.until - now - _MINUTE / 60) * part
        assert quiet_calendar(pools, later).quiet == calendar.quiet
