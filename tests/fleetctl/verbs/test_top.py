"""The verb `fleetctl top` with a real agent, a real gateway and a real etcd."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource
from schemas.meta import ObjectMeta
from schemas.node import NodeLease, NodeStatus
from schemas.replica import MemoryProof, RankAssignment, Replica, ReplicaSpec
from store import codec, keys
from store.etcd.connect import connect
from store.port import Delete, Put, Transport
from tests.support.fleet import Done, Fleet
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.gateway_world import World, endpoint, running_gateway
from tests.support.terminal import CTRL_C, terminal
from tests.support.waiting import until_async

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]

PROOF = MemoryProof(weights_bytes=1, kv_cache_bytes=1, activation_bytes=1, overhead_bytes=1)


class Engine:
    """An engine's /metrics; each request finds ten more tokens."""

    def __init__(self) -> None:
        self.tokens = 0

    async def metrics(self, _: web.Request) -> web.Response:
        self.tokens += 10
        figures = {
            "generation_tokens_total": self.tokens,
            "num_sequences_in_flight": 2,
            "num_requests_waiting": 1,
            "memory_active_bytes": 3 << 30,
        }
        lines = [f"fleet_engine_{name} {value}\n" for name, value in figures.items()]
        return web.Response(text="".join(lines))


@asynccontextmanager
async def engine() -> AsyncIterator[str]:
    """Run an engine that no agent knows; yield its URL."""
    app = web.Application()
    app.router.add_get("/metrics", Engine().metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Return a fleet of node-1 with a real agent, and node-2, which exists only in the store."""
    root = tmp_path_factory.mktemp("top")
    fleet = Fleet(root / "fleet", root / "models")
    try:
        await fleet.etcd.start()
        fleet.start_agent("node-1")
        await fleet.joined(1)
        transport = connect(fleet.etcd.address)
        try:
            await second_node(transport)
        finally:
            await transport.close()
        yield fleet
    finally:
        await fleet.stop()


async def ctl(fleet: Fleet, *words: str) -> Done:
    """Run a command in this process, against the fleet's etcd."""
    return await run_fleetctl(*words, "--etcd", str(fleet.etcd.address))


async def second_node(transport: Transport) -> None:
    """Write node-2 as a copy of node-1, with an agent of an older release that has no API."""
    item = await until_async(
        lambda: transport.get(keys.status_key("Node", "node-1")), what="node-1's status"
    )
    assert item is not None
    status = codec.decode(NodeStatus, item).model_copy(update={"agent_url": "", "uid": "two"})
    spec = ReplicaSpec(
        deployment="qwen",
        template="t",
        model=ModelSource(path="m"),
        served_names=("qwen",),
        context_length=1024,
        concurrency=1,
        ranks=(RankAssignment(node="node-2", memory=PROOF),),
    )
    deployment = ModelDeployment(
        metadata=ObjectMeta(name="qwen"),
        spec=ModelDeploymentSpec(model=ModelSource(path="m"), served_names=("qwen",)),
    )
    lease = NodeLease(uid="two", session="s")
    await transport.commit(
        [],
        [
            Put(key=keys.status_key("Node", "node-2"), value=codec.encode(status)),
            Put(key=keys.node_lease_key("node-2"), value=codec.encode(lease)),
            codec.put_spec(Replica(metadata=ObjectMeta(name="qwen-0"), spec=spec)),
            codec.put_spec(deployment),
        ],
    )


@pytest.fixture
async def transport(fleet: Fleet) -> AsyncIterator[Transport]:
    made = connect(fleet.etcd.address)
    yield made
    await made.close()


@asynccontextmanager
async def served(transport: Transport) -> AsyncIterator[str]:
    """Run an engine that serves qwen on node-2."""
    async with engine() as url:
        await World(transport).put(endpoint("qwen-0", "qwen", url, node="node-2"))
        try:
            yield url
        finally:
            await transport.commit([], [Delete(key=keys.endpoint_key("node-2", "qwen-0"))])


async def test_nodes(fleet: Fleet, transport: Transport) -> None:
    async with served(transport):
        done = await ctl(fleet, "top", "nodes", "node-1", "node-2", "--over", "200ms")
        assert done.code == 0, done.err
        title, first, second = done.out.splitlines()
        assert title.split() == [
            *("NAME", "MEMORY", "MEMORY%", "MODELS", "MODELS%", "ENGINES"),
            *("IN", "FLIGHT", "QUEUE", "TOKENS/S"),
        ]
        assert first.split()[-5:] == ["0%", "0", "0", "0", "0.0"]
        assert "?" not in first
        # The engine reported this directly; other engines may exist.
        assert second.split()[:-1] == ["node-2", "?", "?", "3.0", "GiB+", "?", "1+", "2+", "1+"]
        assert done.err == (
            "warning: node/node-2: its agent reports no address; is it an older release?\n"
        )
        words = ("--over=100ms", "--sort-by=tokens", "--no-headers")
        by_tokens = await ctl(fleet, "top", "no", "-l", "fleet/node!=node-3", *words)
        assert [line.split()[0] for line in by_tokens.out.splitlines()] == ["node-2", "node-1"]
    # All tickets are revoked.
    assert (await transport.list(keys.TICKET_PREFIX)).items == ()


async def test_models(fleet: Fleet, transport: Transport) -> None:
    async with served(transport), running_gateway(transport) as gateway:

        async def registered() -> bool:
            return bool((await transport.list(keys.GATEWAY_LEASE_PREFIX)).items)

        await until_async(registered, what="the gateway to be registered")
        await gateway.knows("qwen", ready=1)
        done = await ctl(fleet, "top", "models", "qwen", "--over", "200ms", "-o", "json")
        assert done.code == 0, done.err
        [row] = json.loads(done.out)["items"]
        assert row.pop("tokensPerSecond") > 0
        assert row == {
            "name": "qwen",
            "ready": 0,
            "wanted": 1,
            "memoryBytes": 3 << 30,
            "inFlight": 2,
            "queue": 1,
            "requestsPerSecond": 0,
            "firstTokenS": None,
            "partial": [],
        }


async def test_a_dead_agent_is_a_warning(fleet: Fleet) -> None:
    fleet.start_agent("node-3")
    await fleet.joined(3)
    fleet.kill("node-3")
    # The agent does not answer, whether its lease still lives or not.
    done = await ctl(fleet, "top", "nodes", "node-3", "--over=100ms", "--no-headers")
    assert (done.code, done.out.split()) == (0, ["node-3", *("?" * 8)])
    assert done.err.startswith("warning: node/node-3")


@pytest.mark.ci
async def test_live_at_a_terminal(fleet: Fleet, transport: Transport) -> None:
    where = ("--over", "100ms", "--etcd", str(fleet.etcd.address))
    async with served(transport), terminal("top", "model/qwen", "-w", *where) as shown:
        await shown.until("3.0 GiB")
        # The next table replaces it: the cursor moves up.
        await shown.until("\x1b[1A")
        await shown.until("3.0 GiB")
        shown.type(CTRL_C)
        assert await shown.ended() == 130
