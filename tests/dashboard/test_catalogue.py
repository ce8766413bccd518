"""The catalogue against the Macs: over HTTP, and as the page from which a model is run."""

from typing import Any

import pytest
from playwright.async_api import Browser, expect

from schemas.deployment import ModelDeployment
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeSpec
from store import codec, objects
from store.memory import MemoryTransport
from tests.support.browser import check_access, needs_browser, open_page
from tests.support.dashboard_fleets import put_fleet
from tests.support.dashboards import CLOCK, running_dashboard

REPO = "mlx-community/Llama-3.2-3B-Instruct-4bit"
MANIFEST = f"""\
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata:
  name: llama
spec:
  model:
    hub:
      repo: {REPO}
"""


def fits(found: dict[str, Any], model: str) -> dict[str, Any]:
    """Return the answers for a model by Mac."""
    (row,) = (one for one in found["models"] if one["name"] == model)
    return {fit["mac"]: fit for fit in row["macs"]}


async def test_the_catalogue_follows_the_macs_and_is_kept_while_they_are_the_same() -> None:
    store = MemoryTransport(CLOCK)
    async with running_dashboard(store) as running:
        assert (await running.get("/api/v1/catalogue"))["models"] == []
        await put_fleet(store)
        found = await running.until(
            "/api/v1/catalogue", lambda body: len(body["models"]) > 100 and body
        )
        small = fits(found, "Llama-3.2-3B-Instruct")
        assert small["mac-1"]["fits"]
        assert small["mac-1"]["repo"].startswith("mlx-community/")
        assert not fits(found, "Llama-3.3-70B-Instruct")["mac-1"]["fits"]
        assert await running.get("/api/v1/catalogue") == found
        node = Node(
            metadata=ObjectMeta(name="mac-1", uid="uid-mac-1", generation=2),
            spec=NodeSpec(unschedulable=True),
        )
        await store.commit([], [codec.put_spec(node)])
        refused = await running.until(
            "/api/v1/catalogue",
            lambda body: fits(body, "Llama-3.2-3B-Instruct")["mac-1"]["refusal"],
        )
        assert refused["reason"] == "NodeCordoned"


async def test_a_model_of_the_catalogue_is_placed_before_a_hub_was_asked() -> None:
    store = MemoryTransport(CLOCK)
    await put_fleet(store)
    async with running_dashboard(store) as running:
        found = await running.post("/api/v1/whatif", {"manifest": MANIFEST})
        (step,) = (one for one in found["steps"] if one["deployment"] == "llama")
        assert len(step["to"]) == 1
        assert step["memory"]["weightsBytes"] > 1 << 30
        unknown = MANIFEST.replace(REPO, "somebody/unknown-model")
        found = await running.post("/api/v1/whatif", {"manifest": unknown})
        assert not any(one["to"] for one in found["steps"] if one["deployment"] == "llama")


@needs_browser
@pytest.mark.browser
async def test_a_model_is_found_previewed_and_run(browser: Browser) -> None:
    store = MemoryTransport(CLOCK)
    await put_fleet(store)
    async with (
        running_dashboard(store, can_write=True) as running,
        open_page(browser, running.url) as (page, _),
    ):
        await page.goto("/models")
        await page.get_by_role("link", name="Run a model").click()
        await page.get_by_role("searchbox").fill("bge-m3")
        row = page.locator("tbody tr", has_text="bge-m3")
        await expect(row).to_contain_text("convert first")
        await expect(row).to_contain_text("568 M")
        await expect(row.get_by_role("link", name="Run bge-m3")).to_have_count(0)
        await page.get_by_role("searchbox").fill("gpt-oss-20b")
        row = page.locator("tbody tr", has_text="gpt-oss-20b")
        await expect(row).to_contain_text("8 bit, experts MXFP4")
        await expect(row.get_by_role("link", name="Run gpt-oss-20b")).to_have_count(1)
        await page.get_by_role("searchbox").fill("llama-3.2 llama3")
        row = page.locator("tbody tr", has_text="Llama-3.2-3B-Instruct")
        await expect(row).to_contain_text("mac-1")
        await expect(page.locator("tbody tr")).to_have_count(2)
        await check_access(page)
        await row.get_by_role("link", name="Run Llama-3.2-3B-Instruct").click()
        step = page.locator("[data-step='llama-3.2-3b-instruct-8bit-0']")
        await expect(step).to_contain_text("new on mac-")
        await expect(page.locator('.drawing a[aria-label*="llama-3.2-3b"]')).to_have_count(1)
        await expect(page.locator(".command code")).to_contain_text("fleetctl run mlx-community/")
        await check_access(page)
        await page.get_by_role("button", name="Apply these changes").click()
        await page.locator("[data-done]").get_by_role("link").click()
        await expect(page.locator("h1")).to_contain_text("llama-3.2-3b-instruct")
        (name,) = {one.name for one in await objects.list_all(store, ModelDeployment)} - {
            "qwen",
            "long",
        }
        written = await objects.get(store, ModelDeployment, name)
        assert written is not None
        assert written.spec.model.hub is not None
        assert written.spec.model.hub.repo.startswith("mlx-community/Llama-3.2-3B")


@needs_browser
@pytest.mark.browser
async def test_a_wide_window_has_each_name_on_one_line(browser: Browser) -> None:
    store = MemoryTransport(CLOCK)
    await put_fleet(store)
    async with running_dashboard(store) as running, open_page(browser, running.url) as (page, _):
        await page.set_viewport_size({"width": 1280, "height": 800})
        await page.goto("/run")
        await page.get_by_label("Also what does not fit").check()
        await page.get_by_role("button", name="Show all").click()
        heights = await page.locator("td strong").evaluate_all(
            "all => all.filter((e) => e.textContent.length < 34).map((e) => e.offsetHeight)"
        )
        assert len(heights) > 100
        assert max(heights) < 1.5 * min(heights)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 1280


@needs_browser
@pytest.mark.browser
async def test_a_dashboard_that_only_reads_shows_the_command(browser: Browser) -> None:
    store = MemoryTransport(CLOCK)
    await put_fleet(store)
    async with running_dashboard(store) as running, open_page(browser, running.url) as (page, _):
        await page.goto("/run")
        await page.get_by_label("Another repository").fill(REPO)
        await page.get_by_role("button", name="Preview").click()
        await expect(page.locator("main")).to_contain_text("started without --allow-writes")
        await expect(page.locator(".command code")).to_have_text(f"fleetctl run {REPO}")
        await expect(page.get_by_role("button", name="Apply these changes")).to_have_count(0)
