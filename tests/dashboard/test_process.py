"""The process `fleet-dashboard` itself, with a real etcd that is killed and comes back."""

import asyncio
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from schemas.node import NodeLease
from store import codec, keys
from store.etcd.connect import connect
from store.port import Put
from tests.support.etcd import running_etcd
from tests.support.ports import free_port
from tests.support.waiting import until_async

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
async def test_it_shows_the_last_state_while_etcd_is_away(tmp_path: Path) -> None:
    port = free_port()
    snapshot = f"http://127.0.0.1:{port}/api/v1/snapshot?view=macs"
    async with (
        running_etcd(tmp_path / "etcd") as etcd,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http,
    ):
        transport = connect(etcd.address)
        lease = codec.encode(NodeLease(uid="u", session="s"))
        await transport.commit([], [Put(key=keys.node_lease_key("mac-1"), value=lease)])
        words = ("--etcd", str(etcd.address), "--port", str(port))
        process = await start(*words, "--state-dir", str(tmp_path / "state"))
        try:
            assert await until_async(lambda: fetch(http, snapshot))
            await etcd.supervisor.stop()
            found = await fetch(http, snapshot)
            assert found is not None
            assert str(found["views"]).count("mac-1") == 1
            await etcd.start()
            await transport.commit([], [Put(key=keys.node_lease_key("mac-2"), value=lease)])

            async def sees_both() -> bool:
                seen = await fetch(http, snapshot)
                return seen is not None and str(seen["views"]).count("'name': 'mac-") == 2

            await until_async(sees_both, limit_s=60)
        finally:
            process.send_signal(signal.SIGTERM)
            await transport.close()
            assert await process.wait() == 0


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
