"""The admin API: workers, totals, time series, requests and refusals."""

import asyncio
from typing import Any

import pytest
from typing_extensions import override

from gateway.admin.admin_context import NodeCache
from machinery.clock import SystemClock
from schemas.node import NodeLease, NodeStatus
from store import codec, keys
from store.errors import UnavailableError
from store.memory import MemoryTransport
from store.port import Listing, Put
from tests.support.gateway_calls import error_of, send_chats, streams_three_tokens
from tests.support.gateway_engine_scripts import chat, refuses
from tests.support.gateway_fake_engine import Call
from tests.support.gateway_world import Running, World, deployment, endpoint
from tests.support.waiting import until

GIB = 1 << 30


def status(name: str, **more: Any) -> NodeStatus:
    values: dict[str, Any] = {
        "uid": name,
        "hostname": f"{name}.local",
        "address": "10.0.0.1",
        "agent_version": "1",
        "os": "macOS",
        "os_version": "26.1",
        "machine": "arm64",
        "chip": "Apple M4 Pro",
        "cpu_cores": 12,
        "performance_cores": 8,
        "metal": "Metal 4",
        "gpu_cores": 20,
        "memory_bytes": 48 * GIB,
        "allocatable_bytes": 36 * GIB,
    }
    return NodeStatus(**{**values, **more})


async def report(world: World, *names: str, alive: bool = True) -> None:
    puts = [
        Put(key=keys.status_key("Node", name), value=codec.encode(status(name))) for name in names
    ]
    if alive:
        lease = codec.encode(NodeLease(uid="u", session="s"))
        puts += [Put(key=keys.node_lease_key(name), value=lease) for name in names]
    await world.transport.commit([], puts)


async def get(gateway: Running, path: str) -> Any:
    async with gateway.get(path) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_workers(gateway: Running) -> None:
    await report(gateway.world, "mac-1", "mac-2")
    await report(gateway.world, "mac-3", alive=False)
    (engine,) = await gateway.serve(chat)
    await send_chats(gateway.http, gateway, 2)
    found = await get(gateway, "/api/cluster/workers")
    assert found == await get(gateway, "/api/dashboard/workers")
    assert [(one["workerId"], one["status"]) for one in found] == [
        ("mac-1", "online"),
        ("mac-2", "online"),
        ("mac-3", "offline"),
    ]
    serving, idle, _ = found
    assert serving["hardware"] == {
        "chipModel": "Apple M4 Pro",
        "chipGeneration": "M4",
        "variant": "Pro",
        "cpuCores": 12,
        "performanceCores": 8,
        "efficiencyCores": 4,
        "metalVersion": "Metal 4",
        "supportedModelTiers": ["13B-30B", "7B-13B", "3B-7B", "<3B"],
        "gpuCores": 20,
        "unifiedMemoryGB": 48.0,
        "memoryForModelsGB": 36.0,
        "osVersion": "26.1",
    }
    assert (serving["ip"], serving["metrics"]["modelsLoaded"]) == ("10.0.0.1", ["m"])
    assert serving["metrics"]["totalRequests"] == 2
    assert serving["metrics"]["avgLatencyMs"] > 0
    assert serving["endpoints"][0]["url"] == f"http://127.0.0.1:{engine.port}"
    # Values that only the Mac itself could measure.
    for unknown in ("cpuUsagePercent", "gpuUtilizationPercent", "memoryUsedGB"):
        assert serving["metrics"][unknown] is None
    assert (idle["metrics"]["modelsLoaded"], idle["metrics"]["activeRequests"]) == ([], 0)
    assert await get(gateway, "/api/cluster/workers/mac-1") == serving
    async with gateway.get("/api/cluster/workers/mac-9") as response:
        error = await error_of(response)
        assert (response.status, error["code"]) == (404, "worker_not_found")
        assert "mac-1, mac-2, mac-3" in error["message"]


@pytest.mark.parametrize("patience_s", [1.0])
async def test_a_worker_with_a_failing_agent_or_engine(gateway: Running) -> None:
    """An engine outlives its agent, so its Mac is neither offline nor online."""
    await report(gateway.world, "mac-2")
    ports = [endpoint("m-0", "m", "http://127.0.0.1:1"), endpoint("m-1", "m", "http://127.0.0.1:2")]
    ill = ports[1].model_copy(update={"spec": ports[1].spec.model_copy(update={"node": "mac-2"})})
    await gateway.world.put(deployment("m", replicas=2), ports[0], ill)
    await gateway.knows("m", ready=2)
    await send_chats(gateway.http, gateway, 1)
    found = await get(gateway, "/api/cluster/workers")
    assert [(one["workerId"], one["status"]) for one in found] == [
        ("mac-1", "degraded"),
        ("mac-2", "degraded"),
    ]
    assert "renew" in found[0]["statusReason"]
    assert "m-1" in found[1]["statusReason"]
    cluster = await get(gateway, "/api/cluster/status")
    assert cluster["status"] == "degraded"
    assert cluster["workers"] == {"total": 2, "online": 2, "offline": 0}


