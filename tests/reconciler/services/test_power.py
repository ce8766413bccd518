"""Macs that sleep and wake: whole fleets in virtual time, with a real reconciler and real agents.

All Macs but the last one are in a pool that lets them sleep.
"""

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.autoscaling import Autoscaling
from schemas.node import Node
from store import codec, objects
from tests.support.sleeping_fleet import SleepingFleet, play


async def asleep(fleet: SleepingFleet) -> str:
    """Wait until the replica serves and then its Mac sleeps; return the Mac."""
    await fleet.until(fleet.serving, 60)
    (home,) = (await fleet.replicas()).values()

    async def sleeps() -> bool:
        return home in fleet.asleep()

    await fleet.until(sleeps, 420)
    return home


def test_an_idle_mac_sleeps_keeps_its_replica_and_wakes_for_a_request() -> None:
    async def test(fleet: SleepingFleet) -> None:
        await fleet.declare()
        home = await asleep(fleet)
        before = await fleet.replicas()
        assert await fleet.serving() == set()
        await fleet.clock.sleep(300)
        assert fleet.asleep() == {"a", "b"}
        assert await fleet.replicas() == before
        assert await fleet.condition(home) == "Sleeping"
        assert fleet.packets == []

        fleet.gateway.waiting["qwen"] = 1
        assert await fleet.until(fleet.serving, 30) < 10
        assert await fleet.replicas() == before
        assert {name for _, name in fleet.packets} == {home}
        fleet.gateway.waiting["qwen"] = 0
        assert await asleep(fleet) == home
        events = set(await fleet.events())
        assert {"NodeAsleep", "NodeWaking", "NodeWoken"} <= events
        assert "NodeNotReady" not in events

    play("abz", test)


def test_the_last_mac_of_a_network_stays_awake() -> None:
    async def test(fleet: SleepingFleet) -> None:
        await fleet.declare()
        fleet.cut_power("z")
        await fleet.clock.sleep(900)
        (home,) = (await fleet.replicas()).values()
        # The one with the replica: a request then need not wait.
        assert fleet.asleep() == {"a", "b"} - {home}
        assert await fleet.condition(home) == "LastOnLink"

    play("abz", test)


def test_a_mac_that_cannot_be_woken_gives_way() -> None:
    async def test(fleet: SleepingFleet) -> None:
        await fleet.declare()
        home = await asleep(fleet)
        await fleet.clock.sleep(60)
        fleet.lost = {home}
        fleet.gateway.waiting["qwen"] = 1
        assert 85 < await fleet.until(fleet.serving, 200) < 150
        assert home not in (await fleet.replicas()).values()
        assert sum(name == home for _, name in fleet.packets) == 3
        assert await fleet.condition(home) == "WakeFailed"
        assert "WakeFailed" in await fleet.events()

        # It is a Mac like others once it is back.
        fleet.sleepers[home].woken.set()

        async def is_back() -> bool:
            return await fleet.condition(home) not in ("WakeFailed", "Sleeping")

        await fleet.until(is_back, 60)

    play("abz", test)


def test_an_operator_and_a_window_wake_macs() -> None:
    async def test(fleet: SleepingFleet) -> None:
        now = fleet.clock.now()
        start, end = now + timedelta(hours=1), now + timedelta(hours=2)
        window = {"start": f"{start:%H:%M}", "end": f"{end:%H:%M}"}
        await fleet.declare(mode="Schedule", awake=(window,))
        home = await asleep(fleet)

        async def awake() -> bool:
            return home not in fleet.asleep()

        node = await objects.get(fleet.store, Node, home)
        assert node is not None
        until = fleet.clock.now() + timedelta(minutes=10)
        spec = node.spec.model_copy(update={"awake_until": until})
        wished = node.model_copy(update={"spec": spec, "status": None})
        await fleet.store.commit([], [codec.put_spec(wished)])
        await fleet.until(awake, 30)
        await fleet.clock.sleep(8 * 60)
        assert await awake()
        assert await fleet.condition(home) == "WokenByOperator"
        assert await asleep(fleet) == home

        while fleet.clock.now() < start - timedelta(minutes=2):
            assert not await awake()
            await fleet.clock.sleep(60)
        await fleet.until(awake, 300)
        await fleet.clock.sleep(10)
        assert await fleet.condition(home) == "AwakeHours"

    play("az", test)


