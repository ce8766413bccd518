"""Apply and actions in a real browser: errors by line, the preview first, roles, and what is shown after a conflict."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, expect

from reconciler.deployments.rollout.revisions import template_hash
from schemas.deployment import CanaryStatus, ModelDeployment, ModelDeploymentStatus
from schemas.rollout import Canary, CanaryStep, Rollout
from store import codec, keys, objects
from store.memory import MemoryTransport
from store.port import Put
from tests.support.browser import check_access, needs_browser, open_page
from tests.support.dashboard_fleets import MANIFEST, put_fleet, put_key
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard
from tests.support.fleetctl_manifests import put_replica
from tests.support.world import deployment, revision

pytestmark = [needs_browser, pytest.mark.browser]


@pytest.fixture
async def running() -> AsyncIterator[RunningDashboard]:
    store = MemoryTransport(CLOCK)
    await put_fleet(store)
    async with running_dashboard(store, can_write=True) as dashboard:
        yield dashboard


async def test_a_manifest_is_mended_previewed_and_applied(
    browser: Browser, running: RunningDashboard
) -> None:
    async with open_page(browser, running.url) as (page, _):
        await page.goto("/try")
        area = page.get_by_label("Manifest, YAML")
        await area.fill(MANIFEST.replace("concurrency", "concurency"))
        alert = page.get_by_role("alert")
        await expect(alert).to_contain_text("Did you mean concurrency?")
        await expect(alert).to_contain_text("spec.concurency")
        await expect(page.locator(".line-numbers .wrong")).to_have_text("10")
        await check_access(page)
        await page.get_by_role("button", name="line 10").click()
        assert await area.evaluate("(area) => area === document.activeElement")
        await expect(page.get_by_role("button", name="Apply these changes")).to_have_count(0)
        await area.fill(MANIFEST)
        await expect(page.locator(".diff .added").last).to_be_visible()
        await expect(page.locator("[data-plan]")).to_contain_text("placed")
        await check_access(page)
        # Another writer is faster: nothing is overwritten, and the new difference is shown.
        await running.store.commit([], [codec.put_spec(deployment(name="small", replicas=5))])
        await page.get_by_role("button", name="Apply these changes").click()
        await expect(page.get_by_role("alert")).to_contain_text("changed after the preview")
        await expect(page.locator(".diff .removed").first).to_be_visible()
        await page.get_by_role("button", name="Apply these changes").click()
        await expect(page.locator("[data-done]")).to_contain_text("configured")
        obj = await objects.get(running.store, ModelDeployment, "small")
        assert obj is not None
        assert obj.spec.context_length == 2048


async def test_a_change_is_put_back_to_the_state_before_it(
    browser: Browser, running: RunningDashboard
) -> None:
    models = [deployment(replicas=2, context_length=1024 * number) for number in (1, 2, 3)]
    revisions = [revision(one, number) for number, one in enumerate(models, 1)]
    await running.store.commit(
        [], [codec.put_spec(api_object) for api_object in (*revisions, models[2])]
    )
    for number in (1, 2):
        body = {"name": "qwen", "revision": number}
        seen = await running.post("/api/v1/actions/undo", {**body, "dryRun": True})
        await running.post("/api/v1/actions/undo", {**body, "version": seen["version"]})
    async with open_page(browser, running.url) as (page, _):
        await page.goto("/changes")
        newest = page.locator(".timeline > li").first
        await expect(newest).to_contain_text("2048")
        await newest.get_by_role("link", name="put back").click()
        dialog = page.get_by_role("dialog")
        # The revision before the newest one would be 3.
        await expect(dialog).to_contain_text("fleetctl rollout undo qwen --to-revision 1")
        await expect(dialog.get_by_role("combobox")).to_have_value("1")
        await check_access(page)
        await dialog.get_by_role("button", name="Undo the rollout").click()
        await expect(page.locator("main [data-done]")).to_be_visible()
        await expect(page.locator("main dl")).to_contain_text("1024 tokens")


async def test_a_preview_says_where_each_replica_stays_moves_or_ends(
    browser: Browser, running: RunningDashboard
) -> None:
    qwen = deployment(replicas=2)
    template = template_hash(qwen)
    puts = [
        put_replica(qwen, ordinal, mac, template=template)
        for ordinal, mac in enumerate(("mac-1", "mac-2"))
    ]
    await running.store.commit([], [codec.put_spec(qwen), codec.put_spec(revision(qwen, 1)), *puts])
    for name in ("mac-2", "mac-3"):
        body = {"name": name, "dryRun": True}
        seen = await running.post("/api/v1/actions/cordon", body)
        await running.post("/api/v1/actions/cordon", {"name": name, "version": seen["version"]})
    async with open_page(browser, running.url) as (page, _):
        await page.goto("/models/qwen")
        await page.get_by_role("button", name="Restart").click()
        dialog = page.get_by_role("dialog")
        steps = [dialog.locator(f"[data-step=qwen-{ordinal}]") for ordinal in (0, 1)]
        await expect(steps[0]).to_contain_text("replaced on mac-1")
        await expect(steps[1]).to_contain_text("replaced from mac-2 to mac-1")
        await dialog.get_by_role("button", name="Cancel").click()
        await page.get_by_role("button", name="Scale").click()
        await dialog.get_by_role("spinbutton", name="Replicas").fill("1")
        await expect(steps[1]).to_contain_text("ends on mac-2")


async def test_a_canary_is_a_line_of_steps(browser: Browser, running: RunningDashboard) -> None:
    steps = tuple(CanaryStep(weight=one) for one in (5, 25))
    trial = deployment(name="trial", rollout=Rollout(canary=Canary(steps=steps)))
    canary = CanaryStatus(
        template="t", step=1, weight=25, since=CLOCK.now(), message="0 of 40 requests failed"
    )
    status = codec.encode(ModelDeploymentStatus(canary=canary))
    key = keys.status_key("ModelDeployment", "trial")
    await running.store.commit([], [codec.put_spec(trial), Put(key=key, value=status)])
    async with open_page(browser, running.url) as (page, _):
        await page.goto("/models/trial")
        await expect(page.locator(".rollout li")).to_have_text(["5 %", "25 %", "all"])
        await expect(page.locator(".rollout .now")).to_have_text("25 %")
        await expect(page.locator("main")).to_contain_text("0 of 40 requests failed")
        await expect(page.get_by_role("button", name="Promote")).to_be_visible()
        await check_access(page)


async def test_a_rollout_is_a_tree_that_grows_as_replicas_move(
    browser: Browser, running: RunningDashboard
) -> None:
    old, new = (deployment(replicas=2, context_length=1024 * number) for number in (1, 2))

    def on(of: ModelDeployment, ordinal: int, mac: str) -> Put:
        return put_replica(of, ordinal, mac, template=template_hash(of))

    async def put_status(updated: int) -> None:
        status = ModelDeploymentStatus(
            desired_replicas=2, replicas=2, ready_replicas=2, updated_replicas=updated, revision=2
        )
        key = keys.status_key("ModelDeployment", "qwen")
        await running.store.commit([], [Put(key=key, value=codec.encode(status))])

    puts = [codec.put_spec(revision(old, 1)), codec.put_spec(revision(new, 2)), codec.put_spec(new)]
    await running.store.commit([], [*puts, on(old, 0, "mac-1"), on(new, 1, "mac-2")])
    await put_status(updated=1)
    async with open_page(browser, running.url) as (page, _):
        await page.goto("/models/qwen")
        progress = page.locator("[data-rollout]")
        await expect(progress).to_contain_text("1 of 2 run revision 2")
        first, second = (page.locator(f"[data-revision='{number}']") for number in (1, 2))
        await expect(first.locator("[data-replica=qwen-0]")).to_contain_text("mac-1")
        await expect(first).to_contain_text("leaves")
        await expect(second.locator("[data-replica=qwen-1]")).to_contain_text("mac-2")
        await check_access(page)
        # What moves in the fleet moves in the tree.
        await running.store.commit([], [on(new, 0, "mac-3")])
        await expect(second.locator("[data-replica=qwen-0]")).to_contain_text("mac-3")
        await put_status(updated=2)
        await expect(progress).to_have_count(0)
        await page.get_by_text("1 earlier revision").click()
        await page.get_by_role("link", name="Return to revision 1").click()
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_contain_text("fleetctl rollout undo qwen --to-revision 1")
        await expect(dialog.get_by_role("combobox")).to_have_value("1")


@pytest.mark.ci
async def test_roles_without_rights_see_no_buttons(browser: Browser) -> None:
    store = MemoryTransport(CLOCK)
    await put_fleet(store)
    await store.commit([], [put_key("viewer"), put_key("operator")])
    async with running_dashboard(store, asks_for_keys=True, can_write=True) as running:
        for role, count in (("viewer", 0), ("operator", 1)):
            async with open_page(browser, running.url) as (page, _):
                await page.goto("/macs/mac-1")
                await page.get_by_label("API key").fill(f"sk-{role}")
                await page.keyboard.press("Enter")
                await expect(page.locator("h1")).to_have_text("mac-1")
                await expect(page.get_by_text("Try without it")).to_be_visible()
                buttons = page.get_by_role("button", name="Cordon", exact=True)
                await expect(buttons).to_have_count(count)
                await page.goto("/try")
                await page.get_by_label("Manifest, YAML").fill(MANIFEST)
                await expect(page.locator("[data-plan]")).to_be_visible()
                await expect(page.get_by_role("button", name="Apply these")).to_have_count(0)


@pytest.mark.ci
async def test_the_command_line_taints_a_mac_and_deletes_a_model(
    browser: Browser, running: RunningDashboard
) -> None:
    """Every step by keyboard; what is deleted must be typed."""
    async with open_page(browser, running.url) as (page, _):
        await page.goto("/groups")
        await expect(page.locator("[data-state]")).to_have_text("live")
        await page.keyboard.press(":")
        line = page.get_by_role("combobox", name="Command")
        await line.fill("taint mac-2")
        await expect(page.get_by_role("option", selected=True)).to_contain_text("taint mac-2")
        await check_access(page)
        await page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="Taint")
        await dialog.get_by_label("Key").fill("owner")
        await dialog.get_by_label("Value").fill("anna")
        await expect(dialog).to_contain_text("fleetctl taint mac-2 owner=anna:NoSchedule")
        await check_access(page)
        await page.keyboard.press("Enter")
        await expect(page.locator("main [data-done]")).to_be_visible()
        await expect(dialog).to_have_count(0)
        await expect(page.locator("main dl")).to_contain_text("owner=anna:NoSchedule")
        await page.keyboard.press("Control+k")
        await line.fill("delete qw")
        await expect(page.get_by_role("option", selected=True)).to_contain_text("delete qwen")
        await page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="Delete")
        await expect(dialog).to_contain_text("fleetctl delete md/qwen")
        button = dialog.get_by_role("button", name="Delete", exact=True)
        await expect(button).to_be_disabled()
        await dialog.get_by_label("to delete it").fill("qwen")
        await page.keyboard.press("Enter")
        await expect(dialog).to_have_count(0)
    obj = await objects.get(running.store, ModelDeployment, "qwen")
    assert obj is not None
    assert obj.metadata.deletion_timestamp is not None
