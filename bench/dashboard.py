"""The page of the dashboard at 1,000 Macs that change each second, in a real browser: `make bench-dashboard`.

A real etcd, the dashboard in this process, Chromium without a window. Measured are the first paint, the first screen
with its data (again with a processor four times slower and 10 Mbit/s), the bytes of both, the time of the main thread,
long tasks, the heap (also after the updates of eight hours, played as fast as the page takes them), the bytes of the stream, the processor time of one more viewer, and the time from a write to the
store until the page shows it. The last line is one JSON object, the aims beside the figures.
"""

import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from playwright.async_api import Browser, CDPSession, Page

from bench.harness import finish, sized
from dashboard.api import event_stream
from dashboard.fleet_model import FIGURES, TRAFFIC
from machinery.clock import SystemClock
from schemas.event import Event, EventSpec, ObjectReference
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from store import codec, keys
from store.errors import UnavailableError
from store.etcd.connect import connect
from store.memory import MemoryTransport
from store.port import Put, Transport
from tests.support.browser import PROGRAM, running_browser
from tests.support.dashboards import RunningDashboard, running_dashboard
from tests.support.etcd import running_etcd
from tests.support.reconciler_agents import node_status, put_lease, put_node

MACS: Final = sized(1000, smoke=30)
MEASURE_S: Final = sized(30.0, smoke=4.0)
LOADS: Final = sized(5, smoke=2)
WRITES: Final = sized(40, smoke=5)
AIMS: Final = {
    "paint_ms": 1000,
    "table_ms": 1500,
    "kilobytes": 100,
    "main_thread_ms_per_s": 60,
    "longest_task_ms": 100,
    "longest_task_cpu_ms": 100,
    "day_heap_growth_mb": 3,
    "day_updates": None,
    "heap_mb": 60,
    "stream_kb_per_s": 40,
    "change_p95_ms": 200,
    "slow_paint_ms": 1000,
    "slow_table_ms": 1500,
    "viewer_cpu_ms_per_s": 10,
}
DAY_MACS: Final = 24
DAY_UPDATES: Final = sized(14_400, smoke=300)
"""Figures of eight hours, one every two seconds: as often as the stream sends them to a large fleet's page."""
TRACE_S: Final = sized(10.0, smoke=2.0)
VIEWERS: Final = sized(20, smoke=3)
VIEWERS_S: Final = sized(10.0, smoke=2.0)
_BATCH: Final = 50
_SLOWER: Final = 4
_SLOW_LINK: Final = {
    "offline": False,
    "latency": 20,
    "downloadThroughput": 10_000_000 / 8,
    "uploadThroughput": 10_000_000 / 8,
}
"""10 Mbit/s."""
_TABLE: Final = "view=macs:state,isCordoned,isDraining,memoryBytes,allocatableBytes,promisedBytes,reason,chip,models,site"
_SENT: Final = "fleet_dashboard_stream_bytes_total "
_WATCH: Final = """
() => {
  window.longest = 0;
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) window.longest = Math.max(window.longest, entry.duration);
  }).observe({ type: "longtask" });
}
"""


def name_of(number: int) -> str:
    return f"mac-{number:04}"


async def write_macs(store: Transport, turn: int) -> None:
    """Write the status of every Mac, with figures and a condition that change each time."""
    for first in range(0, MACS, _BATCH):
        puts = []
        for number in range(first, min(first + _BATCH, MACS)):
            condition = Condition(
                type="MemoryPressure",
                status=ConditionStatus.FALSE,
                reason="Sufficient",
                message=f"{turn} {random.randrange(100)} % free",
            )
            # No two Macs have the same figures, so that they cannot be told in one word.
            status = node_status(name_of(number), memory_gib=48 + random.randrange(1 << 14) / 1024)
            status = status.model_copy(update={"conditions": (condition,)})
            puts.append(put_node(name_of(number), status))
        await store.commit([], puts)


