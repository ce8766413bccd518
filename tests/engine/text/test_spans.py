"""Stop words in texts that arrive in any pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.text.spans import StopMatcher

TEXTS = st.text(alphabet="abc", max_size=20)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    return shown + ("" if matcher.is_stopped else matcher.flush()), matcher.is_stopped


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 20), max_size=6))
def test_the_pieces_do_not_change_the_result(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(stops, pieces) == run(stops, list(text)) == run(stops, [text])


@given(text=TEXTS, stops=STOPS)
def test_shown_text_has_no_stop_word_and_is_complete(text: str, stops: list[str]) -> None:
    shown, is_stopped = run(stops, [text])
    assert is_stopped == any(stop in text for stop in stops)
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown)
    assert is_stopped or shown == text


def test_only_a_possible_stop_word_is_held_back() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.feed("a<") == "a"
    assert matcher.feed("/e") == ""
    assert matcher.feed("x") == "</ex"
    assert matcher.feed("</end>b") == ""
    assert matcher.feed("more") == ""
    assert matcher.flush() == ""
