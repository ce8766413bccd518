"""Where the ranks of hollow groups find each other, and notice each other's end. No sockets: one process holds them all.

Engines that are nothing but times: they load, answer, drain and end on the clock. No process, no socket, no disk.

A hollow engine is a value that is asked; nothing runs between two questions, so that thousands of them cost nothing.

References for golden answers that are made by nobody, after as long as a model takes. No process.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from machinery.clock import Clock
from machinery.processes import ProcessRecord
from nodeagent.engines.engine_processes import EngineOrder, EngineProcess
from nodeagent.engines.health_client import HEALTH_TIMEOUT_S, EngineHealth
from schemas.formation import GoldenAnswer

# A closed channel is noticed at once, and the process takes a moment to go.
_PEER_LOSS_S = 0.2


class EpochMember(Protocol):
    """One rank, as the others see it."""

    started_at: float
    ends_at: float
    """When it ends by itself, or was ended: infinite while nobody ended it."""

    def running(self) -> bool: ...


@dataclass(slots=True, kw_only=True)
class HollowEpoch:
    """The ranks of one epoch."""

    world_size: int
    ranks: dict[int, EpochMember] = field(default_factory=dict)

    @property
    def joined_at(self) -> float:
        """When the last rank came; infinite before."""
        if len(self.ranks) < self.world_size:
            return float("inf")
        return max(rank.started_at for rank in self.ranks.values())

    def lost_at(self, number: int) -> float:
        """Return when this rank notices that another one ended; infinite while none did."""
        others = (rank.ends_at for other, rank in self.ranks.items() if other != number)
        return min(others, default=float("inf")) + _PEER_LOSS_S


class HollowEpochs:
    """All groups of one process, by replica and epoch."""

    def __init__(self) -> None:
        self._meetings: dict[tuple[str, int], HollowEpoch] = {}

    def join(
        self, uid: str, epoch: int, *, number: int, world_size: int, rank: EpochMember
    ) -> HollowEpoch:
        """Have a rank wait for the others of its epoch."""
        for key in list(self._over()):
            del self._meetings[key]
        meeting = self._meetings.setdefault((uid, epoch), HollowEpoch(world_size=world_size))
        meeting.ranks[number] = rank
        return meeting

    def _over(self) -> Iterator[tuple[str, int]]:
        for key, meeting in self._meetings.items():
            if not any(rank.running() for rank in meeting.ranks.values()):
                yield key


HOLLOW_FOLDER = Path("/hollow")
"""Where models would lie; nobody looks."""

GOLDEN_ANSWER = GoldenAnswer(pieces=(" five", ",", " six"), logprobs=(-0.1, -0.2, -0.3))
"""What every hollow group answers to the golden question."""

# What an engine ends with when its group is over (engine/process.py).
_EXIT_GROUP_OVER = 4

_NO_LOG = Path(os.devnull)
"""Where a hollow engine's last words are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HollowTiming:
    """How long things take on a hollow Mac, in seconds."""

    load_s: float = 5.0
    """From an engine's start to Ready."""
    probe_s: float = 0.2
    """To the first token."""
    drain_s: float = 0.5
    """From being asked to end to the end."""


@dataclass(slots=True, kw_only=True)
class HollowEngine:
    """One engine; the `child` of an `EngineProcess`."""

    record: ProcessRecord
    order: EngineOrder
    port: int
    started_at: float
    load_s: float
    drain_s: float
    now: Callable[[], float]
    meeting: HollowEpoch | None = None
    """Where it waits for the other ranks; None where it has the whole model."""
    ends_at: float = float("inf")
    code: int = 0
    is_silent: bool = False
    """Whether it hangs: it runs, and answers nothing."""
    is_stuck: bool = False
    """Whether it gets nowhere: it answers, and is busy for ever."""

    @property
    def ready_at(self) -> float:
        """When it is Ready: once loaded, which a rank begins when all are there."""
        begins_at = self.started_at if self.meeting is None else self.meeting.joined_at
        return begins_at + self.load_s

    @property
    def _lost_at(self) -> float:
        """When it notices that another rank is gone; who hangs notices nothing."""
        if self.meeting is None or self.is_silent or self.order.group is None:
            return float("inf")
        return self.meeting.lost_at(self.order.group.rank)

    def running(self) -> bool:
        return self.now() < min(self.ends_at, self._lost_at)

    def is_frozen(self) -> bool:
        return self.is_silent and self.running()

    def exit_code(self) -> int | None:
        if self.running():
            return None
        return self.code if self.ends_at <= self._lost_at else _EXIT_GROUP_OVER

    def send(self, signal_number: int) -> None:
        """Drain and end at SIGTERM, end at SIGKILL."""
        if signal_number == signal.SIGKILL:
            self.end(-signal_number)
        elif signal_number == signal.SIGTERM and not self.is_silent:
            self.ends_at = min(self.ends_at, self.now() + self.drain_s)

    def end(self, code: int) -> None:
        """End now with this exit code, as in a crash; what has ended stays as it is."""
        if self.running():
            self.ends_at, self.code = self.now(), code

    def health(self) -> EngineHealth:
        """Return what it says of itself while it runs."""
        if self.ends_at < float("inf"):
            return EngineHealth(state="Draining", message="asked to end")
        if self.meeting is not None and self.now() < self.meeting.joined_at:
            return EngineHealth(state="Joining", message="")
        state = "Ready" if self.now() >= self.ready_at else "Loading"
        return EngineHealth(state=state, message="", is_busy=self.is_stuck)


