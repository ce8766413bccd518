"""Screens of logs, keys, Git, the map and time in a real browser."""

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from operator import itemgetter
from pathlib import Path

import pytest
from aiohttp import web
from playwright.async_api import Browser, expect

from dashboard.api.log_routes import PageLines
from insight.logs import LineFilter, LineReader
from machinery.prometheus import render
from nodeagent.hardware import load
from reconciler.deployments.rollout.revisions import template_hash
from schemas.deployment import ModelDeployment
from schemas.gitsource import Drift, DriftedField, GitSource, GitSourceSpec, GitSourceStatus
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from schemas.node import ModelReport, NodeLifeStatus
from schemas.records import ReconcilerLease
from schemas.replica import RankAssignment, Replica, ReplicaSpec
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Delete, Put
from tests.support.browser import check_access, needs_browser, open_page
from tests.support.dashboard_fleets import put_fleet, put_key
from tests.support.dashboard_site import HOSTILE, TOO_WARM, Site, opened, running_site
from tests.support.dashboards import CLOCK, running_dashboard, serving
from tests.support.gateway_calls import send_chats, streams_three_tokens
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import World, running_gateway
from tests.support.macs import mac
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.reconciler_world import pool
from tests.support.world import GEOMETRY, PROOF, deployment, revision

_CAPTURES = Path(__file__).parents[1] / "nodeagent/hardware/captures/load"
LOAD_CAPTURES = (_CAPTURES / "ioaccelerator.txt", _CAPTURES / "macmon.json")
pytestmark = [needs_browser, pytest.mark.browser]


@pytest.fixture(scope="module")
async def site() -> AsyncIterator[Site]:
    async with running_site() as found:
        yield found


def test_lines_are_filtered_and_cut_where_they_are_too_many() -> None:
    lines = PageLines(LineReader(LineFilter(text="B")), most=2)
    assert lines.add(b"abc\nxyz\nb", 1.0) == b"abc\n"
    assert lines.add(b"b\nbbb\nbbbb\nbbbbb\n", 1.5) == b"bb\n"
    shown = lines.add(b"b after\n", 2.0)
    assert b"3 lines were left out here" in shown
    assert shown.endswith(b"b after\n")
    assert lines.add(b"b last", 3.0) == b""
    assert lines.end() == b"b last\n"


async def test_a_log_is_followed_filtered_and_paused(browser: Browser, site: Site) -> None:
    (row,) = (await site.dashboard.get("/api/v1/view/gateways"))["rows"]
    gateway = row[0]
    async with open_page(browser, site.url) as (page, _):
        await page.goto("/logs")
        choices = page.locator(".toolbar select").first
        await expect(choices.locator("option", has_text="dashboard/run1")).to_have_count(1)
        await choices.select_option(f"gateway/{gateway}")
        await expect(page.locator(".chips li")).to_contain_text(gateway)
        body = {"model": HOSTILE, "messages": [{"role": "user", "content": "x"}]}
        await site.dashboard.post("/chat/v1/chat/completions", body, 404)
        await expect(page.locator(".chips .problem")).to_have_count(0)
        await check_access(page)
        # Another age reads it anew.
        async with page.expect_response(lambda one: "since=1h" in one.url) as answer:
            await page.get_by_label("Since").select_option("1h")
        assert (await answer.value).status == 200
        await expect(page.locator(".chips .problem")).to_have_count(0)
        wrong = await site.dashboard.get(f"/api/v1/logs?of=gateway/{gateway}&since=soon", 400)
        assert wrong["error"]["param"] == "since"
        wrong = await site.dashboard.get("/api/v1/logs?of=node/", 400)
        assert "is not node/NAME" in wrong["error"]["message"]
        await page.get_by_label("Contains").fill("no such text")
        await expect(page.locator(".log .line")).to_have_count(0)
        assert await page.evaluate("window.hacked") is None


