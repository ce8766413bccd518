"""Canary analysis: when a step begins and ends, and what makes it fail."""

from datetime import UTC, datetime, timedelta
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.deployments.demand.gateway_metrics import VersionMetrics
from reconciler.deployments.rollout.canary import (
    CanaryBaselines,
    advance,
    canary_replicas,
    conclude,
    count_text,
    next_weight,
)
from schemas.deployment import CanaryStatus
from schemas.meta import CANARY_DECISION
from schemas.rollout import Canary, canary_decision, canary_decision_notes

START = datetime(2026, 3, 2, tzinfo=UTC)
CANARY = Canary.model_validate_json(
    '{"steps":[{"weight":10,"pause":"1m"},{"weight":50,"pause":"2m"}],'
    '"analysis":{"maxErrorRate":"5%","maxTtftP95":"2s","minTokensPerSecond":10,"minRequests":20}}'
)


def later(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def under_way(step: int = 0, weight: int = 10, **more: object) -> CanaryStatus:
    return CanaryStatus(template="new", step=step, weight=weight, since=START).model_copy(
        update=more
    )


def measured(
    requests: int = 20,
    *,
    errors: int = 0,
    ttft: tuple[int, int, int] = (0, 0, 0),
    speed: float | None = None,
) -> VersionMetrics:
    """`ttft`: how many first tokens came within 1 s, within 4 s, and after that."""
    one, four, more = ttft
    return VersionMetrics(
        requests=requests,
        errors=errors,
        first_tokens=((1.0, one), (4.0, one + four), (inf, one + four + more)),
        tokens=(speed or 0) * 10,
        token_seconds=10 if speed is not None else 0,
    )


def look(
    status: CanaryStatus | None,
    found: VersionMetrics | None,
    *,
    after_s: float,
    is_ready: bool = True,
    canary: Canary = CANARY,
) -> tuple[CanaryStatus, float | None]:
    return advance(canary, status, "new", is_new_ready=is_ready, measured=found, now=later(after_s))


def test_a_trial_that_goes_well() -> None:
    first, again_s = look(None, None, after_s=0, is_ready=False)
    assert (first.step, first.weight, again_s) == (0, 0, None)
    assert first.message == "step 1 of 2 waits for replicas to take 10% of the requests"
    assert next_weight(CANARY, None, "new") == next_weight(CANARY, first, "new") == 10
    waits, _ = look(first, None, after_s=300, is_ready=False)
    assert waits == first
    began, again_s = look(first, None, after_s=300)
    assert (began.weight, began.since, again_s) == (10, later(300), 60)
    assert began.message == "step 1 of 2: 10% of the requests, for 1m and at least 20 requests"
    assert look(began, measured(), after_s=340) == (began, 20)
    assert look(began, measured(19), after_s=400) == (began, None), "too few requests"
    second, again_s = look(began, measured(20), after_s=400)
    assert (second.step, second.weight, again_s) == (1, 10, 0.0)
    assert second.message == (
        "step 2 of 2 waits for replicas to take 50% of the requests; step 1 of 2 was passed "
        "(20 requests, 0 failed, no streams)"
    )
    assert next_weight(CANARY, second, "new") == 50
    began, again_s = look(second, measured(), after_s=500)
    assert (began.weight, again_s) == (50, 120)
    passed, again_s = look(began, measured(40, ttft=(40, 0, 0), speed=30), after_s=620)
    assert (passed.outcome, passed.step, passed.weight, again_s) == ("Passed", 2, 100, None)
    assert passed.message == (
        "all 2 steps were passed (40 requests, 0 failed, first token p95 0.95 s, 30.0 tokens/s)"
    )
    assert look(passed, measured(errors=20), after_s=900) == (passed, None)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        pytest.param(
            measured(20, errors=2),
            "step 1 of 2: 10.0% of the requests failed, 5% is allowed (20 requests, 2 failed, no streams)", id="errors",
        ),
        pytest.param(
            measured(20, ttft=(10, 10, 0)),
            "step 1 of 2: the first token took 3.70 s (p95), 2s is allowed (20 requests, 0 failed, first token p95 3.70 s)",
            id="slow-to-begin",
        ),
        pytest.param(
            measured(20, ttft=(0, 0, 20)),
            "step 1 of 2: the first token took 4.00 s (p95), 2s is allowed (20 requests, 0 failed, first token p95 4.00 s)",
            id="slower-than-any-bucket",
        ),
        pytest.param(
            measured(20, speed=9.5),
            "step 1 of 2: a request got 9.5 tokens/s, 10 is required (20 requests, 0 failed, no streams, 9.5 tokens/s)",
            id="slow-to-go-on",
        ),
    ],
)  # fmt: skip
def test_a_bad_version_fails_at_once(found: VersionMetrics, said: str) -> None:
    for is_ready in (True, False):
        failed, again_s = look(under_way(), found, after_s=1, is_ready=is_ready)
        assert (failed.outcome, failed.weight, failed.step, again_s) == ("Failed", 0, 0, None)
        assert failed.message == said
        assert look(failed, measured(500), after_s=9000) == (failed, None)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(None, id="nobody-knows"),
        pytest.param(measured(19, errors=19), id="too-few-requests"),
        pytest.param(measured(20, errors=1, ttft=(20, 0, 0), speed=10), id="just-good-enough"),
        pytest.param(measured(20, ttft=(0, 19, 0)), id="too-few-streams"),
    ],
)
def test_metrics_without_figures_change_nothing(found: VersionMetrics | None) -> None:
    assert look(under_way(), found, after_s=1) == (under_way(), 59)