@dataclass(slots=True, kw_only=True)
class HollowEngines:
    """The engines of one hollow Mac (`EnginesPort`); they outlive its agent."""

    clock: Clock
    pace: Callable[[str], HollowTiming]
    """From a model's path to how long things take."""
    first_port: int = 4100
    meetings: HollowEpochs = field(default_factory=HollowEpochs)
    """Where its ranks find those of other Macs."""
    start_error: str = ""
    """Why no engine can be started now; empty: they can."""
    _engines: list[HollowEngine] = field(default_factory=list)
    _started: int = 0
    _epochs: dict[tuple[str, str], int] = field(default_factory=dict)

    def last_epoch(self, replica: str, uid: str) -> int:
        """Return the last epoch of which a rank was started here for the replica; 0 if none was."""
        return self._epochs.get((replica, uid), 0)

    def start(self, order: EngineOrder, taken: Sequence[int]) -> EngineProcess:
        """Start an engine on a free port; a rank's epoch is used up by that, whatever comes of it.

        Raises:
            OSError: `start_error` says so.

        """
        group = order.group
        if group is not None:
            self._epochs[order.replica, order.replica_uid] = group.epoch
        if self.start_error:
            raise OSError(self.start_error)
        used = {*taken, *(engine.port for engine in self.running())}
        port = next(p for p in range(self.first_port, self.first_port + 1000) if p not in used)
        self._started += 1
        pace = self.pace(model_path(order))
        engine = HollowEngine(
            record=ProcessRecord(pid=self._started, birthmark="hollow", command=()),
            order=order,
            port=port,
            started_at=self.clock.monotonic(),
            load_s=pace.load_s,
            drain_s=pace.drain_s,
            now=self.clock.monotonic,
        )
        if group is not None:
            engine.meeting = self.meetings.join(
                order.replica_uid,
                group.epoch,
                number=group.rank,
                world_size=group.world_size,
                rank=engine,
            )
        self._engines = [*self.running(), engine]
        return _engine_process(engine)

    def find(self) -> list[EngineProcess]:
        """Return what an earlier agent of this Mac left running."""
        return [_engine_process(engine) for engine in self.running()]

    def running(self) -> list[HollowEngine]:
        """Return the engines that run now."""
        return [engine for engine in self._engines if engine.running()]

    def on_port(self, port: int) -> HollowEngine | None:
        """Return who answers there."""
        return next((engine for engine in self.running() if engine.port == port), None)


@dataclass(slots=True, kw_only=True)
class HollowHealth:
    """Asks hollow engines how they are (`HealthPort`)."""

    engines: HollowEngines
    probe_error: str = ""
    """What goes wrong with every first token now; empty: nothing."""
    answer: GoldenAnswer = GOLDEN_ANSWER
    """What groups whose rank 0 is here answer to the golden question now."""

    async def ask(
        self, port: int, replica_uid: str, *, limit_s: float = HEALTH_TIMEOUT_S
    ) -> EngineHealth | None:
        """Return what the replica's engine says; None at once if it hangs, whatever the limit."""
        del limit_s  # nobody waits here
        engine = self.engines.on_port(port)
        if engine is None or engine.is_silent or engine.order.replica_uid != replica_uid:
            return None
        return engine.health()

    async def probe(self, port: int, model: str) -> str:
        """Have one token "generated"; return what went wrong, or nothing."""
        engine = self.engines.on_port(port)
        if engine is None:
            return "the first token failed: nobody listens"
        await self.engines.clock.sleep(self.engines.pace(model_path(engine.order)).probe_s)
        if not engine.running() or engine.is_silent:
            return "the first token failed: the engine went away"
        if model not in engine.order.served_names:
            return f"the first token failed: the engine does not serve {model}"
        return self.probe_error

    async def golden(self, port: int, model: str) -> tuple[GoldenAnswer | None, str]:
        """Return the answer to the golden question, or what went wrong."""
        error = await self.probe(port, model)
        return (None, error) if error else (self.answer, "")

    async def close(self) -> None:
        """Let go of nothing: there are no connections."""


def model_path(order: EngineOrder) -> str:
    """Return the model's path as its deployment names it."""
    folder = order.model_dir
    return str(
        folder.relative_to(HOLLOW_FOLDER) if folder.is_relative_to(HOLLOW_FOLDER) else folder
    )


def _engine_process(engine: HollowEngine) -> EngineProcess:
    return EngineProcess(
        replica=engine.order.replica,
        replica_uid=engine.order.replica_uid,
        served_name=engine.order.served_names[0],
        port=engine.port,
        child=engine,
        log=_NO_LOG,
        epoch=engine.order.group.epoch if engine.order.group is not None else 0,
        memory_bytes=engine.order.memory_limit_bytes,
    )


@dataclass(slots=True, kw_only=True)
class HollowReferences:
    """Answers the golden question alone (`ReferencesPort`)."""

    engines: HollowEngines
    error: str = ""
    """Why it cannot; empty: it can."""
    made: int = 0
    """How often it was asked."""

    async def make(self, order: EngineOrder) -> GoldenAnswer:
        """Return the answer, after as long as the model takes.

        Raises:
            OSError: `error` says so.

        """
        self.made += 1
        pace = self.engines.pace(model_path(order))
        await self.engines.clock.sleep(pace.load_s + pace.probe_s)
        if self.error:
            raise OSError(self.error)
        return GOLDEN_ANSWER.model_copy(update={"is_reference": True})

    def sweep(self) -> None:
        """End nothing: what is made ends with who asked."""
