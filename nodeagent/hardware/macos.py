"""What a Mac is, from the commands that macOS ships. Parsing is pure; only `capture` touches the machine.

These readers have never run on a Mac, only against the captures in tests/nodeagent/captures: plausible output,
modelled on what owners published. The README there says which parts are assumed.
"""

import asyncio
import json
import re
import socket
from dataclasses import dataclass
from typing import Final

from nodeagent.hardware import command
from nodeagent.hardware.facts import HardwareError, HardwareFacts, LimitSource
from nodeagent.hardware.parsing import pairs, positive
from schemas import chips

UNKNOWN: Final = "unknown"
MIB: Final = 2**20
RDMA_SINCE: Final = (26, 2)  # Apple TN3205

_UNITS: Final = (("MB", 2**20), ("GB", 2**30), ("TB", 2**40))
# LLMKube plans with the same boundary: two thirds up to 36 GB, three quarters above.
_SMALL_MAC_BYTES: Final = 36 * 2**30
_SYSCTLS: Final = (
    "machdep.cpu.brand_string",
    "hw.memsize",
    "hw.ncpu",
    "hw.perflevel0.physicalcpu",
    "hw.model",
    "iogpu.wired_limit_mb",
)
_QUICK_S: Final = 5.0
_PROFILER_S: Final = 20.0  # system_profiler takes seconds when it is cold


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What the commands printed; "" for each one that could not be run."""

    sysctl: str = ""
    profiler: str = ""
    sw_vers: str = ""
    ioreg: str = ""
    hostname: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What system_profiler says, as far as it says it."""

    chip: str | None = None
    machine: str | None = None
    cpu_cores: int | None = None
    gpu_cores: int | None = None
    memory_bytes: int | None = None
    platform_uuid: str | None = None


def parse_profiler(text: str) -> Profile:
    """Read `system_profiler SPHardwareDataType SPDisplaysDataType -json`.

    Of number_processors only the total counts: the order of the levels after it differs between versions
    ("24:16:8:0" on macOS 26, "12:0:8:4" on 27), and a virtual machine has a plain number.
    """
    try:
        tree: object = json.loads(text)
    except ValueError:
        return Profile()
    hardware = next(iter(_sections(tree, "SPHardwareDataType")), {})
    gpus = [positive(gpu.get("sppci_cores")) for gpu in _sections(tree, "SPDisplaysDataType")]
    return Profile(
        chip=hardware.get("chip_type") or hardware.get("cpu_type"),
        machine=hardware.get("machine_model"),
        cpu_cores=positive(hardware.get("number_processors", "").removeprefix("proc ")),
        gpu_cores=max((cores for cores in gpus if cores), default=None),
        memory_bytes=parse_size(hardware.get("physical_memory", "")),
        platform_uuid=hardware.get("platform_UUID"),
    )


def _sections(tree: object, name: str) -> list[dict[str, str]]:
    found = tree.get(name) if isinstance(tree, dict) else None
    if not isinstance(found, list):
        return []
    return [
        {str(key): str(value) for key, value in entry.items() if isinstance(value, str | int)}
        for entry in found
        if isinstance(entry, dict)
    ]


def parse_size(text: str) -> int | None:
    """Read "128 GB" as bytes."""
    match = re.match(r"(\d+) ?([A-Z]B)", text, re.ASCII)
    return (int(match[1]) * dict(_UNITS).get(match[2], 0) or None) if match else None


def parse_os_version(sw_vers: str) -> str:
    """Read `sw_vers` as "26.2 (25C56)"."""
    said = pairs(sw_vers)
    version, build = said.get("ProductVersion"), said.get("BuildVersion")
    if not version:
        return UNKNOWN
    return f"{version} ({build})" if build else version


def parse_gpu_cores(ioreg: str) -> int | None:
    """Read "gpu-core-count" = 20 from the I/O registry."""
    match = re.search(r'"gpu-core-count" = (\d+)', ioreg)
    return positive(match[1]) if match else None


def parse_platform_uuid(ioreg: str) -> str | None:
    """Read "IOPlatformUUID" = "6D95..." from the I/O registry."""
    match = re.search(r'"IOPlatformUUID" = "([0-9A-Fa-f-]+)"', ioreg)
    return match[1] if match else None


