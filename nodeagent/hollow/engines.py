"""Engines that are nothing but times: they load, answer, drain and end on the clock. No process, no socket, no disk.

A hollow engine is a value that is asked; nothing runs between two questions, so that thousands of them cost nothing.
"""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from machinery.clock import Clock
from machinery.processes import Record
from nodeagent.engines import EngineOrder, EngineProcess
from nodeagent.health import HEALTH_S, Health
from nodeagent.hollow.groups import Meeting, Meetings
from schemas.formation import Golden

NO_FOLDER = Path("/hollow")
"""Where models would lie; nobody looks."""

ANSWER = Golden(pieces=(" five", ",", " six"), logprobs=(-0.1, -0.2, -0.3))
"""What every hollow group answers to the golden question."""

# What an engine ends with when its group is over (nodeagent/engine/process.py).
_GROUP_OVER = 4

_DISCONNECTED = Path(os.devnull)
"""Where a hollow engine's last words are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
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

    record: Record
    order: EngineOrder
    port: int
    started_at: float
    load_s: float
    drain_s: float
    now: Callable[[], float]
    meeting: Meeting | None = None
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
        return self.code if self.ends_at <= self._lost_at else _GROUP_OVER

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

    def health(self) -> Health:
        """Return what it says of itself while it runs."""
        if self.ends_at < float("inf"):
            return Health(state="Draining", message="asked to end")
        if self.meeting is not None and self.now() < self.meeting.joined_at:
            return Health(state="Joining", message="")
        state = "Ready" if self.now() >= self.ready_at else "Loading"
        return Health(state=state, message="", is_busy=self.is_stuck)


@dataclass(slots=True, kw_only=True)
class HollowEngines:
    """The engines of one hollow Mac (`EnginesPort`); they outlive its agent."""

    clock: Clock
    pace: Callable[[str], Pace]
    """From a model's path to how long things take."""
    first_port: int = 4100
    meetings: Meetings = field(default_factory=Meetings)
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
        pace = self.pace(path_of(order))
        engine = HollowEngine(
            record=Record(pid=self._started, birthmark="hollow", command=()),
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
        return _process(engine)

    def find(self) -> list[EngineProcess]:
        """Return what an earlier agent of this Mac left running."""
        return [_process(engine) for engine in self.running()]

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
    answer: Golden = ANSWER
    """What groups whose rank 0 is here answer to the golden question now."""

    async def ask(self, port: int, replica_uid: str, *, limit_s: float = HEALTH_S) -> Health | None:
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
        await self.engines.clock.sleep(self.engines.pace(path_of(engine.order)).probe_s)
        if not engine.running() or engine.is_silent:
            return "the first token failed: the engine went away"
        if model not in engine.order.served_names:
            return f"the first token failed: the engine does not serve {model}"
        return self.probe_error

    async def golden(self, port: int, model: str) -> tuple[Golden | None, str]:
        """Return the answer to the golden question, or what went wrong."""
        error = await self.probe(port, model)
        return (None, error) if error else (self.answer, "")

    async def close(self) -> None:
        """Let go of nothing: there are no connections."""


def path_of(order: EngineOrder) -> str:
    """Return the model's path as its deployment names it."""
    folder = order.model_dir
    return str(folder.relative_to(NO_FOLDER) if folder.is_relative_to(NO_FOLDER) else folder)


def _process(engine: HollowEngine) -> EngineProcess:
    return EngineProcess(
        replica=engine.order.replica,
        replica_uid=engine.order.replica_uid,
        served_name=engine.order.served_names[0],
        port=engine.port,
        child=engine,
        log=_DISCONNECTED,
        epoch=engine.order.group.epoch if engine.order.group is not None else 0,
        memory_bytes=engine.order.memory_limit_bytes,
    )
