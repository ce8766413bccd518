"""The cost of a recorder at 1,000 hollow Macs: `make bench-observe`, six minutes on two cores.

A real etcd, a real fleet-dashboard, and one process that answers for the agents of all Macs and for a gateway with
fifty requests a second. The gateway has a full journal at the start, so that the recorder soon keeps as many requests as
it ever does. A twentieth of the Macs reports a changed status every three seconds, so each does once a minute. Measured
are the recorder's CPU time and memory. Then a day of the same fleet is written into a history, and
one Mac's day is read from it. At last a gateway is loaded with a recorder and without (`observe_gateway.py`). The last
line is one JSON object, the aims beside the figures.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import orjson
from aiohttp import web

from bench import observe_gateway
from bench.recorder_process import metric, recorder
from bench.result import finish, recorded, sized
from dashboard.collector import FEED_ENTRIES
from dashboard.history.database import FILE, HistoryFile, HistoryLimits
from dashboard.history.queries import HistoryReader, SeriesQuery
from dashboard.history.records import COARSE_S, COLUMNS, FINE_S, Batch, KeyRevision, Sample
from dashboard.traffic import KEPT, EndedAttempt, EndedRequest, EndedTokens
from machinery.clock import SystemClock
from schemas.meta import Condition, ConditionStatus
from schemas.records import GatewayLease
from store import codec, keys
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Put, Transport
from tests.support.ports import free_port
from tests.support.reconciler_agents import node_status, put_lease, put_node

AIM_CPU, AIM_RSS_MB, AIM_DAY_MB, AIM_READ_MS = 0.15, 150, 150, 100
MACS = sized(1000, smoke=20)
REQUESTS_PER_S = sized(50, smoke=5)
SETTLE_S, MEASURE_S = sized((30.0, 60.0), smoke=(5.0, 8.0))
# At 1,000 requests in half a second, the journal is read in five.
FULL_S = 60.0
CHANGE_EVERY_S, CHANGED_SHARE = 3.0, 20
READS = sized(50, smoke=5)
DAY_S = sized(24 * 3600, smoke=3600)
BEGIN_S = 1_800_000_000
NAMES = [f"mac-{number:04}" for number in range(MACS)]


def agent_metrics(step: int) -> str:
    """Return what an agent shows, of the usual size; every value moves."""
    rows = [
        f"fleet_node_cpu_usage_ratio {random.random():.4f}",
        f"fleet_node_gpu_usage_ratio {random.random():.4f}",
        f"fleet_node_swap_used_bytes {step % 7 * 1_000_000}",
        f'fleet_node_temperature_celsius{{sensor="cpu"}} {40 + random.random() * 30:.2f}',
        f'fleet_node_temperature_celsius{{sensor="gpu"}} {40 + random.random() * 30:.2f}',
        "fleet_node_thermal_level 0",
        f'fleet_node_power_watts{{part="system"}} {20 + random.random() * 60:.2f}',
        f"fleet_agent_memory_total_bytes {64 << 30}",
        f"fleet_agent_memory_available_bytes {int(random.random() * (64 << 30))}",
        *(
            f"fleet_node_{what}_bytes_total {step * 1_000_000}"
            for what in ("network_received", "network_sent", "disk_read", "disk_written")
        ),
    ]
    filler = "".join(
        f'# HELP fleet_agent_rank_{n} One of a rank.\nfleet_agent_rank_{n}{{replica="m-0",rank="0"}} {step}\n'
        for n in range(25)
    )
    return (
        "".join(f"# TYPE {row.split('{')[0].split(' ')[0]} gauge\n{row}\n" for row in rows) + filler
    )


class StandIns:
    """Answers for the agents of all Macs, and for one gateway."""

    def __init__(self) -> None:
        self.scrapes = 0
        self.feeds = 0
        self._numbers = 0
        self._asked_s = time.monotonic()

    async def metrics(self, _request: web.Request) -> web.Response:
        self.scrapes += 1
        return web.Response(text=agent_metrics(self.scrapes))

    async def feed(self, _request: web.Request) -> web.Response:
        now_s = time.monotonic()
        count = int((now_s - self._asked_s) * REQUESTS_PER_S)
        self._asked_s = now_s
        self.feeds += 1
        if self._numbers < KEPT:
            count = FEED_ENTRIES
        found = [ended(self._numbers + number, datetime.now(tz=UTC)) for number in range(count)]
        self._numbers += count
        body = {
            "gateway": "g1",
            "cursor": str(self._numbers),
            "isComplete": True,
            "requests": found,
            "running": [],
        }
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def ended(number: int, at: datetime) -> EndedRequest:
    """Return one request of an ordinary size."""
    mac = NAMES[number % MACS]
    return EndedRequest(
        time=at,
        id=f"req-{number:012}",
        gateway="g1",
        model=f"m-{number % 10}",
        deployment=f"m-{number % 10}",
        outcome="ok",
        latency_ms=900 + number % 700,
        first_token_ms=80 + number % 90,
        tokens=EndedTokens(prompt=400, output=120),
        worker=mac,
        replica=f"m-{number % 10}-0",
        path="/v1/chat/completions",
        http_status=200,
        streamed=True,
        attempts=(EndedAttempt(replica=f"m-{number % 10}-0", worker=mac, outcome="ok", ms=900.0),),
    )


async def serve(stand_ins: StandIns) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/{mac}/metrics", stand_ins.metrics)
    app.router.add_get("/api/dashboard/feed", stand_ins.feed)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", free_port())
    await site.start()
    try:
        yield site.name
    finally:
        await runner.cleanup()


async def write_fleet(store: Transport, url: str) -> None:
    lease = GatewayLease(url=url, version="1")
    puts = [Put(key=keys.named(keys.GATEWAY_LEASE_PREFIX, "g1"), value=codec.encode(lease))]
    for name in NAMES:
        status = node_status(name, memory_gib=64).model_copy(update={"agent_url": f"{url}/{name}"})
        puts += [put_node(name, status), put_lease(name)]
    for start in range(0, len(puts), 100):
        await store.commit([], puts[start : start + 100])


async def keep_changing(store: Transport, url: str) -> None:
    """Write a changed status of a share of the Macs, forever."""
    for turn in range(1 << 30):
        chosen = NAMES[turn % CHANGED_SHARE :: CHANGED_SHARE]
        warm = Condition(
            type="ThermalPressure",
            status=ConditionStatus.TRUE if turn // CHANGED_SHARE % 2 else ConditionStatus.FALSE,
            reason="TooWarm",
            message=f"turn {turn}",
        )
        puts = [
            put_node(
                name,
                node_status(name, memory_gib=64).model_copy(
                    update={"agent_url": f"{url}/{name}", "conditions": (warm,)}
                ),
            )
            for name in chosen
        ]
        for start in range(0, len(puts), 100):
            await store.commit([], puts[start : start + 100])
        await asyncio.sleep(CHANGE_EVERY_S)


async def live(folder: Path) -> dict[str, float]:
    """Measure a recorder of a fleet at work."""
    etcd = EmbeddedEtcd(locate(None), folder / "etcd", SystemClock())
    await etcd.start()
    store, stand_ins = connect(etcd.address), StandIns()
    try:
        async for url in serve(stand_ins):
            await write_fleet(store, url)
            async with (
                recorder(f"unix:{etcd.address.socket}", folder / "state") as (
                    process,
                    recorder_url,
                ),
                asyncio.TaskGroup() as group,
            ):
                changing = group.create_task(keep_changing(store, url))
                await asyncio.sleep(SETTLE_S)
                async with asyncio.timeout(FULL_S):
                    while await metric(recorder_url, "fleet_dashboard_feed_requests_total") < KEPT:
                        await asyncio.sleep(0.5)
                before, began, scrapes = process.cpu_times(), time.perf_counter(), stand_ins.scrapes
                await asyncio.sleep(MEASURE_S)
                after, took_s = process.cpu_times(), time.perf_counter() - began
                changing.cancel()
                cpu_s = after.user + after.system - before.user - before.system
                return {
                    "cpu": round(cpu_s / took_s, 4),
                    "rss_mb": round(process.memory_info().rss / 1e6, 1),
                    "scrapes_per_s": round((stand_ins.scrapes - scrapes) / took_s, 1),
                    "feeds": stand_ins.feeds,
                }
        raise AssertionError("unreachable")
    finally:
        await store.close()
        await etcd.supervisor.stop()


def day_of_samples(file: HistoryFile, tier_s: int, begin_s: int, end_s: int) -> None:
    """Write the samples of all Macs in a tier."""
    width = len(COLUMNS["node"])
    for at_s in range(begin_s, end_s, tier_s):
        values = {name: tuple(random.random() * 100 for _ in range(width)) for name in NAMES}
        fleet = Sample(tier_s=tier_s, at_s=at_s, kind="fleet", values={"": (MACS, 1.0, 0.0, 0.0)})
        nodes = Sample(tier_s=tier_s, at_s=at_s, kind="node", values=values)
        file.write(Batch(at_s=at_s, samples=[fleet, nodes]))


def day_of_objects(file: HistoryFile, begin_s: int, end_s: int) -> int:
    """Write a changed status of each Mac every ten minutes, as a busy fleet reports; return their number."""
    count = 0
    for at_s in range(begin_s, end_s, 600):
        revisions = []
        for name in NAMES:
            status = node_status(name, memory_gib=64)
            status = status.model_copy(update={"disk_free_bytes": random.randrange(1 << 40)})
            key, count = keys.status_key("Node", name), count + 1
            value = codec.encode(status)
            revisions.append(KeyRevision(key=key, at_s=float(at_s), revision=count, value=value))
        file.write(Batch(at_s=at_s, revisions=revisions))
    return count


async def history(folder: Path) -> dict[str, float]:
    """Write a day, and read a Mac's day."""
    folder.mkdir()
    file = HistoryFile(folder, HistoryLimits(kept_s=DAY_S))
    end_s = BEGIN_S + DAY_S
    day_of_samples(file, COARSE_S, BEGIN_S, end_s)
    day_of_samples(file, FINE_S, end_s - min(DAY_S, 3600), end_s)
    series_bytes = file.used_bytes
    objects = day_of_objects(file, BEGIN_S, end_s)
    used = file.used_bytes
    file.close()
    reader = HistoryReader(folder, SystemClock())
    times: list[float] = []
    cpu_times: list[float] = []
    for number in range(READS):
        query = SeriesQuery(
            kind="node",
            name=NAMES[number * 7919 % MACS],
            metrics=COLUMNS["node"][:12],
            begin_s=BEGIN_S,
            end_s=end_s,
            step_s=240,
            tier_s=COARSE_S,
        )
        began, began_cpu = time.perf_counter(), time.process_time()
        found = await reader.series(query)
        times.append((time.perf_counter() - began) * 1000)
        cpu_times.append((time.process_time() - began_cpu) * 1000)
        assert found["cpu_ratio"][0][1] is not None, "the day is not there"
    return {
        "day_mb": round(used / 1e6, 1),
        "series_mb": round(series_bytes / 1e6, 1),
        "objects_mb": round((used - series_bytes) / 1e6, 1),
        "object_changes": objects,
        "file_mb": round((folder / FILE).stat().st_size / 1e6, 1),
        "read_ms_median": round(statistics.median(times), 1),
        "read_ms_worst": round(max(times), 1),
        # What a machine that does other things at the same time does not change.
        "read_cpu_ms_median": round(statistics.median(cpu_times), 1),
    }


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = await live(folder)
        print(f"recorder at {MACS} Macs: {orjson.dumps(running).decode()}", flush=True)
        day = await history(folder / "day")
        print(f"a day of {MACS} Macs: {orjson.dumps(day).decode()}", flush=True)
    failed: dict[str, str] = {}
    beside: dict[str, Any] = {}
    with recorded(failed, "gateway"):
        beside = await observe_gateway.measure()
        print(f"a gateway with and without it: {orjson.dumps(beside).decode()}", flush=True)
        ratio, share = beside["gateway_cpu_ratio"], beside["gateway_feed_share"]
        print(f"CPU time of a request with a recorder over without: {ratio}")
        aim = observe_gateway.AIM_SHARE
        print(f"share of the gateway's core for its recorder: {share} (aim: at most {aim})")
    compared = {
        "gateway_feed_share": beside.get("gateway_feed_share"),
        "gateway_cpu_ratio": beside.get("gateway_cpu_ratio"),
        "gateway_rate_ratio": beside.get("gateway_rate_ratio"),
        "cpu_of_aim": round(running["cpu"] / AIM_CPU, 3),
        "rss_of_aim": round(running["rss_mb"] / AIM_RSS_MB, 3),
        "day_of_aim": round(day["day_mb"] / AIM_DAY_MB, 3),
        "read_of_aim": round(day["read_ms_median"] / AIM_READ_MS, 3),
    }
    figures = {**running, **day, **{n: v for n, v in beside.items() if n not in compared}}
    finish("observe", compared, {"macs": MACS, **figures}, failed=failed)


if __name__ == "__main__":
    asyncio.run(main())
