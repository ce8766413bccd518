"""The load of a machine: parsers over text of macOS, real counters of this machine, and commands that hang."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery.clock import SystemClock
from machinery.prometheus import render
from nodeagent.hardware import load
from nodeagent.hardware.load import LoadReading, LoadSampler, MachineCounters, Macmon, SensorReading
from tests.support.waiting import until_async

CLOCK = SystemClock()
CAPTURES = Path(__file__).parent / "captures"
IOREG = (CAPTURES / "load" / "ioaccelerator.txt").read_text()
MACMON = (CAPTURES / "load" / "macmon.json").read_text()
THERMAL = "com.apple.system.thermalpressurelevel 2\n"
FREE = "kern.memorystatus_level: 41\n"  # a Mac of 48 GB at the pressure level 2


def test_sensors_of_a_mac() -> None:
    assert load.mac_sensors(IOREG, MACMON, THERMAL, FREE) == SensorReading(
        gpu_ratio=0.63, cpu_celsius=51.25, gpu_celsius=47.5, cpu_watts=2.5, gpu_watts=28.25, system_watts=41.5,
        thermal_level=2, memory_free_ratio=0.41,
    )  # fmt: skip


def test_a_mac_without_macmon_says_why_values_are_missing() -> None:
    reading = load.mac_sensors(IOREG, "", THERMAL, FREE)
    assert (reading.gpu_ratio, reading.thermal_level) == (0.63, 2)
    assert set(reading.unknown) == {
        "cpu_celsius", "gpu_celsius", "cpu_watts", "gpu_watts", "system_watts",
    }  # fmt: skip
    assert set(reading.unknown.values()) == {load.NO_MACMON}


@pytest.mark.parametrize("capture", ["well", "ill"])
def test_macmon_of_older_and_newer_versions(capture: str) -> None:
    macmon = load.parse_macmon((CAPTURES / "settings" / capture / "macmon.json").read_text())
    assert macmon.gpu_ratio == {"well": 0.91, "ill": 1.0}[capture]
    assert macmon.gpu_watts == {"well": 28.4, "ill": 4.1}[capture]


@pytest.mark.parametrize("text", [
    "", "[]", "null", '{"temp": 3}', "[" * 100_000,
    '{"gpu_power": 1e99, "cpu_power": -1, "sys_power": "9"}',
    '{"gpu_active_ratio": true, "temp": {"cpu_temp_avg": 0.0}}',
    '{"gpu_usage": [1]}',
])  # fmt: skip
def test_nonsense_is_unknown(text: str) -> None:
    assert load.parse_macmon(text) == Macmon()


@given(st.text())
def test_parsers_accept_any_text(text: str) -> None:
    load.mac_sensors(text, text, text, text)


async def test_each_missing_value_has_its_reason_in_json() -> None:
    for sensors in (load.mac_sensors("", "", ""), await load.read_linux_sensors()):
        unknown = load.load_tree(LoadReading(sensors=sensors))["unknown"]
        assert set(sensors.unknown.values()) <= set(unknown.values())


@pytest.mark.parametrize("printed", ["", "kern.memorystatus_level: 101", "sysctl: unknown oid"])
def test_free_memory_that_is_no_percentage_is_unknown(printed: str) -> None:
    assert load.parse_free_ratio(printed) is None


def test_the_busiest_gpu_counts() -> None:
    two = '"Device Utilization %"=7, "Device Utilization %" = 20, "Device Utilization %"=999'
    assert load.parse_gpu_ratio(two) == 0.2
    assert load.parse_gpu_ratio("") is None


def test_rates_are_between_two_samples() -> None:
    before = MachineCounters(busy_s=10, total_s=100, received_bytes=1000, sent_bytes=500)
    after = MachineCounters(busy_s=15, total_s=120, received_bytes=3000, sent_bytes=400)
    reading = load.compare(before, after, 10.0, SensorReading())
    assert (reading.cpu_ratio, reading.received_bytes_per_s) == (0.25, 200.0)
    # An interface that vanished takes its count with it.
    assert reading.sent_bytes_per_s is None
    assert load.compare(MachineCounters(), after, 10.0, SensorReading()).cpu_ratio is None


def test_unknown_values_are_left_out_of_metrics_and_have_a_reason_in_vitals() -> None:
    load_reading = LoadReading(
        cpu_ratio=0.5, sensors=SensorReading(cpu_celsius=61.5, unknown={"gpu_ratio": "no GPU"})
    )
    text = render(load.node_families(load_reading))
    assert "fleet_node_cpu_usage_ratio 0.5\n" in text
    assert 'fleet_node_temperature_celsius{sensor="cpu"} 61.5\n' in text
    assert "gpu" not in text
    assert "power" not in text
    tree = load.load_tree(load_reading)
    assert (tree["cpuRatio"], tree["gpuRatio"], tree["unknown"]["gpuRatio"]) == (
        0.5,
        None,
        "no GPU",
    )
    assert {name for name, value in tree.items() if value is None} == set(tree["unknown"])


async def test_this_machine_is_sampled() -> None:
    first = load.read_counters(CLOCK.now().timestamp())
    assert first.total_s is not None
    assert first.uptime_s is not None
    assert first.uptime_s > 0
    sampler = LoadSampler(CLOCK)
    assert sampler.latest() == LoadReading()

    async def is_sampled() -> bool:
        return sampler.latest().counters.uptime_s is not None

    async with asyncio.TaskGroup() as group:
        running = group.create_task(sampler.run())
        await until_async(is_sampled, limit_s=60, what="a sample")
        running.cancel()
    assert "fleet_node_uptime_seconds " in render([sampler])
    assert "fleet_node_network_received_bytes_total " in render([sampler])


async def test_the_loop_answers_while_sensors_hang() -> None:
    """A hanging reader leaves values unknown, and nothing waits for it."""
    entered = asyncio.Event()

    async def hang() -> SensorReading:
        entered.set()
        await asyncio.Event().wait()
        return SensorReading()

    sampler = LoadSampler(CLOCK, sensors=hang)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(sampler.run())
        await asyncio.wait_for(entered.wait(), 20)
        assert sampler.latest() == LoadReading()
        assert render([sampler]) == ""
        running.cancel()
