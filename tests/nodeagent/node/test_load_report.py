"""The GPU load of a Mac goes from what macOS prints to the choices of a gateway, over a real etcd."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from gateway.forwarding.router import LoadTracker
from gateway.routing.selection import ChosenEndpoint, choose
from gateway.routing.table import BackendBuilder, RoutingQuery, RoutingTable, ServedModel
from gateway.state.gpu_loads import GpuLoads
from machinery.clock import SystemClock
from nodeagent.hardware.load import LoadReading, LoadSampler, SensorReading, mac_sensors
from nodeagent.node.load_report import LoadReport
from schemas.node import NodeLoad
from schemas.routing import Routing
from store import codec, keys
from store.etcd.connect import connect
from store.etcd.member.embedded import EmbeddedEtcd
from store.leases import LeaseSession
from store.port import Transport
from tests.support.etcd import running_etcd
from tests.support.gateway_world import target
from tests.support.values import present
from tests.support.waiting import until, until_async

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(60)]

# What a Mac printed: its GPU is at 63 %.
CAPTURES = Path(__file__).parents[1] / "hardware" / "captures" / "load"
IOREG = (CAPTURES / "ioaccelerator.txt").read_text()
MACMON = (CAPTURES / "macmon.json").read_text()
BUSY, UNKNOWN = mac_sensors(IOREG, MACMON, ""), SensorReading()
CLOCK = SystemClock()


class Machine:
    """The sensors of a Mac, and the report of its agent."""

    def __init__(self, transport: Transport, name: str, seen: SensorReading) -> None:
        self.seen = seen
        self.sampler = LoadSampler(CLOCK, sensors=self._read)
        self.report = LoadReport(
            transport, CLOCK, node=name, latest=self.sampler.latest, period_s=0.05
        )

    async def _read(self) -> SensorReading:
        return self.seen


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[EmbeddedEtcd]:
    async with running_etcd(tmp_path) as own:
        yield own


def chosen(loads: GpuLoads) -> str:
    """Return the Mac that a request gets: two equal ones with HardwareAware, with one request more on "idle"."""
    endpoint = replace(target("m-0", port=1), node="busy")
    two = replace(target("m-1", port=2), node="idle")
    tracker = LoadTracker(random.Random(1), loads.by_node)
    tracker.begin(two)
    backend = BackendBuilder().backend(
        ("m",), leased=(endpoint, two), routing=Routing(strategy="HardwareAware")
    )
    model = ServedModel(name="m", created=0, backends=(backend,), reason="")
    table = RoutingTable(models=MappingProxyType({"m": model}))
    found = choose(table, RoutingQuery("m", 0.5), tracker.health(0.0))
    assert isinstance(found, ChosenEndpoint)
    return found.endpoint.node


async def test_a_measured_load_counts_in_the_score_until_it_is_unknown_again(
    etcd: EmbeddedEtcd,
) -> None:
    assert BUSY.gpu_ratio == 0.63
    transport = connect(etcd.address)
    session = LeaseSession(transport, CLOCK, ttl_s=5)
    await session.open()
    loads = GpuLoads(transport, CLOCK, is_stale=lambda: False)
    busy, idle = Machine(transport, "busy", BUSY), Machine(transport, "idle", UNKNOWN)
    assert chosen(loads) == "busy"
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loads.run())]
        for machine in (busy, idle):
            tasks.append(group.create_task(machine.sampler.run()))
            tasks.append(group.create_task(machine.report.run(lambda: session.id)))
        await until(lambda: "busy" in loads.by_node, what="the load of the busy Mac")
        # 12.6 points for 63 %, against 5 for a request; a Mac whose load is unknown loses none.
        assert dict(loads.by_node) == {"busy": 0.63}
        assert chosen(loads) == "idle"
        written = present(await transport.get(keys.load_key("busy")))
        assert codec.decode(NodeLoad, written).gpu_percent == 63
        assert written.lease == session.id
        assert await transport.get(keys.load_key("idle")) is None
        busy.sampler._latest = None  # as after four periods without a sample
        await until(lambda: not loads.by_node, what="an unknown load")
        assert chosen(loads) == "busy"
        for task in tasks:
            task.cancel()
    await session.close()


async def test_key_ends_with_the_lease_and_small_changes_write_nothing(etcd: EmbeddedEtcd) -> None:
    transport = connect(etcd.address)
    session = LeaseSession(transport, CLOCK, ttl_s=5)
    await session.open()
    readings: list[LoadReading] = []
    report = LoadReport(transport, CLOCK, node="a", latest=lambda: readings[-1])
    revisions: list[int] = []
    for percent in (50, 55, 59, 60, 51, 50):
        readings.append(LoadReading(sensors=SensorReading(gpu_ratio=percent / 100)))
        await report._write(session.id)
        item = present(await transport.get(keys.load_key("a")))
        revisions.append(item.mod_revision)
    assert [revision == revisions[0] for revision in revisions] == [True] * 3 + [False] * 3
    assert revisions[3] == revisions[4] < revisions[5]
    await session.close()

    async def is_gone() -> bool:
        return await transport.get(keys.load_key("a")) is None

    await until_async(is_gone, what="the end of the key with its lease")
