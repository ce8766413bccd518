"""`fleetctl launch` and the local proxy, with real gateways and a program that stands for a coding agent."""

import asyncio
import json
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import orjson
import pytest
from yarl import URL

from fleetctl.chat.answer_stream import GatewayAccess
from fleetctl.launch import local_proxy
from fleetctl.launch.agents import AGENTS, Setup
from gateway.limits import GatewayLimits
from machinery.clock import SystemClock
from store import keys
from store.memory import MemoryTransport
from store.port import Put, Transport
from tests.support.fleet import Fleet
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.gateway_calls import put_api_key
from tests.support.gateway_engine_scripts import chat, delta
from tests.support.gateway_fake_engine import Call, FakeEngine, Script, running
from tests.support.gateway_world import Running, World, running_gateway
from tests.support.waiting import until, until_async

KEY = "sk-fleet-abc"
CHAT = {"model": "qwen", "messages": [{"role": "user", "content": "hi"}]}
# What an agent does with the settings of Claude Code: it asks the helper for its key, and the gateway for an answer.
AGENT = """#!/usr/bin/env python3
import json, os, pathlib, subprocess, sys, urllib.request
folder = pathlib.Path(os.environ["CLAUDE_CONFIG_DIR"])
settings = json.loads((folder / "settings.json").read_text())
key = subprocess.run(settings["apiKeyHelper"], shell=True, capture_output=True, text=True, check=True).stdout
assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "corp.example,127.0.0.1"
assert key not in str(os.environ) and key not in str(sys.argv) and "ANTHROPIC_API_KEY" not in os.environ
messages = [{"role": "system", "content": "I am an agent."}, {"role": "user", "content": "hi"}]
body = {"model": settings["model"], "messages": messages}
url = settings["env"]["ANTHROPIC_BASE_URL"] + "/v1/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {"x-api-key": key, "content-type": "application/json"})
print(sys.argv[1:], json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
sys.exit(3)
"""


@asynccontextmanager
async def guarded(script: Script) -> AsyncIterator[tuple[Running, World, FakeEngine]]:
    """Run a gateway that requires keys, with the model `qwen`."""
    world = World(MemoryTransport(SystemClock()))
    limits = GatewayLimits(drain_timeout_s=0.0, asks_for_keys=True)
    async with (
        running(FakeEngine("qwen-0", script)) as engine,
        running_gateway(world.transport, limits) as gateway,
    ):
        await world.serve("qwen", engine)
        await put_api_key(world, KEY)
        await gateway.knows("qwen", ready=1)
        await gateway.knows_keys()
        yield gateway, world, engine


async def launched(*words: str, env: dict[str, str]) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", "launch", *words),
        env=env,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_an_agent_gets_its_settings_and_an_answer(tmp_path: Path) -> None:
    program, key = tmp_path / "bin" / "claude", tmp_path / "key"
    program.parent.mkdir()
    program.write_text(AGENT)
    program.chmod(0o755)
    key.touch(mode=0o600)
    key.write_text(KEY)
    environ = {
        "PATH": f"{program.parent}:/usr/bin:/bin",
        "XDG_DATA_HOME": str(tmp_path),
        "ANTHROPIC_API_KEY": "mine",
        "NO_PROXY": "corp.example",
    }
    async with guarded(chat) as (gateway, _, _):
        words = ("--gateway", gateway.url, "--api-key-file", str(key), "--", "-p", "say hi")
        recorded = tmp_path / "claude.json"
        code, out, err = await launched("claude", f"--record={recorded}", *words, env=environ)
        assert (code, out) == (3, "['-p', 'say hi'] hello from qwen-0\n"), err
        assert "has a context of 4,096 tokens" in err
        assert "prefixes: [{name: claude, file: claude.json, tokens: 1024}]\n" in err
        assert json.loads(recorded.read_text()) == {
            "messages": [{"role": "system", "content": "I am an agent."}]
        }
        assert recorded.stat().st_mode & 0o777 == 0o600
        code, out, err = await launched("codex", *words, env=environ)
    assert (code, out) == (1, "")
    assert err.endswith("Install it: npm install -g @openai/codex\n")


