"""Epochs: when one is over, the next shapes and delays, and the conditions that are written."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from reconciler.deployments.status import replica_status
from reconciler.groups.epochs import (
    TRANSITIONS,
    Epoch,
    EpochEvent,
    EpochState,
    count_failures,
    epoch_of,
    epoch_requeue_after_s,
    mark_given_up,
    next_shapes,
)
from schemas.formation import Formation, GoldenAnswer
from schemas.replica import RankStatus, ReplicaStatus
from tests.support.reconciler_world import on
from tests.support.world import NOW, condition, condition_of, with_metadata, with_spec

PAIR = on("ab").replica
OVER = Epoch(over="RankEnded", message="rank 1 on b: it ended with -9")
LOST = replace(OVER, is_lost=True)
STEADY = replace(OVER, is_steady=True)
GOLDEN = GoldenAnswer(pieces=("a",), logprobs=(-0.5,))


def formation(**changes: object) -> Formation:
    return Formation(group="pair", formed_at=NOW).model_copy(update=changes)


def report(type_: str, *, holds: bool = True, golden: GoldenAnswer | None = None) -> RankStatus:
    said = (condition(type_, holds=holds),)
    return RankStatus(replica_uid="u", node="a", epoch=1, golden=golden, conditions=said)


def look(
    *reports: RankStatus | None,
    away: Sequence[str] = (),
    lost: Sequence[str] = (),
    old: ReplicaStatus | None = None,
    later_s: float = 0,
) -> Epoch:
    epoch = epoch_of(
        PAIR,
        reports,
        away={*away, *lost},
        lost={*lost},
        old=old,
        now=NOW + timedelta(seconds=later_s),
    )
    assert epoch is not None
    return epoch


def test_an_agent_that_restarts_while_files_come_does_not_end_the_epoch() -> None:
    fetching = on("ab", awaits_files=True).replica

    def state(**where: set[str]) -> EpochState:
        found = epoch_of(
            fetching, (None, None), **{"away": set(), "lost": set()} | where, old=None, now=NOW
        )
        assert found is not None
        return found.state

    assert state() is EpochState.FETCHING
    assert state(away={"b"}) is EpochState.FETCHING
    assert state(away={"b"}, lost={"b"}) is EpochState.LOST


SERVES, FOLLOWS = report("Ready"), report("Ready")
ENDED = report("EpochOver")

LOOKS = [
    pytest.param((None, None), {}, ("", False), id="nobody-has-said-anything"),
    pytest.param((SERVES, FOLLOWS), {}, ("", False), id="all-is-well"),
    pytest.param((SERVES, ENDED), {}, ("Fake", False), id="any-rank-says-so"),
    pytest.param((ENDED, ENDED), {"away": "b"}, ("Fake", True), id="because-a-mac-is-away"),
    pytest.param((None, None), {"away": "b"}, ("NodeLost", True), id="it-will-not-begin"),
    pytest.param((SERVES, FOLLOWS), {"away": "b"}, ("", False), id="an-engine-outlives-its-agent"),
    pytest.param((SERVES, FOLLOWS), {"lost": "b"}, ("NodeLost", True), id="for-a-while"),
    pytest.param((SERVES, FOLLOWS), {"lost": "a"}, ("NodeLost", True), id="rank-0-as-well"),
]


@pytest.mark.parametrize(("reports", "where", "wanted"), LOOKS)
def test_whether_it_is_over(
    reports: tuple[RankStatus | None, ...],
    where: dict[str, Sequence[str]],
    wanted: tuple[str, bool],
) -> None:
    epoch = look(*reports, **where)  # type: ignore[arg-type]  # by their names
    assert (epoch.over, epoch.is_lost) == wanted


def test_the_reporting_rank_is_named() -> None:
    assert look(SERVES, ENDED).message == "rank 1 on b: so it is"
    assert look(None, None, lost="b").message == "b is away"


def test_one_rank_has_no_epochs() -> None:
    alone = with_spec(PAIR, formation=None)
    assert epoch_of(alone, [SERVES], away=set(), lost=set(), old=None, now=NOW) is None


@pytest.mark.parametrize(
    ("before", "epoch", "wanted"),
    [
        (formation(), OVER, 1),
        (formation(failures=2), OVER, 3),
        (formation(failures=5), STEADY, 1),
        (formation(failures=2), LOST, 0),
        (formation(failures=4), LOST, 3),
        (formation(failures=4), replace(LOST, is_steady=True), 0),
    ],
)
def test_failures_in_a_row(before: Formation, epoch: Epoch, wanted: int) -> None:
    assert count_failures(before, epoch) == wanted


def test_waits_grow_to_a_minute() -> None:
    waits = [OVER.delay_s(formation(failures=number)) for number in range(8)]
    assert waits == [0, 5, 10, 20, 40, 60, 60, 60]
    assert LOST.delay_s(formation(failures=7)) == 0
    assert replace(OVER, over_s=15).delay_s(formation(failures=3)) == 5


@pytest.mark.parametrize(
    ("before", "epoch", "wanted"),
    [
        (formation(), OVER, (0, 1, 2)),
        (formation(failures=2), OVER, (1, 2)),
        (formation(failures=3, fallback=1), OVER, (1, 2)),
        (formation(failures=5, fallback=1), OVER, (2,)),
        (formation(failures=8, fallback=2), OVER, ()),
        (formation(failures=8, fallback=2), STEADY, (2,)),
        (formation(fallback=1), LOST, (1, 2, 0)),
        (formation(fallback=1), replace(LOST, is_steady=True), (0, 1, 2)),
        (formation(fallback=7), LOST, (2, 0, 1)),
    ],
)
def test_the_next_shapes(before: Formation, epoch: Epoch, wanted: tuple[int, ...]) -> None:
    assert next_shapes(before, epoch, 3) == wanted


def written(epoch: Epoch, old: ReplicaStatus | None, later_s: float) -> ReplicaStatus:
    view = on("ab", epoch=epoch)
    reports = [SERVES, FOLLOWS]
    now = NOW + timedelta(seconds=later_s)
    return replica_status(view, reports, old=old, now=now)


def test_an_epoch_is_steady_after_a_minute_and_stays_so() -> None:
    old = written(look(SERVES, FOLLOWS), None, 0)
    young = look(SERVES, FOLLOWS, old=old, later_s=20)
    assert (young.is_steady, young.served_s) == (False, 20)
    assert epoch_requeue_after_s(PAIR, young) == 40
    grown = look(SERVES, FOLLOWS, old=old, later_s=60)
    assert grown.is_steady
    assert epoch_requeue_after_s(PAIR, grown) is None
    old = written(grown, old, 60)
    assert look(SERVES, ENDED, old=old, later_s=100).is_steady


def test_conditions_of_another_epoch_do_not_count() -> None:
    old = written(look(SERVES, FOLLOWS), None, 0)
    other = [c.model_copy(update={"observed_generation": 9}) for c in old.conditions]
    stale = old.model_copy(update={"conditions": tuple(other)})
    assert not look(SERVES, FOLLOWS, old=stale, later_s=100).is_steady


def test_the_wait_runs_from_when_it_was_first_seen() -> None:
    over = look(SERVES, ENDED)
    old = written(over, None, 0)
    truth, _, message = condition_of(old, "EpochOver")
    assert (truth, message) == ("True", "epoch 1: rank 1 on b: so it is")
    again = look(SERVES, ENDED, old=old, later_s=3)
    assert again.over_s == 3
    failing = with_spec(PAIR, formation=formation(failures=1))
    assert epoch_requeue_after_s(failing, again) == 2
    assert epoch_requeue_after_s(PAIR, again) is None


def test_a_crash_loop_is_stored_and_persists() -> None:
    failing = with_spec(PAIR, formation=formation(failures=2))
    tried = mark_given_up(failing, OVER, 1)
    assert tried is not None
    assert tried.is_given_up
    assert epoch_requeue_after_s(failing, tried) == 300
    epoch = mark_given_up(failing, OVER, 2)
    assert epoch is not None
    assert not epoch.is_given_up
    old = written(tried, None, 0)
    assert condition_of(old, "CrashLooping")[:2] == ("True", "TriedEverything")
    # An agent that has forgotten does not make it go round again.
    assert look(SERVES, ENDED, old=old).is_given_up
    assert not look(SERVES, FOLLOWS, old=old).is_given_up


GIVEN_UP = replace(OVER, is_given_up=True, shapes=3)


def test_a_group_that_was_given_up_is_retried_within_five_minutes() -> None:
    before = formation(failures=8, fallback=2)
    assert GIVEN_UP.delay_s(before) == 300
    assert replace(GIVEN_UP, jitter=0.0).delay_s(before) == 150
    assert not replace(GIVEN_UP, over_s=299).is_due(before)
    assert replace(GIVEN_UP, over_s=300).is_due(before)
    assert replace(GIVEN_UP, over_since=NOW).next_attempt(before) == NOW + timedelta(seconds=300)


def test_groups_that_were_given_up_together_are_not_retried_together() -> None:
    delays = {look(ENDED).jitter}
    for number in range(9):
        other = with_metadata(PAIR, uid=f"uid-{number}")
        epoch = epoch_of(other, [ENDED], away=set(), lost=set(), old=None, now=NOW)
        assert epoch is not None
        delays.add(epoch.jitter)
    assert len(delays) == 10
    assert all(0 <= delay <= 1 for delay in delays)


@pytest.mark.parametrize(("last", "order"), [(2, (0, 1, 2)), (0, (1, 2, 0)), (1, (2, 0, 1))])
def test_slow_retries_try_the_shapes_in_turn(last: int, order: tuple[int, ...]) -> None:
    assert next_shapes(formation(failures=9, fallback=last), GIVEN_UP, 3) == order


def test_one_failure_of_a_slow_retry_gives_the_group_up_again() -> None:
    for before in (formation(failures=8, fallback=2), formation(failures=5, fallback=2)):
        retry = formation(failures=count_failures(before, GIVEN_UP), fallback=0)
        assert retry.failures >= 9
        replica = on("ab", failures=retry.failures).replica
        # A Mac that is away does not count, and an epoch that has served for a minute ends it.
        for epoch, is_given_up in ((OVER, True), (LOST, False), (STEADY, False)):
            marked = mark_given_up(replica, epoch, 3)
            assert marked is not None
            assert marked.is_given_up is is_given_up


def test_the_condition_tells_when_the_next_attempt_comes() -> None:
    over = replace(GIVEN_UP, over_since=NOW)
    _, _, message = condition_of(written(over, None, 0), "CrashLooping")
    at = NOW + timedelta(seconds=300)
    assert message == f"{OVER.message}. Next attempt at {at:%H:%M:%S} UTC"


def test_the_answer_of_rank_0_is_kept() -> None:
    assert look(report("Ready", golden=GOLDEN), FOLLOWS).golden == GOLDEN
    assert look(SERVES, FOLLOWS).golden is None


@pytest.mark.parametrize(
    ("reports", "wanted"),
    [
        ((None, None), ("WaitingForAgent", "the agent on a, b has not reported yet")),
        ((FOLLOWS, None), ("AgentAway", "its agent on a is away; the engine may still serve")),
        ((SERVES, report("Ready", holds=False)), ("Fake", "rank 1 on b: so it is")),
    ],
)  # fmt: skip
def test_any_rank_may_be_not_ready(
    reports: tuple[RankStatus | None, ...], wanted: tuple[str, str]
) -> None:
    view = replace(on("ab"), is_ready=False, epoch=look(*reports))
    made = replica_status(view, reports, old=None, now=NOW)
    assert condition_of(made, "Ready")[1:] == wanted


STATES = [
    pytest.param(Epoch(awaits_files=True), EpochState.FETCHING, id="fetching"),
    pytest.param(Epoch(awaits_files=True, over="NodeLost", is_lost=True), EpochState.LOST, id="gone"),
    pytest.param(Epoch(), EpochState.STARTING, id="starting"),
    pytest.param(Epoch(served_s=1), EpochState.SERVING, id="serving"),
    pytest.param(Epoch(served_s=61, is_steady=True), EpochState.STEADY, id="steady"),
    pytest.param(Epoch(over="RankEnded", is_steady=True), EpochState.FAILED, id="failed"),
    pytest.param(Epoch(over="NodeLost", is_lost=True), EpochState.LOST, id="lost"),
    pytest.param(Epoch(over="RankEnded", is_given_up=True), EpochState.GIVEN_UP, id="given-up"),
]  # fmt: skip


@pytest.mark.parametrize(("epoch", "state"), STATES)
def test_the_state_of_an_epoch(epoch: Epoch, state: EpochState) -> None:
    assert epoch.state is state
    is_over = state in (EpochState.FAILED, EpochState.LOST, EpochState.GIVEN_UP)
    assert epoch.allows(EpochEvent.NEXT_EPOCH) is is_over


def test_transitions_reach_every_state_and_none_is_final() -> None:
    assert {to for _, _, to in TRANSITIONS} == set(EpochState)
    assert {source for source, _, _ in TRANSITIONS} == set(EpochState)
    assert {event for _, event, _ in TRANSITIONS} == set(EpochEvent)
