"""Asks the machine what it is, whichever system it runs. Chooses the reader; parses nothing itself."""

import asyncio
import sys
from typing import Final

from nodeagent.hardware import command, linux, macos, memory
from nodeagent.hardware.facts import HardwareError, HardwareFacts

_TIMEOUT_S: Final = 5.0


async def probe(platform: str = sys.platform) -> HardwareFacts:
    """Return this machine's inventory."""
    match platform:
        case "darwin":
            return await macos.read()
        case "linux":
            return linux.read()
        case _:
            raise HardwareError(f"nodes run macOS or Linux; this machine runs {platform}")


async def available_memory_bytes(platform: str = sys.platform) -> int | None:
    """Return how much memory a new model could take now; None if the machine did not say, which is not 0."""
    if platform != "darwin":
        return linux.available_memory_bytes()
    seen = await mac_memory()
    return memory.available_bytes(seen) if seen else None


async def mac_memory() -> memory.MacMemory | None:
    """Return a Mac's live memory, with the wired total and the pressure; None if vm_stat did not answer."""
    async with asyncio.TaskGroup() as group:
        vm_stat = group.create_task(command.output(("/usr/bin/vm_stat",), timeout_s=_TIMEOUT_S))
        pressure = group.create_task(
            command.output(("/usr/sbin/sysctl", memory.PRESSURE_SYSCTL), timeout_s=_TIMEOUT_S)
        )
    return memory.parse(vm_stat.result() or "", pressure.result() or "")
