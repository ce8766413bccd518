"""A gateway says in the store where it is: for as long as it lives, and serving whether or not it can."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest
from typing_extensions import override

from gateway.registration import Registration
from gateway.server import GatewayLimits
from machinery.clock import SystemClock
from machinery.version import version
from schemas.records import GatewayLease
from store import codec, keys
from store.errors import PermissionDeniedError
from store.etcd.connect import connect
from store.memory import MemoryTransport
from store.port import Transport
from tests.gateway.fake_engine import FakeEngine, running
from tests.gateway.scripts import chat
from tests.gateway.test_process import process
from tests.gateway.world import World, running_gateway
from tests.support.clock import FakeClock
from tests.support.etcd import running_etcd
from tests.support.ports import free_port
from tests.support.waiting import until, until_async


async def registered(transport: Transport) -> list[str]:
    listing = await transport.list(keys.GATEWAY_LEASE_PREFIX)
    return [codec.decode(GatewayLease, item).url for item in listing.items]


async def test_a_gateway_is_registered_for_as_long_as_it_runs(world: World) -> None:
    async with running_gateway(world.transport) as gateway:
        urls = await until_async(lambda: registered(world.transport), what="the registration")
        assert urls == [gateway.url]
        (item,) = (await world.transport.list(keys.GATEWAY_LEASE_PREFIX)).items
        assert codec.decode(GatewayLease, item).version == version()
        await world.transport.revoke(item.lease)
        # The next renewal finds it gone, and then there is another.
        await until_async(lambda: registered(world.transport), what="the registration, again")
    assert await registered(world.transport) == []


async def test_only_who_asks_for_keys_shares_their_rates(world: World) -> None:
    keys_on = GatewayLimits(drain_timeout_s=0.0, asks_for_keys=True)
    async with (
        running_gateway(world.transport, keys_on) as one,
        running_gateway(world.transport, keys_on),
        running_gateway(world.transport, GatewayLimits(drain_timeout_s=0.0)),
    ):

        async def all_three() -> bool:
            return len(await registered(world.transport)) == 3

        await until_async(all_three, what="all registrations")
        key_keeper = one.gateway.known.key_keeper
        assert key_keeper is not None

        def count() -> int:
            known = key_keeper.known()
            return 0 if known is None else known.gateways

        await until(lambda: count() == 2, what="those that share rates")


class Forbidding(MemoryTransport):
    """Refuses what an etcd refuses whose roles are of before gateways registered."""

    asked = 0

    @override
    async def grant(self, ttl_s: int) -> int:
        self.asked += 1
        raise PermissionDeniedError("etcd refuses user 'fleet-gateway'")


async def test_without_the_right_to_register_it_serves_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    transport = Forbidding(clock)
    presence = Registration(transport, clock, id_="g", url="http://127.0.0.1:1")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(presence.run())
        await until(lambda: transport.asked, what="the first try")
        await clock.advance(5)
        assert transport.asked == 1, "a person must mend it: no hurry"
        await clock.advance(100)
        assert transport.asked > 1
        task.cancel()
    said = [r for r in caplog.records if r.message.startswith("not registered")]
    assert len(said) == 1
    world = World(Forbidding(SystemClock()))
    async with (
        running(FakeEngine("m-0", chat)) as engine,
        running_gateway(world.transport) as gateway,
        aiohttp.ClientSession() as http,
    ):
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
        url = f"{gateway.url}/v1/chat/completions"
        async with http.post(url, json={"model": "m"}) as response:
            assert response.status == 200


@pytest.mark.etcd
@pytest.mark.timeout(180)
async def test_processes_on_a_real_etcd(tmp_path: Path) -> None:
    async with running_etcd(tmp_path) as etcd:
        transport = connect(etcd.address)
        ports = [free_port(), free_port()]
        flags = ("--etcd", str(etcd.address))
        async with (
            process("--port", str(ports[0]), *flags) as killed,
            process(
                *("--port", str(ports[1]), "--host", "0.0.0.0"),
                *("--advertise-address", "gate.lan", *flags),
            ) as told,
        ):

            async def both() -> bool:
                urls = {f"http://127.0.0.1:{ports[0]}", f"http://gate.lan:{ports[1]}"}
                return set(await registered(transport)) == urls

            await until_async(both, what="both registrations", limit_s=20)
            killed.kill()
            told.send_signal(signal.SIGTERM)
            # Who is told to end takes its key along; of who is killed it goes with the lease.
            assert await told.wait() == 0
            assert f"http://gate.lan:{ports[1]}" not in await registered(transport)

            async def none() -> bool:
                return not await registered(transport)

            await until_async(none, what="the killed one's key being gone", limit_s=12)
        await transport.close()
