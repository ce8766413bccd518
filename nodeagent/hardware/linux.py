"""What a Linux machine is, from /proc, /sys and /etc. Parsing is pure; `read` takes the root for tests.

Linux is where the developer's fleet and the tests run, on MLX's CPU backend: there is no GPU to find.

How a Linux machine is now, from /proc, /sys and /run. Parsing is pure; `read` takes the root for tests.

Which addresses a Linux machine has. There is no RDMA that MLX knows there, so nothing else is looked at.
"""

import os
import platform
import re
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Protocol

import psutil

from nodeagent.hardware.readings import (
    HardwareError,
    HardwareFacts,
    HeatReading,
    MachineReading,
    MemoryLimitSource,
    MemoryReading,
    PowerSource,
    RebootReading,
)
from nodeagent.hardware.system_text import parse_pairs, parse_positive, read_text
from schemas.node import FabricInterface, NodeFabric

ROOT: Final = Path("/")
KIB: Final = 1024
MODEL_SHARE_PERCENT: Final = 75  # of the memory; the rest is the system's and the agent's


def parse_meminfo(text: str, field: str) -> int | None:
    """Read a field of /proc/meminfo ("MemTotal: 24682416 kB") as bytes; None if it is not there."""
    value = parse_pairs(text).get(field)
    if value is None or not value.split()[:1]:
        return None
    kib = value.split()[0]
    return int(kib) * KIB if kib.isdecimal() else None


def parse_cpu_name(cpuinfo: str) -> str | None:
    """Read the processor's name. Most ARM kernels give none; a board computer gives its own ("Model")."""
    said = parse_pairs(cpuinfo)
    return said.get("model name") or said.get("Model") or said.get("Hardware")


def count_cores(cpuinfo: str) -> int:
    """Count the processors the kernel runs."""
    return sum(line.partition(":")[0].strip() == "processor" for line in cpuinfo.splitlines())


def parse_os_release(text: str) -> str:
    """Read the distribution and its version ("Debian GNU/Linux 12 (bookworm)")."""
    said = {key: value.strip("\"'") for key, value in parse_pairs(text, separator="=").items()}
    named = " ".join(filter(None, (said.get("NAME"), said.get("VERSION_ID"))))
    return said.get("PRETTY_NAME") or named or "unknown"


def parse_machine_id(text: str) -> str:
    """Read /etc/machine-id as a UUID; "" for an empty one, or "uninitialized" in an image's first boot."""
    try:
        return str(uuid.UUID(hex=text.strip()))
    except ValueError:
        return ""


def cgroup_folders(text: str) -> tuple[PurePosixPath, ...]:
    """List where the limits of this process stand below /sys/fs/cgroup, from /proc/self/cgroup.

    Every ancestor binds too. A container often sees only its own group mounted as the root while the path still
    names the host's, so folders that do not exist are for the caller to skip.
    """
    folders: list[PurePosixPath] = []
    for line in text.splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        is_unified = number == "0" and not controllers
        if not is_unified and "memory" not in controllers.split(","):
            continue
        mount = PurePosixPath("." if is_unified else "memory")
        below = PurePosixPath(path.lstrip("/"))
        if ".." in below.parts:  # a group outside of our namespace: its root is all we can see
            below = PurePosixPath()
        folders += [mount / below, *(mount / parent for parent in below.parents)]
    return tuple(dict.fromkeys(folders))


def parse_limit(text: str) -> int | None:
    """Read memory.max, or version 1's memory.limit_in_bytes. "max" is no limit."""
    value = text.strip()
    return int(value) if value.isdecimal() else None


def read_facts(root: Path = ROOT) -> HardwareFacts:
    """Return what this machine is."""
    cpuinfo, machine = read_text(root / "proc/cpuinfo"), platform.machine() or "unknown"
    total = parse_meminfo(read_text(root / "proc/meminfo"), "MemTotal")
    if not total:
        raise HardwareError(
            f"this machine's memory could not be read: {root / 'proc/meminfo'} has no MemTotal. "
            "Is /proc mounted where the agent runs? It does not guess, because models would be "
            "placed by the guess."
        )
    limit = _cgroup_limit(root)
    is_limited = limit is not None and limit < total
    memory_bytes = min(total, limit or total)
    return HardwareFacts(
        chip=parse_cpu_name(cpuinfo) or machine,
        machine=machine,
        os="Linux",
        os_version=parse_os_release(read_text(root / "etc/os-release")),
        cpu_cores=count_cores(cpuinfo) or os.cpu_count() or 1,
        performance_cores=None,
        gpu_cores=0,
        memory_bytes=memory_bytes,
        gpu_memory_limit_bytes=memory_bytes * MODEL_SHARE_PERCENT // 100,
        gpu_memory_limit_source=MemoryLimitSource.CGROUP
        if is_limited
        else MemoryLimitSource.ESTIMATE,
        memory_bandwidth_gbps=None,
        hardware_uuid=parse_machine_id(read_text(root / "etc/machine-id")),
        hostname=read_text(root / "proc/sys/kernel/hostname").strip(),
        thunderbolt=None,
        rdma_capable=False,
    )


