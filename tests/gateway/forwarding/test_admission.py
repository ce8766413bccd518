"""Admission: the slot queue in values, and over HTTP the waits for a slot."""

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import errors
from gateway.forwarding.admission import MAX_RETRY_S, MIN_RETRY_S, ConcurrencyLimiter, Slot
from gateway.forwarding.policy import QueuePolicy
from gateway.limits import GatewayLimits
from tests.support.clock import FakeClock
from tests.support.gateway_calls import with_routing
from tests.support.gateway_engine_scripts import DONE, chat, delta, refuses
from tests.support.gateway_fake_engine import Call, Script
from tests.support.gateway_world import Running, running_gateway
from tests.support.waiting import until, until_async


def lines(concurrency: int, depth: int) -> QueuePolicy:
    return QueuePolicy(concurrency=concurrency, depth=depth, timeout_s=30.0)


def limiter(concurrency: int, depth: int) -> tuple[ConcurrencyLimiter, FakeClock]:
    clock = FakeClock()
    return ConcurrencyLimiter("m", lines(concurrency, depth), clock, 5.0), clock


def entered(queue: ConcurrencyLimiter) -> Slot:
    place = queue.add()
    assert place is not None
    return place


def admitted(places: list[Slot]) -> list[bool]:
    return [place.is_admitted for place in places]


def test_so_many_run_so_many_wait_and_the_rest_is_turned_away() -> None:
    queue, _ = limiter(2, 1)
    places = [queue.add() for _ in range(4)]
    assert [place and place.is_admitted for place in places] == [True, True, False, None]


def test_a_refusal_tells_the_length_of_the_queue() -> None:
    refusal = errors.queue_full("m", running=2, waiting=1, retry_after_s=1)
    assert "2 requests running and 1 request waiting," in refusal.message


def test_a_free_slot_goes_to_the_longest_waiting() -> None:
    queue, _ = limiter(1, 3)
    places = [entered(queue) for _ in range(3)]
    queue.leave(places[0])
    assert admitted(places) == [True, True, False]
    queue.leave(places[0])  # once is enough
    assert admitted(places) == [True, True, False]
    queue.leave(places[1])
    assert (queue.running, queue.waiting) == (1, 0)


def test_a_larger_limit_admits_at_once_and_a_smaller_one_refuses_none() -> None:
    queue, _ = limiter(1, 5)
    places = [entered(queue) for _ in range(4)]
    queue.change(lines(3, 5))
    assert admitted(places) == [True, True, True, False]
    queue.change(lines(1, 0))
    assert (queue.running, queue.waiting) == (3, 1)
    queue.leave(places[0])
    assert (queue.running, queue.waiting) == (2, 1)
    queue.change(None)
    assert admitted(places) == [True] * 4


async def test_when_to_come_again_follows_from_the_pace() -> None:
    queue, clock = limiter(1, 100)
    places = [entered(queue) for _ in range(10)]
    for place in places[:3]:  # one in two seconds
        await clock.advance(2.0)
        queue.leave(place)
    assert queue.retry_after_s() == 14  # six wait before it


async def test_without_a_pace_it_is_a_second_and_never_more_than_a_minute() -> None:
    assert limiter(1, 0)[0].retry_after_s() == MIN_RETRY_S
    queue, clock = limiter(1, 100)
    for _ in range(51):
        entered(queue)
    await clock.advance(1000.0)
    assert queue.retry_after_s() == MAX_RETRY_S


moves = st.lists(st.tuples(st.sampled_from(["enter", "leave", "change"]), st.integers(0, 5)))


@given(moves)
def test_whatever_happens(story: list[tuple[str, int]]) -> None:
    """No request overtakes another or waits beside a free slot, and the limits hold."""
    (queue, _), limit = limiter(2, 3), lines(2, 3)
    inside: list[Slot] = []
    for what, number in story:
        before, through = queue.running, [p for p in inside if p.is_admitted]
        if what == "enter":
            place = queue.add()
            if place is not None:
                inside.append(place)
            else:
                assert queue.waiting >= limit.depth
        elif what == "leave" and inside:
            queue.leave(inside.pop(number % len(inside)))
        elif what == "change":
            limit = lines(number + 1, number)
            queue.change(limit)
        order = admitted(inside)
        assert order == sorted(order, reverse=True)
        assert queue.running == sum(order)
        assert queue.waiting == len(order) - sum(order)
        if queue.running > limit.concurrency:
            assert queue.running <= max(before, len(through))  # a bound that came later
        assert not queue.waiting or queue.running >= limit.concurrency


class Door:
    """An engine script that answers when it is opened, and counts waiting requests."""

    def __init__(self, then: Script = chat) -> None:
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


async def queued(gateway: Running, number: int) -> None:
    async def is_shown() -> bool:
        line = f'fleet_gateway_queue_waiting{{model="m"}} {number}\n'
        return line in await gateway.metrics()

    await until_async(is_shown, what=f"{number} in the queue", every_s=0.01)


