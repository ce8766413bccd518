"""The agent's decision about one rank of a group that is wanted here: from what is seen to what to do. Pure.

An epoch is started once and given up once; that there is another is the reconciler's decision. What a single engine needs
is plan.py's job.

The agent's decision about one replica: from what is seen to what to do. Pure.

Ordered, a step at a time: what follows from a step is decided when its effect is seen.
"""

from nodeagent.actions import (
    FAST_REQUEUE_S,
    SLOW_REQUEUE_S,
    Action,
    ActionPlan,
    ForgetEngine,
    GiveUpEpoch,
    MakeReference,
    ProbeEngine,
    PublishEndpoint,
    ReportRank,
    StartEngine,
    StopEngine,
    StopReference,
    WithdrawEndpoint,
    withdraw_then,
)
from nodeagent.node import machine_conditions
from nodeagent.replicas import epoch_health
from nodeagent.replicas.observed import (
    EpochEnd,
    ObservedEngine,
    ObservedRank,
    ObservedReplica,
    ProbeState,
    ReferenceState,
)
from nodeagent.status import golden_of, replica_conditions
from schemas.formation import Formation
from schemas.meta import Condition, is_true
from schemas.replica import Replica

# A lost rank is to be noticed within 5 s, of which its silence takes 3.
_RANK_REQUEUE_S = 0.5
# What has no requests to finish is told twice: an engine leaves at once then.
_SECOND_STOP_S = 0.5
# An engine drains for 30 s and unloads after that.
_RANK_DRAIN_S = 40.0
_RANK_GRACE_S = 10.0
# Pages that a large model has wired go slowly: 370 GB took 4 s, and a process killed meanwhile can strand them until
# the Mac restarts (omlx#2184).
_GRACE_S_PER_GIB = 1.0


def _plan_rank(seen: ObservedReplica) -> ActionPlan:
    """Return the next steps for a rank whose replica and epoch are wanted here; an earlier one's has ended."""
    assert seen.replica is not None
    formation = seen.replica.spec.formation
    assert formation is not None
    found = epoch_health.epoch_end(seen)
    if found is not None:
        return _end_epoch(seen, found)
    if seen.engine is None:
        return _begin_rank(seen, formation)
    return _tend_rank(seen, seen.engine)


def _wind_down_rank(
    seen: ObservedReplica, engine: ObservedEngine, *, is_doomed: bool
) -> ActionPlan:
    """End an engine; `is_doomed` if what it works on is lost anyway."""
    if not engine.is_running:
        return ActionPlan(actions=withdraw_then(seen, ForgetEngine()), requeue_after_s=0.0)
    rank = engine.rank
    assert rank is not None
    if rank.killed_s is not None:
        return ActionPlan(actions=withdraw_then(seen), requeue_after_s=SLOW_REQUEUE_S)
    return ActionPlan(
        actions=withdraw_then(seen, *_stop_rank(engine, rank, is_doomed=is_doomed)),
        requeue_after_s=FAST_REQUEUE_S,
    )


def _stop_rank(
    engine: ObservedEngine, rank: ObservedRank, *, is_doomed: bool
) -> tuple[Action, ...]:
    if rank.is_frozen:
        return (StopEngine(kill=True),)
    if engine.stopping_s is None:
        return (StopEngine(),)
    if engine.stopping_s > rank_grace_s(rank.memory_bytes, is_doomed=is_doomed):
        return (StopEngine(kill=True),)
    return (StopEngine(),) if is_doomed and engine.stopping_s > _SECOND_STOP_S else ()


def rank_grace_s(memory_bytes: int, *, is_doomed: bool) -> float:
    """Return how long a rank of this size has to end by itself, in seconds."""
    return (_RANK_GRACE_S if is_doomed else _RANK_DRAIN_S) + _GRACE_S_PER_GIB * memory_bytes / 2**30


def _end_epoch(seen: ObservedReplica, found: EpochEnd) -> ActionPlan:
    """Take the rank away, and keep what is known of it until it was said."""
    engine = seen.engine
    if engine is None:
        return ActionPlan(actions=withdraw_then(seen))
    assert engine.rank is not None
    remembered: tuple[Action, ...] = (
        () if engine.rank.over is not None else (GiveUpEpoch(over=found),)
    )
    if engine.is_running:
        ending = _wind_down_rank(seen, engine, is_doomed=True)
        return ActionPlan(
            actions=(*remembered, *ending.actions),
            requeue_after_s=ending.requeue_after_s,
        )
    said = epoch_health.current_report(seen)
    if said is not None and is_true(said.conditions, epoch_health.EPOCH_OVER):
        return ActionPlan(actions=withdraw_then(seen, ForgetEngine()), requeue_after_s=0.0)
    return ActionPlan(actions=(*remembered, *withdraw_then(seen)), requeue_after_s=SLOW_REQUEUE_S)


