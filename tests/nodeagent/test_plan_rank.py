"""The agent's plan for a rank of a group: a row for each situation."""

from dataclasses import replace
from typing import Any

import pytest

from nodeagent.actions import ReportRank
from nodeagent.engines.references import ReferenceState
from nodeagent.plan import plan, rank_grace_s
from nodeagent.replicas.observation import (
    FetchState,
    ObservedEngine,
    ObservedFetch,
    ObservedRank,
    ObservedReplica,
    ProbeState,
)
from nodeagent.status import replica_conditions
from schemas.formation import GoldenAnswer
from schemas.meta import ConditionStatus, find_condition
from schemas.replica import Replica
from tests.support import nodeagent_plans
from tests.support.nodeagent_groups import GOLDEN, group
from tests.support.nodeagent_plans import OTHER_ANSWER as OTHER
from tests.support.nodeagent_plans import RANK_ENDED as ENDED
from tests.support.nodeagent_plans import case, planned, rank_status
from tests.support.nodeagent_plans import epoch_over_status as over
from tests.support.values import present


def rank(**fields: Any) -> ObservedRank:
    return replace(ObservedRank(epoch=2, memory_bytes=2**30), **fields)


def engine(
    state: str = "Ready", *, of: ObservedRank | None = None, **fields: Any
) -> ObservedEngine:
    base = ObservedEngine(replica_uid="u1", is_running=True, state=state, rank=of or rank())
    return replace(base, **fields)


def wanted(**fields: Any) -> Replica:
    return group(**{"epoch": 2, **fields})


def seen(
    observed: ObservedEngine | None = None,
    *,
    number: int = 0,
    replica: Replica | None = None,
    **more: Any,
) -> ObservedReplica:
    return ObservedReplica(replica=replica or wanted(), engine=observed, rank=number, **more)


def asked(failures: int, **fields: Any) -> ObservedReplica:
    """Return a rank whose probe failed so many times."""
    return seen(engine(of=rank(probe_failures=failures), probe=ProbeState.FAILED, **fields))


def over_and_stopping(stopping_s: float, **fields: Any) -> ObservedReplica:
    observed = engine(of=rank(epoch_end=ENDED, **fields), stopping_s=stopping_s)
    return seen(observed, reported=over())


