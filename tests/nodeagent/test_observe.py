"""The observation of a replica: what is assigned, what is unknown, and what is left of it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from nodeagent.engines.references import ReferenceTasks
from nodeagent.hollow import HollowMac, SharedCaches, hollow_status, models_on_disk
from nodeagent.hollow.engines import HOLLOW_FOLDER
from nodeagent.observe import NodeState, ReplicaObserver, StartError
from nodeagent.replicas.rank_reports import RankReports
from schemas.replica import Replica
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put
from tests.support.clock import FakeClock
from tests.support.nodeagent_plans import wanted
from tests.support.waiting import until


class Scene:
    """One node `a`, its store, and an observer of its replicas."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.clock = FakeClock()
        self.store = MemoryTransport(self.clock)
        self.mac = HollowMac(clock=self.clock, status=hollow_status("a"), models=models_on_disk({}))
        self.caches = SharedCaches(self.store, self.clock)
        self.dependencies = self.mac.dependencies(self.caches)
        self.node = NodeState(
            "a",
            self.mac.status,
            HOLLOW_FOLDER,
            self.dependencies.report_models,
            RankReports(self.store, self.clock, "a"),
        )
        self.observer = ReplicaObserver(
            self.node,
            self.dependencies,
            ReferenceTasks(self.dependencies.references, group),
            self.store,
            self.clock,
        )

    async def assign(self, replica: Replica) -> None:
        await self.store.commit([], [codec.put_spec(replica)])
        key = keys.spec_key("Replica", replica.name)
        await until(lambda: key in self.dependencies.replicas.items, what="the cache has it")


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with asyncio.TaskGroup() as group:
        made = Scene(group)
        running = group.create_task(made.caches.run())
        await made.dependencies.replicas.wait_synced()
        yield made
        running.cancel()


async def test_a_replica_that_is_not_here_and_left_nothing_is_forgotten(scene: Scene) -> None:
    scene.node.start_errors["qwen-0"] = StartError(epoch=0, message="no port")
    assert await scene.observer.observe("qwen-0") is None
    assert scene.node.start_errors == {}


async def test_an_assigned_replica_without_an_engine(scene: Scene) -> None:
    await scene.assign(wanted())
    seen = await scene.observer.observe("qwen-0")
    assert seen is not None
    assert seen.replica is not None
    assert (seen.engine, seen.is_published, seen.is_unknown, seen.rank) == (None, False, False, 0)


async def test_an_error_counts_for_its_own_epoch_only(scene: Scene) -> None:
    await scene.assign(wanted())
    scene.node.start_errors["qwen-0"] = StartError(epoch=0, message="no port")
    seen = await scene.observer.observe("qwen-0")
    assert seen is not None
    assert seen.start_error == "no port"
    scene.node.start_errors["qwen-0"] = StartError(epoch=1, message="no port")
    seen = await scene.observer.observe("qwen-0")
    assert seen is not None
    assert seen.start_error == ""


async def test_a_published_replica_that_is_gone_is_withdrawn_and_not_unknown(scene: Scene) -> None:
    scene.node.published["qwen-0"] = 4100
    seen = await scene.observer.observe("qwen-0")
    assert seen is not None
    assert (seen.replica, seen.is_unknown, seen.is_published, seen.is_stale) == (
        None,
        False,
        True,
        True,
    )


async def test_a_missing_replica_is_unknown_during_a_restore(scene: Scene) -> None:
    await scene.store.commit([], [Put(key=keys.RESTORING, value=b"{}")])
    scene.node.published["qwen-0"] = 4100
    seen = await scene.observer.observe("qwen-0")
    assert seen is not None
    assert seen.is_unknown
