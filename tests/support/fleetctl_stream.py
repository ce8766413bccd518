"""A running fleetctl process whose output is read line by line."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.fleet import Fleet

_LIMIT_S = 60.0


class Running:
    """A running fleetctl process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> str:
        """Return the next line of stdout or stderr."""
        assert self._process.stdout is not None
        async with asyncio.timeout(_LIMIT_S):
            return (await self._process.stdout.readline()).decode()

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    async def ended(self) -> int:
        """Wait for the process to end; return its exit code."""
        async with asyncio.timeout(_LIMIT_S):
            return await self._process.wait()


@asynccontextmanager
async def streaming(fleet: Fleet, *words: str) -> AsyncIterator[Running]:
    """Run fleetctl for the duration of the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", *words, "--etcd", str(fleet.etcd.address)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
