"""The agent's decision about one replica: from its observation to the next actions. Pure.

A plan contains one step; the next step follows from the observation of its effect. A group's epoch is started once and
given up once: the reconciler decides whether there is another one.
"""

from dataclasses import replace

from nodeagent.actions import (
    FAST_REQUEUE_S,
    SLOW_REQUEUE_S,
    Action,
    ActionPlan,
    FetchModel,
    ForgetEngine,
    GiveUpEpoch,
    MakeReference,
    ProbeEngine,
    PublishEndpoint,
    ReleaseFetch,
    ReportRank,
    StartEngine,
    StopEngine,
    StopReference,
    WithdrawEndpoint,
    withdraw_then,
)
from nodeagent.engines.references import ReferenceState
from nodeagent.replicas import engine_health, epoch_health
from nodeagent.replicas.observation import (
    EngineFault,
    EpochEnd,
    FetchState,
    ObservedEngine,
    ObservedRank,
    ObservedReplica,
    ProbeState,
)
from nodeagent.status import fetch_status, golden_of, replica_conditions
from schemas.formation import Formation
from schemas.meta import Condition, is_true
from schemas.replica import Replica

# An engine answers health questions from its main thread, which a busy machine may delay.
_SILENT_WITHDRAW_S = 10.0
# Longer than the engine's own drain (30 s), and never short: a model that is killed while it is wired can strand its
# memory until the Mac restarts (omlx #2184).
_STOP_KILL_S = 60.0

# A lost rank must be noticed within 5 s, of which its silence takes 3.
_RANK_REQUEUE_S = 0.5
# An engine without requests to finish is asked twice to end: it then exits at once.
_SECOND_STOP_S = 0.5
# An engine drains for 30 s and then unloads.
_RANK_DRAIN_S = 40.0
_RANK_GRACE_S = 10.0
# Wired pages of a large model are released slowly: 370 GB took 4 s, and a process that is killed meanwhile can strand
# them until the Mac restarts (omlx#2184).
_GRACE_S_PER_GIB = 1.0

# An engine far behind in the queue need not look at its place every second.
_PLACE_S, _MAX_PLACE_WAIT_S = 0.1, 10.0

# A person who mends the cause should not wait for the whole backoff's end to see that it is known.
_MAX_FETCH_WAIT_S = 30.0

_PEAK_STEP_BYTES = 64 * 2**20


def plan(seen: ObservedReplica) -> ActionPlan:
    """Return the next actions for one replica."""
    step = _step(seen)
    is_whole = seen.replica is not None and seen.replica.spec.formation is None
    if is_whole and WithdrawEndpoint() in step.actions:
        # The reason comes first: the reconciler takes a Ready without an endpoint for an agent that is away.
        actions = (*_report(replace(seen, is_published=False)), *step.actions)
    else:
        actions = (*step.actions, *_report(seen))
    return ActionPlan(actions=actions, requeue_after_s=step.requeue_after_s)


def _step(seen: ObservedReplica) -> ActionPlan:
    if seen.is_unknown:
        # Stop nothing while the store cannot say whether it is wanted; withdraw only an endpoint
        # without an engine.
        has_ended = seen.engine is not None and not seen.engine.is_running
        idle = ActionPlan(requeue_after_s=SLOW_REQUEUE_S)
        return withdraw_then(seen, requeue_s=SLOW_REQUEUE_S) if has_ended else idle
    if not _is_wanted(seen.replica):
        return _wind_down(seen)
    assert seen.replica is not None
    engine = seen.engine
    if engine is not None and not epoch_health.is_current(engine, seen.replica):
        return _wind_down(seen)  # an earlier assignment of the name; the new one starts afterwards
    if seen.replica.spec.formation is not None:
        return _plan_rank(seen)
    if engine is None or not engine.is_running:
        return _fetch_model(seen) or _start_engine(seen, engine)
    return _tend_engine(seen, engine)


def _is_wanted(replica: Replica | None) -> bool:
    return replica is not None and replica.metadata.deletion_timestamp is None


# An engine that has the whole model.


