"""Many replicas that are assigned to one Mac at once load a few at a time, the highest priority first."""

import asyncio

import pytest

from machinery import virtual_time
from machinery.virtual_time import VirtualClock
from nodeagent.hollow import HollowMac, HollowTiming, SharedCaches, hollow_status, models_on_disk
from nodeagent.replicas.start_queue import DEFAULT_CONCURRENCY
from schemas.meta import find_condition
from schemas.replica import Endpoint, RankStatus, Replica
from store import codec, keys, objects
from store.memory import MemoryTransport
from tests.support.nodeagent_plans import NOW, wanted
from tests.support.world import GEOMETRY, deployment


def replica(name: str) -> Replica:
    found = wanted(uid=f"uid-{name}")
    metadata = found.metadata.model_copy(update={"name": name, "creation_timestamp": NOW})
    update = {"deployment": name.rpartition("-")[0], "served_names": (name,)}
    spec = found.spec.model_copy(update=update)
    return found.model_copy(update={"metadata": metadata, "spec": spec})


@pytest.mark.parametrize(
    ("count", "load_s"), [(24, 5.0), pytest.param(300, 1.0, marks=pytest.mark.full)]
)
def test_replicas_that_come_at_once_load_two_at_a_time(count: int, load_s: float) -> None:
    async def scene(group: asyncio.TaskGroup) -> None:
        clock = VirtualClock()
        store = MemoryTransport(clock)
        caches = SharedCaches(store, clock)
        mac = HollowMac(
            clock=clock,
            status=hollow_status("a"),
            models=models_on_disk({"qwen": GEOMETRY}),
            pace=lambda _: HollowTiming(load_s=load_s, probe_s=0.1),
        )
        tasks = [
            group.create_task(caches.run()),
            group.create_task(mac.agent(store, caches).run()),
        ]
        await clock.sleep(1)
        urgent = deployment(name="urgent", priority=9)
        await store.commit([], [codec.put_spec(urgent)])
        names = [*(f"d{number}-0" for number in range(count)), "urgent-0"]
        for at in range(0, len(names), 50):
            await store.commit([], [codec.put_spec(replica(name)) for name in names[at : at + 50]])
        started: list[str] = []
        for _ in range(20 * count):
            engines = mac.engines.running()
            assert (
                sum(engine.health().state == "Loading" for engine in engines) <= DEFAULT_CONCURRENCY
            )
            started += [
                engine.order.config.replica
                for engine in engines
                if engine.order.config.replica not in started
            ]
            if len(started) == len(names):
                break
            if len(started) == 1:
                item = await store.get(keys.rank_key("a", names[-2], 0))
                assert item is not None
                ready = find_condition(codec.decode(RankStatus, item).conditions, "Ready")
                assert ready is not None
                assert ready.reason == "WaitingToLoad"
            await clock.sleep(0.5)
        assert "urgent-0" in started[: DEFAULT_CONCURRENCY + 1]
        assert len(started) == len(names)
        await clock.sleep(2 * load_s)
        assert len(await objects.list_all(store, Endpoint)) == len(names)
        # No place was left empty for long: two at a time, and a second between them at most.
        assert clock.monotonic() < (len(names) / DEFAULT_CONCURRENCY + 4) * (load_s + 2)
        for task in tasks:
            task.cancel()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            await scene(group)

    virtual_time.run(main())
