"""The route on which an agent examines its machine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from nodeagent.api.machine_doctor import MachineDoctor
from nodeagent.api.server import make_app
from nodeagent.doctor.readers import CollectionScope
from schemas.meta import ObjectMeta
from schemas.node import Node
from schemas.wire.findings import PATH, parse_findings
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put
from store.tickets import TicketChecker
from tests.support.agent_api import (
    CLOCK,
    ID,
    NODE,
    SECRET,
    STATUS,
    TICKET,
    agent_view,
    listening,
    ticketed_store,
)
from tests.support.clock import FakeClock


@pytest.fixture
async def store() -> MemoryTransport:
    return await ticketed_store()


@pytest.fixture
async def url(tmp_path: Path, store: MemoryTransport) -> AsyncIterator[str]:
    scope = CollectionScope(models_dir=tmp_path, engine_folders=(tmp_path / "engines",))
    view = agent_view(tmp_path, scope=scope)
    doctor = MachineDoctor(view, scope, store)
    app = make_app(view, TicketChecker(store, CLOCK, f"Node/{NODE}"), doctor=doctor)
    async with listening(app) as api:
        yield api.url


async def fetch(url: str, headers: dict[str, str]) -> tuple[int, bytes]:
    async with (
        asyncio.timeout(30),
        aiohttp.ClientSession() as session,
        session.get(url + PATH, headers=headers) as response,
    ):
        return response.status, await response.read()


async def test_the_agent_examines_its_own_machine_for_a_ticket(url: str) -> None:
    status, body = await fetch(url, TICKET)
    assert status == 200
    findings = {finding.check: finding for finding in parse_findings(body)}
    assert findings["models folder"].level == "OK"
    assert findings["stopped engines"].message == "no engine runs on this machine"
    assert findings["open files"].message.startswith("the agent may open ")
    assert {one.node for one in findings.values()} == {""}  # the reader knows whom it asked


async def test_without_a_ticket_nothing_is_examined(url: str) -> None:
    for headers in ({}, {"authorization": f"Bearer {ID}.{SECRET[1:]}"}):
        status, body = await fetch(url, headers)
        assert status == 401
        assert b"ticket" in body


async def test_requests_at_the_same_time_share_one_examination(url: str, tmp_path: Path) -> None:
    bodies = {body for _, body in await asyncio.gather(*(fetch(url, TICKET) for _ in range(4)))}
    assert len(bodies) == 1
    (tmp_path / "engines").mkdir()
    assert (await fetch(url, TICKET))[1] in bodies  # it is fresh enough


async def test_neighbours_are_the_other_agents(tmp_path: Path, store: MemoryTransport) -> None:
    async def add(name: str, agent_url: str) -> None:
        status = STATUS.model_copy(update={"agent_url": agent_url})
        node = Node(metadata=ObjectMeta(name=name))
        puts = [
            Put(key=keys.spec_key("Node", name), value=codec.encode(node)),
            Put(key=keys.status_key("Node", name), value=codec.encode(status)),
        ]
        await store.commit([], puts)

    await add(NODE, "https://10.0.0.2:4001")
    await add("mac-3", "https://10.0.0.3:4001")
    await add("mac-4", "")
    scope = CollectionScope(models_dir=tmp_path)
    doctor = MachineDoctor(agent_view(tmp_path, scope=scope), scope, store)
    assert doctor.scope.agent is not None
    assert await doctor.scope.agent.neighbours() == [("10.0.0.3", 4001)]


def test_the_sleep_of_the_machine_is_told_by_clocks_with_and_without_it(tmp_path: Path) -> None:
    scope, clock = CollectionScope(models_dir=tmp_path), FakeClock()
    clock.doze(500)  # before the agent started
    doctor = MachineDoctor(replace(agent_view(tmp_path, scope=scope), clock=clock), scope)
    assert doctor.scope.agent is not None
    assert doctor.scope.agent.slept_s() == 0
    clock.doze(90)
    assert doctor.scope.agent.slept_s() == 90
