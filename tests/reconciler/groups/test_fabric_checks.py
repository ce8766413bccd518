"""Times of regular checks of a group's cables, and their results against the group's own history."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.groups import fabric_checks
from schemas.fabrictest import MIB, FabricFigures, FabricRank
from schemas.meta import ConditionStatus, ObjectMeta
from schemas.shardgroup import (
    MOST_CHECKS,
    FabricCheck,
    FabricPolicy,
    GroupMember,
    ShardGroup,
    ShardGroupSpec,
)

NOW = datetime(2026, 11, 22, tzinfo=UTC)
HOUR = timedelta(hours=1)


def group(uid: str = "u", *, interval: str | None = "24h", created: datetime = NOW) -> ShardGroup:
    return ShardGroup(
        metadata=ObjectMeta(name="pair", uid=uid, generation=1, creation_timestamp=created),
        spec=ShardGroupSpec(
            members=(GroupMember(node="a"), GroupMember(node="b")),
            fabric=None if interval is None else FabricPolicy(check_interval=interval),
        ),
    )


def ranks(gb_per_second: float, *, wrong: int = 0) -> tuple[FabricRank, ...]:
    size = 64 * MIB
    figures = (FabricFigures(size=size, times_us=(size / gb_per_second / 1e3,), wrong=wrong),)
    return tuple(
        FabricRank(test_uid="t", rank=at, node=name, state="Done", figures=figures)
        for at, name in enumerate("ab")
    )


def history(*speeds: float) -> tuple[FabricCheck, ...]:
    """Return the history after checks with these speeds, an hour apart."""
    checks: tuple[FabricCheck, ...] = ()
    for number, speed in enumerate(speeds):
        check = fabric_checks.measured_check(ranks(speed), "ring", checks, NOW + number * HOUR)
        checks = fabric_checks.with_check(checks, check)
    return checks


def failed(at: datetime) -> FabricCheck:
    return fabric_checks.failed_check(("a", "b"), "ring", "a rank hung", at)


def test_a_group_without_an_interval_is_never_due() -> None:
    assert fabric_checks.next_check_at(group(interval=None), (), NOW) is None
    assert fabric_checks.fabric_condition(group(interval=None), history(1.0), "") is None


def test_checks_are_spread_and_each_leader_finds_the_same_time() -> None:
    first = {fabric_checks.next_check_at(group(f"u{n}"), (), NOW) for n in range(50)}
    assert len(first) > 30
    assert all(at is not None and NOW <= at <= NOW + timedelta(hours=2.4) for at in first)
    last = history(1.0)
    due = fabric_checks.next_check_at(group(), last, NOW)
    assert due is not None
    assert due == fabric_checks.next_check_at(group(), last, NOW + 99 * HOUR)
    assert timedelta(hours=24) <= due - last[-1].at <= timedelta(hours=26.4)


def test_a_fault_is_checked_again_within_the_hour() -> None:
    for last in (failed(NOW), history(8, 8, 8, 1)[-1].model_copy(update={"at": NOW})):
        due = fabric_checks.next_check_at(group(), (last,), NOW)
        assert due is not None
        assert due - NOW <= 1.1 * HOUR


def test_a_result_of_the_future_does_not_stop_checks() -> None:
    ahead = history(1.0)[-1].model_copy(update={"at": NOW + 10_000 * HOUR})
    assert fabric_checks.next_check_at(group(), (ahead,), NOW) == NOW


@pytest.mark.parametrize(
    ("before", "speed", "reason"),
    [
        pytest.param((8.0, 8.0, 8.0), 3.9, "SlowerThanUsual", id="half"),
        pytest.param((8.0, 8.0, 8.0), 4.1, "Measured", id="above-half"),
        pytest.param((8.0, 8.0), 0.1, "Measured", id="too-short-a-history"),
        pytest.param((8.0, 9.0, 8.0, 0.5, 0.5), 0.5, "SlowerThanUsual", id="slow-ones-do-not-count"),
        pytest.param((), 0.01, "Measured", id="no-history"),
    ],
)  # fmt: skip
def test_a_fall_below_half_of_the_usual_speed_is_unhealthy(
    before: tuple[float, ...], speed: float, reason: str
) -> None:
    last = history(*before, speed)[-1]
    assert last.reason == reason
    assert last.outcome == ("Healthy" if reason == "Measured" else "Unhealthy")


def test_wrong_sums_are_unhealthy_at_any_speed() -> None:
    check = fabric_checks.measured_check(ranks(8.0, wrong=1), "ring", history(8, 8, 8), NOW)
    assert (check.outcome, check.reason) == ("Unhealthy", "WrongSums")


def test_other_macs_have_their_own_history() -> None:
    others = tuple(
        fabric_check.model_copy(update={"nodes": ("a", "c")}) for fabric_check in history(8, 8, 8)
    )
    check = fabric_checks.measured_check(ranks(1.0), "ring", others, NOW)
    assert (check.reason, check.usual_gb_per_second) == ("Measured", None)


@given(speeds=st.lists(st.sampled_from([0.1, 8.0, None]), max_size=3 * MOST_CHECKS))
def test_the_history_is_bounded_and_a_fault_that_stays_is_not_forgotten(
    speeds: list[float | None],
) -> None:
    checks = history(8.0, 8.0, 8.0)
    for number, speed in enumerate(speeds, 3):
        at = NOW + number * HOUR
        new = (
            failed(at)
            if speed is None
            else fabric_checks.measured_check(ranks(speed), "ring", checks, at)
        )
        checks = fabric_checks.with_check(checks, new)
        assert fabric_checks.with_check(checks, new) == checks
        assert speed is None or new.reason == ("Measured" if speed > 4 else "SlowerThanUsual")
    assert len(checks) <= MOST_CHECKS
    outcomes = [check.outcome for check in checks]
    assert ("Failed", "Failed") not in pairwise(outcomes)


@pytest.mark.parametrize(
    ("found", "status", "reason"),
    [
        ((), ConditionStatus.UNKNOWN, "NotMeasured"),
        (history(8.0), ConditionStatus.TRUE, "Measured"),
        (history(8, 8, 8, 1), ConditionStatus.FALSE, "SlowerThanUsual"),
        ((failed(NOW),), ConditionStatus.UNKNOWN, "TestBrokeOff"),
    ],
)
def test_the_condition_is_that_of_the_last_check(
    found: tuple[FabricCheck, ...], status: ConditionStatus, reason: str
) -> None:
    condition = fabric_checks.fabric_condition(group(), found, "replica/qwen-0 uses them")
    assert condition is not None
    assert (condition.status, condition.reason) == (status, reason)
    assert condition.message.endswith("a check is due and waits: replica/qwen-0 uses them")


def test_an_interval_below_ten_minutes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 10m"):
        FabricPolicy(check_interval="9m")
