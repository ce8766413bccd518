"""Real coding agents, which `fleetctl launch` starts on a fleet with keys and a scripted model.

`make test-agents` installs them, with pinned versions. An agent has a home of its own, and a proxy that refuses all hosts but this one.
"""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from store import keys
from store.etcd.connect import connect
from tests.support.commands import run_module
from tests.support.fleet import Fleet, model_deployment
from tests.support.waiting import until_async

FOLDER = Path(__file__).parents[2] / ".agents"
NOTE = "edited by the model\n"
COMMAND = f"echo {NOTE.strip()} > notes.txt"
PATCH = f"*** Begin Patch\n*** Update File: notes.txt\n@@\n-A note.\n+{NOTE}*** End Patch\n"
pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """Command line of an agent without a terminal, and what the scripted model answers to `@edit`."""

    tool: str
    arguments: str = ""
    text: str = ""
    first: tuple[str, ...]
    """Words of a new session, PROMPT among them."""
    second: tuple[str, ...]
    """Words of a second turn."""


_AIDER = ("--yes-always", "--no-pretty", "--no-fancy-input")
CASES = {
    "claude": Agent(
        tool="Bash",
        arguments=json.dumps({"command": COMMAND, "description": "Write notes"}),
        first=("-p", "PROMPT", "--allowedTools", "Bash"),
        second=("-p", "PROMPT", "--continue"),
    ),
    "codex": Agent(
        tool="apply_patch",
        arguments=json.dumps({"input": PATCH}),
        first=("exec", "--dangerously-bypass-approvals-and-sandbox", "PROMPT"),
        second=("exec", "resume", "--last", "PROMPT"),
    ),
    "opencode": Agent(
        tool="bash",
        arguments=json.dumps({"command": COMMAND}),
        first=("run", "PROMPT"),
        second=("run", "--continue", "PROMPT"),
    ),
    "qwen": Agent(
        tool="run_shell_command",
        arguments=json.dumps({"command": COMMAND, "is_background": False}),
        first=("-y", "-p", "PROMPT"),
        second=("-y", "--continue", "-p", "PROMPT"),
    ),
    "aider": Agent(
        tool="",
        text=f"notes.txt\n```\n{NOTE}```\n",
        first=(*_AIDER, "--message", "PROMPT", "notes.txt"),
        second=(*_AIDER, "--restore-chat-history", "--message", "PROMPT", "notes.txt"),
    ),
}


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """A fleet of one node whose gateway requires keys."""
    models = tmp_path_factory.mktemp("models")
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), models)
    try:
        await fleet.etcd.start()
        fleet.start_reconciler()
        fleet.start_agent("node-1")
        fleet.start_gateway("--auth", "on")
        await fleet.joined(1)
        yield fleet
    finally:
        await fleet.stop()


async def in_flight(fleet: Fleet) -> int:
    """Return how many requests the engine has, as it says itself."""
    transport = connect(fleet.etcd.address)
    try:
        (endpoint,) = (await transport.list(keys.ENDPOINT_PREFIX)).items
    finally:
        await transport.close()
    url = json.loads(endpoint.value)["spec"]["url"]
    async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as response:
        return int((await response.json())["inFlight"])


async def launch(name: str, words: Sequence[str], fleet: Fleet, scratch: Path) -> Process:
    """Start an agent in a scratch repository as a user does; it is the leader of a process group."""
    home = scratch.parent / "home"
    home.mkdir(exist_ok=True)
    path = f"{FOLDER / 'node_modules' / '.bin'}:{FOLDER / 'bin'}:{os.environ['PATH']}"
    nowhere = dict.fromkeys(
        ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"
    )
    flags = ("--model", "scripted", "--etcd", str(fleet.etcd.address))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleetctl", "launch", name, *flags, "--", *words),
        cwd=scratch,
        env={"PATH": path, "HOME": str(home), "TERM": "dumb", **nowhere},
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )


@pytest.fixture
async def scratch(tmp_path: Path) -> Path:
    """A git repository with one file."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "notes.txt").write_text("A note.\n")
    identity = ("-c", "user.name=dev", "-c", "user.email=dev@example.com")
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "Add a note")):
        process = await asyncio.create_subprocess_exec("git", *identity, *words, cwd=folder)
        assert await process.wait() == 0
    return folder


@pytest.mark.parametrize("name", CASES)
async def test_an_agent_answers_edits_goes_on_and_is_cancelled(
    fleet: Fleet, scratch: Path, name: str
) -> None:
    agent = CASES[name]

    async def ask(words: Sequence[str], prompt: str) -> str:
        process = await launch(name, [w.replace("PROMPT", prompt) for w in words], fleet, scratch)
        out, err = await process.communicate()
        assert process.returncode == 0, out.decode() + err.decode() + fleet.words()
        print(f"$ fleetctl launch {name} -- {prompt}\n{out.decode()}")
        return out.decode()

    await run_module(
        "tests.support.scripted_model",
        *(str(fleet.models_dir / name), agent.tool, agent.arguments, agent.text),
    )
    spec = {"contextLength": 200_000, "concurrency": 2, "resources": {"memory": "2Gi"}}
    await fleet.applied(model_deployment("scripted", model={"path": name}, **spec))
    try:
        await fleet.available("scripted")
        assert "A plain answer." in await ask(agent.first, "say hi")
        assert (scratch / "notes.txt").read_text() == "A note.\n"
        assert (
            "Done, the file is edited." in await ask(agent.first, "@edit the notes")
            or not agent.tool
        )
        assert (scratch / "notes.txt").read_text() == NOTE
        assert "Second turn." in await ask(agent.second, "@again")

        words = [word.replace("PROMPT", "@forever") for word in agent.first]
        process = await launch(name, words, fleet, scratch)

        async def is_busy() -> bool:
            return await in_flight(fleet) > 0

        async def is_idle() -> bool:
            return await in_flight(fleet) == 0

        async def has_key() -> bool:
            listed = await fleet.ctl("get", "apikeys", "-o", "name")
            assert listed.code == 0, listed.err
            return f"{name}-" in listed.out

        await until_async(is_busy, limit_s=200, what="a request at the engine")
        assert await has_key()
        os.killpg(process.pid, signal.SIGINT)
        async with asyncio.timeout(100):
            out, err = await process.communicate()
        print(f"cancelled: {process.returncode}\n{out.decode()[-500:]}{err.decode()[-500:]}")
        assert process.returncode is not None
        await until_async(is_idle, limit_s=30, what="the end of the request at the engine")
        assert await has_key() is False, "its key is deleted"
    finally:
        done = await fleet.ctl("delete", "modeldeployment/scripted", "--wait")
        assert done.code == 0, done.err
