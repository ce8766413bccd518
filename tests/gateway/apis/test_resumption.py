"""Streams of Anthropic's and Ollama's clients continue when their engine dies."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import ollama
import orjson
import pytest

from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_resume_engine import Marked, Request, clean, events
from tests.support.gateway_world import Running, World

BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "stream": True,
}
WHOLE = b"".join(events(Request("/v1/chat/completions", BODY)))


def text() -> str:
    """Return the text of an uninterrupted engine."""
    lines = clean(WHOLE).splitlines()
    chunks = [orjson.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    return "".join(delta.get("content", "") for delta in deltas)


@pytest.fixture(params=[300, 700, 1100])
async def script(
    request: pytest.FixtureRequest, world: World, gateway: Running
) -> AsyncIterator[Marked]:
    script = Marked(cuts=[request.param])
    async with (
        running(FakeEngine("m-0", script)) as engine,
        running(FakeEngine("m-1", script)) as two,
    ):
        await world.serve("m", engine, two)
        await gateway.knows("m", ready=2)
        yield script


async def test_messages_go_on(script: Marked, gateway: Running) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client,
        client.messages.stream(
            model="m", max_tokens=99, messages=[{"role": "user", "content": "hello"}]
        ) as stream,
    ):
        assert "".join([piece async for piece in stream.text_stream]) == text()
        done = await stream.get_final_message()
    assert (done.stop_reason, done.usage.output_tokens) == ("end_turn", 8)
    assert len(script.bodies) == 2


async def test_lines_go_on(script: Marked, gateway: Running) -> None:
    async with ollama.AsyncClient(gateway.url) as client:
        parts = [part async for part in await client.chat("m", BODY["messages"], stream=True)]
    assert "".join(part.message.content or "" for part in parts) == text()
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("stop", 8)
    assert len(script.bodies) == 2
