"""A real agent with real engines starts a few at a time, and tells why one that cannot start does not run."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from nodeagent.engines.health_client import HealthClient
from schemas.meta import find_condition
from schemas.replica import RankStatus
from store import codec, keys
from store.etcd.member.embedded import EmbeddedEtcd
from tests.support.nodeagent_agents import NODE, AgentProcess, Desk
from tests.support.waiting import until_async

pytestmark = [pytest.mark.etcd, pytest.mark.mlx, pytest.mark.timeout(240)]

NAMES = ("tiny-0", "tiny-1", "tiny-2")


@pytest.fixture(scope="module")
async def agent(
    etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory, models_dir: Path
) -> AsyncIterator[AgentProcess]:
    """Return an agent that loads one model at a time, with a password in its environment."""
    folder = tmp_path_factory.mktemp("agent") / "state"
    made = AgentProcess(etcd, folder, models_dir, NODE, flags=("--start-concurrency", "1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEET_ETCD_USER", "fleet-node-mac-1")
        password = folder.parent / "password"
        password.write_text("hunter2\n")
        password.chmod(0o600)
        patch.setenv("FLEET_ETCD_PASSWORD_FILE", str(password))
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
        made.start(tells_code=True)  # an interpreter of its own, with this environment
    yield made
    await made.end()


async def message_of(desk: Desk, name: str) -> str:
    item = await desk.store.get(keys.rank_key(NODE, name, 0))
    assert item is not None
    condition = find_condition(codec.decode(RankStatus, item).conditions, "Ready")
    assert condition is not None
    return condition.message


@pytest.mark.ci
async def test_the_words_of_an_engine_that_refuses_stay_and_it_is_not_started_again(
    desk: Desk, agent: AgentProcess
) -> None:
    await desk.assign("broken-0", uid="broken", path="nowhere")
    await desk.until_condition("broken-0", "False", "ModelUnusable")

    async def is_told() -> bool:  # the time follows the refusal
        return "; next attempt at " in await message_of(desk, "broken-0")

    assert await until_async(is_told)
    message = await message_of(desk, "broken-0")
    assert "does not exist" in message
    # Before, it was started again after a second.
    await asyncio.sleep(5)
    assert await message_of(desk, "broken-0") == message
    assert await desk.restarts("broken-0") == 1
    assert "broken-0" not in [engine.replica for engine in agent.engines()]
    await desk.remove("broken-0")


@pytest.mark.full
async def test_one_engine_loads_after_the_other(desk: Desk, agent: AgentProcess) -> None:
    for name in NAMES:
        await desk.assign(name, uid=name)
    client = HealthClient()
    seen: set[str] = set()
    inherited: set[str] = set()

    async def all_serve() -> bool:
        running = agent.engines()
        # Listed first: an engine that is listed beside another one was started after that was Ready.
        answers = [await client.ask(process.address, process.replica_uid) for process in running]
        assert sum(answer is None or answer.state != "Ready" for answer in answers) <= 1
        for one in running:
            with contextlib.suppress(psutil.Error):
                inherited.update(psutil.Process(one.child.record.pid).environ())
        seen.update([(await desk.condition(name))[1] for name in NAMES])
        return {(await desk.condition(name)) for name in NAMES} == {("True", "Serving")}

    try:
        await desk.until(all_serve, "all of them serve", limit_s=120)
    finally:
        await client.close()
    assert "WaitingToLoad" in seen
    assert {"PATH", "OTEL_EXPORTER_OTLP_ENDPOINT", "FLEET_LOG_LEVEL"} <= inherited
    assert not [name for name in inherited if name.startswith("FLEET_ETCD")]
