"""The state of a Mac as pages show it, from its lease, its agent's report and the reconciler's conditions. Pure."""

from typing import Final

from insight.conditions import Row
from schemas.meta import ConditionStatus, Status, find_condition, is_true
from schemas.node import NodeStatus

# Conditions of an agent that are bad when they are true.
_PRESSURES: Final = ("MemoryPressure", "DiskPressure", "ThermalPressure", "NeedsReboot")


def mac_state(*, is_alive: bool, report: NodeStatus | None, life: Status | None) -> tuple[str, str]:
    """Return the state of a Mac, and why it is not online."""
    if not is_alive:
        conditions = () if life is None else life.conditions
        ready = find_condition(conditions, "Ready")
        message = "" if ready is None or ready.status == ConditionStatus.TRUE else ready.message
        if is_true(conditions, "Asleep"):
            return "asleep", message
        return "offline", message or "its agent does not renew its lease"
    reported = () if report is None else report.conditions
    pressed = [condition for condition in reported if condition.type in _PRESSURES]
    bad = [condition for condition in pressed if condition.status == ConditionStatus.TRUE]
    if bad:
        return "degraded", "; ".join(f"{one.type}: {one.message or one.reason}" for one in bad)
    return "online", ""


def silent_since(life: Status | None) -> str | None:
    """Return the time at which a Mac was found silent; None if it is not noted yet."""
    ready = None if life is None else find_condition(life.conditions, "Ready")
    if ready is None or ready.status == ConditionStatus.TRUE or not ready.last_transition_time:
        return None
    return ready.last_transition_time.isoformat()


def is_connected(mac: Row) -> bool:
    """Return whether the agent of a Mac is there: it is neither offline nor asleep."""
    return mac["state"] not in ("offline", "asleep")
