"""Hollow agents: many real agents with simulated engines in one process."""

import pytest

from schemas.deployment import DraftModel, ModelSource
from schemas.node import NodeStatus
from schemas.replica import EndpointHardware
from store import codec, keys
from store.port import Delete
from tests.support.nodeagent_hollow import HollowFleet, in_hollow_fleet
from tests.support.nodeagent_plans import wanted
from tests.support.values import present
from tests.support.world import deployment

on_two_macs = in_hollow_fleet("a", "b")


@on_two_macs
async def test_an_engine_loads_answers_drains_and_ends(it: HollowFleet) -> None:
    await it.put(wanted())
    await it.clock.sleep(4)
    assert await it.condition("a") == "0 Loading"
    await it.clock.sleep(4)
    spec = present(await it.endpoint()).spec
    # What gateways choose by.
    assert (spec.node, spec.site, spec.concurrency, spec.parameters) == ("a", "berlin", 1, 596)
    memory_bytes = 48 * 2**30
    hardware = EndpointHardware(chip="Apple M4 Pro", gpu_cores=20, memory_bytes=memory_bytes)
    assert spec.hardware == hardware
    await it.put(wanted(is_deleting=True))
    await it.clock.sleep(1)
    assert await it.condition("a", 0, "Stopped") == "0 EngineEnding"
    await it.clock.sleep(3)
    assert await it.condition("a", 0, "Stopped") == "0 EngineEnded"
    assert it.running() == ""


@on_two_macs
async def test_a_deleted_node_registers_again_while_its_agent_lives(it: HollowFleet) -> None:
    key = keys.status_key("Node", "a")
    assert await it.store.get(key) is not None
    await it.store.commit([], [Delete(key=key)])
    await it.clock.sleep(71)  # an agent looks for its own status once a minute
    assert codec.decode(NodeStatus, present(await it.store.get(key))).hostname == "a"


@on_two_macs
async def test_adapters_and_draft_models_are_looked_at_like_models(it: HollowFleet) -> None:
    declared = deployment()
    source = ModelSource(path="qwen", adapter="law", draft=DraftModel(path="small"))
    spec = declared.spec.model_copy(update={"model": source})
    await it.store.commit([], [codec.put_spec(declared.model_copy(update={"spec": spec}))])
    await it.clock.sleep(1)
    status = codec.decode(NodeStatus, present(await it.store.get(keys.status_key("Node", "a"))))
    assert [model.path for model in status.models] == ["qwen", "small"]
    assert [adapter.path for adapter in status.adapters] == ["law"]


@on_two_macs
async def test_engines_outlive_their_agent_and_not_the_power(it: HollowFleet) -> None:
    await it.put(wanted())
    await it.clock.sleep(8)
    engine = it.rank("a")
    it.agents["a"].cancel()
    await it.clock.sleep(6)
    assert await it.endpoint() is None
    it.start("a")
    await it.clock.sleep(2)
    endpoint = present(await it.endpoint())
    assert it.rank("a") is engine
    # Also by an agent that adopts the engine before it has inspected the model; and only once.
    assert endpoint.spec.parameters == 596
    await it.clock.sleep(20)
    assert await it.endpoint() == endpoint
    it.macs["a"].lose_power()
    await it.clock.sleep(2)
    assert await it.endpoint() is None


@on_two_macs
async def test_a_crash_and_a_hang_are_noticed(it: HollowFleet) -> None:
    await it.put(wanted())
    await it.clock.sleep(8)
    it.rank("a").end(1)
    await it.clock.sleep(9)
    assert await it.endpoint() is not None  # started again, after a second's backoff
    it.rank("a").is_silent = True
    await it.clock.sleep(12)
    assert await it.condition("a") == "0 EngineSilent"
    assert await it.endpoint() is None


@on_two_macs
async def test_a_replica_that_moves_away_ends_here_and_starts_there(it: HollowFleet) -> None:
    await it.put(wanted(uid="one"))
    await it.clock.sleep(8)
    await it.put(wanted(uid="two", node="b"))
    await it.clock.sleep(10)
    spec = present(await it.endpoint()).spec
    assert (spec.node, spec.replica_uid, it.running()) == ("b", "two", "b")


@pytest.mark.ci
@in_hollow_fleet(*(f"mac-{number}" for number in range(300)))
async def test_three_hundred_idle_agents_write_nothing(it: HollowFleet) -> None:
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


@in_hollow_fleet()
async def test_a_longer_lease_lives_longer(it: HollowFleet) -> None:
    it.macs["patient"] = it.mac("patient", lease_s=20)
    agent = it.start("patient")
    for seconds in (30, 10, 15):
        await it.clock.sleep(seconds)
        it.store.expire()
        is_there = await it.store.get(keys.node_lease_key("patient")) is not None
        # Renewed for as long as the agent lives, and then no more.
        assert is_there == (seconds != 15)
        agent.cancel()
