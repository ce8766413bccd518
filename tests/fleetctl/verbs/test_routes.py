"""`fleetctl routes` with real gateways."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from machinery.clock import SystemClock
from store import keys
from store.memory import MemoryTransport
from store.port import Transport
from tests.support.fleet import fleetctl
from tests.support.fleetctl_runner import MemoryFleet, run_fleetctl
from tests.support.gateway_calls import ADMIN, CHAT, KEYS_REQUIRED, put_api_key
from tests.support.gateway_engine_scripts import chat, completion, dies_at_once
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_world import Running, World, running_gateway
from tests.support.waiting import until_async


@asynccontextmanager
async def two_gateways(shared_transport: Transport) -> AsyncIterator[tuple[Running, Running]]:
    """Send two requests to the first gateway, one to the second, and one that fails."""
    world = World(shared_transport)
    async with (
        running(FakeEngine("m-0", dies_at_once)) as bad,
        running(FakeEngine("m-1", chat)) as good,
        running_gateway(shared_transport) as one,
        running_gateway(shared_transport) as two,
    ):
        await world.serve("m", bad, good)
        for gateway in (one, two):
            await gateway.knows("m", ready=2)
        async with aiohttp.ClientSession() as http:
            for gateway, model in ((one, "m"), (two, "m"), (one, "nobody"), (one, "m")):
                async with http.post(gateway.url + CHAT, json={"model": model}) as response:
                    await response.read()
        yield one, two


@pytest.mark.etcd
async def test_all_registered_gateways_are_read(
    shared_fleet: MemoryFleet, shared_transport: Transport
) -> None:
    async with two_gateways(shared_transport) as (_, two):

        async def registered() -> bool:
            return len((await shared_transport.list(keys.GATEWAY_LEASE_PREFIX)).items) == 2

        await until_async(registered, what="both gateways to be registered")
        done = await shared_fleet.ctl("routes")
        assert (done.code, done.err) == (0, "")
        title, *lines = done.out.splitlines()
        assert title.split()[:4] == ["TIME", "MODEL", "NODE", "REPLICA"]
        shown = [line.split()[2:7] for line in lines]
        assert shown == [
            ["m", "mac-1", "m-1", "ok", "2"],
            ["m", "mac-1", "m-1", "ok", "2"],
            ["nobody", "-", "-", "refused", "0"],
            ["m", "mac-1", "m-1", "ok", "1"],
        ]
        last = await shared_fleet.ctl("routes", "--last", "1", "--no-headers", "-o", "wide")
        assert len(last.out.splitlines()) == 1
        failed = await shared_fleet.ctl("routes", "--outcome", "refused", "-o", "json")
        assert [item["model"] for item in json.loads(failed.out)["items"]] == ["nobody"]
        only = await shared_fleet.ctl("routes", "--gateway", two.url, "-o", "wide", "--no-headers")
        assert len(only.out.splitlines()) == 1
        assert "m-0:broken" in only.out


async def test_a_gateway_without_an_answer_is_a_warning() -> None:
    async with two_gateways(MemoryTransport(SystemClock())) as (one, _):
        silent = "http://127.0.0.1:9"
        words = ("routes", "--gateway", one.url, "--gateway", silent, "--node", "mac-1")
        done = await fleetctl(*words)
        assert done.code == 0
        assert len(done.out.splitlines()) == 3
        assert done.err.startswith(f"warning: a gateway does not answer: {silent}: ")
        nothing = await fleetctl("routes", "--gateway", one.url, "--model", "zzz")
        assert (nothing.code, nothing.out, nothing.err) == (0, "", "no requests found\n")


async def test_gateways_that_require_a_key_are_one_note() -> None:
    async with (
        two_gateways(MemoryTransport(SystemClock())) as (one, _),
        answering(401, b"") as locked,
        answering(401, b"") as other,
    ):
        words = ("--gateway", one.url, "--gateway", locked, "--gateway", other)
        done = await fleetctl("routes", *words)
        assert (done.code, len(done.out.splitlines())) == (0, 4)
        assert done.err.startswith("note: a gateway was not read (and 1 more): ")
        assert len(done.err.splitlines()) == 1
        assert f"{locked} requires an API key with the role viewer" in done.err
        assert "FLEET_API_KEY" in done.err


async def test_the_key_comes_from_a_file_the_environment_or_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(MemoryTransport(SystemClock()))
    await put_api_key(world, ADMIN, "me", role="viewer")
    (tmp_path / "key").touch(mode=0o600)
    (tmp_path / "key").write_text(f"{ADMIN}\n")
    async with running_gateway(world.transport, KEYS_REQUIRED) as gateway:
        await gateway.knows_keys()
        plain = ("routes", "--gateway", gateway.url)
        refused = await run_fleetctl(*plain)
        assert (
            "requires an API key with the role viewer: pass --api-key-file, or set FLEET_API_KEY"
            in refused.err
        )
        file = await run_fleetctl(*plain, "--api-key-file", str(tmp_path / "key"))
        assert (file.code, file.err) == (0, "no requests found\n")
        monkeypatch.setenv("FLEET_API_KEY", ADMIN)
        assert (await run_fleetctl(*plain)).code == 0
        monkeypatch.delenv("FLEET_API_KEY")
        config = tmp_path / "config.toml"
        config.write_text(
            f'current-context = "lab"\n[contexts.lab]\ngateway = "{gateway.url}"\n'
            'api-key-file = "key"\n'
        )
        monkeypatch.setenv("FLEETCTL_CONFIG", str(config))
        monkeypatch.delenv("FLEET_DATA_DIR")  # it names a store, and so no context would count
        context = await run_fleetctl("routes")
        assert (context.code, context.err) == (0, "no requests found\n")


@asynccontextmanager
async def answering(status: int, body: bytes) -> AsyncIterator[str]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_get("/api/requests/ended", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        pytest.param(401, b"", "FLEET_API_KEY", id="no-key"),
        pytest.param(403, b"", "lacks the role viewer", id="another-key"),
        pytest.param(500, b"", "status 500", id="ill"),
        pytest.param(200, b"<html>", "has another form", id="something-else"),
        pytest.param(200, b'{"requests":[{"id":7}]}', "has another form", id="another-shape"),
    ],
)
async def test_invalid_responses_are_errors(status: int, body: bytes, says: str) -> None:
    async with answering(status, body) as url:
        done = await fleetctl("routes", "--gateway", url)
        assert done.code == 1
        assert says in done.err


async def test_a_described_request_says_why_its_prompt_was_read() -> None:
    why = "31,002 of 31,900 tokens were read again: system message: content differs at character 47"

    async def misses(call: Call) -> None:
        await call.answer(completion("hello"), x_fleet_cache_miss=why)

    transport = MemoryTransport(SystemClock())
    async with running(FakeEngine("m-0", misses)) as engine, running_gateway(transport) as gateway:
        await World(transport).serve("m", engine)
        await gateway.knows("m", ready=1)
        async with (
            aiohttp.ClientSession() as http,
            http.post(gateway.url + CHAT, json={"model": "m"}) as response,
        ):
            assert response.status == 200
            assert "x-fleet-cache-miss" not in response.headers
            id_ = response.headers["x-request-id"]
        done = await run_fleetctl("describe", "request", id_, "--gateway", gateway.url)
        assert (done.code, done.err) == (0, "")
        shown = dict(line.split(maxsplit=1) for line in done.out.splitlines())
        assert shown["Request:"] == id_
        assert shown["Cache:"] == why
        assert shown["Attempt:"].startswith("m-0 answered after ")
        unknown = await run_fleetctl("describe", "request/nobody", "--gateway", gateway.url)
        assert unknown.code == 1
        assert "no request 'nobody' in the journals" in unknown.err