async def test_keys_are_listed_by_role_and_never_with_their_hash(browser: Browser) -> None:
    store = MemoryTransport(CLOCK)
    await put_fleet(store)
    await store.commit([], [put_key("user"), put_key("admin")])
    async with running_dashboard(store, asks_for_keys=True) as running:
        for role, count in (("user", 1), ("admin", 2)):
            session = await running.log_in(f"sk-{role}")
            found = await running.get("/api/v1/keys", headers=session)
            assert len(found["keys"]) == count
            assert "hash" not in str(found)
        async with open_page(browser, running.url) as (page, _):
            await page.goto("/keys")
            await page.get_by_label("API key").fill("sk-admin")
            await page.keyboard.press("Enter")
            await expect(page.locator("tbody tr").first).to_contain_text("admin")
            await check_access(page)
            # The session ends with its key, and the login says so.
            await store.commit([], [Delete(key=keys.named(keys.API_KEY_PREFIX, "admin"))])
            await expect(page.get_by_role("alert")).to_contain_text("the key admin was deleted")


async def test_a_user_sees_chat_and_its_own_key_alone(browser: Browser) -> None:
    store = MemoryTransport(CLOCK)
    await store.commit([], [put_key("user")])
    async with opened(browser, store, asks_for_keys=True) as (page, _):
        await page.goto("/keys")
        await page.get_by_label("API key").fill("sk-user")
        await page.keyboard.press("Enter")
        await expect(page.locator("h1")).to_have_text("Settings")
        assert await page.locator("header nav a").all_text_contents() == ["Chat"]
        await page.goto("/")
        await expect(page.locator("h1")).to_have_text("Chat")
        # The settings, and a link that a colleague sent, say what the key may, what not, and who changes it.
        await page.get_by_role("link", name="What else it may").click()
        rights = page.get_by_role("region", name="What you may do")
        may, may_not = (rights.locator("dd").nth(at) for at in (0, 1))
        await expect(rights).to_contain_text("The key user, role user, may")
        await expect(may.locator("li")).to_have_text(
            ["chat with models, see its own key and its use"]
        )
        await expect(may_not.locator("li")).to_contain_text(
            ["(role viewer)", "(role operator)", "(role admin)"]
        )
        await expect(rights).to_contain_text("An administrator makes another key")
        await page.goto("/models/qwen")
        await expect(page.locator("main")).to_contain_text("this page needs the role viewer")
        await expect(rights).to_contain_text("An administrator makes another key")
        await expect(page.get_by_role("link", name="Chat").last).to_be_visible()
        await page.get_by_role("button", name="user").click()
        await check_access(page)
        await page.get_by_role("button", name="Log out").click()
        await expect(page.get_by_role("alert")).to_have_text("You have logged out.")


async def test_git_sources_and_the_map_are_shown(browser: Browser, site: Site) -> None:
    spec = GitSourceSpec(repository="https://git.example.com/fleet.git", path="sites")
    source = GitSource(metadata=ObjectMeta(name="fleet", uid="g", generation=1), spec=spec)
    value = DriftedField(path="spec.replicas", wanted="2", actual=HOSTILE)
    drift = (
        Drift(kind="ModelDeployment", name="qwen", fields=("spec.replicas",), values=(value,)),
        Drift(kind="ModelDeployment", name="old", fields=("spec.priority",)),
        Drift(kind="NodePool", name="lab", fields=()),
    )
    status = Put(
        key=keys.status_key("GitSource", "fleet"), value=codec.encode(GitSourceStatus(drift=drift))
    )
    await site.store.commit([], [codec.put_spec(source), status])
    async with open_page(browser, site.url) as (page, _):
        await page.goto("/git")
        await expect(page.locator("main")).to_contain_text("https://git.example.com/fleet.git")
        drifted = page.locator("section li", has_text="ModelDeployment/qwen")
        await expect(drifted.locator("del")).to_have_text("2")
        await expect(drifted.locator("ins")).to_have_text(HOSTILE)
        await expect(page.locator("main")).to_contain_text("ModelDeployment/old: spec.priority")
        await expect(page.locator("main")).to_contain_text("NodePool/lab: deleted in the fleet")
        await check_access(page)
        # It comes on the stream: nothing asks for it.
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        suspended = source.model_copy(update={"spec": spec.model_copy(update={"suspend": True})})
        await site.store.commit([], [codec.put_spec(suspended)])
        await expect(page.locator("h2")).to_contain_text("suspended")
        assert asked == []
        await page.goto("/git/fleet")
        await expect(page.locator("h1")).to_have_text("Git source")
        await expect(page.locator("h2")).to_contain_text("suspended")
        await page.goto("/map")
        await expect(page.locator('.drawing a[data-mac="mac-1"]')).to_be_visible()
        await check_access(page)


