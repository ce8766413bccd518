"""Documents about nodes: they join, go away, come back, are cloned and deleted; and nothing else is written."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from typing_extensions import override

from fleetctl.objects import reader
from machinery.control_loop import Requeue
from manifests import delete
from reconciler.deployments.execute import Executor
from reconciler.nodes.liveness import NodeLiveness
from reconciler.nodes.reconcile import NodeReconciler
from schemas import kinds
from schemas.event import Event
from schemas.meta import Condition, ConditionStatus, ObjectKey, find_condition
from schemas.node import Node, NodeLifeStatus
from store import codec, keys, objects
from store.events import EventRecorder
from store.port import CreateRevisionGuard, Delete, KeyValue, Operation, Put
from tests.support.clock import FakeClock
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.reconciler_world import ELECTION, CachedStore, following, pool
from tests.support.world import condition_of

NODE = kinds.by_name("Node")


class World(CachedStore):
    """A store, and a leader that reconciles nodes."""

    def __init__(self) -> None:
        self.time = FakeClock()
        super().__init__(self.time)
        self.life = NodeLiveness(30)
        self.epoch = 0
        fence = lambda: CreateRevisionGuard(key=ELECTION, create_revision=self.epoch)  # noqa: E731
        recorder = EventRecorder(self.transport, self.time, source="reconciler")
        executor = Executor(self.transport, self.time, fence)
        self.nodes = NodeReconciler(
            self.fleet, self.life, executor.commit, recorder, self.time, "1.0.0"
        )

    @override
    async def write(self, *operations: Operation) -> None:
        await super().write(*operations)
        fleet = {name for name in "ab" if keys.node_lease_key(name) in self.caches.leases.items}
        self.life.update("ab", fleet, self.time.monotonic())

    async def join(self, name: str, **said: Any) -> None:
        status = node_status(name).model_copy(update=said)
        await self.write(put_node(name, status), put_lease(name))
        await self.look(name)
        await self.look(name)

    async def look(self, name: str) -> Requeue | None:
        requeue = await self.nodes.reconcile(ObjectKey("Node", name))
        written = (await self.transport.list(keys.spec_prefix("Node"))).items
        async with asyncio.timeout(30):
            for item in written:
                await self.caches.specs.reached(item.mod_revision)
        return requeue

    async def document(self, name: str) -> NodeLifeStatus | None:
        item = await self.transport.get(keys.node_life_key(name))
        return None if item is None else codec.decode(NodeLifeStatus, item)

    async def true(self, name: str) -> list[str]:
        """Return what fleetctl shows as true of the node."""
        assert NODE is not None
        (api_object,) = await reader.read(self.transport, NODE, [name])
        assert isinstance(api_object, Node)
        assert api_object.status is not None
        return [c.type for c in api_object.status.conditions if c.status is ConditionStatus.TRUE]

    async def events(self) -> list[tuple[str, str]]:
        found = await objects.list_all(self.transport, Event)
        return sorted((event.spec.about.name, event.spec.reason) for event in found)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    made.epoch = await made.transport.commit([], [Put(key=ELECTION, value=b"me")])
    async with following(made.caches):
        yield made


async def test_a_node_joins_leaves_and_is_deleted(world: World) -> None:
    await world.join("a")
    assert await world.true("a") == ["Ready"]
    before = (await world.transport.status()).revision
    await world.time.advance(60)
    assert await world.look("a") is None
    assert (await world.transport.status()).revision == before
    joined = ready(await world.document("a"))
    await world.write(Delete(key=keys.node_lease_key("a")))
    await world.look("a")
    away = ready(await world.document("a"))
    assert (away.reason, str(away.status)) == ("LeaseLost", "False")
    assert joined.last_transition_time is not None
    assert away.last_transition_time == joined.last_transition_time + timedelta(seconds=60)
    assert await world.true("a") == []
    await world.write(
        Delete(key=keys.spec_key("Node", "a")), Delete(key=keys.status_key("Node", "a"))
    )
    await world.look("a")
    assert await world.document("a") is None
    assert await world.look("a") is None


async def test_a_deleted_node_does_not_come_back(world: World) -> None:
    """The deletion of its spec arrives before that of its status: they are two watches."""
    await world.join("a")
    await world.write(Delete(key=keys.node_lease_key("a")))
    statuses = world.caches.statuses
    await delete.delete(world.transport, "Node", "a", world.time)
    revision = (await world.transport.status()).revision
    await world.caches.specs.reached(revision)
    await statuses.reached(revision)
    # What the watch of statuses has not told yet.
    put = put_node("a")
    late = KeyValue(key=put.key, value=put.value, create_revision=1, mod_revision=revision + 1)
    statuses.suppose(late)
    await world.look("a")
    assert await world.transport.get(keys.spec_key("Node", "a")) is None


def ready(document: NodeLifeStatus | None) -> Condition:
    assert document is not None
    condition = find_condition(document.conditions, "Ready")
    assert condition is not None
    return condition


async def test_a_node_that_comes_and_goes_is_held_back_and_released(world: World) -> None:
    await world.join("a")
    for _ in range(3):
        await world.write(Delete(key=keys.node_lease_key("a")))
        await world.write(put_lease("a"))
    assert await world.look("a") == Requeue(after_s=30)
    assert await world.true("a") == ["Flapping", "Ready"]
    assert await world.events() == [("a", "Flapping")]
    await world.time.advance(30)
    assert await world.look("a") is None
    assert await world.true("a") == ["Ready"]


async def test_a_clone_is_distinguished_from_its_original(world: World) -> None:
    await world.join("b", hardware_uuid="M")
    await world.time.advance(5)
    await world.join("a", hardware_uuid="M")
    assert await world.true("a") == ["DuplicateHardware", "Ready"]
    assert await world.true("b") == ["Ready"]
    # The changed node is reconciled, and the other one with it.
    await world.write(put_node("b", node_status("b").model_copy(update={"hardware_uuid": "N"})))
    await world.look("b")
    assert await world.true("a") == ["Ready"]


async def test_a_pool_withholds_its_nodes_and_requeues(world: World) -> None:
    now = world.time.now()
    window = {"start": f"{now:%H:%M}", "end": f"{now + timedelta(minutes=2):%H:%M}"}
    policy = {"quiet_hours": (window,), "mains_only": True}
    await world.join("a", power="Battery")
    await world.have(pool("desk", nodes=("a",), policy=policy))
    again = await world.look("a")
    assert again is not None
    assert 0 < again.after_s <= 120
    document = await world.document("a")
    assert document is not None
    _, _, message = condition_of(document, "Withheld")
    assert message.endswith("; pool desk: mainsOnly, until it runs on mains power again")
    await world.time.advance(again.after_s)
    await world.write(put_node("a", node_status("a")))
    await world.look("a")
    assert await world.true("a") == ["Ready"]


async def test_an_agent_of_another_version_is_named(world: World) -> None:
    await world.join("a", agent_version="0.9.0")
    await world.join("b", agent_version="1.1.0")
    assert await world.true("a") == ["Ready", "VersionSkew"]
    assert await world.true("b") == ["Ready"]
    assert await world.events() == [("a", "VersionSkew")]
