"""Facts and readings of a Mac, from the commands of macOS. Parsing is pure; only the `read_` functions run commands.

Tested on captures only, not on a Mac: tests/nodeagent/hardware/captures holds plausible output, modelled on what
owners published, and its README says which parts are assumed. Free memory alone is a poor signal on macOS (exo#976),
because the kernel caches and compresses before it frees: readings carry the kernel's own pressure level.
"""

import json
import logging
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from machinery import macos_commands
from machinery.files import read_text
from nodeagent.hardware import macos_settings, system_text
from nodeagent.hardware.readings import (
    HardwareError,
    HardwareFacts,
    HeatReading,
    MachineReading,
    MemoryPressure,
    MemoryReading,
    PowerSource,
    RebootReading,
)
from nodeagent.hardware.system_text import parse_pairs, parse_positive
from schemas import chips
from schemas.node import MemoryLimitSource, WiredLimit
from schemas.wire import wired_limit

UNKNOWN: Final = "unknown"
MIB: Final = 2**20
RDMA_SINCE: Final = (26, 2)  # Apple TN3205

_UNITS: Final = (("MB", 2**20), ("GB", 2**30), ("TB", 2**40))
# GiB of a Mac, and the percent of them that Metal recommends as working set on macOS 15 and 26, from logs of llama.cpp
# and outputs of mx.device_info(): 8 GB 5726633984 bytes, 16 GB 12713115648, 24 GB 19069665280, 32 GB 26800603136, 48 GB
# 40200896512, 128 GB 115448725504 (antirez/ds4#893), 512 GB 498216.21 MB. Sizes between are taken as the next smaller
# one. macOS 13 recommended 66 % up to 36 GB and 75 % above.
_METAL_PERCENT: Final = ((512, 90), (128, 84), (64, 81), (32, 78), (16, 74), (0, 66))
# What macOS keeps at least, between the 5 GiB that Metal leaves on a 16 GB Mac and the 8 GiB with which such Macs did
# not freeze (osaurus-ai/vmlx-swift#421); the engine wires less still (engine/memory/allocation.py).
_RESERVE_BYTES: Final = 8 * 2**30
_RESERVE_SHARE: Final = (3, 8)  # of a Mac so small that 8 GiB would leave too little for any model


class FactsOutput(NamedTuple):
    """Outputs of commands for facts; "" for each one that failed."""

    sysctl: str = ""
    profiler: str = ""
    sw_vers: str = ""
    ioreg: str = ""
    hostname: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemProfile:
    """The fields of system_profiler; None for a missing one."""

    chip: str | None = None
    machine: str | None = None
    cpu_cores: int | None = None
    gpu_cores: int | None = None
    memory_bytes: int | None = None
    platform_uuid: str | None = None
    metal: str = ""


def parse_profiler(text: str) -> SystemProfile:
    """Parse `system_profiler SPHardwareDataType SPDisplaysDataType -json`.

    Of number_processors only the total is used: the order of the levels after it differs between versions
    ("24:16:8:0" on macOS 26, "12:0:8:4" on 27), and a virtual machine has a plain number.
    """
    try:
        tree: object = json.loads(text)
    except ValueError:
        return SystemProfile()
    hardware = next(iter(_sections(tree, "SPHardwareDataType")), {})
    displays = _sections(tree, "SPDisplaysDataType")
    gpus = [parse_positive(gpu.get("sppci_cores")) for gpu in displays]
    families = [parse_metal(gpu.get("spdisplays_mtlgpufamilysupport", "")) for gpu in displays]
    return SystemProfile(
        chip=hardware.get("chip_type") or hardware.get("cpu_type"),
        machine=hardware.get("machine_model"),
        cpu_cores=parse_positive(hardware.get("number_processors", "").removeprefix("proc ")),
        gpu_cores=max((cores for cores in gpus if cores), default=None),
        memory_bytes=parse_size(hardware.get("physical_memory", "")),
        platform_uuid=hardware.get("platform_UUID"),
        metal=max(families, default=""),
    )


def parse_metal(text: str) -> str:
    """Return "spdisplays_metal4" as "Metal 4"; empty for other texts."""
    match = re.fullmatch(r"spdisplays_metal(\d{1,2})", text, re.ASCII)
    return f"Metal {match[1]}" if match else ""


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
    """Return "128 GB" in bytes."""
    match = re.match(r"(\d+) ?([A-Z]B)", text, re.ASCII)
    return (int(match[1]) * dict(_UNITS).get(match[2], 0) or None) if match else None


def parse_os_version(sw_vers: str) -> str:
    """Return version and build in `sw_vers` as "26.2 (25C56)"."""
    fields = parse_pairs(sw_vers)
    version, build = fields.get("ProductVersion"), fields.get("BuildVersion")
    if not version:
        return UNKNOWN
    return f"{version} ({build})" if build else version


