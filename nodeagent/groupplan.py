"""The agent's decision about one rank of a group that is wanted here: from what is seen to what to do. Pure.

An epoch is started once and given up once; that there is another is the reconciler's decision. What a single engine needs
is plan.py's job.
"""

from nodeagent import judging
from nodeagent.actions import (
    Action,
    Forget,
    GiveUp,
    MakeReference,
    ProbeEngine,
    Publish,
    StartEngine,
    StopEngine,
    StopReference,
)
from nodeagent.observe import EngineView, LocalState, Over, Probe, RankView, Reference
from nodeagent.plans import FAST_LOOK_S, SLOW_LOOK_S, Plan, withdraw_and
from schemas.formation import Formation
from schemas.meta import is_true

# A lost rank is to be noticed within 5 s, of which its silence takes 3.
_LOOK_S = 0.5
# What has no requests to finish is told twice: an engine leaves at once then.
_HURRY_S = 0.5
# An engine drains for 30 s and unloads after that.
_DRAIN_S = 40.0
_GRACE_S = 10.0
# Pages that a large model has wired go slowly: 370 GB took 4 s, and a process killed meanwhile can strand them until
# the Mac restarts (omlx#2184).
_GRACE_S_A_GIB = 1.0


def plan_rank(seen: LocalState) -> Plan:
    """Return the next steps for a rank whose replica and epoch are wanted here; an earlier one's has ended."""
    assert seen.replica is not None
    formation = seen.replica.spec.formation
    assert formation is not None
    found = judging.over(seen)
    if found is not None:
        return _end(seen, found)
    if seen.engine is None:
        return _begin(seen, formation)
    return _tend(seen, seen.engine)


def wind_down(seen: LocalState, engine: EngineView, *, is_doomed: bool) -> Plan:
    """End an engine; `is_doomed` if what it works on is lost anyway."""
    if not engine.is_running:
        return Plan(actions=withdraw_and(seen, Forget()), look_again_s=0.0)
    rank = engine.rank
    assert rank is not None
    if rank.killed_s is not None:
        return Plan(actions=withdraw_and(seen), look_again_s=SLOW_LOOK_S)
    return Plan(
        actions=withdraw_and(seen, *_stop(engine, rank, is_doomed=is_doomed)),
        look_again_s=FAST_LOOK_S,
    )


def _stop(engine: EngineView, rank: RankView, *, is_doomed: bool) -> tuple[Action, ...]:
    if rank.is_frozen:
        return (StopEngine(kill=True),)
    if engine.stopping_s is None:
        return (StopEngine(),)
    if engine.stopping_s > grace_s(rank.memory_bytes, is_doomed=is_doomed):
        return (StopEngine(kill=True),)
    return (StopEngine(),) if is_doomed and engine.stopping_s > _HURRY_S else ()


def grace_s(memory_bytes: int, *, is_doomed: bool) -> float:
    """Return how long a rank of this size has to end by itself, in seconds."""
    return (_GRACE_S if is_doomed else _DRAIN_S) + _GRACE_S_A_GIB * memory_bytes / 2**30


def _end(seen: LocalState, found: Over) -> Plan:
    """Take the rank away, and keep what is known of it until it was said."""
    engine = seen.engine
    if engine is None:
        return Plan(actions=withdraw_and(seen))
    assert engine.rank is not None
    remembered: tuple[Action, ...] = () if engine.rank.over is not None else (GiveUp(over=found),)
    if engine.is_running:
        ending = wind_down(seen, engine, is_doomed=True)
        return Plan(
            actions=(*remembered, *ending.actions),
            look_again_s=ending.look_again_s,
        )
    said = judging.said_of(seen)
    if said is not None and is_true(said.conditions, judging.EPOCH_OVER):
        return Plan(actions=withdraw_and(seen, Forget()), look_again_s=0.0)
    return Plan(actions=(*remembered, *withdraw_and(seen)), look_again_s=SLOW_LOOK_S)


def _begin(seen: LocalState, formation: Formation) -> Plan:
    needs_reference = seen.rank == 0 and formation.golden is None and formation.fits_single
    if needs_reference and seen.reference is Reference.NOT_TRIED:
        return Plan(actions=withdraw_and(seen, MakeReference()), look_again_s=FAST_LOOK_S)
    if seen.reference is Reference.RUNNING:
        # Both would not fit beside each other.
        stop: tuple[Action, ...] = () if needs_reference else (StopReference(),)
        return Plan(actions=withdraw_and(seen, *stop), look_again_s=FAST_LOOK_S)
    return Plan(actions=withdraw_and(seen, StartEngine()), look_again_s=FAST_LOOK_S)


def _tend(seen: LocalState, engine: EngineView) -> Plan:
    """Bring a rank to serving; whether it can is judging.py's question."""
    assert engine.rank is not None
    if engine.state != "Ready":
        return Plan(actions=withdraw_and(seen), look_again_s=FAST_LOOK_S)
    look_s = FAST_LOOK_S if engine.rank.unheard_s > 0 else _LOOK_S
    if seen.rank > 0:
        return Plan(actions=withdraw_and(seen), look_again_s=look_s)
    if engine.probe is not Probe.PASSED:
        is_due = engine.probe is not Probe.RUNNING and engine.probe_again_in_s == 0
        probe: tuple[Action, ...] = (ProbeEngine(),) if is_due else ()
        return Plan(actions=withdraw_and(seen, *probe), look_again_s=FAST_LOOK_S)
    is_published = seen.is_published and not seen.is_stale
    publish: tuple[Action, ...] = () if is_published else (Publish(),)
    return Plan(actions=publish, look_again_s=look_s)
