"""Load on a whole fleet, and the state of its rollout."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.fleet import Fleet
from tests.support.streams import Stream, stream


@asynccontextmanager
async def under_load(fleet: Fleet, pause_s: float = 0.3) -> AsyncIterator[list[Stream]]:
    """Run four clients that send requests without end; assert at the end that every answer was complete."""
    asked: list[Stream] = []
    is_over = asyncio.Event()

    async def client() -> None:
        while not is_over.is_set():
            one = Stream()
            asked.append(one)
            await stream(fleet.url, "tiny", "hello", max_tokens=48, into=one)
            await asyncio.sleep(pause_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(client())
        yield asked
        is_over.set()
    assert asked
    assert all(one.succeeded for one in asked), [one.error for one in asked if not one.succeeded]


async def rolled_out(fleet: Fleet) -> None:
    done = await fleet.ctl("rollout", "status", "md/tiny", "--timeout=90s", limit_s=120)
    assert done.code == 0, done.err + fleet.words()


async def replicas(fleet: Fleet) -> dict[str, str]:
    """Return the nodes of the replicas that do not drain, by uid: names are reused."""
    done = await fleet.ctl("get", "replicas", "-o", "json")
    assert done.code == 0, done.err
    items = json.loads(done.out)["items"]
    return {
        item["metadata"]["uid"]: item["spec"]["ranks"][0]["node"]
        for item in items
        if "deletionTimestamp" not in item["metadata"]
    }
