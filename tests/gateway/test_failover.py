"""Engines that die, drain or lie before the client has seen a byte: it must not notice."""

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest

from gateway.server import GatewayLimits
from store import keys
from tests.gateway import scripts
from tests.gateway.fake_engine import FakeEngine, Script, running
from tests.gateway.scripts import chat, refuses, slow, streams
from tests.gateway.world import (
    Running,
    World,
    deployment,
    published,
    route,
    running_gateway,
)
from tests.support.waiting import until

CHAT = "/v1/chat/completions"


async def ask(
    http: aiohttp.ClientSession, gateway: Running, **body: Any
) -> tuple[int, Any, aiohttp.ClientResponse]:
    body = {"model": "m", "messages": [], **body}
    async with http.post(gateway.url + CHAT, json=body) as response:
        raw = await response.read()
        is_json = response.content_type == "application/json"
        return response.status, orjson.loads(raw) if is_json else raw, response


FAILURES = [
    pytest.param(scripts.dies_at_once, id="dies-at-once"),
    pytest.param(scripts.dies_after_the_head, id="dies-after-the-head"),
    pytest.param(scripts.dies_in_the_first_event, id="dies-in-the-first-event"),
    pytest.param(scripts.dies_mid_answer, id="dies-mid-answer"),
    pytest.param(refuses(503, "draining"), id="draining"),
    pytest.param(refuses(429, "queue_full"), id="queue-full"),
    pytest.param(refuses(500, "broken"), id="broken"),
    pytest.param(refuses(502, "bad-gateway"), id="bad-gateway"),
    pytest.param(refuses(504, "timeout"), id="timeout"),
]


@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize("script", FAILURES)
async def test_another_engine_answers(
    world: World,
    gateway: Running,
    http: aiohttp.ClientSession,
    script: Script,
    mode: str,
) -> None:
    async with running(FakeEngine("m-0", script)) as bad, running(FakeEngine("m-1", chat)) as good:
        await world.serve("m", bad, good)
        await gateway.knows("m", ready=2)
        status, body, response = await ask(http, gateway, stream=mode == "streamed")
        assert status == 200
        assert b"m-1" in (body if mode == "streamed" else orjson.dumps(body))
        assert response.headers["x-fleet-attempts"] == "2"
        assert response.headers["x-fleet-replica"] == "m-1"
        assert (len(bad.calls), len(good.calls)) == (1, 1)
        assert good.calls[0].body == bad.calls[0].body
        # It is not asked again for a moment.
        await ask(http, gateway)
        assert len(bad.calls) == 1


async def test_a_dead_engine(world: World, gateway: Running, http: aiohttp.ClientSession) -> None:
    async with running(FakeEngine("m-0", chat)) as bad, running(FakeEngine("m-1", chat)) as good:
        await world.serve("m", bad, good)
        await gateway.knows("m", ready=2)
        await bad.kill()
        _, _, response = await ask(http, gateway)
        assert response.headers["x-fleet-attempts"] == "2"