async def change_each_second(store: Transport) -> None:
    """Change every Mac once a second, forever."""
    turn = 1
    while True:
        began = time.monotonic()
        with contextlib.suppress(
            UnavailableError
        ):  # a busy machine's etcd may be slow for a moment
            await write_macs(store, turn)
        turn += 1
        await asyncio.sleep(max(0.0, 1 - (time.monotonic() - began)))


async def measure_load(
    browser: Browser, dashboard: RunningDashboard, *, is_slow: bool = False
) -> dict[str, float]:
    """Return times and bytes of a first load, with an empty cache; `is_slow`: a slow processor and a slow link."""
    context = await browser.new_context(viewport={"width": 1280, "height": 800})
    page = await context.new_page()
    if is_slow:
        session = await context.new_cdp_session(page)
        await session.send("Emulation.setCPUThrottlingRate", {"rate": _SLOWER})
        await session.send("Network.enable")
        await session.send("Network.emulateNetworkConditions", _SLOW_LINK)
    sent_before = await stream_bytes(dashboard)
    began = time.monotonic()
    await page.goto(f"{dashboard.url}/macs")
    await page.locator("tbody tr").first.wait_for()
    table_ms = 1000 * (time.monotonic() - began)
    paint = await page.evaluate(
        "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
    )
    sizes = (
        "[...performance.getEntriesByType('resource'), ...performance.getEntriesByType('navigation')]"
        ".reduce((s, e) => s + e.transferSize, 0)"
    )
    size = await page.evaluate(sizes)
    size += await stream_bytes(dashboard) - sent_before
    await context.close()
    if is_slow:
        return {"slow_paint_ms": paint, "slow_table_ms": table_ms}
    return {"paint_ms": paint, "table_ms": table_ms, "kilobytes": size / 1000}


async def metrics(session: CDPSession) -> dict[str, float]:
    found: dict[str, Any] = await session.send("Performance.getMetrics")
    return {one["name"]: one["value"] for one in found["metrics"]}


async def measure_page(
    browser: Browser, dashboard: RunningDashboard, path: str
) -> dict[str, float]:
    """Return what a page costs while every Mac changes each second."""
    url = dashboard.url
    page = await browser.new_page(viewport={"width": 1280, "height": 800})
    await page.goto(f"{url}{path}")
    await page.locator("[data-state=live]").wait_for()
    session = await page.context.new_cdp_session(page)
    # The stream is counted by the server, as it is on the wire; answers to other requests by the browser.
    received = [0.0]
    session.on("Network.dataReceived", lambda one: received.append(one["encodedDataLength"]))
    await session.send("Network.enable")
    await session.send("Performance.enable")
    await page.evaluate(_WATCH)
    await asyncio.sleep(2)
    before, sent_before = await metrics(session), await stream_bytes(dashboard)
    received.clear()
    await asyncio.sleep(MEASURE_S)
    after = await metrics(session)
    stream = sum(received) + await stream_bytes(dashboard) - sent_before
    longest = await page.evaluate("window.longest")
    await session.send("HeapProfiler.collectGarbage")
    heap = (await metrics(session))["JSHeapUsedSize"]
    await page.close()
    return {
        "main_thread_ms_per_s": 1000 * (after["TaskDuration"] - before["TaskDuration"]) / MEASURE_S,
        "longest_task_ms": longest,
        "heap_mb": heap / 1e6,
        "stream_kb_per_s": stream / MEASURE_S / 1000,
    }


async def longest_task_cpu_ms(browser: Browser, url: str) -> float:
    """Return the processor time of the longest task while every Mac changes: a busy machine does not stretch it."""
    page = await browser.new_page(viewport={"width": 1280, "height": 800})
    await page.goto(url)
    await page.locator("[data-state=live]").wait_for()
    await asyncio.sleep(2)
    session = await page.context.new_cdp_session(page)
    found: list[dict[str, Any]] = []
    is_over = asyncio.Event()
    session.on("Tracing.dataCollected", lambda one: found.extend(one["value"]))
    session.on("Tracing.tracingComplete", lambda _: is_over.set())
    categories = {"categories": "disabled-by-default-devtools.timeline,devtools.timeline"}
    await session.send("Tracing.start", {**categories, "transferMode": "ReportEvents"})
    await asyncio.sleep(TRACE_S)
    await session.send("Tracing.end")
    await is_over.wait()
    await page.close()
    calls = [(one["pid"], one["tid"]) for one in found if one["name"] == "FunctionCall"]
    main = max(set(calls), key=calls.count)
    tasks = [one for one in found if one["name"] == "RunTask" and (one["pid"], one["tid"]) == main]
    return max(float(task.get("tdur", 0)) for task in tasks) / 1000


