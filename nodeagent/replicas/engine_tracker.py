"""What an agent remembers of one rank of a group between two looks. Keeps count; judging.py decides.

What the agent remembers of its engines between two looks: the mutable heart of one node.

It observes and keeps count; deciding is plan.py's job, doing is execute.py's.
"""

import asyncio
from dataclasses import dataclass

from machinery import processes
from machinery.backoff import Backoff
from machinery.clock import Clock
from nodeagent.dependencies import HealthPort
from nodeagent.engines.engine_processes import EngineProcess
from nodeagent.engines.health_client import HEALTH_TIMEOUT_S, EngineHealth
from nodeagent.replicas.observed import EpochEnd, ObservedEngine, ObservedRank, ProbeState
from schemas.formation import GoldenAnswer

# One answer that does not come is no silence: the agent itself may have been held up while it waited.
_MIN_MISSED = 2


@dataclass(slots=True, kw_only=True)
class RankTracker:
    """One rank, as its answers told."""

    epoch: int
    memory_bytes: int
    began_at: float
    """When this agent began to look, like all times in seconds of its clock."""
    answer: GoldenAnswer | None = None
    over: EpochEnd | None = None
    _health: EngineHealth | None = None
    _state_since: float = 0.0
    _moved_at: float = 0.0
    _heard_at: float = 0.0
    _missed: int = 0

    def heard(self, health: EngineHealth, now: float) -> None:
        """Note an answer."""
        before = self._health
        if before is None or before.state != health.state:
            self._state_since = now
        is_moving = before is None or before.progress != health.progress
        if is_moving or not health.is_busy or before is None or before.state != health.state:
            self._moved_at = now
        self._health, self._heard_at, self._missed = health, now, 0

    def missed(self) -> None:
        """Note that no answer came."""
        self._missed += 1

    @property
    def is_unheard(self) -> bool:
        """Whether it did not answer the last time."""
        return self._missed > 0

    def view(
        self, now: float, *, is_frozen: bool, killed_s: float | None, probe_failures: int
    ) -> ObservedRank:
        """Return what judging needs."""
        health = self._health
        since = self._heard_at if health is not None else self.began_at
        return ObservedRank(
            epoch=self.epoch,
            memory_bytes=self.memory_bytes,
            state_s=now - self._state_since if health is not None else 0.0,
            unheard_s=now - since if self._missed >= _MIN_MISSED else 0.0,
            stood_s=self._heard_at - self._moved_at,
            slowest_s=health.slowest_s if health is not None else 0.0,
            loaded=health.loaded if health is not None else 0.0,
            is_frozen=is_frozen,
            killed_s=killed_s,
            answer=self.answer,
            probe_failures=probe_failures,
            over=self.over,
        )


# Restarting a broken engine must not grind the Mac: mlx models take memory and minutes to load.
_RESTART_BACKOFF = Backoff(first_s=1.0, limit_s=60.0)
# A failed first token may be a passing shortage of memory; asking at once again would not help it.
_PROBE_BACKOFF = Backoff(first_s=1.0, limit_s=60.0)
# Who served this long starts counting its failures anew.
_STABLE_S = 60.0
# Health is asked at most this often, however often the queue looks.
_HEALTH_INTERVAL_S = 0.1
# The loss of a rank is to be noticed within 5 s; two questions in a row have to fail.
_RANK_HEALTH_TIMEOUT_S = 1.0
# Nothing holds a process that is well together for so long.
_UNKILLABLE_S = 30.0


