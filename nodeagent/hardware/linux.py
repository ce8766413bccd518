"""Facts, readings and addresses of a Linux machine, from /proc, /sys, /run and /etc. Parsing is pure; `root` is for tests.

Developer fleets and tests run on Linux, with MLX's CPU backend: no GPU is looked for. MLX has no RDMA there, so the
fabric is only its addresses.
"""

import os
import platform
import re
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import psutil

from machinery import linux_memory
from machinery.files import read_text
from machinery.linux_memory import ROOT
from nodeagent.hardware.readings import (
    HardwareError,
    HardwareFacts,
    HeatReading,
    MachineReading,
    MemoryReading,
    PowerSource,
    RebootReading,
)
from nodeagent.hardware.system_text import parse_netmask, parse_pairs, parse_positive
from schemas.node import FabricInterface, MemoryLimitSource, NodeFabric
from schemas.power import HARDWARE_ADDRESS


def parse_cpu_name(cpuinfo: str) -> str | None:
    """Return the processor's name. Most ARM kernels give none; a board computer gives its own ("Model")."""
    fields = parse_pairs(cpuinfo)
    return fields.get("model name") or fields.get("Model") or fields.get("Hardware")


def count_cores(cpuinfo: str) -> int:
    """Return the number of processors in /proc/cpuinfo."""
    return sum(line.partition(":")[0].strip() == "processor" for line in cpuinfo.splitlines())


def parse_os_release(text: str) -> str:
    """Return the distribution and its version ("Debian GNU/Linux 12 (bookworm)")."""
    fields = {key: value.strip("\"'") for key, value in parse_pairs(text, separator="=").items()}
    name = " ".join(filter(None, (fields.get("NAME"), fields.get("VERSION_ID"))))
    return fields.get("PRETTY_NAME") or name or "unknown"


def parse_machine_id(text: str) -> str:
    """Return /etc/machine-id as a UUID; "" if it is empty, or "uninitialized" at an image's first boot."""
    try:
        return str(uuid.UUID(hex=text.strip()))
    except ValueError:
        return ""


def read_facts(root: Path = ROOT) -> HardwareFacts:
    """Return the facts of this machine.

    Raises:
        HardwareError: its memory cannot be read.

    """
    cpuinfo, machine = read_text(root / "proc/cpuinfo"), platform.machine() or "unknown"
    total = linux_memory.parse_meminfo(read_text(root / "proc/meminfo"), "MemTotal")
    if not total:
        raise HardwareError(
            f"this machine's memory could not be read: {root / 'proc/meminfo'} has no MemTotal. "
            "Check that /proc is mounted where the agent runs. The agent does not guess, because models would be "
            "placed by the guess."
        )
    limit = linux_memory.cgroup_limit(root)
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
        gpu_memory_limit_bytes=memory_bytes * linux_memory.MODEL_SHARE_PERCENT // 100,
        gpu_memory_limit_source=MemoryLimitSource.CGROUP
        if is_limited
        else MemoryLimitSource.ESTIMATE,
        memory_bandwidth_gbps=None,
        hardware_uuid=parse_machine_id(read_text(root / "etc/machine-id")),
        hostname=read_text(root / "proc/sys/kernel/hostname").strip(),
        thunderbolt=None,
    )


# Trip points at which the kernel slows the machine down; at "active" it only turns on a fan.
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
    """Return the stalled share of the last minute from /proc/pressure/memory ("full avg10=0.00 avg60=1.25 ..."), in percent.

    "full" is the time in which no process could run; "some" is common on a healthy busy machine.
    """
    match = re.search(r"^full .*?\bavg60=(\d+(?:\.\d+)?)", pressure, re.ASCII | re.MULTILINE)
    return float(match[1]) if match else 0.0


