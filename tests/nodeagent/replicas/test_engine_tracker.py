"""The tracked state of one engine: health answers, probes, failures, and the table of its life."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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

PAUSES = "import signal; signal.pause()"


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
    assert (view(rank, 51.0).state_s, view(rank, 51.0).loaded) == (1.0, 0.25)


@asynccontextmanager
async def tracked(
    folder: Path, address: EngineAddress, code: str = PAUSES, **fields: Any
) -> AsyncIterator[EngineTracker]:
    """Yield the tracker of a process that runs this code."""
    log = folder / "engine.log"
    process = EngineProcess(
        replica="qwen-0",
        replica_uid="u1",
        served_name="x",
        address=address,
        child=processes.spawn([sys.executable, "-c", code], log=log),
        log=log,
        **fields,
    )
    try:
        yield EngineTracker(process=process, started_at=0, answered_at=0)
    finally:
        await kill(process)


async def kill(process: EngineProcess) -> None:
    process.child.send(signal.SIGKILL)
    await until(lambda: not process.child.running())


@pytest.fixture
async def engine(tmp_path: Path, port: FakeEngine) -> AsyncIterator[EngineTracker]:
    """Return an engine whose process does nothing; `port` speaks for it."""
    async with tracked(tmp_path, port.address) as engine:
        yield engine


def again(engine: EngineTracker, failures: int) -> EngineTracker:
    """Return the tracker of a process that started after so many failures."""
    return EngineTracker(
        process=engine.process, started_at=0, answered_at=0, failures=failures, jitter=1.0
    )


def observed_replica(engine: ObservedEngine, **fields: Any) -> ObservedReplica:
    return ObservedReplica(**{"replica": wanted(), "engine": engine, **fields})


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
    waits, reports = [], 0
    reported: RankStatus | None = None
    for _ in range(8):
        observed = await probe(engine, client, clock)
        waits.append(observed.probe_again_in_s)
        for seen in (observed, engine.view(clock)):
            for action in plan(observed_replica(seen, reported=reported)).actions:
                if hasattr(action, "conditions"):
                    reports += 1
                    reported = RankStatus(replica_uid="u1", node="a", conditions=action.conditions)
        await clock.advance(observed.probe_again_in_s)
        assert engine.view(clock).probe_again_in_s == 0
        # A real engine goes on answering meanwhile.
        await engine.observe(client, clock)
    assert (waits, reports) == ([1, 2, 4, 8, 16, 32, 60, 60], 1)
    port.completion = TOKEN
    observed = await probe(engine, client, clock)
    assert (observed.probe, observed.probe_error) == (ProbeState.PASSED, "")
    assert observed.probe_again_in_s == 0


async def test_an_engine_generates_while_it_is_ready_or_drains_and_has_work(
    port: FakeEngine, client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()
    assert not engine.is_generating
    for state, busy, is_generating in (
        ("Loading", True, False),
        ("Ready", False, False),
        ("Ready", True, True),
        ("Draining", True, True),
        ("Draining", False, False),
    ):
        port.health = orjson.dumps({"state": state, "busy": busy, "replicaUid": "u1"})
        await clock.advance(1.0)
        await engine.observe(client, clock)
        assert engine.is_generating is is_generating


async def test_health_is_asked_no_more_than_needed_and_silence_counts_from_the_last_answer(
    port: FakeEngine, client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()
    for _ in range(5):
        await engine.observe(client, clock)
    assert port.asked == 1
    await clock.advance(0.1)
    await engine.observe(client, clock)
    assert (port.asked, engine.view(clock).silent_s) == (2, 0)
    port.health = b""
    await clock.advance(3)
    await engine.observe(client, clock)
    assert engine.view(clock).silent_s == 0
    await clock.advance(1)
    assert engine.view(clock).silent_s == pytest.approx(4)


async def test_crashes_back_off_and_a_long_life_is_forgiven(
    client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()
    await kill(engine.process)
    waits = []
    for failures in range(11):
        crashed = again(engine, failures)
        await crashed.observe(client, clock)
        waits.append(crashed.view(clock).start_again_in_s)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    await clock.advance(61)
    served = again(engine, 7)
    await served.observe(client, clock)
    await served.observe(client, clock)
    observed = served.view(clock)
    assert (observed.start_again_in_s, observed.restarts, observed.exit_code) == (1, 1, -9)


@pytest.mark.parametrize(("jitter", "wait_s"), [(0.0, 150), (1.0, 300)])
async def test_an_engine_that_refuses_to_start_is_retried_within_five_minutes(
    client: HealthClient, tmp_path: Path, jitter: float, wait_s: int
) -> None:
    clock = FakeClock()
    code = "print('no config.json'); raise SystemExit(2)"
    async with tracked(tmp_path, EngineAddress("127.0.0.1", 1), code) as refused:
        refused.jitter = jitter
        await until(lambda: not refused.process.child.running())
        await refused.observe(client, clock)
        observed = refused.view(clock)
    assert refused.life is EngineLife.REFUSED
    assert observed.start_again_in_s == wait_s
    assert observed.start_again_at == clock.now() + timedelta(seconds=wait_s)
    (ready,) = replica_conditions(observed_replica(observed))
    next_attempt = f"next attempt at {observed.start_again_at:%H:%M:%S} UTC"
    assert ready.reason == "ModelUnusable"
    assert ready.message == f"its engine ended with 2: no config.json; {next_attempt}"


async def test_an_engine_that_is_ended_for_a_fault_backs_off(
    client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()
    engine.jitter, engine.failures = 1.0, 3
    engine.note_stop(0, EngineFault(reason="MemoryExceeded", message="too much"))
    await kill(engine.process)
    await engine.observe(client, clock)
    observed = engine.view(clock)
    assert engine.life is EngineLife.STOPPED
    assert (observed.restarts, observed.start_again_in_s) == (4, 8)
    (ready,) = replica_conditions(observed_replica(observed))
    assert (ready.reason, ready.message.partition("; ")[0]) == ("MemoryExceeded", "too much")


async def test_an_end_that_was_asked_for_is_no_crash(
    client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()
    engine.note_stop(0)
    await kill(engine.process)
    await engine.observe(client, clock)
    observed = engine.view(clock)
    assert (observed.start_again_in_s, observed.restarts, observed.stopping_s) == (0, 0, 0)


async def test_the_agent_measures_the_memory_of_an_engine_itself(
    port: FakeEngine, client: HealthClient, tmp_path: Path
) -> None:
    clock = FakeClock()
    # Every engine may use 1 GiB and half of its proof more than that.
    code = f"held = b'x' * (1126 * 2**20); print('held', flush=True); {PAUSES}"
    async with tracked(tmp_path, port.address, code, memory_bytes=2**20) as greedy:
        await until(lambda: "held" in greedy.process.log.read_text(), what="it holds the memory")
        for _ in range(12):
            await greedy.observe(client, clock)
            await clock.advance(1)
        observed = greedy.view(clock)
    assert observed.used_bytes > 1126 * 2**20
    (stop,) = (a for a in plan(observed_replica(observed)).actions if isinstance(a, StopEngine))
    assert stop.fault is not None
    assert stop.fault.reason == "MemoryExceeded"
    assert "1.0 MiB are proven" in stop.fault.message


async def test_an_engine_that_ignores_the_request_to_stop_is_killed_after_its_grace(
    client: HealthClient, port: FakeEngine, tmp_path: Path
) -> None:
    clock = FakeClock()
    ignore = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
    )
    async with tracked(tmp_path, port.address, f"{ignore}\nwhile True: signal.pause()") as deaf:
        child = deaf.process.child
        await until(lambda: "deaf" in deaf.process.log.read_text(), what="it ignores SIGTERM")
        for waited_s, expected in ((0, [StopEngine()]), (60, []), (1, [StopEngine(kill=True)])):
            await clock.advance(waited_s)
            await deaf.observe(client, clock)
            state = observed_replica(deaf.view(clock), replica=wanted(is_deleting=True))
            stops = [action for action in plan(state).actions if isinstance(action, StopEngine)]
            assert stops == expected
            assert child.running()
            for stop in stops:
                deaf.note_stop(clock.monotonic())
                (engine_processes.kill if stop.kill else engine_processes.ask_to_stop)(deaf.process)
        await until(lambda: not child.running(), what="it is killed")


async def test_a_busy_engine_without_progress_is_stalled(
    port: FakeEngine, client: HealthClient, engine: EngineTracker
) -> None:
    clock = FakeClock()

    async def stalled_s(**fields: Any) -> float:
        """Return how long the engine has stood still, 10 s after its last answer and with the next one."""
        await clock.advance(10)
        fields = {"state": "Ready", "replicaUid": "u1", "slowest_s": 2.5, **fields}
        port.health = orjson.dumps(fields)
        await engine.observe(client, clock)
        return engine.view(clock).stalled_s

    assert await stalled_s(busy=True, progress=1) == 0
    assert await stalled_s(busy=True, progress=1) == 10
    assert engine.view(clock).slowest_s == 2.5
    # What it does not answer says nothing about its progress; its silence is another fault.
    await clock.advance(3)
    assert engine.view(clock).stalled_s == 10
    assert await stalled_s(busy=True, progress=2) == 0
    assert await stalled_s(busy=True, progress=2) == 10
    # Hours without work do not count, and the next work begins to count with itself.
    for _ in range(3):
        assert await stalled_s(progress=2) == 0
        await clock.advance(3600)
    assert await stalled_s(progress=2) == 0
    assert await stalled_s(busy=True, progress=2) == 10
    assert await stalled_s(state="Draining", busy=True) == 0


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
    engine.is_adopted, engine.life = True, EngineLife.LOADING
    assert not engine.is_loading(clock), "an adopted engine takes no place"


async def test_an_engine_that_outlives_its_killing(engine: EngineTracker) -> None:
    clock = FakeClock()
    assert not engine.is_unkillable(clock)
    engine.killed_at = clock.monotonic()
    await clock.advance(30)
    assert not engine.is_unkillable(clock)
    await clock.advance(1)
    assert engine.is_unkillable(clock)
    child = engine.process.child
    assert not child.is_frozen()
    child.send(signal.SIGSTOP)
    await until(child.is_frozen, what="it is stopped")
    await kill(engine.process)
    assert not child.is_frozen()
    assert not engine.is_unkillable(clock)


@pytest.mark.parametrize("life", EngineLife)
def test_a_life_ends_with_an_exit_and_never_becomes_ready_again(life: EngineLife) -> None:
    """Only an engine that was not asked to end, did not fail and does not drain can become Ready."""
    can_become_ready = life in (EngineLife.STARTING, EngineLife.JOINING, EngineLife.LOADING)
    is_ready = next_life(life, EngineEvent.READY) is EngineLife.READY
    assert is_ready == (can_become_ready or life is EngineLife.READY)
    if TRANSITIONS[life]:
        was_asked = life in (EngineLife.STOPPING, EngineLife.KILLED)
        ended = EngineLife.STOPPED if was_asked else EngineLife.ENDED
        refused = EngineLife.STOPPED if was_asked else EngineLife.REFUSED
        assert next_life(life, EngineEvent.EXIT) is ended
        assert next_life(life, EngineEvent.REFUSAL) is refused


def test_the_table_in_the_docs_is_the_table_in_the_code() -> None:
    page = Path(__file__).parents[3] / "docs/adr/0005-engines-are-child-processes.md"
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    (_, *events), _, *phases = rows
    assert events == list(EngineEvent)
    documented = {
        phase: {event: life for event, life in zip(events, cells, strict=True) if life}
        for phase, *cells in phases
    }
    assert documented == TRANSITIONS
