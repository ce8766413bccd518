"""An agent that starts without etcd: it serves what it was assigned last, and follows etcd when that is back."""

import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import orjson
import pytest

from nodeagent.engines import engine_processes
from store.etcd.member.embedded import EmbeddedEtcd
from tests.support.nodeagent_agents import NODE, AgentProcess, Desk, answers
from tests.support.values import present
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.etcd, pytest.mark.mlx, pytest.mark.full, pytest.mark.timeout(240)]


@pytest.fixture
async def agent(
    etcd: EmbeddedEtcd, tmp_path: Path, models_dir: Path
) -> AsyncIterator[AgentProcess]:
    made = AgentProcess(etcd, tmp_path / "state", models_dir, NODE)
    made.start()
    yield made
    await made.end()


async def kill_etcd(etcd: EmbeddedEtcd) -> None:
    pid = present(etcd.supervisor.pid)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not etcd.supervisor.running)


async def test_a_mac_stands_alone(
    desk: Desk, agent: AgentProcess, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    for name in ("tiny-0", "other-0"):
        await desk.assign(name, uid=f"uid-{name}")
        await desk.until_published(name)
    file = agent.state_dir / "assignment.json"
    await until(lambda: set(orjson.loads(file.read_bytes())["replicas"]) == {"tiny-0", "other-0"})
    urls = {process.replica: process.address.url for process in agent.engines()}
    # The Mac loses its power while no etcd is there.
    await kill_etcd(etcd)
    await agent.kill()
    for engine in agent.engines():
        engine_processes.kill(engine)
    await until(lambda: not agent.engines())

    agent.start()
    await until(lambda: len(agent.engines()) == 2, limit_s=120)
    # Gateways that still know them find them where they were.
    assert {process.replica: process.address.url for process in agent.engines()} == urls
    for url in urls.values():
        assert await until_async(partial(answers, url), limit_s=60)
    process = next(process for process in agent.engines() if process.replica == "tiny-0")

    # One was withdrawn meanwhile, which the agent learns once etcd is back.
    await agent.kill()
    await etcd.start()
    await desk.remove("other-0")
    await kill_etcd(etcd)
    agent.start()
    await until(
        lambda: "serving the last assignment" in agent.log.read_text().rpartition("adopted")[2],
        limit_s=60,
    )
    assert len(agent.engines()) == 2
    await etcd.start()
    await until(lambda: [process.replica for process in agent.engines()] == ["tiny-0"], limit_s=60)
    await desk.until_published("tiny-0")
    await desk.until_condition("tiny-0", "True", "Serving")
    assert agent.engines()[0].child.record.pid == process.child.record.pid
