"""Windows of a schedule, compared with a scan of every minute."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.deployments.autoscaling.schedule import (
    ReplicaBounds,
    bounds_at,
    is_open,
    last_occurrence,
    next_occurrence,
)
from schemas.autoscaling import Autoscaling, ScheduleWindow
from tests.support.sampling import samples

BERLIN = ZoneInfo("Europe/Berlin")
MINUTE = timedelta(minutes=1)


def window(start: str, end: str, zone: str = "UTC", **bounds: int) -> ScheduleWindow:
    fields = {"start": start, "end": end, "timeZone": zone, **bounds}
    return ScheduleWindow.model_validate(fields)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


OFFICE = window("0 8 * * 1-5", "30 18 * * 1-5", minReplicas=3)
NIGHT = window("0 22 * * *", "0 6 * * *", maxReplicas=1)
LUNCH = window("0 12 * * *", "0 13 * * *", minReplicas=7, maxReplicas=8)


def scaling(*windows: ScheduleWindow) -> Autoscaling:
    return Autoscaling(min_replicas=2, max_replicas=5, schedule=windows)


@pytest.mark.parametrize(
    ("windows", "now", "expected"),
    [
        pytest.param((), "2026-03-02 12:00", (2, 5, None, None), id="no-schedule"),
        pytest.param((OFFICE,), "2026-03-02 07:59", (2, 5, None, "03-02 08:00"), id="before"),
        pytest.param((OFFICE,), "2026-03-02 08:00", (3, 5, 0, "03-02 18:30"), id="at-the-start"),
        pytest.param((OFFICE,), "2026-03-02 18:29", (3, 5, 0, "03-02 18:30"), id="in-it"),
        pytest.param((OFFICE,), "2026-03-02 18:30", (2, 5, None, "03-03 08:00"), id="at-the-end"),
        pytest.param((OFFICE,), "2026-03-07 12:00", (2, 5, None, "03-09 08:00"), id="saturday"),
        pytest.param((NIGHT,), "2026-03-02 23:00", (1, 1, 0, "03-03 06:00"), id="over-midnight"),
        pytest.param((NIGHT,), "2026-03-03 05:59", (1, 1, 0, "03-03 06:00"), id="next-morning"),
        pytest.param((OFFICE, LUNCH), "2026-03-02 12:30", (7, 8, 1, "03-02 13:00"), id="later"),
        pytest.param((LUNCH, OFFICE), "2026-03-02 12:30", (3, 5, 1, "03-02 13:00"), id="order"),
    ],
)
def test_bounds(
    windows: tuple[ScheduleWindow, ...],
    now: str,
    expected: tuple[int, int, int | None, str | None],
) -> None:
    low, high, place, until = expected
    edge = at(f"2026-{until}") if until else None
    assert bounds_at(scaling(*windows), at(now)) == ReplicaBounds(
        low=low, high=high, window=place, until=edge
    )


def test_bounds_that_a_window_leaves_out_are_moved_to_fit() -> None:
    many, few = window("0 0 * * *", "0 0 1 1 *", minReplicas=9), window("0 0 * * *", "0 0 1 1 *")
    assert bounds_at(scaling(many), at("2026-03-02 12:00")).high == 9
    assert bounds_at(scaling(few), at("2026-03-02 12:00")).low == 2
    none = window("0 0 * * *", "0 0 1 1 *", maxReplicas=0)
    assert bounds_at(scaling(none), at("2026-03-02 12:00")).low == 0


def test_one_window_after_the_other_leaves_no_gap() -> None:
    days = window("0 8 * * *", "0 8 * * *", minReplicas=3)
    assert is_open(days, at("2026-03-02 08:00"))


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        # 2026-03-29: from 02:00 to 03:00 in a moment; times in between come then.
        ("2026-03-29 00:59", False),
        ("2026-03-29 01:00", True),
        ("2026-03-29 02:00", False),
        # 2026-10-25: 02:00 to 03:00 twice; times in it come once.
        ("2026-10-25 00:29", False),
        ("2026-10-25 00:30", True),
        ("2026-10-25 01:10", True),
        ("2026-10-25 01:35", True),
        ("2026-10-25 03:00", False),
    ],
)
def test_daylight_saving(now: str, expected: object) -> None:
    """In UTC: an hour behind Berlin's clock in winter, two in summer."""
    early = window("30 2 * * *", "0 4 * * *", "Europe/Berlin", minReplicas=3)
    assert is_open(early, at(now)) is expected
    edge = next_occurrence(early.start, early.time_zone, at(now))
    assert edge is not None
    assert edge > at(now)


def test_days_that_are_rare() -> None:
    assert last_occurrence("0 0 29 2 *", "UTC", at("2026-03-02 12:00")) == at("2024-02-29 00:00")
    assert last_occurrence("0 0 1 1 *", "UTC", at("2026-01-01 00:00")) == at("2026-01-01 00:00")


minutes, hours = st.integers(0, 59), st.integers(0, 23)
days = st.sampled_from(["*", "1-5", "6", "0,3"])
crons = st.builds(lambda m, h, d: f"{m} {h} * * {d}", minutes, hours, days)
every = st.sampled_from(["*/20 * * * *", "5 */6 * * *", "0 0 * * 1"])
# Two weeks around a change of the clocks in Berlin; to the minute, and between minutes.
moments = st.integers(0, 14 * 24 * 60).flatmap(
    lambda n: st.integers(0, 59).map(
        lambda s: datetime(2026, 10, 18, tzinfo=UTC) + n * MINUTE + timedelta(seconds=s)
    )
)


def named(cron: str, moment: datetime) -> bool:
    """Return whether the expression names the minute, by reading it as a person does."""
    minute, hour, _, _, weekday = cron.split()
    numbers = (moment.minute, moment.hour, moment.isoweekday() % 7)
    return all(
        _has(part, number) for part, number in zip((minute, hour, weekday), numbers, strict=True)
    )


def _has(part: str, number: int) -> bool:
    if part == "*":
        return True
    if part.startswith("*/"):
        return number % int(part[2:]) == 0
    if "-" in part:
        low, high = part.split("-")
        return int(low) <= number <= int(high)
    return str(number) in part.split(",")


@settings(max_examples=samples(40))
@given(cron=st.one_of(crons, every), zone=st.sampled_from(["UTC", "Asia/Kolkata"]), now=moments)
def test_a_scan_of_every_minute_says_the_same(cron: str, zone: str, now: datetime) -> None:
    minute = now.replace(second=0)
    local = minute.astimezone(ZoneInfo(zone))
    back = next(n for n in range(8 * 24 * 60) if named(cron, local - n * MINUTE))
    ahead = next(n for n in range(1, 8 * 24 * 60) if named(cron, local + n * MINUTE))
    assert last_occurrence(cron, zone, now) == minute - back * MINUTE
    assert next_occurrence(cron, zone, now) == minute + ahead * MINUTE


@given(start=crons, end=crons, now=moments)
def test_bounds_hold_until_they_say(start: str, end: str, now: datetime) -> None:
    autoscaling = scaling(window(start, end, "Europe/Berlin", minReplicas=4))
    bounds = bounds_at(autoscaling, now)
    assert bounds.until is not None
    assert bounds.until > now
    for part in (0.3, 0.9):
        between = bounds_at(autoscaling, now + (bounds.until - now) * part)
        assert (between.low, between.until) == (bounds.low, bounds.until)
