"""Ollama's client with its default settings: chats, streams, formats, tools, embeddings, lists, model management."""

from collections.abc import AsyncIterator
from typing import Literal

import ollama
import pydantic
import pytest

from tests.support.gateway_world import Running

pytestmark = pytest.mark.mlx
HELLO = [{"role": "user", "content": "Who is there?"}]


class Verdict(pydantic.BaseModel):
    """A verdict that even a model of random weights can give."""

    colour: Literal["red", "green"]
    is_sure: bool


@pytest.fixture(scope="module")
async def client(gateway: Running) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(gateway.url) as client:
        yield client


async def test_chats_whole_and_streamed(client: ollama.AsyncClient) -> None:
    whole = await client.chat("tiny", HELLO)
    assert (whole.done_reason, whole.eval_count) == ("length", 150)
    parts = [part async for part in await client.chat("tiny:latest", HELLO, stream=True)]
    assert "".join(part.message.content or "" for part in parts)
    assert parts[-1].done
    generated = await client.generate("tiny", "hello", options={"num_predict": 12})
    assert generated.eval_count == 12


async def test_a_format(client: ollama.AsyncClient) -> None:
    formed = await client.chat("tiny", HELLO, format=Verdict.model_json_schema())
    assert isinstance(Verdict.model_validate_json(formed.message.content or ""), Verdict)


async def test_embeddings(client: ollama.AsyncClient) -> None:
    response = await client.embed("tiny", ["hello", "there"])
    short = await client.embed("tiny", "hello", dimensions=16)
    assert [len(vector) for vector in (*response.embeddings, *short.embeddings)] == [64, 64, 16]


async def test_what_there_is_and_what_clients_may_not_do(client: ollama.AsyncClient) -> None:
    assert [model.model for model in (await client.list()).models] == ["tiny"]
    assert [model.model for model in (await client.ps()).models] == ["tiny"]
    assert (await client.show("tiny")).capabilities == ["completion", "tools"]
    assert (await client.pull("tiny")).status == "success"
    with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
        await client.pull("qwen3")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="kind: ModelRoute"):
        await client.copy("tiny", "small")
    with pytest.raises(ollama.ResponseError, match="fleetctl delete"):
        await client.delete("tiny")
