"""Objectives of deployments, measured: burn rates over an hour and a day, a condition for each, and their metrics.

The error budget of an objective is the share of requests that may miss it. A burn rate of 1 uses exactly the budget;
above 1 the objective is missed (https://sre.google/workbook/alerting-on-slos/).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from dashboard.fleet_model import FleetModel
from dashboard.history.records import BUDGET_STEP_S, RequestSums
from insight.conditions import Row
from machinery.clock import Clock
from machinery.prometheus import Gauge
from reconciler.listers.caches import BY_KIND
from schemas.deployment import ModelDeployment
from schemas.meta import Condition, ConditionStatus
from schemas.objectives import Objectives
from schemas.wire.requests import EndedRequest

log = logging.getLogger(__name__)

WINDOWS: Final[Mapping[str, int]] = {"1h": 3600, "24h": 24 * 3600}
CONDITION: Final = "ObjectivesMet"
# Of the streams, one in twenty may be slower than the objective: p95.
_SLOW_BUDGET: Final = 0.05
_JUDGE_S: Final = 30.0
_LEAST_REQUESTS: Final = 20
"""Fewer requests in a window tell nothing about a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveState:
    """One objective in one window."""

    deployment: str
    objective: str
    """The field of spec.objectives."""
    target: float
    window: str
    requests: int
    """Requests of the window that count."""
    measured: float | None
    """In the unit of the target; None with too few requests."""
    burn_rate: float | None


def judge(
    name: str, objectives: Objectives, window: str, sums: RequestSums
) -> Iterator[ObjectiveState]:
    """Yield the state of each objective of a deployment. Pure."""
    for objective, target, requests, measured, missed, budget in _measured(objectives, sums):
        is_known = requests >= _LEAST_REQUESTS
        yield ObjectiveState(
            deployment=name,
            objective=objective,
            target=target,
            window=window,
            requests=int(requests),
            measured=measured if is_known else None,
            burn_rate=missed / budget if is_known else None,
        )


def _measured(
    objectives: Objectives, sums: RequestSums
) -> Iterator[tuple[str, float, float, float | None, float, float]]:
    """Yield objective, target, requests, the measured value, the share that missed it, and the budget. Pure."""
    if (target_ms := objectives.first_token_p95_ms) is not None:
        found = sums.quantile("first_token", 0.95)
        measured = None if found is None else round(found * 1000, 1)
        missed = sums.share_above("first_token", target_ms / 1000)
        count = sums.observations("first_token")
        yield "firstTokenP95Ms", target_ms, count, measured, missed, _SLOW_BUDGET
    if (rate := objectives.tokens_per_second) is not None:
        # 95 % are faster than the fifth percentile.
        found = sums.quantile("speed", 0.05)
        measured = None if found is None else round(found, 2)
        count = sums.observations("speed")
        missed = 1 - sums.share_above("speed", rate) if count else 0.0
        yield "tokensPerSecond", rate, count, measured, missed, _SLOW_BUDGET
    if (percent := objectives.availability_percent) is not None:
        requests, errors, *_ = sums.totals()
        missed = errors / requests if requests else 0.0
        measured = round(100 * (1 - missed), 3)
        yield "availabilityPercent", percent, requests, measured, missed, 1 - percent / 100


