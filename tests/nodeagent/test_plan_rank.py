"""The agent's plan for a rank of a group: a table of situations."""

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
from tests.support.nodeagent_groups import GOLDEN, group
from tests.support.nodeagent_plans import OTHER_ANSWER as OTHER
from tests.support.nodeagent_plans import RANK_ENDED as ENDED
from tests.support.nodeagent_plans import epoch_over_status as over_told
from tests.support.nodeagent_plans import rank_status as told
from tests.support.nodeagent_plans import short


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
    found: ObservedEngine | None = None,
    *,
    number: int = 0,
    replica: Replica | None = None,
    **more: Any,
) -> ObservedReplica:
    return ObservedReplica(replica=replica or wanted(), engine=found, rank=number, **more)


PASSED = engine(of=rank(answer=GOLDEN), probe=ProbeState.PASSED)
DEAD = engine(is_running=False, exit_code=4, last_words="rank 1 is gone")
ALONE = wanted(fits_single=True)

PRESENT = ObservedFetch(state=FetchState.PRESENT)
FETCHING = ObservedFetch(state=FetchState.NOT_STARTED)

SITUATIONS = [
    pytest.param(seen(), ["StartEngine", "Ready=False Starting"], 0.1, id="start"),
    pytest.param(
        seen(replica=wanted(awaits_files=True), fetch=PRESENT),
        ["ModelPresent=True Present"],
        30.0,
        id="files-of-another-rank",
    ),
    pytest.param(
        seen(replica=wanted(awaits_files=True), fetch=FETCHING),
        ["FetchModel", "ModelPresent=False FetchStarting"],
        1.0,
        id="own-files",
    ),
    pytest.param(
        seen(replica=wanted(awaits_files=True, fits_single=True), fetch=PRESENT),
        ["ModelPresent=True Present"],
        30.0,
        id="no-reference-before-all-files",
    ),
    pytest.param(
        seen(replica=ALONE, fetch=replace(PRESENT, is_partial=True)),
        ["StartEngine", "ModelPresent=True Present"],
        0.1,
        id="no-reference-of-a-part",
    ),
    pytest.param(
        seen(replica=ALONE, fetch=PRESENT),
        ["MakeReference", "ModelPresent=True Present"],
        0.1,
        id="a-reference-of-all-files",
    ),
    pytest.param(
        seen(used_epoch=1), ["StartEngine", "Ready=False Starting"], 0.1, id="the-next-epoch"
    ),
    pytest.param(seen(used_epoch=2), ["EpochOver=True RankEnded"], None, id="an-epoch-is-once"),
    pytest.param(
        seen(start_error="no disk"), ["EpochOver=True CannotStart"], None, id="cannot-start"
    ),
    pytest.param(seen(reported=over_told()), [], None, id="over-stays-over"),
    pytest.param(
        seen(replica=ALONE), ["MakeReference", "Ready=False Starting"], 0.1, id="reference-first"
    ),
    pytest.param(
        seen(replica=ALONE, reference=ReferenceState.RUNNING),
        ["Ready=False MakingReference"],
        0.1,
        id="reference-runs",
    ),
    pytest.param(
        seen(replica=ALONE, reference=ReferenceState.FOUND),
        ["StartEngine", "Ready=False Starting"],
        0.1,
        id="reference-found",
    ),
    pytest.param(
        seen(replica=ALONE, reference=ReferenceState.FAILED),
        ["StartEngine", "Ready=False Starting"],
        0.1,
        id="reference-failed",
    ),
    pytest.param(
        seen(replica=wanted(fits_single=True, golden=GOLDEN)),
        ["StartEngine", "Ready=False Starting"],
        0.1,
        id="no-reference-where-an-answer-is-known",
    ),
    pytest.param(
        seen(replica=ALONE, number=1),
        ["StartEngine", "Ready=False Starting"],
        0.1,
        id="others-make-none",
    ),
    pytest.param(
        seen(replica=ALONE, number=1, reference=ReferenceState.RUNNING),
        ["StopReference", "Ready=False MakingReference"],
        0.1,
        id="rank-0-is-elsewhere-now",
    ),
    pytest.param(seen(engine("")), ["Ready=False Starting"], 0.1, id="says-nothing-yet"),
    pytest.param(seen(engine("Joining")), ["Ready=False Joining"], 0.1, id="joining"),
    pytest.param(
        seen(engine("Joining", of=rank(unanswered_s=39, state_s=150))),
        ["Ready=False Joining"],
        0.1,
        id="connecting-holds-the-process-up",
    ),
    pytest.param(
        seen(engine("Joining", of=rank(unanswered_s=41))),
        ["GiveUpEpoch", "StopEngine", "EpochOver=True RankSilent"],
        0.1,
        id="not-for-ever",
    ),
    pytest.param(
        seen(engine("Joining", of=rank(state_s=151))),
        ["GiveUpEpoch", "StopEngine", "EpochOver=True RankStuck"],
        0.1,
        id="nobody-joins",
    ),
    pytest.param(
        seen(engine("Joining", of=rank(state_s=700)), number=1, replica=ALONE),
        ["Ready=False Joining"],
        0.1,
        id="rank-0-makes-the-reference",
    ),
    pytest.param(
        seen(engine("Loading", of=rank(loaded=0.57), stalled_s=100)),
        ["Ready=False Loading"],
        0.1,
        id="loading",
    ),
    pytest.param(
        seen(engine("Loading", stalled_s=121)),
        ["GiveUpEpoch", "StopEngine", "EpochOver=True RankStuck"],
        0.1,
        id="loading-stands-still",
    ),
    pytest.param(seen(engine()), ["ProbeEngine", "Ready=False WarmingUp"], 0.1, id="ask"),
    pytest.param(
        seen(engine(probe=ProbeState.RUNNING)), ["Ready=False WarmingUp"], 0.1, id="being-asked"
    ),
    pytest.param(
        seen(engine(of=rank(probe_failures=1), probe=ProbeState.FAILED, probe_again_in_s=1)),
        ["Ready=False WarmingUp"],
        0.1,
        id="no-answer-yet",
    ),
    pytest.param(
        seen(engine(of=rank(probe_failures=2), probe=ProbeState.FAILED, probe_error="no")),
        ["ProbeEngine", "Ready=False ProbeFailed"],
        0.1,
        id="ask-again",
    ),
    pytest.param(
        seen(engine(of=rank(probe_failures=3), probe=ProbeState.FAILED, probe_error="no")),
        ["GiveUpEpoch", "StopEngine", "EpochOver=True GoldenFailed"],
        0.1,
        id="no-answer",
    ),
    pytest.param(
        seen(PASSED), ["PublishEndpoint", "Ready=False WarmingUp"], 0.5, id="sane-is-enough"
    ),
    pytest.param(seen(PASSED, is_published=True), ["Ready=True Serving"], 0.5, id="serving"),
    pytest.param(
        seen(PASSED, is_published=True, is_stale=True),
        ["PublishEndpoint", "Ready=False WarmingUp"],
        0.5,
        id="the-endpoint-of-the-epoch-before",
    ),
    pytest.param(
        seen(PASSED, replica=wanted(golden=OTHER)),
        ["GiveUpEpoch", "StopEngine", "EpochOver=True GoldenFailed"],
        0.1,
        id="not-the-golden-answer",
    ),
    pytest.param(
        seen(PASSED, reference=ReferenceState.FOUND, found_reference=OTHER),
        ["GiveUpEpoch", "StopEngine", "EpochOver=True GoldenFailed"],
        0.1,
        id="not-the-reference",
    ),
    pytest.param(
        seen(engine(probe=ProbeState.PASSED)),
        ["PublishEndpoint", "Ready=False WarmingUp"],
        0.5,
        id="a-model-that-only-reads-has-no-answer",
    ),
    pytest.param(seen(engine(), number=1), ["Ready=True Following"], 0.5, id="others-follow"),
    pytest.param(
        seen(engine(), number=1, is_published=True),
        ["WithdrawEndpoint", "Ready=True Following"],
        0.5,
        id="it-was-rank-0",
    ),
    pytest.param(
        seen(engine(of=rank(unanswered_s=2.2), probe=ProbeState.PASSED), is_published=True),
        ["Ready=True Serving"],
        0.1,
        id="two-seconds-of-silence",
    ),
    pytest.param(
        seen(engine(of=rank(unanswered_s=3.1)), is_published=True),
        ["GiveUpEpoch", "WithdrawEndpoint", "StopEngine", "EpochOver=True RankSilent"],
        0.1,
        id="silent",
    ),
    pytest.param(
        seen(engine(of=rank(unanswered_s=3.1, is_frozen=True)), is_published=True),
        ["GiveUpEpoch", "WithdrawEndpoint", "Kill", "EpochOver=True RankSilent"],
        0.1,
        id="frozen",
    ),
    pytest.param(
        seen(engine(probe=ProbeState.RUNNING, stalled_s=120)),
        ["Ready=False WarmingUp"],
        0.1,
        id="a-first-step-may-take-as-long-as-a-load",
    ),
    pytest.param(
        seen(engine(probe=ProbeState.RUNNING, stalled_s=120.1)),
        ["GiveUpEpoch", "StopEngine", "EpochOver=True RankStuck"],
        0.1,
        id="a-first-step-that-never-ends",
    ),
    pytest.param(
        seen(engine(excess_s=10.1, proof_bytes=1)),
        ["GiveUpEpoch", "StopEngine", "EpochOver=True MemoryExceeded"],
        0.1,
        id="memory-beyond-the-proof",
    ),
    pytest.param(
        seen(engine(stalled_s=4.1, slowest_s=0.2), number=1),
        ["GiveUpEpoch", "StopEngine", "EpochOver=True RankStuck"],
        0.1,
        id="stuck",
    ),
    pytest.param(
        seen(engine(stalled_s=9.9, slowest_s=1.0), number=1),
        ["Ready=True Following"],
        0.5,
        id="slow-is-not-stuck",
    ),
    pytest.param(
        seen(engine("Draining", message="m"), is_published=True),
        ["WithdrawEndpoint", "Ready=False EngineDraining"],
        0.1,
        id="somebody-else-stops-it",
    ),
    pytest.param(
        seen(engine("Failed", message="rank 1 is gone"), is_published=True),
        ["GiveUpEpoch", "WithdrawEndpoint", "StopEngine", "EpochOver=True RankEnded"],
        0.1,
        id="failed",
    ),
    pytest.param(
        seen(DEAD, is_published=True),
        ["GiveUpEpoch", "WithdrawEndpoint", "EpochOver=True RankEnded"],
        1.0,
        id="ended",
    ),
    pytest.param(
        seen(replace(DEAD, rank=rank(epoch_end=ENDED)), reported=over_told()),
        ["ForgetEngine"],
        0.0,
        id="ended-and-said",
    ),
    pytest.param(
        seen(engine(of=rank(epoch_end=ENDED), stopping_s=0.2), reported=over_told()),
        [],
        0.1,
        id="it-was-asked-to-end",
    ),
    pytest.param(
        seen(engine(of=rank(epoch_end=ENDED), stopping_s=0.6), reported=over_told()),
        ["StopEngine"],
        0.1,
        id="there-is-nothing-to-finish",
    ),
    pytest.param(
        seen(engine(of=rank(epoch_end=ENDED), stopping_s=11.1), reported=over_told()),
        ["Kill"],
        0.1,
        id="it-had-its-time",
    ),
    pytest.param(
        seen(engine(of=rank(epoch_end=ENDED, killed_s=5), stopping_s=20), reported=over_told()),
        [],
        1.0,
        id="killed-once",
    ),
    pytest.param(
        seen(engine(of=rank(epoch=1)), is_published=True),
        ["WithdrawEndpoint", "StopEngine"],
        0.1,
        id="an-earlier-epoch-ends-first-and-unspoken",
    ),
    pytest.param(
        seen(replace(DEAD, rank=rank(epoch=1))),
        ["ForgetEngine"],
        0.0,
        id="the-earlier-epoch-has-ended",
    ),
    pytest.param(
        seen(engine(stopping_s=40.9), replica=wanted(is_deleting=True)),
        ["Stopped=False EngineEnding"],
        0.1,
        id="requests-may-finish-when-it-is-deleted",
    ),
    pytest.param(
        seen(engine(stopping_s=41.1), replica=wanted(is_deleting=True)),
        ["Kill", "Stopped=False EngineEnding"],
        0.1,
        id="and-no-longer",
    ),
    pytest.param(
        ObservedReplica(replica=None, engine=engine(), is_published=True),
        ["WithdrawEndpoint", "StopEngine"],
        0.1,
        id="the-group-goes-on-without-this-node",
    ),
    pytest.param(
        ObservedReplica(replica=None, engine=engine(of=rank(epoch_end=ENDED), stopping_s=11.1)),
        ["Kill"],
        0.1,
        id="what-is-over-has-nothing-to-finish",
    ),
    pytest.param(
        ObservedReplica(replica=None, engine=None, reference=ReferenceState.RUNNING),
        ["StopReference"],
        0.1,
        id="a-reference-for-nobody",
    ),
]


