"""A recorded week of requests, played against a policy of sleep and wake: awake hours, energy and waiting time.

The decisions are those of the reconciler (`reconciler/nodes/power.py`), minute by minute. Pure, but for reading the file.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from machinery.text_table import align_columns
from manifests.errors import ManifestErrors
from manifests.load import load_documents, read_model
from manifests.trees import Tree
from reconciler.nodes import demand_week
from reconciler.nodes.power import PowerPolicy, PowerView, decide, power_policy
from schemas.duration import Duration, parse
from schemas.meta import ApiModel, ObjectMeta, ObjectName
from schemas.pools import NodePool, NodePoolSpec, PoolPower
from schemas.power import HOURS_OF_WEEK, DemandWeek

_MOST_WEEKS: Final = 8
_STEP_S: Final = 60.0
_HOUR_S: Final = 3600.0
# A Monday, 0:00 UTC.
_BEGIN: Final = datetime(2026, 1, 5, tzinfo=UTC)
_Watts = Annotated[float, Field(ge=0, le=10_000)]


class WeekMac(ApiModel):
    """One Mac of the week."""

    name: ObjectName
    models: Annotated[tuple[str, ...], Field(min_length=1, max_length=1000)]
    """The models whose requests it serves."""
    awake_watts: _Watts
    """Mean power while it is awake, such as 40."""
    asleep_watts: _Watts = 1.0
    """Mean power while it sleeps."""


class HourOfRequests(ApiModel):
    """The requests for a model in one hour."""

    hour: Annotated[int, Field(ge=0, lt=_MOST_WEEKS * HOURS_OF_WEEK)]
    """Hours since Monday, 0:00 UTC of the first week; 168 is the first hour of the second."""
    model: str
    count: Annotated[int, Field(ge=1, le=1_000_000)]


class WeekFile(ApiModel):
    """The file of `fleetctl simulate --week`. The last week is measured; earlier ones are learned before."""

    macs: Annotated[tuple[WeekMac, ...], Field(min_length=1, max_length=1000)]
    power: PoolPower
    """The policy to measure, as in spec.power of a NodePool."""
    wake_time: Duration = "20s"
    """Time from a magic packet until the Mac serves."""
    request_time: Duration = "15s"
    """Mean time that a request takes."""
    requests: Annotated[tuple[HourOfRequests, ...], Field(min_length=1, max_length=100_000)]

    @model_validator(mode="after")
    def _names_models(self) -> Self:
        known = {model for mac in self.macs for model in mac.models}
        unknown = sorted({each.model for each in self.requests} - known)
        if unknown:
            raise ValueError(f"requests name {unknown[0]}, which is no model of macs")
        return self

    @property
    def weeks(self) -> int:
        """Return the number of weeks, the last one included."""
        return max(each.hour for each in self.requests) // HOURS_OF_WEEK + 1


def read_week(path: str) -> WeekFile:
    """Read the file of a week. Raises ManifestErrors."""
    first, *more = load_documents([path])
    if more:
        hint = "Put all requests into one list"
        raise ManifestErrors([more[0].problem((), "a week is a single document", hint)])
    return read_model(first, WeekFile)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeekResult:
    """The last week under one policy."""

    policy: str
    awake_hours: float
    kwh: float
    wakes: int
    waits_s: tuple[float, ...]
    """Time that each request waited for a Mac to wake."""
    forecast_waits_s: tuple[float, ...]
    """The same of the requests in hours that were forecast."""


@dataclass(slots=True, kw_only=True)
class _Mac:
    """The state of one Mac; times are seconds since the begin."""

    spec: WeekMac
    awake_since: float | None = 0.0
    serves_at: float = 0.0
    used_until: float = 0.0
    awake_s: float = 0.0
    wakes: int = 0

    def wake(self, at: float, takes_s: float) -> None:
        if self.awake_since is None:
            self.awake_since, self.serves_at = at, at + takes_s
            self.wakes += 1

    def count(self, until: float) -> None:
        """Count the time awake so far, and begin anew."""
        if self.awake_since is not None:
            self.awake_s += until - self.awake_since
            self.awake_since = until


def play(week: WeekFile, policy: PowerPolicy, label: str) -> WeekResult:
    """Return the last week under the policy, after the weeks before it."""
    macs = [_Mac(spec=spec) for spec in week.macs]
    wake_s, request_s = parse(week.wake_time), parse(week.request_time)
    arrivals = _arrivals(week)
    weeks = {model: demand_week.EMPTY_WEEK for mac in week.macs for model in mac.models}
    measured_from = (week.weeks - 1) * HOURS_OF_WEEK
    waits: list[float] = []
    forecast_waits: list[float] = []
    for hour in range(week.weeks * HOURS_OF_WEEK):
        if hour == measured_from:
            for mac in macs:
                mac.count(hour * _HOUR_S)
                mac.awake_s, mac.wakes = 0.0, 0
        for at in (hour * _HOUR_S + step * _STEP_S for step in range(60)):
            now = _BEGIN + timedelta(seconds=at)
            for mac in macs:
                _apply_policy(mac, policy, weeks, now, at, wake_s)
            for arrival, model in arrivals.pop(int(at // _STEP_S), ()):
                able = [mac for mac in macs if model in mac.spec.models]
                mac = next((mac for mac in able if mac.awake_since is not None), able[0])
                mac.wake(arrival, wake_s)
                wait = max(0.0, mac.serves_at - arrival)
                mac.used_until = max(mac.used_until, arrival + wait + request_s)
                if hour >= measured_from:
                    waits.append(wait)
                    if demand_week.is_usual(weeks[model], hour % HOURS_OF_WEEK):
                        forecast_waits.append(wait)
        used = {each.model for each in week.requests if each.hour == hour}
        for model, learned in weeks.items():
            weeks[model] = demand_week.with_hour(
                learned, hour % HOURS_OF_WEEK, is_used=model in used
            )
    for mac in macs:
        mac.count(week.weeks * HOURS_OF_WEEK * _HOUR_S)
    hours = [mac.awake_s / _HOUR_S for mac in macs]
    return WeekResult(
        policy=label,
        awake_hours=sum(hours),
        kwh=sum(
            awake * mac.spec.awake_watts + (HOURS_OF_WEEK - awake) * mac.spec.asleep_watts
            for awake, mac in zip(hours, macs, strict=True)
        )
        / 1000,
        wakes=sum(mac.wakes for mac in macs),
        waits_s=tuple(waits),
        forecast_waits_s=tuple(forecast_waits),
    )


def _arrivals(week: WeekFile) -> dict[int, list[tuple[float, str]]]:
    """Return the requests by minute, spread evenly over their hours."""
    arrivals: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for each in week.requests:
        for number in range(each.count):
            at = (each.hour + (number + 0.5) / each.count) * _HOUR_S
            arrivals[int(at // _STEP_S)].append((at, each.model))
    return {minute: sorted(those) for minute, those in arrivals.items()}


def _apply_policy(
    mac: _Mac,
    policy: PowerPolicy,
    weeks: dict[str, DemandWeek],
    now: datetime,
    at: float,
    wake_s: float,
) -> None:
    is_asleep = mac.awake_since is None
    view = PowerView(
        policy=policy,
        is_asleep=is_asleep,
        quiet_s=at - mac.used_until,
        is_expected=any(demand_week.is_expected(weeks[model], now) for model in mac.spec.models),
    )
    is_wanted = decide(view, now).is_awake
    if is_wanted:
        mac.wake(at, wake_s)
    elif not is_asleep and mac.used_until <= at:
        mac.count(at)
        mac.awake_since = None


def compare(week: WeekFile) -> tuple[WeekResult, WeekResult]:
    """Return the week under AlwaysOn and under the policy of the file."""
    pool = NodePool(metadata=ObjectMeta(name="week"), spec=NodePoolSpec(power=week.power))
    policy = power_policy([pool])
    return play(week, PowerPolicy(), "AlwaysOn"), play(week, policy, week.power.mode)


def p95(waits_s: Sequence[float]) -> float:
    """Return the 95th percentile; 0 of nothing."""
    ordered = sorted(waits_s)
    return ordered[ceil(0.95 * len(ordered)) - 1] if ordered else 0.0


def result_tree(result: WeekResult) -> dict[str, Tree]:
    """Return a result for `-o json` and `-o yaml`."""
    return {
        "policy": result.policy,
        "awakeHours": round(result.awake_hours, 1),
        "kilowattHours": round(result.kwh, 2),
        "wakes": result.wakes,
        "requests": len(result.waits_s),
        "waited": sum(wait > 0 for wait in result.waits_s),
        "p95WaitSeconds": round(p95(result.waits_s), 1),
        "p95WaitSecondsOfForecastHours": round(p95(result.forecast_waits_s), 1),
    }


def results_text(results: Sequence[WeekResult]) -> str:
    """Return the results as a table, with what the policy saves."""
    titles = (
        "POLICY",
        "AWAKE HOURS",
        "KWH",
        "WAKES",
        "REQUESTS",
        "WAITED",
        "P95 WAIT (S)",
        "IN FORECAST HOURS",
    )
    rows = [[str(value) for value in result_tree(result).values()] for result in results]
    first, last = results[0], results[-1]
    saved = 1 - last.awake_hours / first.awake_hours
    return f"{align_columns(rows, titles)}\n\n{last.policy} saves {saved:.0%} of the awake hours.\n"
