"""An agent and its engines as processes, before and after the node got an identity."""

import contextlib
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from identity.credentials import Credentials
from identity.names import Role
from machinery.clock import SystemClock
from schemas.trust import TlsMode
from store.etcd.member.embedded import EmbeddedEtcd
from tests.support.identities import TestAuthority
from tests.support.nodeagent_agents import NODE, AgentProcess, Desk

pytestmark = [pytest.mark.etcd, pytest.mark.mlx, pytest.mark.full, pytest.mark.timeout(300)]


async def status(url: str, context: ssl.SSLContext | None, name: str) -> int:
    """Return the status of a chat with the engine; 0 if it refuses the connection."""
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    options: dict[str, Any] = {} if context is None else {"ssl": context, "server_hostname": name}
    with contextlib.suppress(aiohttp.ClientError, OSError):
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/chat/completions", json=body, **options) as response,
        ):
            return response.status
    return 0


async def test_an_agent_with_an_identity_adopts_plain_engines_and_starts_ones_with_tls(
    etcd: EmbeddedEtcd, desk: Desk, tmp_path: Path, models_dir: Path
) -> None:
    fleet = TestAuthority(tmp_path / "authority")
    agent = AgentProcess(etcd, tmp_path / "state", models_dir, NODE)
    try:
        agent.start()
        before = await desk.assign("tiny-0", uid="u1")
        assert (await desk.until_published("tiny-0")).spec.url.startswith("http://")
        pid = (await agent.engine()).child.record.pid
        await agent.kill()

        # An agent looks for its identity below its state folder.
        folder = fleet.issue(Role.NODE, NODE)
        folder.write_trust(fleet.snapshot(mode=TlsMode.STRICT))
        folder.path.rename(tmp_path / "state" / "identity")
        folder = type(folder)(tmp_path / "state" / "identity")
        await desk.until_withdrawn("tiny-0")
        agent.start()
        assert (await desk.until_published("tiny-0")).spec.url.startswith("http://")
        assert (await agent.engine()).child.record.pid == pid
        await desk.mark_deleted(before)
        await desk.until_withdrawn("tiny-0")

        await desk.remove("tiny-0")
        await desk.assign("tiny-1", uid="u2")
        url = (await desk.until_published("tiny-1")).spec.url
        assert url.startswith("https://")
        await desk.until_condition("tiny-1", "True", "Serving")
        edge = Credentials(fleet.issue(Role.GATEWAY, "edge"), SystemClock())
        context = edge.client(frozenset({Role.NODE})).context
        name = fleet.identity(Role.NODE, NODE).dns_name
        assert await status(url, context, name) == 200
        stranger = ssl.create_default_context(cadata=fleet.authority.pem)
        assert await status(url, stranger, name) == 0
        assert await status(url.replace("https:", "http:"), None, "") == 503

        folder.write_trust(fleet.snapshot(mode=TlsMode.PERMISSIVE))

        async def is_plain() -> bool:
            found = await desk.endpoint("tiny-1")
            return found is not None and found.spec.url == url.replace("https:", "http:")

        await desk.until(is_plain, "the endpoint is plain again")
        assert await desk.condition("tiny-1") == ("True", "Serving")
        assert await status(url.replace("https:", "http:"), None, "") == 200
    finally:
        await agent.end()
