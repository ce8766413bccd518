"""What the agent says of a rank: conditions computed from what it sees. Pure."""

from nodeagent import rankstatus
from nodeagent.observe import EngineView, LocalState, Probe
from nodeagent.rankstatus import condition
from schemas.meta import Condition

# What an engine says when it ends with one of its own exit codes (nodeagent/engine/process.py).
_EXIT_REASONS = {2: "ModelUnusable", 3: "PortInUse"}


def conditions_of(seen: LocalState) -> tuple[Condition, ...]:
    """Return Ready, Stopped once a deletion is done, and EpochOver of a group that cannot go on.

    Times are put in when it is written.
    """
    assert seen.replica is not None
    if seen.replica.metadata.deletion_timestamp is None:
        if seen.replica.spec.formation is None:
            return (_ready(seen),)
        return rankstatus.conditions_of(seen)
    stopped = seen.engine is None or not seen.engine.is_running
    reason = "EngineEnded" if stopped else "EngineEnding"
    return (
        condition("Ready", "Stopping", "it is being deleted", holds=False),
        condition("Stopped", reason, holds=stopped),
    )


def _ready(seen: LocalState) -> Condition:
    engine = seen.engine
    assert seen.replica is not None
    if engine is None or engine.replica_uid != seen.replica.metadata.uid:
        if seen.start_error:
            return condition("Ready", "CannotStart", seen.start_error, holds=False)
        return condition("Ready", "Starting", "its engine is about to start", holds=False)
    if not engine.is_running:
        return _ended(engine)
    answers = engine.state == "Ready" and engine.probe is Probe.PASSED
    if answers and seen.is_published and not seen.is_stale:
        return condition("Ready", "Serving", holds=True)
    return _running(engine)


def _ended(engine: EngineView) -> Condition:
    code = "with an unknown code" if engine.exit_code is None else f"with {engine.exit_code}"
    words = f": {engine.last_words}" if engine.last_words else ""
    reason = _EXIT_REASONS.get(engine.exit_code or 0, "EngineEnded")
    return condition("Ready", reason, f"its engine ended {code}{words}", holds=False)


def _running(engine: EngineView) -> Condition:
    if engine.silent_s > 0 and engine.state:
        return condition("Ready", "EngineSilent", "its engine does not answer", holds=False)
    if engine.state in ("Draining", "Failed"):
        return condition("Ready", f"Engine{engine.state}", engine.message, holds=False)
    if engine.state != "Ready":
        return condition("Ready", "Loading", "its engine is loading the model", holds=False)
    if engine.probe_error:
        return condition("Ready", "ProbeFailed", engine.probe_error, holds=False)
    return condition("Ready", "WarmingUp", "its engine is making a first token", holds=False)
