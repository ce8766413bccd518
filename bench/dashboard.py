"""The page of the dashboard at 1,000 Macs that change each second, in a real browser: `make bench-dashboard`.

A real etcd, the dashboard in this process, Chromium without a window. Measured are the first paint, the first screen
with its data (again with a processor four times slower and 10 Mbit/s), the bytes of both, the time of the main thread,
long tasks, the heap and its growth, the bytes of the stream, the processor time of one more viewer, and the time from a write to the
store until the page shows it. The first paint is also compared with that of a static table of as many rows in the same
run, which takes the machine's own speed out. The last line is one JSON object, the aims beside the figures.
"""

import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from playwright.async_api import Browser, CDPSession, Page

from bench.harness import finish, sized
from schemas.meta import Condition, ConditionStatus
from store.errors import UnavailableError
from store.etcd.connect import connect
from store.port import Transport
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
    "paint_over_static_ms": 200,
    "table_ms": 1500,
    "kilobytes": 100,
    "main_thread_ms_per_s": 60,
    "longest_task_ms": 100,
    "heap_growth_mb": 3,
    "heap_mb": 60,
    "stream_kb_per_s": 40,
    "change_p95_ms": 200,
    "slow_paint_ms": 1000,
    "slow_table_ms": 1500,
    "viewer_cpu_ms_per_s": 10,
}
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
_FIRST_PAINT: Final = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
_CELLS: Final = f"<tr>{'<td>Apple M4 Max, 48 GiB</td>' * 9}</tr>"
_STATIC: Final = f"<!doctype html><title>static</title><table>{_CELLS * MACS}</table>"
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
    paint = await page.evaluate(_FIRST_PAINT)
    sizes = (
        "[...performance.getEntriesByType('resource'), ...performance.getEntriesByType('navigation')]"
        ".reduce((s, e) => s + e.transferSize, 0)"
    )
    size = await page.evaluate(sizes)
    size += await stream_bytes(dashboard) - sent_before
    # The same rows as plain HTML, without a script or a style sheet.
    await page.route(
        "**/static", lambda route: route.fulfill(body=_STATIC, content_type="text/html")
    )
    await page.goto(f"{dashboard.url}/static")
    over_static = paint - await page.evaluate(_FIRST_PAINT)
    await context.close()
    if is_slow:
        return {"slow_paint_ms": paint, "slow_table_ms": table_ms}
    return {
        "paint_ms": paint,
        "paint_over_static_ms": over_static,
        "table_ms": table_ms,
        "kilobytes": size / 1000,
    }


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
    await session.send("HeapProfiler.collectGarbage")
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
        "heap_growth_mb": (heap - before["JSHeapUsedSize"]) / 1e6,
        "stream_kb_per_s": stream / MEASURE_S / 1000,
    }


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
        await page.get_by_text(f"{chip},").first.wait_for()
        found.append(1000 * (time.monotonic() - began))
    return statistics.quantiles(found, n=20)[-1]


async def measure_viewers(dashboard: RunningDashboard) -> float:
    """Return what one more stream costs this process, its reading here included, while every Mac changes each second."""
    host, _, port = dashboard.url.removeprefix("http://").partition(":")

    async def view(number: int) -> None:  # each as another client: one has three streams at most
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"GET /api/v1/stream?{_TABLE} HTTP/1.1\r\nhost: localhost\r\naccept-encoding: gzip\r\n"
        )
        writer.write(f"{head}cookie: viewer={number}\r\n\r\n".encode())
        try:
            while await reader.read(1 << 16):
                pass
        finally:
            writer.close()

    idle = await cpu_ms_per_s()
    viewers = [asyncio.create_task(view(number)) for number in range(VIEWERS)]
    await asyncio.sleep(2)
    busy = await cpu_ms_per_s()
    for viewer in viewers:
        viewer.cancel()
    return (busy - idle) / VIEWERS


async def cpu_ms_per_s() -> float:
    """Return the CPU time of this process for a second."""
    before = time.process_time()
    await asyncio.sleep(VIEWERS_S)
    return 1000 * (time.process_time() - before) / VIEWERS_S


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
                    found |= await measure_page(browser, dashboard, "/macs?tab=picture")
                    table = await measure_page(browser, dashboard, "/macs")
                    found |= {f"table_{key}": value for key, value in table.items()}
                    found["viewer_cpu_ms_per_s"] = await measure_viewers(dashboard)
                    changes.cancel()
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
