"""pydantic-ai: texts, streams, structured output by a tool and by a schema."""

import pytest

from tests.gateway.clients.conftest import RunClient

pytestmark = [pytest.mark.ci, pytest.mark.mlx, pytest.mark.timeout(240)]


async def test_pydantic_ai(run_client: RunClient) -> None:
    found = await run_client("pydantic_ai")
    assert found["tokens"] == 150
    assert found["text"]
    assert found["streamed"]
    for way in ("verdict", "native"):
        assert found[way]["colour"] in ("red", "green")
        assert isinstance(found[way]["is_sure"], bool)
