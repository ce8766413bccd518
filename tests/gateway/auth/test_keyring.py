"""The token bucket: its admission over any time is bounded, and waiting always ends."""

import math

from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.keyring import TokenBucket

rates = st.floats(min_value=0.1, max_value=1e6)
steps = st.lists(st.tuples(st.floats(0, 120), st.floats(0, 5_000)), max_size=40)


@given(rates, st.lists(st.floats(0, 30), max_size=60))
def test_requests_over_any_time_are_bounded(per_minute: float, pauses: list[float]) -> None:
    bucket, now_s, taken = TokenBucket(per_minute, 0.0), 0.0, 0
    for pause_s in pauses:
        now_s += pause_s
        while bucket.level(now_s) >= 1 and taken < 1_000:
            bucket.take(1)
            taken += 1
    assert taken <= max(1.0, per_minute) + per_minute / 60 * now_s + 1e-6


@given(rates, steps)
def test_debts_are_paid_back(per_minute: float, asked: list[tuple[float, float]]) -> None:
    """Requests admitted before their cost is known get no more than the rate and one debt."""
    bucket, now_s, charged, largest = TokenBucket(per_minute, 0.0), 0.0, 0.0, 0.0
    for pause_s, tokens in asked:
        now_s += pause_s
        if bucket.level(now_s) > 0:
            bucket.take(tokens)
            charged, largest = charged + tokens, max(largest, tokens)
    bound = max(1.0, per_minute) + per_minute / 60 * now_s + largest
    assert charged <= bound * (1 + 1e-9) + 1e-6


@given(rates, st.floats(0, 1e6), st.floats(1, 100))
def test_the_reported_wait_is_long_enough(per_minute: float, taken: float, wanted: float) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    wanted = min(wanted, bucket.capacity)
    bucket.take(taken)
    wait_s = bucket.wait_s(wanted)
    assert math.isfinite(wait_s)
    assert bucket.level(wait_s) >= wanted * (1 - 1e-6) - 1e-6


@given(rates, rates, st.floats(0, 1e6))
def test_another_rate_forgives_no_debt_and_gives_nothing(
    before: float, after: float, taken: float
) -> None:
    bucket = TokenBucket(before, 0.0)
    bucket.take(taken)
    level = bucket.level(0.0)
    bucket.resize(after, 0.0)
    assert bucket.level(0.0) <= min(level, max(1.0, after))


def test_a_clock_that_stands_still_fills_nothing() -> None:
    bucket = TokenBucket(60, 5.0)
    bucket.take(60)
    assert bucket.level(5.0) == 0
    assert bucket.level(4.0) == 0
    assert bucket.level(6.0) == 1
    assert bucket.full_s() == 59