async def test_who_answers_must_be_who_was_asked(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    """Another engine has taken over the port of one that is gone."""
    async with running(FakeEngine("other-0", chat)) as stranger:
        await world.put(deployment("m"), published(FakeEngine("m-0", chat, stranger.port), "m"))
        await gateway.knows("m", ready=1)
        status, body, _ = await ask(http, gateway)
        assert status == 503
        assert "other-0 answers there" in body["error"]["message"]


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engines_own_refusal_is_passed_on_if_nobody_else_is_there(
    world: World, gateway: Running, http: aiohttp.ClientSession, status: int
) -> None:
    async with running(FakeEngine("m-0", refuses(status, "busy"))) as engine:
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
        got, body, response = await ask(http, gateway)
        assert (got, body["error"]["code"]) == (status, "busy")
        assert response.headers["retry-after"] == "1"
        assert len(engine.calls) == 1


async def test_a_clients_mistake_is_not_tried_twice(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async with (
        running(FakeEngine("m-0", refuses(400, "bad"))) as one,
        running(FakeEngine("m-1", chat)) as other,
    ):
        await world.serve("m", one, other)
        await gateway.knows("m", ready=2)
        status, _, _ = await ask(http, gateway)
        assert (status, len(one.calls), len(other.calls)) == (400, 1, 0)


async def test_when_all_are_dead_each_was_asked_once(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async with (
        running(FakeEngine("m-0", scripts.dies_at_once)) as one,
        running(FakeEngine("m-1", scripts.dies_at_once)) as other,
    ):
        await world.serve("m", one, other)
        await gateway.knows("m", ready=2)
        status, body, response = await ask(http, gateway)
        assert (status, body["error"]["code"]) == (503, "upstream_failed")
        assert response.headers["retry-after"] == "1"
        assert response.headers["x-fleet-attempts"] == "2"
        assert (len(one.calls), len(other.calls)) == (1, 1)


async def test_nobody_can_be_reached(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async with running(FakeEngine("m-0", chat)) as engine:
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
    status, body, response = await ask(http, gateway)
    assert (status, body["error"]["code"]) == (503, "upstream_unreachable")
    assert response.headers["retry-after"] == "1"


async def test_a_request_waits_for_an_engine_that_is_being_restarted(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async with running(FakeEngine("m-0", chat)) as engine:
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
        await engine.kill()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(ask(http, gateway))
            await asyncio.sleep(0.2)
            await world.delete(keys.endpoint_key("mac-1", "m-0"))
            await asyncio.sleep(0.2)
            await engine.start()
            await world.put(published(engine, "m"))
        assert asking.result()[0] == 200


async def test_a_silent_engine_is_given_up(world: World, http: aiohttp.ClientSession) -> None:
    limits = GatewayLimits(request_timeout_s=0.1, drain_timeout_s=0)
    async with (
        running(FakeEngine("m-0", slow(30))) as engine,
        running_gateway(world.transport, limits) as gateway,
    ):
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
        status, body, _ = await ask(http, gateway)
        assert (status, body["error"]["code"]) == (504, "upstream_timeout")
        await until(lambda: engine.abandoned, what="the engine noticing")


async def test_load_is_spread(world: World, gateway: Running, http: aiohttp.ClientSession) -> None:
    async with (
        running(FakeEngine("m-0", slow(0.2))) as one,
        running(FakeEngine("m-1", slow(0.2))) as other,
    ):
        await world.serve("m", one, other)
        await gateway.knows("m", ready=2)
        await asyncio.gather(*(ask(http, gateway) for _ in range(8)))
        assert (len(one.calls), len(other.calls)) == (4, 4)
        assert gateway.gateway.loads.total() == 0


async def test_a_route_shares_out_and_engines_are_called_by_their_own_name(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async with (
        running(FakeEngine("a-0", scripts.echo)) as a,
        running(FakeEngine("b-0", scripts.echo)) as b,
    ):
        await world.serve("a", a)
        await world.serve("b", b)
        await world.put(route("r", "public", a=3, b=1))
        await gateway.knows("public", ready=2)
        for _ in range(40):
            status, body, response = await ask(http, gateway, model="public")
            assert status == 200
            assert body["model"] == response.headers["x-fleet-replica"][0]
        assert len(a.calls) > len(b.calls) > 0


async def test_sixteen_streams_and_one_engine_killed(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    """Who has seen no byte gets everything from the other engine; who has is told the truth."""
    steady = streams(20, pause_s=0.01)
    async with (
        running(FakeEngine("m-0", slow(0.15, steady))) as victim,
        running(FakeEngine("m-1", steady)) as other,
    ):
        await world.serve("m", victim, other)
        await gateway.knows("m", ready=2)

        async def kill() -> None:
            await until(lambda: len(victim.calls) == 8, what="the victim's share")
            await victim.kill()

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(http, gateway, stream=True)) for _ in range(16)]
            group.create_task(kill())
        results = [task.result() for task in asked]
        assert [status for status, _, _ in results] == [200] * 16
        assert len({body for _, body, _ in results}) == 1
        assert all(body.endswith(scripts.DONE) for _, body, _ in results)
        attempts = sorted(r.headers["x-fleet-attempts"] for _, _, r in results)
        assert attempts == ["1"] * 8 + ["2"] * 8
