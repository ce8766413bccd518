"""The agent's decision about one replica: from what is seen to what to do. Pure.

Ordered, a step at a time: what follows from a step is decided when its effect is seen.
"""

from nodeagent import coarse, groupplan, judging
from nodeagent.actions import (
    Action,
    Forget,
    ProbeEngine,
    Publish,
    Report,
    StartEngine,
    StopEngine,
    StopReference,
    Withdraw,
)
from nodeagent.observe import EngineView, LocalState, Probe, Reference
from nodeagent.plans import FAST_LOOK_S, SLOW_LOOK_S, Plan, withdraw_and
from nodeagent.rankstatus import golden_of
from nodeagent.status import conditions_of
from schemas.meta import Condition
from schemas.replica import Replica

# An engine answers health from its main thread; a machine under load may delay that.
_SILENT_WITHDRAW_S = 10.0
_SILENT_KILL_S = 60.0
# Longer than the engine's own drain (30 s), and never soon: a model that is killed while it is
# wired can strand its memory until the Mac restarts (omlx #2184).
_STOP_KILL_S = 60.0


def plan(seen: LocalState) -> Plan:
    """Return the next steps for one replica."""
    step = _step(seen)
    return Plan(actions=(*step.actions, *_report(seen)), look_again_s=step.look_again_s)


def _step(seen: LocalState) -> Plan:
    if seen.is_unknown:
        return _wait(seen)
    if not _is_wanted(seen.replica):
        return _wind_down(seen)
    assert seen.replica is not None
    engine = seen.engine
    if engine is not None and not judging.is_current(engine, seen.replica):
        return _wind_down(seen)  # an earlier assignment of the name; the new one starts afterwards
    if seen.replica.spec.formation is not None:
        return groupplan.plan_rank(seen)
    return _plan_engine(seen, engine)


def _plan_engine(seen: LocalState, engine: EngineView | None) -> Plan:
    """Return the next steps for an engine that has the whole model."""
    if engine is None:
        return Plan(actions=(StartEngine(),), look_again_s=FAST_LOOK_S)
    if not engine.is_running:
        return _restart(seen, engine)
    return _tend(seen, engine)


def _wait(seen: LocalState) -> Plan:
    """Stop nothing while nobody can say whether it is wanted; only lead no request into the void."""
    is_over = seen.engine is not None and not seen.engine.is_running
    return Plan(actions=withdraw_and(seen) if is_over else (), look_again_s=SLOW_LOOK_S)


def _is_wanted(replica: Replica | None) -> bool:
    return replica is not None and replica.metadata.deletion_timestamp is None


def _wind_down(seen: LocalState) -> Plan:
    """Take the endpoint away first, so that no new request comes, then end the engine."""
    withdraw: tuple[Action, ...] = (Withdraw(),) if seen.is_published else ()
    engine = seen.engine
    if engine is None and seen.reference is Reference.RUNNING:
        return Plan(actions=(*withdraw, StopReference()), look_again_s=FAST_LOOK_S)
    if engine is None:
        return Plan(actions=withdraw)
    if engine.rank is not None:
        return groupplan.wind_down(seen, engine, is_doomed=_is_doomed(seen, engine))
    if not engine.is_running:
        return Plan(actions=(*withdraw, Forget()), look_again_s=0.0)
    return Plan(actions=(*withdraw, *_stop(engine)), look_again_s=FAST_LOOK_S)


def _is_doomed(seen: LocalState, engine: EngineView) -> bool:
    """Return whether a rank has nothing to finish: its epoch is over, or another one is wanted."""
    is_given_up = engine.rank is not None and engine.rank.over is not None
    return is_given_up or (
        _is_wanted(seen.replica)
        and seen.replica is not None
        and engine.replica_uid == seen.replica.metadata.uid
    )


