"""Gateways are found by their leases and scraped: real ones, dead ones, and ones with wrong answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from gateway.server import GatewayLimits
from identity.dialer import Dialer
from machinery.clock import SystemClock
from machinery.tls_client import Trust, read_trust
from machinery.tls_server import ServerCertificate
from reconciler.deployments.demand.gateway_metrics import Demand
from reconciler.deployments.demand.scraper import DemandScraper
from schemas.records import GatewayLease
from store import codec, keys
from store.memory import MemoryTransport
from store.port import Put, Transport
from tests.support.gateway_calls import scaled_to_zero
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_world import World, published, running_gateway
from tests.support.store_certificates import Authority
from tests.support.tcp_server import tcp_server
from tests.support.waiting import until


@asynccontextmanager
async def watching(
    transport: Transport, needed: set[str], told: list[str], trust: Trust = True
) -> AsyncIterator[DemandScraper]:
    watch = DemandScraper(
        transport,
        SystemClock(),
        needed=lambda: needed,
        on_change=lambda name: told.append(name),
        dialer=Dialer(trust=trust),
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(watch.run())
        try:
            yield watch
        finally:
            task.cancel()


async def says(
    watch: DemandScraper, holds: Callable[[Demand], bool], what: str = "the demand"
) -> Demand:
    def found() -> Demand | None:
        demand = watch.demand("m")
        return demand if demand is not None and holds(demand) else None

    return await until(found, what=what)


async def test_a_gateway_with_https_is_scraped_if_its_authority_is_trusted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world, authority = World(MemoryTransport(SystemClock())), Authority(tmp_path, "ours")
    files = authority.issue("gateway")
    certificate = ServerCertificate(files.certificate, files.key)
    limits = GatewayLimits(drain_timeout_s=0.0, certificate=certificate)
    async with running_gateway(world.transport, limits):
        async with watching(world.transport, {"m"}, []) as blind:
            await until(lambda: "does not show its load" in caplog.text, what="the warning")
            demand = blind.demand("m")
            assert demand is None or not demand.is_complete
        trusted = read_trust(authority.certificate)
        async with watching(world.transport, {"m"}, [], trusted) as watch:
            await says(watch, lambda demand: demand.is_complete)


async def test_a_real_gateway_is_found_and_scraped() -> None:
    world, free = World(MemoryTransport(SystemClock())), asyncio.Event()

    async def slow(call: Call) -> None:
        await free.wait()
        await chat(call)

    told: list[str] = []
    needed: set[str] = {"m"}
    async with (
        running(FakeEngine("m-0", slow)) as engine,
        running_gateway(world.transport) as gateway,
        watching(world.transport, needed, told) as watch,
        aiohttp.ClientSession() as http,
    ):
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
        await says(watch, lambda d: d.is_complete)
        before = len(told)
        async with asyncio.TaskGroup() as group:
            body = {"model": "m", "stream": True}
            url = f"{gateway.url}/v1/chat/completions"

            async def ask() -> None:
                async with http.post(url, json=body) as response:
                    assert (await response.read()).endswith(b"[DONE]\n\n")

            group.create_task(ask())
            assert (await says(watch, lambda d: d.in_flight == 1)).is_complete
            free.set()
        demand = await says(watch, lambda d: d.finished == 1)
        assert (demand.in_flight, demand.waiting) == (0, 0)
        assert told[before:]
        assert set(told) == {"m"}
        measured = watch.measured("m", "")
        assert measured is not None
        assert (measured.requests, measured.errors, measured.first_token_count) == (1, 0, 1)
        needed.clear()
        await until(lambda: watch.measured("m", "") is None, what="nobody being asked")


async def test_a_request_that_waits_at_a_gateway_is_seen() -> None:
    world, told = World(MemoryTransport(SystemClock())), list[str]()
    async with (
        running(FakeEngine("m-0", chat)) as engine,
        running_gateway(world.transport) as gateway,
        watching(world.transport, {"m"}, told) as watch,
        aiohttp.ClientSession() as http,
    ):
        await world.put(scaled_to_zero("m"))
        await gateway.knows("m", ready=0)
        await says(watch, lambda d: d.is_complete)
        told.clear()
        async with asyncio.TaskGroup() as group:
            url = f"{gateway.url}/v1/chat/completions"
            asked = group.create_task(http.post(url, json={"model": "m"}))
            assert (await says(watch, lambda d: d.waiting == 1)).in_flight == 0
            assert told == ["m"]
            await world.put(published(engine, "m"))
            response = await asked
            assert response.status == 200
            response.release()


async def register(transport: Transport, id_: str, port: int) -> None:
    lease = GatewayLease(url=f"http://127.0.0.1:{port}", version="1")
    await transport.commit(
        [], [Put(key=keys.named(keys.GATEWAY_LEASE_PREFIX, id_), value=codec.encode(lease))]
    )


Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def plain(text: str, *, id_: str = "liar", status: str = "200 OK", more: str = "") -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status}\r\nx-fleet-gateway: {id_}\r\n{more}connection: close\r\n\r\n"
        writer.write(head.encode() + text.encode())
        await writer.drain()

    return answer


async def endless(writer: asyncio.StreamWriter) -> None:
    await plain("")(writer)
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def silent(_: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def noise(writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\xff" * 100)


BUSY = 'fleet_gateway_deployment_in_flight{deployment="m"} 5\n'


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(noise, id="not-http"),
        pytest.param(silent, id="no-answer"),
        pytest.param(endless, id="no-end"),
        pytest.param(plain(BUSY, id_="somebody-else"), id="another-gateway"),
        pytest.param(plain(BUSY, status="500 No"), id="an-error"),
        pytest.param(plain(BUSY, status="302 Found", more="location: http://127.0.0.1:1/\r\n"), id="a-redirect"),
    ],
)  # fmt: skip
async def test_a_gateway_with_a_bad_answer_is_silent_and_disturbs_no_other(answer: Answer) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(writer)

    transport = MemoryTransport(SystemClock())
    async with tcp_server(serve) as port:
        await register(transport, "liar", port)
        async with running_gateway(transport), watching(transport, {"m"}, []) as watch:
            demand = await says(watch, lambda d: bool(d.silent), "a silent gateway")
            assert demand == Demand(silent=(f"http://127.0.0.1:{port}",))


async def test_a_gateway_with_nonsense_counts_without_it() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await plain("{}}{\x00 NaN\n" * 10 + BUSY + "fleet_gateway_deployment_in_flight{")(writer)

    transport = MemoryTransport(SystemClock())
    async with tcp_server(serve) as port:
        await register(transport, "liar", port)
        async with watching(transport, {"m"}, []) as watch:
            demand = await says(watch, lambda d: d.is_complete)
            assert demand == Demand(in_flight=5, is_complete=True)


async def test_without_needed_deployments_no_gateway_is_scraped() -> None:
    asked = asyncio.Event()

    async def serve(_reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        asked.set()

    transport = MemoryTransport(SystemClock())
    needed: set[str] = set()
    async with tcp_server(serve) as port, watching(transport, needed, []) as watch:
        await register(transport, "g", port)
        await asyncio.sleep(0.2)
        assert not asked.is_set()
        assert watch.demand("m") is None
        needed.add("m")
        async with asyncio.timeout(30):
            await asked.wait()
