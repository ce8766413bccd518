"""The routes of the agent's API and their authorization."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from machinery.process_log import LogRing
from machinery.version import version
from nodeagent.api.machine_metrics import AgentView
from nodeagent.api.server import make_app
from nodeagent.engines import engine_logs
from store import keys
from store.memory import MemoryTransport
from store.port import Delete
from store.tickets import TicketChecker
from tests.support.agent_api import (
    CLOCK,
    ID,
    NODE,
    SECRET,
    TICKET,
    Replicas,
    agent_view,
    listening,
    ticketed_store,
)
from tests.support.nodeagent_groups import group
from tests.support.waiting import until_async


class Asked:
    """An agent's API, and a client."""

    def __init__(self, view: AgentView, store: MemoryTransport, url: str) -> None:
        self.view, self.store, self.url = view, store, url

    @asynccontextmanager
    async def get(
        self,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] = TICKET,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.url + path, params=params, headers=headers) as response,
        ):
            yield response

    async def text(self, path: str, **params: str) -> tuple[int, str]:
        async with asyncio.timeout(20), self.get(path, params) as response:
            return response.status, await response.text()

    async def refusal(self, path: str, **params: str) -> tuple[int, str]:
        async with asyncio.timeout(20), self.get(path, params) as response:
            tree = await response.json()
            return response.status, tree["error"]["message"]

    def wrote(self, replica: str, *runs: str) -> None:
        folder = self.view.folder / replica
        folder.mkdir(parents=True)
        for text in runs:
            with engine_logs.new_run(folder).open("a") as log:
                log.write(text)


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Asked]:
    ring = LogRing()
    for message in ("one", "two", "three"):
        ring.handle(logging.LogRecord("test", logging.INFO, "", 1, message, (), None))
    sharded = group("mac-1", NODE, name="sharded-0")
    replicas = Replicas({keys.spec_key("Replica", "sharded-0"): sharded})
    view, store = agent_view(tmp_path, replicas=replicas, ring=ring), await ticketed_store()
    app = make_app(view, TicketChecker(store, CLOCK, f"Node/{NODE}"))
    async with listening(app) as api:
        yield Asked(view, store, api.url)


async def test_health_and_metrics_are_open(agent: Asked) -> None:
    async with agent.get("/health", headers={}) as response:
        tree: dict[str, Any] = await response.json()
    assert tree.pop("uptimeSeconds") >= 0
    assert tree.pop("version")
    assert tree.pop("python").startswith("3.")
    assert tree == {
        "status": "ok",
        "node": NODE,
        "uid": "u",
        "leaseHeld": True,
        "engines": 0,
        "store": "ok",
        "storeStalenessSeconds": 0.5,
    }
    async with agent.get("/metrics", headers={}) as response:
        text = await response.text()
    assert f"fleet_agent_memory_allocatable_bytes {2**35}\n" in text
    assert "fleet_agent_lease_held 1\n" in text
    assert f'fleet_build_info{{process="agent",version="{version()}"}} 1\n' in text


async def test_health_says_that_the_store_refuses_the_agent(agent: Asked) -> None:
    """etcd renews the leases of agents that it refuses, so a held lease says nothing."""
    assert isinstance(agent.view.replicas, Replicas)
    agent.view.replicas.refusal = "etcd requires a user and a password, and got none"
    async with agent.get("/health", headers={}) as response:
        tree: dict[str, Any] = await response.json()
    assert (tree["leaseHeld"], tree["store"]) == (True, "refused")
    assert tree["storeMessage"] == "etcd requires a user and a password, and got none"


@pytest.mark.parametrize("path", ["/v1/vitals", "/v1/logs/agent", "/v1/logs/replicas/sharded-0"])
async def test_other_routes_need_a_ticket(agent: Asked, path: str) -> None:
    agent.wrote("sharded-0", "words\n")
    for headers in ({}, {"authorization": f"Bearer {ID}.{SECRET[1:]}"}):
        async with agent.get(path, headers=headers) as response:
            assert response.status == 401
            assert response.headers["www-authenticate"] == "Bearer"
            message = (await response.json())["error"]["message"]
            assert message.startswith("mac-2: ")
            assert "ticket" in message
    assert (await agent.text(path))[0] == 200


async def test_vitals_without_engines(agent: Asked) -> None:
    async with agent.get("/v1/vitals") as response:
        tree = await response.json()
    assert tree["ranks"] == []
    assert tree["memory"]["allocatableBytes"] == 2**35
    assert 0 < tree["memory"]["availableBytes"] <= tree["memory"]["totalBytes"]


