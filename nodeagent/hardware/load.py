"""Load of the machine: processors, GPU, swap, disk, network, temperature and power, sampled beside the agent's work.

A sample never delays the agent: counters are read in a thread, and commands of macOS have a timeout after which they
are killed. The parsers of macOS' text are pure and tested on text, not on a Mac. None means that the machine or this
agent cannot know a value; `unknown` has the reason.
"""

import asyncio
import logging
import math
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import orjson
import psutil

from machinery import macos_commands
from machinery.clock import Clock
from machinery.linux_memory import ROOT
from machinery.prometheus import Gauge, MetricFamily
from nodeagent.hardware import linux, macos, system_text

PERIOD_S: Final = 10.0
# Older samples are no longer the state of the machine: the sampler hangs, or the Mac slept.
STALE_S: Final = 4 * PERIOD_S
_MAX_LINE: Final = 64 << 10
_LOOPBACKS: Final = ("lo",)
_UTILIZATION: Final = re.compile(r'"Device Utilization %"\s*=\s*(\d{1,3})(?!\d)')
_MAX_WATTS: Final = 10_000.0
_MAX_CELSIUS: Final = 200.0

NO_MACMON: Final = "macmon gave nothing: install it with `brew install macmon`"
NO_GPU_ON_LINUX: Final = "this agent looks for no GPU on Linux"
NO_POWER_ON_LINUX: Final = "this agent reads no power on Linux"
NO_LEVEL_ON_LINUX: Final = "Linux has no such level"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCounters:
    """Numbers since the start of the machine; None where it does not count them."""

    busy_s: float | None = None
    total_s: float | None = None
    """The time of all processors, busy or idle."""
    swap_used_bytes: int | None = None
    disk_read_bytes: int | None = None
    disk_written_bytes: int | None = None
    received_bytes: int | None = None
    """Bytes from the network on all interfaces but loopback."""
    sent_bytes: int | None = None
    uptime_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorReading:
    """Values of sensors and of the GPU; None where they are unknown."""

    gpu_ratio: float | None = None
    cpu_celsius: float | None = None
    gpu_celsius: float | None = None
    cpu_watts: float | None = None
    gpu_watts: float | None = None
    system_watts: float | None = None
    thermal_level: int | None = None
    """0 nominal, 1 moderate, 2 heavy, 3 trapping, 4 sleeping."""
    memory_free_ratio: float | None = None
    """The share of memory that macOS counts as free (`memory_pressure -Q`), without what it would have to compress."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """The reason by field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReading:
    """The load at one moment; rates are means since the sample before it."""

    counters: MachineCounters = MachineCounters()
    sensors: SensorReading = SensorReading()
    cpu_ratio: float | None = None
    disk_read_bytes_per_s: float | None = None
    disk_written_bytes_per_s: float | None = None
    received_bytes_per_s: float | None = None
    sent_bytes_per_s: float | None = None


class Macmon(NamedTuple):
    """One line of `macmon pipe`."""

    gpu_ratio: float | None = None
    cpu_celsius: float | None = None
    gpu_celsius: float | None = None
    cpu_watts: float | None = None
    gpu_watts: float | None = None
    system_watts: float | None = None


def parse_macmon(text: str) -> Macmon:
    """Return the first line of `macmon pipe`, field names of 0.8 and those before it; None for impossible values."""
    try:
        tree = orjson.loads(text[:_MAX_LINE].partition("\n")[0])
    except ValueError:
        return Macmon()
    if not isinstance(tree, dict):
        return Macmon()
    heat = tree.get("temp")
    heat = heat if isinstance(heat, dict) else {}
    active, usage = tree.get("gpu_active_ratio"), tree.get("gpu_usage")
    if active is None and isinstance(usage, list) and len(usage) > 1:
        active = usage[1]
    ratio = _within(active, 1.5)
    return Macmon(
        gpu_ratio=None if ratio is None else min(1.0, ratio),
        # A sensor that cannot be read is 0 there; no Mac is that cold.
        cpu_celsius=_within(heat.get("cpu_temp_avg"), _MAX_CELSIUS) or None,
        gpu_celsius=_within(heat.get("gpu_temp_avg"), _MAX_CELSIUS) or None,
        cpu_watts=_within(tree.get("cpu_power"), _MAX_WATTS),
        gpu_watts=_within(tree.get("gpu_power"), _MAX_WATTS),
        system_watts=_within(tree.get("sys_power"), _MAX_WATTS),
    )


