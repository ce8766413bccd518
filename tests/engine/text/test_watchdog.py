"""The watchdog: blocks that take too long are ended, and no error reaches other code."""

import threading

import pytest

from engine.text.watchdog import OverdueError, Watchdog


def spin() -> None:
    while True:
        pass


def test_a_block_that_takes_too_long_is_ended_and_the_thread_goes_on() -> None:
    watchdog = Watchdog()
    for _ in range(2):
        with pytest.raises(OverdueError), watchdog.limit(0.1):
            spin()
    done = [number for number in range(100_000) if number % 2]
    assert len(done) == 50_000


def test_only_the_thread_that_takes_too_long_is_ended() -> None:
    watchdog, ended, outcome = Watchdog(), threading.Event(), list[str]()

    def patient() -> None:
        with watchdog.limit(60):
            ended.wait(60)
        outcome.append("finished")

    other = threading.Thread(target=patient)
    other.start()
    with pytest.raises(OverdueError), watchdog.limit(0.1):
        spin()
    ended.set()
    other.join(60)
    assert outcome == ["finished"]


def test_an_error_that_comes_late_is_dropped() -> None:
    watchdog = Watchdog()
    for _ in range(1000):
        with watchdog.limit(60):
            pass
    assert not watchdog._ticks
