"""The six-word code: the same on both sides, another one with any other key."""

from hypothesis import given
from hypothesis import strategies as st

from identity.join_code import WORD_COUNT, WORDS, join_code, normalize_code

hashes = st.binary(min_size=32, max_size=32)


def test_the_words_are_told_apart_by_their_beginnings() -> None:
    assert len(WORDS) == len({word[:4] for word in WORDS}) == 1024
    assert all(word.isascii() and word.islower() and len(word) >= 4 for word in WORDS)


def test_a_code_stays_what_it_was() -> None:
    """Both sides compute it, and may be of different releases."""
    assert join_code(bytes(32), bytes(range(32))) == CODE


@given(hashes, hashes, hashes)
def test_codes_of_other_keys_differ(authority: bytes, key: bytes, other: bytes) -> None:
    code = join_code(authority, key)
    assert len(code.split()) == WORD_COUNT
    assert (code == join_code(authority, other)) == (key == other)
    assert (code == join_code(other, key)) == (authority == other)


@given(hashes, hashes, st.sampled_from([" ", "-", ", ", "\n", "_"]))
def test_a_person_may_type_other_separators(authority: bytes, key: bytes, between: str) -> None:
    code = join_code(authority, key)
    assert normalize_code(f" {between.join(code.split())}\n".upper()) == code


CODE = "jacket lava notebook bumper vanilla dream"
