"""OpenAI's client: models, chats, streams, structured output, tools, responses, completions, embeddings, errors."""

from collections.abc import AsyncIterator
from typing import Literal

import openai
import pydantic
import pytest

from tests.support.gateway_world import Running

pytestmark = pytest.mark.mlx
HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "developer", "content": "You are kind."},
    {"role": "user", "content": "Who is there?"},
]


class Verdict(pydantic.BaseModel):
    """A verdict that even a model of random weights can give."""

    colour: Literal["red", "green"]
    is_sure: bool


@pytest.fixture(scope="module")
async def client(gateway: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        yield client


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "mlx-fleet"


async def test_chats_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="tiny", messages=HELLO)
    assert whole.usage is not None
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 150)
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True
        )
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_structured_output(client: openai.AsyncOpenAI) -> None:
    parsed = await client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Verdict
    )
    assert isinstance(parsed.choices[0].message.parsed, Verdict)
    async with client.chat.completions.stream(
        model="tiny", messages=HELLO, response_format=Verdict
    ) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Verdict)
    called = await client.chat.completions.parse(
        model="tiny",
        messages=HELLO,
        tools=[openai.pydantic_function_tool(Verdict)],
        tool_choice="required",
        parallel_tool_calls=False,  # random weights call on and on
    )
    calls = called.choices[0].message.tool_calls
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, Verdict)


async def test_responses(client: openai.AsyncOpenAI) -> None:
    parsed = await client.responses.parse(
        model="tiny", input="Who is there?", text_format=Verdict, instructions="You are kind."
    )
    assert isinstance(parsed.output_parsed, Verdict)
    async with client.responses.stream(model="tiny", input="Who is there?") as stream:
        kinds = [event.type async for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"  # by its limit of tokens


async def test_responses_that_go_on(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="tiny", input="Who is there?", max_output_tokens=9)
    async with client.responses.stream(
        model="tiny", input="Who?", previous_response_id=first.id, max_output_tokens=9
    ) as stream:
        last = [event async for event in stream][-1]
    assert last.type == "response.incomplete"
    second = last.response
    assert second.previous_response_id == first.id
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 9
    begun = await client.responses.create(
        model="tiny", input="So?", previous_response_id=second.id, background=True
    )
    assert begun.status == "queued"
    assert (await client.responses.retrieve(second.id)).output_text == second.output_text
    assert len((await client.responses.input_items.list(begun.id)).data) == 5


async def test_completions_and_embeddings(client: openai.AsyncOpenAI) -> None:
    done = await client.completions.create(model="tiny", prompt="hello")
    assert done.choices[0].text
    # The client asks for base64 by default, and decodes it.
    made = await client.embeddings.create(model="tiny", input=["hello", "there"])
    short = await client.embeddings.create(model="tiny", input="hello", dimensions=16)
    floats = await client.embeddings.create(model="tiny", input="hello", encoding_format="float")
    assert [len(embedding.embedding) for embedding in made.data] == [64, 64]
    assert len(short.data[0].embedding) == 16
    assert floats.data[0].embedding == pytest.approx(made.data[0].embedding, abs=1e-6)


async def test_errors_have_their_classes(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.chat.completions.create(model="nobody", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(model="tiny", messages=HELLO, temperature=7)
