"""Fixtures: a gateway with one fake engine, one that requires keys, and the official clients."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anthropic
import ollama
import orjson
import pytest

from machinery.clock import SystemClock
from store.memory import MemoryTransport
from tests.support.gateway_api_scripts import says
from tests.support.gateway_calls import KEYS_REQUIRED, SECRET, put_api_key
from tests.support.gateway_fake_engine import FakeEngine, Script, running
from tests.support.gateway_world import Running, World, deployment, running_gateway
from tests.support.waiting import until


@dataclass
class Stage:
    """One engine behind a gateway."""

    gateway: Running
    engine: FakeEngine

    def plays(self, script: Script) -> None:
        """Set the engine's script."""
        self.engine.script = script

    @property
    def asked(self) -> dict[str, Any]:
        """The last request body at the engine."""
        body: dict[str, Any] = orjson.loads(self.engine.calls[-1].body)
        return body

    @property
    def path(self) -> str:
        return self.engine.calls[-1].path


@pytest.fixture
async def stage(world: World, gateway: Running) -> AsyncIterator[Stage]:
    async with running(FakeEngine("m-0", says("Hello there"))) as engine:
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
        yield Stage(gateway, engine)


@pytest.fixture(scope="module")
async def shared_stage() -> AsyncIterator[Stage]:
    """A stage for requests that are refused before an engine gets them: nothing of one is left for the next."""
    world = World(MemoryTransport(SystemClock()))
    async with (
        running(FakeEngine("m-0", says("Hello there"))) as engine,
        running_gateway(world.transport) as gateway,
    ):
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
        yield Stage(gateway, engine)


@pytest.fixture
async def spoken(stage: Stage) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(stage.gateway.url) as client:
        yield client


@pytest.fixture
async def messenger(stage: Stage) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=stage.gateway.url, api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="module")
async def closed() -> AsyncIterator[Running]:
    world = World(MemoryTransport(SystemClock()))
    await put_api_key(world, SECRET, models=("m",))
    async with (
        running(FakeEngine("m-0", says("Hi"))) as engine,
        running_gateway(world.transport, KEYS_REQUIRED) as gateway,
    ):
        await world.serve("m", engine)
        await world.put(deployment("hidden"))
        await gateway.knows("hidden", ready=0)
        await gateway.knows("m", ready=1)
        await until(lambda: bool(gateway.gateway.fleet_state.keyring), what="the key")
        yield gateway
