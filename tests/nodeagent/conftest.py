"""Fixtures of the agent's tests: one tiny model for all engines, an etcd and an agent for each module, a fake engine."""

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from nodeagent.engines.health_client import HealthClient
from schemas.wire.engine_address import EngineAddress
from store.etcd.connect import connect
from store.etcd.member.embedded import EmbeddedEtcd
from tests.support.etcd import running_etcd
from tests.support.nodeagent_agents import NODE, AgentProcess, Desk
from tests.support.nodeagent_engine import FakeEngine


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds the model `tiny`; made by another process, because mlx is heavy."""
    folder = tmp_path_factory.mktemp("models")
    making = [sys.executable, "-m", "tests.support.tiny_model", str(folder / "tiny"), "--endless"]
    subprocess.run(making, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="module")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedEtcd]:
    async with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture(scope="module")
async def agent(
    etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory, models_dir: Path
) -> AsyncIterator[AgentProcess]:
    """Return the one agent of this module; a test that ends it starts it again."""
    made = AgentProcess(etcd, tmp_path_factory.mktemp("agent") / "state", models_dir, NODE)
    made.start()
    yield made
    await made.end()


@pytest.fixture
async def desk(etcd: EmbeddedEtcd) -> AsyncIterator[Desk]:
    store = connect(etcd.address)
    yield Desk(store)
    await store.close()


@pytest.fixture
async def port() -> AsyncIterator[FakeEngine]:
    made = FakeEngine()
    app = web.Application()
    app.router.add_get("/health", made.on_health)
    app.router.add_post("/v1/completions", made.on_completion)
    app.router.add_post("/v1/embeddings", made.on_embedding)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.address = EngineAddress("127.0.0.1", runner.addresses[0][1])
    yield made
    await runner.cleanup()


@pytest.fixture
async def client() -> AsyncIterator[HealthClient]:
    made = HealthClient()
    yield made
    await made.close()
