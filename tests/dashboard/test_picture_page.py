"""The picture of a fleet: its layout for few and many Macs, and its keys, table and files in a real browser."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from playwright.async_api import Browser, Page, expect

from gateway.limits import GatewayLimits
from schemas.deployment import ModelDeploymentStatus
from schemas.meta import Condition, ConditionStatus
from schemas.replica import MemoryProof, ReplicaStatus
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put
from tests.support.broken_objects import put_asleep
from tests.support.browser import check_access, needs_browser, open_page
from tests.support.dashboard_fleets import put_fleet
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard
from tests.support.fleetctl_manifests import put_replica
from tests.support.gateway_calls import CHAT
from tests.support.gateway_engine_scripts import DONE, delta
from tests.support.gateway_fake_engine import Call, FakeEngine
from tests.support.gateway_fake_engine import running as running_engine
from tests.support.gateway_world import World, endpoint, running_gateway
from tests.support.gateway_world import deployment as gateway_deployment
from tests.support.macs import mac
from tests.support.world import GIB, deployment

MIB = 1 << 20
pytestmark = [needs_browser, pytest.mark.browser]
_PICTURE = "/macs?tab=picture"
_LAY_OUT = """
async ({ sizes, needs, width }) => {
  const main = document.querySelector('script[type="module"]').src;
  const { layoutPicture, neighbour } = await import(new URL("picture_layout.js", main).pathname);
  const fill = (bytes) => ({ replica: "r", model: "m", bytes, weightsBytes: bytes / 2, kvBytes: bytes / 4, isReady: true, percent: null });
  const macs = sizes.map((roomBytes, at) => ({ name: `mac-${at}`, title: "", state: "online", isCordoned: false, site: "", chip: "", roomBytes, fills: [fill(roomBytes / 2)] }));
  const groups = [{ name: "g", members: ["mac-1", "mac-0"], isMesh: false, gbPerSecond: 7 }];
  const outside = needs.map((bytes) => ({ model: "big", count: 1, bytes }));
  const { cells, ...rest } = layoutPicture({ macs, groups, outside }, width);
  const walk = ["ArrowRight", "ArrowDown", "ArrowUp", "End"].map((key) => neighbour(cells, "mac-1", key));
  return { ...rest, walk, cells: cells.map(({ mac, x, y, width, block, fills }) => ({ name: mac.name, room: mac.roomBytes, x, y, width, block, parts: fills[0].parts })) };
}
"""
_HUES = """
async (fleets) => {
  const main = document.querySelector('script[type="module"]').src;
  const { huesOf } = await import(new URL("picture.js", main).pathname);
  const paint = (models) => huesOf({ macs: [{ fills: models.map((model) => ({ model })) }], outside: [] });
  return fleets.map((models) => Object.fromEntries([...paint(models)].map(([model, { color, pattern }]) => [model, `${color} ${pattern}`])));
}
"""


@pytest.fixture(scope="module")
async def running() -> AsyncIterator[RunningDashboard]:
    store = MemoryTransport(CLOCK)
    await put_fleet(store)
    owner = deployment(name="llama", replicas=1)
    proof = MemoryProof(
        weights_bytes=6 * GIB, kv_cache_bytes=2 * GIB, activation_bytes=GIB, overhead_bytes=GIB
    )
    await store.commit([], [codec.put_spec(owner), put_replica(owner, 0, "mac-2", memory=proof)])
    async with running_dashboard(store) as dashboard:
        yield dashboard


async def lay_out(page: Page, *sizes: int, width: int, needs: tuple[int, ...] = ()) -> Any:
    return await page.evaluate(
        _LAY_OUT, {"sizes": list(sizes), "needs": list(needs), "width": width}
    )


@pytest.mark.parametrize("width", [360, 1240])
@pytest.mark.parametrize("count", [1, 2, 7, 20, 60, 200, 1000])
async def test_macs_are_true_to_scale_and_apart(
    browser: Browser, running: RunningDashboard, count: int, width: int
) -> None:
    sizes = [(16, 64, 36, 512)[at % 4] * GIB for at in range(count)]
    async with open_page(browser, running.url) as (page, _):
        await page.goto("/macs")
        found = await lay_out(page, *sizes, width=width)
    assert len(found["cells"]) == count
    for cell in found["cells"]:
        block = cell["block"]
        assert cell["x"] + cell["width"] <= width + 1
        assert block["width"] == pytest.approx(max(4, cell["room"] * found["scale"]))
        parts = cell["parts"]
        assert sum(part["width"] for part in parts.values()) <= block["width"] + 0.01
        assert parts["weights"]["width"] == pytest.approx(
            cell["room"] / 4 * found["scale"], rel=0.2
        )
    rows: dict[float, list[Any]] = {}
    for cell in found["cells"]:
        rows.setdefault(cell["y"], []).append(cell)
    for row in rows.values():
        ordered = sorted(row, key=lambda cell: cell["x"])
        for left, right in itertools.pairwise(ordered):
            assert left["x"] + max(left["width"], left["block"]["width"]) < right["x"]
    assert found["height"] < (1400 if width > 1000 else 140 * count + 400)


async def test_a_group_is_together_and_what_fits_nowhere_is_cut_at_twice_the_largest(
    browser: Browser, running: RunningDashboard
) -> None:
    async with open_page(browser, running.url) as (page, _):
        await page.goto("/macs")
        found = await lay_out(page, *(64 * GIB,) * 6, width=1240, needs=(100 * GIB, 900 * GIB))
    # Rank 0 of the group comes first, and its cable is as thick as its bandwidth.
    assert [cell["name"] for cell in found["cells"]][:2] == ["mac-1", "mac-0"]
    (group,) = found["groups"]
    assert len(group["outlines"]) == 1
    assert group["thickness"] == pytest.approx(6)
    first, second = found["outside"]
    widest = max(cell["block"]["width"] for cell in found["cells"])
    assert first["block"]["width"] == pytest.approx(widest * 100 / 64)
    assert not first["isCut"]
    assert second["block"]["width"] <= 2 * widest + 1
    assert second["isCut"]
    assert found["walk"] == ["mac-0", "mac-3", "mac-1", "mac-5"]


async def test_a_model_keeps_its_colour_when_others_come(
    browser: Browser, running: RunningDashboard
) -> None:
    """`aya` and `zeta` have hues of their own, before and after the others by name; `llama` has that of `deep`."""
    was = ["chat", "deep", "llama-70b", "qwen-coder"]
    many = [f"model-{number}" for number in range(30)]
    fleets = [was, ["aya", *was], [*was, "zeta"], [*was, "llama"], ["chat", "llama"], many]
    async with open_page(browser, running.url) as (page, _):
        await page.goto("/macs")
        first, *more, alone, crowd = await page.evaluate(_HUES, fleets)
    for paints in more:
        assert {name: paints[name] for name in was} == first
        assert len(set(paints.values())) == 5
        assert all(paint.endswith(" 0") for paint in paints.values())
    assert alone["llama"] == first["deep"]
    assert len(set(crowd.values())) == 24


async def test_the_legend_shows_colours_that_are_drawn_alone(browser: Browser) -> None:
    """A replica that is thinner than a line on its Mac is named without a colour."""
    store = MemoryTransport(CLOCK)
    await put_fleet(store)
    proof = MemoryProof(
        weights_bytes=MIB, kv_cache_bytes=MIB, activation_bytes=MIB, overhead_bytes=MIB
    )
    tiny = deployment(name="tiny")
    status = ModelDeploymentStatus(desired_replicas=1, replicas=1)
    status_put = Put(key=keys.status_key("ModelDeployment", "tiny"), value=codec.encode(status))
    replica = put_replica(tiny, 0, "mac-1", memory=proof)
    await store.commit([], [codec.put_spec(tiny), replica, status_put])
    async with (
        running_dashboard(store) as dashboard,
        open_page(browser, dashboard.url) as (page, _),
    ):
        await page.goto(_PICTURE)
        legend = page.locator("figcaption .legend")
        coloured = legend.locator("li", has=page.locator("svg"))
        await expect(coloured).to_have_text(["long", "qwen"])
        await expect(legend).to_contain_text("too small to see: tiny")


async def test_the_picture_is_walked_by_keys_and_says_all_in_words(
    browser: Browser, running: RunningDashboard
) -> None:
    async with open_page(browser, running.url) as (page, _):
        await page.goto(_PICTURE)
        drawing = page.locator(".drawing")
        await expect(drawing).to_have_attribute(
            "aria-label", "3 Macs, 37 GiB of 48 GiB free for models. Arrow keys move between Macs."
        )
        macs = drawing.locator("a[data-mac]")
        await expect(macs).to_have_count(3)
        await expect(macs.nth(1)).to_have_attribute(
            "aria-label",
            "mac-2, online: 6.0 GiB of 16 GiB free; llama-0 10 GiB (weights 6.0 GiB, KV cache 2.0 GiB), not ready",
        )
        # A replica that fits nowhere has the size that the planner proves.
        outside = drawing.get_by_role("link", name="long: 1 replica without a place, 35 GiB each")
        await expect(outside).to_be_visible()
        await check_access(page)
        await macs.first.focus()
        await page.keyboard.press("ArrowRight")
        await expect(macs.nth(1)).to_be_focused()
        assert await drawing.locator('a[data-mac][tabindex="0"]').count() == 1
        await page.get_by_text("The picture as a table").click()
        await expect(page.locator("figure tbody tr", has_text="mac-2")).to_contain_text(
            "llama-0 10 GiB"
        )
        await check_access(page)
        await macs.nth(1).focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("h1")).to_have_text("mac-2")


_COUNT_DOTS = """
(drawing) => {
  window.dots = 0;
  const count = (changes) => changes.forEach(({ addedNodes }) => (window.dots += [...addedNodes].filter((node) => node.tagName === "circle" && node.getAnimations().length).length));
  new MutationObserver(count).observe(drawing, { subtree: true, childList: true });
}
"""


@pytest.mark.parametrize(("motion", "dots"), [("no-preference", 1), ("reduce", 0)])
async def test_a_request_in_flight_falls_on_its_replica_unless_motion_is_reduced(
    browser: Browser, motion: Literal["no-preference", "reduce"], dots: int
) -> None:
    may_end = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(delta("a"))
        await may_end.wait()
        await call.chunk(DONE)
        await call.send(b"0\r\n\r\n")

    store, owner = MemoryTransport(CLOCK), gateway_deployment("qwen")
    ready = Condition(type="Ready", status=ConditionStatus.TRUE, reason="Serving")
    status = Put(
        key=keys.status_key("Replica", "qwen-0"),
        value=codec.encode(ReplicaStatus(conditions=(ready,))),
    )
    await store.commit([], [*mac("mac-1"), put_replica(owner, 0, "mac-1"), status])
    async with (
        running_gateway(store, GatewayLimits(drain_timeout_s=0.0)) as gateway,
        running_engine(FakeEngine("qwen-0", answer)) as engine,
        running_dashboard(store) as dashboard,
        open_page(browser, dashboard.url) as (page, _),
        asyncio.TaskGroup() as group,
    ):
        url = f"http://127.0.0.1:{engine.port}"
        await World(store).put(owner, endpoint("qwen-0", "qwen", url, node="mac-1"))
        await gateway.knows("qwen", ready=1)
        await page.emulate_media(reduced_motion=motion)
        await page.goto(_PICTURE)
        block, caption = page.locator(".drawing a[data-mac]"), page.locator("figcaption")
        await expect(block).to_have_attribute("aria-label", re.compile("qwen-0 4 B"))
        await expect(caption).not_to_contain_text("in flight")
        await page.locator(".drawing").evaluate(_COUNT_DOTS)
        body = {"model": "qwen", "messages": [{"role": "user", "content": "x"}], "stream": True}
        asking = group.create_task(read_answer(dashboard.http, gateway.url + CHAT, body))
        await expect(caption).to_contain_text("1 request in flight")
        await expect(block).to_have_attribute("aria-label", re.compile("1 request in flight"))
        assert await page.evaluate("window.dots") == dots
        may_end.set()
        await expect(caption).not_to_contain_text("in flight")
        assert await asking == 200


async def read_answer(http: aiohttp.ClientSession, url: str, body: object) -> int:
    async with http.post(url, json=body) as response:
        await response.read()
        return response.status


async def test_a_mac_that_sleeps_has_a_moon_and_commands_are_copied(browser: Browser) -> None:
    store = MemoryTransport(CLOCK)
    await store.commit([], [*mac("mac-1"), *put_asleep("mac-2")])
    async with (
        running_dashboard(store) as dashboard,
        open_page(browser, dashboard.url) as (page, _),
    ):
        await page.goto(_PICTURE)
        asleep, awake = (page.get_by_role("link", name=f"{one},") for one in ("mac-2", "mac-1"))
        await expect(asleep).to_have_attribute("aria-label", re.compile("mac-2, asleep"))
        await expect(asleep.locator("path[d^='M6 0A6']")).to_have_count(1)
        await expect(awake.locator("path[d^='M6 0A6']")).to_have_count(0)
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await page.goto("/macs")
        await page.get_by_role("button", name="Copy: fleetctl get nodes").click()
        await expect(page.get_by_text("Copied")).to_be_visible()
        assert await page.evaluate("navigator.clipboard.readText()") == "fleetctl get nodes"


async def test_a_picture_for_others_has_no_names_and_both_themes(
    browser: Browser, running: RunningDashboard
) -> None:
    async with open_page(browser, running.url) as (page, _):
        await page.goto(_PICTURE)
        await page.get_by_text("Share", exact=True).click()
        text = Path(await download(page, "Download SVG")).read_text()
        assert "mac-" not in text
        assert "llama" not in text
        assert "model 1" in text
        assert "3 Macs, 37 GiB of 48 GiB free for models" in text
        assert "prefers-color-scheme:dark" in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        await page.get_by_label("With names").check()
        assert "mac-2" in Path(await download(page, "Download SVG")).read_text()
        picture = Path(await download(page, "Download PNG")).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert int.from_bytes(picture[16:20]) == 2 * 1248


async def download(page: Page, name: str) -> str:
    async with page.expect_download() as found:
        await page.get_by_role("button", name=name).click()
    return str(await (await found.value).path())
