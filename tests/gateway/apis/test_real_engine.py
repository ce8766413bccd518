"""The official clients with a real engine: requests have the effect that they ask for."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import anthropic
import ollama
import pytest

from gateway.limits import GatewayLimits
from tests.support.engine_process import Engine
from tests.support.gateway_real_engine import in_front_of, tiny_engine
from tests.support.gateway_world import Running

pytestmark = pytest.mark.mlx

HELLO = "Who is there?"
COLD = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny_engine(tmp_path_factory.mktemp("surfaces")) as engine:
        yield engine


@pytest.fixture
async def behind(engine: Engine) -> AsyncIterator[Running]:
    async with in_front_of(engine) as gateway:
        yield gateway


@pytest.fixture
async def spoken(behind: Running) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(behind.url) as client:
        yield client


@pytest.fixture
async def messenger(behind: Running) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=behind.url, api_key="none", max_retries=0
    ) as client:
        yield client


async def test_every_api_says_the_same(
    engine: Engine, spoken: ollama.AsyncClient, messenger: anthropic.AsyncAnthropic
) -> None:
    wanted = engine.chat(HELLO, max_tokens=12).json
    text, usage = wanted["choices"][0]["message"]["content"], wanted["usage"]
    messages = [{"role": "user", "content": HELLO}]
    chat = await spoken.chat("tiny", messages, options=COLD)
    assert (chat.message.content, chat.done_reason) == (text, "length")
    assert (chat.prompt_eval_count, chat.eval_count) == (usage["prompt_tokens"], 12)
    assert chat.eval_duration
    parts = [part async for part in await spoken.generate("tiny", HELLO, stream=True, options=COLD)]
    assert "".join(part.response or "" for part in parts) == text
    assert parts[-1].prompt_eval_duration
    async with messenger.messages.stream(
        model="tiny",
        max_tokens=12,
        messages=[{"role": "user", "content": HELLO}],
        extra_body={"temperature": 0},
    ) as stream:
        assert "".join([piece async for piece in stream.text_stream]) == text
        done = await stream.get_final_message()
    assert done.stop_reason == "max_tokens"
    counted = await messenger.messages.count_tokens(
        model="tiny", messages=[{"role": "user", "content": HELLO}]
    )
    assert counted.input_tokens == usage["prompt_tokens"]
    used = done.usage
    assert used.input_tokens + (used.cache_read_input_tokens or 0) == usage["prompt_tokens"]


async def test_tokens_and_text_through_a_gateway(
    behind: Running, http: aiohttp.ClientSession
) -> None:
    async def ask(path: str, **fields: Any) -> Any:
        async with http.post(f"{behind.url}/{path}", json={"model": "tiny", **fields}) as answer:
            return await answer.json()

    tokens = (await ask("tokenize", prompt="created equal"))["tokens"]
    assert await ask("detokenize", tokens=tokens) == {"prompt": "created equal"}
    ranked = (await ask("v1/rerank", query="x", documents=["y", "x"]))["results"]
    assert [result["document"]["text"] for result in ranked] == ["x", "y"]
    scored = (await ask("v1/score", text_1="x", text_2=["y", "x"]))["data"]
    assert scored[1]["score"] == pytest.approx(1, abs=1e-5)


async def test_stop_sequences_and_full_contexts(messenger: anthropic.AsyncAnthropic) -> None:
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": HELLO}]
    cold = {"temperature": 0}
    free = await messenger.messages.create(
        model="tiny", max_tokens=12, messages=messages, extra_body=cold
    )
    word = getattr(free.content[0], "text", "")[4:7]
    cut = await messenger.messages.create(
        model="tiny", max_tokens=12, messages=messages, stop_sequences=[word], extra_body=cold
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
    messages = [{"role": "user", "content": "e" * 4000}]
    counted = await messenger.messages.count_tokens(model="tiny", messages=messages)
    room = 4096 - counted.input_tokens
    assert 0 < room < 500
    full = await messenger.messages.create(
        model="tiny", max_tokens=8000, messages=messages, extra_body=cold
    )
    assert (full.stop_reason, full.usage.output_tokens) == ("model_context_window_exceeded", room)


async def test_texts_as_they_are_formats_and_vectors(
    engine: Engine, spoken: ollama.AsyncClient
) -> None:
    raw = await spoken.generate("tiny", HELLO, raw=True, options=COLD)
    wanted = engine.post("/v1/completions", prompt=HELLO, max_tokens=12, temperature=0).json
    assert raw.response == wanted["choices"][0]["text"]
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    formed = await spoken.chat("tiny", [{"role": "user", "content": HELLO}], format=schema)
    assert formed.message.content is not None
    assert formed.message.content.replace(" ", "").replace("\n", "") == "{}"
    embedded = await spoken.embed("tiny", ["hello", "there"])
    assert [len(embedding) for embedding in embedded.embeddings] == [64, 64]
    response = await spoken.embeddings("tiny", "there")
    assert list(response.embedding) == list(embedded.embeddings[1])
    loaded = await spoken.generate("tiny")
    assert loaded.done_reason == "load"


@pytest.mark.ci
async def test_100_concurrent_requests_are_answered(
    engine: Engine, http: aiohttp.ClientSession
) -> None:
    """More than the engine's slots and its queue hold: the rest waits in the gateway."""
    wanted = engine.chat(HELLO, max_tokens=12).json["choices"][0]["message"]["content"]

    async def ask(behind: Running, number: int) -> str:
        is_streamed = bool(number % 2)
        body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "stream": is_streamed}
        body["messages"] = [{"role": "user", "content": HELLO}]
        async with http.post(f"{behind.url}/v1/chat/completions", json=body) as response:
            raw = await response.text()
            assert response.status == 200, raw
        if not is_streamed:
            return str(json.loads(raw)["choices"][0]["message"]["content"])
        *events, done = [part for part in raw.split("\n\n") if part.startswith("data: ")]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert done == "data: [DONE]"
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)

    limits = GatewayLimits(drain_timeout_s=0)
    async with in_front_of(engine, limits=limits) as gateway, asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(gateway, number)) for number in range(100)]
    assert {task.result() for task in asked} == {wanted}
