"""Real engines that die in the middle of streams behind a real gateway: the official client notices nothing.

Every text, call, likelihood and usage is that of an uninterrupted answer: greedy and seeded, chats and completions.
"""

import asyncio
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.limits import GatewayLimits
from machinery.clock import SystemClock
from schemas.routing import Routing, Timeouts
from store import keys
from store.memory import MemoryTransport
from tests.support.engine_process import START_S, Engine, Start, eventually, launching
from tests.support.gateway_world import Running, World, deployment, endpoint, running_gateway
from tests.support.waiting import until

pytestmark = [pytest.mark.full, pytest.mark.fleet, pytest.mark.mlx, pytest.mark.timeout(300)]

MESSAGES = [{"role": "user", "content": "héllo, we hold these truths"}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 160}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"words": {"type": "array", "items": {"type": "string", "maxLength": 9}}},
            "required": ["words"],
            "additionalProperties": False,
        },
    },
}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": CHAT | {"temperature": 0},
    # Hot: most tokens are parts of characters. The penalties know what was emitted.
    "hot": CHAT | {"temperature": 2, "seed": 7, "frequency_penalty": 1.5, "presence_penalty": 1},
    "seeded": CHAT | {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    "likely": CHAT | {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    # Begun again and again, and never there.
    "stops": CHAT | {"temperature": 1.5, "seed": 1, "stop": ["a\0", "e\0", " \0", "t\0"]},
    "calls": CHAT | {"seed": 3, "tools": [TOOL], "tool_choice": "required"},
    "text": {"prompt": "We hold", "max_tokens": 160, "temperature": 0},
    "hot text": {"prompt": "We hold", "max_tokens": 160, "temperature": 2, "seed": 11},
    "response": {"input": "We hold", "max_output_tokens": 160, "temperature": 0},
    "called": {
        "input": "We hold",
        "max_output_tokens": 160,
        "temperature": 0,
        "tools": [{"type": "function", **TOOL["function"]}],
        "tool_choice": "required",
    },
}


@dataclass
class Heard:
    """The events that a client got from one stream."""

    text: str = ""
    calls: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    roles: int = 0
    ids: set[tuple[str, int]] = field(default_factory=set)
    usage: Any = None
    chunks: int = 0

    def hear(self, chunk: Any) -> None:
        self.chunks += 1
        self.ids.add((chunk.id, chunk.created))
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.finish += [choice.finish_reason] if choice.finish_reason else []
            if chunk.object == "text_completion":
                self.text += choice.text
                continue
            self.text += choice.delta.content or ""
            self.roles += choice.delta.role is not None
            for call in choice.delta.tool_calls or ():
                self.calls += f"{call.id or ''}{call.function.name or ''}{call.function.arguments}"
            self.logprobs += choice.logprobs.content if choice.logprobs else []

    def hear_response(self, event: Any) -> None:
        """Take an event of /v1/responses."""
        assert event.sequence_number == self.chunks
        self.chunks += 1
        response = getattr(event, "response", None)
        if response is not None:
            self.ids.add((response.id, response.created_at))
        if event.type == "response.output_text.delta":
            self.text += event.delta
        elif event.type == "response.function_call_arguments.delta":
            self.calls += event.delta
        elif event.type in ("response.completed", "response.incomplete"):
            items = [item.model_dump(exclude={"id"}) for item in event.response.output]
            self.finish.append(f"{event.type} {items}")
            used = event.response.usage
            self.usage = Namespace(
                prompt_tokens=used.input_tokens, completion_tokens=used.output_tokens
            )

    def answer(self) -> tuple[Any, ...]:
        """Return what must not depend on who died."""
        tokens = [logprob.token for logprob in self.logprobs]
        used = (self.usage.prompt_tokens, self.usage.completion_tokens)
        return self.text, self.calls, tokens, self.finish, self.roles, used


async def listen(client: openai.AsyncOpenAI, fields: dict[str, Any], into: Heard) -> None:
    if "input" in fields:
        respond: Any = client.responses.create
        async for event in await respond(model="m", **fields, stream=True):
            into.hear_response(event)
        return
    create: Any = client.chat.completions.create
    if "prompt" in fields:
        create = client.completions.create
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await create(model="m", **fields, **options):
        into.hear(chunk)


@asynccontextmanager
async def asking(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@asynccontextmanager
async def streams(gateway: Running) -> AsyncIterator[dict[str, Heard]]:
    """Ask for everything at once; inside all streams have begun, each is elsewhere. Ends when they have."""
    heard = {name: Heard() for name in ASKED}
    async with asking(f"{gateway.url}/v1") as client, asyncio.TaskGroup() as group:
        for name, fields in ASKED.items():
            group.create_task(listen(client, fields, heard[name]))
        await until(lambda: all(one.chunks > 3 for one in heard.values()), what="all streams")
        yield heard


@dataclass
class Fleet:
    """Engines, a store and a gateway."""

    start: Start
    model: Path
    world: World
    gateway: Running

    async def engine(self, replica: str) -> Engine:
        """Start an engine that nobody knows of yet."""
        engine = self.start(self.model, replica=replica, served_names=("m",), concurrency=16)
        await asyncio.to_thread(eventually, engine.is_ready, within_s=START_S)
        return engine

    async def publish(self, replica: str, engine: Engine, *, ready: int) -> None:
        await self.world.put(endpoint(replica, "m", engine.url.removesuffix("/v1")))
        await self.gateway.knows("m", ready=ready)

    @property
    def resumed(self) -> float:
        return self.gateway.gateway.metrics.resumptions.value("resumed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose greedy text never ends by itself."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    command = [sys.executable, "-m", "tests.support.tiny_model", str(folder), "--endless"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    blas = tmp_path / "blas"
    blas.mkdir(mode=0o700)
    with launching(tmp_path, blas) as function:
        yield function


async def test_engines_killed_stopped_and_restarted_in_streams(start: Start, model: Path) -> None:
    world = World(MemoryTransport(SystemClock()))
    limits = GatewayLimits(drain_timeout_s=0.0, resume_timeout_s=START_S)
    async with running_gateway(world.transport, limits) as gateway:
        fleet = Fleet(start, model, world, gateway)
        declared = deployment("m")
        quick = Routing(timeouts=Timeouts(attempt="2s"))
        spec = declared.spec.model_copy(update={"routing": quick})
        await world.put(declared.model_copy(update={"spec": spec}))
        first, second = await asyncio.gather(fleet.engine("m-0"), fleet.engine("m-1"))
        wanted = await answers(second)
        await fleet.publish("m-0", first, ready=1)
        await killed(fleet, wanted, first, second)
        await stopped(fleet, wanted, second)


async def answers(engine: Engine) -> dict[str, Any]:
    """Return what an engine answers that nobody disturbs."""
    heard = {name: Heard() for name in ASKED}
    async with asking(engine.url) as client, asyncio.TaskGroup() as group:
        for name, fields in ASKED.items():
            group.create_task(listen(client, fields, heard[name]))
    return {name: one.answer() for name, one in heard.items()}


async def killed(fleet: Fleet, wanted: dict[str, Any], first: Engine, second: Engine) -> None:
    """kill -9; another goes on."""
    async with streams(fleet.gateway) as heard:
        await fleet.publish("m-1", second, ready=2)
        running = [name for name, one in heard.items() if not one.finish]
        first.process.send_signal(signal.SIGKILL)
    check(heard, wanted)
    assert len(running) > 3
    assert fleet.resumed >= len(running) - 1  # one may have ended just then
    await fleet.world.delete(keys.endpoint_key("mac-1", "m-0"))


async def stopped(fleet: Fleet, wanted: dict[str, Any], engine: Engine) -> None:
    """The only engine falls silent; the streams wait for the one that is started in its place."""
    before = fleet.resumed
    async with streams(fleet.gateway) as heard:
        os.kill(engine.process.pid, signal.SIGSTOP)
        running = [name for name, one in heard.items() if not one.finish]
        third = await fleet.engine("m-1")
        await fleet.publish("m-1", third, ready=1)
    check(heard, wanted)
    assert fleet.resumed - before >= len(running) - 1
    assert len(running) > 3
    engine.process.send_signal(signal.SIGKILL)


def check(heard: dict[str, Heard], wanted: dict[str, Any]) -> None:
    for name, one in heard.items():
        assert one.answer() == wanted[name], name
        assert len(one.ids) == 1, name
