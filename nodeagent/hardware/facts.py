"""What a machine is, in our own words. Types only; `probe` fills them."""

from dataclasses import dataclass
from enum import StrEnum


class HardwareError(Exception):
    """A quantity that nobody may guess (memory) could not be read from any source."""


class LimitSource(StrEnum):
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
    gpu_memory_limit_source: LimitSource = LimitSource.ESTIMATE
    memory_bandwidth_gbps: float | None
    hardware_uuid: str
    hostname: str
    thunderbolt: str | None
    rdma_capable: bool
