"""Requests in flight in a real browser, with a real engine: progress, cancellation, and the candidates in the chat."""

import asyncio
import contextlib
import re
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from playwright.async_api import Browser, expect
from playwright.async_api import Error as PlaywrightError

from gateway.limits import GatewayLimits
from machinery.process_log import LogRing
from store.memory import MemoryTransport
from tests.support.browser import check_access, needs_browser, open_page
from tests.support.dashboards import CLOCK, running_dashboard
from tests.support.gateway_calls import CHAT
from tests.support.gateway_real_engine import tiny_engine
from tests.support.gateway_world import World, decisions_in, deployment, endpoint, running_gateway

pytestmark = [needs_browser, pytest.mark.browser, pytest.mark.mlx, pytest.mark.timeout(240)]


async def ask_until_cancelled(http: aiohttp.ClientSession, url: str) -> None:
    """Send long requests of one id, one after the other: the page may be slower than an answer."""
    message = {"role": "user", "content": "We hold these truths"}
    body = {"model": "tiny", "messages": [message], "max_tokens": 3500, "stream": True}
    while True:
        async with http.post(url + CHAT, json=body, headers={"x-request-id": "live-1"}) as response:
            if b"request_cancelled" in await response.read():
                return


@pytest.mark.ci
async def test_a_request_is_followed_and_cancelled_and_its_routing_explained(
    browser: Browser, tmp_path: Path
) -> None:
    world = World(MemoryTransport(CLOCK))
    with tiny_engine(tmp_path) as engine, decisions_in(ring := LogRing()):
        await world.put(deployment("tiny"))
        await world.put(endpoint("tiny-0", "tiny", f"http://127.0.0.1:{engine.port}", node="mac-1"))
        async with (
            running_gateway(
                world.transport, GatewayLimits(drain_timeout_s=0.0, ring=ring)
            ) as gateway,
            running_dashboard(world.transport) as dashboard,
            aiohttp.ClientSession() as http,
            open_page(browser, dashboard.url) as (page, _),
        ):
            await gateway.knows("tiny", ready=1)
            await page.goto("/chat?model=tiny")
            await page.get_by_role("button", name="Routing").click()
            row = page.locator("tr", has_text="tiny-0")
            await expect(row.get_by_role("link", name="mac-1")).to_be_visible()
            await expect(page.get_by_role("columnheader", name="queue")).to_be_visible()
            await check_access(page)
            await page.goto("/requests")
            await expect(page.locator("h1")).to_have_text("Requests")
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            cancel = page.get_by_role("button", name="Cancel live-1")
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(ask_until_cancelled(http, gateway.url))
                await expect(page.locator("tr", has_text="live-1").first).to_contain_text("tiny")
                # What its engine tells, too: the number of tokens, in the fifth column.
                tokens = page.locator("tr", has_text="live-1").first.locator("td").nth(4)
                await expect(tokens).to_have_text(re.compile(r"\d+"))
                while not asking.done():
                    with contextlib.suppress(PlaywrightError):  # it may end at any moment
                        await cancel.click(timeout=5_000)
            await expect(cancel).to_have_count(0)
            await page.get_by_role("link", name="Ended").click()
            rows = page.locator("[data-ended] tbody tr")
            await expect(rows.first).to_contain_text("live-1")
            # All of it came on the stream: the page has asked for nothing but the cancellation.
            assert {urlsplit(one).path.rpartition("/")[2] for one in asked} <= {"cancel"}
            await rows.first.get_by_role("button").click()
            await page.get_by_role("button", name="Show scores").click()
            choice = page.locator("[data-scores] section").first
            await expect(choice).to_contain_text("endpoint chosen: tiny-0 on mac-1")
            await expect(choice.get_by_role("columnheader", name="queue")).to_be_visible()
            await expect(choice.locator("tbody tr")).to_contain_text("chosen")
            await check_access(page)
            await page.get_by_role("button", name="Close").click()
            await page.get_by_label("Model").fill("none")
            await expect(rows).to_have_count(0)
            refused = await dashboard.post("/api/v1/requests/none/live-1/cancel", {}, 404)
            assert "There is no gateway 'none'" in refused["error"]["message"]
            refused = await dashboard.get("/api/v1/explain/route?model=none", 404)
            assert "'none'" in refused["error"]["message"]
