"""Facts and readings of a Mac, from captured output of six machines and from missing or damaged output."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.hardware import linux, macos
from nodeagent.hardware.macos import FactsOutput, ReadingOutput
from nodeagent.hardware.readings import (
    HardwareError,
    HeatReading,
    MachineReading,
    MemoryPressure,
    RebootReading,
)
from nodeagent.hardware.system_text import parse_system_version
from schemas.node import MemoryLimitSource, WiredLimit
from tests.support.golden_cases import Golden
from tests.support.values import present

CAPTURES = Path(__file__).parent / "captures"
GIB = 2**30


def captured(machine: str) -> FactsOutput:
    folder = CAPTURES / machine
    return FactsOutput(
        sysctl=(folder / "sysctl.txt").read_text(),
        profiler=(folder / "profiler.json").read_text(),
        sw_vers=(folder / "sw_vers.txt").read_text(),
        ioreg=(folder / "ioreg.txt").read_text(),
        hostname=(folder / "hostname.txt").read_text(),
    )


MACHINES = ("m1", "m4_pro", "m3_ultra", "m5_max", "m6_max_unknown", "vm")


@pytest.mark.parametrize("machine", MACHINES)
def test_captured_machine(machine: str, golden: Golden) -> None:
    facts = dataclasses.asdict(macos.assemble_facts(captured(machine)))
    text = json.dumps(facts, indent=2, default=str)
    golden.check_text(CAPTURES / machine / "facts.json", f"{text}\n")


@pytest.mark.parametrize("machine", MACHINES)
def test_each_command_alone_may_fail(machine: str) -> None:
    output = captured(machine)
    whole = macos.assemble_facts(output)
    without_sysctl = replace(
        whole,
        performance_cores=None,  # no other source is reliable
        gpu_memory_limit_bytes=macos.gpu_memory_limit(whole.memory_bytes, None)[0],
        gpu_memory_limit_source=MemoryLimitSource.ESTIMATE,
    )
    assert macos.assemble_facts(output._replace(sysctl="")) == without_sysctl
    assert macos.assemble_facts(output._replace(profiler="")) == replace(whole, metal="")
    assert macos.assemble_facts(output._replace(ioreg="")) == whole
    assert macos.assemble_facts(output._replace(sw_vers="")) == replace(whole, os_version="unknown")


def test_a_known_chip_without_counts_has_its_smallest_bin() -> None:
    text = "hw.memsize: 68719476736\nmachdep.cpu.brand_string: Apple M4 Pro\n"
    facts = macos.assemble_facts(FactsOutput(sysctl=text))
    assert (facts.cpu_cores, facts.gpu_cores, facts.memory_bandwidth_gbps) == (12, 16, 273)


@pytest.mark.parametrize("sysctl", ["", "hw.memsize: 0\n", "hw.memsize: none\n"])
def test_memory_is_never_guessed(sysctl: str) -> None:
    with pytest.raises(HardwareError, match=r"hw\.memsize"):
        macos.assemble_facts(FactsOutput(sysctl=sysctl, profiler="{}"))


@given(
    text=st.text()
    | st.sampled_from(
        [
            "[]",
            "{",
            "null",
            '{"SPHardwareDataType": 3}',
            '{"SPHardwareDataType": []}',
            '{"SPHardwareDataType": [null], "SPDisplaysDataType": [{"sppci_cores": []}]}',
        ]
    )
)
def test_a_damaged_profile_is_ignored(text: str) -> None:
    assert macos.parse_profiler(text) == macos.SystemProfile()


def test_of_several_gpus_the_largest_counts() -> None:
    text = '{"SPDisplaysDataType": [{"_name": "x"}, {"sppci_cores": "38"}, {"sppci_cores": "8"}]}'
    assert macos.parse_profiler(text).gpu_cores == 38


@pytest.mark.parametrize(("text", "size"), [
    ("128 GB", 128 * GIB), ("1 TB", 1024 * GIB), ("512MB", GIB // 2), ("", None), ("many GB", None),
    ("0 GB", None), ("5 XB", None),
])  # fmt: skip
def test_size(text: str, size: int | None) -> None:
    assert macos.parse_size(text) == size


@pytest.mark.parametrize(("memory_gib", "wired_limit_mb", "expected"), [
    pytest.param(64, 57344, (56 * GIB, MemoryLimitSource.WIRED_LIMIT), id="set-by-the-owner"),
    pytest.param(16, 999999, (16 * GIB, MemoryLimitSource.WIRED_LIMIT), id="more-than-there-is"),
    pytest.param(8, None, (5 * GIB, MemoryLimitSource.ESTIMATE), id="smallest"),
    pytest.param(96, 0, (96 * GIB * 81 // 100, MemoryLimitSource.ESTIMATE), id="between"),
])  # fmt: skip
def test_gpu_memory_limit(
    memory_gib: int, wired_limit_mb: int | None, expected: tuple[int, MemoryLimitSource]
) -> None:
    assert macos.gpu_memory_limit(memory_gib * GIB, wired_limit_mb) == expected


# Memory in GiB, `recommendedMaxWorkingSetSize` of public logs, and GiB for models. All but the largest three are
# what is left by the reserve for macOS.
@pytest.mark.parametrize(("memory_gib", "recommended_bytes", "models_gib"), [
    (8, 5_726_633_984, 5.0),  # A18 Pro, macOS 26.5: mx.device_info()
    (16, 12_713_115_648, 10.0),  # M1, M4: llama.cpp
    (24, 19_069_665_280, 16.0),  # M4 Pro: mx.device_info()
    (32, 26_800_600_000, 24.0),  # M4, M5: llama.cpp, rounded
    (48, 40_200_896_512, 37.44),  # M4 Pro: mx.device_info()
    (64, 55_662_790_000, 51.84),  # M3 Max: llama.cpp, rounded
    (128, 115_448_725_504, 107.52),  # M5 Max: mx.device_info()
    (512, 498_216_210_000, 464.0),  # M3 Ultra: llama.cpp, rounded
])  # fmt: skip
def test_the_working_set_of_metal_decides(
    memory_gib: int, recommended_bytes: int, models_gib: float
) -> None:
    memory_bytes = memory_gib * GIB
    limit, source = macos.gpu_memory_limit(memory_bytes, 0, recommended_bytes)
    assert (round(limit / GIB, 2), source) == (models_gib, MemoryLimitSource.METAL)
    estimate, _ = macos.gpu_memory_limit(memory_bytes, None)
    assert limit * 0.985 < estimate <= limit + GIB // 1000


@pytest.mark.parametrize(("version", "supported"), [
    ("26.2 (25C56)", True), ("26.2.1", True), ("27", True), ("26.10", True),
    ("26.1 (25B78)", False), ("26", False), ("15.7", False), ("unknown", False),
])  # fmt: skip
def test_rdma_needs_macos_26_2(version: str, *, supported: bool) -> None:
    assert ((parse_system_version(version) or (0, 0)) >= macos.RDMA_SINCE) is supported


@pytest.mark.mac
async def test_this_mac() -> None:
    facts = await macos.read_facts()
    assert facts.chip.startswith("Apple")
    assert facts.hardware_uuid
    assert 0 < facts.gpu_memory_limit_bytes <= facts.memory_bytes


VM_STAT = (Path(__file__).parent / "captures" / "vm_stat.txt").read_text()


PAGE = 16384


FREE = (17490 + 4916) * PAGE


INACTIVE = 468488 * PAGE


@pytest.mark.parametrize(("sysctl", "pressure"), [
    ("kern.memorystatus_vm_pressure_level: 1\n", MemoryPressure.NORMAL),
    ("kern.memorystatus_vm_pressure_level: 2\n", MemoryPressure.WARNING),
    ("kern.memorystatus_vm_pressure_level: 4\n", MemoryPressure.CRITICAL),
    ("kern.memorystatus_vm_pressure_level: 3\n", MemoryPressure.WARNING),
    ("", MemoryPressure.WARNING),
])  # fmt: skip
def test_mac_memory(sysctl: str, pressure: MemoryPressure) -> None:
    mac_memory = present(macos.parse_mac_memory(VM_STAT, sysctl))
    assert mac_memory.pressure is pressure
    assert mac_memory.wired_bytes == 251554 * PAGE
    assert (mac_memory.free_bytes, mac_memory.inactive_bytes) == (FREE, INACTIVE)


def test_the_page_size_is_read() -> None:
    small = present(macos.parse_mac_memory(VM_STAT.replace("16384", "4096"), ""))
    assert small.free_bytes == FREE // 4


@pytest.mark.parametrize("vm_stat", ["", "nonsense", VM_STAT.splitlines()[0]])
def test_no_vm_stat_is_not_known(vm_stat: str) -> None:
    assert macos.parse_mac_memory(vm_stat, "") is None


LEVEL = "com.apple.system.thermalpressurelevel"


SYSCTL = f"kern.memorystatus_vm_pressure_level: 2\nhw.memsize: {24 * GIB}\n"


def live(name: str) -> str:
    return (CAPTURES / "live" / name).read_text()


def test_a_reading_of_a_mac() -> None:
    reading = macos.assemble_reading(
        ReadingOutput(
            vm_stat=(CAPTURES / "vm_stat.txt").read_text(),
            sysctl=SYSCTL,
            thermal_level=f"{LEVEL} 0\n",
            therm=live("therm_calm.txt"),
            batt=live("batt_battery.txt"),
            hid=live("hid.txt"),
        )
    )
    assert reading.memory is not None
    assert (reading.memory.total_bytes, reading.memory.level) == (24 * GIB, MemoryPressure.WARNING)
    assert reading.memory.available_bytes == (17490 + 4916 + 468488) * 16384
    assert reading.reboot == RebootReading(total_bytes=24 * GIB, wired_bytes=251554 * 16384)
    assert (reading.heat, reading.power) == (HeatReading(), "Battery")
    assert reading.owner_idle_s == pytest.approx(42.1, abs=0.1)


JOB = "<array><string>/usr/sbin/sysctl</string><string>iogpu.wired_limit_mb=102400</string></array>"


@pytest.mark.parametrize(("line", "job", "limit"), [
    ("iogpu.wired_limit_mb: 0", "", WiredLimit(mebibytes=0, set_by="Default")),
    ("iogpu.wired_limit_mb: 0", JOB, WiredLimit(mebibytes=0, set_by="Default")),
    ("iogpu.wired_limit_mb: 102400", JOB, WiredLimit(mebibytes=102_400, set_by="Service")),
    ("iogpu.wired_limit_mb: 92160", JOB, WiredLimit(mebibytes=92_160, set_by="Other")),
    ("iogpu.wired_limit_mb: 92160", "", WiredLimit(mebibytes=92_160, set_by="Other")),
    ("hw.memsize: 7", JOB, None),
    ("iogpu.wired_limit_mb: many", JOB, None),
])  # fmt: skip
def test_a_wired_limit_is_that_of_the_service_or_of_others(
    line: str, job: str, limit: WiredLimit | None
) -> None:
    assert macos.parse_wired_limit(f"{SYSCTL}{line}\n", job) == limit


@pytest.mark.parametrize(("level", "therm", "throttled"), [
    ("0", "therm_calm.txt", ""),
    ("1", "therm_full_speed.txt", ""),
    ("2", "therm_calm.txt", "macOS reports the thermal level heavy"),
    ("3", "therm_calm.txt", "macOS reports the thermal level trapping"),
    ("7", "therm_calm.txt", "macOS reports the thermal level sleeping"),
    ("", "therm_slow.txt", "macOS holds the processor at 63 % of its speed"),
    ("0", "therm_slow.txt", "macOS holds the processor at 63 % of its speed"),
])  # fmt: skip
def test_heat_of_a_mac(level: str, therm: str, throttled: str) -> None:
    heat = macos.parse_heat(f"{LEVEL} {level}\n" if level else "", live(therm))
    assert heat == HeatReading(throttled=throttled)


@pytest.mark.parametrize(("name", "power"), [
    ("batt_mains.txt", "Mains"), ("batt_desktop.txt", "Mains"),
    ("batt_battery.txt", "Battery"),
    ("batt_ups.txt", "Battery"), ("therm_calm.txt", "Unknown"),
])  # fmt: skip
def test_power_of_a_mac(name: str, power: str) -> None:
    assert macos.parse_power(live(name)) == power


@pytest.mark.parametrize(("assertions", "camera", "is_in_meeting"), [
    ("assertions_call.txt", "camera_off.txt", True),
    ("assertions_music.txt", "camera_on.txt", True),
    ("assertions_music.txt", "camera_off.txt", False),
    ("assertions_music.txt", "", False),
    ("", "", None),
])  # fmt: skip
def test_a_meeting_is_a_microphone_or_a_camera_in_use(
    assertions: str, camera: str, is_in_meeting: bool | None
) -> None:
    texts = [live(name) if name else "" for name in (assertions, camera)]
    assert macos.parse_meeting(*texts) is is_in_meeting


@pytest.mark.parametrize(("name", "is_shut"), [
    ("lid_shut.txt", True), ("lid_docked.txt", False), ("lid_open.txt", False),
    ("batt_desktop.txt", None),
])  # fmt: skip
def test_a_lid_counts_as_shut_if_macos_would_sleep(name: str, is_shut: bool | None) -> None:
    assert macos.parse_lid_shut(live(name)) is is_shut


def test_a_mac_without_any_output_is_unknown() -> None:
    assert macos.assemble_reading(ReadingOutput()) == MachineReading()


texts = st.one_of(
    st.text(),
    st.builds(lambda a, b: f"{LEVEL} {a}\nCPU_Speed_Limit = {b}", st.integers(), st.integers()),
    st.builds('"HIDIdleTime" = {}'.format, st.integers()),
    st.builds(" pid 1({}): [0] x\n Resources: {}".format, st.text(), st.text()),
    st.builds("Now drawing from '{}'".format, st.text()),
    st.builds("full avg60={} full avg60={}".format, st.floats(), st.integers()),
)


@given(texts, texts, texts)
def test_no_text_stops_the_agent(one: str, two: str, three: str) -> None:
    macos.assemble_reading(
        ReadingOutput(vm_stat=one, sysctl=two, thermal_level=one, therm=two, batt=three, hid=three)
    )
    macos.parse_meeting(one, two)
    macos.parse_lid_shut(one)
    linux.parse_stalled(one)
    linux.parse_celsius(two)
