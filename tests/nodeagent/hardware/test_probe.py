"""Live readings, and the function that runs commands, also commands that hang."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.hardware import macos, probe, system_text
from nodeagent.hardware.readings import HardwareError, MemoryPressure
from nodeagent.hardware.system_text import parse_pairs, parse_positive

VM_STAT = (Path(__file__).parent / "captures" / "vm_stat.txt").read_text()
PAGE = 16384
FREE = (17490 + 4916) * PAGE
INACTIVE = 468488 * PAGE

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="has no macOS commands")


@pytest.mark.parametrize(
    ("sysctl", "pressure", "available"),
    [
        ("kern.memorystatus_vm_pressure_level: 1\n", MemoryPressure.NORMAL, FREE + INACTIVE),
        ("kern.memorystatus_vm_pressure_level: 2\n", MemoryPressure.WARNING, FREE),
        ("kern.memorystatus_vm_pressure_level: 4\n", MemoryPressure.CRITICAL, 0),
        ("kern.memorystatus_vm_pressure_level: 3\n", MemoryPressure.WARNING, FREE),
        ("", MemoryPressure.WARNING, FREE),
    ],
)
def test_mac_memory(sysctl: str, pressure: MemoryPressure, available: int) -> None:
    seen = macos.parse_mac_memory(VM_STAT, sysctl)
    assert seen is not None
    assert seen.pressure is pressure
    assert seen.wired_bytes == 251554 * PAGE
    assert macos.mac_available_bytes(seen) == available


def test_the_page_size_is_read() -> None:
    small = macos.parse_mac_memory(VM_STAT.replace("16384", "4096"), "")
    assert small is not None
    assert small.free_bytes == FREE // 4


@pytest.mark.parametrize("vm_stat", ["", "nonsense", VM_STAT.splitlines()[0]])
def test_no_vm_stat_is_not_known(vm_stat: str) -> None:
    assert macos.parse_mac_memory(vm_stat, "") is None


@on_linux
async def test_probe_this_machine() -> None:
    facts = await probe.read_machine_facts()
    assert facts.memory_bytes > 0
    assert facts.cpu_cores > 0
    assert await probe.available_memory_bytes()


@on_linux
async def test_a_mac_without_its_commands_does_not_guess() -> None:
    with pytest.raises(HardwareError, match="memory could not be read"):
        await probe.read_machine_facts("darwin")
    assert await probe.available_memory_bytes("darwin") is None


@on_linux
async def test_capture_skips_commands_that_fail() -> None:
    seen = await macos.capture_facts()
    assert (seen.sysctl, seen.profiler, seen.sw_vers) == ("", "", "")
    assert seen.hostname


async def test_no_third_system() -> None:
    with pytest.raises(HardwareError, match="win32"):
        await probe.read_machine_facts("win32")


async def test_output_is_returned_for_any_exit_code() -> None:
    assert (
        await system_text.command_output(("sh", "-c", "echo said; exit 1"), timeout_s=5) == "said\n"
    )


async def test_a_command_that_is_not_there() -> None:
    assert await system_text.command_output(("/nowhere/sysctl",), timeout_s=5) is None


async def test_output_that_is_not_text() -> None:
    assert await system_text.command_output(("printf", r"a\377b"), timeout_s=5) == "a\ufffdb"


async def test_a_command_that_hangs_dies_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 60 & echo $! > {pids}; echo $$ >> {pids}; wait"
    assert await system_text.command_output(("sh", "-c", script), timeout_s=0.5) is None
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    await _until(lambda: not any(map(_is_running, started)))


async def test_a_cancelled_command_is_not_left_behind(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60"
    async with asyncio.TaskGroup() as group:
        task = group.create_task(system_text.command_output(("sh", "-c", script), timeout_s=30))
        await _until(pid.exists)
        task.cancel()
    await _until(lambda: not _is_running(int(pid.read_text())))


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 - other processes do not set events
            await asyncio.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"  # an orphan's zombie waits for init, which a container may not have


@given(text=st.text(), separator=st.sampled_from([":", "=", " "]))
def test_pairs_take_any_text(text: str, separator: str) -> None:
    assert all(separator not in key.strip() for key in parse_pairs(text, separator=separator))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12),
        (" 17490.", 17490),
        ("8:4:4", 8),
        ("0", None),
        ("-3", None),
        ("", None),
        (None, None),
    ],
)
def test_positive(text: str | None, number: int | None) -> None:
    assert parse_positive(text) == number