PASSED = engine(of=rank(answer=GOLDEN), probe=ProbeState.PASSED)
DEAD = engine(is_running=False, exit_code=4, last_words="rank 1 is gone")
ALONE, DELETED = wanted(fits_single=True), wanted(is_deleting=True)
WAITS, WAITS_ALONE = wanted(awaits_files=True), wanted(awaits_files=True, fits_single=True)
PRESENT, FETCHING = (ObservedFetch(state=s) for s in (FetchState.PRESENT, FetchState.NOT_STARTED))
RUNS, FOUND, FAILED = ReferenceState.RUNNING, ReferenceState.FOUND, ReferenceState.FAILED
START, PUBLISH = "StartEngine, Ready=False Starting", "PublishEndpoint, Ready=False WarmingUp"
GIVE_UP = "GiveUpEpoch, StopEngine, EpochOver=True"
GIVE_UP_AND_WITHDRAW = "GiveUpEpoch, WithdrawEndpoint, StopEngine, EpochOver=True"
SITUATIONS = [
    case("start", seen(), START),
    case("files-of-another-rank", seen(replica=WAITS, fetch=PRESENT), "ModelPresent=True Present", 30.0),
    case("own-files", seen(replica=WAITS, fetch=FETCHING), "FetchModel, ModelPresent=False FetchStarting", 1.0),
    case("no-reference-before-all-files", seen(replica=WAITS_ALONE, fetch=PRESENT), "ModelPresent=True Present", 30.0),
    case("no-reference-of-a-part", seen(replica=ALONE, fetch=replace(PRESENT, is_partial=True)), "StartEngine, ModelPresent=True Present"),
    case("a-reference-of-all-files", seen(replica=ALONE, fetch=PRESENT), "MakeReference, ModelPresent=True Present"),
    case("the-next-epoch", seen(used_epoch=1), START),
    case("an-epoch-is-once", seen(used_epoch=2), "EpochOver=True RankEnded", None),
    case("cannot-start", seen(start_error="no disk"), "EpochOver=True CannotStart", None),
    case("over-stays-over", seen(reported=over()), "", None),
    case("reference-first", seen(replica=ALONE), "MakeReference, Ready=False Starting"),
    case("reference-runs", seen(replica=ALONE, reference=RUNS), "Ready=False MakingReference"),
    case("reference-found", seen(replica=ALONE, reference=FOUND), START),
    case("reference-failed", seen(replica=ALONE, reference=FAILED), START),
    case("no-reference-where-an-answer-is-known", seen(replica=wanted(fits_single=True, golden=GOLDEN)), START),
    case("others-make-none", seen(replica=ALONE, number=1), START),
    case("rank-0-is-elsewhere-now", seen(replica=ALONE, number=1, reference=RUNS), "StopReference, Ready=False MakingReference"),
    case("says-nothing-yet", seen(engine("")), "Ready=False Starting"),
    case("joining", seen(engine("Joining")), "Ready=False Joining"),
    case("connecting-holds-the-process-up", seen(engine("Joining", of=rank(unanswered_s=39, state_s=150))), "Ready=False Joining"),
    case("not-for-ever", seen(engine("Joining", of=rank(unanswered_s=41))), f"{GIVE_UP} RankSilent"),
    case("nobody-joins", seen(engine("Joining", of=rank(state_s=151))), f"{GIVE_UP} RankStuck"),
    case("rank-0-makes-the-reference", seen(engine("Joining", of=rank(state_s=700)), number=1, replica=ALONE), "Ready=False Joining"),
    case("loading", seen(engine("Loading", of=rank(loaded=0.57), stalled_s=100)), "Ready=False Loading"),
    case("loading-stands-still", seen(engine("Loading", stalled_s=121)), f"{GIVE_UP} RankStuck"),
    case("ask", seen(engine()), "ProbeEngine, Ready=False WarmingUp"),
    case("being-asked", seen(engine(probe=ProbeState.RUNNING)), "Ready=False WarmingUp"),
    case("no-answer-yet", asked(1, probe_again_in_s=1), "Ready=False WarmingUp"),
    case("ask-again", asked(2, probe_error="no"), "ProbeEngine, Ready=False ProbeFailed"),
    case("no-answer", asked(3, probe_error="no"), f"{GIVE_UP} GoldenFailed"),
    case("sane-is-enough", seen(PASSED), PUBLISH, 0.5),
    case("serving", seen(PASSED, is_published=True), "Ready=True Serving", 0.5),
    case("the-endpoint-of-the-epoch-before", seen(PASSED, is_published=True, is_stale=True), PUBLISH, 0.5),
    case("not-the-golden-answer", seen(PASSED, replica=wanted(golden=OTHER)), f"{GIVE_UP} GoldenFailed"),
    case("not-the-reference", seen(PASSED, reference=FOUND, found_reference=OTHER), f"{GIVE_UP} GoldenFailed"),
    case("a-model-that-only-reads-has-no-answer", seen(engine(probe=ProbeState.PASSED)), PUBLISH, 0.5),
    case("others-follow", seen(engine(), number=1), "Ready=True Following", 0.5),
    case("it-was-rank-0", seen(engine(), number=1, is_published=True), "WithdrawEndpoint, Ready=True Following", 0.5),
    case("two-seconds-of-silence", seen(engine(of=rank(unanswered_s=2.2), probe=ProbeState.PASSED), is_published=True), "Ready=True Serving"),
    case("silent", seen(engine(of=rank(unanswered_s=3.1)), is_published=True), f"{GIVE_UP_AND_WITHDRAW} RankSilent"),
    case("frozen", seen(engine(of=rank(unanswered_s=3.1, is_frozen=True)), is_published=True), "GiveUpEpoch, WithdrawEndpoint, Kill, EpochOver=True RankSilent"),
    case("a-first-step-may-take-as-long-as-a-load", seen(engine(probe=ProbeState.RUNNING, stalled_s=120)), "Ready=False WarmingUp"),
    case("a-first-step-that-never-ends", seen(engine(probe=ProbeState.RUNNING, stalled_s=120.1)), f"{GIVE_UP} RankStuck"),
    case("memory-beyond-the-proof", seen(engine(excess_s=10.1, proof_bytes=1)), f"{GIVE_UP} MemoryExceeded"),
    case("stuck", seen(engine(stalled_s=4.1, slowest_s=0.2), number=1), f"{GIVE_UP} RankStuck"),
    case("slow-is-not-stuck", seen(engine(stalled_s=9.9, slowest_s=1.0), number=1), "Ready=True Following", 0.5),
    case("another-one-stops-it", seen(engine("Draining", message="m"), is_published=True), "WithdrawEndpoint, Ready=False EngineDraining"),
    case("failed", seen(engine("Failed", message="rank 1 is gone"), is_published=True), f"{GIVE_UP_AND_WITHDRAW} RankEnded"),
    case("ended", seen(DEAD, is_published=True), "GiveUpEpoch, WithdrawEndpoint, EpochOver=True RankEnded", 1.0),
    case("ended-and-reported", seen(replace(DEAD, rank=rank(epoch_end=ENDED)), reported=over()), "ForgetEngine", 0.0),
    case("it-was-asked-to-end", over_and_stopping(0.2), ""),
    case("there-is-nothing-to-finish", over_and_stopping(0.6), "StopEngine"),
    case("it-had-its-time", over_and_stopping(11.1), "Kill"),
    case("killed-once", over_and_stopping(20, killed_s=5), "", 1.0),
    case("an-earlier-epoch-ends-first-and-unreported", seen(engine(of=rank(epoch=1)), is_published=True), "WithdrawEndpoint, StopEngine"),
    case("the-earlier-epoch-has-ended", seen(replace(DEAD, rank=rank(epoch=1))), "ForgetEngine", 0.0),
    case("requests-may-finish-when-it-is-deleted", seen(engine(stopping_s=40.9), replica=DELETED), "Stopped=False EngineEnding"),
    case("and-no-longer", seen(engine(stopping_s=41.1), replica=DELETED), "Kill, Stopped=False EngineEnding"),
    case("the-group-goes-on-without-this-node", ObservedReplica(replica=None, engine=engine(), is_published=True), "WithdrawEndpoint, StopEngine"),
    case("an-ended-epoch-has-nothing-to-finish", replace(over_and_stopping(11.1), replica=None), "Kill"),
    case("a-reference-for-nobody", ObservedReplica(replica=None, engine=None, reference=RUNS), "StopReference"),
]  # fmt: skip


