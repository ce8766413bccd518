"""Explained placements and supposed changes in a real browser."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, expect

from insight.placement import explain_placement, report_text
from reconciler.deployments import snapshot
from store.memory import MemoryTransport
from tests.support.browser import needs_browser, open_page
from tests.support.dashboard_fleets import put_fleet
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard

pytestmark = [needs_browser, pytest.mark.browser]


@pytest.fixture(scope="module")
async def running() -> AsyncIterator[RunningDashboard]:
    store = MemoryTransport(CLOCK)
    await put_fleet(store)
    async with running_dashboard(store) as dashboard:
        yield dashboard


async def test_why_pending_is_two_clicks_from_the_first_screen(
    browser: Browser, running: RunningDashboard
) -> None:
    report = explain_placement(await snapshot.take(running.store, CLOCK), "long")
    assert report is not None
    async with open_page(browser, running.url) as (page, _):
        await page.goto("/")
        item = page.locator("li", has=page.get_by_role("link", name="long", exact=True)).first
        await item.get_by_role("link", name="Why pending?").click()
        await page.get_by_text("As fleetctl prints it").click()
        await expect(page.locator("[data-report]")).to_have_text(report_text(report))
        bar = page.get_by_role("img", name="needs 35 GiB").first
        await expect(bar.locator(".kv")).to_be_visible()
        await expect(bar.locator(".limit")).to_be_attached()
        # A remedy leads to What if, where it is filled in.
        await page.get_by_role("link", name="8-bit KV would fit on mac-1").click()
        await expect(page.get_by_role("slider", name="KV cache")).to_have_value("3")
        await expect(page.locator("[data-answer]")).to_contain_text("placed")
        row = page.locator("tr", has_text="long-0")
        await expect(row.get_by_role("link", name="mac-1")).to_be_visible()


async def test_what_if_answers_as_the_question_changes(
    browser: Browser, running: RunningDashboard
) -> None:
    async with open_page(browser, running.url) as (page, _):
        await page.goto("/whatif?model=long")
        await expect(page.locator("[data-answer]")).to_contain_text("1 left without a place")
        slider = page.get_by_role("slider", name="Concurrency")
        await slider.focus()
        for _ in range(3):
            await page.keyboard.press("ArrowLeft")
        await expect(page.locator("tr", has_text="long-0")).to_contain_text("new")
        await expect(page.locator("[data-answer]")).not_to_contain_text("without a place")
        await page.get_by_label("mac-1", exact=True).check()
        await expect(page.locator("tr", has_text="qwen-0")).to_contain_text("mac-2")
        await page.get_by_text("Apply a manifest").click()
        await page.get_by_label("Manifest", exact=True).fill("kind: Nothing\n")
        await expect(page.get_by_role("alert")).to_contain_text("line 1")
