"""Readings that a test sets: the reader port without a machine."""

import asyncio
from dataclasses import dataclass, field

from nodeagent.hardware.readings import (
    DiskReading,
    HeatReading,
    MachineReading,
    MemoryReading,
    RebootReading,
)
from schemas.node import NodeStatus

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
class FakeMachineReader:
    """A reader that returns `now`, which the test changes."""

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


STATUS = NodeStatus(
    uid="u",
    hostname="mac-1",
    address="127.0.0.1",
    agent_version="1",
    os="macOS",
    os_version="26.2",
    machine="Mac16,11",
    chip="Apple M4 Pro",
    cpu_cores=14,
    gpu_cores=20,
    memory_bytes=64 * GIB,
    allocatable_bytes=48 * GIB,
)