def _stop(engine: EngineView) -> tuple[Action, ...]:
    if engine.stopping_s is None:
        return (StopEngine(),)
    return (StopEngine(kill=True),) if engine.stopping_s > _STOP_KILL_S else ()


def _restart(seen: LocalState, engine: EngineView) -> Plan:
    withdraw: tuple[Action, ...] = (Withdraw(),) if seen.is_published else ()
    if engine.start_again_in_s > 0:
        return Plan(actions=withdraw, look_again_s=engine.start_again_in_s)
    return Plan(actions=(*withdraw, StartEngine()), look_again_s=FAST_LOOK_S)


def _tend(seen: LocalState, engine: EngineView) -> Plan:
    """Bring a running engine to serving, or away from it when it does not answer."""
    if engine.silent_s > _SILENT_KILL_S:
        return Plan(actions=withdraw_and(seen, *_stop(engine)), look_again_s=FAST_LOOK_S)
    # Published and not Ready: the store was away when the engine before this one ended.
    if engine.silent_s > _SILENT_WITHDRAW_S or engine.state != "Ready":
        return Plan(actions=withdraw_and(seen), look_again_s=FAST_LOOK_S)
    if engine.probe is not Probe.PASSED:
        return _probe(seen, engine)
    is_current = seen.is_published and not seen.is_stale
    publish: tuple[Action, ...] = () if is_current else (Publish(),)
    return Plan(actions=publish, look_again_s=SLOW_LOOK_S)


def _probe(seen: LocalState, engine: EngineView) -> Plan:
    if engine.probe is Probe.RUNNING:
        return Plan(actions=withdraw_and(seen), look_again_s=FAST_LOOK_S)
    if engine.probe is Probe.FAILED and engine.probe_again_in_s > 0:
        wait_s = min(engine.probe_again_in_s, SLOW_LOOK_S)
        return Plan(actions=withdraw_and(seen), look_again_s=wait_s)
    return Plan(actions=withdraw_and(seen, ProbeEngine()), look_again_s=FAST_LOOK_S)


def _report(seen: LocalState) -> tuple[Action, ...]:
    """Say what is so, if it was not said yet; of a replica that is gone there is nothing to say."""
    if seen.replica is None or _is_ending(seen, seen.replica):
        return ()
    conditions = conditions_of(seen)
    peak_bytes = _peak(seen)
    golden = golden_of(seen)
    said = judging.said_of(seen)
    is_same = said is not None and _essence(said.conditions) == _essence(conditions)
    if said is not None and is_same and said.golden == golden:
        # While a model is loaded the peak rises all the time; what it came to is said with the end of it.
        is_serving = seen.engine is not None and seen.engine.state == "Ready"
        if peak_bytes == said.peak_bytes or not is_serving:
            return ()
    return (Report(conditions=conditions, peak_bytes=peak_bytes, golden=golden),)


def _is_ending(seen: LocalState, replica: Replica) -> bool:
    """Return whether a rank of another epoch has to end first: a word of the new one would say that it has."""
    engine = seen.engine
    return (
        _is_wanted(replica)
        and replica.spec.formation is not None
        and engine is not None
        and engine.replica_uid == replica.metadata.uid
        and not judging.is_current(engine, replica)
    )


def _peak(seen: LocalState) -> int:
    """Return the most memory that engines of this replica were seen to take, in coarse steps."""
    assert seen.replica is not None
    said, engine = seen.reported, seen.engine
    is_ours = said is not None and said.replica_uid == seen.replica.metadata.uid
    shown = said.peak_bytes if said is not None and is_ours else 0
    if engine is None or engine.replica_uid != seen.replica.metadata.uid:
        return shown
    return coarse.peak(engine.peak_bytes, shown=shown)


def _essence(conditions: tuple[Condition, ...]) -> list[tuple[str, str, str, str]]:
    """Return what of conditions is news; when they were written is not."""
    return [(c.type, c.status, c.reason, c.message) for c in conditions]
