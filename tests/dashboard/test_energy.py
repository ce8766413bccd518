"""Energy: power is divided by tokens, gaps and unknown power are no zeros, and reasons are given."""

import math

import pytest

from dashboard.energy import NO_POWER, NO_REQUEST, ShareCounter, divide_power, energy_row
from dashboard.history.queries import Point
from tests.support.dashboards import ended

UNKNOWN = math.nan


def known(*values: float | None) -> list[Point]:
    return [(value, value, value) for value in values]


def test_the_power_of_a_mac_is_divided_by_tokens() -> None:
    counts = {("a", "one"): (2, 300), ("a", "two"): (1, 100), ("b", "one"): (1, 50)}
    found = divide_power(counts, {"a": 40.0, "b": 10.0}, 10)
    assert found["one"] == pytest.approx((40.0, 0.3, 35.0))
    assert found["two"] == pytest.approx((10.0, 0.1, 10.0))


def test_unknown_power_takes_its_requests_along() -> None:
    counts = {("a", "one"): (2, 300), ("b", "one"): (5, 500), ("b", "two"): (1, 10)}
    found = divide_power(counts, {"a": 30.0, "b": UNKNOWN}, 10)
    assert found == {"one": (30.0, 0.2, 30.0)}
    assert divide_power({("a", "one"): (1, 0)}, {"a": 30.0}, 10) == {}


def test_a_row_counts_only_time_in_which_everything_is_known() -> None:
    row = energy_row("model/m", known(20, None, 40), known(1, 1, 1), known(100, 100, 300), 10)
    assert (row["joules"], row["knownSeconds"], row["requests"]) == (600, 20, 20)
    assert (row["joulesPerRequest"], row["joulesPer1000Tokens"]) == (30, 150)
    assert row["reason"] is None


@pytest.mark.parametrize(
    ("watts", "requests", "reason"),
    [((None, None), (1, 1), NO_POWER), ((20, 20), (0, 0), NO_REQUEST)],
)
def test_what_cannot_be_known_is_null_with_its_reason(
    watts: tuple[float | None, ...], requests: tuple[float, ...], reason: str
) -> None:
    row = energy_row("model/m", known(*watts), known(*requests), known(*requests), 10)
    assert (row["joulesPerRequest"], row["joulesPer1000Tokens"], row["reason"]) == (
        None,
        None,
        reason,
    )


def test_requests_are_counted_once_and_for_their_mac() -> None:
    counter = ShareCounter()
    counter.count([ended(1), ended(2)])
    assert counter.take() == {("mac-1", "qwen"): (2, 202)}
    assert counter.take() == {}
