"""A gateway with one fake engine behind it, and the official clients."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anthropic
import ollama
import orjson
import pytest

from tests.gateway.fake_engine import FakeEngine, Script, running
from tests.gateway.surfaces.answering import says
from tests.gateway.world import Running, World


@dataclass
class Stage:
    """One engine behind a gateway."""

    gateway: Running
    engine: FakeEngine

    def plays(self, script: Script) -> None:
        """Have the engine answer so from now on."""
        self.engine.script = script

    @property
    def asked(self) -> dict[str, Any]:
        """What the engine was asked last."""
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
