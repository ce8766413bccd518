"""The health of a group's epoch, judged by this node's rank of it. Pure.

MLX notices a lost peer only sometimes, and may spin forever (docs/operations/shardgroups.md), so the agent decides.
"""

from models import golden_question
from nodeagent.engines import group_launch
from nodeagent.replicas import engine_health
from nodeagent.replicas.observation import (
    EpochEnd,
    ObservedEngine,
    ObservedRank,
    ObservedReplica,
    ProbeState,
)
from schemas.formation import Formation, GoldenAnswer
from schemas.meta import find_condition, is_true
from schemas.replica import RankStatus, Replica

EPOCH_OVER = "EpochOver"

# A rank answers from its main thread, which does not compute: three seconds are dozens of answers.
_SILENT_S = 3.0
# Earlier, imports and MLX's connecting block the process; a rank whose peer is missing gives up after 31 s.
_SILENT_JOINING_S = 40.0
_SILENT_STARTING_S = 60.0
# An engine stops waiting for other ranks by itself; this is for one that does not.
_JOINING_EXTRA_S = 30.0
# A first answer may fail because memory is short for a moment.
_MAX_PROBES = 3


def is_current(engine: ObservedEngine, replica: Replica) -> bool:
    """Return whether the engine belongs to this very replica and its wanted epoch."""
    formation = replica.spec.formation
    epoch = engine.rank.epoch if engine.rank is not None else 0
    wanted = formation.epoch if formation is not None else 0
    return (engine.replica_uid, epoch) == (replica.metadata.uid, wanted)


def current_report(seen: ObservedReplica) -> RankStatus | None:
    """Return our report of this very replica and epoch; None if there is none."""
    replica, reported = seen.replica, seen.reported
    assert replica is not None
    formation = replica.spec.formation
    epoch = formation.epoch if formation is not None else 0
    if reported is None or (reported.replica_uid, reported.epoch) != (replica.metadata.uid, epoch):
        return None
    return reported


def expected_answer(seen: ObservedReplica) -> GoldenAnswer | None:
    """Return the answer that the golden answer must match; None if it only has to be sane."""
    replica, reported = seen.replica, current_report(seen)
    assert replica is not None
    assert replica.spec.formation is not None
    return replica.spec.formation.golden or (reported and reported.golden) or seen.found_reference


def epoch_end(seen: ObservedReplica) -> EpochEnd | None:
    """Return why the wanted epoch cannot go on; None if it can."""
    assert seen.replica is not None
    formation, reported = seen.replica.spec.formation, current_report(seen)
    assert formation is not None
    before = find_condition(reported.conditions, EPOCH_OVER) if reported is not None else None
    if before is not None and reported is not None and is_true(reported.conditions, EPOCH_OVER):
        return EpochEnd(reason=before.reason, message=before.message)
    engine = seen.engine
    if engine is not None and engine.rank is not None and is_current(engine, seen.replica):
        return engine.rank.epoch_end or _engine_epoch_end(seen, engine, engine.rank, formation)
    if seen.start_error:
        return EpochEnd(reason="CannotStart", message=seen.start_error)
    if seen.used_epoch >= formation.epoch:
        message = "its rank ended while no agent was running; engine.log may say why"
        return EpochEnd(reason="RankEnded", message=message)
    return None


def _engine_epoch_end(
    seen: ObservedReplica, engine: ObservedEngine, rank: ObservedRank, formation: Formation
) -> EpochEnd | None:
    if not engine.is_running:
        code = "with an unknown code" if engine.exit_code is None else f"with {engine.exit_code}"
        words = f": {engine.last_words}" if engine.last_words else ""
        return EpochEnd(reason="RankEnded", message=f"its rank ended {code}{words}")
    if engine.state == "Failed":
        return EpochEnd(reason="RankEnded", message=f"its rank failed: {engine.message}")
    limit_s = _silence_limit_s(engine.state)
    if rank.unanswered_s > limit_s:
        message = f"its rank has not answered for more than {limit_s:g} s"
        return EpochEnd(reason="RankSilent", message=message)
    excess = engine_health.memory_fault(engine)
    if excess is not None:
        return EpochEnd(reason=excess.reason, message=excess.message)
    return _stuck_rank(engine, rank, formation) or _wrong_answer(seen, engine, rank)


def _silence_limit_s(state: str) -> float:
    if not state:
        return _SILENT_STARTING_S
    return _SILENT_JOINING_S if state in ("Joining", "Loading") else _SILENT_S


def _stuck_rank(
    engine: ObservedEngine, rank: ObservedRank, formation: Formation
) -> EpochEnd | None:
    if engine.state == "Joining":
        limit_s = group_launch.join_timeout_s(formation) + _JOINING_EXTRA_S
        if rank.state_s <= limit_s:
            return None
        message = f"its rank has waited for the other ranks for more than {limit_s:g} s"
        return EpochEnd(reason="RankStuck", message=message)
    limit_s = engine_health.progress_limit_s(engine)
    if engine.stalled_s <= limit_s:
        return None
    during = " in its first step" if engine.state != "Loading" and not engine.slowest_s else ""
    message = f"its rank is busy and has made no progress for more than {limit_s:.1f} s{during}"
    return EpochEnd(reason="RankStuck", message=message)


def _wrong_answer(
    seen: ObservedReplica, engine: ObservedEngine, rank: ObservedRank
) -> EpochEnd | None:
    """Return the error of rank 0's golden answer, if it was asked for one."""
    if engine.probe is ProbeState.PASSED and rank.answer is not None:
        error = golden_question.mismatch(rank.answer, expected_answer(seen))
        return EpochEnd(reason="GoldenFailed", message=error) if error else None
    if rank.probe_failures >= _MAX_PROBES:
        return EpochEnd(reason="GoldenFailed", message=engine.probe_error)
    return None
