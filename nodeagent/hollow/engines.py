"""Simulated engines: they load, answer, drain and end by the clock. No process, no socket, no disk.

A hollow engine is a value that computes its state when it is asked; nothing runs between two questions, so thousands cost
nothing.
"""

import os
import signal
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from machinery.clock import Clock
from machinery.processes import ProcessRecord
from nodeagent.engines.engine_processes import EngineOrder, EngineProcess
from nodeagent.engines.health_client import HEALTH_TIMEOUT_S, EngineHealth
from schemas.formation import GoldenAnswer
from schemas.wire.engine_address import EngineAddress
from schemas.wire.exit_codes import ExitCode

# A closed channel is noticed at once, and the process takes a moment to end.
_PEER_LOSS_S = 0.2
# The slowest step so far of an engine that serves.
_STEP_S = 0.1


class EpochMember(Protocol):
    """One rank, as the other ranks see it."""

    started_at: float
    ends_at: float
    """The time of its end, by itself or not; infinite before."""

    def running(self) -> bool: ...


@dataclass(slots=True, kw_only=True)
class HollowEpoch:
    """The ranks of one epoch."""

    world_size: int
    ranks: dict[int, EpochMember] = field(default_factory=dict)

    @property
    def joined_at(self) -> float:
        """The time at which the last rank joined; infinite before."""
        if len(self.ranks) < self.world_size:
            return float("inf")
        return max(rank.started_at for rank in self.ranks.values())

    def lost_at(self, number: int) -> float:
        """Return the time at which this rank notices the end of another one; infinite while none ended."""
        others = (rank.ends_at for other, rank in self.ranks.items() if other != number)
        return min(others, default=float("inf")) + _PEER_LOSS_S


class HollowEpochs:
    """The epochs of all groups of one process, by replica and epoch."""

    def __init__(self) -> None:
        self._epochs_by_key: dict[tuple[str, int], HollowEpoch] = {}

    def join(
        self, uid: str, epoch: int, *, number: int, world_size: int, rank: EpochMember
    ) -> HollowEpoch:
        """Add a rank to its epoch, in which it waits for the others."""
        for key in list(self._over()):
            del self._epochs_by_key[key]
        members = self._epochs_by_key.setdefault((uid, epoch), HollowEpoch(world_size=world_size))
        members.ranks[number] = rank
        return members

    def _over(self) -> Iterator[tuple[str, int]]:
        for key, epoch in self._epochs_by_key.items():
            if not any(rank.running() for rank in epoch.ranks.values()):
                yield key


HOLLOW_FOLDER = Path("/hollow")
"""A models folder that is never read."""

GOLDEN_ANSWER = GoldenAnswer(pieces=(" five", ",", " six"), logprobs=(-0.1, -0.2, -0.3))
"""The golden answer of every hollow group."""