@dataclass(slots=True)
class ObjectiveMonitor:
    """Sums of the requests of each deployment in steps of five minutes, for a day, and what they say of objectives."""

    model: FleetModel
    clock: Clock
    _sums: dict[str, dict[int, RequestSums]] = field(default_factory=dict)
    """By deployment and by the begin of a step."""
    _conditions: dict[str, Condition] = field(default_factory=dict)

    async def run(self) -> None:
        """Judge the objectives twice a minute, forever."""
        await self.model.wait_ready()
        while True:
            self.judge_all()
            await self.clock.sleep(_JUDGE_S)

    def judge_all(self) -> None:
        """Compute the condition of each deployment with objectives."""
        before, self._conditions = self._conditions, {}
        for name, one in conditions(self.states(), self.clock.now()).items():
            old = before.get(name)
            if old is not None and old.status == one.status:
                since = {"last_transition_time": old.last_transition_time}
                self._conditions[name] = one.model_copy(update=since)
            else:
                log.debug(
                    "objectives judged",
                    extra={"deployment": name, "status": one.status.value, "reason": one.reason},
                )
                self._conditions[name] = one
        for name in {*before, *self._conditions}:
            self.model.set_condition("ModelDeployment", name, self._conditions.get(name))

    def restore(self, rows: Sequence[tuple[int, str, RequestSums]]) -> None:
        """Take the sums of an earlier run: begin of a step, deployment, sums."""
        for at_s, name, sums in rows:
            self._sums.setdefault(name, {}).setdefault(at_s, RequestSums()).add(sums)

    def rebuild(
        self, rows: Sequence[tuple[int, str, RequestSums]], since: Sequence[EndedRequest]
    ) -> None:
        """Replace all sums by those that were recorded, and by requests that were counted since then."""
        self._sums.clear()
        self.restore(rows)
        self.count(since)

    def count(self, ended: Sequence[EndedRequest]) -> None:
        """Count ended requests; those of clients' invented names belong to no deployment."""
        for request in ended:
            if request.deployment:
                at_s = int(request.time_s + request.whole_s) // BUDGET_STEP_S * BUDGET_STEP_S
                steps = self._sums.setdefault(request.deployment, {})
                steps.setdefault(at_s, RequestSums()).count(request)

    def states(self) -> list[ObjectiveState]:
        """Return the state of every objective in every window."""
        self._forget()
        objective_states: list[ObjectiveState] = []
        for name, objectives in self._declared():
            for window, seconds in WINDOWS.items():
                objective_states += judge(name, objectives, window, self._of_window(name, seconds))
        return objective_states

    def _declared(self) -> Iterator[tuple[str, Objectives]]:
        for api_object in self.model.caches.objects.specs.by_index(
            BY_KIND, "ModelDeployment"
        ).values():
            if isinstance(api_object, ModelDeployment) and api_object.spec.objectives is not None:
                yield api_object.name, api_object.spec.objectives

    def _of_window(self, name: str, seconds: int) -> RequestSums:
        now_s = self.clock.now().timestamp()
        total = RequestSums()
        for at_s, sums in self._sums.get(name, {}).items():
            # Steps after now are those of a clock that was set back.
            if now_s - seconds - BUDGET_STEP_S < at_s <= now_s:
                total.add(sums)
        return total

    def _forget(self) -> None:
        """Drop steps that no window has, and deployments without any."""
        oldest_s = self.clock.now().timestamp() - max(WINDOWS.values()) - BUDGET_STEP_S
        for name in list(self._sums):
            self._sums[name] = {at: one for at, one in self._sums[name].items() if at >= oldest_s}
            if not self._sums[name]:
                del self._sums[name]

    def lines(self) -> Iterator[str]:
        """Yield `fleet_objective_*` in Prometheus' text format."""
        states = self.states()
        names = ("deployment", "objective", "window")
        for name, help_, column in (
            ("fleet_objective_target", "The objective that is declared.", "target"),
            ("fleet_objective_measured", "What was measured, in its unit.", "measured"),
            (
                "fleet_objective_burn_rate",
                "Use of the error budget; above 1 it is missed.",
                "burn_rate",
            ),
        ):
            values = {
                (state.deployment, state.objective, state.window): value
                for state in states
                if (value := getattr(state, column)) is not None
            }
            yield from Gauge(name, help_, values.copy, labels=names).lines()


def state_row(one: ObjectiveState) -> Row:
    """Return a state as a row. Pure."""
    return {
        "deployment": one.deployment,
        "objective": one.objective,
        "window": one.window,
        "target": one.target,
        "measured": one.measured,
        "burnRate": None if one.burn_rate is None else round(one.burn_rate, 3),
        "requests": one.requests,
    }


def conditions(states: Sequence[ObjectiveState], now: datetime) -> dict[str, Condition]:
    """Return the condition of each deployment with objectives. Pure."""
    by_name: dict[str, list[ObjectiveState]] = {}
    for state in states:
        by_name.setdefault(state.deployment, []).append(state)
    return {name: _condition(found, now) for name, found in sorted(by_name.items())}


def _condition(states: Sequence[ObjectiveState], now: datetime) -> Condition:
    missed = [state for state in states if state.burn_rate is not None and state.burn_rate > 1]
    if all(state.burn_rate is None for state in states):
        return Condition(
            type=CONDITION,
            status=ConditionStatus.UNKNOWN,
            reason="TooFewRequests",
            message=f"each window has fewer than {_LEAST_REQUESTS} requests",
            last_transition_time=now,
        )
    if missed:
        return Condition(
            type=CONDITION,
            status=ConditionStatus.FALSE,
            reason="ObjectiveMissed",
            message="; ".join(map(_text, missed)),
            last_transition_time=now,
        )
    return Condition(
        type=CONDITION,
        status=ConditionStatus.TRUE,
        reason="ObjectivesMet",
        last_transition_time=now,
    )


def _text(one: ObjectiveState) -> str:
    measured, target = f"{one.measured:g}", f"{one.target:g}"
    return f"{one.objective} is {measured} over {one.window}, promised is {target} (burn rate {one.burn_rate:.1f})"
