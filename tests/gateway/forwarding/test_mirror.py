"""Shadow traffic: copies reach the mirror, and clients notice nothing of it."""

import asyncio

import orjson
import pytest

from gateway.routing.table import DEFAULT_CONCURRENCY
from schemas.route import Mirror, ModelRoute
from tests.support.gateway_engine_scripts import chat, dies_at_once
from tests.support.gateway_fake_engine import Call, FakeEngine, Script
from tests.support.gateway_world import Running, World, deployment, route
from tests.support.waiting import until, until_async


def mirrored(percent: int = 100) -> ModelRoute:
    made = route("r", "public", m=1)
    spec = made.spec.model_copy(update={"mirror": Mirror(deployment="new", percent=percent)})
    return made.model_copy(update={"spec": spec})


@pytest.fixture
async def engine(world: World, gateway: Running) -> FakeEngine:
    (fake_engine,) = await gateway.serve(chat)
    await world.put(mirrored())
    await gateway.knows("public", ready=1)
    return fake_engine


async def outcome(gateway: Running, name: str, number: int) -> None:
    line = f'fleet_gateway_mirrored_total{{outcome="{name}"}} {number}'

    async def is_counted() -> bool:
        return line in await gateway.metrics()

    await until_async(is_counted, what=line)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_mirror_gets_a_copy_and_the_client_the_answer(
    gateway: Running, engine: FakeEngine, *, is_streamed: bool
) -> None:
    (shadow,) = await gateway.serve(chat, of="new")
    _, body, response = await gateway.chat(model="public", stream=is_streamed)
    assert response.headers["x-fleet-replica"] == "m-0"
    assert b"new-0" not in (body if is_streamed else orjson.dumps(body))
    await until(lambda: len(shadow.calls) == 1, what="the copy")
    assert orjson.loads(shadow.calls[0].body)["messages"] == []
    assert orjson.loads(shadow.calls[0].body)["model"] == "new"
    await outcome(gateway, "answered", 1)
    assert len(gateway.gateway.recorder.journal) == 1


@pytest.mark.parametrize("script", [dies_at_once, None])
async def test_a_mirror_that_fails_or_is_not_there_costs_the_client_nothing(
    gateway: Running, engine: FakeEngine, script: Script | None
) -> None:
    (shadow,) = await gateway.start(script or chat, of="new")
    if script is None:
        await gateway.world.put(deployment("new"))
        await gateway.knows("new", ready=0)
    else:
        await gateway.world.serve("new", shadow)
        await gateway.knows("new", ready=1)
    status, _, _ = await gateway.chat(model="public")
    assert status == 200
    await outcome(gateway, "dropped" if script is None else "failed", 1)
    assert len(shadow.calls) == (script is not None)  # it is not repeated


async def test_copies_take_free_slots_only(gateway: Running, engine: FakeEngine) -> None:
    """Copies that a slow engine refuses would eject it, and a route's own share of requests would go elsewhere."""
    held = asyncio.Event()
    running_ = 0

    async def slow(call: Call) -> None:
        nonlocal running_
        if running_ == DEFAULT_CONCURRENCY:
            await call.answer(b'{"error":{"message":"full","code":"queue_full"}}', 429)
            return
        running_ += 1
        await held.wait()
        running_ -= 1
        await chat(call)

    (shadow,) = await gateway.serve(slow, of="new")
    for _ in range(20):
        status, _, _ = await gateway.chat(model="public")
        assert status == 200
    await until(lambda: len(shadow.calls) == DEFAULT_CONCURRENCY, what="the copies")
    await outcome(gateway, "dropped", 20 - DEFAULT_CONCURRENCY)
    assert gateway.gateway.load_tracker.outliers.ejected_origins == set()
    held.set()
    await outcome(gateway, "answered", DEFAULT_CONCURRENCY)
    assert len(engine.calls) == 20


async def test_a_share_of_the_requests(gateway: Running, engine: FakeEngine) -> None:
    (shadow,) = await gateway.serve(chat, of="new")
    await gateway.world.put(mirrored(percent=30))
    await gateway.knows("new", ready=1)
    await until(
        lambda: gateway.gateway.table_cache.table.models["public"].mirror is not None
        and gateway.gateway.table_cache.table.models["public"].mirror.percent == 30
    )
    for _ in range(100):
        await gateway.chat(model="public")
    await until(lambda: not gateway.gateway.handler.mirror.copies)
    assert 0 < len(shadow.calls) < 100  # the draws of tests are not even