def _fetch_model(seen: ObservedReplica) -> ActionPlan | None:
    """Fetch the model before anything is started; None once it is whole on this disk, or if no hub has it."""
    fetch = seen.fetch
    if fetch is None or fetch.state is FetchState.PRESENT:
        return None
    # A fetch that runs is asked for again: another replica's may be the one that started it.
    wait_s = 0.0 if fetch.next_attempt is None else fetch.next_attempt.in_s
    start: tuple[Action, ...] = () if wait_s > 0 else (FetchModel(),)
    requeue_s = min(wait_s, _MAX_FETCH_WAIT_S) if wait_s > 0 else SLOW_REQUEUE_S
    return withdraw_then(seen, *start, requeue_s=requeue_s)


def _start_engine(seen: ObservedReplica, engine: ObservedEngine | None) -> ActionPlan:
    """Start the engine once its backoff is over and it is its turn."""
    wait_s = start_delay_s(seen, engine)
    if wait_s > 0:
        return withdraw_then(seen, requeue_s=wait_s)
    if seen.start_place > 0:
        wait_s = min(max(SLOW_REQUEUE_S, seen.start_place * _PLACE_S), _MAX_PLACE_WAIT_S)
        return withdraw_then(seen, requeue_s=wait_s)
    return withdraw_then(seen, StartEngine(), requeue_s=FAST_REQUEUE_S)


def start_delay_s(seen: ObservedReplica, engine: ObservedEngine | None) -> float:
    """Return the rest of the backoff before the next start, after an end or a failed start."""
    after_end_s = engine.start_again_in_s if engine is not None else 0.0
    return max(after_end_s, seen.next_start.in_s if seen.next_start is not None else 0.0)


def _tend_engine(seen: ObservedReplica, engine: ObservedEngine) -> ActionPlan:
    """Bring a running engine into service, or end it because of a fault."""
    fault = engine_health.find_fault(engine)
    if fault is not None:
        return withdraw_then(seen, *_stop_faulty(engine, fault), requeue_s=FAST_REQUEUE_S)
    # It can be published and not Ready: the store was unreachable when the engine before this one ended.
    if engine.silent_s > _SILENT_WITHDRAW_S or engine.state != "Ready":
        return withdraw_then(seen, requeue_s=FAST_REQUEUE_S)
    if engine.probe is ProbeState.RUNNING:
        return withdraw_then(seen, requeue_s=FAST_REQUEUE_S)
    if engine.probe is not ProbeState.PASSED:
        if engine.probe is ProbeState.FAILED and engine.probe_again_in_s > 0:
            wait_s = min(engine.probe_again_in_s, SLOW_REQUEUE_S)
            return withdraw_then(seen, requeue_s=wait_s)
        return withdraw_then(seen, ProbeEngine(), requeue_s=FAST_REQUEUE_S)
    return ActionPlan(actions=_publish(seen), requeue_after_s=SLOW_REQUEUE_S)


def _publish(seen: ObservedReplica) -> tuple[Action, ...]:
    is_current = seen.is_published and not (seen.is_stale or seen.is_outdated)
    return () if is_current else (PublishEndpoint(),)


# A rank of a group.


def _plan_rank(seen: ObservedReplica) -> ActionPlan:
    """Plan a rank whose replica and epoch are wanted here; the engine of an earlier epoch has ended."""
    assert seen.replica is not None
    formation = seen.replica.spec.formation
    assert formation is not None
    epoch_end = epoch_health.epoch_end(seen)
    if epoch_end is not None:
        return _end_epoch(seen, epoch_end)
    if seen.engine is None:
        return _begin_rank(seen, formation)
    # Bring a rank into service; epoch_health decides whether it can be.
    assert seen.engine.rank is not None
    if seen.engine.state != "Ready":
        return withdraw_then(seen, requeue_s=FAST_REQUEUE_S)
    requeue_s = FAST_REQUEUE_S if seen.engine.rank.unanswered_s > 0 else _RANK_REQUEUE_S
    if seen.rank > 0:
        return withdraw_then(seen, requeue_s=requeue_s)
    if seen.engine.probe is not ProbeState.PASSED:
        is_due = seen.engine.probe is not ProbeState.RUNNING and seen.engine.probe_again_in_s == 0
        probe: tuple[Action, ...] = (ProbeEngine(),) if is_due else ()
        return withdraw_then(seen, *probe, requeue_s=FAST_REQUEUE_S)
    return ActionPlan(actions=_publish(seen), requeue_after_s=requeue_s)


