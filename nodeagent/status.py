"""The status of a replica on this node: conditions and golden answer, computed from its observation. Pure."""

from collections.abc import Mapping
from datetime import datetime

from machinery.processes import describe_exit
from models import golden_question
from nodeagent.engines.references import ReferenceState
from nodeagent.replicas import engine_health, epoch_health
from nodeagent.replicas.observation import (
    EpochEnd,
    FetchState,
    ObservedEngine,
    ObservedFetch,
    ObservedRank,
    ObservedReplica,
    ProbeState,
)
from schemas.formation import GoldenAnswer
from schemas.meta import Condition, ConditionStatus, find_condition, is_true
from schemas.replica import (
    MODEL_PRESENT,
    PREFIXES_PINNED,
    UNSTARTABLE,
    WAITING_FOR_FILES,
    FetchStatus,
)
from schemas.wire.exit_codes import ExitCode

# Places beyond this one are reported in tens.
_EXACT_PLACES = 10
# Half a minute of attempts (RESTART_BACKOFF).
_FAILURES_TO_MOVE = 6
_EXIT_REASONS: Mapping[int, str] = {
    ExitCode.UNUSABLE: "ModelUnusable",
    ExitCode.ADDRESS_IN_USE: "PortInUse",
}
_PREFIX_REASONS: Mapping[str, str] = {"Pinned": "Pinned", "NotPinned": "NotPinned"}


def replica_conditions(seen: ObservedReplica) -> tuple[Condition, ...]:
    """Return Ready, Stopped during a deletion, and EpochOver of a group that cannot go on.

    Their times are set when they are written.
    """
    assert seen.replica is not None
    if seen.replica.metadata.deletion_timestamp is None:
        fetching = _fetch_conditions(seen)
        if fetching and not is_true(fetching, MODEL_PRESENT):
            return fetching
        if seen.replica.spec.formation is None:
            return (_engine_ready(seen), *_unstartable(seen), *_prefixes(seen), *fetching)
        return (*_rank_conditions(seen), *fetching)
    stopped = seen.engine is None or not seen.engine.is_running
    reason = "EngineEnded" if stopped else "EngineEnding"
    return (
        _condition("Ready", "Stopping", "it is being deleted", holds=False),
        _condition("Stopped", reason, holds=stopped),
    )


def fetch_status(seen: ObservedReplica) -> FetchStatus | None:
    """Return the fetch of the model that runs; None before its size is known, and after its end."""
    progress = seen.fetch.progress if seen.fetch is not None else None
    if seen.replica is None or progress is None:
        return None
    if progress.phase not in ("Downloading", "Verifying"):
        return None
    return FetchStatus(
        node=seen.replica.spec.ranks[seen.rank].node,
        phase=progress.phase,
        present_bytes=progress.present_bytes,
        total_bytes=progress.total_bytes,
        bytes_per_second=int(progress.bytes_per_s),
        eta_seconds=None if progress.eta_s is None else round(progress.eta_s),
        source=progress.source,
        waiting=progress.waiting,
    )


def _fetch_conditions(seen: ObservedReplica) -> tuple[Condition, ...]:
    """Return ModelPresent of a hub model, and Ready with the same reason while it is being fetched."""
    fetch = seen.fetch
    if fetch is None:
        reported = epoch_health.current_report(seen)
        before = (
            find_condition(reported.conditions, MODEL_PRESENT) if reported is not None else None
        )
        is_kept = seen.engine is not None and seen.engine.is_running
        if before is None or before.status is not ConditionStatus.TRUE or not is_kept:
            return ()
        return (before,)
    if fetch.state is FetchState.PRESENT:
        return (_condition(MODEL_PRESENT, "Present", fetch.message, holds=True),)
    reason, message = _fetch_reason(fetch, fetch_status(seen))
    return tuple(
        _condition(type_, reason, message, holds=False) for type_ in ("Ready", MODEL_PRESENT)
    )


