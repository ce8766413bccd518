"""Facts and readings of a Linux machine: this one, and small file trees."""

import platform
import sys
from pathlib import Path

import pytest

from machinery import linux_memory
from nodeagent.hardware import linux
from nodeagent.hardware.linux import PowerSupply
from nodeagent.hardware.readings import (
    HardwareError,
    HeatReading,
    MachineReading,
    RebootReading,
)
from schemas.node import MemoryLimitSource
from tests.support.linux_files import CGROUP_V1, CGROUP_V2, write_tree
from tests.support.values import present

GIB = 2**30
UNLIMITED_V1 = "9223372036854771712\n"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@on_linux
def test_this_machine() -> None:
    facts = linux.read_facts()
    assert facts.memory_bytes > 0
    assert facts.cpu_cores > 0
    assert 0 < facts.gpu_memory_limit_bytes < facts.memory_bytes
    assert facts.os == "Linux"
    assert facts.chip
    assert facts.hostname == platform.node()
    available = present(linux_memory.available_memory_bytes())
    assert 0 < available <= facts.memory_bytes


def test_a_whole_machine(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path,
        **{
            "etc__os-release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nNAME="Debian"\n',
            "etc__machine-id": "3d1219c7c4c5404aaa1f6d2a48adfda4\n",
            "proc__sys__kernel__hostname": "build-7\n",
        },
    )
    facts = linux.read_facts(root)
    assert facts.chip == "AMD EPYC"
    assert facts.os_version == "Debian GNU/Linux 12 (bookworm)"
    assert facts.hardware_uuid == "3d1219c7-c4c5-404a-aa1f-6d2a48adfda4"
    assert (facts.hostname, facts.cpu_cores, facts.gpu_cores) == ("build-7", 2, 0)
    assert (facts.memory_bytes, facts.gpu_memory_limit_bytes) == (16 * GIB, 12 * GIB)
    assert (facts.thunderbolt, facts.memory_bandwidth_gbps) == (None, None)


def test_a_bare_machine_degrades_field_by_field(tmp_path: Path) -> None:
    facts = linux.read_facts(write_tree(tmp_path, proc__cpuinfo=""))
    assert facts.chip == platform.machine()
    assert facts.cpu_cores > 0
    assert facts.os_version == "unknown"
    assert not facts.hardware_uuid


def test_memory_is_never_guessed(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="MemTotal"):
        linux.read_facts(tmp_path)


V2 = {"proc__self__cgroup": CGROUP_V2}
V1 = {"proc__self__cgroup": CGROUP_V1}
AGENT, MACHINE = (
    "sys__fs__cgroup__machine__agent__memory.max",
    "sys__fs__cgroup__machine__memory.max",
)
ROOT = "sys__fs__cgroup__memory.max"
AGENT_V1 = "sys__fs__cgroup__memory__pods__agent__memory.limit_in_bytes"
ROOT_V1 = "sys__fs__cgroup__memory__memory.limit_in_bytes"


@pytest.mark.parametrize(("files", "limit_gib"), [
    pytest.param({}, None, id="no-cgroup"),
    pytest.param({**V2, AGENT: f"{4 * GIB}\n"}, 4, id="v2"),
    pytest.param({**V2, AGENT: "max\n"}, None, id="v2-max"),
    pytest.param({**V2, AGENT: "max\n", MACHINE: f"{2 * GIB}\n"}, 2, id="v2-parent-binds"),
    pytest.param({"proc__self__cgroup": "0::/\n", ROOT: f"{8 * GIB}\n"}, 8, id="v2-container-namespace"),
    pytest.param({"proc__self__cgroup": "0::/../other\n", ROOT: f"{GIB}\n"}, 1, id="v2-outside-of-our-namespace"),
    pytest.param({**V2, AGENT: f"{64 * GIB}"}, None, id="limit-above-the-machine"),
    pytest.param({**V1, AGENT_V1: f"{3 * GIB}\n", ROOT_V1: UNLIMITED_V1}, 3, id="v1"),
    pytest.param({**V1, ROOT_V1: f"{5 * GIB}\n"}, 5, id="v1-container-sees-only-its-own-group"),
    pytest.param({**V1, AGENT_V1: UNLIMITED_V1}, None, id="v1-unlimited"),
    pytest.param({"proc__self__cgroup": "nonsense\n\n::\n", ROOT: "??"}, None, id="nonsense"),
])  # fmt: skip
def test_cgroup_limit(tmp_path: Path, files: dict[str, str], limit_gib: int | None) -> None:
    facts = linux.read_facts(write_tree(tmp_path, **files))
    memory_bytes = (limit_gib or 16) * GIB
    assert facts.memory_bytes == memory_bytes
    assert facts.gpu_memory_limit_bytes == memory_bytes * 75 // 100
    is_limited = facts.gpu_memory_limit_source is MemoryLimitSource.CGROUP
    assert is_limited is (limit_gib is not None)


