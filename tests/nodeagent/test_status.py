"""The conditions of an engine that has the whole model: one row for each situation."""

from typing import Any

import pytest

from nodeagent.replicas.observation import ObservedEngine, ObservedReplica, ProbeState
from nodeagent.status import golden_of, replica_conditions
from schemas.wire.exit_codes import ExitCode
from tests.support.nodeagent_plans import wanted

PASSED = ProbeState.PASSED


def engine(**fields: Any) -> ObservedEngine:
    defaults: dict[str, Any] = {"replica_uid": "u1", "is_running": True, "state": "Ready"}
    return ObservedEngine(**defaults | fields)


def ended(code: int | None, words: str = "") -> ObservedEngine:
    return engine(is_running=False, exit_code=code, last_words=words)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param({}, "False Starting", id="not-started"),
        pytest.param({"start_error": "no port"}, "False CannotStart", id="start-error"),
        pytest.param({"engine": engine(replica_uid="u0")}, "False Starting", id="earlier-uid"),
        pytest.param({"engine": ended(1)}, "False EngineEnded", id="ended"),
        pytest.param({"engine": ended(None)}, "False EngineEnded", id="unknown-code"),
        pytest.param(
            {"engine": ended(0), "start_error": "stopped"}, "False CannotStart", id="no-next-one"
        ),
        pytest.param({"engine": ended(ExitCode.UNUSABLE)}, "False ModelUnusable", id="unusable"),
        pytest.param({"engine": ended(ExitCode.ADDRESS_IN_USE)}, "False PortInUse", id="port"),
        pytest.param({"engine": engine(state="")}, "False Loading", id="no-answer-yet"),
        pytest.param({"engine": engine(state="Loading")}, "False Loading", id="loading"),
        pytest.param({"engine": engine(state="Draining")}, "False EngineDraining", id="draining"),
        pytest.param({"engine": engine(state="Failed")}, "False EngineFailed", id="failed"),
        pytest.param({"engine": engine(silent_s=5.0)}, "False EngineSilent", id="silent"),
        pytest.param({"engine": engine()}, "False WarmingUp", id="not-probed"),
        pytest.param({"engine": engine(probe_error="x")}, "False ProbeFailed", id="probe-failed"),
        pytest.param({"engine": engine(probe=PASSED)}, "False WarmingUp", id="not-published"),
        pytest.param(
            {"engine": engine(probe=PASSED), "is_published": True}, "True Serving", id="serving"
        ),
        pytest.param(
            {"engine": engine(probe=PASSED), "is_published": True, "is_stale": True},
            "False WarmingUp",
            id="stale-endpoint",
        ),
    ],
)
def test_ready_of_an_engine(seen: dict[str, Any], expected: str) -> None:
    (ready,) = replica_conditions(ObservedReplica(replica=wanted(), **seen))
    assert ready.type == "Ready"
    assert f"{ready.status.value} {ready.reason}" == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(None, "True EngineEnded", id="no-engine"),
        pytest.param(ended(0), "True EngineEnded", id="ended"),
        pytest.param(engine(), "False EngineEnding", id="running"),
    ],
)
def test_stopped_during_a_deletion(found: ObservedEngine | None, expected: str) -> None:
    observed_replica = ObservedReplica(replica=wanted(is_deleting=True), engine=found)
    ready, stopped = replica_conditions(observed_replica)
    assert (ready.type, ready.reason) == ("Ready", "Stopping")
    assert f"{stopped.status.value} {stopped.reason}" == expected


def test_a_replica_without_a_group_has_no_golden_answer() -> None:
    assert golden_of(ObservedReplica(replica=wanted(), engine=engine())) is None


def test_an_engine_that_fails_to_start_again_and_again_may_move() -> None:
    def types(failures: int) -> list[str]:
        seen = ObservedReplica(replica=wanted(), start_error="no port", start_failures=failures)
        return [condition.type for condition in replica_conditions(seen)]

    assert types(5) == ["Ready"]
    assert types(6) == ["Ready", "Unstartable"]
