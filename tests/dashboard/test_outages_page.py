"""The page while the control plane is dead, and in more windows than a browser has connections."""

import asyncio
import os
import re
import signal
from operator import itemgetter
from pathlib import Path

import pytest
from playwright.async_api import Browser, Route, expect

from schemas.records import GatewayLease
from store import codec, keys
from store.errors import UnavailableError
from store.etcd.connect import connect
from store.memory import MemoryTransport
from store.port import Put, Transport
from tests.support.broken_objects import LEADER, put_deployment
from tests.support.browser import needs_browser, open_page
from tests.support.dashboard_site import hostile_answer, opened
from tests.support.dashboards import CLOCK, running_dashboard
from tests.support.etcd import running_etcd
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import World, deployment, running_gateway
from tests.support.macs import mac
from tests.support.ports import free_port
from tests.support.waiting import until_async

pytestmark = [needs_browser, pytest.mark.browser]


_SET_HIDDEN = """(isHidden) => {
  Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


async def commit_when_back(store: Transport, puts: list[Put]) -> None:
    """Write once the store answers again: a connection of before may still be closed."""

    async def is_written() -> bool:
        try:
            await store.commit([], puts)
        except UnavailableError:
            return False
        return True

    await until_async(is_written, limit_s=60, what="the store to take a write")


@pytest.mark.etcd
async def test_the_page_works_and_says_so_while_etcd_is_dead(
    browser: Browser, tmp_path: Path
) -> None:
    async with running_etcd(tmp_path / "etcd") as etcd:
        store = connect(etcd.address)
        await store.commit([], [*mac("mac-1"), *mac("mac-2")])
        async with (
            running_gateway(store) as gateway,
            running(FakeEngine("qwen-0", hostile_answer)) as engine,
        ):
            await World(store).serve("qwen", engine)
            await gateway.knows("qwen", ready=1)
            async with (
                running_dashboard(store, can_write=True) as dashboard,
                open_page(browser, dashboard.url) as (page, faults),
            ):
                await page.goto("/macs")
                await expect(page.get_by_role("link", name="mac-1")).to_be_visible()
                await page.evaluate("window.isOld = true")
                pid = etcd.supervisor.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                await etcd.supervisor.stop()
                banner = page.locator("[data-banner]")
                await expect(banner).to_contain_text("Objects are shown as last known")
                await expect(page.get_by_role("link", name="mac-1")).to_be_visible()
                # Chat goes on, a change says why it cannot.
                await page.get_by_role("link", name="Chat", exact=True).click()
                await page.fill("textarea", "Hi")
                await page.keyboard.press("Enter")
                await expect(page.locator("[data-trace]")).to_contain_text("qwen-0")
                await page.locator("nav").get_by_role("link", name="Macs").click()
                await page.get_by_role("link", name="mac-1").click()
                await page.get_by_role("button", name="Cordon", exact=True).click()
                await expect(page.get_by_role("alert")).to_contain_text("does not answer")
                await page.keyboard.press("Escape")
                await etcd.start()
                await commit_when_back(store, mac("mac-3"))
                await expect(banner).to_have_count(0)
                await page.locator("nav").get_by_role("link", name="Macs").click()
                await expect(page.get_by_role("link", name="mac-3")).to_be_visible()
                assert await page.evaluate("window.isOld")
                faults.found = [one for one in faults.found if "net::ERR" not in one]
        await store.close()


@pytest.mark.ci
@pytest.mark.etcd
async def test_a_frozen_etcd_and_a_dead_gateway_are_said_on_the_open_page(
    browser: Browser, tmp_path: Path
) -> None:
    """A frozen process keeps its connections: no watch breaks for long, and no page is told to load again."""
    async with running_etcd(tmp_path / "etcd") as etcd:
        store = connect(etcd.address)
        gone = GatewayLease(url=f"http://127.0.0.1:{free_port()}", version="1")
        lease = Put(key=keys.named(keys.GATEWAY_LEASE_PREFIX, "gone"), value=codec.encode(gone))
        await store.commit([], mac("mac-1"))
        async with (
            running_dashboard(store, can_write=True) as dashboard,
            open_page(browser, dashboard.url) as (page, _),
        ):
            await page.goto("/macs/mac-1")
            await expect(page.locator("[data-state]")).to_have_text("live")
            await store.commit([], [lease])
            await expect(page.locator("[data-gateway-silent]")).to_contain_text("gone")
            pid = etcd.supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            frozen_s = CLOCK.monotonic()
            try:
                banner = page.locator("[data-banner]")
                await expect(banner).to_contain_text("has not answered")
                # Watches break after 15 s; the page must know long before.
                assert CLOCK.monotonic() - frozen_s < 13
                await expect(page.locator("[data-state]")).to_have_text("last known")
                await page.get_by_role("button", name="Cordon", exact=True).click()
                await expect(page.locator("[data-waiting]")).to_contain_text("etcd")
            finally:
                os.kill(pid, signal.SIGCONT)
            await expect(banner).to_have_count(0)
            await expect(page.locator("[data-plan]")).to_be_visible()
            await expect(page.locator("[data-state]")).to_have_text("live")
        await store.close()


async def test_the_headline_of_page_and_fleetctl_says_that_no_gateway_answers(
    browser: Browser,
) -> None:
    fleet = MemoryFleet()
    gone = GatewayLease(url=f"http://127.0.0.1:{free_port()}", version="1")
    lease = Put(key=keys.named(keys.GATEWAY_LEASE_PREFIX, "gone"), value=codec.encode(gone))
    await fleet.store.commit([], [*mac("mac-1"), *put_deployment("qwen", ready=1), LEADER, lease])
    async with (
        running_dashboard(fleet.store) as dashboard,
        open_page(browser, dashboard.url) as (page, _),
    ):
        await page.goto("/")
        headline = page.locator("[data-sentence]")
        await expect(headline).to_have_text("1 of 1 Macs online. No gateway answers.")
        await expect(page.locator("h1 .dot")).to_have_class("dot bad")
        status = await fleet.ctl("status")
        assert status.out.splitlines()[0] == await headline.text_content()


@pytest.mark.ci
@pytest.mark.etcd
async def test_a_dashboard_that_starts_without_etcd_shows_what_was_known(
    browser: Browser, tmp_path: Path
) -> None:
    async with running_etcd(tmp_path / "etcd") as etcd:
        store = connect(etcd.address)
        await store.commit([], mac("mac-1"))
        folder = tmp_path / "history"
        folder.mkdir()
        async with running_dashboard(store, state_dir=folder) as first:
            await first.until("/api/v1/objects/Node/mac-1/changes", itemgetter("changes"))
        await etcd.supervisor.stop()
        async with (
            running_dashboard(store, id_="run2", has_store=False, state_dir=folder) as second,
            open_page(browser, second.url) as (page, faults),
        ):
            await page.goto("/macs")
            await expect(page.get_by_role("link", name="mac-1")).to_be_visible()
            banner = page.locator("[data-banner]")
            await expect(banner).to_contain_text("Objects are shown as last known")
            await page.locator("nav").get_by_role("link", name="Overview").click()
            await expect(page.locator("[data-sentence]")).to_contain_text("1 of 1 Macs online")
            await etcd.start()
            await commit_when_back(store, mac("mac-2"))
            await expect(banner).to_have_count(0)
            await expect(page.locator("[data-sentence]")).to_contain_text("2 of 2 Macs online")
            faults.found = [one for one in faults.found if "net::ERR" not in one]
        await store.close()


@pytest.mark.ci
@pytest.mark.etcd
async def test_the_seventh_window_loads_and_all_of_them_follow(
    browser: Browser, tmp_path: Path
) -> None:
    async with running_etcd(tmp_path / "etcd") as etcd:
        store = connect(etcd.address)
        await store.commit([], mac("mac-1"))
        async with (
            running_dashboard(store) as dashboard,
            open_page(browser, dashboard.url) as (page, _),
        ):
            pages = [page, *[await page.context.new_page() for _ in range(6)]]
            for one in pages:
                # Six streams would leave no connection to load the seventh with: it would never be done.
                async with asyncio.timeout(30):
                    await one.goto("/macs")
                    await expect(one.get_by_role("link", name="mac-1")).to_be_visible()
            await store.commit([], mac("mac-2"))
            async with asyncio.timeout(60):
                for one in pages:
                    await expect(one.get_by_role("link", name="mac-2")).to_be_visible()
        await store.close()


async def test_a_hidden_page_gets_no_bytes_and_goes_on_when_it_is_seen(browser: Browser) -> None:
    store = MemoryTransport(CLOCK)
    await store.commit([], mac("mac-1"))
    async with opened(browser, store) as (page, dashboard):

        async def figure(name: str) -> float:
            async with dashboard.http.get(f"{dashboard.url}/metrics") as answer:
                found = re.search(rf"^{name} (\S+)$", await answer.text(), re.MULTILINE)
                assert found is not None
                return float(found[1])

        async def streams() -> float:
            return await figure("fleet_dashboard_streams")

        async def is_closed() -> bool:
            return await streams() == 0

        await page.goto("/macs")
        await expect(page.get_by_role("link", name="mac-1")).to_be_visible()
        assert await streams() == 1
        # As the browser does it for a tab in the background; there are no tabs without a window.
        await page.evaluate(_SET_HIDDEN, True)
        await until_async(is_closed, limit_s=60, what="the end of the stream")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        sent = await figure("fleet_dashboard_stream_bytes_total")
        await store.commit([], mac("mac-2"))
        await asyncio.sleep(6)  # a page that polls would have asked: each does within 5 s
        assert await figure("fleet_dashboard_stream_bytes_total") == sent
        assert asked == []
        await page.evaluate(_SET_HIDDEN, False)
        await expect(page.get_by_role("link", name="mac-2")).to_be_visible()


async def test_a_stream_that_opens_late_is_waited_for(browser: Browser) -> None:
    """A page that took long to begin, on a busy machine: each further try must have its time, too."""
    store = MemoryTransport(CLOCK)
    await store.commit([], mac("mac-1"))

    async def answer_late(route: Route) -> None:
        await asyncio.sleep(3)  # the lateness itself
        await route.continue_()

    async with opened(browser, store) as (page, _):
        await page.add_init_script(
            "const now = performance.now.bind(performance); performance.now = () => now() + 60_000;"
        )
        await page.route("**/api/v1/stream*", answer_late)
        await page.goto("/macs")
        await expect(page.get_by_role("link", name="mac-1")).to_be_visible(timeout=30_000)


async def test_a_screen_that_fails_leaves_the_others_as_they_are(browser: Browser) -> None:
    """An answer of another release must not blank the page."""
    store = MemoryTransport(CLOCK)
    await store.commit([], [*mac("mac-1"), codec.put_spec(deployment("qwen"))])

    async def answer_nothing(route: Route) -> None:
        await route.fulfill(json={"metrics": {}})

    async with opened(browser, store) as (page, _):
        await page.route("**/api/v1/series?*", answer_nothing)
        await page.goto("/")
        await expect(page.get_by_role("alert")).to_contain_text("This screen has failed")
        await page.locator("nav").get_by_role("link", name="Macs").click()
        await expect(page.get_by_role("link", name="mac-1")).to_be_visible()
