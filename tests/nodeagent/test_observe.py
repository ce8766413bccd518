"""The observation of a replica: what is assigned, what is unknown, and what is left of it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from nodeagent.actions import StartEngine
from nodeagent.engines.references import ReferenceTasks
from nodeagent.hollow import HollowMac, SharedCaches, hollow_status, models_on_disk
from nodeagent.hollow.engines import HOLLOW_FOLDER
from nodeagent.observe import NodeState, ReplicaObserver, StartError
from nodeagent.plan import plan
from nodeagent.replicas.rank_reports import RankReports
from nodeagent.replicas.start_queue import StartRequest
from nodeagent.status import replica_conditions
from schemas.meta import ConditionStatus, find_condition
from schemas.replica import Replica
from schemas.wire.engine_address import EngineAddress
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put
from tests.support.clock import FakeClock
from tests.support.nodeagent_groups import group
from tests.support.nodeagent_plans import NOW, wanted
from tests.support.waiting import until


def start_error(*, uid: str = "u1", epoch: int = 0, retry_at: float = 0) -> StartError:
    return StartError(
        replica_uid=uid,
        epoch=epoch,
        message="no port",
        failures=1,
        is_stopped=False,
        retry_at=retry_at,
        retry_time=NOW,
    )


class Scene:
    """One node `a`, its store, and an observer of its replicas."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.clock = FakeClock()
        self.store = MemoryTransport(self.clock)
        self.mac = HollowMac(clock=self.clock, status=hollow_status("a"), models=models_on_disk({}))
        self.caches = SharedCaches(self.store, self.clock)
        self.dependencies = self.mac.dependencies(self.store, self.caches)
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
    scene.node.start_errors["qwen-0"] = start_error()
    assert await scene.observer.observe("qwen-0") is None
    assert scene.node.start_errors == {}


async def test_an_assigned_replica_without_an_engine(scene: Scene) -> None:
    await scene.assign(wanted())
    replica = await scene.observer.observe("qwen-0")
    assert replica is not None
    assert replica.replica is not None
    assert (replica.engine, replica.is_published, replica.is_unknown, replica.rank) == (
        None,
        False,
        False,
        0,
    )


async def test_a_node_without_fetches_has_the_files_that_a_group_waits_for(scene: Scene) -> None:
    await scene.assign(group("a", "b", awaits_files=True))
    replica = await scene.observer.observe("qwen-0")
    assert replica is not None
    present = find_condition(replica_conditions(replica), "ModelPresent")
    assert present is not None
    assert present.status is ConditionStatus.TRUE


async def test_an_error_counts_for_its_own_epoch_only(scene: Scene) -> None:
    await scene.assign(wanted())
    scene.node.start_errors["qwen-0"] = start_error()
    replica = await scene.observer.observe("qwen-0")
    assert replica is not None
    assert replica.start_error == "no port"
    scene.node.start_errors["qwen-0"] = start_error(epoch=1)
    replica = await scene.observer.observe("qwen-0")
    assert replica is not None
    assert replica.start_error == ""


async def test_a_published_replica_that_is_gone_is_withdrawn_and_not_unknown(scene: Scene) -> None:
    scene.node.published["qwen-0"] = EngineAddress("127.0.0.1", 4100)
    replica = await scene.observer.observe("qwen-0")
    assert replica is not None
    assert (replica.replica, replica.is_unknown, replica.is_published, replica.is_stale) == (
        None,
        False,
        True,
        True,
    )


async def test_a_missing_replica_is_unknown_during_a_restore(scene: Scene) -> None:
    await scene.store.commit([], [Put(key=keys.RESTORING, value=b"{}")])
    scene.node.published["qwen-0"] = EngineAddress("127.0.0.1", 4100)
    replica = await scene.observer.observe("qwen-0")
    assert replica is not None
    assert replica.is_unknown


async def test_an_error_of_an_earlier_replica_of_the_name_does_not_count(scene: Scene) -> None:
    await scene.assign(wanted())
    scene.node.start_errors["qwen-0"] = start_error(uid="u0", retry_at=300)
    replica = await scene.observer.observe("qwen-0")
    assert replica is not None
    assert (replica.start_error, replica.next_start) == ("", None)


async def test_the_next_attempt_after_a_start_error_is_observed(scene: Scene) -> None:
    await scene.assign(wanted())
    scene.node.start_errors["qwen-0"] = start_error(retry_at=scene.clock.monotonic() + 300)
    replica = await scene.observer.observe("qwen-0")
    assert replica is not None
    assert replica.next_start is not None
    assert (replica.next_start.in_s, replica.next_start.at) == (300, NOW)
    step = plan(replica)
    assert step.requeue_after_s == 300
    assert StartEngine() not in step.actions


async def test_an_engine_waits_while_others_load(scene: Scene) -> None:
    await scene.assign(wanted())
    scene.node.starts.limit = 1
    scene.node.starts.add(StartRequest(replica="urgent-0", priority=5))
    replica = await scene.observer.observe("qwen-0")
    assert replica is not None
    assert replica.start_place == 1
    scene.node.starts.remove("urgent-0")
    replica = await scene.observer.observe("qwen-0")
    assert replica is not None
    assert replica.start_place == 0