def test_as_many_macs_wake_as_requests_need_and_another_if_one_does_not() -> None:
    async def test(fleet: SleepingFleet) -> None:
        await fleet.declare(replicas=2)

        async def all_sleep() -> bool:
            return fleet.asleep() == {"a", "b"}

        async def one_serves() -> bool:
            return len(await fleet.serving()) == 1

        async def both_serve() -> bool:
            return len(await fleet.serving()) == 2

        await fleet.until(both_serve, 60)
        await fleet.until(all_sleep, 420)
        fleet.gateway.waiting["qwen"] = 1
        await fleet.until(one_serves, 30)
        await fleet.clock.sleep(120)
        assert await one_serves()
        assert len({name for _, name in fleet.packets}) == 1

        fleet.gateway.waiting["qwen"] = 2
        await fleet.until(both_serve, 30)
        fleet.gateway.waiting["qwen"] = 0
        await fleet.until(all_sleep, 700)

        first = min(name for _, name in fleet.packets)
        fleet.packets.clear()
        fleet.lost = {first}
        fleet.gateway.waiting["qwen"] = 1
        # The other one follows after the first attempt, and not after the last one.
        assert await fleet.until(one_serves, 80) < 60

    play("abz", test)


def test_a_drain_wakes_a_mac_and_moves_its_replica_to_another_that_wakes() -> None:
    async def test(fleet: SleepingFleet) -> None:
        await fleet.declare()
        home = await asleep(fleet)
        await fleet.clock.sleep(60)
        node = await objects.get(fleet.store, Node, home)
        assert node is not None
        spec = node.spec.model_copy(update={"draining": True, "unschedulable": True})
        drained = node.model_copy(update={"spec": spec, "status": None})
        await fleet.store.commit([], [codec.put_spec(drained)])

        async def moved() -> bool:
            nodes = set((await fleet.replicas()).values())
            return nodes == {"a", "b"} - {home} and await fleet.serving() != set()

        await fleet.until(moved, 200)

    play("abz", test)


def test_a_replica_that_sleeps_is_not_scaled_to_zero() -> None:
    async def test(fleet: SleepingFleet) -> None:
        autoscaling = Autoscaling(min_replicas=0, max_replicas=2, idle_time="8m")
        await fleet.declare(autoscaling=autoscaling)
        await asleep(fleet)
        before = await fleet.replicas()
        await fleet.clock.sleep(900)
        assert fleet.asleep() == {"a", "b"}
        assert await fleet.replicas() == before
        fleet.gateway.waiting["qwen"] = 1
        # No load of the model: the engine was kept in memory.
        assert await fleet.until(fleet.serving, 30) < 10
        assert await fleet.replicas() == before

    play("abz", test)


def test_a_mac_does_not_sleep_while_a_gateway_is_silent() -> None:
    async def test(fleet: SleepingFleet) -> None:
        fleet.gateway.is_complete = False
        await fleet.declare()
        await fleet.clock.sleep(600)
        (home,) = (await fleet.replicas()).values()
        assert home not in fleet.asleep()
        assert await fleet.condition(home) == "DemandUnknown"

    play("abz", test)


STEPS = ("request", "quiet", "lose packets", "pass packets", "cut", "boot", "wait")


async def take(step: str, fleet: SleepingFleet, homes: dict[str, str]) -> None:
    home = next(iter(homes.values()), "")
    match step:
        case "request" | "quiet":
            fleet.gateway.waiting["qwen"] = int(step == "request")
        case "lose packets" | "pass packets":
            fleet.lost = {"a", "b"} if step == "lose packets" else set()
        case "cut" if home in fleet.agents and len(fleet.agents) == len(fleet.macs):
            fleet.cut_power(home)
        case "boot":
            for name in fleet.macs.keys() - fleet.agents.keys():
                fleet.agents[name] = fleet.start(name)
        case _:
            pass


async def check_moves(fleet: SleepingFleet, homes: dict[str, str]) -> dict[str, str]:
    """Return the nodes of the replicas now; a replica may move only from a Mac that is lost."""
    now = await fleet.replicas()
    for replica in homes.keys() & now.keys():
        before = homes[replica]
        is_lost = before not in fleet.agents or await fleet.condition(before) == "WakeFailed"
        assert now[replica] == before or is_lost
    return now


@pytest.mark.ci
@pytest.mark.timeout(300)
@settings(max_examples=5)
@given(steps=st.lists(st.sampled_from(STEPS), min_size=3, max_size=6))
def test_random_orders_keep_the_laws(steps: list[str]) -> None:
    """A replica leaves only a lost Mac, attempts are bounded, and what is asked for serves in the end."""

    async def test(fleet: SleepingFleet) -> None:
        await fleet.declare(idleTime="1m")
        await fleet.until(fleet.serving, 60)
        homes = await fleet.replicas()
        for step in steps:
            await take(step, fleet, homes)
            for _ in range(8):
                await fleet.clock.sleep(20)
                homes = await check_moves(fleet, homes)
        times = sorted(at for at, name in fleet.packets if name == "a")
        assert all(sum(0 <= other - at < 60 for other in times) <= 3 for at in times)
        assert "z" not in fleet.asleep()
        for step in ("pass packets", "boot", "request"):
            await take(step, fleet, homes)
        await fleet.until(fleet.serving, 700)

    play("abz", test)
