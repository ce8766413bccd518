"""A recorder as the benches start it: a real process on a real etcd, without keys."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil

from tests.support.ports import free_port


@asynccontextmanager
async def recorder(etcd: str, folder: Path) -> AsyncIterator[tuple[psutil.Process, str]]:
    """Run the process, and wait until it knows the fleet."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = ("--etcd", etcd, "--port", str(port), "--state-dir", str(folder), "--auth", "off")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dashboard", *words), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(120):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"{url}/health") as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.2)
        yield psutil.Process(process.pid), url
    finally:
        process.kill()
        await process.wait()


async def metric(url: str, name: str) -> float:
    """Return the value of a metric of the recorder."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return float(next(one.split()[1] for one in lines if one.startswith(f"{name} ")))
