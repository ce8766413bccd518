"""A group under the controller on a real etcd: it forms, reforms on a spare, and writes nothing at rest."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from machinery.clock import SystemClock
from reconciler.controller import Controller
from schemas.meta import ApiObject, ObjectMeta, find_condition
from schemas.node import ModelReport, NodeStatus
from schemas.replica import Replica
from schemas.shardgroup import GroupMember, ShardGroup, ShardGroupSpec
from store import codec, keys, objects
from store.etcd.connect import connect
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Transport
from tests.support.etcd import running_etcd
from tests.support.reconciler_agents import FakeAgent, node_status, put_rank
from tests.support.reconciler_world import BIG, sharded
from tests.support.waiting import until_async

pytestmark = pytest.mark.etcd
CLOCK = SystemClock()
SPARE = ShardGroup(
    metadata=ObjectMeta(name="pair"),
    spec=ShardGroupSpec(members=tuple(GroupMember(node=name) for name in "abc"), size=2),
)


@pytest.fixture(scope="module")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedEtcd]:
    async with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def status_of(name: str) -> NodeStatus:
    """Return the status of a Mac with half the room for the model."""
    made = node_status(name, memory_gib=10)
    models = (ModelReport(path="qwen", geometry=BIG),)
    return made.model_copy(update={"address": f"169.254.0.{ord(name)}", "models": models})


@asynccontextmanager
async def running(store: Transport, *nodes: str) -> AsyncIterator[dict[str, asyncio.Task[None]]]:
    """Run a controller and an agent for each node; yield the agents' tasks by name."""
    async with asyncio.TaskGroup() as group:
        controller = Controller(store, CLOCK, identity="test", grace_s=30.0)
        leader = group.create_task(controller.run())
        agents = {
            name: group.create_task(FakeAgent(store, CLOCK, name, status=status_of(name)).run())
            for name in nodes
        }
        try:
            yield agents
        finally:
            for task in (leader, *agents.values()):
                task.cancel()


async def apply(store: Transport, *found: ApiObject) -> None:
    await store.commit([], [codec.put_spec(api_object) for api_object in found])


async def replica_of(store: Transport) -> Replica | None:
    return await objects.get(store, Replica, "qwen-0")


async def test_a_group_is_formed_and_formed_again(etcd: EmbeddedEtcd) -> None:
    store = connect(etcd.address)

    async def serves(epoch: int, nodes: str) -> bool:
        found = await replica_of(store)
        if found is None or found.spec.formation is None or found.status is None:
            return False
        ready = find_condition(found.status.conditions, "Ready")
        return (
            found.spec.formation.epoch == epoch
            and "".join(rank.node for rank in found.spec.ranks) == nodes
            and ready is not None
            and ready.reason == "Serving"
            and not found.spec.leaving
        )

    async with running(store, "a", "b", "c") as agents:
        await apply(store, SPARE, sharded())
        await until_async(lambda: serves(1, "ab"))
        group = await objects.get(store, ShardGroup, "pair")
        assert group is not None
        # A rank other than the first reports the epoch as over; its Mac is healthy.
        first = await replica_of(store)
        assert first is not None
        await store.commit([], [put_rank(first, "EpochOver", rank=1)])
        await until_async(lambda: serves(2, "ab"))
        second = await replica_of(store)
        assert second is not None
        assert second.spec.formation is not None
        assert first.spec.formation is not None
        assert second.metadata.uid == first.metadata.uid
        assert second.spec.formation.failures == 1
        assert second.spec.formation.epoch == 2
        # A Mac goes, and the others say so: the spare steps in, long before the grace is over.
        agents["b"].cancel()
        await until_async(lambda: _is_away(store, "b"), limit_s=15)
        await store.commit([], [put_rank(second, "EpochOver")])
        await until_async(lambda: serves(3, "ac"), limit_s=15)
        found = await objects.get(store, ShardGroup, "pair")
        assert found is not None
        assert found.status is not None
        assert (found.status.members, found.status.replicas) == (3, ("qwen-0",))
    await store.close()


async def _is_away(store: Transport, node: str) -> bool:
    return await store.get(keys.node_lease_key(node)) is None
