"""The page in a real browser: every screen, live changes, chat, login, keyboard, phones, access, hostile texts."""

import re
import signal
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, Route, expect

from insight.tickets import issue_login_ticket
from manifests.change_log import AuditedTransport, ChangeAuthor
from schemas.deployment import ModelDeploymentStatus
from schemas.gitsource import GitCommit, GitSource, GitSourceSpec, GitSourceStatus
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from store import codec, keys
from store.etcd.connect import connect
from store.memory import MemoryTransport
from store.port import Delete, Put, Transport
from tests.support.browser import WCAG, check_access, needs_browser, open_page
from tests.support.dashboard_fleets import put_key
from tests.support.dashboard_site import HOSTILE, TOO_WARM, Site, opened, running_site
from tests.support.dashboards import CLOCK, dashboard_process, running_dashboard
from tests.support.etcd import running_etcd
from tests.support.gateway_world import deployment
from tests.support.macs import mac

pytestmark = [needs_browser, pytest.mark.browser]
SENTENCE = re.compile("Macs online")
SCREENS: dict[str, str | re.Pattern[str]] = {
    "/": SENTENCE,
    "/macs": "Macs",
    "/macs/mac-1": "mac-1",
    "/models": "Models",
    "/models/qwen": "qwen",
    "/replicas/qwen-0": "qwen-0",
    "/macs?tab=picture": "Macs",
    "/macs?tab=groups": "Macs",
    "/macs?tab=add": "Macs",
    "/requests": "Requests",
    "/chat": "Chat",
    "/run": "Run a model",
    "/models/qwen?why": "qwen",
    "/try": "Try a change",
    "/activity": "Activity",
    "/activity?tab=git": "Activity",
    "/activity?tab=changes": "Activity",
    "/activity?tab=logs": "Activity",
    "/settings": "Settings",
    "/settings?tab=fleet": "Settings",
    "/nothing/here": "No such page",
}


@pytest.fixture(scope="module")
async def site() -> AsyncIterator[Site]:
    async with running_site() as found:
        yield found


async def show(page: Page, path: str, heading: str | re.Pattern[str]) -> None:
    await page.goto(path)
    await expect(page.locator("h1")).to_have_text(heading)
    await expect(page.locator("[data-state]")).to_have_text("live")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("width", "theme"),
    [
        (1280, "light"),
        # Contrast depends on the theme alone, and the layout on the width alone.
        pytest.param(360, "dark", marks=pytest.mark.ci),
        pytest.param(1280, "dark", marks=pytest.mark.ci),
        pytest.param(360, "light", marks=pytest.mark.ci),
    ],
)
async def test_every_screen_is_whole_accessible_and_fits(
    browser: Browser, site: Site, width: int, theme: str
) -> None:
    async with open_page(browser, site.url, width=width, theme=theme) as (page, _):
        for path, heading in SCREENS.items():
            await show(page, path, heading)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, path
            result = await Axe().run(page, options=WCAG)
            assert result.violations_count == 0, f"{path}: {result.generate_report()}"


async def put_hostile(store: Transport) -> None:
    """Write texts of strangers: a commit's subject, a reason, a condition of a model."""
    spec = GitSourceSpec(repository="https://git.example.com/fleet.git")
    source = GitSource(metadata=ObjectMeta(name="fleet", uid="g", generation=1), spec=spec)
    status = GitSourceStatus(
        observed_revision="main@1", applied_commit=GitCommit(author=HOSTILE[:90], subject=HOSTILE)
    )
    author = ChangeAuthor(user="eve", manager="fleetctl", reason=HOSTILE, command=HOSTILE)
    await AuditedTransport(store, CLOCK, author).commit([], [codec.put_spec(source)])
    key = keys.status_key("GitSource", "fleet")
    await store.commit([], [Put(key=key, value=codec.encode(status))])


async def test_hostile_texts_are_shown_and_never_run(browser: Browser, site: Site) -> None:
    await put_hostile(site.store)
    async with open_page(browser, site.url) as (page, _):
        for path in ("/git", "/changes"):
            await show(page, path, "Activity")
            await expect(page.locator("main")).to_contain_text(HOSTILE)
        await show(page, "/try", "Try a change")
        await page.get_by_label("Manifest, YAML").fill(f"kind: '{HOSTILE}'")
        await expect(page.get_by_role("alert")).to_be_visible()
        await show(page, f"/try?kind=ModelDeployment&name={quote(HOSTILE)}", "Try a change")
        name = HOSTILE.replace("/", "")
        await show(page, f"/macs/{quote(name)}", name)
        for path in ("/", "/macs/mac-2", "/events"):
            await show(page, path, SENTENCE if path == "/" else re.compile("mac-2|Activity"))
            await expect(page.locator("main")).to_contain_text(HOSTILE)
        await show(page, "/chat", "Chat")
        await page.fill("textarea", HOSTILE)
        await page.keyboard.press("Enter")
        await expect(page.locator("[data-answer]")).to_have_text(f"Hello {HOSTILE}")
        assert await page.evaluate("window.hacked") is None


