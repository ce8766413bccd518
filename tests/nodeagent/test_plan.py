"""The agent's plan and report for one replica: a row for each situation."""

import re
from dataclasses import replace
from typing import Any

import pytest

from nodeagent.actions import ReportRank
from nodeagent.plan import plan, quantize_peak_bytes
from nodeagent.replicas.observation import (
    EngineFault,
    NextStart,
    ObservedEngine,
    ObservedReplica,
    ProbeState,
)
from nodeagent.status import replica_conditions
from schemas.replica import RankStatus, Replica
from tests.support.nodeagent_plans import NOW, case, planned, wanted


def engine(state: str = "Ready", **fields: Any) -> ObservedEngine:
    return replace(ObservedEngine(replica_uid="u1", is_running=True, state=state), **fields)


def seen(
    observed: ObservedEngine | None = None, *, replica: Replica | None = None, **fields: Any
) -> ObservedReplica:
    return ObservedReplica(replica=replica or wanted(), engine=observed, **fields)


def gone(observed: ObservedEngine | None, **fields: Any) -> ObservedReplica:
    return ObservedReplica(replica=None, engine=observed, **fields)


PASSED = engine(probe=ProbeState.PASSED)
ENDED = engine(is_running=False, exit_code=1, last_words="out of memory", start_again_in_s=2.0)
DELETED, OTHER = wanted(is_deleting=True), wanted(uid="u2")
GREEDY = EngineFault(reason="MemoryExceeded", message="too much")
STUCK = EngineFault(reason="EngineStuck", message="no progress")


def passed(*, is_published: bool = False, **fields: Any) -> ObservedReplica:
    return seen(replace(PASSED, **fields), is_published=is_published)


def ended(**fields: Any) -> ObservedEngine:
    return replace(ENDED, **fields)


def failed(**fields: Any) -> ObservedReplica:
    return seen(engine(probe=ProbeState.FAILED, probe_error="no", **fields))


def served_before(observed: ObservedEngine, **fields: Any) -> ObservedReplica:
    """Return what an agent that was restarted sees of an engine that its last report calls Serving."""
    conditions = replica_conditions(passed(is_published=True))
    return seen(
        observed, reported=RankStatus(replica_uid="u1", node="a", conditions=conditions), **fields
    )