def _fetch_reason(fetch: ObservedFetch, running: FetchStatus | None) -> tuple[str, str]:
    if fetch.state is FetchState.FAILED:
        at = fetch.next_attempt.at if fetch.next_attempt is not None else None
        return fetch.reason, f"{fetch.message}{_next_attempt(at)}"
    if running is not None:
        is_verifying = running.phase == "Verifying"
        return "Verifying" if is_verifying else "Downloading", running.text
    waiting = fetch.progress.waiting if fetch.progress is not None else ""
    return "FetchStarting", waiting or "its model is about to be fetched"


def _engine_ready(seen: ObservedReplica) -> Condition:
    engine = seen.engine
    assert seen.replica is not None
    if engine is None or engine.replica_uid != seen.replica.metadata.uid:
        return _engine_missing(seen)
    if not engine.is_running:
        if seen.start_error:  # the next one could not be started, which is what keeps it away now
            return _engine_missing(seen)
        is_due = engine.start_again_in_s <= 0
        if is_due and seen.start_place > 0:
            return _waiting_to_load(seen.start_place, after=describe_end(engine))
        reason = _EXIT_REASONS.get(engine.exit_code or 0, "EngineEnded")
        message = f"its engine {describe_end(engine)}"
        if engine.fault is not None:
            reason, message = engine.fault.reason, engine.fault.message
        message = f"{message}{_next_attempt(engine.start_again_at)}"
        return _condition("Ready", reason, message, holds=False)
    is_serving = engine.state == "Ready" and engine.probe is ProbeState.PASSED
    if is_serving and seen.is_published and not seen.is_stale:
        return _condition("Ready", "Serving", holds=True)
    return _engine_not_ready(seen, engine)


def _serving_before(seen: ObservedReplica) -> Condition | None:
    """Return Ready as it was last reported if that engine serves on: a restarted agent has yet to probe and publish it.

    The end of an engine is reported before another one starts, so the report is of this one.
    """
    reported = epoch_health.current_report(seen)
    if reported is None or seen.is_stale:
        return None
    ready = find_condition(reported.conditions, "Ready")
    return ready if ready is not None and ready.reason == "Serving" else None


def _engine_missing(seen: ObservedReplica) -> Condition:
    if seen.start_error:
        at = seen.next_start.at if seen.next_start is not None else None
        message = f"{seen.start_error}{_next_attempt(at)}"
        return _condition("Ready", "CannotStart", message, holds=False)
    if seen.start_place > 0:
        return _waiting_to_load(seen.start_place)
    return _condition("Ready", "Starting", "its engine is about to start", holds=False)


def _prefixes(seen: ObservedReplica) -> tuple[Condition, ...]:
    if seen.engine is None or not seen.engine.is_running or not seen.engine.prefixes[0]:
        return ()
    state, message = seen.engine.prefixes
    reason = _PREFIX_REASONS.get(state, "ReadingPrefixes")
    return (_condition(PREFIXES_PINNED, reason, message, holds=reason == "Pinned"),)


def _unstartable(seen: ObservedReplica) -> tuple[Condition, ...]:
    if seen.start_failures < _FAILURES_TO_MOVE:
        return ()
    return (_condition(UNSTARTABLE, "CannotStart", seen.start_error, holds=True),)


def _waiting_to_load(place: int, *, after: str = "") -> Condition:
    before = f"its engine {after}; it " if after else "its engine "
    if place <= _EXACT_PLACES:
        words = f"is at place {place} of those that wait to load"
    else:
        # In tens: each change is a write that wakes all watchers.
        words = f"waits to load, behind about {place // 10 * 10} others"
    message = f"{before}{words}; a Mac loads as many at once as its agent's --start-concurrency"
    return _condition("Ready", "WaitingToLoad", message, holds=False)


def describe_end(engine: ObservedEngine) -> str:
    """Return how an engine ended, with its own last words, as in `ended with 2: no config.json`."""
    code = engine.exit_code
    end = "ended with an unknown code" if code is None else describe_exit(code)
    words = engine.last_words.removeprefix("engine: ")
    return f"{end}: {words}" if words else end


def _next_attempt(at: datetime | None) -> str:
    return "" if at is None else f"; next attempt at {at:%H:%M:%S} UTC"


