"""Objectives of deployments: shares and burn rates from histograms, the condition, metrics, and a restart."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from dashboard.history.database import HistoryFile, HistoryLimits
from dashboard.history.records import Batch, RequestSums
from dashboard.objectives import ObjectiveState, conditions, judge
from schemas.objectives import Objectives
from schemas.wire.requests import EndedRequest
from store import codec
from store.port import Transport
from tests.support.dashboards import CLOCK, RunningDashboard, ended, running_dashboard
from tests.support.gateway_world import deployment
from tests.support.waiting import until_async


def sums_of(requests: Sequence[EndedRequest]) -> RequestSums:
    request_sums = RequestSums()
    for request in requests:
        request_sums.count(request)
    return request_sums


def states(objectives: Objectives, requests: Sequence[EndedRequest]) -> dict[str, ObjectiveState]:
    return {state.objective: state for state in judge("qwen", objectives, "1h", sums_of(requests))}


ALL = Objectives(first_token_p95_ms=2500, tokens_per_second=20, availability_percent=99)


def test_a_burn_rate_of_one_uses_exactly_the_budget() -> None:
    slow = [ended(number, first_ms=9000 if number < 5 else 100) for number in range(100)]
    assert states(ALL, slow)["firstTokenP95Ms"].burn_rate == pytest.approx(1.0)
    failed = [ended(n, outcome="failed" if n < 3 else "ok") for n in range(100)]
    state = states(ALL, failed)["availabilityPercent"]
    assert state.measured == 97.0
    assert state.burn_rate == pytest.approx(3.0)
    lame = [ended(number, tokens=4 if number < 20 else 101) for number in range(100)]
    assert states(ALL, lame)["tokensPerSecond"].burn_rate == pytest.approx(4.0)


def test_good_service_burns_nothing() -> None:
    objective_states = states(ALL, [ended(number) for number in range(50)])
    assert {state.burn_rate for state in objective_states.values()} == {0.0}
    assert objective_states["tokensPerSecond"].measured == pytest.approx(100, rel=0.3)
    (condition,) = conditions(list(objective_states.values()), CLOCK.now()).values()
    assert (condition.status.value, condition.reason) == ("True", "ObjectivesMet")


def test_few_requests_tell_nothing() -> None:
    objective_states = states(ALL, [ended(number, outcome="failed") for number in range(19)])
    assert {state.burn_rate for state in objective_states.values()} == {None}
    (condition,) = conditions(list(objective_states.values()), CLOCK.now()).values()
    assert (condition.status.value, condition.reason) == ("Unknown", "TooFewRequests")


def test_a_share_is_exact_at_bounds_and_bounded_within() -> None:
    sums = sums_of([ended(number, first_ms=1000 * number) for number in range(1, 11)])
    assert sums.share_above("first_token", 5.0) == pytest.approx(0.5)
    assert 0.5 < sums.share_above("first_token", 3.0) < 0.8
    assert RequestSums().share_above("first_token", 1.0) == 0.0
    assert sums.share_above("first_token", 10_000.0) == 0.0


def test_an_empty_promise_is_refused() -> None:
    with pytest.raises(ValidationError, match="promises nothing"):
        Objectives()
    assert states(ALL, [])["tokensPerSecond"].requests == 0


def test_the_sums_of_deployments_survive_a_restart(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path, HistoryLimits())
    now_s = CLOCK.now().timestamp()
    requests = [ended(number) for number in range(30)]
    file.write(Batch(at_s=now_s, requests=requests))
    file.write(Batch(at_s=now_s, requests=requests))
    found = file.restore(now_s + 60).deployments
    assert sum(sums.totals()[0] for _, _, sums in found) == 30
    assert {name for _, name, _ in found} == {"qwen"}
    file.close()


@pytest.mark.etcd
async def test_a_missed_objective_is_a_condition_a_route_and_a_metric(store: Transport) -> None:
    declared = deployment("qwen")
    spec = declared.spec.model_copy(update={"objectives": Objectives(availability_percent=99)})
    await store.commit([], [codec.put_spec(declared.model_copy(update={"spec": spec}))])
    async with running_dashboard(store) as it:
        it.dashboard.objectives.count(
            [ended(n, outcome="failed" if n < 30 else "ok") for n in range(60)]
        )
        it.dashboard.objectives.judge_all()

        async def is_shown() -> bool:
            return bool((await it.get("/api/v1/view/conditions?filter=ObjectiveMissed"))["total"])

        await until_async(is_shown, what="the condition")
        await check_condition(it)
        found = (await it.get("/api/v1/objectives"))["objectives"]
        assert [(one["window"], one["measured"], one["burnRate"]) for one in found] == [
            ("1h", 50.0, 50.0),
            ("24h", 50.0, 50.0),
        ]
        async with it.http.get(f"{it.url}/metrics") as response:
            text = await response.text()
        line = 'fleet_objective_burn_rate{deployment="qwen",objective="availabilityPercent",window="1h"} 50'
        assert line in text
        # Without the promise there is no condition.
        await store.commit([], [codec.put_spec(deployment("qwen"))])

        async def is_gone() -> bool:
            it.dashboard.objectives.judge_all()
            return not await is_shown()

        await until_async(is_gone, what="the end of the condition")


async def check_condition(it: RunningDashboard) -> None:
    snapshot = await it.get("/api/v1/snapshot?view=conditions")
    (row,) = [one for one in snapshot["views"]["conditions"] if one["type"] == "ObjectivesMet"]
    assert (row["status"], row["isProblem"]) == ("False", True)
    assert "availabilityPercent is 50 over 1h, promised is 99" in row["message"]
    assert "Add replicas" in row["cure"]
    assert row["since"] <= CLOCK.now().isoformat()
