"""What the agent says of one rank of a group: conditions, and the golden answer, computed from what it sees. Pure.

What the agent says of a rank: conditions computed from what it sees. Pure.
"""

from models import golden_question
from nodeagent.replicas import epoch_health
from nodeagent.replicas.observed import (
    EpochEnd,
    ObservedEngine,
    ObservedRank,
    ObservedReplica,
    ProbeState,
    ReferenceState,
)
from schemas.formation import GoldenAnswer
from schemas.meta import Condition, ConditionStatus


def rank_conditions(seen: ObservedReplica) -> tuple[Condition, ...]:
    """Return Ready of a rank that is wanted here, and EpochOver if its epoch cannot go on."""
    over = epoch_health.epoch_end(seen)
    return _epoch_over(over) if over is not None else (_rank_ready(seen),)


def _epoch_over(over: EpochEnd) -> tuple[Condition, ...]:
    return (
        new_condition("Ready", over.reason, over.message, holds=False),
        new_condition(epoch_health.EPOCH_OVER, over.reason, over.message, holds=True),
    )


def _rank_ready(seen: ObservedReplica) -> Condition:
    assert seen.replica is not None
    engine = seen.engine
    if engine is None or engine.rank is None or not epoch_health.is_current(engine, seen.replica):
        if seen.reference is ReferenceState.RUNNING:
            message = "one process answers the golden question first, by which the group is checked"
            return new_condition("Ready", "MakingReference", message, holds=False)
        return new_condition("Ready", "Starting", "its rank is about to start", holds=False)
    if engine.state != "Ready":
        return _rank_not_ready(engine, engine.rank)
    return (
        new_condition("Ready", "Following", holds=True)
        if seen.rank > 0
        else _leader_ready(seen, engine)
    )


def _leader_ready(seen: ObservedReplica, engine: ObservedEngine) -> Condition:
    """Say how far rank 0 is, once it has the model."""
    is_published = seen.is_published and not seen.is_stale
    if engine.probe is ProbeState.PASSED and is_published:
        return new_condition("Ready", "Serving", holds=True)
    if engine.probe_error:
        return new_condition("Ready", "ProbeFailed", engine.probe_error, holds=False)
    return new_condition("Ready", "WarmingUp", "its golden answer is being checked", holds=False)


def _rank_not_ready(engine: ObservedEngine, rank: ObservedRank) -> Condition:
    """Say how far a rank is that does not serve yet."""
    if engine.state == "Draining":
        return new_condition("Ready", "EngineDraining", engine.message, holds=False)
    if engine.state == "Joining":
        message = "its rank waits for the other ranks"
        return new_condition("Ready", "Joining", message, holds=False)
    if engine.state != "Loading":
        return new_condition("Ready", "Starting", "its rank is starting", holds=False)
    # In tenths: each figure is a write of which everybody hears.
    tenths = int(10 * min(1.0, rank.loaded))
    message = f"its rank has loaded {10 * tenths} % of its share"
    return new_condition("Ready", "Loading", message, holds=False)


def golden_of(seen: ObservedReplica) -> GoldenAnswer | None:
    """Return by what later epochs are to be checked; None from other ranks than 0, and while nobody knows."""
    if seen.rank > 0 or seen.replica is None or seen.replica.spec.formation is None:
        return None
    known = epoch_health.expected_answer(seen)
    if known is not None:
        return known
    engine = seen.engine
    if engine is None or engine.rank is None or engine.probe is not ProbeState.PASSED:
        return None
    if not epoch_health.is_current(engine, seen.replica) or engine.rank.answer is None:
        return None
    return None if golden_question.mismatch(engine.rank.answer, None) else engine.rank.answer


def new_condition(type_: str, reason: str, message: str = "", *, holds: bool) -> Condition:
    """Return a condition without its time."""
    truth = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
    return Condition(type=type_, status=truth, reason=reason, message=message)


# What an engine says when it ends with one of its own exit codes (engine/process.py).
_EXIT_REASONS = {2: "ModelUnusable", 3: "PortInUse"}


def replica_conditions(seen: ObservedReplica) -> tuple[Condition, ...]:
    """Return Ready, Stopped once a deletion is done, and EpochOver of a group that cannot go on.

    Times are put in when it is written.
    """
    assert seen.replica is not None
    if seen.replica.metadata.deletion_timestamp is None:
        if seen.replica.spec.formation is None:
            return (_engine_ready(seen),)
        return rank_conditions(seen)
    stopped = seen.engine is None or not seen.engine.is_running
    reason = "EngineEnded" if stopped else "EngineEnding"
    return (
        new_condition("Ready", "Stopping", "it is being deleted", holds=False),
        new_condition("Stopped", reason, holds=stopped),
    )


def _engine_ready(seen: ObservedReplica) -> Condition:
    engine = seen.engine
    assert seen.replica is not None
    if engine is None or engine.replica_uid != seen.replica.metadata.uid:
        if seen.start_error:
            return new_condition("Ready", "CannotStart", seen.start_error, holds=False)
        return new_condition("Ready", "Starting", "its engine is about to start", holds=False)
    if not engine.is_running:
        return _engine_ended(engine)
    answers = engine.state == "Ready" and engine.probe is ProbeState.PASSED
    if answers and seen.is_published and not seen.is_stale:
        return new_condition("Ready", "Serving", holds=True)
    return _engine_not_ready(engine)


def _engine_ended(engine: ObservedEngine) -> Condition:
    code = "with an unknown code" if engine.exit_code is None else f"with {engine.exit_code}"
    words = f": {engine.last_words}" if engine.last_words else ""
    reason = _EXIT_REASONS.get(engine.exit_code or 0, "EngineEnded")
    return new_condition("Ready", reason, f"its engine ended {code}{words}", holds=False)


def _engine_not_ready(engine: ObservedEngine) -> Condition:
    if engine.silent_s > 0 and engine.state:
        return new_condition("Ready", "EngineSilent", "its engine does not answer", holds=False)
    if engine.state in ("Draining", "Failed"):
        return new_condition("Ready", f"Engine{engine.state}", engine.message, holds=False)
    if engine.state != "Ready":
        return new_condition("Ready", "Loading", "its engine is loading the model", holds=False)
    if engine.probe_error:
        return new_condition("Ready", "ProbeFailed", engine.probe_error, holds=False)
    return new_condition("Ready", "WarmingUp", "its engine is making a first token", holds=False)