def _engine_not_ready(seen: ObservedReplica, engine: ObservedEngine) -> Condition:
    fault = engine_health.find_fault(engine)
    if fault is not None:
        return _condition("Ready", fault.reason, fault.message, holds=False)
    if engine.silent_s > 0 and engine.state:
        return _condition("Ready", "EngineSilent", "its engine does not answer", holds=False)
    if engine.state in ("Draining", "Failed"):
        return _condition("Ready", f"Engine{engine.state}", engine.message, holds=False)
    if engine.state != "Ready":
        before = f"; the one before {engine.last_end}" if engine.last_end else ""
        message = f"its engine is loading the model{before}"
        return _condition("Ready", "Loading", message, holds=False)
    if engine.probe_error:
        return _condition("Ready", "ProbeFailed", engine.probe_error, holds=False)
    message = "its engine is generating a first token and warming its cache"
    return _serving_before(seen) or _condition("Ready", "WarmingUp", message, holds=False)


def _rank_conditions(seen: ObservedReplica) -> tuple[Condition, ...]:
    """Return Ready of a rank that is wanted here, and EpochOver if its epoch cannot go on."""
    epoch_end = epoch_health.epoch_end(seen)
    return _epoch_over(epoch_end) if epoch_end is not None else (_rank_ready(seen),)


def _epoch_over(epoch_end: EpochEnd) -> tuple[Condition, ...]:
    return (
        _condition("Ready", epoch_end.reason, epoch_end.message, holds=False),
        _condition(epoch_health.EPOCH_OVER, epoch_end.reason, epoch_end.message, holds=True),
    )


def _rank_ready(seen: ObservedReplica) -> Condition:
    assert seen.replica is not None
    engine = seen.engine
    if engine is None or engine.rank is None or not epoch_health.is_current(engine, seen.replica):
        formation = seen.replica.spec.formation
        if formation is not None and formation.awaits_files:
            message = "it has its files; another rank of the group has not fetched its own"
            return _condition("Ready", WAITING_FOR_FILES, message, holds=False)
        if seen.reference is ReferenceState.RUNNING:
            message = "one process alone answers the golden question, to check the group's answer"
            return _condition("Ready", "MakingReference", message, holds=False)
        return _condition("Ready", "Starting", "its rank is about to start", holds=False)
    if engine.state != "Ready":
        return _rank_not_ready(engine, engine.rank)
    return (
        _condition("Ready", "Following", holds=True)
        if seen.rank > 0
        else _leader_ready(seen, engine)
    )


def _leader_ready(seen: ObservedReplica, engine: ObservedEngine) -> Condition:
    """Return Ready of rank 0 with a loaded model."""
    is_published = seen.is_published and not seen.is_stale
    if engine.probe is ProbeState.PASSED and is_published:
        return _condition("Ready", "Serving", holds=True)
    if engine.probe_error:
        return _condition("Ready", "ProbeFailed", engine.probe_error, holds=False)
    message = "its golden answer is being checked"
    return _serving_before(seen) or _condition("Ready", "WarmingUp", message, holds=False)


def _rank_not_ready(engine: ObservedEngine, rank: ObservedRank) -> Condition:
    if engine.state == "Draining":
        return _condition("Ready", "EngineDraining", engine.message, holds=False)
    if engine.state == "Joining":
        message = "its rank waits for the other ranks"
        return _condition("Ready", "Joining", message, holds=False)
    if engine.state != "Loading":
        return _condition("Ready", "Starting", "its rank is starting", holds=False)
    # In tenths: each change is a write that wakes all watchers.
    tenths = int(10 * min(1.0, rank.loaded))
    message = f"its rank has loaded {10 * tenths} % of its share"
    return _condition("Ready", "Loading", message, holds=False)


def golden_of(seen: ObservedReplica) -> GoldenAnswer | None:
    """Return the answer by which later epochs are checked; None for ranks above 0, and while it is unknown."""
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
    is_sane = not golden_question.mismatch(engine.rank.answer, None)
    return engine.rank.answer if is_sane else None


def _condition(type_: str, reason: str, message: str = "", *, holds: bool) -> Condition:
    """Return a condition without its time."""
    status = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
    return Condition(type=type_, status=status, reason=reason, message=message)
