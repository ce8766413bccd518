"""A Mac dies in the middle of the work: kill -9 of an agent and its engine under 16 streams."""

import asyncio
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, model_deployment, running_fleet
from tests.support.streams import Stream, stream
from tests.support.waiting import until_async

CLIENTS = 16


@pytest.mark.ci
@pytest.mark.fleet
@pytest.mark.timeout(240)
async def test_sixteen_streams_and_a_dying_node(tmp_path: Path, models_dir: Path) -> None:
    async with running_fleet(tmp_path, models_dir, nodes=2, grace_s=1.0) as fleet:
        await fleet.applied(model_deployment(replicas=2, contextLength=2048, concurrency=4))
        await fleet.available("tiny")
        await fleet.routed("tiny", 2)
        victim = await replica_on(fleet, "node-2")
        streams = [Stream() for _ in range(CLIENTS)]
        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(streams):
                prompt = f"client {number}"
                group.create_task(stream(fleet.url, "tiny", prompt, max_tokens=400, into=one))
            # Both engines are at work, and both have requests waiting, before one node dies.
            await until_async(lambda: some_began(streams), limit_s=30, what="8 streams")
            began = [one.began.is_set() for one in streams]
            fleet.kill("node-2")
            assert fleet.kill_engines("node-2") == 1
            killed_at = fleet.clock.monotonic()

            async def is_gone() -> bool:
                return victim not in await fleet.endpoints()

            await until_async(is_gone, what="the endpoint's end")
            gone_after_s = fleet.clock.monotonic() - killed_at
        assert gone_after_s <= 5.0
        assert not all(began)
        for number, one in enumerate(streams):
            if not began[number]:
                assert one.succeeded, f"client {number} had no byte yet, and failed: {one.error}"
        # Those that lived on node-1 noticed nothing; those cut off were told so.
        assert all(one.succeeded or "interrupted" in one.error for one in streams), streams
        assert sum(one.succeeded for one in streams) >= CLIENTS - 4

        await fleet.routed("tiny", 2)
        await fleet.available("tiny")
        assert await fleet.endpoints() == {"tiny-0", "tiny-1"}
        assert len(fleet.engine_pids("node-1")) == 2


async def some_began(streams: list[Stream]) -> bool:
    return sum(one.began.is_set() for one in streams) >= 8


async def replica_on(fleet: Fleet, node: str) -> str:
    """Return the replica that a node runs."""
    done = await fleet.ctl("get", "replicas", "--no-headers")
    lines = [line.split() for line in done.out.splitlines()]
    return next(words[0] for words in lines if words[2] == node)
