"""What the agent says of one rank of a group: conditions, and the golden answer, computed from what it sees. Pure."""

from nodeagent import golden, judging
from nodeagent.observe import EngineView, LocalState, Over, Probe, RankView, Reference
from schemas.formation import Golden
from schemas.meta import Condition, Truth


def conditions_of(seen: LocalState) -> tuple[Condition, ...]:
    """Return Ready of a rank that is wanted here, and EpochOver if its epoch cannot go on."""
    over = judging.over(seen)
    return _over(over) if over is not None else (_ready(seen),)


def _over(over: Over) -> tuple[Condition, ...]:
    return (
        condition("Ready", over.reason, over.message, holds=False),
        condition(judging.EPOCH_OVER, over.reason, over.message, holds=True),
    )


def _ready(seen: LocalState) -> Condition:
    assert seen.replica is not None
    engine = seen.engine
    if engine is None or engine.rank is None or not judging.is_current(engine, seen.replica):
        if seen.reference is Reference.RUNNING:
            message = "one process answers the golden question first, by which the group is checked"
            return condition("Ready", "MakingReference", message, holds=False)
        return condition("Ready", "Starting", "its rank is about to start", holds=False)
    if engine.state != "Ready":
        return _coming(engine, engine.rank)
    return condition("Ready", "Following", holds=True) if seen.rank > 0 else _serving(seen, engine)


def _serving(seen: LocalState, engine: EngineView) -> Condition:
    """Say how far rank 0 is, once it has the model."""
    is_published = seen.is_published and not seen.is_stale
    if engine.probe is Probe.PASSED and is_published:
        return condition("Ready", "Serving", holds=True)
    if engine.probe_error:
        return condition("Ready", "ProbeFailed", engine.probe_error, holds=False)
    return condition("Ready", "WarmingUp", "its golden answer is being checked", holds=False)


def _coming(engine: EngineView, rank: RankView) -> Condition:
    """Say how far a rank is that does not serve yet."""
    if engine.state == "Draining":
        return condition("Ready", "EngineDraining", engine.message, holds=False)
    if engine.state == "Joining":
        message = "its rank waits for the other ranks"
        return condition("Ready", "Joining", message, holds=False)
    if engine.state != "Loading":
        return condition("Ready", "Starting", "its rank is starting", holds=False)
    # In tenths: each figure is a write of which everybody hears.
    tenths = int(10 * min(1.0, rank.loaded))
    message = f"its rank has loaded {10 * tenths} % of its share"
    return condition("Ready", "Loading", message, holds=False)


def golden_of(seen: LocalState) -> Golden | None:
    """Return by what later epochs are to be checked; None from other ranks than 0, and while nobody knows."""
    if seen.rank > 0 or seen.replica is None or seen.replica.spec.formation is None:
        return None
    known = judging.expected(seen)
    if known is not None:
        return known
    engine = seen.engine
    if engine is None or engine.rank is None or engine.probe is not Probe.PASSED:
        return None
    if not judging.is_current(engine, seen.replica) or engine.rank.answer is None:
        return None
    return None if golden.complaint(engine.rank.answer, None) else engine.rank.answer


def condition(type_: str, reason: str, message: str = "", *, holds: bool) -> Condition:
    """Return a condition without its time."""
    truth = Truth.TRUE if holds else Truth.FALSE
    return Condition(type=type_, status=truth, reason=reason, message=message)