def _within(value: Any, limit: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and 0.0 <= value <= limit else None


def parse_gpu_ratio(ioreg: str) -> float | None:
    """Return the busiest GPU's use, 0 to 1, from `ioreg -r -c IOAccelerator`; None if no GPU reports it."""
    found = [int(percent) for percent in _UTILIZATION.findall(ioreg)]
    return max((percent / 100 for percent in found if percent <= 100), default=None)


def parse_free_ratio(sysctl: str) -> float | None:
    """Return `sysctl kern.memorystatus_level` as a share; it is what `memory_pressure -Q` prints in percent."""
    match = re.search(r"^kern\.memorystatus_level: (\d{1,3})$", sysctl, re.ASCII | re.MULTILINE)
    return int(match[1]) / 100 if match and int(match[1]) <= 100 else None


def mac_sensors(ioreg: str, macmon: str, thermal: str, free: str = "") -> SensorReading:
    """Return the sensors of a Mac from the outputs of four commands; "" stands for one that failed. Pure."""
    seen, level = parse_macmon(macmon), macos.parse_thermal_level(thermal)
    ratio = parse_gpu_ratio(ioreg)
    values = seen._asdict() | {"gpu_ratio": seen.gpu_ratio if ratio is None else ratio}
    unknown = {name: NO_MACMON for name, value in values.items() if value is None}
    if macmon and seen != Macmon():
        unknown = dict.fromkeys(unknown, "macmon does not report it on this Mac")
    if level is None:
        unknown["thermal_level"] = "notifyutil printed no thermal level"
    ratio = parse_free_ratio(free)
    if ratio is None:
        unknown["memory_free_ratio"] = "sysctl printed no kern.memorystatus_level"
    return SensorReading(**values, thermal_level=level, memory_free_ratio=ratio, unknown=unknown)


async def read_mac_sensors() -> SensorReading:
    """Run the four commands concurrently; one that hangs is killed at its timeout and leaves its values unknown."""
    commands = (
        macos_commands.GPU_LOAD,
        macos_commands.MACMON,
        macos_commands.THERMAL_LEVEL,
        macos_commands.MEMORY_FREE,
    )
    return mac_sensors(*await system_text.command_texts(commands))


async def read_linux_sensors() -> SensorReading:
    """Return the temperature nearest to its limit; Linux has the other values for root alone, or not at all."""
    heat = await asyncio.to_thread(linux.read_heat, ROOT)
    gpu, power = NO_GPU_ON_LINUX, NO_POWER_ON_LINUX
    unknown = {
        "gpu_ratio": gpu, "gpu_celsius": gpu, "gpu_watts": gpu, "cpu_watts": power, "system_watts": power,
        "thermal_level": NO_LEVEL_ON_LINUX, "memory_free_ratio": NO_LEVEL_ON_LINUX,
    }  # fmt: skip
    if not heat.hottest:
        unknown["cpu_celsius"] = (
            "this machine has no temperature with a limit in /sys/class/thermal"
        )
    return SensorReading(cpu_celsius=heat.celsius if heat.hottest else None, unknown=unknown)


def read_counters(now_s: float) -> MachineCounters:
    """Return the counters of this machine at a Unix time; blocks for milliseconds."""
    times = psutil.cpu_times()._asdict()
    # Linux counts the time of guests in that of their hosts' processes, too.
    total = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
    idle = times.get("idle", 0.0) + times.get("iowait", 0.0)
    try:
        disk = psutil.disk_io_counters()
    except (OSError, RuntimeError):  # a container without /proc/diskstats
        disk = None
    networks = [
        one
        for name, one in psutil.net_io_counters(pernic=True).items()
        if not name.startswith(_LOOPBACKS)
    ]
    return MachineCounters(
        busy_s=total - idle,
        total_s=total,
        swap_used_bytes=psutil.swap_memory().used,
        disk_read_bytes=None if disk is None else disk.read_bytes,
        disk_written_bytes=None if disk is None else disk.write_bytes,
        received_bytes=sum(network.bytes_recv for network in networks),
        sent_bytes=sum(network.bytes_sent for network in networks),
        uptime_s=max(0.0, now_s - psutil.boot_time()),
    )


def rate(before: float | None, after: float | None, elapsed: float | None) -> float | None:
    """Return the growth for each unit of `elapsed`; None if it is unknown, or the counter started anew."""
    if before is None or after is None or not elapsed or elapsed < 0 or after < before:
        return None
    return (after - before) / elapsed


def compare(
    before: MachineCounters, after: MachineCounters, elapsed_s: float, sensors: SensorReading
) -> LoadReading:
    """Return the load between two readings of the counters. Pure."""
    total_s = (
        None if before.total_s is None or after.total_s is None else after.total_s - before.total_s
    )
    busy = rate(before.busy_s, after.busy_s, total_s)
    return LoadReading(
        counters=after,
        sensors=sensors,
        cpu_ratio=None if busy is None else min(1.0, busy),
        disk_read_bytes_per_s=rate(before.disk_read_bytes, after.disk_read_bytes, elapsed_s),
        disk_written_bytes_per_s=rate(
            before.disk_written_bytes, after.disk_written_bytes, elapsed_s
        ),
        received_bytes_per_s=rate(before.received_bytes, after.received_bytes, elapsed_s),
        sent_bytes_per_s=rate(before.sent_bytes, after.sent_bytes, elapsed_s),
    )


ReadSensors: TypeAlias = Callable[[], Awaitable[SensorReading]]


class LoadSampler:
    """The load of one machine, sampled every ten seconds. Run `run()` in a task group; a metric family as well."""

    def __init__(
        self,
        clock: Clock,
        sensors: ReadSensors = read_mac_sensors if sys.platform == "darwin" else read_linux_sensors,
    ) -> None:
        self._clock, self._sensors = clock, sensors
        self._latest: LoadReading | None = None
        self._sampled_at = 0.0

    async def run(self) -> None:
        """Sample until cancelled."""
        before, counted_at = MachineCounters(), self._clock.monotonic()
        while True:
            try:
                sensors = await self._sensors()
                unix_s = self._clock.now().timestamp()
                after = await asyncio.to_thread(read_counters, unix_s)
                now = self._clock.monotonic()
                self._latest = compare(before, after, now - counted_at, sensors)
                before, counted_at, self._sampled_at = after, now, now
            except (OSError, RuntimeError, ValueError, psutil.Error) as error:
                log.warning("load not sampled", extra={"why": str(error)})
            await self._clock.sleep(PERIOD_S)

    def latest(self) -> LoadReading:
        """Return the latest sample; everything is unknown if there is none, or it is too old."""
        if self._latest is None or self._clock.monotonic() - self._sampled_at > STALE_S:
            return LoadReading()
        return self._latest

    def lines(self) -> Iterator[str]:
        """Yield `fleet_node_*` in Prometheus' text format; a family whose value is unknown is left out."""
        for family in node_families(self.latest()):
            yield from family.lines()


def node_families(load: LoadReading) -> Iterator[MetricFamily]:
    """Yield the metrics of a machine whose values are known."""
    reading, now = load.sensors, load.counters
    yield from _gauge("cpu_usage_ratio", "Busy share of all processors.", load.cpu_ratio)
    yield from _gauge("gpu_usage_ratio", "Busy share of the GPU.", reading.gpu_ratio)
    heat = {"cpu": reading.cpu_celsius, "gpu": reading.gpu_celsius}
    yield from _by("temperature_celsius", "Temperature by sensor.", "sensor", heat)
    power = {"cpu": reading.cpu_watts, "gpu": reading.gpu_watts, "system": reading.system_watts}
    yield from _by("power_watts", "Power by part; system is the whole Mac.", "part", power)
    level = "Thermal level of macOS: 0 nominal, 1 moderate, 2 heavy, 3 trapping, 4 sleeping."
    yield from _gauge("thermal_level", level, reading.thermal_level)
    free = "Share of memory that macOS counts as free, as memory_pressure -Q."
    yield from _gauge("memory_free_ratio", free, reading.memory_free_ratio)
    yield from _gauge("swap_used_bytes", "Swap in use.", now.swap_used_bytes)
    yield from _gauge("uptime_seconds", "Seconds since the start of the machine.", now.uptime_s)
    for name, help_, value in (
        ("disk_read_bytes_total", "Bytes read from disks.", now.disk_read_bytes),
        ("disk_written_bytes_total", "Bytes written to disks.", now.disk_written_bytes),
        ("network_received_bytes_total", "Bytes received, without loopback.", now.received_bytes),
        ("network_sent_bytes_total", "Bytes sent, without loopback.", now.sent_bytes),
    ):
        yield from _gauge(name, help_, value, "counter")


def _gauge(
    name: str, help_: str, value: float | None, type_: Literal["gauge", "counter"] = "gauge"
) -> Iterator[MetricFamily]:
    if value is not None:
        yield Gauge(f"fleet_node_{name}", help_, lambda: value, type_)


def _by(
    name: str, help_: str, label: str, values: Mapping[str, float | None]
) -> Iterator[MetricFamily]:
    known = {part: value for part, value in values.items() if value is not None}
    if known:
        yield Gauge(f"fleet_node_{name}", help_, lambda: known, labels=(label,))


# The fields of a reading in /v1/vitals.
_RATES: Final = {
    "cpu_ratio": "cpuRatio",
    "disk_read_bytes_per_s": "diskReadBytesPerSecond",
    "disk_written_bytes_per_s": "diskWrittenBytesPerSecond",
    "received_bytes_per_s": "networkReceivedBytesPerSecond",
    "sent_bytes_per_s": "networkSentBytesPerSecond",
}
_SENSORS: Final = {
    "gpu_ratio": "gpuRatio",
    "cpu_celsius": "cpuCelsius",
    "gpu_celsius": "gpuCelsius",
    "cpu_watts": "cpuWatts",
    "gpu_watts": "gpuWatts",
    "system_watts": "systemWatts",
    "thermal_level": "thermalLevel",
    "memory_free_ratio": "memoryFreeRatio",
}


def load_tree(load: LoadReading) -> dict[str, Any]:
    """Return a reading as JSON for /v1/vitals: null where a value is unknown, and the reasons in "unknown"."""
    rates = {shown: _rounded(getattr(load, name)) for name, shown in _RATES.items()}
    sensors = {shown: _rounded(getattr(load.sensors, name)) for name, shown in _SENSORS.items()}
    uptime = _rounded(load.counters.uptime_s)
    tree: dict[str, Any] = {**rates, **sensors, "machineUptimeSeconds": uptime}
    reasons = {_SENSORS[name]: why for name, why in load.sensors.unknown.items()}
    missing = (
        "there is no recent sample yet"
        if uptime is None
        else "it takes two samples, or is not counted here"
    )
    return tree | {"unknown": {n: reasons.get(n, missing) for n, v in tree.items() if v is None}}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
