"""A hollow Mac: the real agent on engines that are only times. See the package's docstring for how to use it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from machinery.clock import Clock
from machinery.version import version
from nodeagent.agent import Agent, AgentConfig
from nodeagent.hardware.macos import gpu_memory_limit
from nodeagent.hardware.memory import Pressure
from nodeagent.hardware.readings import Disk, Heat, Memory, Reading, Reboot
from nodeagent.hollow.engines import NO_FOLDER, HollowEngines, HollowHealth, Pace
from nodeagent.hollow.feed import SharedFeed
from nodeagent.hollow.references import HollowReferences
from nodeagent.parts import Parts
from nodeagent.presence import LEASE_TTL_S
from schemas import chips
from schemas.meta import Labels
from schemas.node import AdapterReport, ModelGeometry, ModelReport, NodeStatus
from store.port import Transport

# Every adapter is there, and is as large as one of rank 16 for all layers of an 8B model.
_ADAPTER_BYTES = 84 * 2**20


@dataclass(slots=True, kw_only=True)
class HollowReadings:
    """How a hollow machine is (`nodeagent.hardware.readings.Readings`): well, until `now` is changed."""

    now: Reading

    async def take(self) -> Reading:
        """Return how it is."""
        return self.now


def well(status: NodeStatus) -> Reading:
    """Return the reading of a machine that lacks nothing."""
    return Reading(
        memory=Memory(
            total_bytes=status.memory_bytes,
            available_bytes=status.memory_bytes // 2,
            level=Pressure.NORMAL,
        ),
        disk=Disk(total_bytes=2**40, free_bytes=2**39),
        heat=Heat(),
        reboot=Reboot(),
        power="Mains",
    )


@dataclass(slots=True, kw_only=True)
class HollowMac:
    """One Mac. Its engines live on while agents come and go: `agent()` is what a start of one is."""

    clock: Clock
    status: NodeStatus
    """Its description, without models."""
    models: Callable[[str], ModelReport]
    """What it says of a model, by the path that a deployment names."""
    pace: Callable[[str], Pace] = field(default=lambda _: Pace())
    lease_s: int = LEASE_TTL_S
    """How long it is taken for alive after its last renewal."""
    engines: HollowEngines = field(init=False)
    health: HollowHealth = field(init=False)
    references: HollowReferences = field(init=False)
    readings: HollowReadings = field(init=False)
    _runs: int = 0

    def __post_init__(self) -> None:
        self.engines = HollowEngines(clock=self.clock, pace=self.pace)
        self.health = HollowHealth(engines=self.engines)
        self.references = HollowReferences(engines=self.engines)
        self.readings = HollowReadings(now=well(self.status))

    @property
    def name(self) -> str:
        return self.status.hostname

    def agent(self, transport: Transport, feed: SharedFeed) -> Agent:
        """Return a new run of the Mac's agent; an earlier one must have been cancelled."""
        self._runs += 1
        self.engines.meetings = feed.meetings
        config = AgentConfig(
            state_dir=NO_FOLDER,
            models_dir=NO_FOLDER,
            engine_host=self.status.address,
            first_port=self.engines.first_port,
            session=f"hollow-{self.name}/{self._runs}",
            status=self.status,
            name=self.name,
            casts_to_float32=False,
            lease_s=self.lease_s,
        )
        parts = Parts(
            engines=self.engines,
            health=self.health,
            references=self.references,
            report_models=self._report,
            report_adapters=self._report_adapters,
            replicas=feed.replicas_of(self.name),
            deployments=feed.deployments_of(self.name),
            readings=self.readings,
        )
        return Agent(transport, self.clock, config, parts)

    def lose_power(self) -> None:
        """End every engine at once, as a power cut does; its agent must be cancelled as well."""
        for engine in self.engines.running():
            engine.end(-9)

    async def _report(self, paths: set[str]) -> tuple[ModelReport, ...]:
        return tuple(self.models(path) for path in sorted(paths))

    async def _report_adapters(self, paths: set[str]) -> tuple[AdapterReport, ...]:
        return tuple(
            AdapterReport(path=path, weights_bytes=_ADAPTER_BYTES) for path in sorted(paths)
        )


def describe(
    name: str,
    *,
    chip: str = "Apple M4 Pro",
    memory_bytes: int = 48 * 2**30,
    gpu_cores: int | None = None,
    labels: Labels | None = None,
    allocatable_bytes: int | None = None,
) -> NodeStatus:
    """Return the description of an invented Mac; what is left out is as such a Mac was sold."""
    row = chips.find(chip, gpu_cores=gpu_cores, memory_bytes=memory_bytes)
    cores = gpu_cores if gpu_cores is not None else (row.gpu_cores[-1] if row is not None else 0)
    usual_bytes, _ = gpu_memory_limit(memory_bytes, None)
    return NodeStatus(
        uid=f"hollow-{name}",
        hostname=name,
        address="127.0.0.1",
        agent_version=version(),
        os="macOS",
        os_version="26.2",
        machine="hollow",
        chip=chip,
        cpu_cores=row.cpu_cores[-1] if row is not None else 1,
        gpu_cores=cores,
        memory_bytes=memory_bytes,
        allocatable_bytes=usual_bytes if allocatable_bytes is None else allocatable_bytes,
        labels=labels or {},
    )


def having(geometries: Mapping[str, ModelGeometry]) -> Callable[[str], ModelReport]:
    """Return what a Mac says that has these models, by path, and no others."""

    def report(path: str) -> ModelReport:
        found = geometries.get(path)
        if found is not None:
            return ModelReport(path=path, geometry=found)
        return ModelReport(path=path, reason="ModelNotFound", message=f"no folder {path} here")

    return report
