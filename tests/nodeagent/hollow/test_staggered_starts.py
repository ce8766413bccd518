"""Many replicas that are assigned to one Mac at once load a few at a time, the highest priority first."""

import pytest

from nodeagent.hollow import HollowTiming
from nodeagent.replicas.start_queue import DEFAULT_CONCURRENCY
from schemas.replica import Endpoint, Replica
from store import codec, objects
from tests.support.nodeagent_hollow import HollowFleet, in_hollow_fleet
from tests.support.nodeagent_plans import NOW, wanted
from tests.support.world import deployment


def replica(name: str) -> Replica:
    plain = wanted(uid=f"uid-{name}")
    metadata = plain.metadata.model_copy(update={"name": name, "creation_timestamp": NOW})
    update = {"deployment": name.rpartition("-")[0], "served_names": (name,)}
    spec = plain.spec.model_copy(update=update)
    return plain.model_copy(update={"metadata": metadata, "spec": spec})


@pytest.mark.parametrize(
    ("count", "load_s"), [(24, 5.0), pytest.param(300, 1.0, marks=pytest.mark.full)]
)
def test_replicas_that_come_at_once_load_two_at_a_time(count: int, load_s: float) -> None:
    async def scene(it: HollowFleet) -> None:
        await it.store.commit([], [codec.put_spec(deployment(name="urgent", priority=9))])
        names = [*(f"d{number}-0" for number in range(count)), "urgent-0"]
        for at in range(0, len(names), 50):
            await it.put(*map(replica, names[at : at + 50]))
        started: list[str] = []
        for _ in range(20 * count):
            engines = it.macs["a"].engines.running()
            loading = sum(engine.health().state == "Loading" for engine in engines)
            assert loading <= DEFAULT_CONCURRENCY
            running = [engine.order.config.replica for engine in engines]
            started += [name for name in running if name not in started]
            if len(started) == len(names):
                break
            if len(started) == 1:
                assert await it.condition("a", name=names[-2]) == "0 WaitingToLoad"
            await it.clock.sleep(0.5)
        assert "urgent-0" in started[: DEFAULT_CONCURRENCY + 1]
        assert len(started) == len(names)
        await it.clock.sleep(2 * load_s)
        assert len(await objects.list_all(it.store, Endpoint)) == len(names)
        # No place was left empty for long: two at a time, and a second between them at most.
        assert it.clock.monotonic() < (len(names) / DEFAULT_CONCURRENCY + 4) * (load_s + 2)

    in_hollow_fleet("a", pace=HollowTiming(load_s=load_s, probe_s=0.1))(scene)()
