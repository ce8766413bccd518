"""The agent's plan for a replica and for a rank of a group: properties of all situations."""

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
from nodeagent.replicas.observation import ObservedEngine, ObservedRank, ObservedReplica, ProbeState
from nodeagent.status import replica_conditions
from schemas.formation import Formation
from schemas.meta import Condition, ConditionStatus, is_true
from schemas.replica import RankStatus
from tests.support.nodeagent_groups import GOLDEN, group
from tests.support.nodeagent_plans import OTHER_ANSWER as OTHER
from tests.support.nodeagent_plans import RANK_ENDED as ENDED
from tests.support.nodeagent_plans import epoch_over_status as over
from tests.support.nodeagent_plans import rank_status, wanted

seconds = st.sampled_from(
    [0.0, 0.3, 2.9, 3.1, 4.1, 9.9, 10.1, 39.0, 41.0, 59.0, 60.1, 121.0, 151.0, 900.0]
)
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
    epoch_end=st.none() | st.just(ENDED),
)


def engines(rank: st.SearchStrategy[ObservedRank | None]) -> st.SearchStrategy[ObservedEngine]:
    return st.builds(
        ObservedEngine,
        replica_uid=st.sampled_from(["u1", "u2"]),
        is_running=st.booleans(),
        state=st.sampled_from(["", "Joining", "Loading", "Ready", "Draining", "Failed", "Unheard"]),
        message=st.sampled_from(["", "words"]),
        silent_s=seconds,
        probe=st.sampled_from(ProbeState),
        probe_error=st.sampled_from(["", "no token"]),
        probe_again_in_s=seconds,
        stopping_s=st.none() | seconds,
        stalled_s=seconds,
        slowest_s=seconds,
        exit_code=st.none() | st.integers(-15, 4),
        last_words=st.sampled_from(["", "the end"]),
        start_again_in_s=seconds,
        restarts=st.integers(0, 9),
        peak_bytes=st.integers(0, 2**34),
        rank=rank,
    )


SERVING = Condition(type="Ready", status=ConditionStatus.TRUE, reason="Serving")
plain_states = st.builds(
    ObservedReplica,
    replica=st.none()
    | st.builds(wanted, uid=st.sampled_from(["u1", "u2"]), is_deleting=st.booleans()),
    engine=st.none() | engines(st.none()),
    is_published=st.booleans(),
    is_stale=st.booleans(),
    is_outdated=st.booleans(),
    start_error=st.sampled_from(["", "no disk"]),
    reported=st.sampled_from(
        [None, *(RankStatus(replica_uid=u, node="a", conditions=(SERVING,)) for u in ("u1", "u2"))]
    ),
)
# Made once: checking a replica takes longer than planning for it.
groups = st.sampled_from(
    [
        group(uid=uid, is_deleting=is_deleting, epoch=epoch, fits_single=fits, golden=golden)
        for uid in ("u1", "u2")
        for is_deleting in (False, True)
        for epoch in (1, 2, 3)
        for fits in (False, True)
        for golden in (None, GOLDEN)
    ]
)
group_states = st.builds(
    ObservedReplica,
    replica=st.none() | groups,
    is_unknown=st.booleans(),
    engine=st.none() | engines(st.none() | ranks),
    is_published=st.booleans(),
    is_stale=st.booleans(),
    is_outdated=st.booleans(),
    start_error=st.sampled_from(["", "no disk"]),
    reported=st.sampled_from(
        [None, over(), rank_status(()), rank_status((), epoch=1, golden=GOLDEN)]
    ),
    rank=st.integers(0, 1),
    used_epoch=st.integers(0, 3),
    reference=st.sampled_from(ReferenceState),
    found_reference=st.sampled_from([None, GOLDEN]),
)
states = plain_states | group_states


def formation_of(state: ObservedReplica) -> Formation | None:
    return None if state.replica is None else state.replica.spec.formation


def is_over(state: ObservedReplica) -> bool:
    return formation_of(state) is not None and epoch_health.epoch_end(state) is not None


def reports_of(state: ObservedReplica) -> list[ReportRank]:
    return [action for action in plan(state).actions if isinstance(action, ReportRank)]


