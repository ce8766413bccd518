"""The state of one engine that the agent keeps between two observations, and the table of an engine's life.

It observes and counts; plan.py decides, execute.py acts.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from machinery import processes
from machinery.backoff import SLOW_RETRY, Backoff
from machinery.clock import Clock
from nodeagent.engines.engine_processes import EngineProcess
from nodeagent.engines.health_client import HEALTH_TIMEOUT_S, EngineHealth, HealthPort
from nodeagent.replicas.engine_health import excess_limit_bytes
from nodeagent.replicas.observation import (
    EngineFault,
    EpochEnd,
    ObservedEngine,
    ObservedRank,
    ProbeState,
)
from schemas.formation import GoldenAnswer
from schemas.wire.exit_codes import ExitCode

# A restart must not overload the Mac: a model takes memory, and minutes to load.
RESTART_BACKOFF: Final = Backoff(first_s=1.0, limit_s=300.0)
# A shorter wait is over before a person has read when it ends.
_TOLD_WAIT_S = 5.0
# A first token may fail because memory is short for a moment; an immediate retry would not help.
_PROBE_BACKOFF = Backoff(first_s=1.0, limit_s=60.0)
# After this time in service the failure count starts again.
_STABLE_S = 60.0
# Health is asked for at most this often, however often the queue asks.
_HEALTH_INTERVAL_S = 0.1
# The loss of a rank must be noticed within 5 s, after two failed questions in a row.
_RANK_HEALTH_TIMEOUT_S = 1.0
# No healthy process survives SIGKILL for so long.
_UNKILLABLE_S = 30.0
# One slow answer is not silence.
_SILENT_S = 3.0
# Resident memory is read at most this often.
_MEMORY_INTERVAL_S = 1.0
# An engine that loads nothing for so long holds up no other one. A rank that does so ends its epoch (epoch_health.py).
_LOAD_STALL_S = 120.0
# One missing answer is not silence: the agent itself may have been delayed.
_MIN_MISSED = 2


class EngineLife(StrEnum):
    """The phase of an engine process, as its agent knows it."""

    STARTING = "Starting"
    """It has not answered yet."""
    JOINING = "Joining"
    """It is a rank and waits for the others."""
    LOADING = "Loading"
    READY = "Ready"
    DRAINING = "Draining"
    FAILED = "Failed"
    """It answers and cannot serve."""
    STOPPING = "Stopping"
    """The agent asked it to end (SIGTERM)."""
    KILLED = "Killed"
    """The agent killed it, and it has not ended yet."""
    STOPPED = "Stopped"
    """It ended after the agent asked for it."""
    ENDED = "Ended"
    """It ended by itself: a failure, after which restarts back off up to five minutes."""
    REFUSED = "Refused"
    """It ended because its flags or its model cannot be used: the next start is a slow retry."""


class EngineEvent(StrEnum):
    """An event in an engine's life: a state in its health answer, an act of the agent, or its exit."""

    JOINING = "Joining"
    LOADING = "Loading"
    READY = "Ready"
    DRAINING = "Draining"
    FAILED = "Failed"
    STOP = "Stop"
    KILL = "Kill"
    EXIT = "Exit"
    REFUSAL = "Refusal"
    """It exits with the code for a wrong flag or an unusable model (schemas/wire/exit_codes.py)."""


