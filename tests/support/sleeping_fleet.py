"""Hollow Macs that sleep, with real agents and a real reconciler in virtual time.

The machine's sleep is a wait for a magic packet, and the demand at gateways is what the test says.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from machinery import virtual_time
from machinery.virtual_time import VirtualClock
from nodeagent.hollow import HollowMac, HollowTiming, SharedCaches, hollow_status, models_on_disk
from reconciler import controller as controller_module
from reconciler.controller import Controller
from reconciler.deployments.demand.gateway_metrics import Demand, VersionMetrics
from schemas.autoscaling import Autoscaling
from schemas.event import Event
from schemas.meta import ObjectMeta, find_condition
from schemas.node import FabricInterface, NodeFabric, NodeLifeStatus
from schemas.placement import Placement
from schemas.pools import NodePool, NodePoolSpec
from schemas.power import WakePacket
from schemas.replica import Endpoint, Replica
from store import codec, keys, objects
from store.memory import MemoryTransport
from tests.support.world import GEOMETRY, deployment

_TIMING = HollowTiming(load_s=2, probe_s=0.1, drain_s=0.2)


@dataclass(kw_only=True)
class GatewayDemand:
    """The demand at a gateway that the test plays (in the place of `DemandScraper`)."""

    waiting: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    is_complete: bool = True

    async def run(self) -> None:
        await asyncio.Event().wait()

    def demand(self, name: str) -> Demand:
        return Demand(
            waiting=self.waiting.get(name, 0),
            finished=self.finished.get(name, 0),
            is_complete=self.is_complete,
        )

    def requested(self) -> frozenset[str]:
        return frozenset()

    def measured(self, name: str, template: str) -> VersionMetrics:
        return VersionMetrics()


@dataclass(kw_only=True)
class PacketSleeper:
    """Sleep until a magic packet comes (`MachineSleeper`)."""

    woken: asyncio.Event = field(default_factory=asyncio.Event)
    is_asleep: bool = False
    sleeps: int = 0

    async def suspend(self) -> bool:
        self.woken.clear()
        self.is_asleep, self.sleeps = True, self.sleeps + 1
        await self.woken.wait()
        self.is_asleep = False
        return True


class SleepingFleet:
    """Macs on one network, a reconciler, and a gateway whose requests the test plays."""

    def __init__(
        self, tasks: asyncio.TaskGroup, names: Sequence[str], gateway: GatewayDemand
    ) -> None:
        self._tasks = tasks
        self.gateway = gateway
        self.clock = VirtualClock()
        self.store = MemoryTransport(self.clock, expires_by_itself=False)
        self.caches = SharedCaches(self.store, self.clock)
        self.sleepers = {name: PacketSleeper() for name in names}
        self.macs = {name: self._mac(number, name) for number, name in enumerate(names, 1)}
        self.lost: set[str] = set()
        """Macs whose magic packets are lost."""
        self.packets: list[tuple[float, str]] = []
        """Time and target of each magic packet."""
        controller = Controller(self.store, self.clock, identity="r", grace_s=30.0)
        loops = (self.caches.run(), controller.run(), self._expire())
        self.running = [tasks.create_task(loop) for loop in loops]
        self.agents = {name: self.start(name) for name in names}

    def _mac(self, number: int, name: str) -> HollowMac:
        interface = FabricInterface(
            name="en0",
            address=f"10.0.0.{number}",
            prefix_length=24,
            hardware_address=f"02:00:00:00:00:{number:02x}",
        )
        fabric = NodeFabric(interfaces=(interface,))
        mac = HollowMac(
            clock=self.clock,
            status=hollow_status(name).model_copy(update={"fabric": fabric}),
            models=models_on_disk({"qwen": GEOMETRY}),
            pace=lambda _: _TIMING,
            sleeper=self.sleepers[name],
            send_packets=self._send,
        )
        mac.readings.now = replace(mac.readings.now, wakes_on_lan=True)
        return mac

    def _send(self, packets: Sequence[WakePacket]) -> None:
        for packet in packets:
            number = int(packet.hardware_address.rpartition(":")[2], 16)
            name = list(self.macs)[number - 1]
            assert packet.broadcast == "10.0.0.255"
            self.packets.append((self.clock.monotonic(), name))
            if name not in self.lost and name in self.agents:
                self.sleepers[name].woken.set()

    async def _expire(self) -> None:
        while True:
            await self.clock.sleep(0.5)
            self.store.expire()

    def start(self, name: str) -> asyncio.Task[None]:
        """Start the agent of a Mac."""
        self.sleepers[name].is_asleep = False
        task = self._tasks.create_task(self.macs[name].agent(self.store, self.caches).run())
        self.running.append(task)
        return task

    def cut_power(self, name: str) -> None:
        """End the agent and the engines of a Mac at once."""
        self.agents.pop(name).cancel()
        self.macs[name].lose_power()

    async def declare(
        self, *, replicas: int = 1, autoscaling: Autoscaling | None = None, **power: Any
    ) -> None:
        """Write a pool of all Macs but the last one, with this power, and a deployment on it."""
        spec = {
            "nodes": tuple(self.macs)[:-1],
            "power": {"mode": "SleepWhenIdle", "idleTime": "5m", **power},
        }
        pool = NodePool(metadata=ObjectMeta(name="all"), spec=NodePoolSpec.model_validate(spec))
        placement = Placement(pools=("all",), max_replicas_per_node=1)
        wanted = deployment(replicas=replicas, placement=placement, autoscaling=autoscaling)
        await self.store.commit([], [codec.put_spec(pool), codec.put_spec(wanted)])

    async def replicas(self) -> dict[str, str]:
        """Return the node of each replica that is not ending."""
        found = await objects.list_all(self.store, Replica)
        return {r.name: r.spec.ranks[0].node for r in found if not r.metadata.deletion_timestamp}

    async def serving(self) -> set[str]:
        """Return the replicas with an endpoint that is not leaving."""
        found = await objects.list_all(self.store, Endpoint)
        return {e.name for e in found if not e.spec.is_leaving}

    def asleep(self) -> set[str]:
        return {name for name, sleeper in self.sleepers.items() if sleeper.is_asleep}

    async def condition(self, name: str) -> str:
        """Return the reason of the condition Asleep of a Mac."""
        item = await self.store.get(keys.node_life_key(name))
        life = None if item is None else codec.decode(NodeLifeStatus, item)
        asleep = None if life is None else find_condition(life.conditions, "Asleep")
        return "" if asleep is None else asleep.reason

    async def events(self) -> list[str]:
        """Return the reasons of all events about Macs."""
        found = await objects.list_all(self.store, Event)
        return [event.spec.reason for event in found if event.spec.about.kind == "Node"]

    async def until(self, holds: Callable[[], Coroutine[Any, Any, Any]], limit_s: float) -> float:
        """Wait until something holds; return the seconds that it took."""
        began = self.clock.monotonic()
        while not await holds():
            waited = self.clock.monotonic() - began
            assert waited < limit_s, f"not within {limit_s} s"
            await self.clock.sleep(0.5)
        return self.clock.monotonic() - began


def play(names: str, test: Callable[[SleepingFleet], Coroutine[Any, Any, None]]) -> None:
    """Run a test on Macs with these names, in virtual time."""
    gateway = GatewayDemand()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            fleet = SleepingFleet(tasks, tuple(names), gateway)
            try:
                await fleet.clock.sleep(2)
                await test(fleet)
            finally:
                for task in fleet.running:
                    task.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller_module, "DemandScraper", lambda *_, **__: gateway)
        virtual_time.run(main())