@given(states)
def test_an_engine_is_started_once_and_alone(state: ObservedReplica) -> None:
    assert plan(state) == plan(state)
    if StartEngine() not in plan(state).actions:
        return
    assert state.engine is None or not state.engine.is_running
    formation = formation_of(state)
    if formation is not None:
        assert state.engine is None
        assert state.used_epoch < formation.epoch
        assert state.reference is not ReferenceState.RUNNING
        assert not is_over(state)


@given(states)
def test_only_a_probed_engine_is_published_and_only_rank_0(state: ObservedReplica) -> None:
    if PublishEndpoint() not in plan(state).actions:
        return
    engine, replica = state.engine, state.replica
    assert engine is not None
    assert replica is not None
    assert (engine.state, engine.probe, engine.is_running) == ("Ready", ProbeState.PASSED, True)
    assert engine.replica_uid == replica.metadata.uid
    assert replica.metadata.deletion_timestamp is None
    if replica.spec.formation is not None:
        assert engine.rank is not None
        assert state.rank == 0
        expected = epoch_health.expected_answer(state)
        assert engine.rank.answer is None or expected in (None, engine.rank.answer)
        assert not is_over(state)


@given(group_states)
def test_an_ended_epoch_is_not_served_asked_or_started(state: ObservedReplica) -> None:
    if state.is_unknown or not is_over(state):
        return
    actions = plan(state).actions
    assert not {PublishEndpoint(), ProbeEngine(), StartEngine(), MakeReference()} & set(actions)
    assert not state.is_published or WithdrawEndpoint() in actions


@given(states)
def test_a_stop_comes_after_the_verdict_and_the_withdrawal(state: ObservedReplica) -> None:
    actions = plan(state).actions
    verdicts = [i for i, action in enumerate(actions) if isinstance(action, GiveUpEpoch)]
    stops = [i for i, action in enumerate(actions) if isinstance(action, StopEngine)]
    if verdicts and stops:
        assert verdicts[0] < stops[0]
    if stops and state.is_published:
        assert actions.index(WithdrawEndpoint()) < stops[0]
    assert not (PublishEndpoint() in actions and WithdrawEndpoint() in actions)


@given(states)
def test_a_replica_is_reported_not_ready_before_its_endpoint_goes(state: ObservedReplica) -> None:
    """A Ready without an endpoint would read as an agent that is away."""
    actions = plan(state).actions
    if WithdrawEndpoint() not in actions or state.replica is None or formation_of(state):
        return
    after = replace(state, is_published=False)
    assert not is_true(replica_conditions(after), "Ready")
    before = actions[: actions.index(WithdrawEndpoint())]
    report = next((action for action in before if isinstance(action, ReportRank)), None)
    shown = report or epoch_health.current_report(state)
    assert shown is not None
    assert not is_true(shown.conditions, "Ready")


@given(states)
def test_an_unchanged_status_is_not_reported_again(state: ObservedReplica) -> None:
    reports = reports_of(state)
    assert len(reports) <= 1
    if state.replica is None or not reports:
        return
    (report,) = reports
    formation = formation_of(state)
    status = RankStatus(
        replica_uid=state.replica.metadata.uid,
        node="a",
        epoch=0 if formation is None else formation.epoch,
        golden=report.golden,
        peak_bytes=report.peak_bytes,
        conditions=report.conditions,
    )
    later = replace(state, reported=status)
    assert reports_of(later) == []
    # And once over, an epoch stays over, whatever is observed of it later.
    if is_true(report.conditions, epoch_health.EPOCH_OVER):
        assert is_over(replace(later, engine=None, start_error="", used_epoch=0))


@given(group_states)
def test_a_new_epoch_is_not_reported_while_the_old_one_runs(state: ObservedReplica) -> None:
    replica, engine = state.replica, state.engine
    if replica is None or engine is None or engine.replica_uid != replica.metadata.uid:
        return
    is_deleting = replica.metadata.deletion_timestamp is not None
    if not is_deleting and not epoch_health.is_current(engine, replica):
        assert reports_of(state) == []


@given(states)
def test_unfinished_work_is_requeued(state: ObservedReplica) -> None:
    is_making = state.reference is ReferenceState.RUNNING and not is_over(state)
    if state.engine is not None or is_making:
        assert plan(state).requeue_after_s is not None
