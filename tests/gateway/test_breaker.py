"""When a failing endpoint is asked last, and when again: every way through the breaker, and what always holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.forwarding.outlier_detection import FAILURES, LONGEST_OPEN_S, PAUSE_S, Breaker, Fault

MIDDLE = 0.5


def opened(fault: Fault = "bad", *, at_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    times = 1 if fault == "gone" else FAILURES
    opens = [breaker.failed(fault, at_s, draw=MIDDLE) for _ in range(times)]
    assert opens[-1]
    return breaker


def test_one_failure_is_a_moments_rest() -> None:
    breaker = Breaker()
    assert not breaker.failed("bad", 0.0, draw=MIDDLE)
    assert breaker.phase(0.0) == "closed"
    assert breaker.shuns(PAUSE_S - 0.01)
    assert not breaker.shuns(PAUSE_S)


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker()
    opens = [breaker.failed("bad", 0.0, draw=MIDDLE) for _ in range(FAILURES + 1)]
    assert opens == [False, False, True, False]
    assert breaker.phase(0.5) == "open"


def test_an_answer_in_between_begins_the_row_anew() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.failed("bad", 0.0, draw=MIDDLE)
        breaker.succeeded(0.0, 0.0)
    assert breaker.phase(0.0) == "closed"


def test_half_of_ten_requests_open_it() -> None:
    breaker = Breaker()
    found = []
    for _ in range(5):
        breaker.succeeded(0.0, 0.0)
        found.append(breaker.failed("bad", 0.0, draw=MIDDLE))
    assert found == [False, False, False, False, True]


def test_who_is_full_is_left_alone_for_as_long_as_it_asks_and_never_ejected() -> None:
    breaker = Breaker()
    for _ in range(100):
        assert not breaker.failed("full", 0.0, draw=MIDDLE, pause_s=5.0)
    assert breaker.shuns(4.9)
    assert not breaker.shuns(5.0)
    breaker.failed("full", 10.0, draw=MIDDLE, pause_s=86_400.0)
    assert not breaker.shuns(20.0)


def test_half_open_lets_one_request_through() -> None:
    breaker = opened()
    assert not breaker.asked(0.5)  # as the last resort
    assert not breaker.shuns(1.0)
    assert breaker.phase(1.0) == "half_open"
    assert breaker.asked(1.0)
    assert breaker.shuns(1.0)
    assert not breaker.asked(1.0)
    breaker.succeeded(1.0, 1.2)
    assert breaker.phase(1.2) == "closed"
    assert not breaker.shuns(1.2)


def test_who_fails_on_trial_rests_twice_as_long_each_time_up_to_a_cap() -> None:
    breaker, now_s, rests = opened(), 0.0, []
    for _ in range(8):
        until_s = breaker.until_s()
        rests.append(until_s - now_s)
        now_s = until_s
        assert breaker.asked(now_s)
        assert breaker.failed("bad", now_s, draw=MIDDLE)
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_OPEN_S, LONGEST_OPEN_S, LONGEST_OPEN_S]


def test_a_trial_whose_client_left_makes_room_for_another() -> None:
    breaker = opened()
    assert breaker.asked(1.0)
    breaker.left()
    assert not breaker.shuns(1.0)
    assert breaker.asked(1.0)


def test_an_answer_to_what_was_asked_before_it_opened_does_not_close_it() -> None:
    breaker = opened(at_s=5.0)
    breaker.succeeded(4.0, 6.0)
    assert breaker.is_open
    breaker.succeeded(5.5, 6.0)  # asked as the last resort
    assert not breaker.is_open


def test_who_is_gone_is_not_tried_with_a_request() -> None:
    breaker = opened("gone")
    assert breaker.shuns(1e6)
    assert not breaker.asked(1e6)
    breaker.lives()
    assert not breaker.shuns(1e6)


def test_a_sign_of_life_does_not_help_who_answers_wrongly() -> None:
    breaker = opened("bad")
    breaker.lives()
    assert breaker.shuns(0.5)
    # But who turns out to be gone meanwhile waits for one.
    breaker.failed("gone", 0.6, draw=MIDDLE)
    assert breaker.shuns(1e6)


def test_who_was_silent_is_tried_once_it_gives_a_sign_of_life_and_its_time_is_over() -> None:
    breaker = opened("silent")
    assert breaker.shuns(1e6)
    breaker.lives()
    assert breaker.phase(0.5) == "open"
    assert breaker.asked(1.0)
    assert breaker.failed("silent", 1.0, draw=MIDDLE)
    breaker.failed("gone", 1.5, draw=MIDDLE)
    breaker.lives()
    assert breaker.phase(1.5) == "closed"  # that it hung was all


def test_jitter_spreads_gateways() -> None:
    rests = []
    for draw in (0.0, 0.999):
        breaker = Breaker()
        for _ in range(FAILURES):
            breaker.failed("bad", 0.0, draw=draw)
        rests.append(breaker.until_s())
    assert rests == pytest.approx([1.0, 1.25], abs=0.01)  # never shorter than the pause


def test_it_is_forgotten_when_all_was_well_for_long() -> None:
    breaker = Breaker()
    breaker.failed("bad", 0.0, draw=MIDDLE)
    assert not breaker.is_forgotten(9.0)
    assert breaker.is_forgotten(10.1)
    assert not opened().is_forgotten(1e6)


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["bad", "silent", "full", "gone", "asked", "left", "answered", "old", "lives"]
        ),
        st.floats(0, 5),
        st.floats(0, 1, exclude_max=True),
    ),
    max_size=60,
)


@given(steps)
def test_whatever_happens(story: list[tuple[str, float, float]]) -> None:
    """At most one is tried at a time, an answer closes it at once, and no rest is longer than the cap."""
    breaker, now_s, trials = Breaker(), 0.0, 0
    for what, later_s, draw in story:
        now_s += later_s
        match what:
            case "bad" | "silent" | "full" | "gone":
                breaker.failed(what, now_s, draw=draw)
                trials = 0
            case "asked":
                trials += breaker.asked(now_s)
            case "left":
                breaker.left()
                trials = 0
            case "answered":
                breaker.succeeded(now_s, now_s)
                trials = 0
                assert breaker.phase(now_s) == "closed"
            case "old":
                breaker.succeeded(-1.0, now_s)
            case _:
                breaker.lives()
        assert trials <= 1
        assert breaker.until_s() <= now_s + LONGEST_OPEN_S * 1.25
        if breaker.phase(now_s) == "open":
            assert breaker.shuns(now_s)