async def test_cards_graphs_and_the_request_log(gateway: Running) -> None:
    (engine,) = await gateway.serve(streams_three_tokens)
    await send_chats(gateway.http, gateway, 2, stream=True)
    engine.script = refuses(400, "bad")
    await send_chats(gateway.http, gateway, 1)
    cards = await get(gateway, "/api/dashboard/overview")
    assert cards["requests"]["total24h"] == 3
    assert cards["throughput"]["current"] > 0
    assert (cards["workers"]["online"], cards["requests"]["active"]) == (1, 0)
    log = await get(gateway, "/api/requests/ended?limit=2")
    assert [one["status"] for one in log["requests"]] == ["refused", "ok"]
    assert log["kept"] == 3
    tokens = log["requests"][1]["tokens"]
    assert (tokens["prompt"], tokens["output"]) == (3, 3)
    only = await get(gateway, "/api/requests/ended?status=ok,failed&model=m")
    assert [one["status"] for one in only["requests"]] == ["ok", "ok"]
    graph = await get(gateway, "/api/dashboard/metrics/timeseries?metric=latency")
    assert (graph["unit"], len(graph["points"])) == ("ms", 360)
    # The words of older dashboards mean the same, in their shape.
    rows = await get(gateway, "/api/dashboard/requests?status=success&model=m")
    assert [(row["requestId"], row["status"]) for row in rows] == [
        (one["id"], "success") for one in only["requests"]
    ]
    speed = await get(gateway, "/api/dashboard/metrics/timeseries?metric=throughput")
    assert (speed["metric"], speed["unit"]) == ("throughput", "tokens/sec")
    day = await get(gateway, "/api/dashboard/metrics/timeseries?metric=rps&duration=24h")
    assert len(day["points"]) <= 360
    shot = await get(gateway, "/metrics/snapshot")
    assert (shot["requests24h"], shot["outputTokens24h"]) == (3, 6)
    assert len(shot["lastGenerationsTokensPerSecond"]) == 2


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/api/dashboard/requests?status=bad", "they end as success, error, cancelled, ok"),
        ("/api/dashboard/requests?limit=0", "limit"),
        ("/api/dashboard/metrics/timeseries?metric=x", "there are throughput, requests"),
        ("/api/dashboard/metrics/timeseries?duration=1y", "1h30m, 90s or 500ms"),
        ("/api/dashboard/metrics/timeseries?duration=48h", "between 10s and 24h"),
    ],
)
async def test_wrong_questions(gateway: Running, path: str, says: str) -> None:
    async with gateway.get(path) as response:
        assert response.status == 400
        assert says in (await error_of(response))["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/cluster/load-model",
        "/api/cluster/workers/mac-1/load-model",
        "/api/cluster/workers/mac-1/unload-model",
    ],
)
async def test_models_are_not_loaded_by_hand(gateway: Running, path: str) -> None:
    async with gateway.post(path, json={"model": "m"}) as response:
        error = await error_of(response)
        assert (response.status, error["code"]) == (501, "declared_not_commanded")
        assert "fleetctl apply" in error["message"]


async def test_the_queue(gateway: Running) -> None:
    event = asyncio.Event()

    async def answer_later(call: Call) -> None:
        await event.wait()
        await chat(call)

    async with asyncio.TaskGroup() as group:
        (engine,) = await gateway.serve(answer_later)
        group.create_task(send_chats(gateway.http, gateway, 1))
        await until(lambda: engine.calls, what="a request at the engine")
        busy = await get(gateway, "/queue")
        assert busy == {
            "queueDepth": 0,
            "active": 1,
            "waitingByModel": busy["waitingByModel"],
            "activeByDeployment": {"m": 1},
        }
        worker = await get(gateway, "/api/cluster/workers/mac-1")
        assert worker["metrics"]["activeRequests"] == 1
        event.set()


async def test_what_is_known_of_models(gateway: Running) -> None:
    await gateway.world.put(
        deployment("m", "fast"),
        endpoint("m-0", "m", "http://127.0.0.1:1"),
        endpoint("m-1", "m", "http://127.0.0.1:2"),
    )
    await gateway.knows("fast", ready=2)
    (fast, _) = (await get(gateway, "/model/info"))["data"]
    assert fast == await get(gateway, "/model/info?model=fast")
    assert fast == {
        "id": "fast",
        "created": 0,
        "deployments": ["m"],
        "source": ["/models/m"],
        "contextLength": 4096,
        "concurrency": 8,
        "replicasReady": 2,
        "deviceCount": 1,
    }
    async with gateway.get("/model/info?model=fats") as response:
        assert "Did you mean 'fast'?" in (await error_of(response))["message"]


class Away(MemoryTransport):
    """A store that can become unreachable."""

    is_away = False
    lists = 0

    @override
    async def list(self, prefix: str) -> Listing:
        self.lists += 1
        if self.is_away:
            raise UnavailableError("away")
        return await super().list(prefix)


async def test_nodes_are_listed_now_and_then_and_kept_while_the_store_is_away() -> None:
    now_s = 0.0

    class Hours(SystemClock):
        @override
        def monotonic(self) -> float:
            return now_s

    store = Away(SystemClock())
    await report(World(store), "mac-1")
    book = NodeCache(store, Hours())
    first, *others = await asyncio.gather(*(book.nodes() for _ in range(10)))
    assert set(first.statuses) == first.alive == {"mac-1"}
    assert not first.error
    assert all(other is first for other in others)
    assert store.lists == 3
    store.is_away, now_s = True, 60.0
    later = await book.nodes()
    assert (set(later.statuses), later.error) == ({"mac-1"}, "away")