def test_at_the_end_of_a_step_few_streams_are_enough() -> None:
    failed, _ = look(under_way(), measured(20, ttft=(0, 5, 0)), after_s=60)
    assert failed.outcome == "Failed"
    passed, _ = look(under_way(), measured(20, ttft=(0, 4, 0)), after_s=60)
    assert passed.outcome == "Running"


def test_without_a_least_number_five_requests_judge_and_none_are_waited_for() -> None:
    rules = CANARY.analysis.model_copy(update={"min_requests": 0})
    canary = CANARY.model_copy(update={"analysis": rules})
    assert look(under_way(), measured(4, errors=4), after_s=1, canary=canary)[1] == 59
    failed, _ = look(under_way(), measured(5, errors=1), after_s=1, canary=canary)
    assert failed.outcome == "Failed"
    assert look(under_way(), measured(0), after_s=60, canary=canary)[0].step == 1
    assert look(under_way(), None, after_s=60, canary=canary)[0].step == 0, "nobody was asked yet"


def test_a_first_token_is_limited_in_milliseconds() -> None:
    canary = CANARY.model_copy(
        update={"analysis": CANARY.analysis.model_copy(update={"max_ttft_p95": "500ms"})}
    )
    failed, _ = look(under_way(), measured(20, ttft=(20, 0, 0)), after_s=1, canary=canary)
    assert failed.message.startswith(
        "step 1 of 2: the first token took 0.95 s (p95), 500ms is allowed"
    )


@pytest.mark.parametrize(
    ("status", "found", "text"),
    [
        (under_way(), measured(13), "13 of 20 requests so far, 0 failed"),
        (under_way(), measured(16, errors=2), "16 of 20 requests so far, 2 failed"),
        (under_way(), None, "the gateways' figures are not known yet"),
        (under_way(weight=0), measured(13), ""),
        (under_way(outcome="Failed"), measured(13), ""),
        (under_way(step=2), measured(13), ""),
        (None, measured(13), ""),
    ],
)
def test_the_requests_of_a_step_are_counted(
    status: CanaryStatus | None, found: VersionMetrics | None, text: str
) -> None:
    assert count_text(CANARY, status, found) == text


def test_without_a_least_number_only_the_requests_are_counted() -> None:
    canary = Canary.model_validate_json('{"steps":[{"weight":10}],"analysis":{"minRequests":0}}')
    assert count_text(canary, under_way(), measured(7)) == "7 requests so far, 0 failed"


def test_a_step_does_not_end_without_its_replicas() -> None:
    assert look(under_way(), measured(), after_s=600, is_ready=False) == (under_way(), None)


def test_the_next_step_goes_bad_while_its_replicas_are_prepared() -> None:
    preparing = under_way(step=1, weight=10)
    assert look(preparing, measured(errors=20), after_s=1, is_ready=False)[0].outcome == "Failed"


def test_a_step_of_the_same_weight_needs_no_replicas() -> None:
    canary = Canary.model_validate_json('{"steps":[{"weight":10},{"weight":10,"pause":"3m"}]}')
    second, again_s = look(under_way(), measured(), after_s=60, canary=canary)
    assert (second.step, second.weight, again_s) == (1, 10, 180)


def test_a_new_template_restarts_the_analysis() -> None:
    old = under_way(step=1, weight=50, template="older", outcome="Failed")
    fresh, _ = look(old, measured(), after_s=9, is_ready=False)
    assert (fresh.template, fresh.step, fresh.weight, fresh.outcome) == ("new", 0, 0, "Running")
    assert next_weight(CANARY, old, "new") == 10


def test_steps_that_were_taken_out_of_the_spec() -> None:
    passed, _ = look(under_way(step=5), measured(), after_s=1)
    assert (passed.outcome, passed.message) == ("Passed", "the remaining steps were removed")