@pytest.mark.parametrize(("state", "expected"), SITUATIONS)
def test_plan(state: ObservedReplica, expected: tuple[str, float | None]) -> None:
    assert planned(state) == expected


def test_the_report_of_an_epoch_that_is_over() -> None:
    conditions = replica_conditions(seen(DEAD))
    message = "its rank ended with 4: rank 1 is gone"
    assert [(c.type, c.status, c.reason, c.message) for c in conditions] == [
        ("Ready", ConditionStatus.FALSE, "RankEnded", message),
        ("EpochOver", ConditionStatus.TRUE, "RankEnded", message),
    ]


@pytest.mark.parametrize(("state", "message"), [
    (seen(engine("Loading", of=rank(loaded=0.579))), "its rank has loaded 50 % of its share"),
    (seen(replica=WAITS, fetch=PRESENT), "it has its files; another rank of the group has not fetched its own"),
])  # fmt: skip
def test_messages(state: ObservedReplica, message: str) -> None:
    assert present(find_condition(replica_conditions(state), "Ready")).message == message


@pytest.mark.parametrize(("state", "golden"), [
    (seen(engine()), None), (seen(PASSED), GOLDEN),
    (seen(PASSED, number=1), None),
    (seen(PASSED, replica=wanted(golden=GOLDEN)), GOLDEN),
    (seen(found_reference=GOLDEN, used_epoch=2), GOLDEN),
    (seen(engine(), reported=rank_status((), golden=GOLDEN)), GOLDEN),
    (seen(engine(), reported=rank_status((), golden=GOLDEN, epoch=1)), None),
    (seen(replica=nodeagent_plans.wanted()), None),
])  # fmt: skip
def test_the_golden_answer_is_carried_to_later_epochs(
    state: ObservedReplica, golden: GoldenAnswer | None
) -> None:
    (report,) = [a for a in plan(state).actions if isinstance(a, ReportRank)]
    assert report.golden == golden


def test_a_large_rank_has_more_time_to_end() -> None:
    assert rank_grace_s(2**30, is_doomed=True) == 11
    assert rank_grace_s(400 * 2**30, is_doomed=True) == 410
    assert rank_grace_s(400 * 2**30, is_doomed=False) == 440
