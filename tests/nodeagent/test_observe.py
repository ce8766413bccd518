"""The observation of a replica: what is assigned, what is unknown, and what is left of it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nodeagent.actions import StartEngine
from nodeagent.engines.references import ReferenceTasks
from nodeagent.hollow import HollowMac, SharedCaches, hollow_status, models_on_disk
from nodeagent.hollow.engines import HOLLOW_FOLDER
from nodeagent.observe import NodeState, ReplicaObserver, StartError
from nodeagent.plan import plan
from nodeagent.replicas.observation import ObservedReplica
from nodeagent.replicas.rank_reports import RankReports
from nodeagent.replicas.start_queue import StartRequest
from nodeagent.status import replica_conditions
from schemas.meta import is_true
from schemas.replica import Replica
from schemas.wire.engine_address import EngineAddress
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put
from tests.support.clock import FakeClock
from tests.support.nodeagent_groups import group
from tests.support.nodeagent_plans import NOW, wanted
from tests.support.values import present
from tests.support.waiting import until


def start_error(*, uid: str = "u1", epoch: int = 0, retry_at: float = 0) -> StartError:
    return StartError(
        replica_uid=uid, epoch=epoch, message="no port", failures=1, is_stopped=False,
        retry_at=retry_at, retry_time=NOW,
    )  # fmt: skip


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

    async def observe(self) -> ObservedReplica:
        return present(await self.observer.observe("qwen-0"))

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
    replica = await scene.observe()
    assert replica.replica is not None
    assert (replica.engine, replica.is_published, replica.rank) == (None, False, 0)
    assert not replica.is_unknown


async def test_a_node_without_fetches_has_the_files_that_a_group_waits_for(scene: Scene) -> None:
    await scene.assign(group("a", "b", awaits_files=True))
    conditions = replica_conditions(await scene.observe())
    assert is_true(conditions, "ModelPresent")


@pytest.mark.parametrize(("fields", "message"), [({}, "no port"), ({"epoch": 1}, ""), ({"uid": "u0"}, "")])  # fmt: skip
async def test_an_error_counts_for_its_own_replica_and_epoch(
    scene: Scene, fields: dict[str, Any], message: str
) -> None:
    await scene.assign(wanted())
    retry_at = scene.clock.monotonic() + 300
    scene.node.start_errors["qwen-0"] = start_error(retry_at=retry_at, **fields)
    replica = await scene.observe()
    assert replica.start_error == message
    if not message:
        assert replica.next_start is None
        return
    next_start = present(replica.next_start)
    assert (next_start.in_s, next_start.at) == (300, NOW)
    step = plan(replica)
    assert step.requeue_after_s == 300
    assert StartEngine() not in step.actions


@pytest.mark.parametrize("is_restoring", [False, True])
async def test_a_published_replica_that_is_gone_is_withdrawn_unless_a_restore_runs(
    scene: Scene, *, is_restoring: bool
) -> None:
    if is_restoring:
        await scene.store.commit([], [Put(key=keys.RESTORING, value=b"{}")])
    scene.node.published["qwen-0"] = EngineAddress("127.0.0.1", 4100)
    replica = await scene.observe()
    assert (replica.replica, replica.is_unknown) == (None, is_restoring)
    assert (replica.is_published, replica.is_stale) == (True, True)


async def test_an_engine_waits_while_others_load(scene: Scene) -> None:
    await scene.assign(wanted())
    scene.node.starts.limit = 1
    scene.node.starts.add(StartRequest(replica="urgent-0", priority=5))
    assert (await scene.observe()).start_place == 1
    scene.node.starts.remove("urgent-0")
    assert (await scene.observe()).start_place == 0