@pytest.mark.etcd
async def test_a_gateway_may_read_the_new_key_late(
    shared: Fleet, transport: Transport, tmp_path: Path
) -> None:
    """Its watch is a moment behind the command, or more on a busy machine."""
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(AGENT)
    program.chmod(0o755)
    environ = {
        "PATH": f"{program.parent}:/usr/bin:/bin",
        "XDG_DATA_HOME": str(tmp_path),
        "NO_PROXY": "corp.example",
    }
    async with guarded(chat) as (gateway, world, _):

        async def deliver_late() -> None:
            async def is_refused() -> bool:
                return 'fleet_gateway_limited_total{reason="wrong_key"}' in await gateway.metrics()

            await until_async(is_refused, limit_s=60, what="a request with the new key")
            (stored,) = (await transport.list(keys.API_KEY_PREFIX)).items
            await world.transport.commit([], [Put(key=stored.key, value=stored.value)])

        words = ("claude", "--gateway", gateway.url, "--etcd", str(shared.etcd.address))
        async with asyncio.TaskGroup() as group:
            group.create_task(deliver_late())
            code, out, err = await launched(*words, "--", "-p", "say hi", env=environ)
        assert (code, out) == (3, "['-p', 'say hi'] hello from qwen-0\n"), err
    assert not (await transport.list(keys.API_KEY_PREFIX)).items


@pytest.mark.parametrize("name", AGENTS)
def test_the_key_of_an_agent_is_in_a_private_file_only(tmp_path: Path, name: str) -> None:
    setup = Setup(folder=tmp_path, url="http://127.0.0.1:1", key="secret", model="m", context=9)
    command = AGENTS[name].write(setup)
    assert "secret" not in str(command)
    holders = [path for path in tmp_path.iterdir() if "secret" in path.read_text()]
    assert holders
    assert {path.stat().st_mode & 0o777 for path in holders} == {0o600}


async def never_ends(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(delta("once"))
    await asyncio.Event().wait()


async def test_requests_of_a_program_pass_to_a_gateway_that_answers() -> None:
    async with guarded(chat) as (gateway, _, engine), aiohttp.ClientSession() as http:
        dead = GatewayAccess(url="http://127.0.0.1:9", key=KEY)
        live = GatewayAccess(url=gateway.url, key=KEY)
        async with local_proxy.serving((dead, live), (0,), SystemClock(), token="t") as (url,):

            async def ask(**sent: str) -> tuple[int, bytes]:
                post = http.post(f"{url}/v1/chat/completions", json=CHAT, headers=sent)
                async with post as response:
                    return response.status, await response.read()

            for sent in ({"authorization": "Bearer t"}, {"x-api-key": "t"}):
                status, body = await ask(**sent)
                assert (status, b"hello from qwen-0" in body) == (200, True), body
            assert (await ask())[0] == 401
            assert (await ask(authorization=f"Bearer {KEY}"))[0] == 401
            assert (await ask(**{"x-api-key": "t", "origin": "https://evil.example"}))[0] == 403
            assert (await ask(**{"x-api-key": "t", "host": "evil.example"}))[0] == 421
            assert (await ask(**{"x-api-key": "t", "origin": "http://localhost:3000"}))[0] == 200
            assert (await ask(**{"x-api-key": "t", "origin": "http://["}))[0] == 403
            # What is no path could become a part of the host, which gets the key.
            for target in ("@127.0.0.1:9/x", "*", "http://127.0.0.1:9/x", "//127.0.0.1:9/x"):
                reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
                head = f"GET {target} HTTP/1.1\r\nhost: localhost\r\nx-api-key: t\r\n\r\n"
                writer.write(head.encode())
                answer = await reader.read()
                assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 404"), (target, answer)
                writer.close()
            # A client that goes away ends its request at the engine.
            engine.script = never_ends
            stream = orjson.dumps({**CHAT, "stream": True})
            post = http.post(f"{url}/v1/chat/completions", data=stream, headers={"x-api-key": "t"})
            async with post as response:
                assert b"once" in await response.content.readuntil(b"once")
            await until(lambda: engine.abandoned == 1, what="the end of the request")
        async with local_proxy.serving((dead,), (0,), SystemClock()) as (url,):
            status, body = await ask()
            assert status == 502
            assert "no gateway of the fleet answers" in json.loads(body)["error"]["message"]


async def test_a_port_in_use_is_named() -> None:
    async with running_gateway() as gateway:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            words = ("proxy", "--port", str(port), "--gateway", gateway.url)
            done = await run_fleetctl(*words)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(
        f"error: port {port} on 127.0.0.1: address already in use. Quit Ollama"
    )