@dataclass(slots=True, kw_only=True)
class EngineTracker:
    """One engine and what is known of it."""

    process: EngineProcess
    started_at: float
    heard_at: float
    asked_at: float = float("-inf")
    health: EngineHealth | None = None
    probe: ProbeState = ProbeState.NOT_TRIED
    probe_error: str = ""
    probe_failures: int = 0
    probed_at: float = float("-inf")
    stopping_since: float | None = None
    killed_at: float | None = None
    ended_at: float | None = None
    failures: int = 0
    track: RankTracker | None = None
    """What is remembered of a group's rank; None where the engine has the whole model."""

    def __post_init__(self) -> None:
        process = self.process
        if process.epoch > 0:
            self.track = RankTracker(
                epoch=process.epoch, memory_bytes=process.memory_bytes, began_at=self.started_at
            )

    async def look(self, client: HealthPort, clock: Clock) -> None:
        """Ask the engine how it is, if it runs and was not just asked."""
        now = clock.monotonic()
        if not self.process.child.running():
            if self.ended_at is None:
                self.ended_at = now
                self._count_failure(now)
            return
        if now - self.asked_at < _HEALTH_INTERVAL_S:
            return
        self.asked_at = now
        limit_s = HEALTH_TIMEOUT_S if self.track is None else _RANK_HEALTH_TIMEOUT_S
        process = self.process
        health = await client.ask(process.port, process.replica_uid, limit_s=limit_s)
        if health is not None:
            self.health, self.heard_at = health, clock.monotonic()
        if self.track is None:
            return
        if health is None:
            self.track.missed()
        else:
            self.track.heard(health, self.heard_at)

    def _count_failure(self, now: float) -> None:
        if self.stopping_since is not None:
            return
        self.failures = 1 if now - self.started_at > _STABLE_S else self.failures + 1

    def view(self, clock: Clock) -> ObservedEngine:
        """Return what the planner may know."""
        now = clock.monotonic()
        running = self.process.child.running()
        since = self.stopping_since
        silent_s = now - self.heard_at
        return ObservedEngine(
            replica_uid=self.process.replica_uid,
            is_running=running,
            state=self.health.state if self.health else "",
            message=self.health.message if self.health else "",
            # One slow answer is no silence.
            silent_s=silent_s if silent_s > 3.0 else 0.0,
            probe=self.probe,
            probe_error=self.probe_error,
            probe_again_in_s=max(
                0.0, self.probed_at + _PROBE_BACKOFF.delay_s(self.probe_failures) - now
            ),
            stopping_s=None if since is None else now - since,
            exit_code=None if running else self.process.child.exit_code(),
            last_words="" if running else processes.last_words(self.process.log),
            start_again_in_s=self._backoff_left(now),
            restarts=self.failures,
            peak_bytes=self.health.peak_bytes if self.health else 0,
            rank=self._rank(now),
        )

    def _rank(self, now: float) -> ObservedRank | None:
        if self.track is None:
            return None
        return self.track.view(
            now,
            is_frozen=self.track.is_unheard and self.process.child.is_frozen(),
            killed_s=None if self.killed_at is None else now - self.killed_at,
            probe_failures=self.probe_failures,
        )

    def give_up(self, over: EpochEnd) -> None:
        """Remember that the rank's epoch is over."""
        if self.track is not None:
            self.track.over = over

    def is_undying(self, clock: Clock) -> bool:
        """Return whether it was killed and lives on: then the kernel holds it, and only a restart helps."""
        killed_at = self.killed_at
        is_late = killed_at is not None and clock.monotonic() - killed_at > _UNKILLABLE_S
        return is_late and self.process.child.running()

    def _backoff_left(self, now: float) -> float:
        if self.ended_at is None:
            return 0.0
        return max(0.0, self.ended_at + _RESTART_BACKOFF.delay_s(self.failures) - now)


class EngineProber:
    """Runs probes beside the loop, of a group the golden one: one takes as long as a first token, and others must not wait."""

    def __init__(self, client: HealthPort, group: asyncio.TaskGroup, clock: Clock) -> None:
        self._client = client
        self._group = group
        self._clock = clock

    def start(self, engine: EngineTracker) -> None:
        """Have the engine make a token or the golden answer; what came of it shows in `engine.probe`."""
        engine.probe = ProbeState.RUNNING
        self._group.create_task(self._run(engine))

    async def _run(self, engine: EngineTracker) -> None:
        process = engine.process
        if engine.track is None:
            engine.probe_error = await self._client.probe(process.port, process.served_name)
        else:
            asking = self._client.golden(process.port, process.served_name)
            engine.track.answer, engine.probe_error = await asking
        engine.probed_at = self._clock.monotonic()
        engine.probe_failures = engine.probe_failures + 1 if engine.probe_error else 0
        engine.probe = ProbeState.FAILED if engine.probe_error else ProbeState.PASSED