async def test_so_many_are_let_through_the_rest_waits_in_order_and_one_too_many_is_refused(
    gateway: Running,
) -> None:
    door = Door()
    declared = with_routing("m", queueing={"concurrency": 2, "depth": 3, "timeout": "60s"})
    (engine,) = await gateway.serve(door, of=declared)
    async with asyncio.TaskGroup() as group:
        asked = []
        for number in range(5):
            asked.append(group.create_task(gateway.chat(user=number)))
            await queued(gateway, max(0, number - 1))
            await until(lambda: len(engine.calls) == min(2, len(asked)), what="those inside")
        status, body, response = await gateway.chat()
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert body["error"]["type"] == "rate_limit_error"
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert len(engine.calls) == 2
        door.open()
    assert [task.result()[0] for task in asked] == [200] * 5
    assert door.most == 2
    # Two are sent in one moment; which of the two the engine reads first is not determined.
    assert [sorted(door.order[:2]), sorted(door.order[2:4])] == [[0, 1], [2, 3]]
    assert 'queue_refused_total{reason="queue_full"} 1' in await gateway.metrics()


async def test_a_stream_keeps_its_place_to_its_end(gateway: Running) -> None:
    ends = asyncio.Event()

    async def streams(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(delta("a"))
        await ends.wait()
        await call.chunk(DONE)
        await call.send(b"0\r\n\r\n")

    declared = with_routing("m", queueing={"concurrency": 1, "depth": 9})
    (engine,) = await gateway.serve(streams, of=declared)
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(gateway.chat(stream=True)) for _ in range(3)]
        await queued(gateway, 2)
        # The place is taken before the engine has heard of the request.
        await until(lambda: len(engine.calls) == 1, what="the first being there")
        ends.set()
    assert all(task.result()[1].endswith(DONE) for task in asked)


async def test_too_long_a_wait_ends_with_retry_after(gateway: Running) -> None:
    door = Door()
    declared = with_routing("m", queueing={"concurrency": 1, "depth": 9, "timeout": "0s"})
    (engine,) = await gateway.serve(door, of=declared)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(gateway.chat())
        await until(lambda: len(engine.calls) == 1, what="the first being there")
        status, body, response = await gateway.chat()
        assert (status, body["error"]["code"]) == (503, "queue_timeout")
        assert int(response.headers["retry-after"]) >= 1
        headers = {"x-request-timeout": "0.05"}
        await gateway.world.put(with_routing("m", queueing={"concurrency": 1, "timeout": "60s"}))
        await queued(gateway, 0)
        async with gateway.post(json={"model": "m"}, headers=headers) as late:
            error = (await late.json())["error"]
            assert (late.status, error["code"]) in [
                (504, "request_timeout"),
                (503, "queue_timeout"),  # the store's news may come after the request
            ]
        door.open()
    assert first.result()[0] == 200


async def test_leaving_makes_room_and_a_larger_limit_admits_at_once(gateway: Running) -> None:
    door = Door()
    declared = with_routing("m", queueing={"concurrency": 1, "depth": 2, "timeout": "60s"})
    (engine,) = await gateway.serve(door, of=declared)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(gateway.chat())
        await until(lambda: len(engine.calls) == 1, what="the first being there")
        leaves, stays = (group.create_task(gateway.chat()) for _ in range(2))
        await queued(gateway, 2)
        leaves.cancel()
        await queued(gateway, 1)
        # Without a new request, the waiting one is admitted by the new settings.
        await gateway.world.put(with_routing("m", queueing={"concurrency": 2}))
        await until(lambda: len(engine.calls) == 2, what="the second being let in")
        door.open()
    assert (first.result()[0], stays.result()[0]) == (200, 200)
    await queued(gateway, 0)


@pytest.mark.parametrize(
    ("script", "first", "last"),
    [
        pytest.param(chat, b"data: {", DONE, id="answer"),
        pytest.param(refuses(400, "bad_thing"), b'data: {"error":', b'"code":"bad_thing"}}\n\n', id="error"),
    ],
)  # fmt: skip
async def test_a_stream_that_waits_for_its_turn_hears_from_us(
    script: Script, first: bytes, last: bytes
) -> None:
    door = Door(script)
    limits = GatewayLimits(drain_timeout_s=0.0, keep_alive_s=0.05)
    async with running_gateway(limits=limits) as gateway:
        declared = with_routing("m", queueing={"concurrency": 1, "depth": 9, "timeout": "60s"})
        (engine,) = await gateway.serve(door, of=declared)
        async with asyncio.TaskGroup() as group:
            whole = group.create_task(gateway.chat())
            await until(lambda: len(engine.calls) == 1, what="the first being there")
            async with gateway.post(json={"model": "m", "stream": True}) as response:
                assert response.status == 200
                assert response.content_type == "text/event-stream"
                assert await response.content.readexactly(22) == b": waiting\n\n" * 2
                door.open()
                text = (await response.read()).replace(b": waiting\n\n", b"")
        assert text.startswith(first)
        assert text.endswith(last)
        assert whole.result()[0] == (200 if script is chat else 400)