def parse_power(supplies: list[PowerSupply]) -> PowerSource:
    """Return the power source. A machine without a battery of its own runs on mains."""
    # A wireless mouse also has a battery; its scope is "Device".
    own = [supply for supply in supplies if supply.scope != "Device"]
    if any(supply.is_online for supply in own if supply.type in _MAINS_TYPES):
        return "Mains"
    batteries = [supply for supply in own if supply.type == "Battery"]
    if not batteries:
        return "Mains"
    # Some laptops have no entry for the plug; then the battery says it.
    return "Battery" if any(supply.status == "Discharging" for supply in batteries) else "Mains"


def parse_celsius(text: str) -> float | None:
    """Return a temperature of /sys/class/thermal in Celsius ("45000" is 45); None for an impossible one."""
    match = re.fullmatch(r"-?\d{1,6}", text.strip(), re.ASCII)
    degrees = int(match[0]) / 1000 if match else 0.0
    # Broken sensors report 0, or far below zero.
    return degrees if 0.0 < degrees < 200.0 else None


def read_reading(root: Path = ROOT) -> MachineReading:
    """Return a reading of this machine without its disk; a Linux machine of a fleet has no user at its keyboard."""
    return MachineReading(
        memory=read_memory(root),
        heat=read_heat(root),
        reboot=read_reboot(root),
        power=_read_power(root),
    )


def read_memory(root: Path) -> MemoryReading | None:
    """Return the memory of the machine, or of the cgroup that limits it."""
    total = linux_memory.memory_bytes(root)
    available = linux_memory.available_memory_bytes(root)
    if total is None or available is None:
        return None
    # A kernel without PSI has no such file.
    stalled = parse_stalled(read_text(root / "proc/pressure/memory"))
    return MemoryReading(total_bytes=total, available_bytes=available, stalled_percent=stalled)


def read_heat(root: Path) -> HeatReading:
    """Return the sensor that is nearest to its trip point, and the count of throttle events."""
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
    """Return [(limit, temperature, name)] of a zone; [] if it has no limit or no temperature."""
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
    """Return the packages that wait for a restart, as Debian and Ubuntu list them in /run."""
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
    except OSError:  # the folder vanished or is not readable: treat it as absent
        return []


_LOOPBACK_PREFIX: Final = "127."
# The kernel's driver for IP over Thunderbolt names its interfaces so.
_THUNDERBOLT_PREFIX: Final = "thunderbolt"
# systemd's names of wireless interfaces (wlp3s0), and the kernel's own (wlan0).
_WIRELESS_PREFIX: Final = "wl"


class InterfaceAddress(Protocol):
    """An address in psutil's form."""

    @property
    def family(self) -> int: ...

    @property
    def address(self) -> str: ...

    @property
    def netmask(self) -> str | None: ...


def parse_interfaces(
    interfaces: Mapping[str, Sequence[InterfaceAddress]], speeds: Mapping[str, int]
) -> NodeFabric:
    """Return the IPv4 addresses of every interface but loopback; `speeds` are megabits a second."""
    return NodeFabric(
        interfaces=tuple(
            FabricInterface(
                name=name,
                address=interface.address,
                is_thunderbolt=name.startswith(_THUNDERBOLT_PREFIX),
                prefix_length=parse_netmask(interface.netmask or ""),
                hardware_address=hardware_address,
                is_wireless=name.startswith(_WIRELESS_PREFIX),
                speed_mbps=speeds.get(name, 0),
            )
            for name in sorted(interfaces)
            for hardware_address in (_hardware_address(interfaces[name]),)
            for interface in interfaces[name]
            if interface.family == socket.AF_INET
            and not interface.address.startswith(_LOOPBACK_PREFIX)
        )
    )


def _hardware_address(addresses: Sequence[InterfaceAddress]) -> str:
    """Return the MAC address of an interface; empty for one without, such as a tunnel."""
    found = (each.address for each in addresses if each.family == psutil.AF_LINK)
    return next((text for text in found if re.fullmatch(HARDWARE_ADDRESS, text)), "")


def read_fabric() -> NodeFabric:
    """Return the addresses of this machine.

    Raises:
        OSError: they cannot be read.

    """
    speeds = {name: one.speed for name, one in psutil.net_if_stats().items()}
    return parse_interfaces(psutil.net_if_addrs(), speeds)