def _begin_rank(seen: ObservedReplica, formation: Formation) -> ActionPlan:
    needs_reference = seen.rank == 0 and formation.golden is None and formation.fits_single
    if needs_reference and seen.reference is ReferenceState.NOT_TRIED:
        return ActionPlan(
            actions=withdraw_then(seen, MakeReference()), requeue_after_s=FAST_REQUEUE_S
        )
    if seen.reference is ReferenceState.RUNNING:
        # Both would not fit beside each other.
        stop: tuple[Action, ...] = () if needs_reference else (StopReference(),)
        return ActionPlan(actions=withdraw_then(seen, *stop), requeue_after_s=FAST_REQUEUE_S)
    return ActionPlan(actions=withdraw_then(seen, StartEngine()), requeue_after_s=FAST_REQUEUE_S)


def _tend_rank(seen: ObservedReplica, engine: ObservedEngine) -> ActionPlan:
    """Bring a rank to serving; whether it can is judging.py's question."""
    assert engine.rank is not None
    if engine.state != "Ready":
        return ActionPlan(actions=withdraw_then(seen), requeue_after_s=FAST_REQUEUE_S)
    look_s = FAST_REQUEUE_S if engine.rank.unheard_s > 0 else _RANK_REQUEUE_S
    if seen.rank > 0:
        return ActionPlan(actions=withdraw_then(seen), requeue_after_s=look_s)
    if engine.probe is not ProbeState.PASSED:
        is_due = engine.probe is not ProbeState.RUNNING and engine.probe_again_in_s == 0
        probe: tuple[Action, ...] = (ProbeEngine(),) if is_due else ()
        return ActionPlan(actions=withdraw_then(seen, *probe), requeue_after_s=FAST_REQUEUE_S)
    is_published = seen.is_published and not seen.is_stale
    publish: tuple[Action, ...] = () if is_published else (PublishEndpoint(),)
    return ActionPlan(actions=publish, requeue_after_s=look_s)


# An engine answers health from its main thread; a machine under load may delay that.
_SILENT_WITHDRAW_S = 10.0
_SILENT_KILL_S = 60.0
# Longer than the engine's own drain (30 s), and never soon: a model that is killed while it is
# wired can strand its memory until the Mac restarts (omlx #2184).
_STOP_KILL_S = 60.0


def plan(seen: ObservedReplica) -> ActionPlan:
    """Return the next steps for one replica."""
    step = _step(seen)
    return ActionPlan(actions=(*step.actions, *_report(seen)), requeue_after_s=step.requeue_after_s)


def _step(seen: ObservedReplica) -> ActionPlan:
    if seen.is_unknown:
        return _hold(seen)
    if not _is_wanted(seen.replica):
        return _wind_down(seen)
    assert seen.replica is not None
    engine = seen.engine
    if engine is not None and not epoch_health.is_current(engine, seen.replica):
        return _wind_down(seen)  # an earlier assignment of the name; the new one starts afterwards
    if seen.replica.spec.formation is not None:
        return _plan_rank(seen)
    return _plan_engine(seen, engine)


def _plan_engine(seen: ObservedReplica, engine: ObservedEngine | None) -> ActionPlan:
    """Return the next steps for an engine that has the whole model."""
    if engine is None:
        return ActionPlan(actions=(StartEngine(),), requeue_after_s=FAST_REQUEUE_S)
    if not engine.is_running:
        return _restart_engine(seen, engine)
    return _tend_engine(seen, engine)


def _hold(seen: ObservedReplica) -> ActionPlan:
    """Stop nothing while nobody can say whether it is wanted; only lead no request into the void."""
    is_over = seen.engine is not None and not seen.engine.is_running
    return ActionPlan(
        actions=withdraw_then(seen) if is_over else (), requeue_after_s=SLOW_REQUEUE_S
    )


def _is_wanted(replica: Replica | None) -> bool:
    return replica is not None and replica.metadata.deletion_timestamp is None


def _wind_down(seen: ObservedReplica) -> ActionPlan:
    """Take the endpoint away first, so that no new request comes, then end the engine."""
    withdraw: tuple[Action, ...] = (WithdrawEndpoint(),) if seen.is_published else ()
    engine = seen.engine
    if engine is None and seen.reference is ReferenceState.RUNNING:
        return ActionPlan(actions=(*withdraw, StopReference()), requeue_after_s=FAST_REQUEUE_S)
    if engine is None:
        return ActionPlan(actions=withdraw)
    if engine.rank is not None:
        return _wind_down_rank(seen, engine, is_doomed=_has_nothing_to_finish(seen, engine))
    if not engine.is_running:
        return ActionPlan(actions=(*withdraw, ForgetEngine()), requeue_after_s=0.0)
    return ActionPlan(actions=(*withdraw, *_stop_engine(engine)), requeue_after_s=FAST_REQUEUE_S)


