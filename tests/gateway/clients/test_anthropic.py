"""Anthropic's client: models, messages, streams, tools, counts, errors."""

from collections.abc import AsyncIterator

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam

from tests.support.gateway_world import Running

pytestmark = pytest.mark.mlx
HELLO: list[MessageParam] = [{"role": "user", "content": "Who is there?"}]
VERDICT: ToolParam = {
    "name": "judge",
    "description": "Give a verdict.",
    "input_schema": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
async def client(gateway: Running) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none") as client:
        yield client


async def test_models(client: anthropic.AsyncAnthropic) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_messages_whole_and_streamed(client: anthropic.AsyncAnthropic) -> None:
    whole = await client.messages.create(
        model="tiny", max_tokens=40, messages=HELLO, system="You are kind."
    )
    # A model of random weights may draw its end.
    assert whole.stop_reason in ("max_tokens", "end_turn")
    assert 0 < whole.usage.output_tokens <= 40
    async with client.messages.stream(model="tiny", max_tokens=40, messages=HELLO) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text
    assert final.usage.output_tokens == 40
    counted = await client.messages.count_tokens(model="tiny", messages=HELLO)
    # A stream's message counts the part of the prompt that was cached apart.
    assert counted.input_tokens == final.usage.input_tokens + (
        final.usage.cache_read_input_tokens or 0
    )


async def test_a_tool_and_its_result(client: anthropic.AsyncAnthropic) -> None:
    asked = await client.messages.create(
        model="tiny",
        max_tokens=150,
        messages=HELLO,
        tools=[VERDICT],
        tool_choice={"type": "tool", "name": "judge", "disable_parallel_tool_use": True},
    )
    (call,) = [block for block in asked.content if block.type == "tool_use"]
    assert call.name == "judge"
    assert isinstance(call.input, dict)
    assert call.input["colour"] in ("red", "green")
    turns: list[MessageParam] = [
        *HELLO,
        {"role": "assistant", "content": asked.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "thanks"}],
        },
    ]
    after = await client.messages.create(
        model="tiny", max_tokens=20, messages=turns, tools=[VERDICT]
    )
    assert after.usage.output_tokens == 20


async def test_errors_have_their_classes(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await client.messages.create(model="nobody", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await client.messages.create(
            model="tiny", max_tokens=5, messages=HELLO, extra_body={"temperature": 9}
        )
