"""The agent as a process, with a real etcd, real engines and real signals. The test acts as the reconciler."""

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator

import pytest

from nodeagent.engines import engine_processes
from nodeagent.hardware.probe import read_machine_facts
from nodeagent.node import machine_conditions
from schemas.node import NodeLease, NodeStatus
from schemas.replica import Replica
from store import codec, keys
from tests.support.nodeagent_agents import CLOCK, HOST, NODE, AgentProcess, Desk, answers
from tests.support.values import present
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.etcd, pytest.mark.mlx, pytest.mark.timeout(240)]


@pytest.fixture
async def serving(desk: Desk, agent: AgentProcess) -> AsyncIterator[Replica]:
    """Return a replica that is published; it is gone again afterwards."""
    replica = await desk.assign("tiny-0", uid=f"u{(await desk.store.status()).revision}")
    await desk.until_published("tiny-0")
    yield replica
    await desk.remove("tiny-0")
    await until(lambda: not agent.engines(), limit_s=40, what="no engine is left")
    await desk.until_withdrawn("tiny-0")


async def test_the_node_tells_of_itself(desk: Desk, agent: AgentProcess) -> None:
    item = await until_async(lambda: desk.store.get(keys.status_key("Node", NODE)), limit_s=40)
    status = codec.decode(NodeStatus, item)
    assert (status.address, status.allocatable_bytes) == (HOST, 4 * 2**30)
    facts = await read_machine_facts()
    assert (status.hardware_uuid, status.is_part) == (facts.hardware_uuid.lower(), True)
    assert status.mlx_version == importlib.metadata.version("mlx")
    assert status.mlx_lm_version == importlib.metadata.version("mlx-lm")
    assert 0 < status.disk_free_bytes < status.disk_bytes
    assert tuple(c.type for c in status.conditions) == tuple(
        sorted(machine_conditions.CONDITION_TYPES)
    )
    lease = await until_async(lambda: desk.store.get(keys.node_lease_key(NODE)))
    assert lease.lease != 0
    assert agent.child is not None
    assert codec.decode(NodeLease, lease).session.endswith(f"/{agent.child.record.pid}")


async def test_endpoint_appears_when_engine_has_made_token(desk: Desk, agent: AgentProcess) -> None:
    await until_async(lambda: desk.store.get(keys.node_lease_key(NODE)), limit_s=40)
    watch = desk.store.watch(keys.RANK_PREFIX, after_revision=(await desk.store.status()).revision)
    replica = await desk.assign("tiny-0", uid="first")
    endpoint = await desk.until_published("tiny-0")
    assert await answers(endpoint.spec.url)
    assert (endpoint.spec.replica_uid, endpoint.spec.node) == ("first", NODE)
    assert endpoint.spec.template == replica.spec.template
    lease = present(await desk.store.get(keys.node_lease_key(NODE)))
    assert await desk.lease_of("tiny-0") == lease.lease
    await desk.until_condition("tiny-0", "True", "Serving")
    said: list[str] = []
    async with asyncio.timeout(30):
        async for batch in watch:
            said += [c.now.value.decode() for c in batch.changes if c.now]
            if said and "Serving" in said[-1]:
                break
    await watch.aclose()
    order = [word for text in said for word in ("Starting", "Loading", "WarmingUp") if word in text]
    assert order == ["Starting", "Loading", "WarmingUp"]

    await desk.mark_deleted(replica)
    await desk.until_condition("tiny-0", "True", "EngineEnded", type_="Stopped")
    assert await desk.endpoint("tiny-0") is None
    assert agent.engines() == []
    await desk.remove("tiny-0")


@pytest.mark.ci
async def test_a_replica_that_vanishes_is_ended(
    desk: Desk, agent: AgentProcess, serving: Replica
) -> None:
    await desk.remove(serving.name)
    await until(lambda: not agent.engines(), limit_s=40)
    assert await desk.endpoint(serving.name) is None
    assert await desk.condition(serving.name) == ("", "")


@pytest.mark.ci
async def test_a_crashed_engine_is_withdrawn_and_restarted(
    desk: Desk, agent: AgentProcess, serving: Replica
) -> None:
    first = await agent.engine()
    engine_processes.kill(first)
    killed_at = CLOCK.monotonic()
    await desk.until_withdrawn(serving.name)
    await desk.until_condition(serving.name, "False", "EngineEnded")
    assert await desk.restarts(serving.name) == 1
    second = await agent.engine()
    assert CLOCK.monotonic() - killed_at >= 1.0
    assert second.child.record.pid != first.child.record.pid
    endpoint = await desk.until_published(serving.name)
    assert await answers(endpoint.spec.url)
