"""A process that gets a tenth of a core, by stopping it in turns."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from tests.support.waiting import until

SHARE = 0.1
_PERIOD_S = 0.1


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
