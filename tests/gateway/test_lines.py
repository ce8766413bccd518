"""Requests that wait at the gateway: for their turn, in order, with signs of life, and never for ever."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from gateway.server import GatewayLimits
from tests.gateway import scripts
from tests.gateway.fake_engine import Call, FakeEngine, running
from tests.gateway.scripts import chat, refuses
from tests.gateway.test_failover import CHAT, ask
from tests.gateway.test_faults import metrics, routed, serve
from tests.gateway.test_holding import sleeping, waits
from tests.gateway.world import Running, World, published, running_gateway
from tests.support.waiting import until


class Door:
    """An engine's script that answers when it is opened, and counts who is inside."""

    def __init__(self, then: Callable[[Call], Awaitable[None]] = chat) -> None:
        self._then = then
        self._open = asyncio.Event()
        self.inside = self.most = 0
        self.order: list[Any] = []

    def open(self) -> None:
        self._open.set()

    async def __call__(self, call: Call) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.order.append(orjson.loads(call.body).get("user"))
        try:
            await self._open.wait()
            await self._then(call)
        finally:
            self.inside -= 1


@asynccontextmanager
async def lively(
    world: World, quiet_s: float = 0.05, hold_s: float = 20.0
) -> AsyncIterator[Running]:
    limits = GatewayLimits(drain_timeout_s=0.0, quiet_s=quiet_s, hold_timeout_s=hold_s)
    async with running_gateway(world.transport, limits) as gateway:
        yield gateway


async def queued(gateway: Running, http: aiohttp.ClientSession, number: int) -> None:
    line = f'fleet_gateway_queue_waiting{{model="m"}} {number}\n'

    async def shown() -> bool:
        return line in await metrics(http, gateway)

    for _ in range(500):
        if await shown():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never {number} in the queue")


