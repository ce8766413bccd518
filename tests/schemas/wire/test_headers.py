"""Header names, and the values that more than one process parses."""

import pytest

from schemas.wire import headers
from schemas.wire.errors import RefusedError

NAMES = [
    name
    for key, value in vars(headers).items()
    if key.isupper() and key != "STORE_STALE"
    for name in (value if isinstance(value, tuple) else (value,))
    if isinstance(name, str)
]


def test_names_are_lower_case_and_unique() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert [name for name in NAMES if name != name.lower() or not name.isascii()] == []


@pytest.mark.parametrize(("text", "seconds"), [("2.5", 2.5), ("86400", 86_400.0), ("1e-3", 0.001)])
def test_a_timeout_is_a_number_of_seconds(text: str, seconds: float) -> None:
    assert headers.parse_timeout(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "86401", "2 s", "x" * 100])
def test_other_timeouts_are_refused_and_named(text: str) -> None:
    with pytest.raises(RefusedError) as refused:
        headers.parse_timeout(text)
    refusal = refused.value.refusal
    assert (refusal.status, refusal.param) == (400, "x-request-timeout")
    assert f"above 0 and at most 86400, such as 2.5; it is {text[:50]!r}." in refusal.message


@pytest.mark.parametrize(("seconds", "text"), [
    (0.0, "0s"), (0.0195, "20ms"), (0.9999, "1s"), (1.0, "1s"), (1.2, "2s"), (59.01, "1m0s"),
    (360.0, "6m0s"), (3600.0 * 25 + 61, "25h1m1s"),
])  # fmt: skip
def test_resets_have_the_format_of_openai(seconds: float, text: str) -> None:
    assert headers.format_reset(seconds) == text
