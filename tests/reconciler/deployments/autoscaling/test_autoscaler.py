"""The autoscaler: single situations, properties of every history of load, and windows of a schedule."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.deployments.autoscaling.autoscaler import (
    Autoscaler,
    ScalingDecision,
    recommended_replicas,
    target_requests,
)
from reconciler.deployments.autoscaling.schedule import (
    ReplicaBounds,
    bounds_at,
    is_open,
    last_occurrence,
    next_occurrence,
)
from reconciler.deployments.demand.gateway_metrics import Demand
from schemas.autoscaling import Autoscaling, ScheduleWindow
from schemas.deployment import (
    ModelDeployment,
    ModelDeploymentSpec,
    ModelDeploymentStatus,
    ModelSource,
)
from schemas.meta import ObjectMeta
from tests.support.sampling import samples

START = datetime(2026, 3, 2, 12, tzinfo=UTC)  # a Monday


def load(requests: int, *, waiting: int = 0, finished: int = 0) -> Demand:
    return Demand(in_flight=requests, waiting=waiting, finished=finished, is_complete=True)


@dataclass
class Scaled:
    """A deployment whose status has the last decision."""

    autoscaling: Autoscaling | None
    replicas: int = 1
    at_s: float = 0.0
    current: int | None = None
    scaler: Autoscaler = field(default_factory=Autoscaler)

    def look(self, demand: Demand | None, *, after_s: float = 0.0) -> ScalingDecision:
        self.at_s += after_s
        spec = ModelDeploymentSpec(
            model=ModelSource(path="/m"), replicas=self.replicas, autoscaling=self.autoscaling
        )
        deployment = ModelDeployment(metadata=ObjectMeta(name="m"), spec=spec)
        status = None
        if self.current is not None:
            status = ModelDeploymentStatus(desired_replicas=self.current, template="t")
        now = START + timedelta(seconds=self.at_s)
        decision = self.scaler.desired(deployment, status, demand, now, self.at_s)
        self.current = decision.desired
        return decision


def scaled(*, low: int = 1, high: int = 10, current: int | None = None, **more: object) -> Scaled:
    fields = {"minReplicas": low, "maxReplicas": high, "targetRequests": 2, **more}
    return Scaled(Autoscaling.model_validate(fields), current=current)


def test_without_autoscaling_the_spec_counts() -> None:
    assert Scaled(None, replicas=7, current=3).look(load(90)).desired == 7


@pytest.mark.parametrize(("concurrency", "target"), [(1, 1), (2, 1), (4, 3), (16, 12)])
def test_the_target_is_three_quarters_of_the_concurrency(concurrency: int, target: int) -> None:
    spec = ModelDeploymentSpec(
        model=ModelSource(path="/m"),
        concurrency=concurrency,
        autoscaling=Autoscaling(max_replicas=2),
    )
    assert target_requests(spec, None) == target


@pytest.mark.parametrize(("concurrency", "target"), [(0, 3), (21, 15)])
def test_with_auto_the_replicas_concurrency_counts(concurrency: int, target: int) -> None:
    spec = ModelDeploymentSpec(
        model=ModelSource(path="/m"), autoscaling=Autoscaling(max_replicas=2)
    )
    assert target_requests(spec, ModelDeploymentStatus(concurrency=concurrency)) == target


@pytest.mark.parametrize(
    ("current", "demand", "expected"),
    [
        pytest.param(3, load(7), 4, id="more-than-a-tenth-above"),
        pytest.param(10, load(22), 10, id="a-tenth-above"),
        pytest.param(10, load(18), 10, id="a-tenth-below"),
        pytest.param(10, load(17), 9, id="more-than-a-tenth-below"),
        pytest.param(1, load(1, waiting=4), 3, id="waiting-counts"),
        pytest.param(3, load(0), 0, id="nothing"),
        pytest.param(0, load(0), 0, id="none-and-nothing"),
        pytest.param(0, load(0, waiting=40), 1, id="from-none-it-is-one"),
        pytest.param(3, None, 3, id="nobody-knows"),
        pytest.param(3, Demand(in_flight=1, silent=("a",)), 3, id="half-known-takes-nothing-away"),
        pytest.param(3, Demand(in_flight=9, silent=("a",)), 5, id="half-known-may-add"),
    ],
)
def test_recommended_replicas(current: int, demand: Demand | None, expected: int) -> None:
    assert recommended_replicas(demand, current, 2) == expected


def test_a_new_deployment_begins_with_its_replicas() -> None:
    fresh = scaled()
    fresh.replicas = 4
    assert fresh.look(None).desired == 4


def test_it_scales_up_at_once_and_down_after_the_window() -> None:
    deployment = scaled(current=1)
    up = deployment.look(load(9))
    assert (up.desired, up.reason) == (5, "ScaledUp")
    assert up.message == "9 requests, and a replica should serve 2"
    held = deployment.look(load(3), after_s=10)
    assert (held.desired, held.reason, held.requeue_after_s) == (5, "Stabilizing", 290.05)
    assert deployment.look(load(3), after_s=299).desired == 5
    down = deployment.look(load(3), after_s=1.05)
    assert (down.desired, down.reason) == (2, "ScaledDown")


def test_scaling_up_waits_for_its_window_too() -> None:
    deployment = scaled(current=1, scaleUpStabilization="1m")
    waits = deployment.look(load(8))
    assert (waits.desired, waits.reason, waits.requeue_after_s) == (1, "Stabilizing", 60.05)
    assert deployment.look(load(6), after_s=30).desired == 1
    # Three were of use at every moment, four only for a while.
    assert deployment.look(load(8), after_s=30.05).desired == 3


def test_a_new_leader_removes_no_replica_for_a_whole_window() -> None:
    deployment = scaled(current=8)
    assert deployment.look(load(0)).desired == 8
    assert deployment.look(load(0), after_s=299).desired == 8
    assert deployment.look(load(0), after_s=1).desired == 1


def test_a_silent_gateway_prevents_removal() -> None:
    deployment = scaled(current=5)
    deployment.look(load(2))
    unknown = deployment.look(Demand(in_flight=2, silent=("http://10.0.0.9:4000",)), after_s=400)
    assert (unknown.desired, unknown.reason) == (5, "DemandUnknown")
    assert unknown.message == "no answer from http://10.0.0.9:4000, so no replica is removed"
    assert deployment.look(Demand()).message == "no gateway is registered, so no replica is removed"
    assert deployment.look(None).message.startswith("the gateways have not been scraped yet")
    deployment.autoscaling = Autoscaling(max_replicas=3)
    assert deployment.look(None).desired == 3, "the bounds are its owner's word"


def test_to_zero_and_back() -> None:
    deployment = scaled(low=0, current=1)
    assert deployment.look(load(1)).desired == 1
    idle = deployment.look(load(0), after_s=60)
    assert (idle.desired, idle.requeue_after_s) == (1, 840.05)
    # A request between two decisions shows in the counts.
    assert deployment.look(load(0, finished=1), after_s=840.05).desired == 1
    gone = deployment.look(load(0, finished=1), after_s=900.05)
    assert (gone.desired, gone.reason) == (0, "Idle")
    assert gone.message == "there was no request for idleTime"
    still = deployment.look(load(0, finished=1), after_s=9000)
    assert (still.desired, still.reason, still.requeue_after_s) == (0, "Idle", None)
    back = deployment.look(load(0, waiting=30, finished=1), after_s=1)
    assert (back.desired, back.reason) == (1, "Woken")
    assert deployment.look(load(0, waiting=6, finished=1), after_s=1).desired == 3


def test_no_scale_to_zero_with_incomplete_demand() -> None:
    deployment = scaled(low=0, current=1)
    deployment.look(load(0))
    for _ in range(10):
        assert deployment.look(Demand(silent=("a",)), after_s=600).desired == 1
    assert deployment.look(load(0), after_s=1).desired == 1
    assert deployment.look(load(0), after_s=901).desired == 0


def test_bounds() -> None:
    deployment = scaled(low=2, high=4, current=2)
    most = deployment.look(load(100))
    assert (most.desired, most.reason) == (4, "AtMaximum")
    assert most.message == "the load needs more, but 4 is the maximum"
    deployment.autoscaling = Autoscaling(min_replicas=6, max_replicas=9, target_requests=2)
    least = deployment.look(load(0), after_s=1)
    assert (least.desired, least.reason) == (6, "AtMinimum")
    assert least.message == "6 is the minimum"


def test_a_window_opens_and_closes() -> None:
    window = ScheduleWindow(start="0 13 * * *", end="0 14 * * *", min_replicas=4)
    deployment = scaled(current=1, schedule=(window,))
    before = deployment.look(load(0))
    assert (before.desired, before.requeue_after_s) == (1, 3600.05)
    opened = deployment.look(load(0), after_s=3600.05)
    assert opened.desired == 4
    assert opened.message == "4 (autoscaling.schedule[0] is open) is the minimum"
    assert opened.requeue_after_s == pytest.approx(3600)
    assert deployment.look(load(0), after_s=3600.05).desired == 1


demands = st.one_of(
    st.none(),
    st.builds(
        Demand,
        in_flight=st.integers(0, 60),
        waiting=st.integers(0, 20),
        finished=st.integers(0, 3),
        is_complete=st.booleans(),
    ),
)
bounds = st.tuples(st.integers(0, 6), st.integers(1, 12)).filter(lambda b: b[0] <= b[1])
histories = st.lists(st.tuples(demands, st.floats(0, 400)), min_size=1, max_size=30)


@given(bounds=bounds, current=st.integers(0, 20), history=histories)
def test_never_outside_the_bounds_and_always_with_a_reason(
    bounds: tuple[int, int], current: int, history: list[tuple[Demand | None, float]]
) -> None:
    low, high = bounds
    deployment = scaled(low=low, high=high, current=current)
    for demand, after_s in history:
        before = deployment.current
        decision = deployment.look(demand, after_s=after_s)
        assert low <= decision.desired <= high
        assert decision.message
        assert decision.requeue_after_s is None or decision.requeue_after_s > 0
        if demand is None or not demand.is_complete:
            assert before is not None
            assert decision.desired >= min(before, high)


@given(requests=st.integers(0, 200), current=st.integers(1, 40), steps=st.integers(2, 20))
def test_under_a_constant_load_it_settles(requests: int, current: int, steps: int) -> None:
    deployment = scaled(low=1, high=100, current=current)
    seen = [deployment.look(load(requests), after_s=301).desired for _ in range(steps + 2)]
    assert len(set(seen[2:])) == 1
    # Enough, but for the tenth that is left alone, and no more than one too many.
    assert requests <= seen[-1] * 2 * 1.1 + 1e-9


@given(current=st.integers(0, 30), one=st.integers(0, 300), other=st.integers(0, 300))
def test_more_load_never_asks_for_less(current: int, one: int, other: int) -> None:
    less, more = sorted((one, other))
    assert recommended_replicas(load(less), current, 2) <= recommended_replicas(
        load(more), current, 2
    )


@given(loads=st.lists(st.tuples(st.integers(0, 50), st.floats(0.1, 60)), max_size=60))
def test_the_window_forgets_no_peak(loads: list[tuple[int, float]]) -> None:
    """For every load: no replica is removed that any moment of the window needed."""
    deployment = scaled(low=1, high=100, current=1)
    told: list[tuple[float, int]] = []
    for requests, after_s in loads:
        current = deployment.current or 1
        wanted = recommended_replicas(load(requests), current, 2)
        decision = deployment.look(load(requests), after_s=after_s)
        told.append((deployment.at_s, wanted))
        inside = [n for at_s, n in told if at_s > deployment.at_s - 300]
        assert decision.desired >= min(current, max(inside))


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
def test_bounds_by_schedule(
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


def test_after_a_swap_it_stays_at_zero_until_a_request_comes() -> None:
    deployment = scaled(low=0, current=1)
    decided = deployment.look(load(0))
    assert deployment.scaler.swappable() == ["m"]
    gone = deployment.scaler.after_swap("m", decided, remaining=0)
    assert (gone.desired, gone.reason) == (0, "GaveWay")
    deployment.current = 0
    assert deployment.look(load(0), after_s=1).desired == 0, (
        "the load of before the swap wakes nothing"
    )
    assert (deployment.look(load(0, waiting=1), after_s=1).reason) == "Woken"
    assert deployment.scaler.awaited() == ["m"]


@pytest.mark.parametrize(("low", "desired", "reason"), [(0, 0, "Unloaded"), (1, 1, "Steady")])
def test_an_unload_ends_all_replicas_unless_some_always_stay(
    low: int, desired: int, reason: str
) -> None:
    deployment = scaled(low=low, current=1)
    unloaded = deployment.scaler.after_unload("m", deployment.look(load(1)))
    assert (unloaded.desired, unloaded.reason) == (desired, reason)


@pytest.mark.parametrize("fields", [{"low": 1}, {"low": 0, "swap": "Pinned"}])
def test_pinned_replicas_and_a_minimum_give_no_way(fields: dict[str, Any]) -> None:
    deployment = scaled(current=1, **fields)
    deployment.look(load(0))
    assert deployment.scaler.swappable() == []


def test_minutes_with_requests_are_uses() -> None:
    deployment = scaled(low=0, current=1)
    for second in range(180):
        deployment.look(load(second % 2, finished=second), after_s=1)
    assert [round(figure) for figure in deployment.scaler.use("m", deployment.at_s)] == [3, 0]
    assert [round(figure, 1) for figure in deployment.scaler.use("m", deployment.at_s + 3600)] == [
        1.5,
        3600,
    ]
