"""What an agent remembers of a rank: how long it is silent, how long it stands still."""

from typing import Any

from nodeagent.health import Health
from nodeagent.observe import RankView
from nodeagent.tracking import Track


def health(state: str = "Ready", **fields: Any) -> Health:
    return Health(state=state, message="", **fields)


def track() -> Track:
    return Track(epoch=1, memory_bytes=0, began_at=0.0)


def view(rank: Track, now: float) -> RankView:
    return rank.view(now, is_frozen=False, killed_s=None, probe_failures=0)


def test_one_answer_that_does_not_come_is_no_silence() -> None:
    rank = track()
    rank.heard(health(), 1.0)
    rank.missed()
    # The agent itself may have been away for an hour while it waited for that answer.
    assert view(rank, 3600.0).unheard_s == 0
    assert rank.is_unheard
    rank.missed()
    assert view(rank, 4.5).unheard_s == 3.5
    rank.heard(health(), 5.0)
    assert view(rank, 5.0).unheard_s == 0
    assert not rank.is_unheard


def test_who_never_answered_is_silent_since_the_beginning() -> None:
    rank = track()
    rank.missed()
    rank.missed()
    assert view(rank, 61.0).unheard_s == 61.0
    assert view(rank, 61.0).stood_s == 0


def test_who_is_busy_without_progress_stands_still() -> None:
    rank = track()
    rank.heard(health(is_busy=True, progress=1), 10.0)
    rank.heard(health(is_busy=True, progress=1), 13.0)
    assert view(rank, 20.0).stood_s == 3.0
    rank.heard(health(is_busy=True, progress=2), 14.0)
    assert view(rank, 20.0).stood_s == 0
    rank.heard(health(is_busy=True, progress=2), 16.0)
    rank.heard(health(progress=2), 17.0)
    assert view(rank, 20.0).stood_s == 0
    # An hour without work, then some: it begins to count with the work.
    rank.heard(health(progress=2), 3617.0)
    rank.heard(health(is_busy=True, progress=2), 3618.0)
    assert view(rank, 3618.0).stood_s == 1.0


def test_a_new_state_begins_anew() -> None:
    rank = track()
    rank.heard(health("Joining", is_busy=True), 10.0)
    rank.heard(health("Joining", is_busy=True), 40.0)
    assert view(rank, 41.0).state_s == 31.0
    rank.heard(health("Loading", is_busy=True, loaded=0.25, slowest_s=2.0), 50.0)
    seen = view(rank, 51.0)
    assert (seen.state_s, seen.stood_s, seen.loaded, seen.slowest_s) == (1.0, 0.0, 0.25, 2.0)
