"""The history of a recorder that stood still, was killed or has no disk, and of a killed gateway: real processes."""

import asyncio
import math
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from store.etcd.connect import connect
from tests.support.dashboards import DashboardProcess, dashboard_process
from tests.support.etcd import running_etcd
from tests.support.gateway_calls import CHAT
from tests.support.gateway_engine_scripts import DONE, delta
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_world import World
from tests.support.ports import free_port
from tests.support.waiting import until_async

pytestmark = [pytest.mark.etcd, pytest.mark.ci]
SERIES = "/api/v1/series?subject=fleet&from=10m&step=10s&metric="


@dataclass(slots=True)
class GatewayProcess:
    """The process `fleet-gateway`, which a test kills and starts again at the same port."""

    words: tuple[str, ...]
    url: str
    http: aiohttp.ClientSession
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, and wait for its model."""
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", *self.words), stderr=subprocess.DEVNULL
        )

        async def serves() -> bool:
            try:
                async with self.http.get(f"{self.url}/v1/models") as response:
                    found = (await response.json()).get("data", ())
                    return [one["id"] for one in found] == ["m"]
            except aiohttp.ClientError:
                return False

        await until_async(serves, limit_s=60, what="the gateway")

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def chats(self, count: int) -> None:
        """Send so many streams, eight at a time."""
        left = iter(range(count))

        async def some() -> None:
            for _ in left:
                body = {"model": "m", "messages": [], "stream": True}
                async with self.http.post(self.url + CHAT, json=body) as response:
                    assert response.status == 200
                    await response.read()

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(some())


@dataclass(frozen=True, slots=True)
class Scene:
    """A gateway that serves, and a recorder that is not started yet."""

    gateway: GatewayProcess
    recorder: DashboardProcess

    async def total(self) -> int:
        overview = await self.recorder.get("/api/dashboard/overview")
        return int(overview["requests"]["total24h"])

    async def counted(self, count: int) -> None:
        await self.recorder.until(
            "/api/dashboard/overview", lambda found: found["requests"]["total24h"] >= count
        )
        assert await self.total() == count

    async def recorded(self, count: int) -> list[dict[str, Any]]:
        """Wait until so many requests are in the file; return them."""
        path = "/api/v1/requests?limit=1000"
        await self.recorder.until(path, lambda found: len(found["requests"]) >= count)
        found: list[dict[str, Any]] = (await self.recorder.get(path))["requests"]
        assert len(found) == len({one["id"] for one in found}) == count
        return found

    async def history(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.recorder.get("/health"))["history"]
        return found


async def stream(call: Call) -> None:
    """Stream two tokens; some prompts take longer than others."""
    await call.begin_stream()
    # The time to a first token, so that percentiles differ from each other.
    await asyncio.sleep(0.003 * (len(call.engine.calls) % 7))
    for word in ("one", " two"):
        await call.chunk(delta(word))
    await call.chunk(DONE)
    await call.send(b"0\r\n\r\n")


@asynccontextmanager
async def scene(folder: Path, *flags: str) -> AsyncIterator[Scene]:
    async with (
        running_etcd(folder / "etcd") as etcd,
        running(FakeEngine("m-0", stream)) as engine,
        dashboard_process(str(etcd.address), folder / "recorder") as recorder,
    ):
        store = connect(etcd.address)
        await World(store).serve("m", engine)
        await store.close()
        port = free_port()
        words = ("--port", str(port), "--etcd", str(etcd.address), *flags)
        state = ("--state-dir", str(folder / "gateway"))
        url = f"http://127.0.0.1:{port}"
        gateway = GatewayProcess((*words, *state), url, recorder.http)
        try:
            await gateway.start()
            yield Scene(gateway, recorder)
        finally:
            await gateway.kill()


async def test_a_recorder_that_stood_still_reads_on(tmp_path: Path) -> None:
    """A gateway remembers 1,500 here; an answer has a thousand."""
    async with scene(tmp_path, "--journal-size", "1500") as it:
        gateway, recorder = it.gateway, it.recorder
        await recorder.start()

        async def is_known() -> bool:
            return (tmp_path / "recorder").exists() and not await recorder.metric(
                "fleet_dashboard_gateways_silent"
            )

        await until_async(is_known)
        await gateway.chats(1)
        await it.counted(1)
        recorder.send(signal.SIGSTOP)
        await gateway.chats(1200)
        recorder.send(signal.SIGCONT)
        await it.counted(1201)
        assert await recorder.metric("fleet_dashboard_feed_gaps_total") == 0
        recorder.send(signal.SIGSTOP)
        await gateway.chats(1700)
        recorder.send(signal.SIGCONT)
        # It has all that the gateway still has, and knows the number of the others.
        await it.counted(1201 + 1500)
        assert await recorder.metric("fleet_dashboard_feed_requests_total") == 1201 + 1500
        assert await recorder.metric("fleet_dashboard_feed_gaps_total") == 1
        assert await recorder.metric("fleet_dashboard_feed_lost_total") == 200


def exact_quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(len(values) * share) - 1]


async def check_figures(it: Scene, rows: Sequence[dict[str, Any]]) -> None:
    """Check rates, means and percentiles over time against the requests themselves."""
    names = ("requests_per_second", "latency_mean", "first_token_p95", "error_ratio")

    def have_all(found: Any) -> Any:
        rates = found["metrics"]["requests_per_second"]["mean"]
        return found if abs(sum(rate * 10 for rate in rates if rate) - len(rows)) < 0.01 else None

    # Requests count for the step in which they ended, which is known once it was sampled.
    found = await it.recorder.until(SERIES + ",".join(names), have_all)
    rates, means, firsts, errors = (found["metrics"][name]["mean"] for name in names)
    counts = [round((rate or 0.0) * 10) for rate in rates]
    mean_ms = sum(m * n for m, n in zip(means, counts, strict=True) if n) / len(rows)
    assert mean_ms == pytest.approx(sum(row["latencyMs"] for row in rows) / len(rows), rel=1e-3)
    assert not any(errors[place] for place, count in enumerate(counts) if count)
    # A step that had no requests has no latency, rather than zero.
    assert all(means[place] is None for place, count in enumerate(counts) if not count)
    exact = exact_quantile([row["firstTokenMs"] for row in rows], 0.95)
    # Bounds of the histogram of first tokens, in milliseconds.
    bounds = (1, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750, 1000, 2500, 5000, 7500, 10_000)
    ends = next((a, b) for a, b in zip((0, *bounds), bounds, strict=False) if a < exact <= b)
    assert max(first for first in firsts if first is not None) >= ends[0]
    assert min(first for first in firsts if first is not None) <= ends[1]


async def test_a_gateways_kill_9_makes_no_figure_wrong(tmp_path: Path) -> None:
    """Requests that ended before the kill, and that no recorder had read, are read from its successor."""
    async with scene(tmp_path) as it:
        gateway, recorder = it.gateway, it.recorder
        await recorder.start()
        await gateway.chats(20)
        await it.counted(20)
        recorder.send(signal.SIGSTOP)
        await gateway.chats(7)
        saved = tmp_path / "gateway" / "requests.jsonl"

        async def are_saved() -> bool:
            return saved.read_bytes().count(b"\n") == 27

        await until_async(are_saved, what="the journal on disk")
        await gateway.kill()
        recorder.send(signal.SIGCONT)
        await recorder.until("/queue", itemgetter("gatewaysSilent"))
        assert await it.total() == 20
        await gateway.start()
        await gateway.chats(5)
        await it.counted(32)
        rows = await it.recorded(32)
        assert {row["status"] for row in rows} == {"ok"}
        assert await recorder.metric("fleet_dashboard_feed_gaps_total") == 0
        await check_figures(it, rows)
        # Twice, and with the recorder killed as well.
        await recorder.end(signal.SIGKILL)
        await gateway.kill()
        await gateway.start()
        await gateway.chats(3)
        await recorder.start()
        await it.counted(35)
        await check_figures(it, await it.recorded(35))
        workers = await recorder.get("/api/dashboard/workers")
        assert [worker["metrics"]["totalRequests"] for worker in workers] in ([35], [])


@dataclass(frozen=True, slots=True)
class WallClock:
    """The wall clock of a recorder: seconds by which it is ahead, in a file."""

    file: Path

    def set(self, ahead_s: float) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(str(ahead_s))
        new.rename(self.file)


async def known_points(it: Scene) -> int:
    """Return how many of the points of the last hour are known."""
    path = "/api/dashboard/metrics/timeseries?metric=rps&duration=1h"
    points = (await it.recorder.get(path))["points"]
    return sum(point["value"] is not None for point in points)


async def test_a_clock_that_jumps_makes_no_figure_wrong(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        gateway, recorder, clock = it.gateway, it.recorder, WallClock(tmp_path / "ahead")
        recorder.program = ("-m", "tests.support.jumping_dashboard", str(clock.file))

        async def jump(ahead_s: float, times: int) -> None:
            clock.set(ahead_s)

            async def is_noticed() -> bool:
                return await recorder.metric("fleet_dashboard_clock_jumps_total") == times

            await until_async(is_noticed, what="the jump")

        clock.set(0)
        await recorder.start()
        await gateway.chats(10)
        await it.counted(10)
        await check_figures(it, await it.recorded(10))
        # More than a day ahead: all of that is older than a day, and the day between is unknown.
        await jump(26 * 3600, 1)
        assert await it.total() == 0
        await gateway.chats(5)
        await it.counted(5)
        assert await recorder.metric("fleet_dashboard_gateways_clock_wrong") == 1
        assert await known_points(it) < 30
        # Right again: the day is there, and what was counted in the future is not.
        await jump(0, 2)
        await it.counted(10)
        await gateway.chats(4)
        await it.counted(14)
        # A point is shown once its step is over.
        assert await until_async(lambda: known_points(it)) < 30
        await check_figures(it, await it.recorded(14))
        # Behind, as without a battery: figures go on, none is of a time that has not come.
        await jump(-3 * 3600, 3)
        await it.counted(0)
        await gateway.chats(3)
        await it.counted(3)
        assert await until_async(lambda: known_points(it)) < 30
        await it.recorded(3)
        await jump(0, 4)
        await it.counted(17)
        uptime_s = (await recorder.get("/metrics/snapshot"))["uptimeSeconds"]
        assert 0 < uptime_s < 3000
        assert (await recorder.get("/health"))["history"]["status"] == "ok"
        # A recorder that starts then has the same.
        await recorder.end(signal.SIGKILL)
        await recorder.start()
        await it.counted(17)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of running processes are Linux's")
async def test_a_full_disk_costs_history_and_nothing_else(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        gateway, recorder = it.gateway, it.recorder
        await recorder.start()
        await gateway.chats(1)
        await it.recorded(1)
        recorder.limit_files(1024)
        await gateway.chats(4)
        await recorder.until(
            "/health", lambda found: found["history"]["status"].startswith("not written: ")
        )
        assert await recorder.metric("fleet_dashboard_history_written") == 0
        # What is in memory is shown as ever.
        assert len(await recorder.get("/api/dashboard/requests")) == 5
        recorder.limit_files()
        await it.recorded(5)
        history = await it.history()
        assert (history["status"], history["lost"]) == ("ok", 0)


async def test_a_damaged_file_is_set_aside_and_a_new_one_begins(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        folder = tmp_path / "recorder"
        folder.mkdir(mode=0o700)
        (folder / "history.db").write_bytes(b"\0damaged" * 4096)
        await it.recorder.start()
        await it.gateway.chats(2)
        await it.recorded(2)
        assert (folder / "history.db.damaged").exists()
        history = await it.history()
        assert (history["status"], history["damaged"]) == ("ok", 1)
