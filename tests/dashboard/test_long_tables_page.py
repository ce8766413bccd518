"""Tables of many rows in a real browser: a few rows are in the document, and all of them within reach."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Page, expect

from store.memory import MemoryTransport
from tests.support.browser import check_access, needs_browser, open_page
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard
from tests.support.macs import mac

pytestmark = [needs_browser, pytest.mark.browser]
_MACS = 1000
_MOST_ROWS = 120


@pytest.fixture(scope="module")
async def running() -> AsyncIterator[RunningDashboard]:
    store = MemoryTransport(CLOCK)
    for first in range(0, _MACS, 50):
        await store.commit([], [put for at in range(first, first + 50) for put in mac(name_of(at))])
    async with running_dashboard(store) as dashboard:
        yield dashboard


def name_of(number: int) -> str:
    return f"mac-{number:04}"


async def rows_in_document(page: Page) -> int:
    return await page.locator("tbody tr:not(.gap)").count()


async def expect_focus(page: Page, name: str) -> None:
    await expect(page.get_by_role("link", name=name, exact=True)).to_be_focused()


async def scroll_to_end(page: Page) -> None:
    """Scroll until the page does not grow any more: the heights of rows are known once they were in sight."""
    end = "() => { scrollTo(0, document.documentElement.scrollHeight); return scrollY; }"
    await page.wait_for_function(
        f"() => {{ const at = scrollY; return ({end})() === at && at > 0; }}", polling=200
    )


@pytest.mark.ci
@pytest.mark.parametrize("width", [1280, 360])
async def test_rows_in_sight_are_in_the_document_and_all_can_be_reached(
    browser: Browser, running: RunningDashboard, width: int
) -> None:
    async with open_page(browser, running.url, width=width) as (page, _):
        await page.goto("/macs")
        await expect(page.get_by_role("link", name=name_of(0))).to_be_visible()
        await expect(page.locator("table")).to_have_attribute("aria-rowcount", str(_MACS + 1))
        assert await rows_in_document(page) <= _MOST_ROWS
        await scroll_to_end(page)
        last = page.locator("tbody tr", has_text=name_of(_MACS - 1))
        await expect(last).to_be_in_viewport()
        await expect(last).to_have_attribute("aria-rowindex", str(_MACS + 1))
        assert await rows_in_document(page) <= _MOST_ROWS
        await page.evaluate("scrollTo(0, document.documentElement.scrollHeight / 2)")
        middle = page.locator("tbody tr:not(.gap)").nth(5)
        await expect(middle).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        await check_access(page)


@pytest.mark.ci
async def test_the_keyboard_reaches_rows_that_were_not_in_the_document(
    browser: Browser, running: RunningDashboard
) -> None:
    async with open_page(browser, running.url) as (page, _):
        await page.goto("/macs")
        await expect(page.get_by_role("link", name=name_of(0))).to_be_visible()
        for at in range(60):
            await page.keyboard.press("j")
            await expect_focus(page, name_of(at))
        # The focused row stays, wherever one looks, and the next key goes on from it.
        await page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        await expect(page.get_by_role("link", name=name_of(_MACS - 1))).to_be_visible()
        await expect_focus(page, name_of(59))
        await page.keyboard.press("j")
        await expect_focus(page, name_of(60))
        await expect(page.get_by_role("link", name=name_of(60))).to_be_in_viewport()
        await page.keyboard.press("Enter")
        await expect(page.locator("h1")).to_have_text(name_of(60))
