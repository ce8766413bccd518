"""The simulated fleet: real controllers and agents, hollow engines, one store, and the lines between them."""

import asyncio
import random
from dataclasses import dataclass

from machinery.virtual_time import VirtualClock
from nodeagent.hollow import HollowMac, HollowTiming, SharedCaches, hollow_status
from reconciler.controller import Controller
from schemas.node import ModelReport, NodeStatus
from store import keys
from tests.simulation.history import History
from tests.simulation.laws import LAWS
from tests.simulation.line import Line, Weather
from tests.simulation.script import NODES
from tests.support.world import GEOMETRY, GIB

GRACE_S = 3.0
"""The grace period of nodes; shorter than in real fleets, so that a short history has such losses."""

_QUICK, _SLOW = (
    HollowTiming(load_s=0.3, probe_s=0.1, drain_s=0.2),
    HollowTiming(load_s=6, probe_s=1, drain_s=3),
)


@dataclass(slots=True)
class _Running:
    """One run of a process, and its line."""

    line: Line
    task: asyncio.Task[None]


class World:
    """The machines and processes of one fleet; the script decides what happens to them."""

    def __init__(self, group: asyncio.TaskGroup, seed: int) -> None:
        self._group = group
        self._dice = random.Random(seed)
        self.clock = VirtualClock()
        self.store = History(self.clock, LAWS)
        self.weather = Weather()
        self._controllers: list[_Running] = []
        self._agents: dict[str, _Running] = {}
        self._runs = 0
        self.slow: set[str] = set()
        """Macs on which things take long."""
        self.without_model: set[str] = set()
        self.macs = {name: self._mac(name, gib) for name, gib in NODES.items()}
        self.store.state.runs = self._runs_engine
        self._feed_line = self.line()
        self._feed = SharedCaches(self._feed_line, self.clock)
        self._helpers = (
            group.create_task(self._feed.run()),
            group.create_task(self._expire_leases()),
        )

    def line(self) -> Line:
        """Return a new line to the store."""
        return Line(self.store, self._dice, self.weather, self._group)

    async def _expire_leases(self) -> None:
        while True:  # etcd notices up to half a second late
            await self.clock.sleep(0.5)
            self.store.expire()

    def _mac(self, name: str, gib: float) -> HollowMac:
        def report(path: str) -> ModelReport:
            if name in self.without_model:
                return ModelReport(path=path, reason="ModelNotFound", message="no such folder")
            return ModelReport(path=path, geometry=GEOMETRY)

        return HollowMac(
            clock=self.clock,
            status=_status(name, gib),
            models=report,
            pace=lambda _: _SLOW if name in self.slow else _QUICK,
        )

    def _runs_engine(self, node: str, replica_uid: str) -> bool:
        engines = self.macs[node].engines.running()
        return any(engine.order.config.replica_uid == replica_uid for engine in engines)

    def start_agent(self, name: str) -> None:
        """Start the Mac's agent, unless it runs."""
        if name not in self._agents:
            line = self.line()
            task = self._group.create_task(self.macs[name].agent(line, self._feed).run())
            self._agents[name] = _Running(line, task)

    def kill_agent(self, name: str) -> None:
        """End the agent as kill -9 does; its engines go on."""
        running = self._agents.pop(name, None)
        if running is not None:
            running.line.is_cut = True
            running.task.cancel()

    def start_controller(self) -> None:
        self._runs += 1
        line = self.line()
        controller = Controller(line, self.clock, identity=f"c{self._runs}", grace_s=GRACE_S)
        self._controllers.append(_Running(line, self._group.create_task(controller.run())))

    def replace_controller(self, *, is_cut: bool) -> None:
        """End the oldest controller, cut off before it can resign or in good order, and start another."""
        oldest = self._controllers.pop(0)
        oldest.line.is_cut = is_cut
        oldest.task.cancel()
        self.start_controller()

    def freeze_controller(self, seconds: float) -> None:
        """Pause the oldest controller for a while; it writes its pending writes afterwards."""
        self._controllers[0].line.frozen_until = self.clock.monotonic() + seconds

    def break_watches(self) -> None:
        """Break every watch at its next event."""
        running = (*self._controllers, *self._agents.values())
        for line in (self._feed_line, *(one.line for one in running)):
            line.breaks += 1

    async def lose_lease(self, name: str) -> None:
        """End the node's lease in the store, as an operator might; its agent does not know yet."""
        there = await self.store.get(keys.node_lease_key(name))
        if there is not None:
            await self.store.revoke(there.lease)

    def stop(self) -> None:
        processes = (*self._controllers, *self._agents.values())
        for task in (*self._helpers, *(process.task for process in processes)):
            task.cancel()


def _status(name: str, gib: float) -> NodeStatus:
    size = int(gib * GIB)
    return hollow_status(name, memory_bytes=size, allocatable_bytes=size)