_NO_LOG = Path(os.devnull)
"""The log file of a hollow engine: empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HollowTiming:
    """The times of a hollow Mac, in seconds."""

    load_s: float = 5.0
    """From the start of an engine to Ready."""
    probe_s: float = 0.2
    """From the request to the first token."""
    drain_s: float = 0.5
    """From SIGTERM to the end."""


@dataclass(slots=True, kw_only=True)
class HollowEngine:
    """One engine; the `child` of an `EngineProcess`."""

    record: ProcessRecord
    order: EngineOrder
    address: EngineAddress
    started_at: float
    load_s: float
    drain_s: float
    now: Callable[[], float]
    epoch: HollowEpoch | None = None
    """The epoch in which it waits for the other ranks; None if it has the whole model."""
    ends_at: float = float("inf")
    code: int = 0
    is_silent: bool = False
    """True if it hangs: it runs and does not answer."""
    is_stuck: bool = False
    """True if it makes no progress: it answers and is busy forever."""
    memory_bytes: int = 0
    """Its memory; 0 if unknown."""

    @property
    def ready_at(self) -> float:
        """The time at which it is Ready; a rank begins to load when all have joined."""
        begins_at = self.started_at if self.epoch is None else self.epoch.joined_at
        return begins_at + self.load_s

    @property
    def _lost_at(self) -> float:
        """The time at which it notices the end of another rank; an engine that hangs notices none."""
        if self.epoch is None or self.is_silent or self.order.config.group is None:
            return float("inf")
        return self.epoch.lost_at(self.order.config.group.rank)

    def running(self) -> bool:
        return self.now() < min(self.ends_at, self._lost_at)

    def is_frozen(self) -> bool:
        return self.is_silent and self.running()

    def exit_code(self) -> int | None:
        if self.running():
            return None
        return self.code if self.ends_at <= self._lost_at else ExitCode.GROUP_LOST

    def used_bytes(self) -> int:
        return self.memory_bytes if self.running() else 0

    def send(self, signal_number: int) -> None:
        """Drain and end after SIGTERM; end at once after SIGKILL."""
        if signal_number == signal.SIGKILL:
            self.end(-signal_number)
        elif signal_number == signal.SIGTERM and not self.is_silent:
            self.ends_at = min(self.ends_at, self.now() + self.drain_s)

    def end(self, code: int) -> None:
        """End now with this exit code, as in a crash; no effect on an engine that has ended."""
        if self.running():
            self.ends_at, self.code = self.now(), code

    def health(self) -> EngineHealth:
        """Return its health answer while it runs."""
        if self.ends_at < float("inf"):
            return EngineHealth(state="Draining", message="asked to end")
        if self.epoch is not None and self.now() < self.epoch.joined_at:
            return EngineHealth(state="Joining", message="")
        if self.now() >= self.ready_at:
            return EngineHealth(state="Ready", message="", is_busy=self.is_stuck, slowest_s=_STEP_S)
        loaded_ms = 0 if self.is_stuck else round(1000 * (self.now() - self.started_at))
        return EngineHealth(state="Loading", message="", is_busy=self.is_stuck, progress=loaded_ms)


@dataclass(slots=True, kw_only=True)
class HollowEngines:
    """The engines of one hollow Mac (`EnginesPort`); they outlive its agent."""

    clock: Clock
    pace: Callable[[str], HollowTiming]
    """From a model's path to its times."""
    host: str = "127.0.0.1"
    first_port: int = 4100
    epochs: HollowEpochs = field(default_factory=HollowEpochs)
    """The epochs in which its ranks find those of other Macs."""
    start_error: str = ""
    """The error of each start; "" if engines can be started."""
    _engines: list[HollowEngine] = field(default_factory=list)
    _started: int = 0
    _epochs: dict[tuple[str, str], int] = field(default_factory=dict)

    def last_epoch(self, replica: str, uid: str) -> int:
        """Return the last epoch for which a rank of the replica was started here; 0 if none was."""
        return self._epochs.get((replica, uid), 0)

    def start(self, order: EngineOrder, taken: Collection[EngineAddress]) -> EngineProcess:
        """Start an engine at a free address; this uses up a rank's epoch, even if the start fails.

        Raises:
            OSError: `start_error` is set.

        """
        group = order.config.group
        if group is not None:
            self._epochs[order.config.replica, order.config.replica_uid] = group.epoch
        if self.start_error:
            raise OSError(self.start_error)
        used = {*taken, *(engine.address for engine in self.running())}
        ports = range(self.first_port, self.first_port + 1000)
        address = next(
            address for port in ports if (address := EngineAddress(self.host, port)) not in used
        )
        self._started += 1
        pace = self.pace(model_path(order))
        engine = HollowEngine(
            record=ProcessRecord(pid=self._started, start="hollow", command=()),
            order=order,
            address=address,
            started_at=self.clock.monotonic(),
            load_s=pace.load_s,
            drain_s=pace.drain_s,
            now=self.clock.monotonic,
        )
        if group is not None:
            engine.epoch = self.epochs.join(
                order.config.replica_uid,
                group.epoch,
                number=group.rank,
                world_size=group.world_size,
                rank=engine,
            )
        self._engines = [*self.running(), engine]
        return _engine_process(engine)

    def find(self) -> list[EngineProcess]:
        """Return the engines that an earlier agent of this Mac left running."""
        return [_engine_process(engine) for engine in self.running()]

    def running(self) -> list[HollowEngine]:
        """Return the engines that run now."""
        return [engine for engine in self._engines if engine.running()]

    def at(self, address: EngineAddress) -> HollowEngine | None:
        """Return the engine at the address; None if there is none."""
        return next((engine for engine in self.running() if engine.address == address), None)