def parse_gpu_cores(ioreg: str) -> int | None:
    """Return the value of "gpu-core-count" = 20 in the I/O registry."""
    match = re.search(r'"gpu-core-count" = (\d+)', ioreg)
    return parse_positive(match[1]) if match else None


def parse_platform_uuid(ioreg: str) -> str | None:
    """Return the value of "IOPlatformUUID" = "6D95..." in the I/O registry."""
    match = re.search(r'"IOPlatformUUID" = "([0-9A-Fa-f-]+)"', ioreg)
    return match[1] if match else None


def macos_reserve(memory_bytes: int) -> int:
    """Return the bytes that are left to macOS unless the owner says otherwise: 8 GiB, or three eighths if that is less.

    An owner leaves more with `reserved.memory` of a NodePool, and less with --memory or the wired limit.
    """
    part, whole = _RESERVE_SHARE
    return min(_RESERVE_BYTES, memory_bytes * part // whole)


def gpu_memory_limit(
    memory_bytes: int, wired_limit_mb: int | None, recommended_bytes: int = 0
) -> tuple[int, MemoryLimitSource]:
    """Return the memory for models in bytes, and the origin of that limit.

    A wired limit that was set counts as it is. Otherwise it is the working set that Metal recommends
    (`recommended_bytes`; 0 before Metal was asked: the usual share), as far as the reserve for macOS leaves it.
    """
    if wired_limit_mb:
        return min(wired_limit_mb * MIB, memory_bytes), MemoryLimitSource.WIRED_LIMIT
    most_bytes = memory_bytes - macos_reserve(memory_bytes)
    if recommended_bytes:
        return min(recommended_bytes, most_bytes), MemoryLimitSource.METAL
    percent = next(share for size, share in _METAL_PERCENT if memory_bytes >= size << 30)
    return min(memory_bytes * percent // 100, most_bytes), MemoryLimitSource.ESTIMATE


def smallest_mac(need_bytes: int) -> int:
    """Return the memory in GiB of the smallest Mac ever sold whose usual limit for models holds the bytes; 0 if none."""
    fitting = (
        size for size in chips.MEMORY_GIB if gpu_memory_limit(size << 30, None)[0] >= need_bytes
    )
    return next(fitting, 0)


def assemble_facts(seen: FactsOutput) -> HardwareFacts:
    """Return the facts, each from the best source that answered.

    Raises:
        HardwareError: no source has the memory.

    """
    profile = parse_profiler(seen.profiler)
    sysctl = parse_pairs(seen.sysctl)
    memory_bytes = parse_positive(sysctl.get("hw.memsize")) or profile.memory_bytes
    if memory_bytes is None:
        raise HardwareError(
            "this Mac's memory could not be read: neither `sysctl hw.memsize` nor "
            "`system_profiler SPHardwareDataType` answered. Run both by hand to see why; "
            "the agent does not guess, because models would be placed by the guess."
        )
    name = sysctl.get("machdep.cpu.brand_string") or profile.chip or UNKNOWN
    gpu_cores = profile.gpu_cores or parse_gpu_cores(seen.ioreg)
    chip = chips.find_chip(name, gpu_cores=gpu_cores, memory_bytes=memory_bytes)
    os_version = parse_os_version(seen.sw_vers)
    limit_bytes, limit_source = gpu_memory_limit(
        memory_bytes, parse_positive(sysctl.get(wired_limit.SYSCTL))
    )
    return HardwareFacts(
        chip=name,
        machine=sysctl.get("hw.model") or profile.machine or UNKNOWN,
        os="macOS",
        os_version=os_version,
        cpu_cores=parse_positive(sysctl.get("hw.ncpu"))
        or profile.cpu_cores
        or _smallest_or_one(chip.cpu_cores if chip else ()),
        performance_cores=parse_positive(sysctl.get("hw.perflevel0.physicalcpu")),
        gpu_cores=gpu_cores or _smallest_or_one(chip.gpu_cores if chip else ()),
        memory_bytes=memory_bytes,
        gpu_memory_limit_bytes=limit_bytes,
        gpu_memory_limit_source=limit_source,
        memory_bandwidth_gbps=chip.bandwidth_gbps if chip else None,
        hardware_uuid=profile.platform_uuid or parse_platform_uuid(seen.ioreg) or "",
        hostname=seen.hostname.strip(),
        metal=profile.metal,
        thunderbolt=chip.thunderbolt if chip else None,
    )


def _smallest_or_one(options: tuple[int, ...]) -> int:
    return min(options, default=1)  # every chip has at least one


async def capture_facts() -> FactsOutput:
    """Run the commands concurrently, each with its own timeout; a failed one leaves its text empty."""
    commands = (
        macos_commands.FACTS_SYSCTL,
        macos_commands.HARDWARE,
        macos_commands.VERSION,
        # A second source for the two values that only system_profiler would have.
        macos_commands.GPU_REGISTRY,
        macos_commands.BOARD_REGISTRY,
        # gethostname() follows DHCP; the name chosen by the owner does not.
        macos_commands.LOCAL_NAME,
    )
    texts = await system_text.command_texts(commands, log_level=logging.WARNING)
    sysctl, profiler, sw_vers, gpu, board, name = texts
    return FactsOutput(sysctl, profiler, sw_vers, f"{gpu}\n{board}", name or socket.gethostname())


async def read_facts() -> HardwareFacts:
    """Return the facts of this Mac.

    Raises:
        HardwareError: its memory cannot be read.

    """
    return assemble_facts(await capture_facts())


PRESSURE_SYSCTL: Final = "kern.memorystatus_vm_pressure_level"


@dataclass(frozen=True, slots=True, kw_only=True)
class MacMemory:
    """A Mac's memory at one moment."""

    free_bytes: int  # free now, with speculative reads
    inactive_bytes: int  # not used lately: reclaimable, in part only by compression or swapping
    wired_bytes: int  # never reclaimable; a killed engine may leave some until a reboot
    pressure: MemoryPressure


def parse_mac_memory(vm_stat: str, sysctl: str) -> MacMemory | None:
    """Parse `vm_stat` and `sysctl kern.memorystatus_vm_pressure_level`; None if vm_stat failed.

    The page size is part of the output: 16384 on Apple silicon, 4096 on Intel and under Rosetta.
    """
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    fields = parse_pairs(vm_stat)
    if page is None or "Pages free" not in fields:
        return None

    def pages(*names: str) -> int:
        return sum(parse_positive(fields.get(name)) or 0 for name in names) * int(page[1])

    return MacMemory(
        free_bytes=pages("Pages free", "Pages speculative"),
        inactive_bytes=pages("Pages inactive"),
        wired_bytes=pages("Pages wired down"),
        pressure=parse_pressure(sysctl),
    )


def parse_pressure(sysctl: str) -> MemoryPressure:
    """Return the pressure level; a missing or unknown one counts as a warning."""
    level = parse_positive(parse_pairs(sysctl).get(PRESSURE_SYSCTL))
    return next((known for known in MemoryPressure if known == level), MemoryPressure.WARNING)


MEMORY_SYSCTL: Final = "hw.memsize"
# Levels of Darwin, readable without root: 0 nominal, 1 moderate, 2 heavy, 3 trapping, 4 sleeping. `pmset -g therm` says
# little on Apple silicon. The kernel throttles permanently from "heavy" on; the "fair" of ProcessInfo hides that.
THERMAL_NAME: Final = "com.apple.system.thermalpressurelevel"
_THERMAL_LEVELS: Final = {2: "heavy", 3: "trapping", 4: "sleeping"}


class ReadingOutput(NamedTuple):
    """Outputs of commands for a reading; "" for each one that failed or timed out."""

    vm_stat: str = ""
    sysctl: str = ""
    thermal_level: str = ""
    therm: str = ""
    batt: str = ""
    hid: str = ""
    assertions: str = ""
    camera: str = ""
    lid: str = ""
    wired_job: str = ""
    """The property list of the job that sets the wired limit at boot; "" if there is none."""


def parse_wired_limit(sysctl: str, job: str) -> WiredLimit | None:
    """Return the limit in `sysctl iogpu.wired_limit_mb`, and what set it; None if this Mac has none.

    The job's command has the value that it sets. What set another value is not recorded anywhere.
    """
    text = parse_pairs(sysctl).get(wired_limit.SYSCTL, "")
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        return None
    limit = int(text)
    planned = re.search(rf"{re.escape(wired_limit.SYSCTL)}=(\d{{1,9}})\b", job, re.ASCII)
    if limit == 0:
        return WiredLimit(mebibytes=0, set_by="Default")
    is_ours = planned is not None and int(planned[1]) == limit
    return WiredLimit(mebibytes=limit, set_by="Service" if is_ours else "Other")


def parse_thermal_level(printed: str) -> int | None:
    """Return the level in the output of `notifyutil -g`, the name and a number; None if there is none."""
    match = re.search(rf"{re.escape(THERMAL_NAME)}\s+(\d+)", printed, re.ASCII)
    return min(int(match[1][:3]), 4) if match else None


def parse_heat(thermal_level: str, therm: str) -> HeatReading | None:
    """Parse `notifyutil -g` of the thermal level and `pmset -g therm`; None if both are empty."""
    if not thermal_level.strip() and not therm.strip():
        return None
    word = _THERMAL_LEVELS.get(parse_thermal_level(thermal_level) or 0, "")
    limit = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", therm, re.ASCII)
    if word:
        return HeatReading(throttled=f"macOS reports the thermal level {word}")
    if limit and int(limit[1][:4]) < 100:
        return HeatReading(throttled=f"macOS holds the processor at {limit[1][:4]} % of its speed")
    return HeatReading()


def parse_power(batt: str) -> PowerSource:
    """Parse the first line of `pmset -g batt`. A UPS counts as a battery: it runs out, too."""
    match = re.search(r"[Nn]ow drawing from '([^']*)'", batt)
    if match is None:
        return "Unknown"
    return "Mains" if match[1].startswith("AC") else "Battery"


def parse_idle_s(hid: str) -> float | None:
    """Return HIDIdleTime of `ioreg -c IOHIDSystem` in seconds; None if it is missing."""
    match = re.search(r'"HIDIdleTime" = (\d{1,19})\b', hid, re.ASCII)
    return int(match[1]) / 1e9 if match else None


def parse_meeting(assertions: str, camera: str) -> bool | None:
    """Return whether a program uses a microphone or a camera; None if both outputs are empty.

    `assertions` is `pmset -g assertions`: coreaudiod holds one with the resource audio-in for each program that records,
    and cameracaptured one for a camera. `camera` is `ioreg -r -k FrontCameraStreaming`, for the camera of the Mac itself.
    """
    if not assertions.strip() and not camera.strip():
        return None
    holder = ""
    for line in assertions.splitlines():
        match = re.match(r"\s*pid \d{1,9}\(([^)]{1,64})\): ", line, re.ASCII)
        holder = match[1] if match else holder
        is_microphone = holder == "coreaudiod" and re.match(r"\s*Resources:.*\baudio-in\b", line)
        if is_microphone or (match and holder == "cameracaptured"):
            return True
    return '"FrontCameraStreaming" = Yes' in camera


def parse_lid_shut(registry: str) -> bool | None:
    """Return whether the lid is shut and macOS would sleep for it, in `ioreg -r -k AppleClamshellState`; None without a lid.

    A shut lid does not make a Mac sleep that has an external display and mains power: AppleClamshellCausesSleep is No.
    """
    words = dict(re.findall(r'"(AppleClamshell\w+)" = (Yes|No)\b', registry))
    if "AppleClamshellState" not in words:
        return None
    return "No" not in (words["AppleClamshellState"], words.get("AppleClamshellCausesSleep"))


def assemble_reading(printed: ReadingOutput) -> MachineReading:
    """Return a reading from the outputs, without the disk."""
    mac_memory = parse_mac_memory(printed.vm_stat, printed.sysctl)
    total = parse_positive(parse_pairs(printed.sysctl).get(MEMORY_SYSCTL))
    memory = reboot = None
    if mac_memory is not None and total is not None:
        available = mac_memory.free_bytes + mac_memory.inactive_bytes
        memory = MemoryReading(
            total_bytes=total, available_bytes=available, level=mac_memory.pressure
        )
        reboot = RebootReading(total_bytes=total, wired_bytes=mac_memory.wired_bytes)
    return MachineReading(
        memory=memory,
        heat=parse_heat(printed.thermal_level, printed.therm),
        reboot=reboot,
        power=parse_power(printed.batt),
        owner_idle_s=parse_idle_s(printed.hid),
        is_in_meeting=parse_meeting(printed.assertions, printed.camera),
        is_lid_shut=parse_lid_shut(printed.lid),
        wired_limit=parse_wired_limit(printed.sysctl, printed.wired_job),
    )


async def read_reading() -> MachineReading:
    """Run the commands concurrently, each with its own timeout; a failed one leaves its part unknown."""
    commands = (
        macos_commands.VM_STAT,
        macos_commands.MEMORY_SYSCTL,
        macos_commands.THERMAL_LEVEL,
        macos_commands.THERM,
        macos_commands.BATTERY,
        macos_commands.HID_REGISTRY,
        macos_commands.ASSERTIONS,
        macos_commands.CAMERA_REGISTRY,
        macos_commands.LID_REGISTRY,
    )
    texts = await system_text.command_texts(commands)
    job = read_text(Path(wired_limit.JOB_FILE))
    return assemble_reading(ReadingOutput(*texts)._replace(wired_job=job))


async def read_wakes_on_lan() -> bool | None:
    """Return whether a magic packet wakes this Mac; None if it cannot be read."""
    (text,) = await system_text.command_texts([macos_commands.POWER_SETTINGS])
    return macos_settings.parse_wakes_on_lan(text)
