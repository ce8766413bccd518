"""Hollow Macs with real agents in virtual time; the test acts as the reconciler."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from machinery import virtual_time
from machinery.virtual_time import VirtualClock
from nodeagent.hollow import (
    HollowEngine,
    HollowMac,
    HollowTiming,
    SharedCaches,
    hollow_status,
    models_on_disk,
)
from schemas.meta import find_condition
from schemas.replica import Endpoint, RankStatus, Replica
from store import codec, keys, objects
from store.memory import MemoryTransport
from tests.support.nodeagent_groups import group
from tests.support.scenes import Test, scene_test
from tests.support.world import GEOMETRY

PACE = HollowTiming(load_s=5, probe_s=1, drain_s=2)


class HollowFleet:
    """Hollow Macs on one store, with an agent each."""

    def __init__(self, tasks: asyncio.TaskGroup, names: Sequence[str], pace: HollowTiming) -> None:
        self._group = tasks
        self._pace = pace
        self.clock = VirtualClock()
        self.store = MemoryTransport(self.clock)
        self.caches = SharedCaches(self.store, self.clock)
        self.tasks = [tasks.create_task(self.caches.run())]
        self.macs = {name: self.mac(name) for name in names}
        self.agents = {name: self.start(name) for name in names}

    def mac(self, name: str, **options: Any) -> HollowMac:
        models = {"qwen": GEOMETRY.model_copy(update={"parameters": 596_049_920})}
        status = hollow_status(name, labels={"site": "berlin"})
        return HollowMac(
            clock=self.clock,
            status=status,
            models=models_on_disk(models),
            pace=lambda _: self._pace,
            **options,
        )

    def start(self, name: str) -> asyncio.Task[None]:
        agent = self.macs[name].agent(self.store, self.caches)
        self.tasks.append(self._group.create_task(agent.run()))
        return self.tasks[-1]

    async def put(self, *replicas: Replica) -> None:
        await self.store.commit([], [codec.put_spec(replica) for replica in replicas])

    async def assign(self, *nodes: str, **fields: Any) -> None:
        """Assign a group of ranks."""
        await self.put(group(*nodes, **fields))

    def rank(self, name: str) -> HollowEngine:
        (engine,) = self.macs[name].engines.running()
        return engine

    def running(self) -> str:
        """Return on which Macs engines run."""
        return "".join(name for name, mac in self.macs.items() if mac.engines.running())

    async def endpoint(self) -> Endpoint | None:
        return await objects.get(self.store, Endpoint, "qwen-0")

    async def report(self, node: str, rank: int = 0, name: str = "qwen-0") -> RankStatus | None:
        item = await self.store.get(keys.rank_key(node, name, rank))
        return None if item is None else codec.decode(RankStatus, item)

    async def condition(
        self, node: str, rank: int = 0, type_: str = "Ready", *, name: str = "qwen-0"
    ) -> str:
        """Return the epoch and the reason that the node's agent reports."""
        status = await self.report(node, rank, name)
        found = find_condition(status.conditions, type_) if status is not None else None
        return f"{status.epoch} {found.reason}" if status is not None and found is not None else ""

    async def revision(self) -> int:
        return (await self.store.status()).revision


def in_hollow_fleet(
    *names: str, pace: HollowTiming = PACE
) -> Callable[[Test], Callable[..., None]]:
    """Run a test in virtual time with these Macs, whose agents run for a second."""

    def play(test: Callable[[HollowFleet], Any]) -> None:
        async def main() -> None:
            async with asyncio.TaskGroup() as tasks:
                fleet = HollowFleet(tasks, names, pace)
                await fleet.clock.sleep(1)
                try:
                    await test(fleet)
                finally:
                    for task in fleet.tasks:
                        task.cancel()

        virtual_time.run(main())

    return lambda test: scene_test(test, play)