_PIXELS_OF_LINES = """(canvas) => {
  const [red, green, blue] = getComputedStyle(canvas.closest("figure").querySelector(".swatch")).backgroundColor.match(/\\d+/g).map(Number);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) count += data[at] === red && data[at + 1] === green && data[at + 2] === blue && data[at + 3] === 255;
  return count;
}"""


async def test_a_request_is_listed_when_it_has_ended(browser: Browser, site: Site) -> None:
    async with open_page(browser, site.url) as (page, _):
        await show(page, "/chat", "Chat")
        await page.fill("textarea", "Hi")
        await page.keyboard.press("Enter")
        await expect(page.locator("[data-trace]")).to_contain_text("qwen-0")
        await show(page, "/requests", "Requests")
        await page.get_by_role("link", name="Ended").click()
        row = page.locator("[data-ended] tbody tr").first
        await expect(row).to_contain_text("qwen")
        await expect(row).to_contain_text("success")
        await row.get_by_role("button").click()
        steps = page.locator("[data-waterfall] .steps")
        await expect(steps).to_contain_text("Prefill")
        await expect(steps).to_contain_text("Decode")
        # The journal keeps no scores (ADR 0022), and the log has them at debug level alone: the page says so.
        scores = page.locator("[data-scores]")
        await scores.get_by_role("button", name="Show scores").click()
        await expect(scores).to_contain_text("--log-level debug")
        await check_access(page)
        await page.get_by_role("link", name="Metrics").click()
        # uPlot draws under the page's policy: no violation, no style in the markup.
        await expect(page.locator(".plot canvas").first).to_be_visible()
        await expect(page.get_by_role("img", name=re.compile("^Requests:"))).to_be_visible()
        # Tokens are known when their request ends.
        await expect(page.get_by_role("img", name="Tokens of ended requests:")).to_be_visible()
        # The only request: a value without neighbours, to which no line leads.
        canvas = page.get_by_role("img", name="First token:").locator("canvas")
        assert await canvas.evaluate(_PIXELS_OF_LINES) > 0


async def test_a_change_appears_without_a_reload(browser: Browser) -> None:
    async with running_site() as site, open_page(browser, site.url) as (page, _):
        await show(page, "/", SENTENCE)
        await page.evaluate("window.isOld = true")
        await site.store.commit([], mac("mac-3"))
        drawn = page.get_by_role("link", name="mac-3, online")
        await expect(drawn).to_be_visible()
        await expect(page.locator("[data-sentence]")).to_contain_text("3 of 3 Macs online")
        await site.store.commit([], [Delete(key=keys.node_lease_key("mac-3"))])
        await expect(page.get_by_role("link", name="mac-3, offline")).to_be_visible()
        assert await page.evaluate("window.isOld")


_NOTE_ANNOUNCEMENTS = """
  window.announced = [];
  const isLive = (node) => (node.nodeType === 1 ? node : node.parentElement)?.closest("[aria-live], [role=status], [role=alert], [role=log]");
  new MutationObserver((changes) => {
    const found = changes.find((one) => isLive(one.target));
    if (found) window.announced.push([performance.now(), isLive(found.target).textContent]);
  }).observe(document, { subtree: true, childList: true, characterData: true });
"""


@pytest.mark.ci
async def test_problems_that_change_often_are_announced_once_in_five_seconds(
    browser: Browser,
) -> None:
    store = MemoryTransport(CLOCK)
    await store.commit([], mac("mac-1"))
    async with opened(browser, store) as (page, _):
        await page.goto("/")
        await expect(page.locator("[data-state]")).to_have_text("live")
        await page.evaluate(_NOTE_ANNOUNCEMENTS)
        problems = page.locator("ul.problems > li")
        for number in range(1_000):
            conditions = (TOO_WARM,) if number % 2 == 0 else ()
            await store.commit([], mac("mac-1", *conditions))
            await expect(problems).to_have_count(len(conditions))
            if await page.evaluate("window.announced.length") >= 2:
                break
        announced = await page.evaluate("window.announced")
        times = [at for at, _ in announced]
        # A page that is late pauses longer, never less.
        assert min(later - earlier for earlier, later in pairwise(times)) >= 4_900
        assert number > len(announced)
        assert {text for _, text in announced} <= {
            "1 problem. mac-1: the processor is throttled by heat",
            "No problem is known",
        }