@pytest.mark.ci
async def test_degrees_and_watts_of_a_mac_are_on_its_page(browser: Browser) -> None:
    """The metrics that an agent exports of a Mac with macmon, from captures of its tools."""
    ioreg, macmon = (capture.read_text() for capture in LOAD_CAPTURES)
    sensors = load.mac_sensors(ioreg, macmon, "")
    text = render(load.node_families(load.LoadReading(cpu_ratio=0.5, sensors=sensors)))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=text)

    store = MemoryTransport(CLOCK)
    expected = "GPU 63 % · CPU 50 % · 51 °C · 42 W"
    async with (
        serving("/metrics", metrics) as (url,),
        running_dashboard(store) as running,
        open_page(browser, running.url, width=1200) as (page, _),
    ):
        status = node_status("mac-1", memory_gib=64).model_copy(update={"agent_url": url})
        writes = [put_node("mac-1", status), put_lease("mac-1"), *mac("book-of-anna", TOO_WARM)]
        await store.commit([], writes)
        await page.goto("/macs/mac-1")
        await expect(page.locator("main")).to_contain_text(expected)
        await page.goto("/macs")
        await expect(page.locator("tbody tr", has_text="mac-1")).to_contain_text("63 %, 0")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 1200
        await store.commit([], [codec.put_spec(deployment())])
        await page.goto("/")
        await expect(page.locator(".figure-card", has_text="Power")).to_contain_text("42 W")


async def test_a_line_of_the_last_hour_keeps_away_from_its_text(
    browser: Browser, site: Site
) -> None:
    """One that rises touches the top of its box alone; one of a constant value is far from it."""
    at = CLOCK.now() - timedelta(minutes=4)
    lines = {
        "requests_per_second": [470.0] * 4,
        "output_tokens_per_second": [1, 2, 3, 9],
        "first_token_p95": [0.0] * 4,
        "error_ratio": [None] * 4,
    }
    metrics = {name: {"mean": mean} for name, mean in lines.items()}
    series = {"from": at.isoformat(), "stepSeconds": 60, "metrics": metrics}
    async with open_page(browser, site.url) as (page, _):
        await page.route("**/api/v1/series?*", lambda route: route.fulfill(json=series))
        await page.goto("/")
        cards = page.locator(".figure-card", has=page.locator(".sparkline"))
        await expect(cards).to_have_count(3)
        gaps = []
        for card in await cards.all():
            line = await card.locator(".sparkline path").bounding_box()
            note = await card.locator(".note").bounding_box()
            assert line is not None
            assert note is not None
            gaps.append(line["y"] - note["y"] - note["height"])
        flat, rising, zero = gaps
        assert rising > 3
        assert zero > flat > 10


async def test_a_mac_has_its_models_its_pools_and_the_age_of_its_last_word(
    browser: Browser,
) -> None:
    store = MemoryTransport(CLOCK)
    models = (
        ModelReport(path="qwen", geometry=GEOMETRY),
        ModelReport(path="hub/big", missing_bytes=3 << 30),
        ModelReport(path="odd", reason="ModelInvalid", message="config.json is missing"),
    )
    status = node_status("mac-1").model_copy(update={"models": models})
    await store.commit([], [put_node("mac-1", status), put_lease("mac-1")])
    async with opened(browser, store) as (page, _):
        await page.goto("/macs/mac-1")
        disk = page.locator("[data-disk] li")
        await expect(disk).to_contain_text(
            ["qwen on its disk", "3.0 GiB to fetch", "odd not usable: config.json is missing"]
        )
        main, word = page.locator("main dl"), page.locator("[data-word]")
        await expect(main).to_contain_text("Poolsnone")
        await expect(word).to_have_text("within seconds: its agent renews its lease")
        # A new pool takes it in, and its agent falls silent.
        await store.commit([], [codec.put_spec(pool("lab", nodes=("mac-1",)))])
        await expect(main).to_contain_text("Poolslab")
        silent = Condition(
            type="Ready",
            status=ConditionStatus.FALSE,
            reason="LeaseExpired",
            last_transition_time=CLOCK.now() - timedelta(hours=2, minutes=5),
        )
        life = codec.encode(NodeLifeStatus(conditions=(silent,)))
        put = Put(key=keys.node_life_key("mac-1"), value=life)
        await store.commit([], [put, Delete(key=keys.node_lease_key("mac-1"))])
        await expect(word).to_have_text("2h ago")
        await check_access(page)


