"""Whole fleets with a hub or under load, and the state of a rollout."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.fleet import Fleet
from tests.support.hub import StandInHub
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


@asynccontextmanager
async def hub_fleet(
    root: Path, hub: StandInHub, agents: Mapping[str, Sequence[str]]
) -> AsyncIterator[Fleet]:
    """Run a hub and a fleet that asks it; `agents` are the flags of each agent."""
    fleet = Fleet(root / "f", root)
    async with hub.serve():
        try:
            await fleet.etcd.start()
            fleet.start_reconciler("--hub-endpoint", hub.endpoint)
            for name, flags in agents.items():
                fleet.start_agent(name, *flags)
            fleet.start_gateway()
            await fleet.joined(len(agents))
            yield fleet
        finally:
            await fleet.stop()


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
