"""LangChain's OpenAI client: chats, streams, tools, structured output, embeddings."""

import pytest

from tests.gateway.clients.conftest import RunClient

pytestmark = [pytest.mark.ci, pytest.mark.mlx, pytest.mark.timeout(240)]


async def test_langchain_openai(run_client: RunClient) -> None:
    found = await run_client("langchain")
    assert (found["finish"], found["tokens"]) == ("length", 150)
    assert found["text"]
    assert found["streamed"]
    assert found["verdict"]["colour"] in ("red", "green")
    assert {name for name, _ in found["calls"]} == {"weather"}
    assert {arguments["unit"] for _, arguments in found["calls"]} <= {"C", "F"}
    assert found["widths"] == [64, 64]
