"""The route that shows prompts to other agents, over TLS on a real socket: which nodes it answers."""

from pathlib import Path

import pytest

from identity.credentials import Credentials
from identity.names import Role
from nodeagent.api.prompt_routes import PromptRoutes
from nodeagent.replicas.deployment_replicas import StoredSiblings
from store import codec
from store.memory import MemoryTransport
from tests.support.agent_api import CLOCK, serving
from tests.support.identities import TestAuthority
from tests.support.nodeagent_plans import wanted


@pytest.mark.parametrize(("role", "name", "status"), [
    (Role.NODE, "a", 404),  # it may ask; the engine is gone
    (Role.NODE, "b", 403), (Role.GATEWAY, "a", 0), (Role.ADMIN, "a", 403),
])  # fmt: skip
async def test_only_a_node_of_the_same_deployment_may_ask(
    tmp_path: Path, role: Role, name: str, status: int
) -> None:
    fleet = TestAuthority(tmp_path / "ids")
    store = MemoryTransport(CLOCK)
    await store.commit([], [codec.put_spec(wanted())])
    routes = PromptRoutes(node="mac-2", siblings=StoredSiblings(store), engines={})
    async with serving(fleet, prompts=routes) as api:
        client = Credentials(fleet.issue(role, name), CLOCK).client(frozenset({Role.NODE})).context
        assert await api.status(client, "/v1/prompts/qwen-0") == status
        # What it does not know, it refuses in the same way.
        assert await api.status(client, "/v1/prompts/other-0") in (0, 403)
