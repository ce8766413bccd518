"""Hollow agents: many real agents with simulated engines in one process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest

from machinery import virtual_time
from machinery.virtual_time import VirtualClock
from nodeagent.hollow import HollowMac, HollowTiming, SharedCaches, hollow_status, models_on_disk
from schemas.deployment import DraftModel, ModelSource
from schemas.meta import ObjectMeta, find_condition
from schemas.node import NodeStatus
from schemas.replica import (
    Endpoint,
    EndpointHardware,
    MemoryProof,
    RankAssignment,
    RankStatus,
    Replica,
    ReplicaSpec,
)
from store import codec, keys, objects
from store.memory import MemoryTransport
from store.port import Delete
from tests.support.world import GEOMETRY, deployment

_PROOF = MemoryProof(weights_bytes=1, kv_cache_bytes=0, activation_bytes=0, overhead_bytes=0)
_PACE = HollowTiming(load_s=5, probe_s=1, drain_s=2)


class Room:
    """Hollow Macs, and a desk at which the test plays the reconciler."""

    def __init__(self, group: asyncio.TaskGroup, count: int) -> None:
        self._group = group
        self.clock = VirtualClock()
        self.store = MemoryTransport(self.clock)
        self._feed = SharedCaches(self.store, self.clock)
        self.macs = [
            HollowMac(
                clock=self.clock,
                status=hollow_status(f"mac-{number}", labels={"site": "berlin"}),
                models=models_on_disk(
                    {"qwen": GEOMETRY.model_copy(update={"parameters": 596_049_920})}
                ),
                pace=lambda _: _PACE,
            )
            for number in range(count)
        ]
        self.tasks = [group.create_task(self._feed.run())]
        self.agents = {mac.name: self.start(mac) for mac in self.macs}

    def start(self, mac: HollowMac) -> asyncio.Task[None]:
        task = self._group.create_task(mac.agent(self.store, self._feed).run())
        self.tasks.append(task)
        return task

    async def assign(self, node: str, *, uid: str = "u", is_deleting: bool = False) -> None:
        replica = Replica(
            metadata=ObjectMeta(
                name="qwen-0",
                uid=uid,
                deletion_timestamp=datetime(2026, 1, 1, tzinfo=UTC) if is_deleting else None,
            ),
            spec=ReplicaSpec(
                deployment="qwen",
                template="t",
                model=ModelSource(path="qwen"),
                served_names=("qwen",),
                context_length=64,
                concurrency=1,
                ranks=(RankAssignment(node=node, memory=_PROOF),),
            ),
        )
        await self.store.commit([], [codec.put_spec(replica)])

    async def endpoint(self) -> Endpoint | None:
        return await objects.get(self.store, Endpoint, "qwen-0")

    async def condition(self, node: str, type_: str = "Ready") -> str:
        item = await self.store.get(keys.rank_key(node, "qwen-0", 0))
        assert item is not None
        found = find_condition(codec.decode(RankStatus, item).conditions, type_)
        return "" if found is None else found.reason

    async def revision(self) -> int:
        return (await self.store.status()).revision


@asynccontextmanager
async def room(count: int) -> AsyncIterator[Room]:
    async with asyncio.TaskGroup() as group:
        made = Room(group, count)
        await made.clock.sleep(1)
        try:
            yield made
        finally:
            for task in made.tasks:
                task.cancel()


def played(scene: Callable[[Room], Awaitable[None]], *, macs: int = 2) -> None:
    async def main() -> None:
        async with room(macs) as made:
            await scene(made)

    virtual_time.run(main())


def test_an_engine_loads_answers_drains_and_ends() -> None:
    async def scene(it: Room) -> None:
        await it.assign("mac-0")
        await it.clock.sleep(4)
        assert await it.condition("mac-0") == "Loading"
        await it.clock.sleep(4)
        found = await it.endpoint()
        assert found is not None
        assert found.spec.node == "mac-0"
        # What gateways choose by.
        assert (found.spec.site, found.spec.concurrency) == ("berlin", 1)
        assert found.spec.parameters == 596
        assert found.spec.hardware == EndpointHardware(
            chip="Apple M4 Pro", gpu_cores=20, memory_bytes=48 * 2**30
        )
        await it.assign("mac-0", is_deleting=True)
        await it.clock.sleep(1)
        assert await it.condition("mac-0", "Stopped") == "EngineEnding"
        await it.clock.sleep(3)
        assert await it.condition("mac-0", "Stopped") == "EngineEnded"
        assert it.macs[0].engines.running() == []

    played(scene)


def test_a_deleted_node_registers_again_while_its_agent_lives() -> None:
    async def scene(it: Room) -> None:
        key = keys.status_key("Node", "mac-0")
        assert await it.store.get(key) is not None
        await it.store.commit([], [Delete(key=key)])
        await it.clock.sleep(71)  # an agent looks for its own status once a minute
        item = await it.store.get(key)
        assert item is not None
        assert codec.decode(NodeStatus, item).hostname == "mac-0"

    played(scene)


def test_adapters_and_draft_models_are_looked_at_like_models() -> None:
    async def scene(it: Room) -> None:
        wanted = deployment()
        source = ModelSource(path="qwen", adapter="law", draft=DraftModel(path="small"))
        spec = wanted.spec.model_copy(update={"model": source})
        await it.store.commit([], [codec.put_spec(wanted.model_copy(update={"spec": spec}))])
        await it.clock.sleep(1)
        item = await it.store.get(keys.status_key("Node", "mac-0"))
        assert item is not None
        said = codec.decode(NodeStatus, item)
        assert [model.path for model in said.models] == ["qwen", "small"]
        assert [adapter.path for adapter in said.adapters] == ["law"]

    played(scene)


def test_engines_outlive_their_agent_and_not_the_power() -> None:
    async def scene(it: Room) -> None:
        await it.assign("mac-0")
        await it.clock.sleep(8)
        (engine,) = it.macs[0].engines.running()
        it.agents["mac-0"].cancel()
        await it.clock.sleep(6)
        assert await it.endpoint() is None
        it.start(it.macs[0])
        await it.clock.sleep(2)
        found = await it.endpoint()
        assert found is not None
        assert it.macs[0].engines.running() == [engine]
        # Also by an agent that adopts the engine before it has inspected the model; and only once.
        assert found.spec.parameters == 596
        await it.clock.sleep(20)
        assert await it.endpoint() == found
        it.macs[0].lose_power()
        await it.clock.sleep(2)
        assert await it.endpoint() is None

    played(scene)


def test_a_crash_and_a_hang_are_seen() -> None:
    async def scene(it: Room) -> None:
        await it.assign("mac-0")
        await it.clock.sleep(8)
        it.macs[0].engines.running()[0].end(1)
        await it.clock.sleep(9)
        assert await it.endpoint() is not None  # started again, after a second's backoff
        it.macs[0].engines.running()[0].is_silent = True
        await it.clock.sleep(12)
        assert await it.condition("mac-0") == "EngineSilent"
        assert await it.endpoint() is None

    played(scene)


def test_a_replica_that_moves_away_ends_here_and_starts_there() -> None:
    async def scene(it: Room) -> None:
        await it.assign("mac-0", uid="one")
        await it.clock.sleep(8)
        await it.assign("mac-1", uid="two")
        await it.clock.sleep(10)
        found = await it.endpoint()
        assert found is not None
        assert (found.spec.node, found.spec.replica_uid) == ("mac-1", "two")
        assert it.macs[0].engines.running() == []

    played(scene)


@pytest.mark.ci
def test_three_hundred_idle_agents_write_nothing() -> None:
    async def scene(it: Room) -> None:
        await it.store.commit([], [codec.put_spec(deployment())])
        await it.clock.sleep(15)
        before = await it.revision()
        await it.clock.sleep(30)
        assert await it.revision() == before
        leases = await it.store.list(keys.NODE_LEASE_PREFIX)
        statuses = await it.store.list(keys.status_prefix("Node"))
        assert len(leases.items) == len(statuses.items) == 300
        status = codec.decode(NodeStatus, statuses.items[0])
        assert [report.path for report in status.models] == ["qwen"]

    played(scene, macs=300)


def test_a_longer_lease_lives_longer() -> None:
    async def scene(it: Room) -> None:
        key = keys.node_lease_key("patient")
        mac = HollowMac(
            clock=it.clock, status=hollow_status("patient"), models=models_on_disk({}), lease_s=20
        )
        agent = it.start(mac)
        for seconds in (30, 10, 15):
            await it.clock.sleep(seconds)
            it.store.expire()
            is_there = await it.store.get(key) is not None
            # Renewed for as long as the agent lives, and then no more.
            assert is_there == (seconds != 15)
            agent.cancel()

    played(scene)
