"""The layout of a batch's caches: a table of situations, and what holds in all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.batch_layout import RowLength, is_padding_cheap, padded_slots, should_pad
from models.footprint import KvFootprint, cache_slots

rows = st.lists(
    st.builds(lambda tokens, more: RowLength(tokens, tokens + more), *[st.integers(1, 5000)] * 2),
    max_size=16,
)


def lengths(*tokens: int, more: int = 1000) -> list[RowLength]:
    return [RowLength(token, token + more) for token in tokens]


@pytest.mark.parametrize(
    ("found", "is_cheap"),
    [
        pytest.param([], False, id="no-rows"),
        pytest.param(lengths(500), False, id="one-row"),
        pytest.param(lengths(500, 500, 500), True, id="equal"),
        pytest.param(lengths(3000, 2100, 2100), True, id="a-fifth"),
        pytest.param(lengths(3000, 2000, 2000), False, id="more-than-a-fifth"),
        pytest.param(lengths(150, 20, 90), True, id="short-and-different"),
        pytest.param(lengths(1000, 20, 90), False, id="different"),
        pytest.param(lengths(*range(50, 4050, 250)), False, id="mixed"),
        pytest.param(lengths(257, 250, 250, more=0), False, id="larger-than-promised"),
        pytest.param(lengths(257, 250, 250, more=6), False, id="promises-in-whole-steps"),
        pytest.param(lengths(257, 250, 250, more=7), True, id="just-as-promised"),
        pytest.param(lengths(1, 1, more=1), True, id="in-one-small-step"),
    ],
)
def test_rows_of_about_equal_lengths_share_an_array(found: list[RowLength], is_cheap: bool) -> None:
    assert is_padding_cheap(found) == is_cheap
    assert should_pad(found, steps=1_000) == is_cheap
    assert not should_pad(found, steps=0)


def test_longer_rows_must_have_been_together_for_longer() -> None:
    def steps(tokens: int) -> int:
        return next(n for n in range(1_000) if should_pad(lengths(tokens, tokens), steps=n))

    assert steps(60) < steps(600) < steps(4_000) < 200


@given(rows)
def test_a_padded_array_never_exceeds_what_its_rows_were_promised(found: list[RowLength]) -> None:
    if is_padding_cheap(found):
        longest = max(row.tokens for row in found)
        padded = len(found) * cache_slots(longest, padded_slots(found))
        promised = KvFootprint(token_bytes=3, by_rows=True)
        assert 3 * padded <= promised.batch_bytes([row.promised for row in found])