SERVES, STOPPING = "Ready=True Serving", "Stopped=False EngineEnding"
SITUATIONS = [
    case("start", seen(), "StartEngine, Ready=False Starting"),
    case("could-not-start", seen(start_error="x"), "StartEngine, Ready=False CannotStart"),
    case("could-not-start-and-waits", seen(start_error="x", next_start=NextStart(in_s=40, at=NOW)), "Ready=False CannotStart", 40),
    case("others-load-meanwhile", seen(start_place=3), "Ready=False WaitingToLoad", 1.0),
    case("others-load-after-a-crash", seen(ended(start_again_in_s=0), start_place=1), "Ready=False WaitingToLoad", 1.0),
    case("a-backoff-comes-before-the-queue", seen(ended(start_again_in_s=250), start_place=1), "Ready=False EngineEnded", 250),
    case("a-peak-of-memory-is-borne", seen(engine(excess_s=10, proof_bytes=1)), "ProbeEngine, Ready=False WarmingUp"),
    case("memory-beyond-the-proof", passed(is_published=True, excess_s=10.1, proof_bytes=1), "Ready=False MemoryExceeded, WithdrawEndpoint, StopEngine"),
    case("memory-beyond-the-proof-and-no-reaction", passed(fault=GREEDY, stopping_s=11.1, proof_bytes=2**30), "Kill, Ready=False MemoryExceeded"),
    case("a-slow-load", seen(engine("Loading", stalled_s=600)), "Ready=False Loading"),
    case("a-load-that-stands-still", seen(engine("Loading", stalled_s=601)), "StopEngine, Ready=False LoadStuck"),
    case("a-step-that-compiles-a-kernel", passed(is_published=True, stalled_s=29.9, slowest_s=5.0), SERVES, 1.0),
    case("a-worker-that-hangs", passed(is_published=True, stalled_s=30.1, slowest_s=5.0), "Ready=False EngineStuck, WithdrawEndpoint, StopEngine"),
    case("a-worker-that-hangs-finishes-nothing", passed(fault=STUCK, stopping_s=0.6, proof_bytes=2**30), "StopEngine, Ready=False EngineStuck"),
    case("a-worker-that-hangs-and-no-reaction", passed(fault=STUCK, stopping_s=11.1, proof_bytes=2**30), "Kill, Ready=False EngineStuck"),
    case("a-first-step-is-slow", seen(engine(probe=ProbeState.RUNNING, stalled_s=120)), "Ready=False WarmingUp"),
    case("a-first-step-that-never-ends", seen(engine(probe=ProbeState.RUNNING, stalled_s=120.1)), "StopEngine, Ready=False EngineStuck"),
    case("says-nothing-yet", seen(engine("")), "Ready=False Loading"),
    case("slow-to-say-a-word", seen(engine("", silent_s=9)), "Ready=False Loading"),
    case("loading", seen(engine("Loading")), "Ready=False Loading"),
    case("probe", seen(engine()), "ProbeEngine, Ready=False WarmingUp"),
    case("probe-runs", seen(engine(probe=ProbeState.RUNNING)), "Ready=False WarmingUp"),
    case("an-adopted-engine-serves-on", served_before(engine()), "ProbeEngine"),
    case("while-it-is-probed", served_before(engine(probe=ProbeState.RUNNING)), ""),
    case("until-it-is-published-anew", served_before(PASSED), "PublishEndpoint", 1.0),
    case("or-its-probe-fails", served_before(engine(probe=ProbeState.FAILED, probe_error="no")), "ProbeEngine, Ready=False ProbeFailed"),
    case("or-it-loads", served_before(engine("Loading")), "Ready=False Loading"),
    case("or-it-is-another-replica", served_before(engine(), replica=OTHER), "StopEngine, Ready=False Starting"),
    case("a-failed-probe-waits", failed(probe_again_in_s=0.5), "Ready=False ProbeFailed", 0.5),
    case("and-the-engine-is-watched-meanwhile", failed(probe_again_in_s=50), "Ready=False ProbeFailed", 1.0),
    case("probe-again", failed(), "ProbeEngine, Ready=False ProbeFailed"),
    case("a-failure-is-reported-until-it-is-over", seen(engine(probe=ProbeState.RUNNING, probe_error="no")), "Ready=False ProbeFailed"),
    case("publish", passed(), "PublishEndpoint, Ready=False WarmingUp", 1.0),
    case("serving", passed(is_published=True), SERVES, 1.0),
    case("an-endpoint-of-the-engine-before", seen(PASSED, is_published=True, is_stale=True), "PublishEndpoint, Ready=False WarmingUp", 1.0),
    case("the-tls-mode-has-changed", seen(PASSED, is_published=True, is_outdated=True), f"PublishEndpoint, {SERVES}", 1.0),
    case("published-too-early", seen(engine("Loading"), is_published=True), "Ready=False Loading, WithdrawEndpoint"),
    case("a-short-silence-is-borne", passed(is_published=True, silent_s=10), SERVES, 1.0),
    case("silent", passed(is_published=True, silent_s=10.1), "Ready=False EngineSilent, WithdrawEndpoint"),
    case("no-hurry", passed(silent_s=60), "Ready=False EngineSilent"),
    case("hung", passed(silent_s=60.1), "StopEngine, Ready=False EngineSilent"),
    case("hung-and-asked", passed(silent_s=120, stopping_s=60), "Ready=False EngineSilent"),
    case("hung-for-good", passed(silent_s=120.1, stopping_s=60.1), "Kill, Ready=False EngineSilent"),
    case("another-one-stops-it", seen(engine("Draining"), is_published=True), "Ready=False EngineDraining, WithdrawEndpoint"),
    case("failed", seen(engine("Failed", message="metal")), "Ready=False EngineFailed"),
    case("crash", seen(ENDED, is_published=True), "Ready=False EngineEnded, WithdrawEndpoint", 2.0),
    case("restart", seen(ended(start_again_in_s=0)), "StartEngine, Ready=False EngineEnded"),
    case("exit-2", seen(ended(exit_code=2)), "Ready=False ModelUnusable", 2.0),
    case("exit-3", seen(ended(exit_code=3)), "Ready=False PortInUse", 2.0),
    case("another-replica-of-the-name", seen(PASSED, replica=OTHER, is_published=True), "Ready=False Starting, WithdrawEndpoint, StopEngine"),
    case("which-starts-when-the-first-has-ended", seen(ENDED, replica=OTHER), "ForgetEngine, Ready=False Starting", 0.0),
    case("deleted", seen(PASSED, replica=DELETED, is_published=True), f"{STOPPING}, WithdrawEndpoint, StopEngine"),
    case("draining", seen(replace(PASSED, stopping_s=60), replica=DELETED), STOPPING),
    case("kill", seen(replace(PASSED, stopping_s=61), replica=DELETED), f"Kill, {STOPPING}"),
    case("stopped", seen(ENDED, replica=DELETED), "ForgetEngine, Stopped=True EngineEnded", 0.0),
    case("deleted-before-it-began", seen(replica=DELETED), "Stopped=True EngineEnded", None),
    case("gone", gone(PASSED, is_published=True), "WithdrawEndpoint, StopEngine"),
    case("gone-and-ended", gone(ENDED), "ForgetEngine", 0.0),
    case("only-the-endpoint", gone(None, is_published=True), "WithdrawEndpoint", None),
    case("nothing", gone(None), "", None),
    # Nothing is stopped while the assignment is unknown.
    case("unknown-serves", gone(PASSED, is_published=True, is_unknown=True), "", 1.0),
    case("unknown-silent", gone(replace(PASSED, silent_s=300), is_unknown=True), "", 1.0),
    case("unknown-ended", gone(ENDED, is_published=True, is_unknown=True), "WithdrawEndpoint", 1.0),
    case("unknown-ended-and-withdrawn", gone(ENDED, is_unknown=True), "", 1.0),
    case("unknown-endpoint", gone(None, is_published=True, is_unknown=True), "", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("state", "expected"), SITUATIONS)
def test_plan(state: ObservedReplica, expected: tuple[str, float | None]) -> None:
    assert planned(state) == expected


@pytest.mark.parametrize(("state", "reason", "words"), [
    (seen(ended(last_words="boom")), "EngineEnded", "^its engine ended with 1: boom$"),
    (seen(ended(exit_code=-9, last_words="")), "EngineEnded", "^its engine was killed by SIGKILL$"),
    (seen(ended(exit_code=None, last_words="")), "EngineEnded", "with an unknown code$"),
    (seen(ended(exit_code=0), start_error="stopped"), "CannotStart", "stopped"),
    (seen(engine("Loading", last_end="ended with 2: x")), "Loading", "the one before ended with 2: x$"),
    (seen(start_place=3), "WaitingToLoad", "at place 3 of"),
    (seen(start_place=10), "WaitingToLoad", "at place 10 of"),
    (seen(start_place=287), "WaitingToLoad", "about 280 others"),
])  # fmt: skip
def test_messages(state: ObservedReplica, reason: str, words: str) -> None:
    (ready,) = replica_conditions(state)
    assert ready.reason == reason
    assert re.search(words, ready.message)


def test_an_engine_that_fails_to_start_again_and_again_may_move() -> None:
    def types(failures: int) -> list[str]:
        state = seen(start_error="no port", start_failures=failures)
        return [condition.type for condition in replica_conditions(state)]

    assert types(5) == ["Ready"]
    assert types(6) == ["Ready", "Unstartable"]


def serving(peak_mib: int, **fields: Any) -> ObservedReplica:
    """Return a replica that serves, and whose last report has a peak of 1,024 MiB."""
    state = passed(is_published=True, peak_bytes=peak_mib * 2**20)
    conditions = replica_conditions(state)
    status = RankStatus(replica_uid="u1", node="a", peak_bytes=2**30, conditions=conditions)
    return replace(state, reported=status, **fields)


@pytest.mark.parametrize(("state", "peak_mib"), [
    pytest.param(serving(900), None, id="less-after-a-restart"),
    pytest.param(serving(1024), None, id="the-same"),
    pytest.param(serving(1075), 1088, id="more"),
    pytest.param(serving(3000, replica=OTHER), 0, id="of-another-replica"),
    pytest.param(serving(3000, engine=engine("Loading", peak_bytes=3000 * 2**20)), 3008, id="with-another-change"),
    pytest.param(serving(1, engine=ENDED), 1024, id="kept-when-it-ended"),
    pytest.param(serving(1, engine=None), 1024, id="kept-without-an-engine"),
])  # fmt: skip
def test_peak_is_reported_when_it_has_grown(state: ObservedReplica, peak_mib: int | None) -> None:
    peaks = [a.peak_bytes // 2**20 for a in plan(state).actions if isinstance(a, ReportRank)]
    assert peaks == ([] if peak_mib is None else [peak_mib])


def test_a_peak_that_rises_while_loading_is_not_reported() -> None:
    loading = seen(engine("Loading", peak_bytes=2**30))
    status = RankStatus(replica_uid="u1", node="a", conditions=replica_conditions(loading))
    assert plan(replace(loading, reported=status)).actions == ()


@pytest.mark.parametrize(("shown_mib", "size_mib", "expected_mib"), [
    (0, 0, 0), (0, 1, 64), (64, 64, 64), (64, 65, 128), (128, 100, 128),
    (6400, 6700, 6400), (6400, 6721, 6784), (1280, 1300, 1280), (1280, 1345, 1408),
])  # fmt: skip
def test_a_peak_in_steps(shown_mib: int, size_mib: int, expected_mib: int) -> None:
    mib = 2**20
    assert quantize_peak_bytes(size_mib * mib, shown=shown_mib * mib) == expected_mib * mib
