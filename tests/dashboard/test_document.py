"""The page's document and files: the first state comes with the document, and files are kept by the browser for ever."""

import gzip
import re
from typing import Any

import aiohttp
import orjson

from dashboard import screens
from dashboard.assets import Assets
from dashboard.subscription import parse_selections
from store.memory import MemoryTransport
from tests.support.dashboard_fleets import put_key
from tests.support.dashboard_site import HOSTILE, TOO_WARM
from tests.support.dashboards import CLOCK, RunningDashboard, running_dashboard
from tests.support.macs import mac

_BOOT = re.compile(r'<script type="application/json" id="boot">(.*?)</script>', re.DOTALL)


async def document(
    running: RunningDashboard, path: str, headers: dict[str, str] | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the text of a screen's document, and what it begins with."""
    async with running.http.get(running.url + path, headers=headers or {}) as response:
        assert response.status == 200
        assert response.headers["cache-control"] == "no-store"
        text = await response.text()
    found = _BOOT.findall(text)
    assert len(found) == 1
    return text, orjson.loads(found[0])


async def test_the_document_has_the_state_of_its_screen() -> None:
    store = MemoryTransport(CLOCK)
    await store.commit([], [*mac("mac-1"), *mac("mac-2", TOO_WARM)])
    async with running_dashboard(store) as running:
        text, boot = await document(running, "/macs/mac-2")
        assert boot["me"]["role"] == "admin"
        assert boot["view"] == list(screens.selections_of("/macs/mac-2"))
        views = boot["state"]["views"]
        assert [row["name"] for row in views["macs"]] == ["mac-2"]
        assert HOSTILE in views["macs"][0]["reason"]
        assert HOSTILE not in text  # it cannot end its element
        again = await running.get("/api/v1/snapshot", params={"view": boot["view"]})
        # Figures change while this is asked.
        assert {**again["views"], "figures": []} == {**views, "figures": []}


async def test_a_stranger_gets_the_document_without_any_state() -> None:
    store = MemoryTransport(CLOCK)
    await store.commit([], [*mac("mac-1"), put_key("viewer"), put_key("user")])
    async with running_dashboard(store, asks_for_keys=True) as running:
        text, boot = await document(running, "/macs")
        assert "me" not in boot
        assert "state" not in boot
        assert "mac-1" not in text
        _, boot = await document(running, "/macs", {"cookie": "fleet=wrong"})
        assert "me" not in boot
        _, boot = await document(running, "/macs", await running.log_in("sk-user"))
        assert boot["me"]["role"] == "user"
        assert "state" not in boot
        _, boot = await document(running, "/macs", await running.log_in("sk-viewer"))
        assert [row["name"] for row in boot["state"]["views"]["macs"]] == ["mac-1"]


async def test_addresses_of_before_lead_on_and_unknown_ones_are_a_page_for_people() -> None:
    browser = {"accept": "text/html,*/*"}
    async with running_dashboard(MemoryTransport(CLOCK), asks_for_keys=True) as running:
        for old, new in {
            "/whatif?lost=mac-1": "/try?lost=mac-1",
            "/logs?of=node/a&of=node/b": "/activity?tab=logs&of=node/a&of=node/b",
            "/keys": "/settings",
        }.items():
            async with running.http.get(running.url + old, allow_redirects=False) as response:
                assert (response.status, response.headers["location"]) == (307, new)
        # A stranger gets the page, which asks for a login; a program gets what it can read.
        for path in ("/nosuch", "/docs"):
            async with running.http.get(running.url + path, headers=browser) as response:
                assert (response.status, response.content_type) == (401, "text/html")
                assert '"me"' not in await response.text()
        assert "key" in (await running.get("/nosuch", 401))["error"]["message"]
    async with running_dashboard(MemoryTransport(CLOCK)) as running:
        async with running.http.get(f"{running.url}/nosuch", headers=browser) as response:
            assert (response.status, response.content_type) == (404, "text/html")
        assert "/nosuch" in (await running.get("/nosuch", 404))["error"]["message"]


def test_every_screen_has_selections_that_the_stream_takes() -> None:
    for path in screens.PATHS:
        texts = screens.selections_of(path.replace("{name}", "a%2Fb"))
        assert parse_selections(texts)
        if "{name}" in path and path != "/git/{name}":
            assert any(text.endswith("=a/b") for text in texts)


async def test_files_are_immutable_and_packed_and_of_one_release() -> None:
    assets = Assets.load()
    async with running_dashboard(MemoryTransport(CLOCK)) as running:
        for name, asset in assets.files.items():
            url = running.url + assets.path_of(name)
            async with running.http.get(url, headers={"accept-encoding": "identity"}) as response:
                assert response.status == 200
                assert "immutable" in response.headers["cache-control"]
                assert await response.read() == asset.body
        main = assets.files["main.js"]
        assert main.packed is not None
        assert gzip.decompress(main.packed) == main.body
        async with (
            aiohttp.ClientSession(auto_decompress=False) as http,
            http.get(running.url + assets.path_of("main.js")) as response,
        ):
            assert response.headers["content-encoding"] == "gzip"
            assert response.headers["content-type"].startswith("text/javascript")
            assert await response.read() == main.packed
        for wrong in ("/static/main.js", "/static/0123456789ab/main.js", assets.path_of("no.js")):
            refused = await running.get(wrong, 404)
            assert "error" in refused
        refused = await running.get("/static/0123456789ab/main.js", 404)
        assert "Load the page again" in refused["error"]["message"]
