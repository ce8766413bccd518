"""Stored, continued and background responses, through OpenAI's own client."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from openai.types.responses import Response

from gateway.limits import GatewayLimits
from machinery.clock import SystemClock
from store.memory import MemoryTransport
from tests.support.gateway_calls import put_api_key
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_responses_engine import respond, response_body
from tests.support.gateway_world import Running, World, running_gateway
from tests.support.waiting import until, until_async


def client_of(gateway: Running, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def limits(tmp_path: Path) -> GatewayLimits:
    return GatewayLimits(drain_timeout_s=0.0, resume_timeout_s=5.0, state_dir=tmp_path / "state")


@pytest.fixture
async def gateway(world: World, limits: GatewayLimits) -> AsyncIterator[Running]:
    async with running_gateway(world.transport, limits) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(gateway) as openai_client:
        yield openai_client


async def ended(client: openai.AsyncOpenAI, response: Response) -> Response:
    latest = response

    async def is_over() -> bool:
        nonlocal latest
        latest = await client.responses.retrieve(response.id)
        return latest.status not in ("queued", "in_progress")

    await until_async(is_over, limit_s=60, what="the end of the response")
    return latest


async def test_a_conversation_goes_on_from_its_last_response(
    gateway: Running, client: openai.AsyncOpenAI
) -> None:
    (engine,) = await gateway.serve(respond)
    first = await client.responses.create(model="m", input="one", instructions="Be kind.")
    assert first.model_dump()["store"] is True
    async with client.responses.stream(
        model="m", input=[{"role": "user", "content": "two"}], previous_response_id=first.id
    ) as stream:
        second = await stream.get_final_response()
    third = await client.responses.create(model="m", input="three", previous_response_id=second.id)
    assert [first.output_text, second.output_text, third.output_text] == [
        "1 items", "3 items", "5 items",
    ]  # fmt: skip
    sent = orjson.loads(engine.calls[2].body)
    assert [(item["role"], item["content"]) for item in sent["input"][2:3]] == [("user", "two")]
    assert sent["input"][3] == second.output[0].model_dump(exclude_none=True)
    assert sent["previous_response_id"] == third.previous_response_id == second.id
    assert "instructions" not in sent
    retrieved = await client.responses.retrieve(third.id)
    assert retrieved.model_dump() == third.model_dump()
    items = [
        item async for item in client.responses.input_items.list(third.id, limit=2, order="asc")
    ]
    assert len({item.id for item in items}) == len(items) == 5
    await client.responses.delete(second.id)
    for call in (
        client.responses.retrieve(second.id),
        client.responses.delete(second.id),
        client.responses.create(model="m", input="x", previous_response_id=third.id),
    ):
        with pytest.raises(openai.NotFoundError, match=f"There is no response '{second.id}'"):
            await call


async def test_what_is_not_stored_is_not_there(
    gateway: Running, client: openai.AsyncOpenAI
) -> None:
    (engine,) = await gateway.serve(respond)
    body = {"model": "m", "input": "x", "store": False}
    response = await client.responses.create(model="m", input="x", store=False)
    assert orjson.loads(engine.calls[0].body) == body
    with pytest.raises(openai.NotFoundError, match="'store' false") as caught:
        await client.responses.create(model="m", input="y", previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"conversation": "conv_1"}, "previous_response_id"),
        ({"background": True, "store": False}, "leave 'store' out"),
        ({"background": True, "stream": True}, "poll GET"),
        ({"store": "no"}, "Invalid 'store'"),
    ]
    for fields, says in refused:
        with pytest.raises(openai.BadRequestError, match=says):
            await client.responses.create(model="m", input="x", extra_body=fields)
    assert len(engine.calls) == 1


async def test_a_key_has_its_own_responses(tmp_path: Path, limits: GatewayLimits) -> None:
    world = World(MemoryTransport(SystemClock()))
    await put_api_key(world, "sk-one", name="one")
    await put_api_key(world, "sk-two", name="two")
    limits = replace(limits, asks_for_keys=True)
    async with (
        running(FakeEngine("m-0", respond)) as engine,
        running_gateway(world.transport, limits) as gateway,
        client_of(gateway, "sk-one") as one,
        client_of(gateway, "sk-two") as two,
    ):
        await gateway.knows_keys()
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
        response = await one.responses.create(model="m", input="x")
        for call in (
            two.responses.retrieve(response.id),
            two.responses.delete(response.id),
            two.responses.cancel(response.id),
            two.responses.create(model="m", input="y", previous_response_id=response.id),
        ):
            with pytest.raises(openai.NotFoundError, match="for this API key"):
                await call
        assert (await one.responses.retrieve(response.id)).id == response.id
        # Another key that gets the name later has nothing of the first, which goes.
        await put_api_key(world, "sk-new", name="one", created=datetime(2026, 2, 2, tzinfo=UTC))
        await until(lambda: gateway.gateway.fleet_state.keyring.find(b"sk-new"), what="the new key")
        with pytest.raises(openai.NotFoundError):
            await one.with_options(api_key="sk-new").responses.retrieve(response.id)
    async with running_gateway(world.transport, replace(limits, gone_key_s=0.0)) as gateway:
        database = gateway.gateway.handler.responses.require()
        await until(lambda: not database.owners(), what="the end of the deleted key's responses")


async def test_the_largest_body_is_stored(limits: GatewayLimits) -> None:
    limits = replace(limits, max_body_bytes=200_000, max_body_memory_bytes=200_000)
    async with running_gateway(limits=limits) as gateway, client_of(gateway) as client:
        await gateway.serve(respond)
        response = await client.responses.create(model="m", input="x" * 190_000)
        assert (await client.responses.retrieve(response.id)).id == response.id
        with pytest.raises(openai.APIStatusError, match="larger than 200000 bytes"):
            await client.responses.create(
                model="m", input="y" * 20_000, previous_response_id=response.id
            )
        assert gateway.gateway.handler.body_memory.used == 0


async def test_without_a_state_folder_nothing_is_stored() -> None:
    async with running_gateway() as gateway, client_of(gateway) as client:
        await gateway.serve(respond)
        response = await client.responses.create(model="m", input="x", store=True)
        assert response.model_dump()["store"] is False
        for call in (
            client.responses.retrieve(response.id),
            client.responses.create(model="m", input="y", previous_response_id=response.id),
            client.responses.create(model="m", input="y", background=True),
        ):
            with pytest.raises(openai.InternalServerError, match="--state-dir"):
                await call


async def test_a_background_response_is_polled_and_continued(
    gateway: Running, client: openai.AsyncOpenAI
) -> None:
    held = asyncio.Event()

    async def slow(call: Call) -> None:
        if orjson.loads(call.body)["input"] == "slow":
            await held.wait()
        await respond(call)

    await gateway.serve(slow)
    begun = await client.responses.create(model="m", input="slow", background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    running_now = await client.responses.retrieve(begun.id)
    assert running_now.status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="still runs"):
        await client.responses.create(model="m", input="y", previous_response_id=begun.id)
    held.set()
    done = await ended(client, begun)
    assert (done.id, done.status, done.output_text) == (begun.id, "completed", "1 items")
    assert (await client.responses.cancel(begun.id)).status == "completed"
    third = await client.responses.create(model="m", input="y", previous_response_id=begun.id)
    assert third.output_text == "3 items"
    with pytest.raises(openai.BadRequestError, match="'background'"):
        await client.responses.cancel(third.id)
    lost = await client.responses.create(model="nobody", input="x", background=True)
    failed = await ended(client, lost)
    assert failed.status == "failed"
    assert failed.error is not None
    assert "does not exist" in failed.error.message


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_cancelled_background_response_leaves_its_engine(
    gateway: Running, client: openai.AsyncOpenAI, *, is_deleted: bool
) -> None:
    async def hangs(_: Call) -> None:
        await asyncio.Event().wait()

    (engine,) = await gateway.serve(hangs)
    begun = await client.responses.create(model="m", input="x", background=True)
    await until(lambda: engine.calls, what="the request at the engine")
    if is_deleted:
        await client.responses.delete(begun.id)
    else:
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
    await until(lambda: engine.abandoned, what="the end at the engine")
    assert not gateway.gateway.handler.running()
    if not is_deleted:
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"


async def test_a_response_that_cannot_be_stored_is_sent_with_a_warning(
    gateway: Running, client: openai.AsyncOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    async def without_id(call: Call) -> None:
        await call.answer(orjson.dumps({**response_body(call, "hi"), "id": 7}))

    await gateway.serve(without_id)
    response = await client.responses.with_raw_response.create(model="m", input="x")
    assert response.http_response.status_code == 200
    assert "not stored" in response.headers["warning"]
    assert "cannot store a response" in caplog.text
