"""The table cache follows the store and works without it."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.limits import GatewayLimits
from gateway.routing.table import RoutingTable
from gateway.state.orphan_endpoints import ORPHAN_S
from gateway.state.table_cache import TableCache
from machinery.clock import SystemClock
from schemas.deployment import CanaryStatus, ModelDeploymentStatus
from schemas.meta import Condition, ConditionStatus
from store import codec, keys
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.memory import MemoryTransport
from store.port import Delete, Operation, Put, Transport
from tests.support.clock import FakeClock
from tests.support.etcd import running_etcd
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import (
    World,
    deployment,
    endpoint,
    published,
    replica_of,
    route,
    running_gateway,
)
from tests.support.sampling import samples
from tests.support.store_faults import FaultyTransport
from tests.support.waiting import until


@asynccontextmanager
async def keeping(transport: Transport) -> AsyncIterator[tuple[TableCache, FakeClock]]:
    clock = FakeClock()
    table_cache = TableCache(transport, clock)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(table_cache.run())
        yield table_cache, clock
        task.cancel()


def ready(table_cache: TableCache, name: str) -> int | None:
    model = table_cache.table.models.get(name)
    return None if model is None else model.ready()


def orphans(table_cache: TableCache, name: str) -> list[str]:
    model = table_cache.table.models.get(name)
    return [t.replica for backend in (model.backends if model else ()) for t in backend.orphans]


async def test_it_follows_the_store(world: World) -> None:
    async with keeping(world.transport) as (table_cache, _):
        assert not table_cache.is_synced
        await until(lambda: table_cache.is_synced, what="the first list")
        assert table_cache.table.models == {}
        await world.put(deployment("m", "fast"), route("r", "public", m=1))
        await until(lambda: set(table_cache.table.models) == {"m", "fast", "public"}, what="names")
        await world.put(endpoint("m-0", "m", "http://127.0.0.1:4100"))
        await until(lambda: ready(table_cache, "public") == 1, what="the endpoint")
        before = table_cache.table
        await asyncio.sleep(0.05)
        assert table_cache.table is before
        await world.delete(keys.spec_key("ModelDeployment", "m"))
        await until(lambda: ready(table_cache, "m") is None, what="the name being gone")


async def test_an_endpoint_that_loses_its_lease_is_kept_for_a_while(world: World) -> None:
    await world.put(deployment("m"), endpoint("m-0", "m", "http://127.0.0.1:4100"))
    async with keeping(world.transport) as (table_cache, clock):
        await until(lambda: ready(table_cache, "m") == 1, what="the endpoint")
        await world.delete(keys.endpoint_key("mac-1", "m-0"))
        await until(lambda: orphans(table_cache, "m") == ["m-0"], what="the orphan")
        assert ready(table_cache, "m") == 0
        await clock.advance(ORPHAN_S - 10)
        assert orphans(table_cache, "m") == ["m-0"]
        await clock.advance(20)
        await until(lambda: not orphans(table_cache, "m"), what="its end")


async def test_an_orphan_ends_with_its_failure_its_return_or_its_deployment(world: World) -> None:
    await world.put(deployment("m"))
    leased = [endpoint(f"m-{n}", "m", f"http://127.0.0.1:410{n}") for n in range(3)]
    await world.put(*leased)
    async with keeping(world.transport) as (table_cache, _):
        await until(lambda: ready(table_cache, "m") == 3, what="the endpoints")
        endpoints = table_cache.table.models["m"].backends[0].leased
        await world.delete(*(keys.endpoint_key("mac-1", one.name) for one in leased))
        await until(lambda: len(orphans(table_cache, "m")) == 3, what="the orphans")
        table_cache.drop_orphan(endpoints[0])
        await until(lambda: orphans(table_cache, "m") == ["m-1", "m-2"], what="one less")
        await world.put(leased[1])
        await until(lambda: orphans(table_cache, "m") == ["m-2"], what="one returned")
        table_cache.drop_orphan(endpoints[1])
        assert ready(table_cache, "m") == 1
        await world.put(endpoint("m-3", "m", "http://127.0.0.1:4102"))
        await until(lambda: orphans(table_cache, "m") == [], what="another engine at its address")
        await world.delete(keys.endpoint_key("mac-1", "m-3"))
        await until(lambda: orphans(table_cache, "m") == ["m-3"], what="the new orphan")
        await world.delete(keys.spec_key("ModelDeployment", "m"))
        await until(lambda: ready(table_cache, "m") is None, what="the name being gone")
        await world.put(deployment("m"))
        await until(lambda: ready(table_cache, "m") == 1, what="the name again")
        assert orphans(table_cache, "m") == []


@pytest.mark.ci
async def test_a_live_engine_serves_without_its_agent() -> None:
    async with running_gateway() as gateway:
        (engine,) = await gateway.serve(chat)
        await gateway.world.delete(keys.endpoint_key("mac-1", "m-0"))
        await gateway.knows("m", ready=0)
        url, body = f"{gateway.url}/v1/completions", {"model": "m"}
        async with gateway.http.post(url, json=body) as response:
            assert response.status == 200
        await engine.kill()
        async with gateway.http.post(url, json=body) as response:
            assert (await response.json())["error"]["code"] == "upstream_unreachable"
        async with gateway.http.post(url, json=body) as response:
            assert (await response.json())["error"]["code"] == "model_not_ready"


@pytest.mark.etcd
async def test_etcd_is_killed_and_requests_are_answered(tmp_path: Path) -> None:
    async with running_etcd(tmp_path) as etcd, running(FakeEngine("m-0", chat)) as engine:
        transport, writing = connect(etcd.address), connect(etcd.address)
        async with running_gateway(transport) as gateway:
            await World(writing).put(deployment("m"))
            lease = await writing.grant(2)
            await World(writing).put(published(engine, "m"), lease=lease)
            await gateway.knows("m", ready=1)
            pid = etcd.supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            # Beyond the lease's time, of which the gateway cannot learn.
            for _ in range(6):
                async with gateway.post("/v1/completions", json={"model": "m"}) as got:
                    assert got.status == 200
                await asyncio.sleep(0.5)
            async with gateway.get("/health") as got:
                assert got.status == 200
                assert (await got.json())["storeStalenessSeconds"] > 2
        await transport.close()
        await writing.close()


async def test_requests_wait_for_the_first_table(world: World) -> None:
    """A gateway that starts while the store is away answers once it is back, and takes no request twice."""
    away = FaultyTransport(world.transport)
    away.leave()
    limits = GatewayLimits(drain_timeout_s=0.0, resume_timeout_s=30.0, store_wait_limit=3)
    async with running_gateway(away, limits) as gateway:
        (engine,) = await gateway.start(chat)
        await world.serve("m", engine)

        async def ask() -> int:
            return (await gateway.chat())[0]

        running_ = gateway.gateway.handler.running
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask()) for _ in range(3)]
            await until(lambda: len(running_()) == 3, what="3 requests")
            assert await ask() == 503  # one more than may wait
            # One client leaves, which ends its wait.
            asked[0].cancel()
            await until(lambda: len(running_()) == 2, what="2 requests")
            away.come_back()
        assert [task.result() for task in asked[1:]] == [200, 200]
        assert len(engine.calls) == 2


@pytest.mark.etcd
async def test_a_gateway_starts_without_etcd(tmp_path: Path) -> None:
    transport = connect(EtcdAddress(socket=tmp_path / "nobody"))
    async with running_gateway(transport) as gateway:
        async with gateway.get("/health") as got:
            assert got.status == 503
            assert "not synced" in (await got.json())["status"]
        async with gateway.post("/v1/completions", json={"model": "m"}) as got:
            assert (got.status, got.headers["retry-after"]) == (503, "2")
            assert (await got.json())["error"]["code"] == "not_synced"
        async with gateway.get("/v1/models") as got:
            assert got.status == 503
    await transport.close()


def operation(dice: random.Random) -> Operation:
    """Return one of the writes that may happen in a fleet."""
    name, of = f"m-{dice.randrange(4)}", dice.choice(("m", "n"))
    node, port = dice.choice(("mac-1", "mac-2")), dice.choice((4100, 4101))
    published = endpoint(name, of, f"http://127.0.0.1:{port}", node=node)
    template = {"template": dice.choice("xy")}
    published = published.model_copy(update={"spec": published.spec.model_copy(update=template)})
    key = keys.endpoint_key(node, name)
    say = Condition(type="Placed", status=ConditionStatus.FALSE, reason=f"R{port}", message="no")
    canary = CanaryStatus(template="x", weight=20, since=datetime(2026, 1, 1, tzinfo=UTC))
    status = ModelDeploymentStatus(conditions=(say,), canary=dice.choice((None, canary)))
    return dice.choice(
        (
            Put(key=key, value=codec.encode(published)),
            Put(key=key, value=codec.encode(published)),
            Delete(key=key),
            codec.put_spec(replica_of(published)),
            codec.put_spec(replica_of(published)),
            Delete(key=keys.spec_key("Replica", name)),
            Put(key=keys.status_key("ModelDeployment", of), value=codec.encode(status)),
            Delete(key=keys.status_key("ModelDeployment", of)),
            codec.put_spec(deployment(of, "fast")),
            codec.put_spec(route("r", "public", m=1, n=2)),
            Delete(key=keys.spec_key("ModelRoute", "r")),
        )
    )


async def built_anew(table_cache: TableCache) -> RoutingTable:
    """Return the table after a whole build."""
    before = table_cache.table
    table_cache._note_all()
    await until(lambda: table_cache.table is not before, what="the whole build")
    return table_cache.table


@pytest.mark.parametrize("seed", range(samples(6)))
async def test_changes_lead_to_the_table_of_a_whole_build(seed: int) -> None:
    dice, transport = random.Random(seed), MemoryTransport(SystemClock())
    await transport.commit([], [codec.put_spec(deployment(name, "fast")) for name in "mn"])
    async with keeping(transport) as (table_cache, clock):
        await until(lambda: table_cache.source == "store", what="the first list")
        for _ in range(25):
            for _ in range(dice.randrange(1, 4)):
                await transport.commit([], [operation(dice)])
            for _ in range(20):
                await asyncio.sleep(0)
            await clock.advance(dice.choice((0, 0, 1, ORPHAN_S / 2)))
            changed = table_cache.table
            assert await built_anew(table_cache) == changed
