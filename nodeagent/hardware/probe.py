"""Asks the machine what it is, whichever system it runs. Chooses the reader; parses nothing itself.

Asks this machine how it is, whichever system it runs. Chooses the reader; parses nothing itself.
"""

import asyncio
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Generic, TypeVar

from nodeagent.hardware import linux, macos, macos_fabric, readings, system_text
from nodeagent.hardware.readings import DiskReading, HardwareError, HardwareFacts, MachineReading
from schemas.node import NodeFabric

_COMMAND_TIMEOUT_S: Final = 5.0


async def read_machine_facts(platform: str = sys.platform) -> HardwareFacts:
    """Return this machine's inventory."""
    match platform:
        case "darwin":
            return await macos.read_facts()
        case "linux":
            return linux.read_facts()
        case _:
            raise HardwareError(f"nodes run macOS or Linux; this machine runs {platform}")


async def available_memory_bytes(platform: str = sys.platform) -> int | None:
    """Return how much memory a new model could take now; None if the machine did not say, which is not 0."""
    if platform != "darwin":
        return linux.available_memory_bytes()
    seen = await mac_memory()
    return readings.mac_available_bytes(seen) if seen else None


async def mac_memory() -> readings.MacMemory | None:
    """Return a Mac's live memory, with the wired total and the pressure; None if vm_stat did not answer."""
    async with asyncio.TaskGroup() as group:
        vm_stat = group.create_task(
            system_text.command_output(("/usr/bin/vm_stat",), timeout_s=_COMMAND_TIMEOUT_S)
        )
        pressure = group.create_task(
            system_text.command_output(
                ("/usr/sbin/sysctl", readings.PRESSURE_SYSCTL), timeout_s=_COMMAND_TIMEOUT_S
            )
        )
    return readings.parse_mac_memory(vm_stat.result() or "", pressure.result() or "")


T = TypeVar("T")

_QUERY_TIMEOUT_S: Final = 5.0
# Every third reading, so every 30 s: system_profiler is no light command. Ports go dead while a group idles
# (exo#1973) and addresses move (exo#2067), so once at the start would not do.
_READINGS_PER_FABRIC: Final = 3


class SystemMachineReader:
    """The machine that the agent runs on (`Readings`)."""

    def __init__(self, models_dir: Path, platform: str = sys.platform) -> None:
        self._platform = platform
        self._disk = SingleQuery(lambda: read_disk(models_dir))
        self._linux = SingleQuery(linux.read_reading)
        self._linux_fabric = SingleQuery(linux.read_fabric)
        self._fabric_due_in = 0

    async def take(self) -> MachineReading:
        """Return how the machine is now; what cannot be read, or takes too long, is None in it."""
        async with asyncio.TaskGroup() as group:
            disk = group.create_task(self._disk.ask())
            rest = group.create_task(self._system())
            fabric = group.create_task(self._cables())
        return replace(rest.result(), disk=disk.result(), fabric=fabric.result())

    async def _cables(self) -> NodeFabric | None:
        """Return how it is cabled, if it is time to look; what could not be read is due at once."""
        if self._fabric_due_in > 0:
            self._fabric_due_in -= 1
            return None
        is_mac = self._platform == "darwin"
        found = await (macos_fabric.read_fabric() if is_mac else self._linux_fabric.ask())
        self._fabric_due_in = 0 if found is None else _READINGS_PER_FABRIC - 1
        return found

    async def _system(self) -> MachineReading:
        if self._platform == "darwin":
            return await macos.read_reading()
        return await self._linux.ask() or MachineReading()


def read_disk(folder: Path) -> DiskReading:
    """Return the disk that the folder is on, or will be: it need not exist yet.

    Raises:
        OSError: the system does not say.

    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(there)
    return DiskReading(total_bytes=usage.total, free_bytes=usage.free)


class SingleQuery(Generic[T]):
    """Asks in a thread, one question at a time: a disk in a network that is gone holds its thread for minutes."""

    def __init__(self, question: Callable[[], T], *, limit_s: float = _QUERY_TIMEOUT_S) -> None:
        self._question = question
        self._limit_s = limit_s
        self._asked: asyncio.Future[T] | None = None

    async def ask(self) -> T | None:
        """Return the answer; None if it does not come in time, or is an OSError."""
        is_late = self._asked is not None
        if self._asked is None:
            self._asked = asyncio.get_running_loop().run_in_executor(None, self._question)
        # Who was late once is not waited for again.
        await asyncio.wait((self._asked,), timeout=0 if is_late else self._limit_s)
        if not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        try:
            return asked.result()
        except OSError:
            return None
