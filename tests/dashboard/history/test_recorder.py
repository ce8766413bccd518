"""The history of a real process with real gateways: kill -9, a full disk, a damaged file."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from store.etcd.connect import connect
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Transport
from tests.support.dashboards import DashboardProcess, dashboard_process
from tests.support.etcd import running_etcd
from tests.support.gateway_calls import send_chats
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import Running, World, running_gateway
from tests.support.waiting import until_async

pytestmark = pytest.mark.etcd


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """etcd, a gateway with an engine, and a dashboard that is not started yet."""

    dashboard: DashboardProcess
    gateway: Running
    store: Transport
    etcd: EmbeddedEtcd
    folder: Path

    async def chats(self, count: int) -> None:
        await send_chats(self.dashboard.http, self.gateway, count)

    async def recorded(self, count: int) -> list[dict[str, Any]]:
        """Wait until so many requests are in the file; return them."""
        found: list[dict[str, Any]] = []

        async def are_there() -> bool:
            nonlocal found
            found = (await self.dashboard.get("/api/v1/requests"))["requests"]
            return len(found) == count

        await until_async(are_there, limit_s=60, what=f"{count} requests in the history")
        return found

    async def history(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.dashboard.get("/health"))["history"]
        return found


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    async with running_etcd(folder / "etcd") as etcd:
        transport = connect(etcd.address)
        try:
            async with (
                running(FakeEngine("m-0", chat)) as engine,
                running_gateway(transport) as gateway,
                dashboard_process(str(etcd.address), folder / "state") as dashboard,
            ):
                await World(transport).serve("m", engine)
                await gateway.knows("m", ready=1)
                yield Scene(
                    dashboard=dashboard,
                    gateway=gateway,
                    store=transport,
                    etcd=etcd,
                    folder=folder / "state",
                )
        finally:
            await transport.close()


@pytest.mark.ci
async def test_kill_9_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        await it.dashboard.start()
        await it.chats(5)
        before = await it.recorded(5)
        await it.dashboard.end(signal.SIGKILL)
        await it.chats(3)
        await it.dashboard.start()
        after = await it.recorded(8)
        assert {one["id"] for one in before} < {one["id"] for one in after}
        assert len({one["id"] for one in after}) == 8
        overview = await it.dashboard.get("/api/dashboard/overview")
        assert overview["requests"]["total24h"] == 8
        assert len(await it.dashboard.get("/api/dashboard/requests")) == 8
        workers = {one["node"] for one in after if "node" in one} or {
            one["worker"] for one in after
        }
        assert workers == {after[0]["worker"]}

        async def all_are_counted() -> bool:
            path = "/api/v1/series?subject=fleet&metric=requests_per_second,latency_p95&from=10m&step=10s"
            found = await it.dashboard.get(path)
            rates: list[float | None] = found["metrics"]["requests_per_second"]["mean"]
            return abs(sum(rate * 10 for rate in rates if rate) - 8) < 0.01

        # Requests count for the step in which they ended, which is known once it was sampled.
        await until_async(all_are_counted, limit_s=60, what="the rate of eight requests")
        assert await it.dashboard.end(signal.SIGTERM) == 0


@pytest.mark.ci
async def test_a_killed_etcd_costs_no_request_and_counts_none_twice(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:

        async def total() -> int:
            overview = await it.dashboard.get("/api/dashboard/overview")
            return int(overview["requests"]["total24h"])

        await it.dashboard.start()
        await it.chats(2)
        await it.recorded(2)
        pid = it.etcd.supervisor.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await it.etcd.supervisor.stop()
        await it.chats(3)
        await it.recorded(5)
        assert await total() == 5
        await it.etcd.start()
        await it.chats(1)
        await it.recorded(6)
        assert await total() == 6


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="limits of running processes are Linux's")
async def test_a_full_disk_costs_history_and_nothing_else(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        await it.dashboard.start()
        await it.chats(1)
        await it.recorded(1)
        it.dashboard.limit_files(1024)
        await it.chats(4)

        async def is_reported() -> bool:
            return str((await it.history())["status"]).startswith("not written: ")

        await until_async(is_reported, limit_s=60, what="a report of the full disk")
        async with it.dashboard.http.get(f"{it.dashboard.url}/metrics") as response:
            assert "fleet_dashboard_history_written 0" in await response.text()
        # What is in memory is shown as ever.
        assert len(await it.dashboard.get("/api/dashboard/requests")) == 5
        it.dashboard.limit_files()
        await it.recorded(5)
        assert (await it.history())["status"] == "ok"
        assert (await it.history())["lost"] == 0


@pytest.mark.ci
async def test_a_damaged_file_is_set_aside_and_a_new_one_begins(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        it.folder.mkdir(mode=0o700)
        (it.folder / "history.db").write_bytes(b"\0damaged" * 4096)
        await it.dashboard.start()
        await it.chats(2)
        await it.recorded(2)
        assert (it.folder / "history.db.damaged").exists()
        found = await it.history()
        assert (found["status"], found["damaged"]) == ("ok", 1)


@pytest.mark.ci
async def test_wrong_queries_are_refused_with_what_is_right(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        await it.dashboard.start()
        for path, words in (
            ("series?subject=mac-1&metric=cpu_ratio", "is not fleet, node/NAME or model/NAME"),
            ("series?subject=node/a&metric=cpu", "it has cpu_ratio,"),
            ("series?subject=fleet", "Name 1 to 20 metrics"),
            ("series?metric=active&from=yesterday", "is no time: write `now`"),
            ("series?metric=active&from=1h&to=2h", "must be before 'to'"),
            ("series?metric=active&from=600h&step=1m", "use a longer step"),
            ("requests?status=good", "No request ends as 'good'"),
        ):
            refusal = await it.dashboard.get(f"/api/v1/{path}", status=400)
            assert words in refusal["error"]["message"]


@pytest.mark.ci
async def test_without_a_folder_there_is_no_history(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        it.dashboard.words = it.dashboard.words[:-2]
        await it.dashboard.start()
        refusal = await it.dashboard.get("/api/v1/series?metric=active", status=404)
        assert "--state-dir" in refusal["error"]["message"]
        assert (await it.history())["status"].startswith("off")
        # The last requests are known all the same, as the page lists them.
        assert await it.dashboard.get("/api/v1/requests") == {"requests": []}
