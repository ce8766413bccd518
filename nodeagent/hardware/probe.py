"""Readers of this machine, chosen by its operating system: facts once at the start, readings from time to time."""

import asyncio
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil

from machinery.single_query import SingleQuery
from models.model_files import model_folders
from nodeagent.hardware import linux, macos, macos_fabric, panic_reports
from nodeagent.hardware.readings import DiskReading, HardwareError, HardwareFacts, MachineReading
from schemas.node import KernelPanic, LocalModel, NodeFabric

# Every third reading, so every 30 s: system_profiler is expensive. Once at the start is not enough, because ports go dead
# while a group idles (exo#1973) and addresses change (exo#2067).
_READINGS_PER_FABRIC: Final = 3
# Every five minutes: macOS writes the report within minutes after the start that follows the panic.
_READINGS_PER_PANICS: Final = 30


async def read_machine_facts(platform: str = sys.platform) -> HardwareFacts:
    """Return the facts of this machine.

    Raises:
        HardwareError: its memory cannot be read, or its system is not supported.

    """
    match platform:
        case "darwin":
            return await macos.read_facts()
        case "linux":
            return linux.read_facts()
        case _:
            raise HardwareError(f"nodes run macOS or Linux; this machine runs {platform}")


class SystemMachineReader:
    """Reads the machine that the agent runs on (`MachineReader`)."""

    def __init__(
        self, models_dir: Path, platform: str = sys.platform, *, state_dir: Path | None = None
    ) -> None:
        self._platform = platform
        self._disks = SingleQuery(lambda: read_disks([models_dir, state_dir or models_dir]))
        self._models = SingleQuery(lambda: read_local_models(models_dir))
        self._linux = SingleQuery(linux.read_reading)
        self._linux_fabric = SingleQuery(linux.read_fabric)
        self._etcd = SingleQuery(_runs_etcd)
        self._panics = SingleQuery(panic_reports.read_panics)
        self._fabric_due_in = 0
        self._panics_due_in = 0

    async def take(self) -> MachineReading:
        """Return a reading; a part that cannot be read, or takes too long, is None."""
        is_slow_due = self._fabric_due_in <= 0
        async with asyncio.TaskGroup() as group:
            etcd = group.create_task(self._etcd.ask()) if is_slow_due else None
            wakes = group.create_task(self._wakes_on_lan()) if is_slow_due else None
            disks = group.create_task(self._disks.ask())
            models = group.create_task(self._models.ask())
            rest = group.create_task(self._system())
            fabric = group.create_task(self._cables())
            panics = group.create_task(self._reports())
        disk, state_disk = (*(disks.result() or ()), None, None)[:2]
        return replace(
            rest.result(),
            disk=disk,
            state_disk=state_disk,
            fabric=fabric.result(),
            panics=panics.result(),
            runs_etcd=None if etcd is None else etcd.result(),
            wakes_on_lan=None if wakes is None else wakes.result(),
            local_models=models.result(),
        )

    async def _cables(self) -> NodeFabric | None:
        """Return the cables if they are due; after a failure they are due at the next reading."""
        if self._fabric_due_in > 0:
            self._fabric_due_in -= 1
            return None
        is_mac = self._platform == "darwin"
        node_fabric = await (macos_fabric.read_fabric() if is_mac else self._linux_fabric.ask())
        self._fabric_due_in = 0 if node_fabric is None else _READINGS_PER_FABRIC - 1
        return node_fabric

    async def _wakes_on_lan(self) -> bool | None:
        # Linux machines are never put to sleep.
        return await macos.read_wakes_on_lan() if self._platform == "darwin" else None

    async def _reports(self) -> tuple[KernelPanic, ...] | None:
        """Return the reports of kernel panics if they are due."""
        if self._panics_due_in > 0 or self._platform != "darwin":
            self._panics_due_in -= 1
            return None
        self._panics_due_in = _READINGS_PER_PANICS - 1
        return await self._panics.ask()

    async def _system(self) -> MachineReading:
        if self._platform == "darwin":
            return await macos.read_reading()
        return await self._linux.ask() or MachineReading()


def _runs_etcd() -> bool:
    return any(process.info["name"] == "etcd" for process in psutil.process_iter(["name"]))


def available_memory_bytes() -> int:
    """Return the memory that a new process can take without swapping."""
    return int(psutil.virtual_memory().available)


def read_disk(folder: Path) -> DiskReading:
    """Return the disk of the folder, which need not exist yet.

    Raises:
        OSError: the disk cannot be read.

    """
    usage = shutil.disk_usage(_existing(folder))
    return DiskReading(path=str(folder), total_bytes=usage.total, free_bytes=usage.free)


def read_disks(folders: Sequence[Path]) -> tuple[DiskReading, ...]:
    """Return the disks of the folders, each disk once, in the order of the folders. Raises OSError."""
    by_device: dict[int, Path] = {}
    for folder in folders:
        by_device.setdefault(_existing(folder).stat().st_dev, folder)
    return tuple(map(read_disk, by_device.values()))


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def read_local_models(folder: Path) -> tuple[LocalModel, ...]:
    """Return the models below the models folder. Raises OSError."""
    items = model_folders(folder).items()
    return tuple(LocalModel(path=path, weights_bytes=size) for path, size in items)
