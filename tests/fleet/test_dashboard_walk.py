"""A walk through the dashboard of a real fleet, click by click: from the first login to a look back in time."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from tests.support.browser import needs_browser, open_page, running_browser
from tests.support.fleet import Fleet, running_fleet
from tests.support.ports import free_port
from tests.support.waiting import until_async

pytestmark = [
    needs_browser,
    pytest.mark.browser,
    pytest.mark.ci,
    pytest.mark.fleet,
    pytest.mark.mlx,
    pytest.mark.timeout(1200),
]

MANIFEST = """\
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: NAME}
spec:
  model: {path: tiny}
  replicas: 2
  contextLength: 4096
  concurrency: 2
  sampling: {maxTokens: 600, temperature: 0}
"""


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as found:
        yield found


async def login_link(fleet: Fleet) -> str:
    """Return the link of `fleetctl dashboard --link`, once the dashboard is registered."""

    async def link() -> str:
        done = await fleet.ctl("dashboard", "--link")
        return done.out.strip() if done.code == 0 else ""

    return await until_async(link, limit_s=60, what="a login link")


async def test_the_walk(browser: Browser, tmp_path: Path, models_dir: Path) -> None:
    async with running_fleet(tmp_path, models_dir, nodes=2, grace_s=5.0) as fleet:
        port = free_port()
        flags = ("--port", str(port), "--allow-writes", "--state-dir", str(tmp_path / "dash"))
        fleet.start("dashboard", "dashboard", *flags)
        await fleet.applied(MANIFEST.replace("NAME", "first"))
        await fleet.available("first", limit_s=300)
        await fleet.routed("first", 2)
        link = await login_link(fleet)
        async with open_page(browser, f"http://127.0.0.1:{port}") as (page, faults):
            await log_in(page, link)
            await chat(page)
            await apply_with_an_error(page)
            await watch_it_load(page)
            await kill_a_mac_under_a_stream(page, fleet)
            await ask_why_and_what_if(page)
            await undo_a_rollout(page, fleet)
            await go_back_in_time(page)
            faults.found = [one for one in faults.found if "net::ERR" not in one]


async def log_in(page: Page, link: str) -> None:
    """The page asks for a login; the link opens it, and is no longer in the address."""
    await page.goto("/macs")
    await expect(page.get_by_label("API key")).to_be_visible()
    await page.goto(link)
    await expect(page.locator("[data-sentence]")).to_contain_text(
        re.compile("2 (Macs|nodes) online")
    )
    assert "login" not in page.url


async def chat(page: Page) -> None:
    """The first question streams, and tells which Mac answers."""
    await page.locator("nav").get_by_role("link", name="Chat").click()
    await expect(page.locator("select")).to_have_value("first")
    await page.fill("textarea", "We hold these truths")
    await page.keyboard.press("Enter")
    await expect(page.locator("[data-trace]")).to_contain_text("answered by first-")
    await page.get_by_role("button", name="Stop").click()


async def apply_with_an_error(page: Page) -> None:
    """A typing error is told with its line; mended, the preview is applied."""
    await page.locator(".account-button").click()
    await page.locator("#account").get_by_role("link", name="Try a change").click()
    area = page.get_by_label("Manifest, YAML")
    good = MANIFEST.replace("NAME", "second").replace("replicas: 2", "replicas: 1")
    await area.fill(good.replace("concurrency", "concurrancy"))
    await expect(page.get_by_role("alert")).to_contain_text("Did you mean concurrency?")
    await area.fill(good)
    await expect(page.locator("[data-plan]")).to_contain_text("1 placed")
    await page.get_by_label("Reason").fill("the walk")
    await page.get_by_role("button", name="Apply these changes").click()
    await expect(page.locator("[data-done]")).to_contain_text("created")


async def watch_it_load(page: Page) -> None:
    """Its page follows until it is ready, and the change is on record."""
    await page.locator("[data-done]").get_by_role("link", name="second").click()
    await expect(page.locator("main")).to_contain_text("1 of 1 ready", timeout=300_000)
    await page.locator("nav").get_by_role("link", name="Activity").click()
    await page.get_by_role("link", name="Changes", exact=True).click()
    await expect(page.locator(".timeline")).to_contain_text("the walk")


async def kill_a_mac_under_a_stream(page: Page, fleet: Fleet) -> None:
    """The Mac that answers loses its power; the answer goes on at the other one, to its end."""
    await page.goto("/chat?model=first")
    await page.get_by_role("button", name="New conversation").click()
    await page.fill("textarea", "We hold these truths")
    await page.keyboard.press("Enter")
    trace = page.locator("[data-trace]").last  # the browser keeps the conversation of before
    await expect(trace).to_contain_text("answered by first-")
    node = re.search(r"on (node-\d)", await trace.inner_text())
    assert node is not None
    answer = page.locator("[data-answer]").last
    await expect(answer).to_have_text(re.compile(r".{20,}", re.DOTALL))
    fleet.kill(node[1])
    assert fleet.kill_engines(node[1])
    before = len(await answer.inner_text())
    await expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=300_000)
    await expect(page.locator(".turns .problem")).to_have_count(0)
    assert len(await answer.inner_text()) > before
    await expect(trace).to_contain_text("600 out")
    await page.locator("nav").get_by_role("link", name="Macs").click()
    row = page.locator("tr", has=page.get_by_role("link", name=node[1]))
    await expect(row).to_contain_text("offline")
    fleet.restart(node[1])
    await expect(row).to_contain_text("online")


async def ask_why_and_what_if(page: Page) -> None:
    """A model that fits nowhere: why, two clicks from the first screen, and what would help."""
    await page.goto("/try")
    huge = MANIFEST.replace("NAME", "huge").replace("replicas: 2", "replicas: 1")
    await page.get_by_label("Manifest, YAML").fill(f"{huge}  resources: {{memory: 100Gi}}\n")
    await page.get_by_role("button", name="Apply these changes").click()
    await expect(page.locator("[data-done]")).to_contain_text("created")
    await page.locator("nav").get_by_role("link", name="Overview").click()
    item = page.locator(".chips li", has=page.get_by_role("link", name="huge", exact=True))
    await item.get_by_role("link", name="Why pending?").click()
    await expect(page.locator("main")).to_contain_text("InsufficientMemory")
    await page.locator(".actions").get_by_role("link", name="Try a change").click()
    step = page.locator("[data-step=huge-0]")
    await page.get_by_text("With other Macs").click()
    await page.get_by_label("Memory", exact=True).fill("256Gi")
    await page.get_by_label("Count").fill("1")
    await expect(step).to_contain_text("new on new")


async def undo_a_rollout(page: Page, fleet: Fleet) -> None:
    """A second revision of the model is rolled back, after its difference was shown."""
    await fleet.applied(MANIFEST.replace("NAME", "first").replace("4096", "2048"))
    await page.goto("/models/first")
    await expect(page.locator("main dl")).to_contain_text("2048 tokens")
    await page.get_by_role("button", name="Undo the rollout").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.locator(".added", has_text="4096")).to_be_visible()
    await dialog.get_by_role("button", name="Undo the rollout").click()
    await expect(page.locator("main [data-done]")).to_be_visible()
    await expect(dialog).to_have_count(0)
    await expect(page.locator("main dl")).to_contain_text("4096 tokens")


async def go_back_in_time(page: Page) -> None:
    """Before the walk made it, there was no model `huge`; now there is."""
    await page.locator("nav").get_by_role("link", name="Models").click()
    huge = page.get_by_role("link", name="huge", exact=True)
    await expect(huge).to_be_visible()
    await page.keyboard.press("[")
    slider = page.get_by_role("slider", name="Moment")
    await slider.focus()
    for _ in range(400):
        await page.keyboard.press("ArrowLeft")
        await page.wait_for_timeout(300)
        if await page.locator("[data-state='past']").count() and not await huge.count():
            break
    await expect(huge).to_have_count(0)
    await expect(page.get_by_role("link", name="first", exact=True)).to_be_visible()
    await page.get_by_role("button", name="Now", exact=True).click()
    await expect(huge).to_be_visible()
