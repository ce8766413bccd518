"""Usage of nodes and models over HTTP: the answer of `fleetctl top`, in the page too."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from aiohttp import web
from playwright.async_api import Browser, expect

from dashboard.energy import NO_POWER
from schemas.objectives import Objectives
from schemas.records import GatewayLease
from store import codec, keys
from store.etcd.connect import connect
from store.memory import MemoryTransport
from store.port import Put
from tests.support.browser import check_access, needs_browser
from tests.support.dashboard_site import opened
from tests.support.dashboards import CLOCK, ended, running_dashboard, serving
from tests.support.etcd import running_etcd
from tests.support.fleetctl_runner import run_fleetctl
from tests.support.gateway_world import World, deployment, endpoint, running_gateway
from tests.support.macs import mac
from tests.support.ports import free_port


@asynccontextmanager
async def measured_engine() -> AsyncIterator[str]:
    """Run an engine's /metrics with constant values; yield its URL."""

    async def metrics(_: web.Request) -> web.Response:
        values = {
            "generation_tokens_total": 10,
            "num_sequences_in_flight": 2,
            "num_requests_waiting": 1,
            "memory_active_bytes": 3 << 30,
        }
        return web.Response(
            text="".join(f"fleet_engine_{name} {value}\n" for name, value in values.items())
        )

    async with serving("/metrics", metrics) as (url,):
        yield url


@pytest.mark.etcd
async def test_the_answer_is_that_of_fleetctl(tmp_path: Path) -> None:
    async with running_etcd(tmp_path / "etcd") as etcd:
        store = connect(etcd.address)
        # A gateway that is registered and does not answer concerns models only.
        silent = GatewayLease(url=f"http://127.0.0.1:{free_port()}", version="1")
        lease = Put(key=keys.named(keys.GATEWAY_LEASE_PREFIX, "gone"), value=codec.encode(silent))
        await store.commit([], [*mac("mac-1"), *mac("mac-2"), lease])
        async with (
            measured_engine() as url,
            running_gateway(store) as gateway,
            running_dashboard(store) as dashboard,
        ):
            qwen = endpoint("qwen-0", "qwen", url, node="mac-1")
            await World(store).put(deployment("qwen"), qwen)
            await gateway.knows("qwen", ready=1)
            for what in ("nodes", "models"):
                answers = await asyncio.gather(
                    *(dashboard.get(f"/api/v1/top/{what}") for _ in range(3))
                )
                # Clients that ask at once share the samples.
                assert len({orjson.dumps(answer["items"]) for answer in answers}) == 1
                done = await run_fleetctl("top", what, "-o", "json", "--etcd", str(etcd.address))
                assert done.code == 0, done.err
                assert answers[0]["items"] == orjson.loads(done.out)["items"]
                first = answers[0]["items"][0]
                assert (first["inFlight"], first["queue"]) == (2, 1)
                told = [line.removeprefix("warning: ") for line in done.err.splitlines()]
                assert told == answers[0]["reasons"]
                assert any("mac-2" in one for one in told) == (what == "nodes")
                assert any("gone" in one for one in told) == (what == "models")
            await dashboard.get("/api/v1/top/pods", 400)
            await etcd.supervisor.stop()
            # Until then, clients get the samples of a moment before.
            await dashboard.until("/api/v1/top/nodes", status=503)
            refused = await dashboard.get("/api/v1/top/nodes", 503)
            assert "etcd, which does not answer" in refused["error"]["message"]
        await store.close()


@pytest.mark.ci
@needs_browser
@pytest.mark.browser
async def test_the_page_shows_usage_objectives_and_energy(browser: Browser, tmp_path: Path) -> None:
    store = MemoryTransport(CLOCK)
    qwen = deployment("qwen")
    objectives = Objectives(availability_percent=99)
    spec = qwen.spec.model_copy(update={"objectives": objectives})
    declared = codec.put_spec(qwen.model_copy(update={"spec": spec}))
    await store.commit([], [*mac("mac-1"), *mac("mac-2"), declared])
    async with opened(browser, store, state_dir=tmp_path) as (page, dashboard):
        await page.goto("/macs")
        await page.get_by_text("Current usage").click()
        table = page.locator("[data-usage]")
        await expect(table.get_by_role("link", name="mac-2")).to_be_visible()
        await expect(table).to_contain_text("?")
        await expect(table).to_contain_text("unknown values: ")
        await check_access(page)
        dashboard.dashboard.objectives.count(
            [ended(n, outcome="failed" if n < 30 else "ok") for n in range(60)]
        )
        await page.goto("/models/qwen")
        shown = page.locator("[data-objectives] tbody tr").first
        await expect(shown).to_contain_text("Availability")
        await expect(shown.locator("td")).to_have_text(
            ["Availability", "1h", "99 %", "50 %", "■ 50", "60"]
        )
        await expect(page.locator("main dl")).to_contain_text(NO_POWER.replace("`", ""))
        await check_access(page)
        await page.goto("/macs/mac-1")
        await expect(page.locator("main dl")).to_contain_text(NO_POWER.replace("`", ""))
