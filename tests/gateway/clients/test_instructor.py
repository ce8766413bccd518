"""instructor: structured output by a tool, by a schema, strictly, and while it streams."""

import pytest

from tests.gateway.clients.conftest import RunClient

pytestmark = [pytest.mark.ci, pytest.mark.mlx, pytest.mark.timeout(240)]


async def test_instructor(run_client: RunClient) -> None:
    found = await run_client("instructor")
    assert found.keys() == {"default", "json_schema", "tools_strict", "partial"}
    for verdict in found.values():
        assert verdict["colour"] in ("red", "green")
        assert isinstance(verdict["is_sure"], bool)
