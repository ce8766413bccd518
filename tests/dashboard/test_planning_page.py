"""Explained placements and tried changes in a real browser."""

import re
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Page, expect

from insight.placement import explain_placement, report_text
from reconciler.deployments import snapshot
from store.memory import MemoryTransport
from tests.support.browser import check_access, needs_browser, open_page
from tests.support.dashboard_fleets import put_fleet
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard

pytestmark = [needs_browser, pytest.mark.browser]
LONG = "/try?kind=ModelDeployment&name=long"


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
        item = page.locator(".chips li", has=page.get_by_role("link", name="long", exact=True))
        await item.get_by_role("link", name="Why pending?").click()
        await page.get_by_text("As fleetctl prints it").click()
        await expect(page.locator("[data-report]")).to_have_text(report_text(report))
        bar = page.get_by_role("img", name="needs 35 GiB").first
        await expect(bar.locator(".kv")).to_be_visible()
        await expect(bar.locator(".limit")).to_be_attached()
        # A remedy leads to the editor, where it is filled in.
        await page.get_by_role("link", name="8-bit KV would fit on mac-1").click()
        await expect(page.get_by_role("slider", name="KV cache")).to_have_value("3")
        await expect(page.get_by_label("Manifest, YAML")).to_have_value(
            re.compile("kvCache:\n    bits: 8")
        )
        step = page.locator("[data-step=long-0]")
        await expect(step.get_by_role("link", name="mac-1")).to_be_visible()
        await check_access(page)


async def test_the_planner_answers_as_the_change_is_made(
    browser: Browser, running: RunningDashboard
) -> None:
    async with open_page(browser, running.url) as (page, _):
        await page.goto(LONG)
        # Only what differs from the defaults is there to edit.
        area = page.get_by_label("Manifest, YAML")
        await expect(area).to_have_value(re.compile("name: long"))
        assert "placement" not in await area.input_value()
        slider = page.get_by_role("slider", name="Concurrency")
        await slider.focus()
        for _ in range(3):
            await page.keyboard.press("ArrowLeft")
        step = page.locator("[data-step=long-0]")
        await expect(step).to_contain_text("new on mac-1")
        # It stands beside the command that does the same, for this dashboard writes nothing.
        await expect(page.get_by_text("started without --allow-writes")).to_be_in_viewport()
        await page.get_by_text("With other Macs").click()
        await page.get_by_label("mac-1", exact=True).check()
        await expect(page.locator("[data-step=qwen-0]")).to_contain_text("new on")
        await expect(page.locator("figure.picture")).to_be_visible()
        await page.get_by_role("button", name="before", exact=True).click()
        await check_access(page)
        # The address has the change: a reload and a link lead to it.
        await expect(page).to_have_url(
            re.compile("concurrency=16.*lost=mac-1|lost=mac-1.*concurrency=16")
        )
        await page.reload()
        await expect(page.locator("[data-step=qwen-0]")).to_contain_text("new on")
        await expect(slider).to_have_value("4")


async def test_a_written_change_is_in_the_address_if_it_fits(
    browser: Browser, running: RunningDashboard
) -> None:
    async with open_page(browser, running.url) as (page, _):
        await page.goto("/try")
        await expect(page.get_by_text("The planner answers as you type")).to_be_visible()
        area = page.get_by_label("Manifest, YAML")
        await area.fill("kind: Nothing\n")
        await expect(page.get_by_role("alert")).to_contain_text("line 1")
        await expect(page).to_have_url(re.compile("#yaml="))
        await page.reload()
        await expect(area).to_have_value("kind: Nothing\n")
        await expect(page.get_by_role("alert")).to_contain_text("line 1")
        await area.fill("# long\n" * 2_000)
        await expect(page.get_by_text("too long for the address")).to_be_visible()
        await expect(page).not_to_have_url(re.compile("#yaml="))


_EDITS = """async ([path, text, value]) => {
  const modules = [...document.querySelectorAll('link[rel=modulepreload]')];
  const { withField } = await import(modules[0].href.replace(/vendor.*/, 'manifest_text.js'));
  return withField(text, path, value);
}"""


async def edited(page: Page, text: str, path: str, value: object) -> str | None:
    found: str | None = await page.evaluate(_EDITS, [path.split("."), text, value])
    return found


async def test_a_field_of_a_manifest_is_set_in_its_text(
    browser: Browser, running: RunningDashboard
) -> None:
    text = "# mine\nkind: A\nspec:\n    replicas: 1  # few\n    # end\n---\nkind: B\n"
    async with open_page(browser, running.url) as (page, _):
        await page.goto("/try")
        assert await edited(page, text, "spec.replicas", 3) == text.replace(": 1 ", ": 3 ")
        added = text.replace("# few\n", "# few\n    kvCache:\n      bits: 4\n")
        assert await edited(page, text, "spec.kvCache.bits", 4) == added
        # What is not written in blocks is left to its writer.
        for other in ("kind: A\nspec: {replicas: 1}\n", "", "spec:\n  replicas:\n    a: 1\n"):
            assert await edited(page, other, "spec.replicas", 3) is None