def memory_bytes(root: Path = ROOT) -> int | None:
    """Return the installed memory, or the tightest cgroup's if that is less; None if /proc does not say."""
    total = parse_meminfo(read_text(root / "proc/meminfo"), "MemTotal")
    return total and min(total, _cgroup_limit(root) or total)


def available_memory_bytes(root: Path = ROOT) -> int | None:
    """Return MemAvailable, or what the tightest cgroup leaves if that is less; None if /proc does not say."""
    machine = parse_meminfo(read_text(root / "proc/meminfo"), "MemAvailable")
    if machine is None:
        return None
    return min([machine, *_cgroup_free_bytes(root)])


def _cgroup_limit(root: Path) -> int | None:
    limits = [limit for limit, _ in _cgroups(root)]
    return min(limits, default=None)


def _cgroup_free_bytes(root: Path) -> list[int]:
    """List what each limited group has left. Page cache that is not in use counts as left, as in MemAvailable."""
    rooms: list[int] = []
    for limit, folder in _cgroups(root):
        used = parse_limit(_first_text(folder, "memory.current", "memory.usage_in_bytes"))
        if used is None:
            continue
        stat = parse_pairs(read_text(folder / "memory.stat"), separator=" ")
        cache = parse_positive(stat.get("total_inactive_file") or stat.get("inactive_file")) or 0
        rooms.append(max(0, limit - max(0, used - cache)))
    return rooms


def _cgroups(root: Path) -> list[tuple[int, Path]]:
    found: list[tuple[int, Path]] = []
    for below in cgroup_folders(read_text(root / "proc/self/cgroup")):
        folder = root / "sys/fs/cgroup" / below
        limit = parse_limit(_first_text(folder, "memory.max", "memory.limit_in_bytes"))
        if limit:
            found.append((limit, folder))
    return found


def _first_text(folder: Path, *names: str) -> str:
    return next(filter(None, (read_text(folder / name) for name in names)), "")


# Where the kernel itself acts against heat; at "active" it only turns on a fan.
_THROTTLING_TRIPS: Final = ("passive", "hot", "critical")
_MAINS_TYPES: Final = ("Mains", "USB", "Wireless")


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSupply:
    """One entry of /sys/class/power_supply."""

    type: str
    is_online: bool
    status: str
    scope: str


def parse_stalled(pressure: str) -> float:
    """Read the share of the last minute from /proc/pressure/memory ("full avg10=0.00 avg60=1.25 ..."), in percent.

    "full" is the time in which nothing at all went on; "some" is common on a busy machine that is well.
    """
    match = re.search(r"^full .*?\bavg60=(\d+(?:\.\d+)?)", pressure, re.ASCII | re.MULTILINE)
    return float(match[1]) if match else 0.0


def parse_power(supplies: list[PowerSupply]) -> PowerSource:
    """Say what the machine runs on. A machine without a battery of its own runs on mains."""
    # A mouse has a battery, too; its scope is "Device".
    own = [supply for supply in supplies if supply.scope != "Device"]
    if any(supply.is_online for supply in own if supply.type in _MAINS_TYPES):
        return "Mains"
    batteries = [supply for supply in own if supply.type == "Battery"]
    if not batteries:
        return "Mains"
    # Some laptops have no entry for the plug, but their battery knows.
    return "Battery" if any(supply.status == "Discharging" for supply in batteries) else "Mains"


def parse_celsius(text: str) -> float | None:
    """Read a temperature of /sys/class/thermal ("45000" is 45); None for what no sensor would say."""
    match = re.fullmatch(r"-?\d{1,6}", text.strip(), re.ASCII)
    degrees = int(match[0]) / 1000 if match else 0.0
    # Broken sensors say 0, or far below zero.
    return degrees if 0.0 < degrees < 200.0 else None


