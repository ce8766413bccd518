"""Delays grow to a limit, and jitter shortens them by at most half."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery.backoff import Backoff


@pytest.mark.parametrize(
    ("failures", "expected"), [(-1, 0), (0, 0), (1, 0.5), (2, 1), (3, 2), (4, 3), (10_000, 3)]
)
def test_waits_double_to_the_limit(failures: int, expected: float) -> None:
    assert Backoff(first_s=0.5, limit_s=3).delay_s(failures) == expected


@given(
    failures=st.integers(1, 10**6),
    jitter=st.floats(0, 1),
    first_s=st.floats(0.001, 10),
    factor=st.floats(1, 10),
)
def test_a_wait_is_never_short_nor_beyond_the_limit(
    failures: int, jitter: float, first_s: float, factor: float
) -> None:
    backoff = Backoff(first_s=first_s, limit_s=30, factor=factor)
    full, found = backoff.delay_s(failures), backoff.delay_s(failures, jitter=jitter)
    assert full / 2 <= found <= full <= 30
    assert backoff.delay_s(failures + 1) >= full
