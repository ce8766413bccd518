"""Election of the holder of a floating address: take-over, outages of the store, an address that cannot be added."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.floating_address.holder import AddressHolder
from machinery.virtual_time import VirtualClock
from machinery.virtual_time import run as run_virtual
from store.memory import MemoryTransport
from tests.support.store_faults import FaultyTransport

KEY = "/mlx-fleet/v1/election/floatingaddress/192.168.1.50"


class Keeper:
    """A keeper without a network: it has the address until its time is over."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._ends_at = 0.0
        self.failure = ""
        self.refuses = ""
        self.releases = 0

    @property
    def is_held(self) -> bool:
        return self._clock.elapsed() < self._ends_at

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def hold(self, seconds: float, *, has_lease: bool) -> None:
        self.failure = self.refuses
        if not self.refuses and (has_lease or self.is_held):
            self._ends_at = self._clock.elapsed() + seconds

    async def release(self) -> None:
        self.releases += 1
        self._ends_at = 0.0

    async def close(self) -> None:
        self._ends_at = 0.0


class Machine:
    """A machine with a gateway, and its own way to the store."""

    def __init__(self, name: str, store: MemoryTransport, clock: VirtualClock) -> None:
        self.transport = FaultyTransport(store)
        self.keeper = Keeper(clock)
        self.holder = AddressHolder(
            self.transport, clock, self.keeper, key=KEY, identity=f"{name}/1"
        )
        self.task: asyncio.Task[None] | None = None


@asynccontextmanager
async def machines(clock: VirtualClock, *names: str) -> AsyncIterator[list[Machine]]:
    """Start the gateways one after the other: the first one holds the address."""
    store = MemoryTransport(clock)
    async with asyncio.TaskGroup() as group:
        found = []
        for name in names:
            found.append(Machine(name, store, clock))
            found[-1].task = group.create_task(found[-1].holder.run())
            await clock.sleep(1)
        yield found
        for machine in found:
            assert machine.task is not None
            machine.task.cancel()


def held(found: list[Machine]) -> list[bool]:
    return [machine.keeper.is_held for machine in found]


def test_one_gateway_holds_the_address_and_hands_it_on_when_it_stops() -> None:
    async def main() -> None:
        clock = VirtualClock()
        async with machines(clock, "a", "b") as found:
            await clock.sleep(60)
            assert held(found) == [True, False]
            assert found[0].task is not None
            found[0].task.cancel()
            await clock.sleep(0.5)
            assert held(found) == [False, True]

    run_virtual(main())


def test_a_holder_that_lost_the_store_gives_the_address_up_once_it_sees_the_new_one() -> None:
    async def main() -> None:
        clock = VirtualClock()
        async with machines(clock, "a", "b") as found:
            found[0].transport.leave()
            # On a network, the keeper hears the new holder before the store is back.
            taken_at = None
            for _ in range(100):
                await clock.sleep(0.1)
                if found[1].keeper.is_held:
                    taken_at = clock.elapsed()
                    break
            assert taken_at is not None
            found[0].transport.come_back()
            await clock.sleep(1.5)
            assert held(found) == [False, True]

    run_virtual(main())


def test_the_holder_keeps_the_address_while_the_store_is_away_for_all() -> None:
    async def main() -> None:
        clock = VirtualClock()
        async with machines(clock, "a", "b") as found:
            for one in found:
                one.transport.leave()
            for _ in range(300):
                await clock.sleep(0.1)
                assert held(found) == [True, False]
            for one in found:
                one.transport.come_back()
            together_s = 0.0
            for _ in range(300):
                await clock.sleep(0.1)
                together_s = together_s + 0.1 if all(held(found)) else 0.0
                # The holder asks the store every half second; ARP, which ends this sooner, is the keeper's.
                assert together_s < 2
            assert sum(held(found)) == 1

    run_virtual(main())


def test_a_gateway_that_cannot_add_the_address_leaves_it_to_another() -> None:
    async def main() -> None:
        clock = VirtualClock()
        async with machines(clock, "a", "b") as found:
            found[0].keeper.refuses = "`ip address replace` failed"
            await clock.sleep(5)
            assert held(found) == [False, True]
            found[0].keeper.refuses = ""
            assert found[1].task is not None
            found[1].task.cancel()
            await clock.sleep(90)
            assert held(found) == [True, False]

    run_virtual(main())


def test_an_address_that_a_killed_gateway_left_behind_is_removed_at_the_start() -> None:
    async def main() -> None:
        clock = VirtualClock()
        async with machines(clock, "a", "b", "a") as found:
            # The third one is on the first one's machine, which has the address.
            assert [machine.keeper.releases for machine in found] == [1, 1, 0]

    run_virtual(main())