def _begin_rank(seen: ObservedReplica, formation: Formation) -> ActionPlan:
    fetching = _fetch_model(seen)
    if fetching is not None:
        return fetching
    if formation.awaits_files:  # the change of the spec wakes this agent
        return withdraw_then(seen, requeue_s=_MAX_FETCH_WAIT_S)
    has_whole = seen.fetch is None or not seen.fetch.is_partial
    wants_reference = formation.golden is None and formation.fits_single
    needs_reference = seen.rank == 0 and wants_reference and has_whole
    if needs_reference and seen.reference is ReferenceState.NOT_TRIED:
        return withdraw_then(seen, MakeReference(), requeue_s=FAST_REQUEUE_S)
    if seen.reference is ReferenceState.RUNNING:
        # Reference and rank do not fit into memory together.
        stop: tuple[Action, ...] = () if needs_reference else (StopReference(),)
        return withdraw_then(seen, *stop, requeue_s=FAST_REQUEUE_S)
    return withdraw_then(seen, StartEngine(), requeue_s=FAST_REQUEUE_S)


def _end_epoch(seen: ObservedReplica, epoch_end: EpochEnd) -> ActionPlan:
    """Stop the rank, and keep its state until the end of the epoch is reported."""
    engine = seen.engine
    if engine is None:
        return withdraw_then(seen)
    assert engine.rank is not None
    is_recorded = engine.rank.epoch_end is not None
    give_up: tuple[Action, ...] = () if is_recorded else (GiveUpEpoch(epoch_end=epoch_end),)
    if engine.is_running:
        ending = _wind_down_rank(seen, engine, is_doomed=True)
        return ActionPlan(
            actions=(*give_up, *ending.actions), requeue_after_s=ending.requeue_after_s
        )
    reported = epoch_health.current_report(seen)
    if reported is not None and is_true(reported.conditions, epoch_health.EPOCH_OVER):
        return withdraw_then(seen, ForgetEngine(), requeue_s=0.0)
    return ActionPlan(
        actions=(*give_up, *withdraw_then(seen).actions), requeue_after_s=SLOW_REQUEUE_S
    )


# The end of an engine.


def _wind_down(seen: ObservedReplica) -> ActionPlan:
    """Withdraw the endpoint first, so that no new request comes, then stop the engine."""
    engine = seen.engine
    if engine is None and seen.reference is ReferenceState.RUNNING:
        return withdraw_then(seen, StopReference(), requeue_s=FAST_REQUEUE_S)
    if engine is None:
        release: tuple[Action, ...] = () if seen.fetch is None else (ReleaseFetch(),)
        return withdraw_then(seen, *release)
    if engine.rank is not None:
        return _wind_down_rank(seen, engine, is_doomed=_has_nothing_to_finish(seen, engine))
    if not engine.is_running:
        return withdraw_then(seen, ForgetEngine(), requeue_s=0.0)
    return withdraw_then(seen, *_stop_engine(engine), requeue_s=FAST_REQUEUE_S)


def _has_nothing_to_finish(seen: ObservedReplica, engine: ObservedEngine) -> bool:
    """Return whether a rank's requests are lost: its epoch is over, or another one is wanted."""
    is_given_up = engine.rank is not None and engine.rank.epoch_end is not None
    return is_given_up or (
        _is_wanted(seen.replica)
        and seen.replica is not None
        and engine.replica_uid == seen.replica.metadata.uid
    )


def _stop_engine(engine: ObservedEngine) -> tuple[Action, ...]:
    if engine.stopping_s is None:
        return (StopEngine(),)
    return (StopEngine(kill=True),) if engine.stopping_s > _STOP_KILL_S else ()


