"""The circuit breaker: every transition, and properties of all histories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.forwarding.outlier_detection import LONGEST_OPEN_S, PAUSE_S, Breaker, Fault
from gateway.routing.table import DEFAULT_CHECKS

MIDDLE = 0.5
FAILURES = DEFAULT_CHECKS.failures


def opened(fault: Fault = "bad", *, at_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    times = 1 if fault == "gone" else FAILURES
    opens = [breaker.record_failure(fault, at_s, draw=MIDDLE) for _ in range(times)]
    assert opens[-1]
    return breaker


def test_one_failure_is_a_moments_rest() -> None:
    breaker = Breaker()
    assert not breaker.record_failure("bad", 0.0, draw=MIDDLE)
    assert breaker.phase(0.0) == "closed"
    assert breaker.is_avoided(PAUSE_S - 0.01)
    assert not breaker.is_avoided(PAUSE_S)


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker()
    opens = [breaker.record_failure("bad", 0.0, draw=MIDDLE) for _ in range(FAILURES + 1)]
    assert opens == [False, False, True, False]
    assert breaker.phase(0.5) == "open"


def test_a_deployment_says_how_many_failures_open_it() -> None:
    strict, patient = Breaker(), Breaker()
    assert strict.record_failure("bad", 0.0, draw=MIDDLE, limit=1)
    opens = [patient.record_failure("bad", 0.0, draw=MIDDLE, limit=5) for _ in range(5)]
    assert opens == [False, False, False, False, True]


def test_a_success_resets_the_failures_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.record_failure("bad", 0.0, draw=MIDDLE)
        breaker.record_success(0.0, 0.0)
    assert breaker.phase(0.0) == "closed"


def test_half_of_ten_requests_open_it() -> None:
    breaker = Breaker()
    found = []
    for _ in range(5):
        breaker.record_success(0.0, 0.0)
        found.append(breaker.record_failure("bad", 0.0, draw=MIDDLE))
    assert found == [False, False, False, False, True]


def test_a_full_endpoint_is_avoided_for_its_retry_after_and_never_ejected() -> None:
    breaker = Breaker()
    for _ in range(100):
        assert not breaker.record_failure("full", 0.0, draw=MIDDLE, pause_s=5.0)
    assert breaker.is_avoided(4.9)
    assert not breaker.is_avoided(5.0)
    breaker.record_failure("full", 10.0, draw=MIDDLE, pause_s=86_400.0)
    assert not breaker.is_avoided(20.0)


def test_requests_that_fail_after_the_breaker_opened_delay_no_trial() -> None:
    breaker = opened("silent")
    for failed_s in (0.5, 0.9):
        assert not breaker.record_failure("silent", failed_s, draw=MIDDLE)
    breaker.record_alive()
    assert breaker.is_avoided(0.9)
    assert not breaker.is_avoided(1.0)
    assert breaker.begin_trial(1.0)


def test_half_open_lets_one_request_through() -> None:
    breaker = opened()
    assert not breaker.begin_trial(0.5)  # as the last resort
    assert not breaker.is_avoided(1.0)
    assert breaker.phase(1.0) == "half_open"
    assert breaker.begin_trial(1.0)
    assert breaker.is_avoided(1.0)
    assert not breaker.begin_trial(1.0)
    breaker.record_success(1.0, 1.2)
    assert breaker.phase(1.2) == "closed"
    assert not breaker.is_avoided(1.2)


def test_failed_trials_double_the_ejection_up_to_a_cap() -> None:
    breaker, now_s, rests = opened(), 0.0, []
    for _ in range(8):
        until_s = breaker.until_s()
        rests.append(until_s - now_s)
        now_s = until_s
        assert breaker.begin_trial(now_s)
        assert breaker.record_failure("bad", now_s, draw=MIDDLE)
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_OPEN_S, LONGEST_OPEN_S, LONGEST_OPEN_S]


def test_an_abandoned_trial_makes_room_for_another() -> None:
    breaker = opened()
    assert breaker.begin_trial(1.0)
    breaker.abandon_trial()
    assert not breaker.is_avoided(1.0)
    assert breaker.begin_trial(1.0)


def test_a_response_to_an_earlier_request_does_not_close_the_breaker() -> None:
    breaker = opened(at_s=5.0)
    breaker.record_success(4.0, 6.0)
    assert breaker.is_open
    breaker.record_success(5.5, 6.0)  # asked as the last resort
    assert not breaker.is_open


def test_an_unreachable_endpoint_gets_no_trial_request() -> None:
    breaker = opened("gone")
    assert breaker.is_avoided(1e6)
    assert not breaker.begin_trial(1e6)
    breaker.record_alive()
    assert not breaker.is_avoided(1e6)


def test_a_health_check_does_not_close_the_breaker_of_wrong_responses() -> None:
    breaker = opened("bad")
    breaker.record_alive()
    assert breaker.is_avoided(0.5)
    # An endpoint that is found unreachable meanwhile waits for a sign of life.
    breaker.record_failure("gone", 0.6, draw=MIDDLE)
    assert breaker.is_avoided(1e6)


def test_a_silent_endpoint_is_tried_after_a_health_check_and_its_time() -> None:
    breaker = opened("silent")
    assert breaker.is_avoided(1e6)
    breaker.record_alive()
    assert breaker.phase(0.5) == "open"
    assert breaker.begin_trial(1.0)
    assert breaker.record_failure("silent", 1.0, draw=MIDDLE)
    breaker.record_failure("gone", 1.5, draw=MIDDLE)
    breaker.record_alive()
    assert breaker.phase(1.5) == "closed"  # silence was its only failure


def test_jitter_spreads_gateways() -> None:
    rests = []
    for draw in (0.0, 0.999):
        breaker = Breaker()
        for _ in range(FAILURES):
            breaker.record_failure("bad", 0.0, draw=draw)
        rests.append(breaker.until_s())
    assert rests == pytest.approx([1.0, 1.25], abs=0.01)  # never shorter than the pause


def test_it_is_forgotten_when_all_was_well_for_long() -> None:
    breaker = Breaker()
    breaker.record_failure("bad", 0.0, draw=MIDDLE)
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
    """At most one trial runs at a time, a success closes the breaker at once, and no ejection exceeds the cap."""
    breaker, now_s, trials = Breaker(), 0.0, 0
    for what, later_s, draw in story:
        now_s += later_s
        match what:
            case "bad" | "silent" | "full" | "gone":
                breaker.record_failure(what, now_s, draw=draw)
                trials = 0
            case "asked":
                trials += breaker.begin_trial(now_s)
            case "left":
                breaker.abandon_trial()
                trials = 0
            case "answered":
                breaker.record_success(now_s, now_s)
                trials = 0
                assert breaker.phase(now_s) == "closed"
            case "old":
                breaker.record_success(-1.0, now_s)
            case _:
                breaker.record_alive()
        assert trials <= 1
        assert breaker.until_s() <= now_s + LONGEST_OPEN_S * 1.25
        if breaker.phase(now_s) == "open":
            assert breaker.is_avoided(now_s)
