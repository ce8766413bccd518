"""The life of an engine: its states, the events that change them, and the literal table of transitions.

The service applies the table (service.py). An event that the table does not list for a state changes nothing.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class EngineState(StrEnum):
    """The states that `/health` reports; only `Ready` takes requests."""

    JOINING = "Joining"
    """A rank waits for the other ranks of its group, before MLX connects them."""
    LOADING = "Loading"
    """The worker reads the model and measures its memory."""
    READY = "Ready"
    """The engine takes requests; a rank above 0 follows rank 0."""
    DRAINING = "Draining"
    """Running requests finish, and the model is freed; new requests are refused."""
    FAILED = "Failed"
    """The process ends with an error."""


class EngineEvent(StrEnum):
    """The events of an engine's life."""

    CONNECTED = "Connected"
    """MLX has connected all ranks of the group."""
    LOADED = "Loaded"
    """The model is in memory."""
    STOP_REQUESTED = "StopRequested"
    """A signal asked the process to end, or rank 0 released this rank."""
    FAILED = "Failed"
    """The worker or another rank has failed."""


TRANSITIONS: Final[Mapping[tuple[EngineState, EngineEvent], EngineState]] = {
    (EngineState.JOINING, EngineEvent.CONNECTED): EngineState.LOADING,
    (EngineState.JOINING, EngineEvent.STOP_REQUESTED): EngineState.DRAINING,
    (EngineState.JOINING, EngineEvent.FAILED): EngineState.FAILED,
    (EngineState.LOADING, EngineEvent.LOADED): EngineState.READY,
    (EngineState.LOADING, EngineEvent.STOP_REQUESTED): EngineState.DRAINING,
    (EngineState.LOADING, EngineEvent.FAILED): EngineState.FAILED,
    (EngineState.READY, EngineEvent.STOP_REQUESTED): EngineState.DRAINING,
    (EngineState.READY, EngineEvent.FAILED): EngineState.FAILED,
    (EngineState.DRAINING, EngineEvent.FAILED): EngineState.FAILED,
    (EngineState.FAILED, EngineEvent.FAILED): EngineState.FAILED,
}
"""FAILED and DRAINING end with the process; the reason of the last failure wins."""


def initial_state(*, has_group: bool) -> EngineState:
    """Return the first state of an engine; one with a group waits for the other ranks first."""
    return EngineState.JOINING if has_group else EngineState.LOADING


def next_state(state: EngineState, event: EngineEvent) -> EngineState | None:
    """Return the state after an event; None if the event has no effect in this state."""
    return TRANSITIONS.get((state, event))