@pytest.mark.parametrize(("text", "expected"), [
    ("3d1219c7c4c5404aaa1f6d2a48adfda4\n", "3d1219c7-c4c5-404a-aa1f-6d2a48adfda4"),
    ("uninitialized\n", ""), ("", ""),
])  # fmt: skip
def test_machine_id(text: str, expected: str) -> None:
    assert linux.parse_machine_id(text) == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("NAME=Alpine\nVERSION_ID='3.22'\n", "Alpine 3.22"),
    ("NAME=Arch\n", "Arch"), ("", "unknown"),
])  # fmt: skip
def test_os_release(text: str, expected: str) -> None:
    assert linux.parse_os_release(text) == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("processor : 0\nModel : Raspberry Pi 5\n", "Raspberry Pi 5"),
    ("processor : 0\nCPU implementer : 0x41\n", None),
])  # fmt: skip
def test_arm_cpu_name(text: str, expected: str | None) -> None:
    assert linux.parse_cpu_name(text) == expected


ZONE = "sys__class__thermal__thermal_zone"


def zone(number: int, kind: str, celsius: float, **trips: float) -> dict[str, str]:
    found = {f"{ZONE}{number}__type": kind, f"{ZONE}{number}__temp": f"{celsius * 1000:.0f}\n"}
    for at, (trip, limit) in enumerate(trips.items()):
        found[f"{ZONE}{number}__trip_point_{at}_type"] = f"{trip}\n"
        found[f"{ZONE}{number}__trip_point_{at}_temp"] = f"{limit * 1000:.0f}\n"
    return found


THROTTLE = "sys__devices__system__cpu__cpu{}__thermal_throttle__{}_throttle_count"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, HeatReading(has_sensor=False), id="nothing"),
        pytest.param(
            zone(0, "acpitz", 40, active=30), HeatReading(has_sensor=False), id="a-fan-is-no-limit"
        ),
        pytest.param(
            {
                **zone(0, "acpitz", 50, critical=110),
                **zone(1, "x86_pkg_temp", 80, passive=95, hot=90),
            },
            HeatReading(hottest="x86_pkg_temp", celsius=80, limit_celsius=90),
            id="the-nearest-to-its-limit",
        ),
        pytest.param(
            {**zone(0, "broken", -274, passive=95), **zone(1, "", 96, passive=95)},
            HeatReading(hottest="thermal_zone1", celsius=96, limit_celsius=95),
            id="a-broken-sensor",
        ),
        pytest.param(
            {
                THROTTLE.format(0, "core"): "3\n",
                THROTTLE.format(1, "core"): "4\n",
                THROTTLE.format(0, "package"): "2\n",
            },
            HeatReading(throttle_count=9),
            id="counters-alone",
        ),
    ],
)
def test_heat_of_linux(tmp_path: Path, files: dict[str, str], expected: HeatReading) -> None:
    assert linux.read_reading(write_tree(tmp_path, **files)).heat == expected


def test_memory_of_linux(tmp_path: Path) -> None:
    pressure = (
        "some avg10=9.00 avg60=8.00 avg300=7.00 total=6\n"
        "full avg10=5.00 avg60=4.25 avg300=3.00 total=2\n"
    )
    reading = present(
        linux.read_reading(write_tree(tmp_path, proc__pressure__memory=pressure)).memory
    )
    assert (reading.total_bytes, reading.available_bytes) == (16 * GIB, 8 * GIB)
    assert (reading.level, reading.stalled_percent) == (None, 4.25)


def test_memory_of_a_cgroup(tmp_path: Path) -> None:
    files = {"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__memory.max": f"{4 * GIB}"}
    reading = present(linux.read_reading(write_tree(tmp_path, **files)).memory)
    assert reading.total_bytes == 4 * GIB


def test_a_linux_machine_without_any_file_is_unknown(tmp_path: Path) -> None:
    assert linux.read_reading(tmp_path) == MachineReading(
        heat=HeatReading(has_sensor=False), reboot=RebootReading()
    )


def test_a_restart_that_an_update_waits_for(tmp_path: Path) -> None:
    files = {"run__reboot-required": "*** System restart required ***\n"}
    assert linux.read_reboot(write_tree(tmp_path, **files)) == RebootReading(wanted_by="an update")
    files["run__reboot-required.pkgs"] = "linux-image\nlibc6\nlinux-image\n"
    assert linux.read_reboot(write_tree(tmp_path, **files)).wanted_by == "libc6, linux-image"


def supply(kind: str, online: bool = False, status: str = "", scope: str = "") -> PowerSupply:
    return PowerSupply(type=kind, is_online=online, status=status, scope=scope)


@pytest.mark.parametrize(("supplies", "power"), [
    ([], "Mains"),
    ([supply("Mains", online=True), supply("Battery", status="Charging")], "Mains"),
    ([supply("Mains"), supply("Battery", status="Discharging")], "Battery"),
    ([supply("USB", online=True), supply("Battery", status="Discharging")], "Mains"),
    ([supply("Battery", status="Discharging")], "Battery"),
    ([supply("Battery", status="Full")], "Mains"),
    ([supply("Battery", status="Discharging", scope="Device")], "Mains"),
])  # fmt: skip
def test_power_of_linux(supplies: list[PowerSupply], power: str) -> None:
    assert linux.parse_power(supplies) == power


def test_power_supplies_are_files(tmp_path: Path) -> None:
    folder = "sys__class__power_supply__"
    files = {f"{folder}AC__type": "Mains\n", f"{folder}AC__online": "0\n"}
    files |= {f"{folder}BAT0__type": "Battery\n", f"{folder}BAT0__status": "Discharging\n"}
    assert linux.read_reading(write_tree(tmp_path, **files)).power == "Battery"