@pytest.mark.parametrize(
    ("wanted", "weight", "expected"),
    [(10, 10, 1), (10, 11, 2), (10, 100, 10), (3, 1, 1), (1, 50, 1), (0, 50, 0)],
)
def test_how_many_replicas_try_it(wanted: int, weight: int, expected: int) -> None:
    assert canary_replicas(wanted, weight) == expected


def test_the_book_counts_from_the_beginning_of_a_step() -> None:
    book, step = CanaryBaselines(), under_way()
    assert book.since_step("m", None, measured(5)) is None
    assert book.since_step("m", step, None) is None
    begun = book.since_step("m", step, measured(100, errors=3, ttft=(1, 2, 3)))
    assert begun is not None
    assert (begun.requests, begun.errors, begun.first_token_count) == (0, 0, 0)
    more = book.since_step("m", step, measured(130, errors=4, ttft=(5, 2, 4)))
    assert more is not None
    assert (more.requests, more.errors) == (30, 1)
    assert dict(more.first_tokens) == {1.0: 4, 4.0: 4, inf: 5}
    after = book.since_step("m", under_way(since=later(60)), measured(130))
    assert after is not None
    assert after.requests == 0, "another step"
    fewer = book.since_step("m", under_way(since=later(60)), measured(7))
    assert fewer is not None
    assert fewer.requests == 0, "whoever counts began anew"
    book.forget("m")
    again = book.since_step("m", under_way(since=later(60)), measured(140))
    assert again is not None
    assert again.requests == 0, "a new leader counts anew"


counts = st.lists(st.integers(0, 50), min_size=3, max_size=6)


@given(counts=counts, quantile=st.floats(0.01, 1))
def test_a_quantile_lies_where_the_rank_does(counts: list[int], quantile: float) -> None:
    bounds = [*(2.0**n for n in range(len(counts) - 1)), inf]
    totals = [sum(counts[: n + 1]) for n in range(len(counts))]
    version_metrics = VersionMetrics(first_tokens=tuple(zip(bounds, totals, strict=True)))
    value = version_metrics.first_token_quantile(quantile)
    if not totals[-1]:
        assert value is None
        return
    assert value is not None
    rank = quantile * totals[-1]
    place = next(n for n, total in enumerate(totals) if total >= rank - 1e-9)
    low = bounds[place - 1] if place else 0.0
    assert low - 1e-9 <= value <= min(bounds[place], bounds[-2]) + 1e-9


@given(
    requests=st.integers(0, 60),
    errors=st.integers(0, 60),
    after_s=st.floats(0, 300),
    is_ready=st.booleans(),
)
def test_a_step_is_never_passed_early_or_with_too_few(
    requests: int, errors: int, after_s: float, *, is_ready: bool
) -> None:
    metrics = measured(requests, errors=min(errors, requests))
    status, _ = look(under_way(), metrics, after_s=after_s, is_ready=is_ready)
    if status.step == 1:
        assert after_s >= 60
        assert requests >= 20
        assert metrics.error_rate <= 0.05
        assert is_ready
    if status.outcome == "Failed":
        assert metrics.error_rate > 0.05


def test_a_promoted_canary_passes_at_once() -> None:
    status = conclude(CANARY, under_way(), "new", "promote", later(9))
    assert (status.outcome, status.weight, status.step) == ("Passed", 100, 2)
    assert status.message == "step 1 of 2: promoted by `fleetctl rollout promote`"
    # It stays as it is, whatever is decided afterwards.
    assert conclude(CANARY, status, "new", "abort", later(10)) == status


def test_an_aborted_canary_fails_at_once() -> None:
    status = conclude(CANARY, under_way(1, 50), "new", "abort", later(9))
    assert (status.outcome, status.weight) == ("Failed", 0)
    assert status.message == "step 2 of 2: aborted by `fleetctl rollout abort`"


def test_a_decision_before_the_first_look_concludes_the_new_version() -> None:
    old = under_way(outcome="Passed").model_copy(update={"template": "old"})
    for before in (None, old):
        status = conclude(CANARY, before, "new", "abort", later(9))
        assert (status.template, status.outcome) == ("new", "Failed")


def test_a_decision_counts_for_its_generation_only() -> None:
    notes = canary_decision_notes("promote", 7)
    assert canary_decision(notes, 7) == "promote"
    assert canary_decision(notes, 8) is None
    assert canary_decision({}, 7) is None
    for wrong in ("promote", "promote x", "delete 7", "promote 7 7"):
        assert canary_decision({CANARY_DECISION: wrong}, 7) is None