TRANSITIONS: Final[Mapping[EngineLife, Mapping[EngineEvent, EngineLife]]] = {
    EngineLife.STARTING: {
        EngineEvent.JOINING: EngineLife.JOINING,
        EngineEvent.LOADING: EngineLife.LOADING,
        EngineEvent.READY: EngineLife.READY,  # adopted, or ready before the first question
        EngineEvent.DRAINING: EngineLife.DRAINING,
        EngineEvent.FAILED: EngineLife.FAILED,
        EngineEvent.STOP: EngineLife.STOPPING,
        EngineEvent.KILL: EngineLife.KILLED,
        EngineEvent.EXIT: EngineLife.ENDED,
        EngineEvent.REFUSAL: EngineLife.REFUSED,
    },
    EngineLife.JOINING: {
        EngineEvent.LOADING: EngineLife.LOADING,
        EngineEvent.READY: EngineLife.READY,
        EngineEvent.DRAINING: EngineLife.DRAINING,
        EngineEvent.FAILED: EngineLife.FAILED,
        EngineEvent.STOP: EngineLife.STOPPING,
        EngineEvent.KILL: EngineLife.KILLED,
        EngineEvent.EXIT: EngineLife.ENDED,
        EngineEvent.REFUSAL: EngineLife.REFUSED,
    },
    EngineLife.LOADING: {
        EngineEvent.READY: EngineLife.READY,
        EngineEvent.DRAINING: EngineLife.DRAINING,
        EngineEvent.FAILED: EngineLife.FAILED,
        EngineEvent.STOP: EngineLife.STOPPING,
        EngineEvent.KILL: EngineLife.KILLED,
        EngineEvent.EXIT: EngineLife.ENDED,
        EngineEvent.REFUSAL: EngineLife.REFUSED,
    },
    EngineLife.READY: {
        EngineEvent.DRAINING: EngineLife.DRAINING,
        EngineEvent.FAILED: EngineLife.FAILED,
        EngineEvent.STOP: EngineLife.STOPPING,
        EngineEvent.KILL: EngineLife.KILLED,
        EngineEvent.EXIT: EngineLife.ENDED,
        EngineEvent.REFUSAL: EngineLife.REFUSED,
    },
    EngineLife.DRAINING: {
        EngineEvent.FAILED: EngineLife.FAILED,
        EngineEvent.STOP: EngineLife.STOPPING,
        EngineEvent.KILL: EngineLife.KILLED,
        EngineEvent.EXIT: EngineLife.ENDED,
        EngineEvent.REFUSAL: EngineLife.REFUSED,
    },
    EngineLife.FAILED: {
        EngineEvent.STOP: EngineLife.STOPPING,
        EngineEvent.KILL: EngineLife.KILLED,
        EngineEvent.EXIT: EngineLife.ENDED,
        EngineEvent.REFUSAL: EngineLife.REFUSED,
    },
    EngineLife.STOPPING: {
        EngineEvent.KILL: EngineLife.KILLED,
        EngineEvent.EXIT: EngineLife.STOPPED,
        EngineEvent.REFUSAL: EngineLife.STOPPED,
    },
    EngineLife.KILLED: {
        EngineEvent.EXIT: EngineLife.STOPPED,
        EngineEvent.REFUSAL: EngineLife.STOPPED,
    },
    EngineLife.STOPPED: {},
    EngineLife.ENDED: {},
    EngineLife.REFUSED: {},
}
"""The phase after each event; an event that is missing in a phase leaves it as it is."""


# The events by the state in a health answer.
_REPORTED: Final[Mapping[str, EngineEvent]] = {
    "Joining": EngineEvent.JOINING,
    "Loading": EngineEvent.LOADING,
    "Ready": EngineEvent.READY,
    "Draining": EngineEvent.DRAINING,
    "Failed": EngineEvent.FAILED,
}


def next_life(life: EngineLife, event: EngineEvent) -> EngineLife:
    """Return the phase after the event."""
    return TRANSITIONS[life].get(event, life)


@dataclass(slots=True, kw_only=True)
class RankTracker:
    """The health answers of one rank of a group, counted; epoch_health.py judges them."""

    epoch: int
    memory_bytes: int
    began_at: float
    """The time of the first observation; all times are seconds of the agent's monotonic clock."""
    answer: GoldenAnswer | None = None
    epoch_end: EpochEnd | None = None
    _health: EngineHealth | None = None
    _state_since: float = 0.0
    _answered_at: float = 0.0
    _missed: int = 0

    def record_answer(self, health: EngineHealth, now: float) -> None:
        """Record a health answer."""
        before = self._health
        if before is None or before.state != health.state:
            self._state_since = now
        self._health, self._answered_at, self._missed = health, now, 0

    def record_missed(self) -> None:
        """Record that no answer came."""
        self._missed += 1

    @property
    def is_unanswered(self) -> bool:
        """True if the last question had no answer."""
        return self._missed > 0

    def view(
        self, now: float, *, is_frozen: bool, killed_s: float | None, probe_failures: int
    ) -> ObservedRank:
        """Return the observed values."""
        health = self._health
        since = self._answered_at if health is not None else self.began_at
        return ObservedRank(
            epoch=self.epoch,
            memory_bytes=self.memory_bytes,
            state_s=now - self._state_since if health is not None else 0.0,
            unanswered_s=now - since if self._missed >= _MIN_MISSED else 0.0,
            loaded=health.loaded if health is not None else 0.0,
            is_frozen=is_frozen,
            killed_s=killed_s,
            answer=self.answer,
            probe_failures=probe_failures,
            epoch_end=self.epoch_end,
        )


