"""The life of an engine: the table of transitions."""

import pytest

from engine.lifecycle import EngineEvent, EngineState, initial_state, next_state

HAPPY_PATH = [
    (EngineEvent.CONNECTED, EngineState.LOADING),
    (EngineEvent.LOADED, EngineState.READY),
    (EngineEvent.STOP_REQUESTED, EngineState.DRAINING),
]


def test_a_rank_of_a_group_goes_through_all_states() -> None:
    state = initial_state(has_group=True)
    assert state is EngineState.JOINING
    for event, wanted in HAPPY_PATH:
        engine_state = next_state(state, event)
        assert engine_state is wanted
        state = engine_state
    assert initial_state(has_group=False) is EngineState.LOADING


@pytest.mark.parametrize("state", EngineState)
def test_a_failure_ends_every_state(state: EngineState) -> None:
    assert next_state(state, EngineEvent.FAILED) is EngineState.FAILED


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (EngineState.READY, EngineEvent.CONNECTED),
        (EngineState.JOINING, EngineEvent.LOADED),
        (EngineState.DRAINING, EngineEvent.LOADED),
        (EngineState.DRAINING, EngineEvent.STOP_REQUESTED),
        (EngineState.FAILED, EngineEvent.STOP_REQUESTED),
        (EngineState.FAILED, EngineEvent.LOADED),
    ],
)
def test_other_events_have_no_effect(state: EngineState, event: EngineEvent) -> None:
    assert next_state(state, event) is None