@pytest.mark.ci
async def test_two_revisions_and_two_moments_of_a_model_are_compared(
    browser: Browser, tmp_path: Path
) -> None:
    store = MemoryTransport(CLOCK)
    models = [deployment(context_length=1024 * number) for number in (1, 2, 3)]
    revisions = [revision(one, number) for number, one in enumerate(models, 1)]
    await store.commit([], [codec.put_spec(api_object) for api_object in (*revisions, models[0])])
    async with opened(browser, store, state_dir=tmp_path) as (page, running):
        path = "/api/v1/objects/ModelDeployment/qwen/changes"
        await running.until(path, itemgetter("changes"))
        await store.commit([], [codec.put_spec(models[2])])
        await running.until(path, lambda found: len(found["changes"]) > 1)
        await page.goto("/models/qwen")
        rollout = page.get_by_role("region", name="Rollout")
        await rollout.get_by_text("Compare two revisions").click()
        shown = rollout.locator("[data-difference]")
        await expect(shown).to_contain_text("-contextLength: 1024")
        await expect(shown).to_contain_text("+contextLength: 3072")
        versions = rollout.locator(".toolbar select")
        await versions.first.select_option("revision 2")
        await expect(shown).to_contain_text("-contextLength: 2048")
        await versions.last.select_option("revision 2")
        await expect(page.get_by_text("They are the same.")).to_be_visible()
        await rollout.get_by_text("Compare two revisions").click()
        await page.get_by_text("Recorded changes").click()
        await expect(page.locator("details[open] [data-difference]")).to_contain_text("3072")
        await expect(page.locator("details[open] tbody tr")).to_have_count(2)
        await check_access(page)


def put_replica(of: ModelDeployment, number: int, created: datetime) -> Put:
    """Return the write of a replica that runs the deployment's version."""
    spec = ReplicaSpec(
        deployment=of.name,
        template=template_hash(of),
        model=of.spec.model,
        served_names=(of.name,),
        context_length=of.spec.context_length,
        concurrency=1,
        ranks=(RankAssignment(node="mac-1", memory=PROOF),),
    )
    name = f"{of.name}-{number}"
    metadata = ObjectMeta(name=name, uid="uid", creation_timestamp=created)
    return codec.put_spec(Replica(metadata=metadata, spec=spec))


@pytest.mark.ci
async def test_processes_are_listed_with_their_releases(browser: Browser) -> None:
    store = MemoryTransport(CLOCK)
    lease = ReconcilerLease(identity="mac-1/7 1.2.3", url="http://127.0.0.1:9")
    key = keys.named(keys.RECONCILER_LEASE_PREFIX, "mac-1")
    leader = Put(key=keys.ELECTION_RECONCILER, value=lease.identity.encode())
    await store.commit([], [Put(key=key, value=codec.encode(lease)), leader])
    async with (
        running_dashboard(store) as dashboard,
        open_page(browser, dashboard.url) as (page, _),
    ):
        await page.goto("/settings?tab=fleet")
        row = page.locator("tr", has_text="reconciler/mac-1")
        await expect(row.locator("td")).to_have_text(
            ["reconciler/mac-1", re.compile("leads"), "http://127.0.0.1:9", "1.2.3", "log"]
        )


