"""Libraries of others that run as programs: LangChain, instructor, pydantic-ai, OpenAI's Agents SDK."""

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


async def test_instructor(run_client: RunClient) -> None:
    found = await run_client("instructor")
    assert found.keys() == {"default", "json_schema", "tools_strict", "partial"}
    for verdict in found.values():
        assert verdict["colour"] in ("red", "green")
        assert isinstance(verdict["is_sure"], bool)


async def test_pydantic_ai(run_client: RunClient) -> None:
    found = await run_client("pydantic_ai")
    assert found["tokens"] == 150
    assert found["text"]
    assert found["streamed"]
    for way in ("verdict", "native"):
        assert found[way]["colour"] in ("red", "green")
        assert isinstance(found[way]["is_sure"], bool)


async def test_openai_agents(run_client: RunClient) -> None:
    found = await run_client("openai_agents")
    assert found.keys() == {"responses", "chat_completions"}
    for api, got in found.items():
        for way in ("verdict", "streamed", "after_tool"):
            assert got[way]["colour"] in ("red", "green"), (api, way)
        assert got["called"], api  # a model of random weights may call it again
        assert set(got["called"]) <= {"C", "F"}
    assert found["responses"]["deltas"] == found["responses"]["streamed"]
