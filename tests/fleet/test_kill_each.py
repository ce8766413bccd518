"""kill -9 of each process alone: what runs goes on, what was acknowledged stays, all converges."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, model_deployment, running_fleet
from tests.support.streams import Stream, stream
from tests.support.waiting import until_async


def manifest(name: str, replicas: int) -> str:
    return model_deployment(name, replicas=replicas, contextLength=512)


@asynccontextmanager
async def serving(root: Path, models_dir: Path) -> AsyncIterator[Fleet]:
    """Run a fleet that serves `tiny`."""
    async with running_fleet(root, models_dir, grace_s=3.0) as fleet:
        await fleet.applied(manifest("tiny", 1))
        await fleet.available("tiny")
        await fleet.routed("tiny", 1)
        yield fleet


async def answered(fleet: Fleet, count: int = 4) -> None:
    """Send requests at once; every one must be answered."""
    streams = [Stream() for _ in range(count)]
    async with asyncio.TaskGroup() as group:
        for one in streams:
            group.create_task(stream(fleet.url, "tiny", "hello", max_tokens=16, into=one))
    assert all(one.succeeded for one in streams), [one.error for one in streams]


@pytest.mark.fleet
@pytest.mark.timeout(300)
async def test_each_process_killed_alone(tmp_path: Path, models_dir: Path) -> None:
    async with serving(tmp_path, models_dir) as fleet:
        engines = fleet.engine_pids("node-1")
        await reconciler_killed(fleet)
        await gateway_killed(fleet)
        await agent_killed(fleet)
        await etcd_killed(fleet)
        assert engines <= fleet.engine_pids("node-1"), "an engine was restarted"
        listed = await fleet.ctl("get", "modeldeployments", "-o", "name")
        names = ["after-etcd", "after-reconciler", "tiny", "while-etcd-was-killed"]
        assert listed.out.splitlines() == [f"modeldeployment/{name}" for name in names]


async def reconciler_killed(fleet: Fleet) -> None:
    fleet.kill("reconciler")
    await fleet.applied(manifest("after-reconciler", 1))
    await answered(fleet)
    fleet.restart("reconciler")
    await fleet.available("after-reconciler")


async def gateway_killed(fleet: Fleet) -> None:
    fleet.kill("gateway")
    await fleet.ended("gateway")
    fleet.restart("gateway")
    await fleet.routed("tiny", 1)
    await answered(fleet)


async def agent_killed(fleet: Fleet) -> None:
    """Longer than the lease: the endpoints go, the engines serve on, and the agent finds them and ends what may go."""
    fleet.kill("node-1")

    async def is_gone() -> bool:
        return not await fleet.endpoints()

    await answered(fleet)
    await until_async(is_gone, limit_s=20, what="the endpoints' end")
    await answered(fleet)
    fleet.restart("node-1")
    await fleet.available("tiny")
    await fleet.routed("tiny", 1)
    done = await fleet.ctl("delete", "md/after-reconciler")
    assert done.code == 0, done.err
    await fleet.applied(manifest("after-reconciler", 0))
    assert len(fleet.engine_pids("node-1")) == 1
    await answered(fleet)


async def etcd_killed(fleet: Fleet) -> None:
    """Killed under writes: what was acknowledged is there afterwards, requests go on meanwhile."""
    await fleet.applied(manifest("while-etcd-was-killed", 0))
    await fleet.kill_etcd()
    await answered(fleet)
    refused = await fleet.ctl("get", "nodes")
    assert refused.code == 1
    assert "Is the fleet up?" in refused.err
    await answered(fleet)
    await fleet.etcd.start()
    await fleet.applied(manifest("after-etcd", 1))
    await fleet.available("after-etcd")
    await fleet.available("tiny")
    await fleet.routed("tiny", 1)
    await answered(fleet)
