"""Facts and readings of this machine, and a query that hangs or fails."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from machinery.single_query import SingleQuery
from nodeagent.hardware import probe
from nodeagent.hardware.probe import SystemMachineReader
from nodeagent.hardware.readings import HardwareError, MachineReader, MachineReading
from tests.support.nodeagent_readings import FakeMachineReader
from tests.support.waiting import until_async

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="has no macOS commands")


@on_linux
async def test_a_mac_without_its_commands_does_not_guess() -> None:
    with pytest.raises(HardwareError, match="memory could not be read"):
        await probe.read_machine_facts("darwin")


async def test_no_third_system() -> None:
    with pytest.raises(HardwareError, match="win32"):
        await probe.read_machine_facts("win32")


@pytest.mark.parametrize("make", [
    pytest.param(SystemMachineReader, marks=on_linux, id="this-machine"),
    pytest.param(lambda _: FakeMachineReader(), id="given"),
])  # fmt: skip
async def test_a_reading_has_every_part(
    make: Callable[[Path], MachineReader], tmp_path: Path
) -> None:
    reading = await make(tmp_path / "models" / "not-yet").take()
    assert reading.memory is not None
    assert 0 < reading.memory.available_bytes <= reading.memory.total_bytes
    assert 0 <= reading.memory.stalled_percent <= 100
    assert reading.disk is not None
    assert 0 < reading.disk.free_bytes <= reading.disk.total_bytes
    assert reading.heat is not None
    assert reading.reboot is not None
    assert reading.power in ("Mains", "Battery", "Unknown")
    assert reading.owner_idle_s is None or reading.owner_idle_s >= 0


@on_linux
async def test_a_mac_without_its_commands_is_unknown(tmp_path: Path) -> None:
    reading = await SystemMachineReader(tmp_path, platform="darwin").take()
    assert reading.disk is not None
    assert reading.disk.total_bytes == probe.read_disk(tmp_path).total_bytes
    assert reading == MachineReading(
        disk=reading.disk, local_models=(), runs_etcd=reading.runs_etcd
    )  # other processes change what is free


@on_linux
async def test_another_disk_of_the_state_folder_is_read() -> None:
    here, there = Path("/"), Path("/dev/shm")
    reading = await SystemMachineReader(here, state_dir=there / "not-yet").take()
    assert reading.disk is not None
    assert reading.state_disk is not None
    assert (reading.disk.path, reading.state_disk.path) == ("/", "/dev/shm/not-yet")
    assert (await SystemMachineReader(here, state_dir=here / "x").take()).state_disk is None


async def test_a_disk_that_hangs_is_queried_once_and_awaited_once() -> None:
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


async def test_models_below_the_models_folder_are_read(tmp_path: Path) -> None:
    for name in ("tiny", "org/big", "org--hub@0123456789ab", "org/deep/er"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
        (tmp_path / name / "model.safetensors").write_bytes(b"12345")
    reading = await SystemMachineReader(tmp_path, platform="linux").take()
    found = {model.path: model.weights_bytes for model in reading.local_models or ()}
    assert found == {"tiny": 5, "org/big": 5}
