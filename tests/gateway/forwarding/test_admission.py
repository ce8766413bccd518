"""Admission: the slot queue in values, and over HTTP the waits for a slot."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import errors
from gateway.forwarding.admission import MAX_RETRY_S, MIN_RETRY_S, Slot, SlotQueue
from gateway.forwarding.policy import QueuePolicy
from gateway.server import GatewayLimits
from tests.support import gateway_engine_scripts
from tests.support.gateway_calls import (
    CHAT,
    metrics_text,
    post_chat,
    serve_deployment,
    with_routing,
)
from tests.support.gateway_engine_scripts import chat, refuses
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_world import (
    Running,
    World,
    running_gateway,
)
from tests.support.waiting import until


def lines(concurrency: int, depth: int) -> QueuePolicy:
    return QueuePolicy(concurrency=concurrency, depth=depth, timeout_s=30.0)


def entered(queue: SlotQueue, now_s: float = 0.0) -> Slot:
    place = queue.enter(now_s)
    assert place is not None
    return place


def test_so_many_run_so_many_wait_and_the_rest_is_turned_away() -> None:
    queue = SlotQueue(lines(2, 1))
    places = [queue.enter(0.0) for _ in range(4)]
    assert [place and place.is_admitted for place in places] == [True, True, False, None]


@pytest.mark.parametrize(
    ("concurrency", "said"),
    [
        (1, "1 request running and 1 request waiting,"),
        (2, "2 requests running and 1 request waiting,"),
    ],
)
def test_a_refusal_tells_the_length_of_the_queue(concurrency: int, said: str) -> None:
    queue = SlotQueue(lines(concurrency, 1))
    for _ in range(concurrency + 1):
        entered(queue)
    refusal = errors.queue_full("m", running=queue.running, waiting=queue.waiting, retry_after_s=1)
    assert said in refusal.message


def test_a_free_slot_goes_to_the_longest_waiting() -> None:
    queue = SlotQueue(lines(1, 3))
    first, second, third = (entered(queue) for _ in range(3))
    assert queue.leave(first, 1.0) == [second]
    assert queue.leave(second, 2.0) == [third]
    assert queue.leave(second, 2.0) == []  # once is enough
    assert (queue.running, queue.waiting) == (1, 0)


def test_leaving_the_queue_makes_room_in_it() -> None:
    queue = SlotQueue(lines(1, 1))
    first, second = entered(queue), entered(queue)
    assert queue.enter(0.0) is None
    assert queue.leave(second, 1.0) == []
    third = entered(queue)
    assert queue.leave(first, 2.0) == [third]


def test_a_larger_limit_admits_at_once_and_a_smaller_one_refuses_none() -> None:
    queue = SlotQueue(lines(1, 5))
    places = [entered(queue) for _ in range(4)]
    assert queue.change(lines(3, 5)) == places[1:3]
    assert queue.change(lines(1, 0)) == []
    assert (queue.running, queue.waiting) == (3, 1)
    assert queue.leave(places[0], 1.0) == []
    assert queue.change(None) == places[3:]


def test_when_to_come_again_follows_from_the_pace() -> None:
    queue = SlotQueue(lines(1, 100))
    running = entered(queue)
    waiting = [entered(queue) for _ in range(9)]
    for second in range(1, 4):  # one in two seconds
        queue.leave(running, second * 2.0)
        running = waiting.pop(0)
    assert queue.retry_after_s(6.0) == 14  # six wait before it


def test_without_a_pace_it_is_a_second_and_never_more_than_a_minute() -> None:
    assert SlotQueue(lines(1, 0)).retry_after_s(0.0) == MIN_RETRY_S
    queue = SlotQueue(lines(1, 100))
    entered(queue)
    for _ in range(50):
        entered(queue)
    assert queue.retry_after_s(1000.0) == MAX_RETRY_S


moves = st.lists(st.tuples(st.sampled_from(["enter", "leave", "change"]), st.integers(0, 5)))


@given(moves)
def test_whatever_happens(story: list[tuple[str, int]]) -> None:
    """No request overtakes another or waits beside a free slot, and the limits hold."""
    queue, limit = SlotQueue(lines(2, 3)), lines(2, 3)
    inside: list[Slot] = []
    for now, (what, number) in enumerate(story):
        before, through = queue.running, [p for p in inside if p.is_admitted]
        if what == "enter":
            place = queue.enter(float(now))
            if place is not None:
                inside.append(place)
            else:
                assert queue.waiting >= limit.depth
        elif what == "leave" and inside:
            queue.leave(inside.pop(number % len(inside)), float(now))
        elif what == "change":
            limit = lines(number + 1, number)
            queue.change(limit)
        order = [place.is_admitted for place in inside]
        assert order == sorted(order, reverse=True)
        assert queue.running == sum(order)
        assert queue.waiting == len(order) - sum(order)
        if queue.running > limit.concurrency:
            assert queue.running <= max(before, len(through))  # a bound that came later
        assert not queue.waiting or queue.running >= limit.concurrency


class Door:
    """An engine script that answers when it is opened, and counts waiting requests."""

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
async def lively(world: World, quiet_s: float = 0.05) -> AsyncIterator[Running]:
    limits = GatewayLimits(drain_timeout_s=0.0, keep_alive_s=quiet_s)
    async with running_gateway(world.transport, limits) as gateway:
        yield gateway


async def queued(gateway: Running, http: aiohttp.ClientSession, number: int) -> None:
    line = f'fleet_gateway_queue_waiting{{model="m"}} {number}\n'

    async def shown() -> bool:
        return line in await metrics_text(http, gateway)

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
        declared = with_routing("m", queueing={"concurrency": 2, "depth": 3, "timeout": "60s"})
        await serve_deployment(world, gateway, declared, engine)
        async with asyncio.TaskGroup() as group:
            asked = []
            for number in range(5):
                asked.append(group.create_task(post_chat(http, gateway, user=number)))
                await queued(gateway, http, max(0, number - 1))
                await until(lambda: len(engine.calls) == min(2, len(asked)), what="those inside")
            status, body, response = await post_chat(http, gateway)
            assert (status, body["error"]["code"]) == (429, "queue_full")
            assert body["error"]["type"] == "rate_limit_error"
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert len(engine.calls) == 2
            door.open()
        assert [task.result()[0] for task in asked] == [200] * 5
        assert door.most == 2
        # Two are sent in one moment; which of the two the engine reads first is not determined.
        assert [sorted(door.order[:2]), sorted(door.order[2:4])] == [[0, 1], [2, 3]]
        assert 'queue_refused_total{reason="queue_full"} 1' in await metrics_text(http, gateway)


async def test_a_stream_keeps_its_place_to_its_end(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    ends = asyncio.Event()

    async def streams(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(gateway_engine_scripts.delta("a"))
        await ends.wait()
        await call.chunk(gateway_engine_scripts.DONE)
        await call.send(b"0\r\n\r\n")

    async with running(FakeEngine("m-0", streams)) as engine:
        declared = with_routing("m", queueing={"concurrency": 1, "depth": 9})
        await serve_deployment(world, gateway, declared, engine)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(post_chat(http, gateway, stream=True)) for _ in range(3)]
            await queued(gateway, http, 2)
            # The place is taken before the engine has heard of the request.
            await until(lambda: len(engine.calls) == 1, what="the first being there")
            ends.set()
        assert all(task.result()[1].endswith(gateway_engine_scripts.DONE) for task in asked)


async def test_too_long_a_wait_ends_with_retry_after(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    door = Door()
    async with running(FakeEngine("m-0", door)) as engine:
        declared = with_routing("m", queueing={"concurrency": 1, "depth": 9, "timeout": "0s"})
        await serve_deployment(world, gateway, declared, engine)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(post_chat(http, gateway))
            await until(lambda: len(engine.calls) == 1, what="the first being there")
            status, body, response = await post_chat(http, gateway)
            assert (status, body["error"]["code"]) == (503, "queue_timeout")
            assert int(response.headers["retry-after"]) >= 1
            headers = {"x-request-timeout": "0.05"}
            await world.put(with_routing("m", queueing={"concurrency": 1, "timeout": "60s"}))
            await queued(gateway, http, 0)
            async with http.post(gateway.url + CHAT, json={"model": "m"}, headers=headers) as late:
                error = (await late.json())["error"]
                assert (late.status, error["code"]) in [
                    (504, "request_timeout"),
                    (503, "queue_timeout"),  # the store's news may come after the request
                ]
            door.open()
        assert first.result()[0] == 200


async def test_leaving_makes_room_and_a_larger_limit_admits_at_once(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    door = Door()
    async with running(FakeEngine("m-0", door)) as engine:
        declared = with_routing("m", queueing={"concurrency": 1, "depth": 2, "timeout": "60s"})
        await serve_deployment(world, gateway, declared, engine)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(post_chat(http, gateway))
            await until(lambda: len(engine.calls) == 1, what="the first being there")
            leaves, stays = (group.create_task(post_chat(http, gateway)) for _ in range(2))
            await queued(gateway, http, 2)
            leaves.cancel()
            await queued(gateway, http, 1)
            # Without a new request, the waiting one is admitted by the new settings.
            await world.put(with_routing("m", queueing={"concurrency": 2}))
            await until(lambda: len(engine.calls) == 2, what="the second being let in")
            door.open()
        assert (first.result()[0], stays.result()[0]) == (200, 200)
        await queued(gateway, http, 0)


async def test_a_stream_that_waits_for_its_turn_hears_from_us(
    world: World, http: aiohttp.ClientSession
) -> None:
    door = Door()
    async with lively(world) as gateway, running(FakeEngine("m-0", door)) as engine:
        declared = with_routing("m", queueing={"concurrency": 1, "depth": 9, "timeout": "60s"})
        await serve_deployment(world, gateway, declared, engine)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(post_chat(http, gateway))
            await until(lambda: len(engine.calls) == 1, what="the first being there")
            whole = group.create_task(post_chat(http, gateway))
            body = {"model": "m", "stream": True}
            async with http.post(gateway.url + CHAT, json=body) as response:
                assert response.status == 200
                assert response.content_type == "text/event-stream"
                assert await response.content.readexactly(22) == b": waiting\n\n" * 2
                door.open()
                text = (await response.read()).replace(b": waiting\n\n", b"")
        assert text.startswith(b"data: {")
        assert text.endswith(gateway_engine_scripts.DONE)
        assert (first.result()[0], whole.result()[0]) == (200, 200)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("script", "code"),
    [
        pytest.param(refuses(400, "bad_thing"), b'"code":"bad_thing"', id="a-clients-mistake"),
        pytest.param(
            gateway_engine_scripts.dies_at_once, b'"code":"upstream_failed"', id="a-dead-engine"
        ),
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
        declared = with_routing("m", queueing={"concurrency": 1, "depth": 9, "timeout": "60s"})
        await serve_deployment(world, gateway, declared, engine)
        async with asyncio.TaskGroup() as group:
            group.create_task(post_chat(http, gateway))
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
