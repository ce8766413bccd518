"""The agent's plan for one replica: a table of situations, and properties of all of them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.actions import (
    PublishEndpoint,
    ReportRank,
    StartEngine,
    StopEngine,
    WithdrawEndpoint,
)
from nodeagent.plan import plan, quantize_peak_bytes
from nodeagent.replicas.observation import (
    EngineFault,
    NextStart,
    ObservedEngine,
    ObservedReplica,
    ProbeState,
)
from nodeagent.status import replica_conditions
from schemas.meta import Condition, ConditionStatus
from schemas.replica import RankStatus, Replica
from tests.support.nodeagent_plans import NOW, short, wanted


def engine(**fields: Any) -> ObservedEngine:
    return replace(ObservedEngine(replica_uid="u1", is_running=True, state="Ready"), **fields)


def seen(
    found: ObservedEngine | None = None, *, replica: Replica | None = None, **fields: Any
) -> ObservedReplica:
    return ObservedReplica(replica=replica or wanted(), engine=found, **fields)


def no_replica(found: ObservedEngine | None, *, is_published: bool = False) -> ObservedReplica:
    return ObservedReplica(replica=None, engine=found, is_published=is_published)


PASSED = engine(probe=ProbeState.PASSED)
ENDED = engine(is_running=False, exit_code=1, last_words="out of memory", start_again_in_s=2.0)
DELETED = wanted(is_deleting=True)
GREEDY = EngineFault(reason="MemoryExceeded", message="too much")
STUCK = EngineFault(reason="EngineStuck", message="no progress")
LOADING = "Ready=False Loading"
STOPPING = "Stopped=False EngineEnding"

SITUATIONS = [
    pytest.param(seen(), ["StartEngine", "Ready=False Starting"], 0.1, id="start"),
    pytest.param(
        seen(start_error="no free port"),
        ["StartEngine", "Ready=False CannotStart"],
        0.1,
        id="could-not-start",
    ),
    pytest.param(
        seen(start_error="no free port", next_start=NextStart(in_s=40, at=NOW)),
        ["Ready=False CannotStart"],
        40,
        id="could-not-start-and-waits",
    ),
    pytest.param(
        seen(start_place=3), ["Ready=False WaitingToLoad"], 1.0, id="others-load-meanwhile"
    ),
    pytest.param(
        seen(replace(ENDED, start_again_in_s=0), start_place=1),
        ["Ready=False WaitingToLoad"],
        1.0,
        id="others-load-after-a-crash",
    ),
    pytest.param(
        seen(replace(ENDED, start_again_in_s=250), start_place=1),
        ["Ready=False EngineEnded"],
        250,
        id="a-backoff-comes-before-the-queue",
    ),
    pytest.param(
        seen(engine(excess_s=10, proof_bytes=1)),
        ["ProbeEngine", "Ready=False WarmingUp"],
        0.1,
        id="a-peak-of-memory-is-borne",
    ),
    pytest.param(
        seen(replace(PASSED, excess_s=10.1, proof_bytes=1), is_published=True),
        ["WithdrawEndpoint", "StopEngine", "Ready=True Serving"],
        0.1,
        id="memory-beyond-the-proof",
    ),
    pytest.param(
        seen(replace(PASSED, fault=GREEDY, stopping_s=11.1, proof_bytes=2**30)),
        ["Kill", "Ready=False MemoryExceeded"],
        0.1,
        id="memory-beyond-the-proof-and-no-reaction",
    ),
    pytest.param(seen(engine(state="Loading", stalled_s=600)), [LOADING], 0.1, id="a-slow-load"),
    pytest.param(
        seen(engine(state="Loading", stalled_s=601)),
        ["StopEngine", "Ready=False LoadStuck"],
        0.1,
        id="a-load-that-stands-still",
    ),
    pytest.param(
        seen(replace(PASSED, stalled_s=29.9, slowest_s=5.0), is_published=True),
        ["Ready=True Serving"],
        1.0,
        id="a-step-that-compiles-a-kernel",
    ),
    pytest.param(
        seen(replace(PASSED, stalled_s=30.1, slowest_s=5.0), is_published=True),
        ["WithdrawEndpoint", "StopEngine", "Ready=True Serving"],
        0.1,
        id="a-worker-that-hangs",
    ),
    pytest.param(
        seen(replace(PASSED, fault=STUCK, stopping_s=0.6, proof_bytes=2**30)),
        ["StopEngine", "Ready=False EngineStuck"],
        0.1,
        id="a-worker-that-hangs-finishes-nothing",
    ),
    pytest.param(
        seen(replace(PASSED, fault=STUCK, stopping_s=11.1, proof_bytes=2**30)),
        ["Kill", "Ready=False EngineStuck"],
        0.1,
        id="a-worker-that-hangs-and-no-reaction",
    ),
    pytest.param(
        seen(engine(probe=ProbeState.RUNNING, stalled_s=120)),
        ["Ready=False WarmingUp"],
        0.1,
        id="a-first-step-is-slow",
    ),
    pytest.param(
        seen(engine(probe=ProbeState.RUNNING, stalled_s=120.1)),
        ["StopEngine", "Ready=False EngineStuck"],
        0.1,
        id="a-first-step-that-never-ends",
    ),
    pytest.param(seen(engine(state="")), [LOADING], 0.1, id="says-nothing-yet"),
    pytest.param(seen(engine(state="Loading")), [LOADING], 0.1, id="loading"),
    pytest.param(seen(engine(state="", silent_s=9)), [LOADING], 0.1, id="slow-to-say-a-word"),
    pytest.param(seen(engine()), ["ProbeEngine", "Ready=False WarmingUp"], 0.1, id="probe"),
    pytest.param(
        seen(engine(probe=ProbeState.RUNNING)), ["Ready=False WarmingUp"], 0.1, id="probe-runs"
    ),
    pytest.param(
        seen(engine(probe=ProbeState.FAILED, probe_error="no", probe_again_in_s=0.5)),
        ["Ready=False ProbeFailed"],
        0.5,
        id="a-failed-probe-waits",
    ),
    pytest.param(
        seen(engine(probe=ProbeState.FAILED, probe_error="no", probe_again_in_s=50)),
        ["Ready=False ProbeFailed"],
        1.0,
        id="and-the-engine-is-watched-meanwhile",
    ),
    pytest.param(
        seen(engine(probe=ProbeState.FAILED, probe_error="no")),
        ["ProbeEngine", "Ready=False ProbeFailed"],
        0.1,
        id="probe-again",
    ),
    pytest.param(
        seen(engine(probe=ProbeState.RUNNING, probe_error="no")),
        ["Ready=False ProbeFailed"],
        0.1,
        id="what-failed-is-said-until-it-is-mended",
    ),
    pytest.param(seen(PASSED), ["PublishEndpoint", "Ready=False WarmingUp"], 1.0, id="publish"),
    pytest.param(seen(PASSED, is_published=True), ["Ready=True Serving"], 1.0, id="serving"),
    pytest.param(
        seen(PASSED, is_published=True, is_stale=True),
        ["PublishEndpoint", "Ready=False WarmingUp"],
        1.0,
        id="an-endpoint-of-the-engine-before-is-written-over",
    ),
    pytest.param(
        seen(PASSED, is_published=True, is_outdated=True),
        ["PublishEndpoint", "Ready=True Serving"],
        1.0,
        id="the-tls-mode-has-changed",
    ),
    pytest.param(
        seen(engine(state="Loading"), is_published=True),
        ["WithdrawEndpoint", LOADING],
        0.1,
        id="withdraw-what-the-store-did-not-take-back-in-time",
    ),
    pytest.param(
        seen(replace(PASSED, silent_s=10), is_published=True),
        ["Ready=True Serving"],
        1.0,
        id="a-short-silence-is-borne",
    ),
    pytest.param(
        seen(replace(PASSED, silent_s=10.1), is_published=True),
        ["WithdrawEndpoint", "Ready=True Serving"],
        0.1,
        id="silent",
    ),
    pytest.param(
        seen(replace(PASSED, silent_s=60)), ["Ready=False EngineSilent"], 0.1, id="no-hurry"
    ),
    pytest.param(
        seen(replace(PASSED, silent_s=60.1)),
        ["StopEngine", "Ready=False EngineSilent"],
        0.1,
        id="hung",
    ),
    pytest.param(
        seen(replace(PASSED, silent_s=120, stopping_s=60)),
        ["Ready=False EngineSilent"],
        0.1,
        id="hung-and-asked",
    ),
    pytest.param(
        seen(replace(PASSED, silent_s=120.1, stopping_s=60.1)),
        ["Kill", "Ready=False EngineSilent"],
        0.1,
        id="hung-for-good",
    ),
    pytest.param(
        seen(engine(state="Draining"), is_published=True),
        ["WithdrawEndpoint", "Ready=False EngineDraining"],
        0.1,
        id="somebody-else-stops-it",
    ),
    pytest.param(
        seen(engine(state="Failed", message="metal")),
        ["Ready=False EngineFailed"],
        0.1,
        id="failed",
    ),
    pytest.param(
        seen(ENDED, is_published=True),
        ["WithdrawEndpoint", "Ready=False EngineEnded"],
        2.0,
        id="crash",
    ),
    pytest.param(
        seen(replace(ENDED, start_again_in_s=0)),
        ["StartEngine", "Ready=False EngineEnded"],
        0.1,
        id="restart",
    ),
    pytest.param(
        seen(replace(ENDED, exit_code=2)), ["Ready=False ModelUnusable"], 2.0, id="exit-2"
    ),
    pytest.param(seen(replace(ENDED, exit_code=3)), ["Ready=False PortInUse"], 2.0, id="exit-3"),
    pytest.param(
        seen(PASSED, replica=wanted(uid="u2"), is_published=True),
        ["WithdrawEndpoint", "StopEngine", "Ready=False Starting"],
        0.1,
        id="another-replica-of-the-name",
    ),
    pytest.param(
        seen(ENDED, replica=wanted(uid="u2")),
        ["ForgetEngine", "Ready=False Starting"],
        0.0,
        id="which-starts-when-the-first-has-ended",
    ),
    pytest.param(
        seen(PASSED, replica=DELETED, is_published=True),
        ["WithdrawEndpoint", "StopEngine", STOPPING],
        0.1,
        id="deleted",
    ),
    pytest.param(
        seen(replace(PASSED, stopping_s=60), replica=DELETED), [STOPPING], 0.1, id="draining"
    ),
    pytest.param(
        seen(replace(PASSED, stopping_s=61), replica=DELETED), ["Kill", STOPPING], 0.1, id="kill"
    ),
    pytest.param(
        seen(ENDED, replica=DELETED),
        ["ForgetEngine", "Stopped=True EngineEnded"],
        0.0,
        id="stopped",
    ),
    pytest.param(
        seen(replica=DELETED), ["Stopped=True EngineEnded"], None, id="deleted-before-it-began"
    ),
    pytest.param(
        no_replica(PASSED, is_published=True), ["WithdrawEndpoint", "StopEngine"], 0.1, id="gone"
    ),
    pytest.param(no_replica(ENDED), ["ForgetEngine"], 0.0, id="gone-and-ended"),
    pytest.param(
        no_replica(None, is_published=True), ["WithdrawEndpoint"], None, id="only-the-endpoint"
    ),
    pytest.param(no_replica(None), [], None, id="nothing"),
]


@pytest.mark.parametrize(("state", "actions", "again"), SITUATIONS)
def test_plan(state: ObservedReplica, actions: list[str], again: float | None) -> None:
    decided = plan(state)
    assert ([short(a) for a in decided.actions], decided.requeue_after_s) == (actions, again)


@pytest.mark.parametrize(
    ("code", "words", "message"),
    [
        (1, "boom", "its engine ended with 1: boom"),
        (-9, "", "its engine ended with -9"),
        (None, "", "its engine ended with an unknown code"),
    ],
)
def test_the_end_of_an_engine_is_reported(code: int | None, words: str, message: str) -> None:
    (said,) = replica_conditions(seen(replace(ENDED, exit_code=code, last_words=words)))
    assert said.message == message


def test_a_restarted_engine_tells_how_the_one_before_ended() -> None:
    (said,) = replica_conditions(seen(engine(state="Loading", last_end="ended with 2: no config")))
    assert said.reason == "Loading"
    assert said.message.endswith("the one before ended with 2: no config")


@pytest.mark.parametrize(
    ("place", "words"), [(3, "at place 3 of"), (10, "at place 10 of"), (287, "about 280 others")]
)
def test_the_place_in_the_queue_is_told(place: int, words: str) -> None:
    (said,) = replica_conditions(seen(start_place=place))
    assert words in said.message


def test_a_replica_that_is_gone_has_no_conditions() -> None:
    assert not any(isinstance(a, ReportRank) for a in plan(no_replica(PASSED)).actions)


seconds = st.sampled_from([0.0, 0.3, 9.9, 10.1, 59.0, 60.1, 300.0])
engines = st.builds(
    ObservedEngine,
    replica_uid=st.sampled_from(["u1", "u2"]),
    is_running=st.booleans(),
    state=st.sampled_from(["", "Loading", "Ready", "Draining", "Failed", "Unheard"]),
    message=st.sampled_from(["", "words"]),
    silent_s=seconds,
    probe=st.sampled_from(ProbeState),
    probe_error=st.sampled_from(["", "no token"]),
    probe_again_in_s=seconds,
    stopping_s=st.none() | seconds,
    exit_code=st.none() | st.integers(-15, 4),
    last_words=st.sampled_from(["", "the end"]),
    start_again_in_s=seconds,
    restarts=st.integers(0, 9),
    peak_bytes=st.integers(0, 2**34),
)
replicas = st.builds(wanted, uid=st.sampled_from(["u1", "u2"]), is_deleting=st.booleans())


def reported(uid: str, *conditions: Condition) -> RankStatus:
    return RankStatus(replica_uid=uid, node="a", conditions=conditions)


reports = st.builds(
    reported,
    st.sampled_from(["u1", "u2"]),
    st.sampled_from([Condition(type="Ready", status=ConditionStatus.TRUE, reason="Serving")]),
)
states = st.builds(
    ObservedReplica,
    replica=st.none() | replicas,
    engine=st.none() | engines,
    is_published=st.booleans(),
    is_stale=st.booleans(),
    is_outdated=st.booleans(),
    start_error=st.sampled_from(["", "no disk"]),
    reported=st.none() | reports,
)


def serving(peak_mib: int, **fields: Any) -> ObservedReplica:
    """Return a replica that serves, and whose last report has a peak of 1,024 MiB."""
    observed_engine = replace(PASSED, peak_bytes=peak_mib * 2**20)
    said = replace(seen(observed_engine, is_published=True), reported=None)
    status = RankStatus(
        replica_uid="u1", node="a", peak_bytes=2**30, conditions=replica_conditions(said)
    )
    return replace(said, reported=status, **fields)


@pytest.mark.parametrize(
    ("state", "peak_mib"),
    [
        pytest.param(serving(900), None, id="less-after-a-restart"),
        pytest.param(serving(1024), None, id="the-same"),
        pytest.param(serving(1075), 1088, id="more"),
        pytest.param(serving(3000, replica=wanted(uid="u2")), 0, id="of-another-replica"),
        pytest.param(
            serving(3000, engine=engine(state="Loading", peak_bytes=3000 * 2**20)),
            3008,
            id="with-other-news",
        ),
        pytest.param(serving(1, engine=ENDED), 1024, id="kept-when-it-ended"),
        pytest.param(serving(1, engine=None), 1024, id="kept-without-an-engine"),
    ],
)
def test_the_peak_is_reported_when_it_has_grown(
    state: ObservedReplica, peak_mib: int | None
) -> None:
    told = [a.peak_bytes // 2**20 for a in plan(state).actions if isinstance(a, ReportRank)]
    assert told == ([] if peak_mib is None else [peak_mib])


def test_a_peak_that_rises_while_loading_is_not_reported() -> None:
    loading = seen(engine(state="Loading", peak_bytes=2**30))
    said = RankStatus(replica_uid="u1", node="a", conditions=replica_conditions(loading))
    assert plan(replace(loading, reported=said)).actions == ()


@pytest.mark.parametrize(
    ("found", "is_published", "actions"),
    [
        (PASSED, True, []),
        (PASSED, False, []),
        (replace(PASSED, silent_s=300), True, []),
        (ENDED, True, ["WithdrawEndpoint"]),
        (ENDED, False, []),
        (None, True, []),
    ],
)
def test_nothing_is_stopped_while_the_assignment_is_unknown(
    found: ObservedEngine | None, is_published: bool, actions: list[str]
) -> None:
    state = replace(no_replica(found, is_published=is_published), is_unknown=True)
    decided = plan(state)
    assert ([short(a) for a in decided.actions], decided.requeue_after_s) == (actions, 1.0)


@given(states)
def test_planning_is_deterministic_and_never_fails(state: ObservedReplica) -> None:
    assert plan(state) == plan(state)


@given(states)
def test_only_a_probed_engine_is_published(state: ObservedReplica) -> None:
    if PublishEndpoint() not in plan(state).actions:
        return
    assert state.engine is not None
    assert state.replica is not None
    assert state.engine.is_running
    assert (state.engine.state, state.engine.probe) == ("Ready", ProbeState.PASSED)
    assert state.engine.replica_uid == state.replica.metadata.uid
    assert state.replica.metadata.deletion_timestamp is None


@given(states)
def test_one_engine_at_a_time(state: ObservedReplica) -> None:
    if StartEngine() in plan(state).actions:
        assert state.engine is None or not state.engine.is_running


@given(states)
def test_no_requests_come_to_an_engine_that_is_stopped(state: ObservedReplica) -> None:
    actions = plan(state).actions
    stops = [i for i, action in enumerate(actions) if isinstance(action, StopEngine)]
    if stops and state.is_published:
        assert actions.index(WithdrawEndpoint()) < stops[0]
    assert not (PublishEndpoint() in actions and WithdrawEndpoint() in actions)


@given(states)
def test_an_unchanged_status_is_not_reported_again(state: ObservedReplica) -> None:
    reports_made = [a for a in plan(state).actions if isinstance(a, ReportRank)]
    assert len(reports_made) <= 1
    if state.replica is None or not reports_made:
        return
    said = RankStatus(
        replica_uid=state.replica.metadata.uid,
        node="a",
        peak_bytes=reports_made[0].peak_bytes,
        conditions=reports_made[0].conditions,
    )
    again = plan(replace(state, reported=said)).actions
    assert not [a for a in again if isinstance(a, ReportRank)]


@given(states)
def test_unfinished_work_is_requeued(state: ObservedReplica) -> None:
    decided = plan(state)
    if state.engine is not None:
        assert decided.requeue_after_s is not None


@pytest.mark.parametrize(
    ("shown_mib", "size_mib", "expected_mib"),
    [
        (0, 0, 0),
        (0, 1, 64),
        (64, 64, 64),
        (64, 65, 128),
        (128, 100, 128),
        (6400, 6700, 6400),
        (6400, 6721, 6784),
        (1280, 1300, 1280),
        (1280, 1345, 1408),
    ],
)
def test_a_peak_in_steps(shown_mib: int, size_mib: int, expected_mib: int) -> None:
    mib = 2**20
    assert quantize_peak_bytes(size_mib * mib, shown=shown_mib * mib) == expected_mib * mib