def _has_nothing_to_finish(seen: ObservedReplica, engine: ObservedEngine) -> bool:
    """Return whether a rank has nothing to finish: its epoch is over, or another one is wanted."""
    is_given_up = engine.rank is not None and engine.rank.over is not None
    return is_given_up or (
        _is_wanted(seen.replica)
        and seen.replica is not None
        and engine.replica_uid == seen.replica.metadata.uid
    )


def _stop_engine(engine: ObservedEngine) -> tuple[Action, ...]:
    if engine.stopping_s is None:
        return (StopEngine(),)
    return (StopEngine(kill=True),) if engine.stopping_s > _STOP_KILL_S else ()


def _restart_engine(seen: ObservedReplica, engine: ObservedEngine) -> ActionPlan:
    withdraw: tuple[Action, ...] = (WithdrawEndpoint(),) if seen.is_published else ()
    if engine.start_again_in_s > 0:
        return ActionPlan(actions=withdraw, requeue_after_s=engine.start_again_in_s)
    return ActionPlan(actions=(*withdraw, StartEngine()), requeue_after_s=FAST_REQUEUE_S)


def _tend_engine(seen: ObservedReplica, engine: ObservedEngine) -> ActionPlan:
    """Bring a running engine to serving, or away from it when it does not answer."""
    if engine.silent_s > _SILENT_KILL_S:
        return ActionPlan(
            actions=withdraw_then(seen, *_stop_engine(engine)), requeue_after_s=FAST_REQUEUE_S
        )
    # Published and not Ready: the store was away when the engine before this one ended.
    if engine.silent_s > _SILENT_WITHDRAW_S or engine.state != "Ready":
        return ActionPlan(actions=withdraw_then(seen), requeue_after_s=FAST_REQUEUE_S)
    if engine.probe is not ProbeState.PASSED:
        return _probe_engine(seen, engine)
    is_current = seen.is_published and not seen.is_stale
    publish: tuple[Action, ...] = () if is_current else (PublishEndpoint(),)
    return ActionPlan(actions=publish, requeue_after_s=SLOW_REQUEUE_S)


def _probe_engine(seen: ObservedReplica, engine: ObservedEngine) -> ActionPlan:
    if engine.probe is ProbeState.RUNNING:
        return ActionPlan(actions=withdraw_then(seen), requeue_after_s=FAST_REQUEUE_S)
    if engine.probe is ProbeState.FAILED and engine.probe_again_in_s > 0:
        wait_s = min(engine.probe_again_in_s, SLOW_REQUEUE_S)
        return ActionPlan(actions=withdraw_then(seen), requeue_after_s=wait_s)
    return ActionPlan(actions=withdraw_then(seen, ProbeEngine()), requeue_after_s=FAST_REQUEUE_S)


def _report(seen: ObservedReplica) -> tuple[Action, ...]:
    """Say what is so, if it was not said yet; of a replica that is gone there is nothing to say."""
    if seen.replica is None or _is_other_epoch_ending(seen, seen.replica):
        return ()
    conditions = replica_conditions(seen)
    peak_bytes = _peak_bytes(seen)
    golden = golden_of(seen)
    said = epoch_health.current_report(seen)
    is_same = said is not None and _comparable(said.conditions) == _comparable(conditions)
    if said is not None and is_same and said.golden == golden:
        # While a model is loaded the peak rises all the time; what it came to is said with the end of it.
        is_serving = seen.engine is not None and seen.engine.state == "Ready"
        if peak_bytes == said.peak_bytes or not is_serving:
            return ()
    return (ReportRank(conditions=conditions, peak_bytes=peak_bytes, golden=golden),)


def _is_other_epoch_ending(seen: ObservedReplica, replica: Replica) -> bool:
    """Return whether a rank of another epoch has to end first: a word of the new one would say that it has."""
    engine = seen.engine
    return (
        _is_wanted(replica)
        and replica.spec.formation is not None
        and engine is not None
        and engine.replica_uid == replica.metadata.uid
        and not epoch_health.is_current(engine, replica)
    )


def _peak_bytes(seen: ObservedReplica) -> int:
    """Return the most memory that engines of this replica were seen to take, in coarse steps."""
    assert seen.replica is not None
    said, engine = seen.reported, seen.engine
    is_ours = said is not None and said.replica_uid == seen.replica.metadata.uid
    shown = said.peak_bytes if said is not None and is_ours else 0
    if engine is None or engine.replica_uid != seen.replica.metadata.uid:
        return shown
    return machine_conditions.quantize_peak_bytes(engine.peak_bytes, shown=shown)


def _comparable(conditions: tuple[Condition, ...]) -> list[tuple[str, str, str, str]]:
    """Return what of conditions is news; when they were written is not."""
    return [(c.type, c.status, c.reason, c.message) for c in conditions]