async def test_the_keyboard_alone_suffices(browser: Browser, site: Site) -> None:
    async with open_page(browser, site.url) as (page, _):
        await show(page, "/", SENTENCE)
        await page.keyboard.press("g")
        await page.keyboard.press("m")
        await expect(page.locator("h1")).to_have_text("Macs")
        await page.keyboard.press("j")
        await page.keyboard.press("j")
        await expect(page.locator("tbody tr:focus-within")).to_contain_text("mac-2")
        await page.keyboard.press("k")
        await page.keyboard.press("d")
        await expect(page.locator("main")).to_contain_text("Only Node mac-1")
        await page.go_back()
        await expect(page.locator("h1")).to_have_text("Macs")
        await page.keyboard.press("/")
        await page.keyboard.type("mac-2")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await expect(page.locator("h1")).to_have_text("mac-2")
        await page.keyboard.press("?")
        await expect(page.get_by_role("dialog")).to_contain_text("Keyboard")
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await page.go_back()
        await expect(page.locator("h1")).to_have_text("Macs")


@pytest.mark.ci
async def test_a_phone_has_the_whole_overview_with_two_broken_models(browser: Browser) -> None:
    store = MemoryTransport(CLOCK)
    leader = Put(key=keys.ELECTION_RECONCILER, value=b"mac-0/7 1.0")
    await store.commit([], [leader, *mac("mac-0"), *mac("mac-1"), *mac("mac-2")])
    parts = "weights 810 GiB, KV cache 64.0 GiB, prefill 25.3 GiB, process 768 MiB"
    macs = ", ".join(f"mac-{number} has 64.0 GiB for models" for number in range(3))
    why = f"0/3 nodes fit: 3 too small even when empty (need 900 GiB: {parts}; {macs})"
    refused = [
        Condition(type=type_, status=ConditionStatus.FALSE, reason="Unschedulable", message=why)
        for type_ in ("Available", "Placed")
    ]
    for name in ("giant", "titan"):
        status = ModelDeploymentStatus(desired_replicas=1, conditions=tuple(refused))
        key = keys.status_key("ModelDeployment", name)
        put = Put(key=key, value=codec.encode(status))
        await store.commit([], [codec.put_spec(deployment(name)), put])
    async with (
        running_dashboard(store) as dashboard,
        open_page(browser, dashboard.url, width=390) as (page, _),
    ):
        await page.goto("/")
        await expect(page.locator("h1")).to_contain_text("2 of 2 models do not answer")
        await expect(page.locator(".problems > li")).to_have_count(2)
        texts = page.locator(".problems p")
        assert not await texts.evaluate_all(
            "all => all.filter((p) => p.scrollHeight > p.clientHeight).length"
        )
        await expect(page.locator(".drawing")).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollHeight") <= 2_500
        await page.get_by_role("button", name="More").click()
        await page.locator("#account").get_by_role("link", name="Activity").click()
        await expect(page.locator("h1")).to_have_text("Activity")
        await expect(page.locator("#account")).to_be_hidden()
        marked = page.locator("header [aria-current]:visible")
        await expect(marked).to_have_text(["More"])


async def test_a_missing_object_and_a_missing_page_say_so(browser: Browser, site: Site) -> None:
    async with open_page(browser, site.url) as (page, _):
        await show(page, "/macs/mac-9", "mac-9")
        await expect(page.locator("main")).to_contain_text("There is no Mac of this name")


async def test_the_yaml_of_an_object_is_read_when_it_is_opened(
    browser: Browser, site: Site
) -> None:
    async with open_page(browser, site.url) as (page, _):
        await show(page, "/models/qwen", "qwen")
        await page.get_by_text("YAML").click()
        await expect(page.locator("details pre")).to_contain_text("kind: ModelDeployment")


async def test_a_key_opens_the_page_and_a_wrong_one_does_not(browser: Browser) -> None:
    store = MemoryTransport(CLOCK)
    await store.commit([], [put_key("viewer"), *mac("mac-1")])
    async with opened(browser, store, asks_for_keys=True) as (page, _):
        await page.goto("/macs")
        await page.get_by_label("API key").fill("sk-fleet-wrong")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_be_visible()
        await page.get_by_label("API key").fill("sk-viewer")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("link", name="mac-1")).to_be_visible()
        (cookie,) = await page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert await page.evaluate("document.cookie") == ""
        await page.reload()
        await expect(page.get_by_role("link", name="mac-1")).to_be_visible()