@dataclass(slots=True, kw_only=True)
class EngineTracker:
    """One engine process, its last health answer, its probes and its failures."""

    process: EngineProcess
    started_at: float
    answered_at: float
    """The time of the last health answer, or of the start."""
    asked_at: float = float("-inf")
    health: EngineHealth | None = None
    life: EngineLife = EngineLife.STARTING
    probe: ProbeState = ProbeState.NOT_TRIED
    probe_error: str = ""
    probe_failures: int = 0
    probed_at: float = float("-inf")
    stopping_since: float | None = None
    killed_at: float | None = None
    ended_at: float | None = None
    failures: int = 0
    """Consecutive ends by itself, or because of a fault."""
    last_end: str = ""
    """The end of the engine before this one, such as `ended with 2: no config.json`."""
    fault: EngineFault | None = None
    """The reason why the agent asked it to end."""
    is_adopted: bool = False
    """True if an earlier run of the agent started it."""
    jitter: float = field(default_factory=random.random)
    """From 0 to 1: spreads the restarts of engines that ended together."""
    _start_again_at: float = float("-inf")
    _start_again_time: datetime | None = None
    _progress_at: float | None = None
    """The last time at which it made progress or had nothing to do; None before its first answer."""
    _used_bytes: int = 0
    _memory_read_at: float = float("-inf")
    _excess_since: float | None = None
    rank: RankTracker | None = None
    """None for an engine that has the whole model."""

    def __post_init__(self) -> None:
        process = self.process
        if process.epoch > 0:
            self.rank = RankTracker(
                epoch=process.epoch, memory_bytes=process.memory_bytes, began_at=self.started_at
            )

    @property
    def is_generating(self) -> bool:
        """True if it had requests at its last answer. A rank that follows another always has."""
        is_serving = self.life in (EngineLife.READY, EngineLife.DRAINING)
        return is_serving and self.health is not None and self.health.is_busy

    async def observe(self, client: HealthPort, clock: Clock) -> None:
        """Ask the engine for its health, if it runs and was not asked just before."""
        now = clock.monotonic()
        if not self.process.child.running():
            if self.ended_at is None:
                self._note_end(clock)
            return
        if now - self.asked_at < _HEALTH_INTERVAL_S:
            return
        self.asked_at = now
        self._read_memory(now)
        limit_s = HEALTH_TIMEOUT_S if self.rank is None else _RANK_HEALTH_TIMEOUT_S
        process = self.process
        health = await client.ask(process.address, process.replica_uid, limit_s=limit_s)
        if health is not None:
            self.answered_at = clock.monotonic()
            if self.health is None or not health.is_busy or _has_progress(self.health, health):
                self._progress_at = self.answered_at
            self.health = health
            event = _REPORTED.get(health.state)
            if event is not None:
                self._advance(event)
        if self.rank is None:
            return
        if health is None:
            self.rank.record_missed()
        else:
            self.rank.record_answer(health, self.answered_at)

    def _note_end(self, clock: Clock) -> None:
        """Record its end, count a failure, and decide when the next engine may start."""
        now = self.ended_at = clock.monotonic()
        is_refusal = self.process.child.exit_code() == ExitCode.UNUSABLE
        self._advance(EngineEvent.REFUSAL if is_refusal else EngineEvent.EXIT)
        if self.life is EngineLife.STOPPED and self.fault is None:
            return
        self.failures = 1 if now - self.started_at > _STABLE_S else self.failures + 1
        delay_s = RESTART_BACKOFF.delay_s(self.failures, jitter=self.jitter)
        if self.life is EngineLife.REFUSED:
            delay_s = SLOW_RETRY.delay_s(1, jitter=self.jitter)
        self._start_again_at = now + delay_s
        if delay_s >= _TOLD_WAIT_S:
            self._start_again_time = clock.now() + timedelta(seconds=delay_s)

    def _read_memory(self, now: float) -> None:
        if now - self._memory_read_at < _MEMORY_INTERVAL_S:
            return
        self._memory_read_at = now
        self._used_bytes = self.process.child.used_bytes()
        proof_bytes = self.process.memory_bytes
        if not proof_bytes or self._used_bytes <= excess_limit_bytes(proof_bytes):
            self._excess_since = None
        elif self._excess_since is None:
            self._excess_since = now

    def _advance(self, event: EngineEvent) -> None:
        self.life = next_life(self.life, event)

    def note_stop(self, now: float, fault: EngineFault | None = None) -> None:
        """Record that the engine is asked to end; a `fault` counts as a failure."""
        if self.stopping_since is None:
            self.stopping_since = now
        self.fault = self.fault or fault
        self._advance(EngineEvent.STOP)

    def note_kill(self, now: float) -> None:
        """Record that the engine is killed."""
        if self.killed_at is None:
            self.killed_at = now
        self._advance(EngineEvent.KILL)

    def view(self, clock: Clock) -> ObservedEngine:
        """Return the observed values."""
        now = clock.monotonic()
        running = self.process.child.running()
        since = self.stopping_since
        silent_s = now - self.answered_at
        return ObservedEngine(
            replica_uid=self.process.replica_uid,
            is_running=running,
            state=self.health.state if self.health else "",
            message=self.health.message if self.health else "",
            silent_s=silent_s if silent_s > _SILENT_S else 0.0,
            probe=self.probe,
            probe_error=self.probe_error,
            probe_again_in_s=max(
                0.0, self.probed_at + _PROBE_BACKOFF.delay_s(self.probe_failures) - now
            ),
            stopping_s=None if since is None else now - since,
            exit_code=None if running else self.process.child.exit_code(),
            last_words="" if running else processes.last_words(self.process.log),
            start_again_in_s=max(0.0, self._start_again_at - now),
            start_again_at=self._start_again_time,
            restarts=self.failures,
            last_end=self.last_end,
            fault=self.fault,
            peak_bytes=self.health.peak_bytes if self.health else 0,
            proof_bytes=self.process.memory_bytes,
            used_bytes=self._used_bytes,
            excess_s=0.0 if self._excess_since is None else now - self._excess_since,
            stalled_s=0.0 if self._progress_at is None else self.answered_at - self._progress_at,
            slowest_s=self.health.slowest_s if self.health else 0.0,
            prefixes=self.health.prefixes if self.health else ("", ""),
            rank=self._observed_rank(now),
        )

    def is_loading(self, clock: Clock) -> bool:
        """Return whether it takes one of the node's places for engines that load.

        An adopted engine takes none, nor does a rank that waits for others, nor a load that stands still.
        """
        if self.is_adopted or self.life not in (EngineLife.STARTING, EngineLife.LOADING):
            return False
        since = self._progress_at if self._progress_at is not None else self.started_at
        return clock.monotonic() - since <= _LOAD_STALL_S and self.process.child.running()

    def _observed_rank(self, now: float) -> ObservedRank | None:
        if self.rank is None:
            return None
        return self.rank.view(
            now,
            is_frozen=self.rank.is_unanswered and self.process.child.is_frozen(),
            killed_s=None if self.killed_at is None else now - self.killed_at,
            probe_failures=self.probe_failures,
        )

    def give_up(self, epoch_end: EpochEnd) -> None:
        """Record why the rank's epoch is over."""
        if self.rank is not None:
            self.rank.epoch_end = epoch_end

    def is_unkillable(self, clock: Clock) -> bool:
        """Return whether it was killed and still lives: the kernel holds it, and only a restart of the Mac helps."""
        killed_at = self.killed_at
        is_late = killed_at is not None and clock.monotonic() - killed_at > _UNKILLABLE_S
        return is_late and self.process.child.running()