@dataclass(slots=True, kw_only=True)
class HollowHealth:
    """The health and probes of hollow engines (`HealthPort`)."""

    engines: HollowEngines
    probe_error: str = ""
    """The error of every probe; "" if probes succeed."""
    answer: GoldenAnswer = GOLDEN_ANSWER
    """The golden answer of groups whose rank 0 is here."""

    async def ask(
        self, address: EngineAddress, replica_uid: str, *, limit_s: float = HEALTH_TIMEOUT_S
    ) -> EngineHealth | None:
        """Return the health of the replica's engine; None at once if it hangs."""
        del limit_s  # nothing waits here
        engine = self.engines.at(address)
        if engine is None or engine.is_silent or engine.order.config.replica_uid != replica_uid:
            return None
        return engine.health()

    async def probe(self, address: EngineAddress, model: str) -> str:
        """Wait for one simulated token; return the error, "" if there is none."""
        engine = self.engines.at(address)
        if engine is None:
            return "the first token failed: no engine listens"
        await self.engines.clock.sleep(self.engines.pace(model_path(engine.order)).probe_s)
        if not engine.running() or engine.is_silent:
            return "the first token failed: the engine ended"
        if model not in engine.order.config.served_names:
            return f"the first token failed: the engine does not serve {model}"
        return self.probe_error

    async def golden(self, address: EngineAddress, model: str) -> tuple[GoldenAnswer | None, str]:
        """Return the golden answer, or the error of the probe."""
        error = await self.probe(address, model)
        return (None, error) if error else (self.answer, "")

    async def close(self) -> None:
        """Do nothing: there are no connections."""


def model_path(order: EngineOrder) -> str:
    """Return the model's path as in its deployment."""
    folder = order.config.model_dir
    return str(
        folder.relative_to(HOLLOW_FOLDER) if folder.is_relative_to(HOLLOW_FOLDER) else folder
    )


def _engine_process(engine: HollowEngine) -> EngineProcess:
    return EngineProcess(
        replica=engine.order.config.replica,
        replica_uid=engine.order.config.replica_uid,
        served_name=engine.order.config.served_names[0],
        address=engine.address,
        child=engine,
        log=_NO_LOG,
        epoch=engine.order.config.identity.epoch,
        memory_bytes=engine.order.config.identity.memory,
    )


@dataclass(slots=True, kw_only=True)
class HollowReferences:
    """Simulated reference answers (`ReferencesPort`)."""

    engines: HollowEngines
    error: str = ""
    """The error of each reference; "" if they succeed."""
    made: int = 0
    """The number of references that were requested."""

    async def make(self, order: EngineOrder) -> GoldenAnswer:
        """Return the answer after the times of the model.

        Raises:
            OSError: `error` is set.

        """
        self.made += 1
        pace = self.engines.pace(model_path(order))
        await self.engines.clock.sleep(pace.load_s + pace.probe_s)
        if self.error:
            raise OSError(self.error)
        return GOLDEN_ANSWER.model_copy(update={"is_reference": True})

    def sweep(self) -> None:
        """Do nothing: references end with their agent."""