@pytest.mark.parametrize(("state", "actions", "again"), SITUATIONS)
def test_plan(state: ObservedReplica, actions: list[str], again: float | None) -> None:
    decided = plan(state)
    assert ([short(a) for a in decided.actions], decided.requeue_after_s) == (actions, again)


def test_the_report_of_an_epoch_that_is_over() -> None:
    conditions = replica_conditions(seen(DEAD))
    message = "its rank ended with 4: rank 1 is gone"
    assert [(c.type, c.status, c.reason, c.message) for c in conditions] == [
        ("Ready", ConditionStatus.FALSE, "RankEnded", message),
        ("EpochOver", ConditionStatus.TRUE, "RankEnded", message),
    ]


def test_loading_is_reported_in_tenths() -> None:
    (said,) = replica_conditions(seen(engine("Loading", of=rank(loaded=0.579))))
    assert said.message == "its rank has loaded 50 % of its share"


@pytest.mark.parametrize(
    ("state", "golden"),
    [
        (seen(engine()), None),
        (seen(PASSED), GOLDEN),
        (seen(PASSED, number=1), None),
        (seen(PASSED, replica=wanted(golden=GOLDEN)), GOLDEN),
        (seen(found_reference=GOLDEN, used_epoch=2), GOLDEN),
        (seen(engine(), reported=told((), golden=GOLDEN)), GOLDEN),
        (seen(engine(), reported=told((), golden=GOLDEN, epoch=1)), None),
    ],
)
def test_the_golden_answer_is_carried_to_later_epochs(
    state: ObservedReplica, golden: GoldenAnswer | None
) -> None:
    (report,) = [a for a in plan(state).actions if isinstance(a, ReportRank)]
    assert report.golden == golden


def test_a_large_rank_has_more_time_to_end() -> None:
    assert rank_grace_s(2**30, is_doomed=True) == 11
    assert rank_grace_s(400 * 2**30, is_doomed=True) == 410
    assert rank_grace_s(400 * 2**30, is_doomed=False) == 440


def test_a_rank_that_waits_for_the_files_of_another_says_so() -> None:
    waiting = seen(replica=wanted(awaits_files=True), fetch=PRESENT)
    ready = find_condition(replica_conditions(waiting), "Ready")
    assert ready is not None
    assert ready.reason == "WaitingForFiles"
    assert ready.message == "it has its files; another rank of the group has not fetched its own"