async def test_the_traffic_of_a_rollout_is_shown_by_version(browser: Browser) -> None:
    store = MemoryTransport(CLOCK)
    old, new = deployment(replicas=2), deployment(replicas=2, context_length=2048)
    yesterday = CLOCK.now() - timedelta(days=1)

    async with (
        running_gateway(store) as gateway,
        running(FakeEngine("qwen-0", streams_three_tokens)) as first,
        running(FakeEngine("qwen-1", streams_three_tokens)) as second,
    ):
        await World(store).serve("qwen", first, second)
        await gateway.knows("qwen", ready=2)
        revisions = [revision(one, number) for number, one in enumerate((old, new), 1)]
        puts = [put_replica(old, number, yesterday) for number in (0, 1)]
        await store.commit(
            [], [*(codec.put_spec(api_object) for api_object in (*revisions, new)), *puts]
        )
        async with (
            running_dashboard(store) as running_one,
            open_page(browser, running_one.url) as (page, _),
        ):
            while not (first.calls and second.calls):
                async with asyncio.TaskGroup() as group:
                    for _ in range(4):
                        group.create_task(send_chats(running_one.http, gateway, 1, model="qwen"))
            counts = [len(engine.calls) for engine in (first, second)]
            await page.goto("/models/qwen")
            await expect(page.locator("h1")).to_have_text("qwen")
            rows = page.locator("[data-versions] tbody tr")
            await expect(rows).to_have_count(0)
            # The second replica is replaced under its name: the requests of before were not its own.
            later = CLOCK.now() + timedelta(hours=1)
            await store.commit([], [put_replica(new, 1, later)])
            await expect(rows).to_have_count(2)
            await expect(rows.first).to_contain_text("revision 1")
            await expect(rows.first).to_contain_text("(100 %)")
            await expect(rows.last).to_contain_text("revision 2, the newest")
            await expect(rows.last).to_contain_text("0 (0 %)")
            await store.commit([], [put_replica(new, 1, yesterday)])
            for row, count in zip((rows.first, rows.last), counts, strict=True):
                share = f"{count} ({int(100 * count / sum(counts) + 0.5)} %)"
                await expect(row.locator("td").nth(2)).to_have_text(share)
            await check_access(page)


@pytest.mark.ci
async def test_each_of_a_thousand_macs_in_the_picture_leads_to_its_page(browser: Browser) -> None:
    store = MemoryTransport(CLOCK)
    for at in range(0, 1000, 50):
        await store.commit([], [p for number in range(at, at + 50) for p in mac(f"m{number:04}")])
    async with opened(browser, store) as (page, _):
        await page.goto("/macs?tab=picture")
        drawing = page.get_by_role("group", name="1000 Macs")
        await expect(drawing.locator("a")).to_have_count(1000)
        await drawing.locator("a").nth(7).click()
        await expect(page.locator("h1")).to_have_text("m0007")


@pytest.mark.ci
async def test_an_earlier_moment_is_shown_without_actions(browser: Browser, tmp_path: Path) -> None:
    store = MemoryTransport(CLOCK)
    await put_fleet(store)
    async with opened(browser, store, state_dir=tmp_path, can_write=True) as (page, _):
        await page.goto("/macs")
        await expect(page.get_by_role("link", name="mac-3")).to_be_visible()
        await asyncio.sleep(
            7
        )  # the earlier moment: the record keeps a moment for every few seconds
        gone = [keys.spec_key("Node", "mac-3"), keys.status_key("Node", "mac-3")]
        await store.commit([], [Delete(key=k) for k in (*gone, keys.node_lease_key("mac-3"))])
        await expect(page.get_by_role("link", name="mac-3")).to_have_count(0)
        await page.keyboard.press("[")
        slider = page.get_by_role("slider", name="Moment")
        await slider.focus()
        for _ in range(5):  # a second each
            await page.keyboard.press("ArrowLeft")
        await expect(page.locator("[data-state='past']")).to_contain_text("as it was")
        await expect(page.get_by_role("link", name="mac-3")).to_be_visible()
        await check_access(page)
        await page.get_by_role("link", name="Picture").click()  # the picture is of that moment, too
        assert "at=" in page.url
        await expect(page.locator(".drawing a[data-mac=mac-3]")).to_be_visible()
        # The moment is in the address: it stays over links and a load.
        await page.locator(".drawing a[data-mac=mac-1]").click()
        await page.reload()
        await expect(page.locator("[data-past]")).to_contain_text("Actions are off")
        await expect(page.get_by_role("button", name="Cordon", exact=True)).to_have_count(0)
        await page.get_by_role("button", name="Now", exact=True).click()
        await expect(page.locator("[data-state]")).to_have_text("live")
        await expect(page.get_by_role("button", name="Cordon", exact=True)).to_be_visible()
        assert "at=" not in page.url
        # Nothing of the present is shown below a time before the record.
        await page.goto("/macs?at=2020-01-01T00:00:00Z")
        await expect(page.get_by_role("alert")).to_contain_text("The record begins")
        await expect(page.get_by_role("link", name="mac-1")).to_have_count(0)