def _stop_faulty(engine: ObservedEngine, fault: EngineFault) -> tuple[Action, ...]:
    """Stop an engine because of a fault: soon, if it takes the memory of others or its requests cannot finish."""
    if engine.stopping_s is None:
        return (StopEngine(fault=fault),)
    is_stuck = fault.reason == "EngineStuck"
    is_hurried = is_stuck or fault.reason == "MemoryExceeded"
    grace_s = rank_grace_s(engine.proof_bytes, is_doomed=True) if is_hurried else _STOP_KILL_S
    if engine.stopping_s > grace_s:
        return (StopEngine(kill=True),)
    return (StopEngine(),) if is_stuck and engine.stopping_s > _SECOND_STOP_S else ()


def _wind_down_rank(
    seen: ObservedReplica, engine: ObservedEngine, *, is_doomed: bool
) -> ActionPlan:
    """Stop a rank; `is_doomed` says that its requests are lost anyway."""
    if not engine.is_running:
        return withdraw_then(seen, ForgetEngine(), requeue_s=0.0)
    rank = engine.rank
    assert rank is not None
    if rank.killed_s is not None:
        return withdraw_then(seen, requeue_s=SLOW_REQUEUE_S)
    return withdraw_then(
        seen, *_stop_rank(engine, rank, is_doomed=is_doomed), requeue_s=FAST_REQUEUE_S
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
    """Return the time in seconds that a rank of this size has to end by itself."""
    base_s = _RANK_GRACE_S if is_doomed else _RANK_DRAIN_S
    return base_s + _GRACE_S_PER_GIB * memory_bytes / 2**30


# The report.


def _report(seen: ObservedReplica) -> tuple[Action, ...]:
    """Report the rank's status if it changed; a replica that is gone has none."""
    if seen.replica is None or _is_other_epoch_ending(seen, seen.replica):
        return ()
    conditions = replica_conditions(seen)
    peak_bytes = _peak_bytes(seen)
    golden, fetch = golden_of(seen), fetch_status(seen)
    reported = epoch_health.current_report(seen)
    is_same = reported is not None and _comparable(reported.conditions) == _comparable(conditions)
    if reported is not None and is_same and (reported.golden, reported.fetch) == (golden, fetch):
        # The peak rises continuously while a model is loaded; it is reported once the engine is Ready.
        is_ready = seen.engine is not None and seen.engine.state == "Ready"
        if peak_bytes == reported.peak_bytes or not is_ready:
            return ()
    report = ReportRank(conditions=conditions, peak_bytes=peak_bytes, golden=golden, fetch=fetch)
    return (report,)


def _is_other_epoch_ending(seen: ObservedReplica, replica: Replica) -> bool:
    """Return whether a rank of another epoch must end first: a report of the new epoch would say that it has."""
    engine = seen.engine
    return (
        _is_wanted(replica)
        and replica.spec.formation is not None
        and engine is not None
        and engine.replica_uid == replica.metadata.uid
        and not epoch_health.is_current(engine, replica)
    )


def _peak_bytes(seen: ObservedReplica) -> int:
    """Return the peak memory of this replica's engines here, in coarse steps."""
    assert seen.replica is not None
    reported, engine = seen.reported, seen.engine
    is_ours = reported is not None and reported.replica_uid == seen.replica.metadata.uid
    shown = reported.peak_bytes if reported is not None and is_ours else 0
    if engine is None or engine.replica_uid != seen.replica.metadata.uid:
        return shown
    return quantize_peak_bytes(engine.peak_bytes, shown=shown)


def quantize_peak_bytes(size_bytes: int, *, shown: int) -> int:
    """Return the peak to report: a multiple of 64 MiB that rises once it grew by 5 % and a step, and never falls.

    Every write of a status wakes all its watchers, so small changes are not reported.
    """
    up = -(-size_bytes // _PEAK_STEP_BYTES) * _PEAK_STEP_BYTES
    is_new = up - shown >= _PEAK_STEP_BYTES and 20 * (up - shown) > shown
    return up if is_new else shown


def _comparable(conditions: tuple[Condition, ...]) -> list[tuple[str, str, str, str]]:
    """Return the parts of conditions that make a report new; their times do not."""
    return [(c.type, c.status, c.reason, c.message) for c in conditions]
