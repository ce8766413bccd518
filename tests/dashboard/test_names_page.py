"""Names of objects in a real browser: each stays on one line, unless it is longer than its place."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, expect

from store import codec
from store.memory import MemoryTransport
from tests.support.browser import needs_browser, open_page
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard
from tests.support.fleetctl_manifests import put_replica
from tests.support.macs import mac
from tests.support.world import deployment

pytestmark = [needs_browser, pytest.mark.browser]
_MACS = ("mac-studio-berlin-1", "mac-studio-berlin-2")
_MODELS = ("qwen3-8b-instruct", "llama-3.3-70b-instruct")
_LONG = "a-model-" + "with-a-very-long-name-" * 4
_BROKEN = """
(names) => {
  const broken = [];
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    if (text.parentElement.closest("pre, option, .hidden, code")) continue;
    for (const name of names) {
      const range = document.createRange();
      const at = text.data.indexOf(name);
      if (at < 0) continue;
      range.setStart(text, at);
      range.setEnd(text, at + name.length);
      if (new Set([...range.getClientRects()].map(({ top }) => Math.round(top))).size > 1) broken.push(name);
    }
  }
  return broken;
}
"""


@pytest.fixture(scope="module")
async def running() -> AsyncIterator[RunningDashboard]:
    store = MemoryTransport(CLOCK)
    await store.commit([], [put for name in _MACS for put in mac(name)])
    for name in (*_MODELS, _LONG.removesuffix("-")):
        owner = deployment(name=name, replicas=2)
        replicas = [put_replica(owner, at, node) for at, node in enumerate(_MACS)]
        await store.commit([], [codec.put_spec(owner), *replicas])
    async with running_dashboard(store) as dashboard:
        yield dashboard


@pytest.mark.parametrize("width", [390, 800, 1024, 1080, 1280])
async def test_names_are_whole_and_the_page_fits(
    browser: Browser, running: RunningDashboard, width: int
) -> None:
    model, node = _MODELS[0], _MACS[0]
    paths = ("/", "/models", "/macs", f"/models/{model}", f"/macs/{node}", f"/replicas/{model}-0")
    replicas = [f"{name}-{at}" for name in _MODELS for at in (0, 1)]
    async with open_page(browser, running.url, width=width) as (page, _):
        for path in paths:
            await page.goto(path)
            await expect(page.locator("main")).to_contain_text(model)
            await expect(page.locator("main")).to_contain_text(node)
            assert await page.evaluate(_BROKEN, [*_MACS, *_MODELS, *replicas]) == [], path
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, path