def gpu_memory_limit(memory_bytes: int, wired_limit_mb: int | None) -> tuple[int, LimitSource]:
    """Return what models may use, and by whom that was decided. A limit beyond the memory is capped."""
    if wired_limit_mb:
        return min(wired_limit_mb * MIB, memory_bytes), LimitSource.WIRED_LIMIT
    percent = 66 if memory_bytes <= _SMALL_MAC_BYTES else 75
    return memory_bytes * percent // 100, LimitSource.ESTIMATE


def supports_rdma(os_version: str) -> bool:
    """Say whether this macOS has RDMA over Thunderbolt; one that could not be read has not."""
    match = re.match(r"(\d+)(?:\.(\d+))?", os_version, re.ASCII)
    return match is not None and (int(match[1]), int(match[2] or 0)) >= RDMA_SINCE


def assemble(seen: Captured) -> HardwareFacts:
    """Make the facts, each from its best source that answered. Only memory has no last resort."""
    profile = parse_profiler(seen.profiler)
    sysctl = pairs(seen.sysctl)
    memory_bytes = positive(sysctl.get("hw.memsize")) or profile.memory_bytes
    if memory_bytes is None:
        raise HardwareError(
            "this Mac's memory could not be read: neither `sysctl hw.memsize` nor "
            "`system_profiler SPHardwareDataType` answered. Run both by hand to see why; "
            "the agent does not guess, because models would be placed by the guess."
        )
    name = sysctl.get("machdep.cpu.brand_string") or profile.chip or UNKNOWN
    gpu_cores = profile.gpu_cores or parse_gpu_cores(seen.ioreg)
    chip = chips.find(name, gpu_cores=gpu_cores, memory_bytes=memory_bytes)
    os_version = parse_os_version(seen.sw_vers)
    limit_bytes, limit_source = gpu_memory_limit(
        memory_bytes, positive(sysctl.get("iogpu.wired_limit_mb"))
    )
    return HardwareFacts(
        chip=name,
        machine=sysctl.get("hw.model") or profile.machine or UNKNOWN,
        os="macOS",
        os_version=os_version,
        cpu_cores=positive(sysctl.get("hw.ncpu"))
        or profile.cpu_cores
        or _smallest(chip.cpu_cores if chip else ()),
        performance_cores=positive(sysctl.get("hw.perflevel0.physicalcpu")),
        gpu_cores=gpu_cores or _smallest(chip.gpu_cores if chip else ()),
        memory_bytes=memory_bytes,
        gpu_memory_limit_bytes=limit_bytes,
        gpu_memory_limit_source=limit_source,
        memory_bandwidth_gbps=chip.bandwidth_gbps if chip else None,
        hardware_uuid=profile.platform_uuid or parse_platform_uuid(seen.ioreg) or "",
        hostname=seen.hostname.strip(),
        thunderbolt=chip.thunderbolt if chip else None,
        rdma_capable=chip is not None and chip.rdma_capable and supports_rdma(os_version),
    )


def _smallest(options: tuple[int, ...]) -> int:
    return min(options, default=1)  # there is at least one, whatever this chip is


async def capture() -> Captured:
    """Run the commands, all at once, each within its own time. One that fails leaves its text empty."""
    async with asyncio.TaskGroup() as group:
        sysctl = group.create_task(
            command.output(("/usr/sbin/sysctl", *_SYSCTLS), timeout_s=_QUICK_S)
        )
        profiler = group.create_task(
            command.output(
                ("/usr/sbin/system_profiler", "SPHardwareDataType", "SPDisplaysDataType", "-json"),
                timeout_s=_PROFILER_S,
            )
        )
        sw_vers = group.create_task(command.output(("/usr/bin/sw_vers",), timeout_s=_QUICK_S))
        # A second source for the two that would otherwise hang on system_profiler alone.
        gpu, board = (
            group.create_task(
                command.output(("/usr/sbin/ioreg", "-rd1", "-c", entry), timeout_s=_QUICK_S)
            )
            for entry in ("AGXAccelerator", "IOPlatformExpertDevice")
        )
        # gethostname() follows DHCP; the name the owner chose does not.
        local_name = group.create_task(
            command.output(("/usr/sbin/scutil", "--get", "LocalHostName"), timeout_s=_QUICK_S)
        )
    return Captured(
        sysctl=sysctl.result() or "",
        profiler=profiler.result() or "",
        sw_vers=sw_vers.result() or "",
        ioreg=f"{gpu.result() or ''}\n{board.result() or ''}",
        hostname=local_name.result() or socket.gethostname(),
    )


async def read() -> HardwareFacts:
    """Return what this Mac is."""
    return assemble(await capture())