async def test_the_agents_own_log(agent: Asked) -> None:
    assert await agent.text("/v1/logs/agent") == (200, "one\ntwo\nthree\n")
    assert await agent.text("/v1/logs/agent", tail="1") == (200, "three\n")
    # Lines without a time are never too old.
    assert (await agent.text("/v1/logs/agent", since="5m"))[0] == 200


async def test_an_engines_log(agent: Asked) -> None:
    agent.wrote("sharded-0", "first\ndied\n", "second\nserves\n")
    path = "/v1/logs/replicas/sharded-0"
    assert await agent.text(path) == (200, "second\nserves\n")
    assert await agent.text(path, rank="1", tail="1") == (200, "serves\n")
    assert await agent.text(path, previous="true") == (200, "first\ndied\n")


async def test_a_replica_that_is_gone_has_left_its_log(agent: Asked) -> None:
    agent.wrote("gone-0", "words\n")
    assert await agent.text("/v1/logs/replicas/gone-0", rank="0") == (200, "words\n")


@pytest.mark.parametrize(
    ("path", "params", "status", "message"),
    [
        ("/v1/logs/replicas/never-0", {}, 404, "no engine of replica never-0 was started on mac-2"),
        (
            "/v1/logs/replicas/sharded-0",
            {"previous": "true"},
            404,
            "replica sharded-0 was started once on mac-2: there is no previous run",
        ),
        (
            "/v1/logs/replicas/sharded-0",
            {"rank": "0"},
            404,
            "rank 0 of replica sharded-0 is not on mac-2, which has rank 1",
        ),
        (
            "/v1/logs/replicas/sharded-0",
            {"previous": "true", "follow": "true"},
            400,
            "'follow': the previous run is over; use either 'follow' or 'previous'",
        ),
        ("/v1/logs/agent", {"tail": "-1"}, 400, "'tail': Input should be greater than or equal to 0"),
        ("/v1/logs/agent", {"tails": "1"}, 400, "'tails': Extra inputs are not permitted"),
        (
            "/v1/logs/agent",
            {"since": "soon"},
            400,
            "'since': 'soon' is not a duration; write hours, minutes, seconds and milliseconds as in 1h30m, 90s or 500ms",
        ),
        ("/v1/logs", {}, 404, "Not Found: GET /v1/logs"),
    ],
)  # fmt: skip
async def test_refusals(
    agent: Asked, path: str, params: dict[str, str], status: int, message: str
) -> None:
    agent.wrote("sharded-0", "words\n")
    assert await agent.refusal(path, **params) == (status, message)


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "..%2f..%2fidentity.json", "a%00b", "A", "x" * 129]
)
async def test_no_name_leads_out_of_the_folder(agent: Asked, name: str) -> None:
    agent.view.folder.mkdir(parents=True)
    (agent.view.folder.parent / "engine.log").write_text("not for you")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(agent.url.rpartition(":")[2]))
    authorization = TICKET["authorization"]
    writer.write(
        f"GET /v1/logs/replicas/{name} HTTP/1.1\r\nhost: localhost\r\nauthorization: {authorization}\r\n\r\n".encode()
    )
    async with asyncio.timeout(20):
        answer = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    assert answer.split(b" ", 2)[1] in (b"400", b"404")
    assert b"not for you" not in answer


async def test_a_log_is_followed_until_its_ticket_is_taken_back(
    agent: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.tickets._LOOK_AGAIN_S", 0.0)
    agent.wrote("sharded-0", "first\n")
    async with (
        asyncio.timeout(20),
        agent.get("/v1/logs/replicas/sharded-0", {"follow": "true"}) as response,
    ):
        assert await response.content.readline() == b"first\n"
        with (agent.view.folder / "sharded-0" / "engine.log").open("a") as log:
            log.write("news\n")
        assert await response.content.readline() == b"news\n"
        await agent.store.commit([], [Delete(key=keys.ticket_key(f"Node/{NODE}", ID))])
        assert await response.content.read() == b""


async def test_so_many_logs_are_read_at_once(agent: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("machinery.http_server.MAX_LOG_READERS", 1)
    async with agent.get("/v1/logs/agent", {"follow": "true"}) as response:
        await response.content.readany()
        status, message = await agent.refusal("/v1/logs/agent")
        assert (status, message) == (
            429,
            "1 logs are being read on this node already; try again later",
        )

    async def is_free() -> bool:
        return (await agent.text("/v1/logs/agent"))[0] == 200

    await until_async(is_free, limit_s=20, what="the end of the first reader")
