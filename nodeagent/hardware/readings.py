"""Types of machine facts (what it is) and machine readings (its state now), and the port to their reader."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol, TypeAlias

from schemas.node import KernelPanic, LocalModel, MemoryLimitSource, NodeFabric, WiredLimit


class MemoryPressure(IntEnum):
    """Levels of <sys/kern_memorystatus.h>; 3 does not exist."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


class HardwareError(Exception):
    """A quantity that must not be guessed (memory) could not be read from any source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareFacts:
    """One machine's inventory. No field uses 0 for "unknown".

    chip: the marketing name ("Apple M4 Pro"), or what the system calls its processor.
    machine: the model identifier ("Mac16,11"); on Linux the architecture.
    os_version: with the build on macOS ("26.2 (25C56)"): RDMA peers must run identical builds.
    performance_cores: the cores of the fastest level. macOS calls that level "Super" since M5.
    metal: the newest Metal family of the GPU ("Metal 4"); "" if it could not be read, and on Linux.
    gpu_cores: 0 only on Linux. If a Mac's count cannot be read: the chip's smallest bin, or 1 for an unknown chip.
    memory_bytes: installed memory; on Linux at most the limit of the process's cgroups.
    gpu_memory_limit_bytes: the memory for models. On macOS `iogpu.wired_limit_mb` if it is set, else the usual share,
        until the preflight of Metal reports the real one. On Linux .75 of memory_bytes.
    memory_bandwidth_gbps: None if the chip is not in the table.
    hardware_uuid: "" if it could not be read; then the identity is derived from the host name, with a notice.
    thunderbolt: the generation by chip; None if unknown.
    """

    chip: str
    machine: str
    os: str
    os_version: str
    cpu_cores: int
    performance_cores: int | None
    gpu_cores: int
    memory_bytes: int
    gpu_memory_limit_bytes: int
    gpu_memory_limit_source: MemoryLimitSource = MemoryLimitSource.ESTIMATE
    memory_bandwidth_gbps: float | None
    hardware_uuid: str
    hostname: str
    metal: str = ""
    thunderbolt: str | None


PowerSource: TypeAlias = Literal["Mains", "Battery", "Unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """The machine's memory; macOS reports `level`, Linux `stalled_percent` (PSI)."""

    total_bytes: int
    available_bytes: int
    level: MemoryPressure | None = None
    """None where the system has no such level."""
    stalled_percent: float = 0.0
    """The share of the last minute in which all runnable processes waited for memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReading:
    """A disk that the agent or its engines write to."""

    path: str = ""
    """The folder on it."""
    total_bytes: int
    free_bytes: int
    """Bytes that a user may still write, without the reserve for root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatReading:
    """The machine's temperature and throttling, as far as it reports them."""

    has_sensor: bool = True
    """False if the machine has no way to report heat."""
    throttled: str = ""
    """The system's report that heat slows it down; "" if it does not."""
    throttle_count: int = 0
    """Throttle events since the machine started; only an increase matters."""
    hottest: str = ""
    """The sensor that is nearest to its limit, or furthest above it."""
    celsius: float = 0.0
    limit_celsius: float = 0.0
    """The temperature at which the system throttles; 0 if no sensor has a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebootReading:
    """Conditions that only a restart of the machine resolves."""

    wanted_by: str = ""
    """The packages or updates that wait for a restart; "" if none do."""
    total_bytes: int = 0
    wired_bytes: int = 0
    """Memory that the system cannot reclaim (macOS); 0 where it is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReading:
    """All readings of one moment; None means "could not be read", which is neither good nor bad."""

    memory: MemoryReading | None = None
    disk: DiskReading | None = None
    """The disk that holds models."""
    state_disk: DiskReading | None = None
    """The disk of the agent's state folder, if it is another one."""
    heat: HeatReading | None = None
    reboot: RebootReading | None = None
    power: PowerSource = "Unknown"
    owner_idle_s: float | None = None
    """Seconds since the last use of keyboard or mouse; None on a machine without them."""
    is_in_meeting: bool | None = None
    """True while a program uses a camera or a microphone; None if it could not be read, and on Linux."""
    is_lid_shut: bool | None = None
    """True while the lid is shut and makes the machine sleep; None without a lid, and if it could not be read."""
    wakes_on_lan: bool | None = None
    """True if a magic packet wakes the machine; None on Linux, and if it was not read this time."""
    runs_etcd: bool | None = None
    """True if an etcd runs here; None if it was not read this time."""
    wired_limit: WiredLimit | None = None
    """The limit of memory that the GPU may wire; None on Linux, and if it could not be read."""
    fabric: NodeFabric | None = None
    """The cables; None if they were not read this time."""
    panics: tuple[KernelPanic, ...] | None = None
    """The newest kernel panics; None if they were not read this time, or may not be read."""
    local_models: tuple[LocalModel, ...] | None = None
    """The models below the models folder; None if they could not be read."""


class MachineReader(Protocol):
    """The port to readings of the machine; tests and simulations have their own reader."""

    async def take(self) -> MachineReading:
        """Return a reading, within seconds and without blocking the event loop.

        A part that cannot be read is None. Raises OSError if nothing can be read.
        """
        ...
