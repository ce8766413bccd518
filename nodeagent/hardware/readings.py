"""How much memory is free on a Mac now. Pure: parses what vm_stat and sysctl print, decides what to believe.

Free memory alone is a poor signal on macOS (exo#976): the kernel keeps caches and compresses before it frees. Its
own verdict, the pressure level, therefore decides how much of the reclaimable memory counts.
Run against captured output only, not on a Mac.

What a machine is, in our own words. Types only; `probe` fills them.

How a machine is just now, in our own words, and the port to whoever says so. Types only; `machine` fills them.
"""

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, Literal, Protocol, TypeAlias

from nodeagent.hardware.system_text import parse_pairs, parse_positive
from schemas.node import NodeFabric

PRESSURE_SYSCTL: Final = "kern.memorystatus_vm_pressure_level"


class MemoryPressure(IntEnum):
    """The levels of <sys/kern_memorystatus.h>; there is no 3."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MacMemory:
    free_bytes: int  # free now, speculative reads included
    inactive_bytes: int  # not used lately: reclaimable, some of it only by compressing or swapping
    wired_bytes: int  # never reclaimable; what a killed engine may leave behind until reboot
    pressure: MemoryPressure


def parse_mac_memory(vm_stat: str, sysctl: str) -> MacMemory | None:
    """Read `vm_stat` and `sysctl kern.memorystatus_vm_pressure_level`; None if vm_stat did not answer.

    The page size is read, not assumed: it is 16384 on Apple silicon and 4096 on Intel and under Rosetta.
    """
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    said = parse_pairs(vm_stat)
    if page is None or "Pages free" not in said:
        return None

    def of(*names: str) -> int:
        return sum(parse_positive(said.get(name)) or 0 for name in names) * int(page[1])

    return MacMemory(
        free_bytes=of("Pages free", "Pages speculative"),
        inactive_bytes=of("Pages inactive"),
        wired_bytes=of("Pages wired down"),
        pressure=parse_pressure(sysctl),
    )


def parse_pressure(sysctl: str) -> MemoryPressure:
    """Read the level. One that is missing or new counts as a warning: believe less, refuse nothing."""
    level = parse_positive(parse_pairs(sysctl).get(PRESSURE_SYSCTL))
    return next((known for known in MemoryPressure if known == level), MemoryPressure.WARNING)


def mac_available_bytes(memory: MacMemory) -> int:
    """Return what a new model could take: psutil's free + inactive, as long as the kernel is at ease.

    Under a warning the inactive pages are already being compressed, so only free ones count; when pressure is
    critical nothing does.
    """
    match memory.pressure:
        case MemoryPressure.NORMAL:
            return memory.free_bytes + memory.inactive_bytes
        case MemoryPressure.WARNING:
            return memory.free_bytes
        case MemoryPressure.CRITICAL:
            return 0


class HardwareError(Exception):
    """A quantity that nobody may guess (memory) could not be read from any source."""


class MemoryLimitSource(StrEnum):
    """By whom the GPU memory limit was set (omlx#1533: owners cannot tell a wired cap from a default)."""

    ESTIMATE = "estimate"
    WIRED_LIMIT = "iogpu.wired_limit_mb"
    CGROUP = "cgroup"


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareFacts:
    """One machine's inventory. Nothing in it is ever 0 to mean "not known"; see each field.

    chip: the marketing name ("Apple M4 Pro"), or what the system calls its processor.
    machine: the model identifier ("Mac16,11"); on Linux the architecture.
    os_version: with the build on macOS ("26.2 (25C56)"): RDMA peers must run identical builds.
    performance_cores: the cores of the fastest level. macOS calls that level "Super" since M5.
    gpu_cores: 0 only on Linux. On a Mac whose count cannot be read it is the chip's smallest bin, or 1 if
        the chip is not known either.
    memory_bytes: installed memory; on Linux at most what the process's cgroups allow.
    gpu_memory_limit_bytes: what models may use. On macOS `iogpu.wired_limit_mb` if someone set it, else a
        cautious fraction: .66 up to 36 GB, .75 above. The true default is larger and differs between
        macOS versions; the engine's reading of `mx.device_info()` replaces this one once an engine ran.
        On Linux a declared share, .75 of memory_bytes.
    memory_bandwidth_gbps: None if the chip is not in the table; measure it then.
    hardware_uuid: "" if it could not be read; identity then says so and falls back.
    thunderbolt: the generation by chip; None if not known.
    rdma_capable: Thunderbolt 5 and macOS 26.2. Whether RDMA was enabled in Recovery is another question.
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
    thunderbolt: str | None
    rdma_capable: bool


PowerSource: TypeAlias = Literal["Mains", "Battery", "Unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """The machine's memory. `level` is macOS' own verdict, `stalled_percent` Linux' (see PSI)."""

    total_bytes: int
    available_bytes: int
    level: MemoryPressure | None = None
    """None where the system gives no verdict."""
    stalled_percent: float = 0.0
    """Share of the last minute in which everything that wanted to run waited for memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReading:
    """The disk that holds models."""

    total_bytes: int
    free_bytes: int
    """What a user may still write; what is kept for root does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatReading:
    """How warm it is, as far as this machine has a way to say so."""

    has_sensor: bool = True
    """False if nothing here would ever tell."""
    throttled: str = ""
    """How the system says that it slows down because of heat; empty if it does not."""
    throttle_count: int = 0
    """How often cores were slowed down since the machine started; only that it grows is news."""
    hottest: str = ""
    """The sensor that is nearest to its limit, or furthest above."""
    celsius: float = 0.0
    limit_celsius: float = 0.0
    """Where the system begins to slow down; 0 if no sensor has such a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebootReading:
    """What only a restart of the machine would mend."""

    wanted_by: str = ""
    """What the system says needs a restart, such as packages; empty if it wants none."""
    total_bytes: int = 0
    wired_bytes: int = 0
    """Memory that the system cannot take back (macOS); 0 where that is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReading:
    """Everything at one moment; None is "could not be read", which is neither good nor bad news."""

    memory: MemoryReading | None = None
    disk: DiskReading | None = None
    heat: HeatReading | None = None
    reboot: RebootReading | None = None
    power: PowerSource = "Unknown"
    owner_idle_s: float | None = None
    """Seconds since somebody used keyboard or mouse; None if nobody sits at such a machine."""
    fabric: NodeFabric | None = None
    """Its cables; None if they were not looked at this time."""


class MachineReader(Protocol):
    """Whoever knows how the machine is. Tests and simulations have one of their own."""

    async def take(self) -> MachineReading:
        """Return how the machine is. Does not block the event loop, and ends within seconds.

        What cannot be read is None in it. May raise OSError if nothing can.
        """
        ...
