"""The process `fleet-dashboard` itself: what it listens on."""

import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.support.etcd import running_etcd
from tests.support.ports import free_port

pytestmark = pytest.mark.etcd


async def fetch(http: aiohttp.ClientSession, url: str) -> dict[str, object] | None:
    try:
        async with http.get(url) as response:
            found: dict[str, object] = await response.json()
            return found if response.status == 200 else None
    except aiohttp.ClientError:
        return None


async def start(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dashboard", "--auth", "off", *words),
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.ci
async def test_other_machines_are_served_with_tls_alone(tmp_path: Path) -> None:
    async with running_etcd(tmp_path) as etcd:
        port = str(free_port())
        process = await start("--etcd", str(etcd.address), "--host", "0.0.0.0", "--port", port)
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while b"does not listen" not in (line := await process.stderr.readline()):
                assert line
        assert b"--identity-dir" in line
        assert b"--insecure-http" in line
        async with aiohttp.ClientSession() as http:
            assert await fetch(http, f"http://127.0.0.1:{port}/health/live") is None
        process.terminate()
        await process.wait()
