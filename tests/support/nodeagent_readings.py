"""Readings that a test says: the port to the machine, without a machine."""

import asyncio
from dataclasses import dataclass, field

from nodeagent.hardware.readings import (
    DiskReading,
    HeatReading,
    MachineReading,
    MemoryReading,
    RebootReading,
)

GIB = 2**30

WELL = MachineReading(
    memory=MemoryReading(total_bytes=64 * GIB, available_bytes=40 * GIB),
    disk=DiskReading(total_bytes=500 * GIB, free_bytes=300 * GIB),
    heat=HeatReading(),
    reboot=RebootReading(total_bytes=64 * GIB, wired_bytes=3 * GIB),
    power="Mains",
    owner_idle_s=4000.0,
)


@dataclass
class Given:
    """A machine that is as `now` says; the test changes it."""

    now: MachineReading = field(default=WELL)
    error: OSError | None = None
    hangs: bool = False
    taken: int = 0

    async def take(self) -> MachineReading:
        self.taken += 1
        if self.error is not None:
            raise self.error
        if self.hangs:
            await asyncio.Event().wait()
        return self.now
