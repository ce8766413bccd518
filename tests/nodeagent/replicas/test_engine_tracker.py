"""The tracked state of one engine: health answers, probes, failures, and the table of its life."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest

from machinery import processes
from nodeagent.actions import StopEngine
from nodeagent.engines import engine_processes
from nodeagent.engines.engine_processes import EngineProcess
from nodeagent.engines.health_client import EngineHealth, HealthClient
from nodeagent.plan import plan
from nodeagent.replicas.engine_tracker import (
    TRANSITIONS,
    EngineEvent,
    EngineLife,
    EngineProber,
    EngineTracker,
    RankTracker,
    next_life,
)
from nodeagent.replicas.observation import (
    EngineFault,
    ObservedEngine,
    ObservedRank,
    ObservedReplica,
    ProbeState,
)
from nodeagent.status import replica_conditions
from schemas.replica import RankStatus
from schemas.wire.engine_address import EngineAddress
from tests.support.clock import FakeClock
from tests.support.nodeagent_engine import TOKEN, FakeEngine
from tests.support.nodeagent_plans import wanted
from tests.support.waiting import until


def health(state: str = "Ready", **fields: Any) -> EngineHealth:
    return EngineHealth(state=state, message="", **fields)


def track() -> RankTracker:
    return RankTracker(epoch=1, memory_bytes=0, began_at=0.0)


def view(rank: RankTracker, now: float) -> ObservedRank:
    return rank.view(now, is_frozen=False, killed_s=None, probe_failures=0)


def test_one_answer_that_does_not_come_is_no_silence() -> None:
    rank = track()
    rank.record_answer(health(), 1.0)
    rank.record_missed()
    # The agent itself may have been away for an hour while it waited for that answer.
    assert view(rank, 3600.0).unanswered_s == 0
    assert rank.is_unanswered
    rank.record_missed()
    assert view(rank, 4.5).unanswered_s == 3.5
    rank.record_answer(health(), 5.0)
    assert view(rank, 5.0).unanswered_s == 0
    assert not rank.is_unanswered


def test_a_rank_that_never_answered_is_silent_since_its_start() -> None:
    rank = track()
    rank.record_missed()
    rank.record_missed()
    assert view(rank, 61.0).unanswered_s == 61.0


def test_a_new_state_starts_a_new_time() -> None:
    rank = track()
    rank.record_answer(health("Joining", is_busy=True), 10.0)
    rank.record_answer(health("Joining", is_busy=True), 40.0)
    assert view(rank, 41.0).state_s == 31.0
    rank.record_answer(health("Loading", is_busy=True, loaded=0.25), 50.0)
    observed_rank = view(rank, 51.0)
    assert (observed_rank.state_s, observed_rank.loaded) == (1.0, 0.25)


@pytest.fixture
async def engine(tmp_path: Path, port: FakeEngine) -> AsyncIterator[EngineTracker]:
    """Return an engine whose process does nothing; `port` speaks for it."""
    log = tmp_path / "engine.log"
    child = processes.spawn([sys.executable, "-c", "import signal; signal.pause()"], log=log)
    process = EngineProcess(
        replica="qwen-0",
        replica_uid="u1",
        served_name="x",
        address=port.address,
        child=child,
        log=log,
    )
    yield EngineTracker(process=process, started_at=0, answered_at=0)
    child.send(signal.SIGKILL)
    await until(lambda: not child.running())


async def probe(engine: EngineTracker, client: HealthClient, clock: FakeClock) -> ObservedEngine:
    async with asyncio.TaskGroup() as group:
        EngineProber(client, group, clock).start(engine)
        assert engine.probe is ProbeState.RUNNING
    return engine.view(clock)


async def test_failed_probes_back_off_and_are_reported_once(
    port: FakeEngine, client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()
    port.completion = b"{}"
    await engine.observe(client, clock)
    waits, told = [], 0
    reported: RankStatus | None = None
    for _ in range(8):
        observed_engine = await probe(engine, client, clock)
        waits.append(observed_engine.probe_again_in_s)
        for view in (observed_engine, engine.view(clock)):
            state = ObservedReplica(replica=wanted(), engine=view, reported=reported)
            for action in plan(state).actions:
                if hasattr(action, "conditions"):
                    told += 1
                    reported = RankStatus(replica_uid="u1", node="a", conditions=action.conditions)
        await clock.advance(observed_engine.probe_again_in_s)
        assert engine.view(clock).probe_again_in_s == 0
        # A real engine goes on answering meanwhile.
        await engine.observe(client, clock)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert told == 1
    port.completion = TOKEN
    observed_engine = await probe(engine, client, clock)
    assert (
        observed_engine.probe,
        observed_engine.probe_error,
        observed_engine.probe_again_in_s,
    ) == (ProbeState.PASSED, "", 0)


async def test_an_engine_generates_while_it_is_ready_or_drains_and_has_work(
    port: FakeEngine, client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()
    assert not engine.is_generating
    found = []
    for state, busy in (
        ("Loading", True),
        ("Ready", False),
        ("Ready", True),
        ("Draining", True),
        ("Draining", False),
    ):
        port.health = orjson.dumps({"state": state, "busy": busy, "replicaUid": "u1"})
        await clock.advance(1.0)
        await engine.observe(client, clock)
        found.append(engine.is_generating)
    assert found == [False, False, True, True, False]


async def test_health_is_asked_no_more_than_needed(
    port: FakeEngine, client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()
    for _ in range(5):
        await engine.observe(client, clock)
    assert port.asked == 1
    await clock.advance(0.1)
    await engine.observe(client, clock)
    assert port.asked == 2


async def test_silence_is_counted_from_the_last_answer(
    port: FakeEngine, client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()
    await clock.advance(5)
    await engine.observe(client, clock)
    assert engine.view(clock).silent_s == 0
    port.health = b""
    await clock.advance(3)
    await engine.observe(client, clock)
    assert engine.view(clock).silent_s == 0
    await clock.advance(1)
    assert engine.view(clock).silent_s == 4


async def test_crashes_back_off_and_a_long_life_is_forgiven(
    client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()
    engine.process.child.send(signal.SIGKILL)
    await until(lambda: not engine.process.child.running())
    waits = []
    for failures in range(11):
        crashed = EngineTracker(
            process=engine.process, started_at=0, answered_at=0, failures=failures, jitter=1.0
        )
        await crashed.observe(client, clock)
        waits.append(crashed.view(clock).start_again_in_s)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    await clock.advance(61)
    served = EngineTracker(
        process=engine.process, started_at=0, answered_at=0, failures=7, jitter=1.0
    )
    await served.observe(client, clock)
    await served.observe(client, clock)
    observed_engine = served.view(clock)
    assert (
        observed_engine.start_again_in_s,
        observed_engine.restarts,
        observed_engine.exit_code,
    ) == (1, 1, -9)


@pytest.mark.parametrize("jitter", [0.0, 1.0])
async def test_an_engine_that_refuses_to_start_is_retried_within_five_minutes(
    client: HealthClient, tmp_path: Path, jitter: float
) -> None:
    clock = FakeClock()
    log = tmp_path / "engine.log"
    code = "print('no config.json'); raise SystemExit(2)"
    child = processes.spawn([sys.executable, "-c", code], log=log)
    await until(lambda: not child.running())
    process = EngineProcess(
        replica="qwen-0",
        replica_uid="u1",
        served_name="x",
        address=EngineAddress("127.0.0.1", 1),
        child=child,
        log=log,
    )
    refused = EngineTracker(process=process, started_at=0, answered_at=0, jitter=jitter)
    await refused.observe(client, clock)
    observed_engine = refused.view(clock)
    assert refused.life is EngineLife.REFUSED
    assert observed_engine.start_again_in_s == (300 if jitter else 150)
    assert observed_engine.start_again_at == clock.now() + timedelta(
        seconds=observed_engine.start_again_in_s
    )
    (ready,) = replica_conditions(ObservedReplica(replica=wanted(), engine=observed_engine))
    assert ready.reason == "ModelUnusable"
    assert ready.message == (
        f"its engine ended with 2: no config.json; next attempt at {observed_engine.start_again_at:%H:%M:%S} UTC"
    )


async def test_an_engine_that_is_ended_for_a_fault_backs_off(
    client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()
    engine.jitter, engine.failures = 1.0, 3
    engine.note_stop(0, EngineFault(reason="MemoryExceeded", message="too much"))
    engine.process.child.send(signal.SIGKILL)
    await until(lambda: not engine.process.child.running())
    await engine.observe(client, clock)
    observed_engine = engine.view(clock)
    assert engine.life is EngineLife.STOPPED
    assert (observed_engine.restarts, observed_engine.start_again_in_s) == (4, 8)
    (ready,) = replica_conditions(ObservedReplica(replica=wanted(), engine=observed_engine))
    assert (ready.reason, ready.message.partition("; ")[0]) == ("MemoryExceeded", "too much")


async def test_the_agent_measures_the_memory_of_an_engine_itself(
    port: FakeEngine, client: HealthClient, tmp_path: Path
) -> None:
    clock = FakeClock()
    log = tmp_path / "engine.log"
    # Every engine may use 1 GiB and half of its proof more than that.
    code = "import signal; held = b'x' * (1126 * 2**20); print('held', flush=True); signal.pause()"
    child = processes.spawn([sys.executable, "-c", code], log=log)
    try:
        await until(lambda: "held" in log.read_text(), what="it holds the memory")
        process = EngineProcess(
            replica="qwen-0",
            replica_uid="u1",
            served_name="x",
            address=port.address,
            child=child,
            log=log,
            memory_bytes=2**20,
        )
        greedy = EngineTracker(process=process, started_at=0, answered_at=0)
        for _ in range(12):
            await greedy.observe(client, clock)
            await clock.advance(1)
        observed_engine = greedy.view(clock)
        assert observed_engine.resident_bytes > 1126 * 2**20
        step = plan(ObservedReplica(replica=wanted(), engine=observed_engine))
        stop = next(action for action in step.actions if isinstance(action, StopEngine))
        assert stop.fault is not None
        assert stop.fault.reason == "MemoryExceeded"
        assert "1.0 MiB are proven" in stop.fault.message
    finally:
        child.send(signal.SIGKILL)
        await until(lambda: not child.running())


async def test_an_engine_that_ignores_the_request_to_stop_is_killed_after_its_grace(
    client: HealthClient, port: FakeEngine, tmp_path: Path
) -> None:
    clock = FakeClock()
    log = tmp_path / "engine.log"
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n"
        "while True: signal.pause()"
    )
    child = processes.spawn([sys.executable, "-c", code], log=log)
    await until(lambda: "deaf" in log.read_text(), what="it ignores SIGTERM")
    process = EngineProcess(
        replica="qwen-0",
        replica_uid="u1",
        served_name="x",
        address=port.address,
        child=child,
        log=log,
    )
    deaf = EngineTracker(process=process, started_at=0, answered_at=0)
    for waited_s, expected in ((0, [StopEngine()]), (60, []), (1, [StopEngine(kill=True)])):
        await clock.advance(waited_s)
        await deaf.observe(client, clock)
        observed_replica = ObservedReplica(
            replica=wanted(is_deleting=True), engine=deaf.view(clock)
        )
        stops = [
            action for action in plan(observed_replica).actions if isinstance(action, StopEngine)
        ]
        assert stops == expected
        assert child.running()
        for stop in stops:
            deaf.note_stop(clock.monotonic())
            (engine_processes.kill if stop.kill else engine_processes.ask_to_stop)(process)
    await until(lambda: not child.running(), what="it is killed")


async def stalled_s(
    engine: EngineTracker, port: FakeEngine, client: HealthClient, clock: FakeClock, **fields: Any
) -> float:
    """Return how long the engine has stood still, 10 s after its last answer and with the next one."""
    await clock.advance(10)
    port.health = orjson.dumps({"state": "Ready", "replicaUid": "u1", "slowest_s": 2.5, **fields})
    await engine.observe(client, clock)
    return engine.view(clock).stalled_s


async def test_a_busy_engine_without_progress_is_stalled(
    port: FakeEngine, client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()
    assert await stalled_s(engine, port, client, clock, busy=True, progress=1) == 0
    assert await stalled_s(engine, port, client, clock, busy=True, progress=1) == 10
    assert engine.view(clock).slowest_s == 2.5
    # What it does not answer says nothing about its progress; its silence is another fault.
    await clock.advance(3)
    assert engine.view(clock).stalled_s == 10
    assert await stalled_s(engine, port, client, clock, busy=True, progress=2) == 0
    assert await stalled_s(engine, port, client, clock, busy=True, progress=2) == 10
    # Hours without work do not count, and the next work begins to count with itself.
    for _ in range(3):
        assert await stalled_s(engine, port, client, clock, progress=2) == 0
        await clock.advance(3600)
    assert await stalled_s(engine, port, client, clock, progress=2) == 0
    assert await stalled_s(engine, port, client, clock, busy=True, progress=2) == 10
    assert await stalled_s(engine, port, client, clock, state="Draining", busy=True) == 0


def loading(engine: EngineTracker, clock: FakeClock) -> bool:
    engine.life = EngineLife.LOADING
    return engine.is_loading(clock)


async def test_a_load_takes_a_place_until_it_stands_still(
    port: FakeEngine, client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()
    assert engine.is_loading(clock)
    for loaded in range(3):
        port.health = b'{"state":"Loading","replicaUid":"u1","busy":true,"progress":%d}' % loaded
        await engine.observe(client, clock)
        assert engine.is_loading(clock)
        await clock.advance(100)
    await engine.observe(client, clock)
    await clock.advance(21)
    assert not engine.is_loading(clock)
    assert engine.view(clock).stalled_s == 100
    port.health = b'{"state":"Ready","replicaUid":"u1"}'
    await engine.observe(client, clock)
    assert not engine.is_loading(clock)
    assert engine.view(clock).stalled_s == 0


async def test_an_adopted_engine_takes_no_place(engine: EngineTracker) -> None:
    engine.is_adopted = True
    assert not loading(engine, FakeClock())


async def test_an_end_that_was_asked_for_is_no_crash(
    client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()
    engine.note_stop(0)
    engine.process.child.send(signal.SIGKILL)
    await until(lambda: not engine.process.child.running())
    await engine.observe(client, clock)
    observed_engine = engine.view(clock)
    assert (
        observed_engine.start_again_in_s,
        observed_engine.restarts,
        observed_engine.stopping_s,
    ) == (0, 0, 0)


async def test_an_engine_that_outlives_its_killing(engine: EngineTracker) -> None:
    clock = FakeClock()
    assert not engine.is_unkillable(clock)
    engine.killed_at = clock.monotonic()
    await clock.advance(30)
    assert not engine.is_unkillable(clock)
    await clock.advance(1)
    assert engine.is_unkillable(clock)
    engine.process.child.send(signal.SIGKILL)
    await until(lambda: not engine.process.child.running())
    assert not engine.is_unkillable(clock)


async def test_a_frozen_process_is_seen(engine: EngineTracker) -> None:
    child = engine.process.child
    assert not child.is_frozen()
    child.send(signal.SIGSTOP)
    await until(child.is_frozen, what="it is stopped")
    child.send(signal.SIGKILL)
    await until(lambda: not child.running())
    assert not child.is_frozen()


LIVE = tuple(life for life in EngineLife if TRANSITIONS[life])


def test_the_table_has_every_phase_and_only_three_are_final() -> None:
    assert set(TRANSITIONS) == set(EngineLife)
    final = {EngineLife.STOPPED, EngineLife.ENDED, EngineLife.REFUSED}
    assert set(EngineLife) - set(LIVE) == final


@pytest.mark.parametrize("life", LIVE)
def test_every_live_phase_ends_with_an_exit(life: EngineLife) -> None:
    was_asked = life in (EngineLife.STOPPING, EngineLife.KILLED)
    expected = EngineLife.STOPPED if was_asked else EngineLife.ENDED
    assert next_life(life, EngineEvent.EXIT) is expected
    refused = EngineLife.STOPPED if was_asked else EngineLife.REFUSED
    assert next_life(life, EngineEvent.REFUSAL) is refused


@pytest.mark.parametrize("life", EngineLife)
def test_an_engine_never_becomes_ready_again(life: EngineLife) -> None:
    """Only an engine that was not asked to end, did not fail and does not drain can become Ready."""
    can_become_ready = life in (EngineLife.STARTING, EngineLife.JOINING, EngineLife.LOADING)
    engine_life = next_life(life, EngineEvent.READY)
    assert (engine_life is EngineLife.READY) == (can_become_ready or life is EngineLife.READY)


def test_the_table_in_the_docs_is_the_table_in_the_code() -> None:
    page = Path(__file__).parents[3] / "docs/adr/0005-engines-are-child-processes.md"
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.read_text().splitlines()
        if line.startswith("|")
    ]
    (_, *events), _, *phases = rows
    assert events == list(EngineEvent)
    documented = {
        phase: {event: found for event, found in zip(events, cells, strict=True) if found}
        for phase, *cells in phases
    }
    assert documented == TRANSITIONS