async def test_a_login_link_opens_the_page_once(browser: Browser) -> None:
    store = MemoryTransport(CLOCK)
    await store.commit([], mac("mac-1"))
    async with running_dashboard(store, asks_for_keys=True) as dashboard:
        link = f"/macs#login={(await issue_login_ticket(store, 'run1')).bearer}"
        async with open_page(browser, dashboard.url) as (page, _):
            await page.goto(link)
            await expect(page.get_by_role("link", name="mac-1")).to_be_visible()
            assert page.url == f"{dashboard.url}/macs"
            assert await page.evaluate("history.length") <= 2
            await page.reload()
            await expect(page.get_by_role("link", name="mac-1")).to_be_visible()
        async with open_page(browser, dashboard.url) as (page, _):
            await page.goto(link)
            await expect(page.get_by_role("alert")).to_contain_text("The login link was used")
            result = await Axe().run(page, options=WCAG)
            assert result.violations_count == 0, result.generate_report()
            # A further link in the same tab changes nothing but the fragment.
            again = (await issue_login_ticket(store, "run1")).bearer
            await page.evaluate("(ticket) => { location.hash = `login=${ticket}`; }", again)
            await expect(page.get_by_role("link", name="mac-1")).to_be_visible()


async def test_a_module_that_does_not_arrive_is_loaded_again(browser: Browser, site: Site) -> None:
    async with open_page(browser, site.url) as (page, faults):
        left = [1]

        async def lose_one(route: Route) -> None:
            if left:
                left.pop()
                await route.abort("connectionreset")
            else:
                await route.continue_()

        await page.route("**/static/*/screens/macs.js", lose_one)
        await page.goto("/macs")
        await expect(page.get_by_role("link", name="mac-1")).to_be_visible()
        assert left == []
        faults.found = [one for one in faults.found if "net::ERR" not in one]


@pytest.mark.ci
async def test_no_change_between_the_first_drawing_and_its_effects_is_missed(
    browser: Browser, site: Site
) -> None:
    """The state may arrive before the first frame: then the page must not wait for its next drawing."""
    async with open_page(browser, site.url) as (page, _):
        # Nothing draws the page later: no timer, and no event of the stream but the first.
        await page.add_init_script(
            """window.setInterval = () => 0;
            const add = EventSource.prototype.addEventListener;
            EventSource.prototype.addEventListener = function (name, act) {
              if (name === "snapshot") add.call(this, name, act);
            };"""
        )
        await page.goto("/macs")
        for _ in range(20):
            await page.reload()
            await expect(page.get_by_role("link", name="mac-1")).to_be_visible()


async def test_a_second_visit_asks_for_nothing_but_the_page_and_what_changes(
    browser: Browser, site: Site
) -> None:
    async with open_page(browser, site.url) as (page, _):
        await show(page, "/macs", "Macs")
        # The first state came with the page: no answer was waited for before it was shown.
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url.removeprefix(site.url)))
        await show(page, "/macs", "Macs")
        await expect(page.get_by_role("link", name="mac-1")).to_be_visible()
        sizes = (
            "performance.getEntriesByType('resource').map((one) => [one.name, one.transferSize])"
        )
        loaded = [name for name, size in await page.evaluate(sizes) if size and "/static/" in name]
        assert loaded == []
        paths = {one.partition("?")[0] for one in asked if not one.startswith("/static/")}
        assert paths == {"/macs", "/api/v1/stream"}


@pytest.mark.ci
@pytest.mark.etcd
async def test_a_killed_dashboard_comes_back_in_the_same_page(
    browser: Browser, tmp_path: Path
) -> None:
    async with (
        running_etcd(tmp_path / "etcd") as etcd,
        dashboard_process(str(etcd.address), tmp_path / "state") as dashboard,
    ):
        store = connect(etcd.address)
        await store.commit([], mac("mac-1"))
        await dashboard.start()
        async with open_page(browser, dashboard.url) as (page, faults):
            await page.goto("/macs")
            await expect(page.get_by_role("link", name="mac-1")).to_be_visible()
            await page.evaluate("window.isOld = true")
            await dashboard.end(signal.SIGKILL)
            await expect(page.locator("[data-state='lost']")).to_be_visible()
            await expect(page.get_by_role("link", name="mac-1")).to_be_visible()
            await store.commit([], mac("mac-2"))
            await dashboard.start()
            await expect(page.locator("[data-state]")).to_have_text("live")
            await expect(page.get_by_role("link", name="mac-2")).to_be_visible()
            await expect(page.locator("tbody tr")).to_have_count(2)
            assert await page.evaluate("window.isOld")
            # The browser reports the connections that were refused meanwhile.
            faults.found = [fault for fault in faults.found if "net::ERR" not in fault]
        await store.close()
