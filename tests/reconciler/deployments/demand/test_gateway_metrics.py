"""Metrics of gateways become demand and counts: restarts, silence, and text that is not trusted."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.deployments.demand.gateway_metrics import (
    Demand,
    DemandTotals,
    GatewaySample,
    VersionSample,
    parse,
)
from reconciler.deployments.demand.scraper import is_significant

TEXT = r"""# HELP fleet_gateway_deployment_in_flight Requests at engines now.
# TYPE fleet_gateway_deployment_in_flight gauge
fleet_gateway_deployment_in_flight{deployment="m"} 3
fleet_gateway_deployment_in_flight{deployment="other"} 9
fleet_gateway_deployment_waiting{deployment="m"} 2
fleet_gateway_in_flight 12
fleet_gateway_version_requests_total{deployment="m",template="t1",outcome="ok"} 10
fleet_gateway_version_requests_total{deployment="m",template="t1",outcome="error"} 1
fleet_gateway_version_requests_total{deployment="m",template="t1",outcome="refused"} 4
fleet_gateway_version_requests_total{deployment="m",template="a\"\\\n",outcome="ok"} 1
fleet_gateway_version_first_token_seconds_bucket{deployment="m",template="t1",le="0.5"} 4
fleet_gateway_version_first_token_seconds_bucket{deployment="m",template="t1",le="+Inf"} 5
fleet_gateway_version_first_token_seconds_sum{deployment="m",template="t1"} 1.5
fleet_gateway_version_output_tokens_total{deployment="m",template="t1"} 90
fleet_gateway_version_output_seconds_total{deployment="m",template="t1"} 4.500000
"""
NEEDED = frozenset({"m"})


def test_the_metrics_of_a_gateway() -> None:
    sample = parse(TEXT, NEEDED)
    assert (sample.in_flight, sample.waiting) == ({"m": 3}, {"m": 2})
    assert sample.finished("m") == 16
    assert set(sample.versions["m"]) == {"t1", 'a"\\\n'}
    metrics = sample.versions["m"]["t1"].measured()
    assert (metrics.requests, metrics.errors, metrics.tokens_per_second) == (11, 1, 20)
    assert metrics.first_tokens == ((0.5, 4), (inf, 5))


@pytest.mark.parametrize(
    "line",
    [
        'fleet_gateway_deployment_in_flight{deployment="m"} NaN',
        'fleet_gateway_deployment_in_flight{deployment="m"} -1',
        'fleet_gateway_deployment_in_flight{deployment="m"} +Inf',
        'fleet_gateway_deployment_in_flight{deployment="m"} 1e99',
        'fleet_gateway_deployment_in_flight{deployment="m"}',
        "fleet_gateway_deployment_in_flight{deployment=m} 1",
        "fleet_gateway_deployment_in_flight 1",
        'xfleet_gateway_deployment_in_flight{deployment="m"} 1',
        ' fleet_gateway_deployment_in_flight{deployment="m"} 1',
    ],
)
def test_senseless_lines_are_skipped(line: str) -> None:
    assert parse(f"{line}\n", NEEDED) == GatewaySample()


def test_made_up_metrics_cost_no_memory() -> None:
    name = "fleet_gateway_version_first_token_seconds_bucket"
    lines = [f'{name}{{deployment="m",template="{n}",le="{n}"}} 1' for n in range(500)]
    lines += [f'{name}{{deployment="m",template="0",le="{n}"}} 1' for n in range(500)]
    busy = 'fleet_gateway_deployment_waiting{deployment="m"} 99999999999'
    sample = parse("\n".join([*lines, busy]), NEEDED)
    assert len(sample.versions["m"]) == 50
    assert len(sample.versions["m"]["0"].buckets) == 64
    assert sample.waiting == {"m": 100_000}


words = st.sampled_from([*TEXT.replace("{", " {").split(), *'{}"\\\n ='])
mixes = st.lists(st.one_of(words, st.text(max_size=5)), max_size=40).map("".join)


@given(text=st.one_of(st.text(), mixes))
def test_no_text_raises(text: str) -> None:
    tally = DemandTotals()
    for answer in (GatewaySample(), parse(text, NEEDED), parse(TEXT, NEEDED), parse(text, NEEDED)):
        tally.record({"g": answer}, {"g": "u"}, NEEDED, 0.0)
        for template in ("", "t1"):
            measured = tally.measured("m", template)
            assert measured is not None
            assert measured.requests >= measured.errors >= 0
            measured.first_token_quantile(0.95)


def sample(ok: int = 0, *, busy: int = 0, waiting: int = 0, template: str = "t") -> GatewaySample:
    version = VersionSample(outcomes={"ok": ok}, buckets={1.0: ok, inf: ok}, tokens=ok)
    return GatewaySample(
        in_flight={"m": busy}, waiting={"m": waiting}, versions={"m": {template: version}}
    )


def noted(tally: DemandTotals, now_s: float, **answers: GatewaySample | None) -> Demand:
    tally.record(answers, {id_: f"http://{id_}" for id_ in answers}, NEEDED, now_s)
    demand = tally.demand("m")
    assert demand is not None
    return demand


def test_gateways_are_added_up() -> None:
    tally = DemandTotals()
    assert tally.demand("m") is None
    assert tally.measured("m", "t") is None
    demand = noted(tally, 0, a=sample(busy=2), b=sample(busy=1, waiting=4))
    assert demand == Demand(in_flight=3, waiting=4, is_complete=True)


def test_the_last_answer_of_a_silent_gateway_counts_for_ten_seconds() -> None:
    tally = DemandTotals()
    noted(tally, 0, a=sample(busy=2), b=sample(busy=1))
    demand = noted(tally, 10, a=sample(busy=2), b=None)
    assert demand == Demand(in_flight=3, silent=("http://b",), is_complete=False)
    assert noted(tally, 10.5, a=sample(busy=2), b=None).in_flight == 2
    assert noted(tally, 11, a=sample(busy=2)).is_complete, "its lease is over: it is gone"


def test_without_a_gateway_the_demand_is_incomplete() -> None:
    assert noted(DemandTotals(), 0) == Demand(is_complete=False)
    assert noted(DemandTotals(), 0, a=None) == Demand(silent=("http://a",))


def test_counts_start_with_scraping_and_survive_restarts() -> None:
    tally = DemandTotals()

    def seen(**answers: GatewaySample | None) -> tuple[int, float, float]:
        demand, measured = noted(tally, 0, **answers), tally.measured("m", "t")
        assert measured is not None
        return demand.finished, measured.requests, measured.first_token_count

    assert seen(a=sample(100)) == (0, 0, 0)
    assert seen(a=sample(103)) == (3, 3, 3)
    assert seen(a=sample(103), b=sample(7)) == (3, 3, 3), "what b did before is nobody's news"
    assert seen(a=None, b=sample(9)) == (5, 5, 5)
    assert seen(a=sample(2), b=sample(9)) == (7, 7, 7), "a counts anew"
    assert seen(b=sample(9)) == (7, 7, 7)


def test_a_new_version_of_a_known_gateway_counts_from_zero() -> None:
    tally = DemandTotals()
    noted(tally, 0, a=sample(100))
    noted(tally, 1, a=GatewaySample(versions={"m": sample(4, template="new").versions["m"]}))
    measured = tally.measured("m", "new")
    assert measured is not None
    assert measured.requests == 4


def test_a_deployment_that_is_needed_later_starts_later() -> None:
    tally = DemandTotals()
    tally.record({"a": sample(5)}, {"a": "u"}, frozenset({"other"}), 0)
    assert noted(tally, 1, a=sample(9)).finished == 0
    assert noted(tally, 2, a=sample(10)).finished == 1


@pytest.mark.parametrize(
    ("told", "now", "since_s", "expected"),
    [
        (Demand(in_flight=100), Demand(in_flight=105), 99, False),
        (Demand(in_flight=100), Demand(in_flight=106), 0, True),
        (Demand(in_flight=1), Demand(in_flight=2), 0, True),
        (Demand(in_flight=1), Demand(waiting=1), 0, True),
        (Demand(), Demand(is_complete=True), 0, True),
        (Demand(silent=("a",)), Demand(silent=("b",)), 0, True),
        (Demand(finished=1), Demand(finished=2), 4, False),
        (Demand(finished=1), Demand(finished=2), 5, True),
        (Demand(finished=1), Demand(finished=1), 99, False),
    ],
)
def test_significant_changes(told: Demand, now: Demand, since_s: float, *, expected: bool) -> None:
    assert is_significant(told, now, since_s=since_s) is expected


counters = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20)), max_size=30)


@given(steps=counters)
def test_counts_never_decrease(steps: list[tuple[str, int]]) -> None:
    tally, before = DemandTotals(), 0.0
    for id_, ok in steps:
        noted(tally, 0, **{"a": None, "b": None, id_: sample(ok)})
        measured = tally.measured("m", "t")
        assert measured is not None
        assert measured.requests >= before
        before = measured.requests