def _has_progress(before: EngineHealth, now: EngineHealth) -> bool:
    return (before.state, before.progress, before.loaded) != (now.state, now.progress, now.loaded)


class EngineProber:
    """Runs probes beside the loop: one takes as long as a first token, and other replicas must not wait for it."""

    def __init__(
        self,
        client: HealthPort,
        group: asyncio.TaskGroup,
        clock: Clock,
        warm: Callable[[EngineProcess], Awaitable[int]] | None = None,
    ) -> None:
        """`warm` lets a new engine read prompts after its probe; it never fails."""
        self._client = client
        self._group = group
        self._clock = clock
        self._warm = warm

    def start(self, engine: EngineTracker) -> None:
        """Probe the engine with one token, or a rank with the golden question; the result is in `engine.probe`."""
        engine.probe = ProbeState.RUNNING
        self._group.create_task(self._run(engine))

    async def _run(self, engine: EngineTracker) -> None:
        process = engine.process
        if engine.rank is None:
            engine.probe_error = await self._client.probe(process.address, process.served_name)
        else:
            question = self._client.golden(process.address, process.served_name)
            engine.rank.answer, engine.probe_error = await question
        # The cache of an adopted engine is warm.
        is_new = engine.rank is None and not engine.is_adopted
        if self._warm is not None and is_new and not engine.probe_error:
            await self._warm(process)
        engine.probed_at = self._clock.monotonic()
        engine.probe_failures = engine.probe_failures + 1 if engine.probe_error else 0
        engine.probe = ProbeState.FAILED if engine.probe_error else ProbeState.PASSED
