"""Tests of `schemas.duration`, and of amounts in `schemas.quantity`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import duration, quantity


@pytest.mark.parametrize(("text", "seconds"), [
    ("90s", 90), ("10m", 600), ("1h30m", 5400), ("0s", 0), ("2h0m5s", 7205), ("100m", 6000),
    ("50ms", 0.05), ("1s500ms", 1.5), ("2m5ms", 120.005), ("0ms", 0),
])  # fmt: skip
def test_a_duration_means_seconds(text: str, seconds: float) -> None:
    assert duration.parse(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "0.5s", "m", "ms", "10s5m", "50ms1s", "-1s", "1d", "5us", "\u0661s"]
)
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration; write .* as in 1h30m, 90s or 500ms"):
        duration.parse(text)


@pytest.mark.parametrize(("seconds", "text"), [
    (5, "5s"), (2.0, "2s"), (0.25, "250ms"), (90.5, "1m30s500ms"), (0, "0s"), (-1, None),
    (float("inf"), None), (float("nan"), None), (10**99, None),
])  # fmt: skip
def test_a_bare_number_is_meant_in_seconds(seconds: float, text: str | None) -> None:
    assert duration.Unit().spell(seconds) == text
    assert duration.Unit(is_positive=True).spell(0) is None


@pytest.mark.parametrize(("text", "meant"), [
    ("0.5s", "500ms"), ("1.5 hours", "1h30m"), ("10min", "10m"), ("2 days", "48h"), ("5us", None),
])  # fmt: skip
def test_other_spellings_are_translated(text: str, meant: str | None) -> None:
    assert duration.Unit().translate(text) == meant


@given(st.integers(0, 9999 * 3600))
def test_a_shown_duration_can_be_parsed(seconds: int) -> None:
    assert duration.parse(duration.show(seconds)) == seconds


@pytest.mark.parametrize(("value", "whole", "up", "down"), [
    (2, 10, 2, 2), ("25%", 10, 3, 2), ("0%", 10, 0, 0), ("100%", 3, 3, 3), ("1%", 1, 1, 0),
])  # fmt: skip
def test_amount_is_number_or_a_percentage(value: int | str, whole: int, up: int, down: int) -> None:
    assert quantity.resolve_amount(value, whole, round_up=True) == up
    assert quantity.resolve_amount(value, whole, round_up=False) == down
