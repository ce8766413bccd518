"""The end of an engine's log on the page of its model, from the API of a real agent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from machinery.http_server import AdminServer
from machinery.process_log import LogRing
from nodeagent.api.machine_metrics import AgentView
from nodeagent.api.server import make_app
from nodeagent.engines import engine_logs
from schemas.replica import Replica
from store import codec, keys, objects
from store.memory import MemoryTransport
from store.tickets import TicketChecker
from tests.support.agent_api import STATUS, Replicas
from tests.support.browser import check_access, needs_browser, open_page
from tests.support.dashboards import CLOCK, running_dashboard
from tests.support.fleetctl_manifests import put_replica
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.world import deployment

pytestmark = [needs_browser, pytest.mark.browser]


@asynccontextmanager
async def running_agent(store: MemoryTransport, folder: Path) -> AsyncIterator[str]:
    """Serve the API of mac-1's agent, which has the replica qwen-0; yields its address."""
    replica = await objects.get(store, Replica, "qwen-0")
    assert replica is not None
    view = AgentView(
        name="mac-1", status=STATUS, clock=CLOCK, started_at=CLOCK.monotonic(), engines={},
        replicas=Replicas({keys.spec_key("Replica", "qwen-0"): replica}),
        has_lease=lambda: True, folder=folder, ring=LogRing(),
    )  # fmt: skip
    changed = asyncio.Event()
    app = make_app(view, TicketChecker(store, CLOCK, "Node/mac-1"))
    door = AdminServer(app, CLOCK, ("127.0.0.1", 0), changed.set)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(door.run())
        await changed.wait()
        yield door.url
        running.cancel()


async def test_the_last_lines_of_a_replica_are_shown_and_followed(
    browser: Browser, tmp_path: Path
) -> None:
    store = MemoryTransport(CLOCK)
    model = deployment(replicas=2)
    puts = [put_replica(model, number, "mac-1") for number in (0, 1)]
    await store.commit([], [codec.put_spec(model), *puts])
    folder = tmp_path / "qwen-0"
    folder.mkdir()
    log = engine_logs.new_run(folder)
    log.write_text("".join(f'{{"level":"info","message":"line {n}"}}\n' for n in range(100)))
    async with running_agent(store, tmp_path) as url:
        status = node_status("mac-1").model_copy(update={"agent_url": url})
        await store.commit([], [put_node("mac-1", status), put_lease("mac-1")])
        async with (
            running_dashboard(store) as dashboard,
            open_page(browser, dashboard.url) as (page, _),
        ):
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            await page.goto("/models/qwen")
            summary = page.get_by_text("Log of a replica")
            await expect(summary).to_be_visible()
            # It would hold one of the browser's six connections.
            assert not any("/api/v1/logs" in one for one in asked)
            await summary.click()
            lines = page.locator(".log .line")
            await expect(lines).to_have_count(20)
            await expect(lines.last).to_contain_text("line 99")
            with log.open("a") as out:
                out.write('{"level":"error","message":"out of memory"}\n')
            await expect(lines.last).to_contain_text("out of memory")
            await expect(lines).to_have_count(20)
            await check_access(page)
            # The other replica has written nothing: the page says so.
            await page.locator("details[open] .toolbar select").select_option("qwen-1")
            await expect(page.locator("details[open] .problem")).to_contain_text("qwen-1")
            await expect(lines).to_have_count(0)