async def heap_bytes(session: CDPSession) -> float:
    """Return the size of the page's heap after a collection."""
    for _ in range(2):
        await session.send("HeapProfiler.collectGarbage")
    return (await metrics(session))["JSHeapUsedSize"]


async def measure_day(browser: Browser) -> dict[str, float]:
    """Return how much the heap of the first screen grows by the updates of eight hours: figures, events, requests."""
    store = MemoryTransport(SystemClock())
    names = [name_of(one) for one in range(DAY_MACS)]
    await store.commit([], [put for name in names for put in (put_node(name), put_lease(name))])
    # What the stream would send in hours comes as fast as the page reads.
    paces = {name: getattr(event_stream, name) for name in ("_PACE_S", "_SLOW_PACE_S")}
    async with running_dashboard(store) as dashboard:
        page = await browser.new_page(viewport={"width": 1280, "height": 800})
        await page.goto(dashboard.url)
        await page.locator("[data-state=live]").wait_for()
        session = await page.context.new_cdp_session(page)
        await session.send("Performance.enable")
        await session.send("Network.enable")
        taken: list[None] = []
        session.on("Network.eventSourceMessageReceived", lambda _: taken.append(None))
        for name in paces:
            setattr(event_stream, name, 0.0)
        try:
            # First, code is compiled and lists are filled.
            turns = await play(dashboard, store, names, lambda: len(taken) >= DAY_UPDATES // 10)
            before, sent = await heap_bytes(session), await stream_bytes(dashboard)
            taken.clear()
            await play(dashboard, store, names, lambda: len(taken) >= DAY_UPDATES, turns)
            after = await heap_bytes(session)
        finally:
            for name, pace in paces.items():
                setattr(event_stream, name, pace)
        sent = await stream_bytes(dashboard) - sent
        await page.close()
    return {
        "day_heap_growth_mb": (after - before) / 1e6,
        "day_updates": len(taken),
        "day_stream_mb": sent / 1e6,
    }


async def play(
    dashboard: RunningDashboard,
    store: Transport,
    names: list[str],
    is_over: Callable[[], bool],
    turn: int = 0,
) -> int:
    """Change figures until it is over, with a Mac's state and an event at times; return the number of turns."""
    model = dashboard.dashboard.model
    while not is_over():
        turn += 1
        figures = {
            name: {"name": name, "watts": random.randrange(100), "active": random.randrange(9)}
            for name in names
        }
        model.replace_rows(FIGURES, figures)
        row = dict(model.rows(TRAFFIC)["fleet"])
        row["active"] = turn
        row["lastGenerationsTokensPerSecond"] = [random.randrange(100) for _ in range(40)]
        model.replace_rows(TRAFFIC, {"fleet": row})
        if turn % 20 == 0:
            await store.commit([], [put_event(turn), put_node(names[turn % len(names)])])
        await asyncio.sleep(0.001)
    return turn


def put_event(number: int) -> Put:
    """Return the write of an event of its own; the oldest of those are dropped by the page."""
    now = SystemClock().now()
    about = ObjectReference(kind="Node", name=name_of(number % DAY_MACS))
    spec = EventSpec(
        about=about, type="Normal", reason="Bench", message=f"event {number}", source="bench",
        first_seen=now, last_seen=now,
    )  # fmt: skip
    event = Event(metadata=ObjectMeta(name=f"e{number}"), spec=spec)
    return Put(key=keys.event_key("bench", f"e{number}"), value=codec.encode_spec(event))


async def stream_bytes(dashboard: RunningDashboard) -> float:
    """Return the bytes that the dashboard has sent on all streams."""
    async with dashboard.http.get(f"{dashboard.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(_SENT))


async def measure_changes(page: Page, store: Transport) -> float:
    """Return the 95th percentile of the time from a write until the page shows it."""
    await page.locator("[data-state=live]").wait_for()
    found: list[float] = []
    for turn in range(WRITES):
        chip = f"Apple M4 {turn}"
        status = node_status(name_of(0), chip=chip)
        began = time.monotonic()
        await store.commit([], [put_node(name_of(0), status)])
        await page.get_by_text(chip, exact=True).first.wait_for()
        found.append(1000 * (time.monotonic() - began))
    return statistics.quantiles(found, n=20)[-1]


async def measure_viewers(dashboard: RunningDashboard) -> float:
    """Return what one more stream costs this process, its reading here included, while every Mac changes each second."""
    idle = await cpu_ms_per_s()
    streams = [await open_stream(dashboard, number) for number in range(VIEWERS)]
    readers = [asyncio.create_task(discard(one)) for one, _ in streams]
    await asyncio.sleep(2)
    busy = await cpu_ms_per_s()
    for reader, (_, writer) in zip(readers, streams, strict=True):
        reader.cancel()
        writer.close()
    return (busy - idle) / VIEWERS


async def cpu_ms_per_s() -> float:
    """Return the CPU time of this process for a second."""
    before = time.process_time()
    await asyncio.sleep(VIEWERS_S)
    return 1000 * (time.process_time() - before) / VIEWERS_S


async def open_stream(
    dashboard: RunningDashboard, number: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open the stream of the table of Macs, each as another client: one has three at most."""
    host, _, port = dashboard.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"GET /api/v1/stream?{_TABLE} HTTP/1.1\r\nhost: localhost\r\naccept-encoding: gzip\r\n"
        f"cookie: viewer={number}\r\n\r\n"
    )
    writer.write(head.encode())
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def discard(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


async def bench() -> dict[str, float]:
    """Return all figures."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_etcd(Path(folder) / "etcd") as etcd:
            store = connect(etcd.address)
            await write_macs(store, 0)
            for first in range(0, MACS, _BATCH):
                last = min(first + _BATCH, MACS)
                await store.commit([], [put_lease(name_of(one)) for one in range(first, last)])
            async with running_dashboard(store) as dashboard, running_browser() as browser:
                url = dashboard.url
                found: dict[str, float] = {}
                for is_slow in (False, True):
                    loads = [
                        await measure_load(browser, dashboard, is_slow=is_slow)
                        for _ in range(LOADS)
                    ]
                    found |= {
                        key: statistics.median(load[key] for load in loads) for key in loads[0]
                    }
                page = await browser.new_page()
                await page.goto(f"{url}/macs")
                found["change_p95_ms"] = await measure_changes(page, store)
                await page.close()
                async with asyncio.TaskGroup() as group:
                    changes = group.create_task(change_each_second(store))
                    found |= await measure_page(browser, dashboard, "/map")
                    table = await measure_page(browser, dashboard, "/macs")
                    found |= {f"table_{key}": value for key, value in table.items()}
                    found["viewer_cpu_ms_per_s"] = await measure_viewers(dashboard)
                    found["longest_task_cpu_ms"] = await longest_task_cpu_ms(browser, f"{url}/macs")
                    changes.cancel()
                found |= await measure_day(browser)
            await store.close()
    return found


def main() -> None:
    """Print the figures beside their aims."""
    if PROGRAM is None:
        print("no browser on PATH: install chromium-headless-shell (Debian) or chromium")
        sys.exit(1)
    found = {key: round(value, 1) for key, value in asyncio.run(bench()).items()}
    compared = {}
    for key, value in found.items():
        aim = AIMS.get(key, AIMS.get(key.removeprefix("table_")))
        compared[key] = {"value": value, "aim": aim}
        print(f"{key:28} {value:10.1f}   aim {aim}")
    finish("dashboard", compared, {"macs": MACS})


if __name__ == "__main__":
    main()
