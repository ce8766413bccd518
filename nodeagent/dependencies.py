"""What an agent works with, as ports: engines, their health, models, news of the store. Does nothing.

The real parts are those of a Mac; `nodeagent/hollow/` has others, for simulations and load.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from nodeagent.engines.engine_processes import EngineOrder, EngineProcess
from nodeagent.engines.health_client import HEALTH_TIMEOUT_S, EngineHealth
from nodeagent.fabric.node_tests import NodeFabricTests
from nodeagent.hardware.readings import MachineReader
from schemas.deployment import ModelDeployment
from schemas.formation import GoldenAnswer
from schemas.node import AdapterReport, ModelReport
from schemas.replica import Replica
from schemas.shardgroup import ShardGroup

T_co = TypeVar("T_co", covariant=True)

ReportModels: TypeAlias = Callable[[set[str]], Awaitable[tuple[ModelReport, ...]]]
"""From models' paths to what this node says of them, in order of the paths."""
ReportAdapters: TypeAlias = Callable[[set[str]], Awaitable[tuple[AdapterReport, ...]]]
"""The same for LoRA adapters."""


class EnginesPort(Protocol):
    """The engines of one node."""

    def start(self, order: EngineOrder, taken: Sequence[int]) -> EngineProcess:
        """Start an engine on a port that is not taken.

        Raises:
            OSError: it cannot be started.

        """
        ...

    def last_epoch(self, replica: str, uid: str) -> int:
        """Return the last epoch of which a rank was started here for the replica; 0 if none was."""
        ...

    def find(self) -> list[EngineProcess]:
        """Return the engines that an earlier run of this agent left running."""
        ...


class HealthPort(Protocol):
    """Asking engines how they are."""

    async def ask(
        self, port: int, replica_uid: str, *, limit_s: float = HEALTH_TIMEOUT_S
    ) -> EngineHealth | None:
        """Return what the replica's engine says; None if it does not answer within the limit."""
        ...

    async def probe(self, port: int, model: str) -> str:
        """Have one token generated; return what went wrong, or nothing."""
        ...

    async def golden(self, port: int, model: str) -> tuple[GoldenAnswer | None, str]:
        """Ask the golden question; return the answer, or what went wrong, or neither where there is no text."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class ReferencesPort(Protocol):
    """Whoever has one process answer the golden question, with all of the model."""

    async def make(self, order: EngineOrder) -> GoldenAnswer:
        """Return the answer, made now or earlier. Cancelled, it leaves nothing behind.

        Raises:
            OSError: there is none, and why.

        """
        ...

    def sweep(self) -> None:
        """End what an earlier run of this agent left behind."""
        ...


class ObjectCache(Protocol[T_co]):
    """A cache of some of the store's objects (`store.informer` is one)."""

    @property
    def items(self) -> Mapping[str, T_co]: ...

    @property
    def synced(self) -> bool: ...

    def on_change(self, handler: Callable[[str], None]) -> None: ...

    async def wait_synced(self) -> None: ...

    async def run(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Everything outside of itself that one agent works with, but for the store."""

    engines: EnginesPort
    health: HealthPort
    references: ReferencesPort
    report_models: ReportModels
    report_adapters: ReportAdapters
    replicas: ObjectCache[Replica]
    """Replicas by key: all of them, or those of this node."""
    deployments: ObjectCache[ModelDeployment]
    groups: ObjectCache[ShardGroup] | None = None
    """ShardGroups, for the models that they fall back on; None where nobody looks into models' folders."""
    is_looking: Callable[[], bool] = lambda: False
    """Whether more is being found out about a model, so that it is worth asking for reports again soon."""
    readings: MachineReader | None = None
    """How the machine is; None leaves the node's status as it was described."""
    fabric: NodeFabricTests | None = None
    """Tests of the cables; None where no process can be started for one."""
