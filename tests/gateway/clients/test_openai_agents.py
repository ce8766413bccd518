"""OpenAI's Agents SDK over the Responses API and over chat completions: structured output, streams, tools."""

import pytest

from tests.gateway.clients.conftest import RunClient

pytestmark = [pytest.mark.ci, pytest.mark.mlx, pytest.mark.timeout(240)]


async def test_openai_agents(run_client: RunClient) -> None:
    found = await run_client("openai_agents")
    assert found.keys() == {"responses", "chat_completions"}
    for api, got in found.items():
        for way in ("verdict", "streamed", "after_tool"):
            assert got[way]["colour"] in ("red", "green"), (api, way)
        assert got["called"], api  # a model of random weights may call it again
        assert set(got["called"]) <= {"C", "F"}
    assert found["responses"]["deltas"] == found["responses"]["streamed"]
