"""Carries out a script in a world: each line becomes the one call that does it."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

from nodeagent.hardware.readings import DiskReading
from nodeagent.hollow import HollowMac, healthy_reading
from tests.simulation.line import Weather
from tests.simulation.owner import Owner
from tests.simulation.script import NAMES, NODES, Happening, What
from tests.simulation.world import World

_BAD = Weather(
    lost_answer=0.05, lost_request=0.03, conflict=0.03, broken_watch=0.02, late_write=0.03
)

_FULL = DiskReading(total_bytes=2**40, free_bytes=2**20)

_Scene: TypeAlias = Callable[[Happening], Awaitable[None]]


class Drama:
    """One script on its way through a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner = Owner(world.store, world.clock)
        owner = self._owner
        # What the owner does, and what must wait for the store; the rest is `_suffer`.
        self._scenes: dict[What, _Scene] = {
            What.SCALE: lambda it: owner.want(it.name, replicas=it.number),
            What.CONTEXT: lambda it: owner.context(it.name, it.number),
            What.LIMITS: lambda it: owner.limits(it.name, it.number),
            What.STRATEGY: lambda it: owner.roll(
                it.name, strategy="Recreate" if it.number % 2 else "RollingUpdate"
            ),
            What.PRIORITY: lambda it: owner.priority(it.name, it.number),
            What.MIN_AVAILABLE: lambda it: owner.min_available(it.name, it.number),
            What.AUTOSCALE: lambda it: owner.autoscale(it.name, it.number),
            What.AUTOSCALE_NO_MORE: lambda it: owner.autoscale(it.name, None),
            What.PAUSE: lambda it: owner.roll(it.name, paused=True),
            What.RESUME: lambda it: owner.roll(it.name, paused=False),
            What.DELETE: lambda it: owner.delete(it.name),
            What.DELETE_REPLICA: lambda it: owner.delete_replica(it.number),
            What.LEASE_LOST: lambda it: world.lose_lease(it.node),
            What.CORDON: lambda it: owner.node(it.node, unschedulable=True),
            What.DRAIN: lambda it: owner.node(it.node, unschedulable=True, draining=True),
            What.TAINT: lambda it: owner.taint(it.node, "NoSchedule"),
            What.DRIVE_OUT: lambda it: owner.taint(it.node, "NoExecute"),
            What.UNCORDON: lambda it: owner.free(it.node),
            What.RESERVE: lambda it: owner.reserve(it.node, it.number),
            What.UNRESERVE: lambda it: owner.reserve(it.node, 0),
        }

    async def play(self, script: tuple[Happening, ...]) -> None:
        """Do the lines one after the other, each at its time."""
        for line in script:
            wait_s = line.at_s - self._world.clock.monotonic()
            if wait_s > 0:
                await self._world.clock.sleep(wait_s)
            scene = self._scenes.get(line.what)
            if scene is not None:
                await scene(line)
            elif not self._shake(line):
                self._suffer(line)

    def _suffer(self, line: Happening) -> None:
        """Do what befalls a Mac, or else an engine on it."""
        world, mac, node = self._world, self._world.macs[line.node], line.node
        match line.what:
            case What.AGENT_DIES:
                world.kill_agent(node)
            case What.POWER_LOSS:
                world.kill_agent(node)
                mac.lose_power()
            case What.POWER_ON:
                world.start_agent(node)
            case What.LOADS_SLOWLY:
                world.slow.add(node)
            case What.DISK_FULL:
                mac.readings.now = replace(healthy_reading(mac.status), disk=_FULL)
            case What.DISK_FREE:
                mac.readings.now = healthy_reading(mac.status)
            case What.MODEL_GONE:
                world.without_model.add(node)
            case What.MODEL_BACK:
                world.without_model.discard(node)
            case _:
                _ail(mac, line)

    def _shake(self, line: Happening) -> bool:
        """Do what befalls controllers, lines and the store; return whether it was that."""
        world = self._world
        match line.what:
            case What.LEADER_DIES | What.LEADER_RESTARTS:
                world.replace_controller(is_cut=line.what is What.LEADER_DIES)
            case What.LEADER_FREEZES:
                world.freeze_controller(2.0 * line.number)
            case What.COMPACTION:
                world.store.compact()
                world.break_watches()
            case What.WATCHES_BREAK:
                world.break_watches()
            case What.BAD_WEATHER:
                world.weather.become(_BAD)
            case What.GOOD_WEATHER:
                world.weather.become(Weather())
            case _:
                return False
        return True

    async def mend(self) -> None:
        """Undo every mishap: Macs run, lines are good, nodes are free; then set the final spec."""
        world = self._world
        world.weather.become(Weather())
        world.slow.clear()
        world.without_model.clear()
        for name in NODES:
            world.macs[name].engines.start_error = world.macs[name].health.probe_error = ""
            world.macs[name].readings.now = healthy_reading(world.macs[name].status)
            world.start_agent(name)
            await self._owner.free(name)
        await self._owner.reserve("a", 0)

    async def last_words(self) -> dict[str, int]:
        """Want what surely fits; return it. What is still being deleted cannot be wanted."""
        wanted = dict(zip(NAMES, (2, 1, 0), strict=True))
        for name, replicas in wanted.items():
            await self._owner.want(name, replicas=replicas, context_length=1024, autoscaling=None)
            await self._owner.roll(name, paused=False)
        return wanted


def _ail(mac: HollowMac, line: Happening) -> None:
    """Do what befalls engines; where none runs nothing happens to them."""
    engines = mac.engines.running()
    engine = engines[line.number % len(engines)] if engines else None
    match line.what:
        case What.ENGINE_CRASHES if engine is not None:
            engine.end(1)
        case What.ENGINE_HANGS if engine is not None:
            engine.is_silent = True
        case What.CANNOT_START | What.CAN_START:
            mac.engines.start_error = "no disk" if line.what is What.CANNOT_START else ""
        case What.PROBE_FAILS | What.PROBE_WORKS:
            mac.health.probe_error = "no memory" if line.what is What.PROBE_FAILS else ""
        case _:
            return