async def test_so_many_are_let_through_the_rest_waits_in_order_and_one_too_many_is_refused(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    door = Door()
    async with running(FakeEngine("m-0", door)) as engine:
        declared = routed("m", queueing={"concurrency": 2, "depth": 3, "timeout": "60s"})
        await serve(world, gateway, declared, engine)
        async with asyncio.TaskGroup() as group:
            asked = []
            for number in range(5):
                asked.append(group.create_task(ask(http, gateway, user=number)))
                await queued(gateway, http, max(0, number - 1))
                await until(lambda: len(engine.calls) == min(2, len(asked)), what="those inside")
            status, body, response = await ask(http, gateway)
            assert (status, body["error"]["code"]) == (429, "queue_full")
            assert body["error"]["type"] == "rate_limit_error"
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert len(engine.calls) == 2
            door.open()
        assert [task.result()[0] for task in asked] == [200] * 5
        assert door.most == 2
        assert door.order == [0, 1, 2, 3, 4]
        assert 'queue_refused_total{reason="queue_full"} 1' in await metrics(http, gateway)


async def test_a_stream_keeps_its_place_to_its_end(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    ends = asyncio.Event()

    async def streams(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(scripts.delta("a"))
        await ends.wait()
        await call.chunk(scripts.DONE)
        await call.send(b"0\r\n\r\n")

    async with running(FakeEngine("m-0", streams)) as engine:
        declared = routed("m", queueing={"concurrency": 1, "depth": 9})
        await serve(world, gateway, declared, engine)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(http, gateway, stream=True)) for _ in range(3)]
            await queued(gateway, http, 2)
            assert len(engine.calls) == 1
            ends.set()
        assert all(task.result()[1].endswith(scripts.DONE) for task in asked)


async def test_who_waits_too_long_is_told_when_to_come_again(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    door = Door()
    async with running(FakeEngine("m-0", door)) as engine:
        declared = routed("m", queueing={"concurrency": 1, "depth": 9, "timeout": "0s"})
        await serve(world, gateway, declared, engine)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(ask(http, gateway))
            await until(lambda: len(engine.calls) == 1, what="the first being there")
            status, body, response = await ask(http, gateway)
            assert (status, body["error"]["code"]) == (503, "queue_timeout")
            assert int(response.headers["retry-after"]) >= 1
            headers = {"x-request-timeout": "0.05"}
            await world.put(routed("m", queueing={"concurrency": 1, "timeout": "60s"}))
            await queued(gateway, http, 0)
            async with http.post(gateway.url + CHAT, json={"model": "m"}, headers=headers) as late:
                error = (await late.json())["error"]
                assert (late.status, error["code"]) in [
                    (504, "request_timeout"),
                    (503, "queue_timeout"),  # the store's news may come after the request
                ]
            door.open()
        assert first.result()[0] == 200


async def test_who_leaves_while_waiting_makes_room_and_a_wider_door_lets_in_at_once(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    door = Door()
    async with running(FakeEngine("m-0", door)) as engine:
        declared = routed("m", queueing={"concurrency": 1, "depth": 2, "timeout": "60s"})
        await serve(world, gateway, declared, engine)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(ask(http, gateway))
            await until(lambda: len(engine.calls) == 1, what="the first being there")
            leaves, stays = (group.create_task(ask(http, gateway)) for _ in range(2))
            await queued(gateway, http, 2)
            leaves.cancel()
            await queued(gateway, http, 1)
            # Nobody asks, and still the one that waits is let in by the new settings.
            await world.put(routed("m", queueing={"concurrency": 2}))
            await until(lambda: len(engine.calls) == 2, what="the second being let in")
            door.open()
        assert (first.result()[0], stays.result()[0]) == (200, 200)
        await queued(gateway, http, 0)


async def test_a_stream_that_waits_for_its_turn_hears_from_us(
    world: World, http: aiohttp.ClientSession
) -> None:
    door = Door()
    async with lively(world) as gateway, running(FakeEngine("m-0", door)) as engine:
        declared = routed("m", queueing={"concurrency": 1, "depth": 9, "timeout": "60s"})
        await serve(world, gateway, declared, engine)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(ask(http, gateway))
            await until(lambda: len(engine.calls) == 1, what="the first being there")
            whole = group.create_task(ask(http, gateway))
            body = {"model": "m", "stream": True}
            async with http.post(gateway.url + CHAT, json=body) as response:
                assert response.status == 200
                assert response.content_type == "text/event-stream"
                assert await response.content.readexactly(22) == b": waiting\n\n" * 2
                door.open()
                text = (await response.read()).replace(b": waiting\n\n", b"")
        assert text.startswith(b"data: {")
        assert text.endswith(scripts.DONE)
        assert (first.result()[0], whole.result()[0]) == (200, 200)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        pytest.param(refuses(400, "bad_thing"), b'"code":"bad_thing"', id="a-clients-mistake"),
        pytest.param(scripts.dies_at_once, b'"code":"upstream_failed"', id="a-dead-engine"),
    ],
)
async def test_what_goes_wrong_after_a_sign_of_life_is_an_event(
    world: World,
    http: aiohttp.ClientSession,
    script: Callable[[Call], Awaitable[None]],
    code: bytes,
) -> None:
    door = Door(script)
    async with lively(world) as gateway, running(FakeEngine("m-0", door)) as engine:
        declared = routed("m", queueing={"concurrency": 1, "depth": 9, "timeout": "60s"})
        await serve(world, gateway, declared, engine)
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(http, gateway))
            await until(lambda: len(engine.calls) == 1, what="the first being there")
            body = {"model": "m", "stream": True}
            async with http.post(gateway.url + CHAT, json=body) as response:
                assert response.status == 200
                await response.content.readexactly(11)
                door.open()
                text = (await response.read()).replace(b": waiting\n\n", b"")
        assert text.startswith(b'data: {"error":')
        assert code in text
        assert b"[DONE]" not in text


async def test_a_cold_model_keeps_streams_alive(world: World, http: aiohttp.ClientSession) -> None:
    async with lively(world) as gateway, running(FakeEngine("m-0", chat)) as engine:
        await world.put(sleeping("m"))
        await gateway.knows("m", ready=0)
        body = {"model": "m", "stream": True}
        async with http.post(gateway.url + CHAT, json=body) as response:
            assert response.status == 200
            assert await response.content.readexactly(11) == b": waiting\n\n"
            await waits(gateway, 1)
            await world.put(published(engine, "m"))
            text = (await response.read()).replace(b": waiting\n\n", b"")
        assert b"m-0" in text
        assert text.endswith(scripts.DONE)


async def test_a_model_that_stays_cold_is_an_event_at_the_end(
    world: World, http: aiohttp.ClientSession
) -> None:
    async with lively(world, hold_s=0.3) as gateway:
        await world.put(sleeping("m"))
        await gateway.knows("m", ready=0)
        status, text, _ = await ask(http, gateway, stream=True)
        assert status == 200
        assert text.startswith(b": waiting\n\n")
        assert b'"code":"model_starting"' in text
