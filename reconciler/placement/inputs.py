"""The inputs of placement: the request for one replica, and nodes with what is allocated on them. Pure."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from schemas import quantity
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource
from schemas.node import AdapterReport, ModelReport, Taint

_NO_TIMES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """A request to place one more replica of a deployment."""

    name: str
    """Name of the deployment."""
    spec: ModelDeploymentSpec
    apart_from: frozenset[str] = frozenset()
    """Deployments whose replicas must not share a node with this one."""
    load_times: Mapping[str, float] = field(default_factory=lambda: _NO_TIMES, compare=False)
    """Seconds in which its model last loaded, by node."""

    @property
    def path(self) -> str:
        return self.spec.model.folder

    @property
    def override_bytes(self) -> int:
        """Return spec.resources.memory in bytes; 0 if it is not set."""
        return quantity.parse(self.spec.resources.memory) if self.spec.resources else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Replicas that a deployment still misses which is placed before."""

    request: PlacementRequest
    missing: int
    waits_at_zero: bool = False
    """True if requests wait for the deployment, and it has no replica: idle replicas give way for its first."""


def request_for(
    deployment: ModelDeployment,
    *,
    apart_from: frozenset[str] = frozenset(),
    load_times: Mapping[str, float] = _NO_TIMES,
) -> PlacementRequest:
    """Return the request for one more replica of the deployment."""
    return PlacementRequest(
        name=deployment.metadata.name,
        spec=deployment.spec,
        apart_from=apart_from,
        load_times=load_times,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The reason why a node cannot take a replica.

    `need` and `have` are the missing resource: bytes for memory, a count otherwise, 0 if the reason has no amount.
    """

    reason: str
    message: str
    need: int = 0
    have: int = 0
    capacity: int | None = None
    """The amount that the node would have if it was empty; None if that makes no difference."""


class Allocation(NamedTuple):
    """The memory of one replica's rank on a node, of any deployment. A new leader makes one for each rank of the fleet."""

    replica: str
    deployment: str
    bytes: int
    priority: int = 0
    """Priority of its deployment."""
    version: int = 0
    """mod_revision of the replica that was read."""
    is_ending: bool = False
    """True if the replica drains already, so that its memory will be free."""
    model: str = ""
    """The folder of its model."""
    nodes: tuple[str, ...] = ()
    """All nodes with a rank of the replica, if there are several: they free their memory together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One Mac as placement sees it."""

    name: str
    is_ready: bool
    is_cordoned: bool = False
    allocatable_bytes: int = 0
    """Memory for models, after what its pools reserve."""
    reserved_bytes: int = 0
    """Memory that its pools reserve out of what the agent offers."""
    used_bytes: int = 0
    """Memory of all allocations, whether they run yet or not."""
    labels: Mapping[str, str] = field(default_factory=dict)
    pools: frozenset[str] = frozenset()
    models: Mapping[str, ModelReport] = field(default_factory=dict)
    """Reports by model path; the agent has not inspected a path that is missing."""
    adapters: Mapping[str, AdapterReport] = field(default_factory=dict)
    """Reports by path of a LoRA adapter."""
    reserved_by_group: str = ""
    """The ShardGroup that reserves the node; empty if none does."""
    replicas: Mapping[str, int] = field(default_factory=dict)
    """Number of replicas on the node by deployment."""
    allocations: tuple[Allocation, ...] = ()
    promised_bytes: int = 0
    """Memory kept for replicas of a higher priority that wait for others to end."""
    chip: str = ""
    gpu_cores: int = 0
    memory_bytes: int = 0
    """Unified memory of the machine."""
    bandwidth_gbps: float = 0.0
    """Memory bandwidth; 0 if unknown."""
    disk_gbps: float = 0.0
    """Read rate of the disk that holds models; 0 if it was not measured."""
    taints: tuple[Taint, ...] = ()
    pool_priority: int = 0
    """Highest priority among its pools."""
    holds: tuple[Rejection, ...] = ()
    """Reasons against new replicas (nodes/node_state.py), the most important first."""
    leave_reason: str = ""
    """Reason to move replicas elsewhere, as far as minAvailable allows; empty if they may stay."""

    @property
    def takes_replicas(self) -> bool:
        """Return whether replicas may be placed on it now, as far as that does not depend on the deployment."""
        return self.is_ready and not self.is_cordoned and not self.holds

    def missing_bytes(self, path: str) -> int:
        """Return the bytes of a model that the node would have to fetch."""
        report = self.models.get(path)
        return report.missing_bytes if report is not None else 0

    def has_files(self, path: str) -> bool:
        """Return whether the model is whole on the node's disk, as far as its agent has inspected it."""
        report = self.models.get(path)
        return report is not None and report.geometry is not None and not report.missing_bytes

    def fetch_problem(self, path: str) -> str:
        """Return why a preload of the model fails; empty while it goes on."""
        report = self.models.get(path)
        return report.fetch_problem if report is not None else ""

    @property
    def free_bytes(self) -> int:
        return self.allocatable_bytes - self.used_bytes

    @property
    def hardware(self) -> tuple[str, int, int]:
        """Return chip, GPU cores and memory: nodes with equal values are equal machines."""
        return self.chip, self.gpu_cores, self.memory_bytes

    @property
    def ending_bytes(self) -> int:
        """Return the memory of replicas that drain."""
        return sum(allocation.bytes for allocation in self.allocations if allocation.is_ending)

    @property
    def room_bytes(self) -> int:
        """Return the memory that may be assigned now: free and not promised to another replica."""
        room: int = room_bytes(self.free_bytes, self.ending_bytes, self.promised_bytes)
        return room


Numbers: TypeAlias = Any
"""A number of one node, or a column with the numbers of many: formulas are defined once for both."""


def room_bytes(free: Numbers, ending: Numbers, promised: Numbers) -> Numbers:
    """Return the memory that may be assigned now: free, and not promised to a replica that waits for others to end."""
    lacking = ending - promised
    return free + lacking * (lacking < 0)


@dataclass(frozen=True, slots=True)
class FieldColumn:
    """One field of a node."""

    field: str


@dataclass(frozen=True, slots=True)
class LabelsColumn:
    """The node's values of these labels."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelColumn:
    """The node's report on a model."""

    path: str


@dataclass(frozen=True, slots=True)
class AdapterColumn:
    """The node's report on an adapter."""

    path: str


Column: TypeAlias = FieldColumn | LabelsColumn | ModelColumn | AdapterColumn


class ColumnPair(NamedTuple):
    """Two columns together; the first may be a pair itself."""

    one: "Column | ColumnPair"
    other: Column


AnyColumn: TypeAlias = Column | ColumnPair


NAME = FieldColumn("name")
READY = FieldColumn("is_ready")
CORDONED = FieldColumn("is_cordoned")
HOLDS = FieldColumn("holds")
GROUP = FieldColumn("reserved_by_group")
POOLS = FieldColumn("pools")
CHIP = FieldColumn("chip")
GPU_CORES = FieldColumn("gpu_cores")
ALLOCATABLE = FieldColumn("allocatable_bytes")
TAINTS = FieldColumn("taints")
BANDWIDTH = FieldColumn("bandwidth_gbps")
POOL_PRIORITY = FieldColumn("pool_priority")
HARDWARE = FieldColumn("hardware")


def source_columns(source: ModelSource) -> tuple[Column, ...]:
    """Return the columns of all folders that a model is read from, its own first."""
    paths = [source.folder] if source.draft is None else [source.folder, source.draft.path]
    return (*map(ModelColumn, paths), *map(AdapterColumn, source.adapter_paths))


def read_column(column: Column, nodes: Sequence[NodeView]) -> list[Hashable]:
    """Return the nodes' values in the column."""
    match column:
        case FieldColumn(field):
            return [getattr(node, field) for node in nodes]
        case LabelsColumn(keys):
            return [tuple([node.labels.get(key) for key in keys]) for node in nodes]
        case ModelColumn(path):
            return [node.models.get(path) for node in nodes]
        case AdapterColumn(path):
            return [node.adapters.get(path) for node in nodes]
