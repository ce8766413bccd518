"""Who is asked how it is: only who is not heard, the most urgent first, and never too many at once."""

from gateway.forwarding.health_checks import RATE_PER_S, TICK_S, ProbeSchedule
from gateway.routing.table import EngineEndpoint, Origin
from tests.gateway.world import target

NOBODY: frozenset[Origin] = frozenset()


def fleet(count: int) -> list[EngineEndpoint]:
    return [target(f"m-{number}", port=number + 1) for number in range(count)]


def asked(
    rounds: ProbeSchedule,
    now_s: float,
    awaited: frozenset[Origin] = NOBODY,
    ejected: frozenset[Origin] = NOBODY,
) -> list[str]:
    due = rounds.due(now_s, awaited=awaited, is_open=ejected.__contains__)
    return [found.replica for found in due]


def test_who_answers_is_not_asked() -> None:
    rounds, (one, other) = ProbeSchedule(), fleet(2)
    rounds.know((one, other), 0.0)
    for second in range(30):
        rounds.hear({one.origin}, float(second))
        found = asked(rounds, float(second))
        assert found == (["m-1"] if second in (10, 20) else [])
        if found:
            rounds.done(other.origin)


def test_who_is_being_asked_is_not_asked_again() -> None:
    rounds, (one,) = ProbeSchedule(), fleet(1)
    rounds.know((one,), 0.0)
    assert asked(rounds, 10.0) == ["m-0"]
    assert asked(rounds, 60.0) == []
    rounds.done(one.origin)
    assert asked(rounds, 60.0) == ["m-0"]


def test_who_lets_somebody_wait_is_asked_every_second_who_is_ejected_every_time_and_both_first() -> (
    None
):
    rounds, targets = ProbeSchedule(), fleet(40)
    rounds.know(targets, 0.0)
    awaited, ejected = frozenset({targets[30].origin}), frozenset({targets[31].origin})
    assert asked(rounds, 0.5, awaited, ejected) == ["m-31"]
    assert asked(rounds, 1.0, awaited, ejected) == ["m-30"]
    rounds.done(targets[30].origin)
    rounds.done(targets[31].origin)
    assert asked(rounds, 1.5, awaited, ejected) == ["m-31"]
    assert asked(rounds, 11.0, awaited, ejected)[0] == "m-30"


def test_a_thousand_are_asked_in_turn_at_the_same_rate() -> None:
    rounds, targets = ProbeSchedule(), fleet(1000)
    rounds.know(targets, 0.0)
    found: list[str] = []
    ticks = int(1000 / (RATE_PER_S * TICK_S))
    for tick in range(ticks):
        now = asked(rounds, 10.0 + tick * TICK_S)
        assert len(now) <= RATE_PER_S * TICK_S
        found += now
        for replica in now:
            rounds.done(targets[int(replica.removeprefix("m-"))].origin)
    assert sorted(found) == sorted(one.replica for one in targets)


def test_who_is_gone_from_the_table_is_forgotten_and_who_stays_keeps_its_times() -> None:
    rounds, (one, other) = ProbeSchedule(), fleet(2)
    rounds.know((one, other), 0.0)
    rounds.hear({one.origin}, 5.0)
    rounds.know((one,), 6.0)
    assert rounds.heard_since(one.origin, 4.0)
    assert not rounds.heard_since(one.origin, 5.0)
    assert not rounds.heard_since(other.origin, 0.0)
    assert asked(rounds, 15.0) == ["m-0"]
