"""Registration in the store, and the advertised address."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner
from typing_extensions import override

from gateway import registration
from gateway.__main__ import main
from machinery.clock import SystemClock
from machinery.http_server import ListenAddress
from machinery.version import version
from schemas.records import GatewayLease
from store import codec, keys
from store.errors import PermissionDeniedError
from store.etcd.connect import connect
from store.leases import hold_published
from store.memory import MemoryTransport
from store.port import Transport
from tests.support.clock import FakeClock
from tests.support.etcd import running_etcd
from tests.support.gateway_calls import gateway_process
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_world import World, running_gateway
from tests.support.ports import free_port
from tests.support.waiting import until, until_async

KEY = keys.named(keys.GATEWAY_LEASE_PREFIX, "g")
LEASE = codec.encode(GatewayLease(url="http://127.0.0.1:1", version=version()))


async def registered(transport: Transport) -> list[str]:
    listing = await transport.list(keys.GATEWAY_LEASE_PREFIX)
    return [codec.decode(GatewayLease, item).url for item in listing.items]


async def test_a_gateway_is_registered_for_as_long_as_it_runs() -> None:
    async with running_gateway() as gateway:
        urls = await until_async(
            lambda: registered(gateway.world.transport), what="the registration"
        )
        assert urls == [gateway.url]
        (item,) = (await gateway.world.transport.list(keys.GATEWAY_LEASE_PREFIX)).items
        assert codec.decode(GatewayLease, item).version == version()
        await gateway.world.transport.revoke(item.lease)
        # The next renewal finds it gone and registers anew.
        await until_async(
            lambda: registered(gateway.world.transport), what="the registration, again"
        )
    assert await registered(gateway.world.transport) == []


class Forbidding(MemoryTransport):
    """Refuses as an etcd does whose roles are older than registration."""

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
    async with asyncio.TaskGroup() as group:
        task = group.create_task(hold_published(transport, clock, KEY, lambda: LEASE))
        await until(lambda: transport.asked, what="the first try")
        await clock.advance(100)
        assert transport.asked > 1
        task.cancel()
    said = [r for r in caplog.records if r.message.startswith("not registered")]
    assert len(said) == 1
    world = World(Forbidding(SystemClock()))
    async with running_gateway(world.transport) as gateway, aiohttp.ClientSession() as http:
        await gateway.serve(chat)
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
            gateway_process("--port", str(ports[0]), *flags) as killed,
            gateway_process(
                *("--port", str(ports[1]), "--host", "0.0.0.0", "--insecure-http"),
                *("--advertise-address", "gate.lan", *flags),
            ) as process,
        ):

            async def both() -> bool:
                urls = {f"http://127.0.0.1:{ports[0]}", f"http://gate.lan:{ports[1]}"}
                return set(await registered(transport)) == urls

            await until_async(both, what="both registrations", limit_s=60)
            killed.kill()
            process.send_signal(signal.SIGTERM)
            # A stopped gateway removes its key; a killed one loses it with the lease.
            assert await process.wait() == 0
            assert f"http://gate.lan:{ports[1]}" not in await registered(transport)

            async def none() -> bool:
                return not await registered(transport)

            await until_async(none, what="the killed one's key being gone", limit_s=30)
        await transport.close()


@pytest.mark.parametrize(
    ("given", "bound", "expected"),
    [
        ("", "127.0.0.1", "http://127.0.0.1:4000"),
        ("", "mac-1.local", "http://mac-1.local:4000"),
        ("", "fd00::5", "http://[fd00::5]:4000"),
        ("10.0.0.5", "0.0.0.0", "http://10.0.0.5:4000"),
        ("10.0.0.5:80", "0.0.0.0", "http://10.0.0.5:80"),
        ("gate.lan:80", "127.0.0.1", "http://gate.lan:80"),
        ("[fd00::5]", "::", "http://[fd00::5]:4000"),
        ("[fd00::5]:80", "::", "http://[fd00::5]:80"),
    ],
)
def test_what_is_advertised(given: str, bound: str, expected: str) -> None:
    assert (
        registration.advertised_url(
            registration.parse_address(given), ListenAddress(bound, 4000), ()
        )
        == expected
    )


def test_https_is_advertised() -> None:
    bound = ListenAddress("10.0.0.5", 4000)
    assert registration.advertised_url(None, bound, (), is_tls=True) == "https://10.0.0.5:4000"


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::", ""])
@pytest.mark.parametrize(
    "etcd", [(), ("http://127.0.0.1:2379",), ("http://name.invalid:2379", "http://127.0.0.1:1")]
)
def test_a_wildcard_address_becomes_that_of_the_route_to_etcd(
    everywhere: str, etcd: tuple[str, ...]
) -> None:
    assert (
        registration.advertised_url(None, ListenAddress(everywhere, 4000), etcd)
        == "http://127.0.0.1:4000"
    )


@pytest.mark.parametrize(
    "wrong", ["http://a:1", "a:b", "a:70000", "fd00::5", "a/b", "u@a", ":80", "a b:1:2"]
)
def test_a_wrong_address_is_refused(wrong: str) -> None:
    result = CliRunner().invoke(main, ["--advertise-address", wrong, "--etcd", "unix:/s"])
    assert result.exit_code == 2
    assert f"--advertise-address: {wrong} is no address; write HOST or HOST:PORT" in result.stderr
