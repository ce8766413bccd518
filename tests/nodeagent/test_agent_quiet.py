"""An agent on a healthy machine writes nothing but lease renewals to a real etcd."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from nodeagent.agent import Agent
from nodeagent.dependencies import AgentConfig, real_dependencies
from nodeagent.engines.addresses import EngineAddresses
from nodeagent.hardware.readings import HeatReading
from schemas.event import Event, EventSpec
from schemas.meta import is_true
from schemas.node import KernelPanic, NodeStatus
from store import codec, keys
from store.etcd.connect import connect
from store.port import Transport
from tests.support.etcd import running_etcd
from tests.support.nodeagent_agents import CLOCK
from tests.support.nodeagent_readings import STATUS, WELL, FakeMachineReader
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180)]
NAME = "mac-1"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Transport]:
    async with running_etcd(tmp_path / "etcd") as etcd:
        transport = connect(etcd.address)
        yield transport
        await transport.close()


@asynccontextmanager
async def running(
    store: Transport, folder: Path, machine: FakeMachineReader
) -> AsyncIterator[None]:
    """Run the agent of a machine that says what the test wants."""
    config = AgentConfig(
        state_dir=folder,
        models_dir=folder,
        addresses=EngineAddresses(host="127.0.0.1", first=4100),
        session="folder/1",
        status=STATUS,
        name=NAME,
        casts_to_float32=True,
        inspect_every_s=0.02,
    )
    parts = replace(real_dependencies(store, CLOCK, config), readings=machine)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(Agent(store, CLOCK, config, parts).run())
        await until_async(lambda: store.get(keys.node_lease_key(NAME)), what="the lease")
        yield
        task.cancel()


async def written_while(store: Transport, act: Callable[[], Awaitable[object]]) -> int:
    """Return how many revisions there are more after an act; a lease's keepalives make none."""
    before = (await store.status()).revision
    await act()
    return (await store.status()).revision - before


async def test_an_idle_agent_writes_nothing(store: Transport, tmp_path: Path) -> None:
    machine = FakeMachineReader()

    async def status() -> NodeStatus | None:
        item = await store.get(keys.status_key("Node", NAME))
        return None if item is None else codec.decode(NodeStatus, item)

    async def is_hot() -> bool:
        found = await status()
        return found is not None and is_true(found.conditions, "ThermalPressure")

    async def ten_readings() -> None:
        enough = machine.taken + 10
        await until(lambda: machine.taken >= enough, what="ten more readings")

    async def grow_hot() -> None:
        machine.now = replace(
            WELL, heat=HeatReading(throttled="macOS reports the thermal level heavy")
        )
        await until_async(is_hot, what="ThermalPressure")
        await ten_readings()

    async with running(store, tmp_path, machine):
        said = await until_async(status, what="the node's status")
        assert (said.power, said.disk_free_bytes) == ("Mains", 300 * 2**30)
        assert await written_while(store, ten_readings) == 0
        assert await written_while(store, grow_hot) == 1
    before = await store.get(keys.status_key("Node", NAME))
    # Another run of the agent has nothing new to say.
    async with running(store, tmp_path, machine):
        await ten_readings()
    assert await store.get(keys.status_key("Node", NAME)) == before


async def test_a_kernel_panic_is_an_event_once(store: Transport, tmp_path: Path) -> None:
    machine = FakeMachineReader()
    panics = tuple(
        KernelPanic(at=CLOCK.now().replace(microsecond=0) - timedelta(hours=age), text=text)
        for age, text in ((1, "underflow"), (100, "of last week"))
    )
    machine.now = replace(WELL, panics=panics)

    async def events() -> list[EventSpec]:
        items = (await store.list(keys.EVENT_PREFIX)).items
        recorded = [codec.decode_object(Event, item).spec for item in items]
        return [event for event in recorded if event.reason == "MacPanicked"]

    async def more_readings() -> None:
        enough = machine.taken + 3
        await until(lambda: machine.taken >= enough, what="more readings")

    for _ in range(2):  # another run of the agent finds it in the status
        async with running(store, tmp_path, machine):
            (event,) = await until_async(events, what="the event")
            assert event.message.endswith("UTC: underflow")
            await more_readings()
    (event,) = await events()
    assert event.count == 1
