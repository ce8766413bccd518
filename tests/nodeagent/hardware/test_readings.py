"""Readings of this machine, of small file trees, and of the output of a Mac's commands."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.hardware import linux, macos, probe
from nodeagent.hardware.linux import PowerSupply
from nodeagent.hardware.macos import ReadingOutput
from nodeagent.hardware.probe import SingleQuery, SystemMachineReader
from nodeagent.hardware.readings import (
    HeatReading,
    MachineReader,
    MachineReading,
    MemoryPressure,
    RebootReading,
)
from tests.support.linux_files import write_tree
from tests.support.nodeagent_readings import Given
from tests.support.waiting import until_async

GIB = 2**30
CAPTURES = Path(__file__).parent / "captures"
LEVEL = "com.apple.system.thermalpressurelevel"
SYSCTL = f"kern.memorystatus_vm_pressure_level: 2\nhw.memsize: {24 * GIB}\n"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def live(name: str) -> str:
    return (CAPTURES / "live" / name).read_text()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(SystemMachineReader, marks=on_linux, id="this-machine"),
        pytest.param(lambda _: Given(), id="given"),
    ],
)
async def test_what_every_reading_is(make: Callable[[Path], MachineReader], tmp_path: Path) -> None:
    seen = await make(tmp_path / "models" / "not-yet").take()
    assert seen.memory is not None
    assert 0 < seen.memory.available_bytes <= seen.memory.total_bytes
    assert 0 <= seen.memory.stalled_percent <= 100
    assert seen.disk is not None
    assert 0 < seen.disk.free_bytes <= seen.disk.total_bytes
    assert seen.heat is not None
    assert seen.reboot is not None
    assert seen.power in ("Mains", "Battery", "Unknown")
    assert seen.owner_idle_s is None or seen.owner_idle_s >= 0


@on_linux
async def test_a_mac_without_its_commands_is_unknown() -> None:
    seen = await SystemMachineReader(Path("/"), platform="darwin").take()
    assert seen == MachineReading(disk=probe.read_disk(Path("/")))


async def test_a_disk_that_hangs_is_asked_once_and_waited_for_once() -> None:
    go, asked = threading.Event(), 0

    def hang() -> str:
        nonlocal asked
        asked += 1
        go.wait(10)
        return "there"

    patient = SingleQuery(hang, limit_s=0.05)
    assert [await patient.ask() for _ in range(3)] == [None] * 3
    assert asked == 1
    go.set()
    assert await until_async(patient.ask) == "there"


async def test_a_failing_disk_is_unknown() -> None:
    def fail() -> str:
        raise OSError("stale file handle")

    assert await SingleQuery(fail).ask() is None


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
    seen = linux.read_reading(write_tree(tmp_path, proc__pressure__memory=pressure)).memory
    assert seen is not None
    assert (seen.total_bytes, seen.available_bytes) == (16 * GIB, 8 * GIB)
    assert (seen.level, seen.stalled_percent) == (None, 4.25)


def test_memory_of_a_cgroup(tmp_path: Path) -> None:
    files = {"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__memory.max": f"{4 * GIB}"}
    seen = linux.read_reading(write_tree(tmp_path, **files)).memory
    assert seen is not None
    assert seen.total_bytes == 4 * GIB


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


@pytest.mark.parametrize(
    ("supplies", "power"),
    [
        ([], "Mains"),
        ([supply("Mains", online=True), supply("Battery", status="Charging")], "Mains"),
        ([supply("Mains"), supply("Battery", status="Discharging")], "Battery"),
        ([supply("USB", online=True), supply("Battery", status="Discharging")], "Mains"),
        ([supply("Battery", status="Discharging")], "Battery"),
        ([supply("Battery", status="Full")], "Mains"),
        ([supply("Battery", status="Discharging", scope="Device")], "Mains"),
    ],
)
def test_power_of_linux(supplies: list[PowerSupply], power: str) -> None:
    assert linux.parse_power(supplies) == power


def test_power_supplies_are_files(tmp_path: Path) -> None:
    folder = "sys__class__power_supply__"
    files = {f"{folder}AC__type": "Mains\n", f"{folder}AC__online": "0\n"}
    files |= {f"{folder}BAT0__type": "Battery\n", f"{folder}BAT0__status": "Discharging\n"}
    assert linux.read_reading(write_tree(tmp_path, **files)).power == "Battery"


def test_a_mac() -> None:
    seen = macos.assemble_reading(
        ReadingOutput(
            vm_stat=(CAPTURES / "vm_stat.txt").read_text(),
            sysctl=SYSCTL,
            thermal_level=f"{LEVEL} 0\n",
            therm=live("therm_calm.txt"),
            batt=live("batt_battery.txt"),
            hid=live("hid.txt"),
        )
    )
    assert seen.memory is not None
    assert (seen.memory.total_bytes, seen.memory.level) == (24 * GIB, MemoryPressure.WARNING)
    assert seen.memory.available_bytes == (17490 + 4916 + 468488) * 16384
    assert seen.reboot == RebootReading(total_bytes=24 * GIB, wired_bytes=251554 * 16384)
    assert (seen.heat, seen.power) == (HeatReading(), "Battery")
    assert seen.owner_idle_s == pytest.approx(42.1, abs=0.1)


@pytest.mark.parametrize(
    ("level", "therm", "throttled"),
    [
        ("0", "therm_calm.txt", ""),
        ("1", "therm_full_speed.txt", ""),
        ("2", "therm_calm.txt", "macOS reports the thermal level heavy"),
        ("3", "therm_calm.txt", "macOS reports the thermal level trapping"),
        ("7", "therm_calm.txt", "macOS reports the thermal level sleeping"),
        ("", "therm_slow.txt", "macOS holds the processor at 63 % of its speed"),
        ("0", "therm_slow.txt", "macOS holds the processor at 63 % of its speed"),
    ],
)
def test_heat_of_a_mac(level: str, therm: str, throttled: str) -> None:
    found = macos.parse_heat(f"{LEVEL} {level}\n" if level else "", live(therm))
    assert found == HeatReading(throttled=throttled)


@pytest.mark.parametrize(
    ("name", "power"),
    [
        ("batt_mains.txt", "Mains"),
        ("batt_desktop.txt", "Mains"),
        ("batt_battery.txt", "Battery"),
        ("batt_ups.txt", "Battery"),
        ("therm_calm.txt", "Unknown"),
    ],
)
def test_power_of_a_mac(name: str, power: str) -> None:
    assert macos.parse_power(live(name)) == power


def test_a_mac_without_any_output_is_unknown() -> None:
    assert macos.assemble_reading(ReadingOutput()) == MachineReading()


texts = st.one_of(
    st.text(),
    st.builds(lambda a, b: f"{LEVEL} {a}\nCPU_Speed_Limit = {b}", st.integers(), st.integers()),
    st.builds('"HIDIdleTime" = {}'.format, st.integers()),
    st.builds("Now drawing from '{}'".format, st.text()),
    st.builds("full avg60={} full avg60={}".format, st.floats(), st.integers()),
)


@given(texts, texts, texts)
def test_no_text_stops_the_agent(one: str, two: str, three: str) -> None:
    macos.assemble_reading(
        ReadingOutput(vm_stat=one, sysctl=two, thermal_level=one, therm=two, batt=three, hid=three)
    )
    linux.parse_stalled(one)
    linux.parse_celsius(two)
