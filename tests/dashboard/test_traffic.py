"""Requests of real gateways as the recorder shows them: the seeds' routes, the WebSocket, and gateways that fail."""

import asyncio
import operator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import msgspec
import orjson
import pytest
from aiohttp import web

from dashboard.traffic import DAY_S, KnownTimes, Traffic, on_own_clock
from gateway.telemetry.request_journal import JournalEntry
from machinery.version import version
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeLease
from schemas.records import GatewayLease
from schemas.wire.requests import EndedRequest, GatewayFeed, RunningRequest
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Delete, Put
from tests.support.dashboards import (
    CLOCK,
    RunningDashboard,
    ended,
    read_events,
    running_dashboard,
    serving,
)
from tests.support.gateway_calls import send_chats
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import World, running_gateway
from tests.support.waiting import until

NUMBER, TEXT = {"type": ["number", "null"]}, {"type": ["string", "null"]}
INTEGER = {"type": "integer"}


def shape(*, numbers: str = "", integers: str = "", texts: str = "", **more: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these members; a number or a text may be null."""
    properties = {
        **dict.fromkeys(numbers.split(), NUMBER),
        **dict.fromkeys(integers.split(), INTEGER),
        **dict.fromkeys(texts.split(), TEXT),
        **more,
    }
    head = {"type": "object", "additionalProperties": False}
    return {**head, "properties": properties, "required": list(properties)}


def many(type_: str, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": {"type": type_}, **more}


# `totalRequestsHandled` is the name that the document's heartbeats have.
MAC_METRICS = shape(
    numbers="cpuUsagePercent gpuUtilizationPercent memoryUsedGB avgLatencyMs",
    integers="activeRequests totalRequests totalRequestsHandled",
    modelsLoaded=many("string"),
)
FEED = "/api/dashboard/feed"
COUNTS = {"type": "object", "additionalProperties": INTEGER}
SNAPSHOT = shape(
    numbers="uptimeSeconds tokensPerSecond peakTokensPerSecond avgLatencyMs avgFirstTokenMs",
    integers="worldSize requests24h errors24h promptTokens24h outputTokens24h queueDepth active",
    lastGenerationsTokensPerSecond=many("number", maxItems=40),
    waitingByModel=COUNTS,
)
# What the document about a cluster of ring workers names: rates, latency, the queue, the size of the world. The shapes
# of mlx-serving's document are checked in tests/seeds/test_answers.py.
SHAPES = {
    "/metrics/snapshot": SNAPSHOT,
    "/queue": shape(
        integers="queueDepth active",
        waitingByModel=COUNTS,
        running={"type": "array"},
        gatewaysSilent={"type": "object"},
    ),
    "/health": {
        "type": "object",
        "properties": {"status": {"const": "ok"}, "worldSize": INTEGER, "queueDepth": INTEGER},
        "required": ["status", "worldSize", "queueDepth"],
    },
}
EVENTS = {
    "worker_online": {"type": "object", "required": ["workerId", "hostname"]},
    "worker_offline": shape(texts="workerId"),
    "worker_update": shape(texts="workerId", metrics=MAC_METRICS),
    "request_started": shape(texts="requestId modelId workerId"),
    "request_completed": shape(texts="requestId status", numbers="latency", integers="tokens"),
    "metrics_update": shape(numbers="throughput latency", integers="activeRequests"),
}


@pytest.fixture
def memory() -> MemoryTransport:
    return MemoryTransport(CLOCK)


def put_lease(name: str) -> Put:
    return Put(key=keys.node_lease_key(name), value=codec.encode(NodeLease(uid=name, session="s")))


def put_gateway(id_: str, url: str) -> Put:
    lease = GatewayLease(url=url, version="1", asks_for_keys=False)
    return Put(key=keys.named(keys.GATEWAY_LEASE_PREFIX, id_), value=codec.encode(lease))


async def finished(dashboard: RunningDashboard, count: int) -> None:
    await dashboard.until("/api/dashboard/requests", lambda found: len(found) == count)


async def silent(dashboard: RunningDashboard, count: int) -> dict[str, str]:
    """Wait until so many gateways are silent; return the reason of each."""

    def reasons(found: Any) -> dict[str, str] | None:
        problems: dict[str, str] = found["gatewaysSilent"]
        return problems if len(problems) == count else None

    return dict(await dashboard.until("/queue", reasons))


async def check_live_views(dashboard: RunningDashboard) -> None:
    """Check that the views of requests have the five that ended, in the snapshot and on a stream."""
    views = await dashboard.until(
        "/api/v1/snapshot?view=ended,inFlight,traffic",
        lambda found: found["views"] if len(found["views"]["ended"]) == 5 else None,
    )
    (traffic,) = views["traffic"]
    assert (traffic["requests24h"], traffic["gatewaysSilent"]) == (5, {})
    listed = (await dashboard.get("/api/v1/requests"))["requests"]
    shown = [{key: view[key] for key in listed[0]} for view in views["ended"]]
    by_id = operator.itemgetter("id")
    assert sorted(shown, key=by_id) == sorted(listed, key=by_id)
    url = f"{dashboard.url}/api/v1/stream?view=ended"
    async with dashboard.http.get(url) as response:
        first = await anext(read_events(response))
    assert len(first.data["views"]["ended"]) == 5


async def test_requests_of_two_gateways_in_the_seeds_shapes(memory: MemoryTransport) -> None:
    world = World(memory)
    known = codec.put_spec(Node(metadata=ObjectMeta(name="mac-1")))
    await memory.commit([], [known, put_lease("mac-1")])
    async with (
        running(FakeEngine("m-0", chat)) as engine,
        running(FakeEngine("n-0", chat)) as other_engine,
        running_gateway(memory) as one,
        running_gateway(memory) as other,
        running_dashboard(memory) as dashboard,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http,
    ):
        await world.serve("m", engine)
        await one.knows("m", ready=1)
        await other.knows("m", ready=1)
        await until(lambda: len(dashboard.dashboard.traffic.gateways) == 2)
        async with http.ws_connect(f"{dashboard.url}/ws/dashboard") as socket:
            await send_chats(http, one, 3)
            await send_chats(http, other, 2)
            await finished(dashboard, 5)
            await check_live_views(dashboard)
            seen: dict[str, Any] = {}

            async def see(wanted: set[str]) -> None:
                async with asyncio.timeout(30):
                    while wanted - set(seen):
                        message = orjson.loads((await socket.receive()).data)
                        assert set(message) == {"type", "data", "timestamp"}
                        jsonschema.validate(message["data"], EVENTS[message["type"]])
                        seen.setdefault(message["type"], message["data"])

            # A Mac gets another model.
            await world.serve("n", other_engine)
            await see({"worker_update"})
            await memory.commit([], [put_lease("mac-2"), Delete(key=keys.node_lease_key("mac-1"))])
            await see(set(EVENTS))
        assert seen["worker_online"]["workerId"] == "mac-2"
        assert seen["worker_offline"]["workerId"] == "mac-1"
        assert seen["worker_update"]["workerId"] == "mac-1"
        for path, schema in SHAPES.items():
            jsonschema.validate(await dashboard.get(path), schema)
        overview = await dashboard.get("/api/dashboard/overview")
        assert overview["requests"]["total24h"] == 5
        (mac, _) = await dashboard.get("/api/dashboard/workers")
        assert (mac["workerId"], mac["metrics"]["totalRequests"]) == ("mac-1", 5)
        status = await dashboard.get("/api/cluster/status")
        assert status["requests"] == {"active": 0, "total": 5, "successRate": 1.0}
        assert await dashboard.get("/api/dashboard/requests?status=error") == []
        snapshot = await dashboard.get("/metrics/snapshot")
        assert (snapshot["requests24h"], snapshot["worldSize"]) == (5, 1)
        async with dashboard.http.get(f"{dashboard.url}/metrics/stream") as response:
            events = [await response.content.readuntil(b"\n\n") for _ in range(2)]
        for event in events:
            streamed = orjson.loads(event.removeprefix(b"data: "))
            jsonschema.validate(streamed, SNAPSHOT)
            assert streamed["requests24h"] == 5
        async with dashboard.http.get(f"{dashboard.url}/metrics") as response:
            metrics = await response.text()
        assert f'fleet_build_info{{process="dashboard",version="{version()}"}} 1\n' in metrics


@pytest.mark.parametrize(
    ("seen", "jumps", "expected"),
    [
        pytest.param([(1000, 0), (1100, 100)], [0, 0], 400, id="steady"),
        pytest.param([(1000, 0), (1104, 100)], [0, 0], 400, id="a-little-off"),
        # It ran for 100 s, and 300 s of the rest are known.
        pytest.param([(1000, 0), (1100, 100), (1201, 101)], [0, 0, 100], 300, id="ahead"),
        pytest.param([(1000, 0), (1100, 100), (1001, 101)], [0, 0, -100], 400, id="back"),
        pytest.param([(1000, 0), (800, 1)], [0, -201], 400, id="before-its-start"),
        # A day ahead has pushed out what was counted before.
        pytest.param(
            [(1000, 0), (1100, 100), (100_000, 101), (1200, 102)],
            [0, 0, 98_899, -98_801],
            200,
            id="a-day-ahead-and-back",
        ),
    ],
)
def test_times_over_which_a_clock_jumps_are_unknown(
    seen: list[tuple[float, float]], jumps: list[float], expected: float
) -> None:
    known = KnownTimes(1000)
    assert [known.note(*one) for one in seen] == jumps
    assert known.seconds(1000, 1400) == expected


async def test_thousands_of_requests_in_a_second_are_all_counted(memory: MemoryTransport) -> None:
    """An answer has a thousand; of what a gateway has forgotten, the recorder tells that it is missing."""
    async with running_gateway(memory) as one, running_dashboard(memory) as dashboard:
        await until(lambda: len(dashboard.dashboard.traffic.gateways) == 1)
        journal = one.gateway.recorder.journal
        at_s = CLOCK.now().timestamp()

        def entries(first: int, count: int) -> list[JournalEntry]:
            plain = JournalEntry(
                *(at_s, "", "/v1/chat/completions", "m", "", "", False, 200, "ok", "", None, ()),
                *(0, 0.0, 0.0, 0.1, 3, 0, 2),
            )
            return [
                msgspec.structs.replace(plain, request_id=f"r-{n}")
                for n in range(first, first + count)
            ]

        async def total(count: int) -> None:
            await dashboard.until(
                "/api/dashboard/overview", lambda found: found["requests"]["total24h"] == count
            )

        journal.extend(entries(0, 1))
        await total(1)
        journal.extend(entries(1, 3500))
        await total(3501)
        # More than it remembers: all that it has is read.
        journal.extend(entries(3501, 12_000))
        await total(3501 + 10_000)
        async with dashboard.http.get(f"{dashboard.url}/metrics") as response:
            shown = await response.text()
        assert "fleet_dashboard_feed_requests_total 13501\n" in shown
        assert "fleet_dashboard_feed_gaps_total 1\n" in shown
        assert "fleet_dashboard_feed_lost_total 2000\n" in shown


async def test_a_gateway_that_hangs_or_lies_is_named_and_delays_no_other(
    memory: MemoryTransport,
) -> None:
    async def lie(_: web.Request) -> web.Response:
        return web.json_response({"gateway": "liar", "requests": "many"})

    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async with (
        serving(FEED, lie, hang) as (liar_url, sleeper_url),
        running_gateway(memory),
        running_dashboard(memory) as dashboard,
    ):
        gateways = [put_gateway("liar", liar_url), put_gateway("slow", sleeper_url)]
        await memory.commit([], [*gateways, put_gateway("gone", "http://127.0.0.1:9")])
        found = await silent(dashboard, 3)
        assert "its answer cannot be read" in found["liar"]
        assert "does not answer within 3 s" in found["slow"]
        assert "does not answer" in found["gone"]
        states = dashboard.dashboard.traffic.gateways
        assert sum(not state.problem for state in states.values()) == 1


def lies() -> dict[str, tuple[dict[str, Any], str]]:
    """Return what gateways say of one request, and the word by which each is refused; "" if its time is mended."""
    year = timedelta(days=365)
    return {
        "endless": ({"latencyMs": 1e308}, "latencyMs"),
        "backwards": ({"latencyMs": -1e308}, "latencyMs"),
        "huge": ({"tokens": {"output": 10**30}}, "tokens.output"),
        "negative": ({"tokens": {"prompt": -5}}, "tokens.prompt"),
        "zoneless": ({"time": "0001-01-01T00:00:00"}, "time"),
        "wordy": ({"model": "m" * 100_000}, "model"),
        "future": ({"time": (CLOCK.now() + year).isoformat()}, ""),
        "last": ({"time": "9999-12-31T23:59:59Z"}, ""),
    }


async def test_wrong_figures_and_clocks_of_gateways_change_no_figure_of_others(
    memory: MemoryTransport, tmp_path: Path
) -> None:
    """Each of them is valid JSON of the right types."""
    cases = lies()

    async def lie(name: str, request: web.Request) -> web.Response:
        entry = {
            "time": CLOCK.now().isoformat(),
            "id": name,
            "gateway": name,
            "model": "m",
            "status": "ok",
            "latencyMs": 100.0,
            "tokens": {"prompt": 1, "output": 0},
            **cases[name][0],
        }
        told = [] if request.query["after"] else [entry]
        body = {"gateway": name, "cursor": "1", "isComplete": True, "requests": told, "running": []}
        return web.json_response(body)

    refused = {name: word for name, (_, word) in cases.items() if word}
    async with (
        serving(FEED, *(partial(lie, name) for name in cases)) as urls,
        running(FakeEngine("m-0", chat)) as engine,
        running_gateway(memory) as gateway,
        running_dashboard(memory, state_dir=tmp_path) as dashboard,
    ):
        await memory.commit([], [put_gateway(*pair) for pair in zip(cases, urls, strict=True)])
        found = await silent(dashboard, len(refused))
        for name, word in refused.items():
            assert word in found[name]
        await World(memory).serve("m", engine)
        await gateway.knows("m", ready=1)
        await send_chats(dashboard.http, gateway, 3)
        mended = len(cases) - len(refused)
        await finished(dashboard, 3 + mended)
        overview = await dashboard.get("/api/dashboard/overview")
        # Those of the future ended when they were read.
        assert overview["requests"]["total24h"] == 3 + mended
        assert overview["latency"]["current"] > 0
        newest = await dashboard.get("/api/dashboard/requests")
        now_ms = CLOCK.now().timestamp() * 1000
        assert all(one["timestamp"] <= now_ms for one in newest)
        async with dashboard.http.get(f"{dashboard.url}/metrics") as response:
            shown = (await response.text()).splitlines()
        assert f"fleet_dashboard_gateways_clock_wrong {mended}" in shown
        await dashboard.until(
            "/api/v1/requests", lambda found: len(found["requests"]) == 3 + mended
        )
        assert (await dashboard.get("/health"))["history"]["status"] == "ok"


def test_times_are_those_of_the_own_clock() -> None:
    now_s = CLOCK.now().timestamp()

    def at(end_s: float) -> EndedRequest:
        one = ended(1)
        began = datetime.fromtimestamp(end_s - one.whole_s, tz=UTC)
        return msgspec.structs.replace(one, time=began)

    right = [at(now_s - 29), at(now_s - 1), at(now_s + 1)]
    assert on_own_clock(right, now_s - 1, now_s) == (right, False)
    wrong = [at(now_s + 3600), at(now_s - 3600), at(now_s)]
    requests, is_wrong = on_own_clock(wrong, now_s - 1, now_s)
    assert is_wrong
    assert [round(request.time_s + request.whole_s - now_s) for request in requests] == [0, 0, 0]
    # After an hour in which nothing was read, what is an hour old is right.
    assert on_own_clock(wrong[1:], now_s - 3600, now_s) == (wrong[1:], False)


def test_requests_in_flight_at_a_gateway_that_dies_are_counted_once() -> None:
    request = RunningRequest(id="r", model="qwen", phase="generating", seconds=1.0)
    traffic = Traffic()
    for id_ in ("killed", "stopped"):
        feed = GatewayFeed(
            gateway=id_, cursor="1", is_complete=True, requests=[], running=[request], active=1
        )
        traffic.record_feed(id_, feed, 0.0)
    assert traffic.active(1.0) == 2
    traffic.record_silence("killed", "connection refused")
    # Nobody knows what it has in flight now.
    assert traffic.active(1.0) == 1
    traffic.forget_gateways((), 1_000.0)
    assert traffic.broken(1_000.0) == 1
    assert traffic.broken(1_000.0 + DAY_S) == 0
