"""`fleetctl status`: the fleet on one screen, with real gateways, and while one does not answer."""

import json
from datetime import timedelta

from machinery.clock import SystemClock
from schemas.autoscaling import LoadForecast
from schemas.deployment import ModelDeploymentStatus
from schemas.meta import ObjectMeta
from schemas.records import GatewayLease
from schemas.route import Backend, ModelRoute, ModelRouteSpec
from store import codec, keys
from store.port import Delete, Put
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.gateway_calls import scaled_to_zero
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import World, running_gateway
from tests.support.macs import GIB, mac, put_status
from tests.support.reconciler_agents import node_status, put_lease, put_node
from tests.support.waiting import until_async


def put_mac(name: str, *, alive: bool = True) -> list[Put]:
    return mac(name) if alive else [put_status(name)]


async def test_machines_that_are_no_macs_are_nodes(fleet: MemoryFleet) -> None:
    linux = node_status("box").model_copy(update={"os": "Debian GNU/Linux", "chip": "AMD EPYC"})
    await fleet.store.commit(
        [], [put_node("mac-1"), put_lease("mac-1"), put_node("box", linux), put_lease("box")]
    )
    assert (await fleet.ctl("status")).out.startswith("2 of 2 nodes online. Nothing is deployed.")


async def test_a_model_that_waits_for_room_says_for_how_long_and_for_which(
    fleet: MemoryFleet,
) -> None:
    world = World(fleet.store)
    await fleet.store.commit([], mac("mac-1"))
    await world.put(scaled_to_zero("writer"))
    since = SystemClock().now() + timedelta(hours=1)  # a clock that is ahead adds nothing
    forecast = LoadForecast(seconds=14, since=since, gives_way=("qwen-0",))
    await world.put_status("writer", ModelDeploymentStatus(loading=forecast))
    done = await fleet.ctl("status")
    assert "\nwriter loads in 14 s: qwen-0 gives way\n" in done.out
    tree = json.loads((await fleet.ctl("status", "-o", "json")).out)
    assert tree["loading"] == ["writer loads in 14 s: qwen-0 gives way"]


async def test_a_fleet_on_one_screen(fleet: MemoryFleet) -> None:
    world = World(fleet.store)
    leader = Put(key=keys.ELECTION_RECONCILER, value=b"mac-1/7 1.0")
    await fleet.store.commit([], [*put_mac("mac-1"), *put_mac("mac-2", alive=False), leader])
    route = ModelRoute(
        metadata=ObjectMeta(name="r"),
        spec=ModelRouteSpec(model="standard", backends=(Backend(deployment="qwen"),)),
    )
    await world.put(route)
    async with (
        running(FakeEngine("qwen-0", chat)) as engine,
        running_gateway(fleet.store) as gateway,
    ):
        await world.serve("qwen", engine)
        await gateway.knows("qwen", ready=1)

        async def is_registered() -> bool:
            return bool((await fleet.store.list(keys.GATEWAY_LEASE_PREFIX)).items)

        await until_async(is_registered)
        done = await fleet.ctl("status")
        assert (done.code, done.err) == (0, "")
        sentence, _, titles, first, second, _, tiers, tier, _, gateways, last = (
            done.out.splitlines()
        )
        assert sentence == "1 of 2 Macs online. qwen is starting."
        assert titles.split() == ["NODE", "CHIP", "MEMORY", "FREE", "MODELS", "READY", "RUNNING"]
        assert first.split() == (
            [
                "mac-1",
                "M4",
                "Pro",
                "48.0",
                "GiB",
                "36.0",
                "GiB",
                "free",
                "standard:qwen",
                "yes",
                "0",
            ]
        )
        assert second.split() == ["mac-2", "M4", "Pro", "48.0", "GiB", "offline", "-", "-", "-"]
        assert tiers.split() == ["MODEL", "NAME", "SERVED", "BY", "NODES", "READY", "WAITING"]
        assert tier.split() == ["standard", "qwen", "mac-1", "(1)", "1", "0"]
        assert gateways.split() == ["GATEWAY", "URL", "VERSION", "RUNNING"]
        assert gateway.url in last
        # A gateway that is gone without a word.
        dead = GatewayLease(url="http://127.0.0.1:9", version="1")
        key = keys.named(keys.GATEWAY_LEASE_PREFIX, "dead")
        await fleet.store.commit([], [Put(key=key, value=codec.encode(dead))])
        done = await fleet.ctl("status")
        assert done.code == 0
        assert "is starting. 1 of 2 gateways does not answer: dead.\n" in done.out
        assert "warning: gateway dead: gateway/dead does not answer" in done.err
        # What it would have added is unknown, and no number is shown as if it were known.
        assert done.out.splitlines()[3].split()[-2:] == ["yes", "?"]
        await fleet.store.commit([], [Delete(key=key)])
        tree = json.loads((await fleet.ctl("status", "-o", "json")).out)
        assert tree["kind"] == "FleetStatus"
        assert tree["macs"][0]["freeBytes"] == 36 * GIB - 4
        assert [one["active"] for one in tree["gateways"]] == [0]
    assert not (await fleet.store.list(keys.TICKET_PREFIX)).items
