"""Two Macs become one fleet over mutual TLS: `up --join`, `token create`, `join`, on real processes and addresses."""

import asyncio
import json
import os
import re
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.names import Identity, Role
from machinery.clock import SystemClock
from tests.support.fleet import model_deployment
from tests.support.two_macs import MARKS, SPREAD, Mac, joined, two_macs

pytestmark = [*MARKS, pytest.mark.mlx, pytest.mark.timeout(420)]


@pytest.fixture
async def macs(tmp_path: Path, models_dir: Path) -> AsyncIterator[tuple[Mac, Mac]]:
    async with two_macs(tmp_path, models_dir) as made:
        yield made


async def ask(session: aiohttp.ClientSession, mac: Mac, key: str) -> tuple[str, str]:
    """Stream one reply from the gateway; return its text and the node that answered."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    async with session.post(f"{mac.url}/v1/completions", json=body, headers=headers) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        assert text.rstrip().endswith("data: [DONE]"), text
        written = "".join(re.findall(r'"text":"([^"]*)"', text))
        return written, answer.headers["x-fleet-node"]


async def engines(mac: Mac) -> dict[str, str]:
    """Return the URL of the engine on each node."""
    found = json.loads(await mac.ok("get", "endpoints", "-o", "json"))["items"]
    return {one["spec"]["node"]: one["spec"]["url"] for one in found}


async def status_of(url: str, context: ssl.SSLContext | None, name: str = "") -> int | str:
    """Return the status of `/health`, or the kind of error without one."""
    connector = aiohttp.TCPConnector(ssl=context or False)
    try:
        async with (
            asyncio.timeout(5),
            aiohttp.ClientSession(connector=connector) as session,
            session.get(f"{url}/health", server_hostname=name or None) as answer,
        ):
            return answer.status
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return type(error).__name__


async def test_a_second_mac_joins_with_three_commands(macs: tuple[Mac, Mac]) -> None:
    first, second = macs
    shown = await first.up()
    assert f"fleet ready: {first.url}/v1" in shown
    assert f"fleetctl join TOKEN {first.address}:4002" in shown
    token = await joined(first, second)
    assert token.startswith("mf1.")
    await first.ok("apply", "-f", "-", stdin=SPREAD)
    await first.ok("wait", "md/tiny", "--for=condition=Available", "--timeout=120s")
    key = (await first.ok("create", "apikey", "ci")).strip()
    found = await engines(first)
    assert set(found) == {"node-1", "node-2", "mac-2"}
    assert {url.partition(":")[0] for url in found.values()} == {"https"}
    assert urlsplit(found["mac-2"]).hostname == second.address
    async with first.client() as session:
        answers = [await ask(session, first, key) for _ in range(12)]
    assert len({text for text, _ in answers}) == 1
    assert {node for _, node in answers} == set(found)
    await nobody_else_reaches_the_engines(first, second, found)
    status = await first.ok("secure", "status")
    assert "TLS mode strict" in status
    assert "agent of node mac-2" in status
    assert "engines: 3, of which 0 serve other machines without TLS" in status
    await fleetctl_needs_no_flags(first)
    await it_comes_back(first, key)


async def fleetctl_needs_no_flags(first: Mac) -> None:
    """Use the gateway and the agents with what the data folder holds."""
    said = await first.ok("chat", "tiny", "-m", "x", "--max-tokens", "4")
    assert said.endswith("\n")
    assert "listens" in await first.ok("logs", "node/mac-2")
    doctor = await first.ok("doctor")
    assert ", 0 FAIL" in doctor, doctor


async def nobody_else_reaches_the_engines(first: Mac, second: Mac, found: dict[str, str]) -> None:
    """Try a machine without a certificate, and the wrong ones."""
    fleet = Credentials(IdentityFolder(first.data / "identities" / "gateway"), SystemClock())
    node = Credentials(IdentityFolder(second.root / "mac-2" / "identity"), SystemClock())
    nodes = frozenset({Role.NODE})
    for name, url in found.items():
        dns = Identity(fleet.identity.fleet, Role.NODE, name).dns_name
        assert await status_of(url, fleet.client(nodes).context, dns) == 200
        anonymous = first.trust()
        anonymous.check_hostname = False
        assert isinstance(await status_of(url, anonymous), str)
        assert await status_of(url.replace("https:", "http:"), None) in (
            503,
            "ServerDisconnectedError",
        )
        if name != "mac-2":
            assert isinstance(await status_of(url, node.client(nodes).context, dns), str)


async def it_comes_back(first: Mac, key: str) -> None:
    """Kill the supervisor, and start the fleet again without --join and with it: objects stay."""
    os.kill(first.supervisor(), signal.SIGKILL)
    for flags in ((), ("--join", first.address)):
        await first.ok(*first.up_words(*flags), "--detach")
        assert "tiny" in await first.ok("get", "md")
        await first.ok("wait", "md/tiny", "--for=condition=Available", "--timeout=120s")
        if flags:
            async with first.client() as session:
                await ask(session, first, key)
        await first.ok("down")


async def test_a_start_that_is_killed_at_any_step_is_finished_by_the_next(
    macs: tuple[Mac, Mac],
) -> None:
    first, _ = macs
    words = (*first.up_words("--join", first.address), "--data-dir", str(first.data))
    await first.ok(*first.up_words(), "--detach")
    await first.ok("apply", "-f", "-", stdin=model_deployment(replicas=0).encode())
    await first.ok("down")
    for limit_s in (0.8, 1.2, 1.6, 2.0, 2.5, 3.0, 4.0):
        with suppress(TimeoutError):
            await first.run(*words, limit_s=limit_s)
    await first.up()
    assert "tiny" in await first.ok("get", "md")
    assert "TLS mode strict" in await first.ok("secure", "status")
    token = await first.ok("token", "create", "-o", "token")
    assert token.startswith("mf1.")
