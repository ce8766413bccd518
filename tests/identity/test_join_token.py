"""Join tokens as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from identity.join_token import TokenError, is_secret, new_token, parse_token, secret_hash


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=21, max_size=21))
def test_a_token_is_read_as_it_was_written(authority: bytes, entropy: bytes) -> None:
    token = new_token(authority, entropy)
    assert parse_token(f" {token.render()}\n") == token
    assert is_secret(token.secret_text, secret_hash(token.secret_text))


@given(st.text(max_size=300))
def test_other_texts_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(TokenError) as info:
        parse_token(f"mf1.{text}!")
    assert "mf1.<52" in str(info.value)


def test_a_token_does_not_show_its_secret_in_logs() -> None:
    token = new_token(bytes(32), bytes(range(21)))
    assert token.secret_text not in repr(token)
