"""A process that gets a tenth of a core: by a control group where this machine allows it, or by stopping it in turns."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

from tests.support.waiting import until

SHARE = 0.1
_PERIOD_S = 0.1
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def make_group(name: str) -> Path | None:
    """Return a new control group with a tenth of a core; None if this machine does not allow it."""
    period_us = int(_PERIOD_S * 1e6)
    quota_us = int(period_us * SHARE)
    for parent, settings in (
        (_V1, {"cpu.cfs_period_us": f"{period_us}", "cpu.cfs_quota_us": f"{quota_us}"}),
        (_V2, {"cpu.max": f"{quota_us} {period_us}"}),
    ):
        if not all((parent / file).exists() for file in ("cgroup.procs",)):
            continue
        group = parent / f"fleet-test-{os.getpid()}-{name}"
        try:
            group.mkdir()
            for file, value in settings.items():
                (group / file).write_text(value)
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        return group
    return None


@asynccontextmanager
async def in_group(group: Path, pid: int) -> AsyncIterator[None]:
    """Keep the process in the group during the block, and remove the group."""
    try:
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()


@asynccontextmanager
async def duty_cycle(pid: int, *, share: float = SHARE) -> AsyncIterator[None]:
    """Let the process run a part of the time during the block."""

    async def stop_and_go() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(_PERIOD_S * (1 - share))
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(_PERIOD_S * share)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(stop_and_go())
        try:
            yield
        finally:
            task.cancel()
            os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def frozen(pid: int) -> AsyncIterator[None]:
    """Stop the process during the block."""
    os.kill(pid, signal.SIGSTOP)
    # On a busy machine its threads may run for a moment after the signal.
    stopped = psutil.Process(pid)
    await until(lambda: stopped.status() == psutil.STATUS_STOPPED, what="the stop")
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
