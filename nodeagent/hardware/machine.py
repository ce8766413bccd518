"""Asks this machine how it is, whichever system it runs. Chooses the reader; parses nothing itself."""

import asyncio
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Generic, TypeVar

from nodeagent.hardware import linux_fabric, linux_live, macos_fabric, macos_live
from nodeagent.hardware.readings import Disk, Reading
from schemas.fabric import NodeFabric

T = TypeVar("T")

_TIMEOUT_S: Final = 5.0
# Every third reading, so every 30 s: system_profiler is no light command. Ports go dead while a group idles
# (exo#1973) and addresses move (exo#2067), so once at the start would not do.
_FABRIC_EVERY: Final = 3


class Machine:
    """The machine that the agent runs on (`Readings`)."""

    def __init__(self, models_dir: Path, platform: str = sys.platform) -> None:
        self._platform = platform
        self._disk = Patient(lambda: read_disk(models_dir))
        self._linux = Patient(linux_live.read)
        self._linux_fabric = Patient(linux_fabric.read)
        self._fabric_due_in = 0

    async def take(self) -> Reading:
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
        found = await (macos_fabric.read() if is_mac else self._linux_fabric.ask())
        self._fabric_due_in = 0 if found is None else _FABRIC_EVERY - 1
        return found

    async def _system(self) -> Reading:
        if self._platform == "darwin":
            return await macos_live.read()
        return await self._linux.ask() or Reading()


def read_disk(folder: Path) -> Disk:
    """Return the disk that the folder is on, or will be: it need not exist yet.

    Raises:
        OSError: the system does not say.

    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(there)
    return Disk(total_bytes=usage.total, free_bytes=usage.free)


class Patient(Generic[T]):
    """Asks in a thread, one question at a time: a disk in a network that is gone holds its thread for minutes."""

    def __init__(self, question: Callable[[], T], *, limit_s: float = _TIMEOUT_S) -> None:
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