def read_reading(root: Path = ROOT) -> MachineReading:
    """Return how this machine is, without its disk. Nobody sits at a Linux machine of the fleet."""
    return MachineReading(
        memory=read_memory(root),
        heat=read_heat(root),
        reboot=read_reboot(root),
        power=_read_power(root),
    )


def read_memory(root: Path) -> MemoryReading | None:
    """Return the memory: of the machine, or of the cgroup that binds."""
    total = memory_bytes(root)
    available = available_memory_bytes(root)
    if total is None or available is None:
        return None
    # A kernel without PSI has no such file.
    stalled = parse_stalled(read_text(root / "proc/pressure/memory"))
    return MemoryReading(total_bytes=total, available_bytes=available, stalled_percent=stalled)


def read_heat(root: Path) -> HeatReading:
    """Return the sensor that is nearest to where the kernel acts, and how often cores were slowed down."""
    zones = [
        found
        for zone in _glob(root / "sys/class/thermal", "thermal_zone*")
        for found in _read_zone(zone)
    ]
    counters = [
        read_text(path)
        for name in ("core_throttle_count", "package_throttle_count")
        for path in _glob(root / "sys/devices/system/cpu", f"cpu[0-9]*/thermal_throttle/{name}")
    ]
    count = sum(parse_positive(counter) or 0 for counter in counters)
    if not zones:
        return HeatReading(has_sensor=bool(counters), throttle_count=count)
    limit, degrees, name = max(zones, key=lambda zone: zone[1] - zone[0])
    return HeatReading(throttle_count=count, hottest=name, celsius=degrees, limit_celsius=limit)


def _read_zone(folder: Path) -> list[tuple[float, float, str]]:
    """Return limit, temperature and name of a zone; nothing if it lacks either."""
    degrees = parse_celsius(read_text(folder / "temp"))
    limits = [
        parse_celsius(read_text(kind.with_name(kind.name.replace("_type", "_temp"))))
        for kind in _glob(folder, "trip_point_*_type")
        if read_text(kind).strip() in _THROTTLING_TRIPS
    ]
    lowest = min((limit for limit in limits if limit is not None), default=None)
    if degrees is None or lowest is None:
        return []
    return [(lowest, degrees, read_text(folder / "type").strip() or folder.name)]


def read_reboot(root: Path) -> RebootReading:
    """Return what Debian and Ubuntu leave in /run when an update waits for a restart."""
    if not (root / "run/reboot-required").exists():
        return RebootReading()
    packages = read_text(root / "run/reboot-required.pkgs").split()
    return RebootReading(wanted_by=", ".join(sorted(set(packages))[:5]) or "an update")


def _read_power(root: Path) -> PowerSource:
    folder = root / "sys/class/power_supply"
    if not folder.is_dir():
        return "Unknown"
    return parse_power([_read_supply(entry) for entry in _glob(folder, "*")])


def _read_supply(entry: Path) -> PowerSupply:
    return PowerSupply(
        type=read_text(entry / "type").strip(),
        is_online=read_text(entry / "online").strip() not in ("", "0"),
        status=read_text(entry / "status").strip(),
        scope=read_text(entry / "scope").strip(),
    )


def _glob(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:  # the folder went away, or is not ours to read: as if it were not there
        return []


_LOOPBACK_PREFIX: Final = "127."
# What the kernel's driver for IP over Thunderbolt calls its interfaces.
_THUNDERBOLT_PREFIX: Final = "thunderbolt"


class InterfaceAddress(Protocol):
    """An address as psutil has it."""

    @property
    def family(self) -> int: ...

    @property
    def address(self) -> str: ...


def parse_interfaces(interfaces: Mapping[str, Sequence[InterfaceAddress]]) -> NodeFabric:
    """Return the IPv4 addresses of every interface but loopback."""
    return NodeFabric(
        interfaces=tuple(
            FabricInterface(
                name=name, address=one.address, is_thunderbolt=name.startswith(_THUNDERBOLT_PREFIX)
            )
            for name in sorted(interfaces)
            for one in interfaces[name]
            if one.family == socket.AF_INET and not one.address.startswith(_LOOPBACK_PREFIX)
        )
    )


def read_fabric() -> NodeFabric:
    """Return how this machine is reached.

    Raises:
        OSError: the system does not say.

    """
    return parse_interfaces(psutil.net_if_addrs())
