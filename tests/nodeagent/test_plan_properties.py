"""The agent's plan for a rank of a group: properties of all situations."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.actions import (
    GiveUpEpoch,
    MakeReference,
    ProbeEngine,
    PublishEndpoint,
    ReportRank,
    StartEngine,
    StopEngine,
    WithdrawEndpoint,
)
from nodeagent.engines.references import ReferenceState
from nodeagent.plan import plan
from nodeagent.replicas import epoch_health
from nodeagent.replicas.observation import (
    ObservedEngine,
    ObservedRank,
    ObservedReplica,
    ProbeState,
)
from schemas.meta import is_true
from schemas.replica import RankStatus
from tests.support.nodeagent_groups import GOLDEN, group
from tests.support.nodeagent_plans import OTHER_ANSWER as OTHER
from tests.support.nodeagent_plans import RANK_ENDED as ENDED
from tests.support.nodeagent_plans import epoch_over_status as over_told
from tests.support.nodeagent_plans import rank_status as told

seconds = st.sampled_from([0.0, 0.3, 2.9, 3.1, 4.1, 39.0, 41.0, 121.0, 151.0, 900.0])
overs = st.none() | st.just(ENDED)
ranks = st.builds(
    ObservedRank,
    epoch=st.integers(1, 3),
    memory_bytes=st.sampled_from([0, 2**30, 2**40]),
    state_s=seconds,
    unanswered_s=seconds,
    loaded=st.floats(0, 2),
    is_frozen=st.booleans(),
    killed_s=st.none() | seconds,
    answer=st.sampled_from([None, GOLDEN, OTHER]),
    probe_failures=st.integers(0, 5),
    epoch_end=overs,
)
engines = st.builds(
    ObservedEngine,
    replica_uid=st.sampled_from(["u1", "u2"]),
    is_running=st.booleans(),
    state=st.sampled_from(["", "Joining", "Loading", "Ready", "Draining", "Failed", "Unheard"]),
    probe=st.sampled_from(ProbeState),
    probe_error=st.sampled_from(["", "no token"]),
    probe_again_in_s=seconds,
    stopping_s=st.none() | seconds,
    stalled_s=seconds,
    slowest_s=seconds,
    exit_code=st.none() | st.integers(-15, 4),
    rank=st.none() | ranks,
)
# Made once: checking a replica takes longer than planning for it.
replicas = st.sampled_from(
    [
        group(uid=uid, is_deleting=is_deleting, epoch=epoch, fits_single=fits, golden=golden)
        for uid in ("u1", "u2")
        for is_deleting in (False, True)
        for epoch in (1, 2, 3)
        for fits in (False, True)
        for golden in (None, GOLDEN)
    ]
)
states = st.builds(
    ObservedReplica,
    replica=st.none() | replicas,
    is_unknown=st.booleans(),
    engine=st.none() | engines,
    is_published=st.booleans(),
    is_stale=st.booleans(),
    is_outdated=st.booleans(),
    start_error=st.sampled_from(["", "no disk"]),
    reported=st.sampled_from([None, over_told(), told(()), told((), epoch=1, golden=GOLDEN)]),
    rank=st.integers(0, 1),
    used_epoch=st.integers(0, 3),
    reference=st.sampled_from(ReferenceState),
    found_reference=st.sampled_from([None, GOLDEN]),
)


def is_over(state: ObservedReplica) -> bool:
    return state.replica is not None and epoch_health.epoch_end(state) is not None


@given(states)
def test_planning_is_deterministic_and_never_fails(state: ObservedReplica) -> None:
    assert plan(state) == plan(state)


@given(states)
def test_an_epoch_is_started_once_and_alone(state: ObservedReplica) -> None:
    if StartEngine() not in plan(state).actions:
        return
    assert state.replica is not None
    assert state.replica.spec.formation is not None
    assert state.engine is None
    assert state.used_epoch < state.replica.spec.formation.epoch
    assert state.reference is not ReferenceState.RUNNING
    assert not is_over(state)


@given(states)
def test_only_rank_0_is_published_after_a_right_answer(state: ObservedReplica) -> None:
    if PublishEndpoint() not in plan(state).actions:
        return
    engine = state.engine
    assert engine is not None
    assert engine.rank is not None
    assert state.rank == 0
    assert (engine.state, engine.probe, engine.is_running) == ("Ready", ProbeState.PASSED, True)
    assert engine.rank.answer is None or epoch_health.expected_answer(state) in (
        None,
        engine.rank.answer,
    )
    assert not is_over(state)


@given(states)
def test_what_is_over_is_not_served_asked_or_started(state: ObservedReplica) -> None:
    if state.is_unknown or not is_over(state):
        return
    decided = plan(state).actions
    assert not {PublishEndpoint(), ProbeEngine(), StartEngine(), MakeReference()} & set(decided)
    assert not state.is_published or WithdrawEndpoint() in decided


@given(states)
def test_a_verdict_is_remembered_before_anything_is_stopped(state: ObservedReplica) -> None:
    actions = plan(state).actions
    verdicts = [i for i, action in enumerate(actions) if isinstance(action, GiveUpEpoch)]
    stops = [i for i, action in enumerate(actions) if isinstance(action, StopEngine)]
    if verdicts and stops:
        assert verdicts[0] < stops[0]
    if stops and state.is_published:
        assert actions.index(WithdrawEndpoint()) < stops[0]


@given(states)
def test_an_unchanged_status_is_not_reported_again(state: ObservedReplica) -> None:
    made = [a for a in plan(state).actions if isinstance(a, ReportRank)]
    assert len(made) <= 1
    if state.replica is None or not made:
        return
    formation = state.replica.spec.formation
    assert formation is not None
    said = RankStatus(
        replica_uid=state.replica.metadata.uid,
        node="a",
        epoch=formation.epoch,
        golden=made[0].golden,
        peak_bytes=made[0].peak_bytes,
        conditions=made[0].conditions,
    )
    later = replace(state, reported=said)
    again = plan(later).actions
    assert not [a for a in again if isinstance(a, ReportRank)]
    # And once over, an epoch stays over, whatever is seen of it later.
    if is_true(made[0].conditions, epoch_health.EPOCH_OVER):
        assert is_over(replace(later, engine=None, start_error="", used_epoch=0))


@given(states)
def test_a_new_epoch_is_not_reported_while_the_old_one_runs(state: ObservedReplica) -> None:
    replica, engine = state.replica, state.engine
    if replica is None or engine is None or engine.replica_uid != replica.metadata.uid:
        return
    is_deleting = replica.metadata.deletion_timestamp is not None
    if is_deleting or epoch_health.is_current(engine, replica):
        return
    assert not [a for a in plan(state).actions if isinstance(a, ReportRank)]


@given(states)
def test_unfinished_work_is_requeued(state: ObservedReplica) -> None:
    decided = plan(state)
    is_making = state.reference is ReferenceState.RUNNING and not is_over(state)
    if state.engine is not None or is_making:
        assert decided.requeue_after_s is not None
