"""An agent that follows orders to sleep and to wake others; the test acts as the leader, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from machinery import virtual_time
from machinery.virtual_time import VirtualClock
from nodeagent.hollow import HollowMac, HollowTiming, SharedCaches, hollow_status, models_on_disk
from schemas.event import Event
from schemas.node import NodeStatus
from schemas.power import PowerOrder, WakePacket, WakeRequest
from schemas.replica import Endpoint
from store import codec, keys, objects
from store.memory import MemoryTransport
from store.port import Delete, Put
from tests.support.nodeagent_plans import wanted
from tests.support.sleeping_fleet import PacketSleeper
from tests.support.world import GEOMETRY

KEY = keys.power_order_key("a")


@dataclass(slots=True, kw_only=True)
class Awake:
    """A machine that does not go to sleep (`MachineSleeper`)."""

    asked: int = 0

    async def suspend(self) -> bool:
        self.asked += 1
        return False


class Scene:
    """One Mac with a replica that serves."""

    def __init__(self, sleeper: PacketSleeper | Awake) -> None:
        self.clock = VirtualClock()
        self.store = MemoryTransport(self.clock)
        self.sleeper = sleeper
        self.packets: list[WakePacket] = []
        self.mac = HollowMac(
            clock=self.clock,
            status=hollow_status("a"),
            models=models_on_disk({"qwen": GEOMETRY}),
            pace=lambda _: HollowTiming(load_s=1, probe_s=0.1),
            sleeper=sleeper,
            send_packets=self.packets.extend,
        )
        self.caches = SharedCaches(self.store, self.clock)

    async def order(self, *wakes: WakeRequest, sleep: bool = True) -> None:
        value = codec.encode(PowerOrder(sleep=sleep, wakes=wakes))
        await self.store.commit([], [Put(key=KEY, value=value)])

    async def endpoint(self) -> str:
        """Return the state of the endpoint."""
        endpoint = await objects.get(self.store, Endpoint, "qwen-0")
        if endpoint is None:
            return "none"
        return "leaving" if endpoint.spec.is_leaving else "serving"

    async def is_alive(self) -> bool:
        return await self.store.get(keys.node_lease_key("a")) is not None

    async def is_announced(self) -> bool:
        item = await self.store.get(keys.status_key("Node", "a"))
        return item is not None and codec.decode(NodeStatus, item).asleep_since is not None

    async def until(self, holds: Callable[[], Awaitable[object]]) -> None:
        for _ in range(600):
            if await holds():
                return
            await self.clock.sleep(0.1)
        raise AssertionError("not within a minute")

    async def serves(self) -> bool:
        return await self.endpoint() == "serving"


def play(
    sleeper: PacketSleeper | Awake, test: Callable[[Scene], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        scene = Scene(sleeper)
        await scene.store.commit([], [codec.put_spec(wanted())])
        async with asyncio.TaskGroup() as tasks:
            loops = (scene.caches.run(), scene.mac.agent(scene.store, scene.caches).run())
            running = [tasks.create_task(loop) for loop in loops]
            await scene.until(scene.serves)
            await test(scene)
            for task in running:
                task.cancel()

    virtual_time.run(main())


def test_it_leaves_service_sleeps_while_ordered_and_comes_back() -> None:
    sleeper = PacketSleeper()

    async def test(scene: Scene) -> None:
        (engine,) = scene.mac.engines.running()
        await scene.order()

        async def leaves() -> bool:
            return await scene.endpoint() == "leaving"

        await scene.until(leaves)
        assert await scene.is_alive()
        assert sleeper.sleeps == 0

        async def sleeps() -> bool:
            return sleeper.is_asleep

        await scene.until(sleeps)
        assert (await scene.endpoint(), await scene.is_alive()) == ("none", False)
        assert await scene.is_announced()

        # macOS woke by itself: the order stands.
        sleeper.woken.set()
        await scene.clock.sleep(40)
        assert sleeper.is_asleep
        assert sleeper.sleeps == 2
        assert not await scene.is_alive()

        await scene.store.commit([], [Delete(key=KEY)])
        sleeper.woken.set()
        await scene.until(scene.serves)
        assert await scene.is_alive()
        await scene.clock.sleep(30)
        assert not await scene.is_announced()
        assert scene.mac.engines.running() == [engine]

    play(sleeper, test)


def test_its_owner_keeps_it_awake_and_wakes_it() -> None:
    sleeper = PacketSleeper()

    async def test(scene: Scene) -> None:
        readings = scene.mac.readings
        readings.now = replace(readings.now, owner_idle_s=1.0)
        await scene.clock.sleep(20)
        await scene.order()
        await scene.clock.sleep(60)
        assert sleeper.sleeps == 0
        assert await scene.endpoint() == "serving"
        readings.now = replace(readings.now, owner_idle_s=3600.0)
        await scene.clock.sleep(60)
        assert sleeper.is_asleep
        # A key is pressed: the machine is awake, and stays so though the order stands.
        readings.now = replace(readings.now, owner_idle_s=1.0)
        await scene.clock.sleep(20)
        sleeper.woken.set()
        await scene.until(scene.serves)
        await scene.clock.sleep(60)
        assert sleeper.sleeps == 1

    play(sleeper, test)


def test_a_machine_that_does_not_sleep_serves_again_and_says_so() -> None:
    sleeper = Awake()

    async def test(scene: Scene) -> None:
        await scene.order()
        await scene.clock.sleep(200)
        assert sleeper.asked == 1
        assert await scene.endpoint() == "serving"
        assert not await scene.is_announced()
        events = await objects.list_all(scene.store, Event)
        assert [e.spec.reason for e in events if e.spec.reason == "SleepFailed"] == ["SleepFailed"]
        await scene.clock.sleep(200)
        assert sleeper.asked == 2

    play(sleeper, test)


def test_each_attempt_to_wake_another_is_sent_once() -> None:
    packet = WakePacket(hardware_address="02:00:00:00:00:01", broadcast="10.0.0.255")

    async def test(scene: Scene) -> None:
        def request(attempt: int, began: int = 0) -> WakeRequest:
            at = scene.clock.now().replace(microsecond=began)
            return WakeRequest(node="b", attempt=attempt, requested_at=at, packets=(packet,))

        sent: list[int] = []
        first = request(1)
        second = first.model_copy(update={"attempt": 2})
        steps: Sequence[tuple[WakeRequest, ...]] = ((first,), (first,), (second,), (), (first,))
        for step in (*steps, (request(1, began=9),)):
            await scene.order(*step, sleep=False)
            await scene.clock.sleep(5)
            sent.append(len(scene.packets))
        assert sent == [1, 1, 2, 2, 2, 3]

    play(PacketSleeper(), test)
