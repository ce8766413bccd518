"""Gateways become demand and counts: found by their leases, scraped, restarted, silent, and not trusted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits import GatewayLimits
from identity.dialer import Dialer
from machinery.clock import SystemClock
from machinery.tls_client import Trust, read_trust
from machinery.tls_server import ServerCertificate
from reconciler.deployments.demand.gateway_metrics import (
    Demand,
    DemandTotals,
    GatewaySample,
    VersionSample,
    parse,
)
from reconciler.deployments.demand.scraper import DemandScraper, is_significant
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

TEXT = r"""# HELP fleet_gateway_deployment_in_flight Requests at engines now.
# TYPE fleet_gateway_deployment_in_flight gauge
fleet_gateway_deployment_in_flight{deployment="m"} 3
fleet_gateway_deployment_in_flight{deployment="other"} 9
fleet_gateway_deployment_waiting{deployment="m"} 2
fleet_gateway_in_flight 12
fleet_gateway_version_requests_total{deployment="m",template="t1",outcome="ok"} 10
fleet_gateway_version_requests_total{deployment="m",template="t1",outcome="error"} 1
fleet_gateway_version_requests_total{deployment="m",template="t1",outcome="refused"} 4
fleet_gateway_version_requests_total{deployment="m",template="a\"\\\n",outcome="ok"} 1
fleet_gateway_version_first_token_seconds_bucket{deployment="m",template="t1",le="0.5"} 4
fleet_gateway_version_first_token_seconds_bucket{deployment="m",template="t1",le="+Inf"} 5
fleet_gateway_version_first_token_seconds_sum{deployment="m",template="t1"} 1.5
fleet_gateway_version_output_tokens_total{deployment="m",template="t1"} 90
fleet_gateway_version_output_seconds_total{deployment="m",template="t1"} 4.500000
"""
NEEDED = frozenset({"m"})


def test_the_metrics_of_a_gateway() -> None:
    sample = parse(TEXT, NEEDED)
    assert (sample.in_flight, sample.waiting) == ({"m": 3}, {"m": 2})
    assert sample.finished("m") == 16
    assert set(sample.versions["m"]) == {"t1", 'a"\\\n'}
    metrics = sample.versions["m"]["t1"].measured()
    assert (metrics.requests, metrics.errors, metrics.tokens_per_second) == (11, 1, 20)
    assert metrics.first_tokens == ((0.5, 4), (inf, 5))


@pytest.mark.parametrize(
    "line",
    [
        'fleet_gateway_deployment_in_flight{deployment="m"} NaN',
        'fleet_gateway_deployment_in_flight{deployment="m"} -1',
        'fleet_gateway_deployment_in_flight{deployment="m"} +Inf',
        'fleet_gateway_deployment_in_flight{deployment="m"} 1e99',
        'fleet_gateway_deployment_in_flight{deployment="m"}',
        "fleet_gateway_deployment_in_flight{deployment=m} 1",
        "fleet_gateway_deployment_in_flight 1",
        'xfleet_gateway_deployment_in_flight{deployment="m"} 1',
        ' fleet_gateway_deployment_in_flight{deployment="m"} 1',
    ],
)
def test_senseless_lines_are_skipped(line: str) -> None:
    assert parse(f"{line}\n", NEEDED) == GatewaySample()


def test_made_up_metrics_cost_no_memory() -> None:
    name = "fleet_gateway_version_first_token_seconds_bucket"
    lines = [f'{name}{{deployment="m",template="{n}",le="{n}"}} 1' for n in range(500)]
    lines += [f'{name}{{deployment="m",template="0",le="{n}"}} 1' for n in range(500)]
    busy = 'fleet_gateway_deployment_waiting{deployment="m"} 99999999999'
    sample = parse("\n".join([*lines, busy]), NEEDED)
    assert len(sample.versions["m"]) == 50
    assert len(sample.versions["m"]["0"].buckets) == 64
    assert sample.waiting == {"m": 100_000}


words = st.sampled_from([*TEXT.replace("{", " {").split(), *'{}"\\\n ='])
mixes = st.lists(st.one_of(words, st.text(max_size=5)), max_size=40).map("".join)


@given(text=st.one_of(st.text(), mixes))
def test_no_text_raises(text: str) -> None:
    tally = DemandTotals()
    for answer in (GatewaySample(), parse(text, NEEDED), parse(TEXT, NEEDED), parse(text, NEEDED)):
        tally.record({"g": answer}, {"g": "u"}, NEEDED, 0.0)
        for template in ("", "t1"):
            measured = tally.measured("m", template)
            assert measured is not None
            assert measured.requests >= measured.errors >= 0
            measured.first_token_quantile(0.95)


def sample(ok: int = 0, *, busy: int = 0, waiting: int = 0, template: str = "t") -> GatewaySample:
    version = VersionSample(outcomes={"ok": ok}, buckets={1.0: ok, inf: ok}, tokens=ok)
    return GatewaySample(
        in_flight={"m": busy}, waiting={"m": waiting}, versions={"m": {template: version}}
    )


def noted(tally: DemandTotals, now_s: float, **answers: GatewaySample | None) -> Demand:
    tally.record(answers, {id_: f"http://{id_}" for id_ in answers}, NEEDED, now_s)
    demand = tally.demand("m")
    assert demand is not None
    return demand


def test_gateways_are_added_up() -> None:
    tally = DemandTotals()
    assert tally.demand("m") is None
    assert tally.measured("m", "t") is None
    demand = noted(tally, 0, a=sample(busy=2), b=sample(busy=1, waiting=4))
    assert demand == Demand(in_flight=3, waiting=4, is_complete=True)


def test_the_last_answer_of_a_silent_gateway_counts_for_ten_seconds() -> None:
    tally = DemandTotals()
    noted(tally, 0, a=sample(busy=2), b=sample(busy=1))
    demand = noted(tally, 10, a=sample(busy=2), b=None)
    assert demand == Demand(in_flight=3, silent=("http://b",), is_complete=False)
    assert noted(tally, 10.5, a=sample(busy=2), b=None).in_flight == 2
    assert noted(tally, 11, a=sample(busy=2)).is_complete, "its lease is over: it is gone"


def test_without_a_gateway_the_demand_is_incomplete() -> None:
    assert noted(DemandTotals(), 0) == Demand(is_complete=False)
    assert noted(DemandTotals(), 0, a=None) == Demand(silent=("http://a",))


def test_counts_start_with_scraping_and_survive_restarts() -> None:
    tally = DemandTotals()

    def seen(**answers: GatewaySample | None) -> tuple[int, float, float]:
        demand, measured = noted(tally, 0, **answers), tally.measured("m", "t")
        assert measured is not None
        return demand.finished, measured.requests, measured.first_token_count

    assert seen(a=sample(100)) == (0, 0, 0)
    assert seen(a=sample(103)) == (3, 3, 3)
    assert seen(a=sample(103), b=sample(7)) == (3, 3, 3), "what b did before is nobody's news"
    assert seen(a=None, b=sample(9)) == (5, 5, 5)
    assert seen(a=sample(2), b=sample(9)) == (7, 7, 7), "a counts anew"
    assert seen(b=sample(9)) == (7, 7, 7)


def test_a_new_version_of_a_known_gateway_counts_from_zero() -> None:
    tally = DemandTotals()
    noted(tally, 0, a=sample(100))
    noted(tally, 1, a=GatewaySample(versions={"m": sample(4, template="new").versions["m"]}))
    measured = tally.measured("m", "new")
    assert measured is not None
    assert measured.requests == 4


def test_a_deployment_that_is_needed_later_starts_later() -> None:
    tally = DemandTotals()
    tally.record({"a": sample(5)}, {"a": "u"}, frozenset({"other"}), 0)
    assert noted(tally, 1, a=sample(9)).finished == 0
    assert noted(tally, 2, a=sample(10)).finished == 1


@pytest.mark.parametrize(
    ("told", "now", "since_s", "expected"),
    [
        (Demand(in_flight=100), Demand(in_flight=105), 99, False),
        (Demand(in_flight=100), Demand(in_flight=106), 0, True),
        (Demand(in_flight=1), Demand(in_flight=2), 0, True),
        (Demand(in_flight=1), Demand(waiting=1), 0, True),
        (Demand(), Demand(is_complete=True), 0, True),
        (Demand(silent=("a",)), Demand(silent=("b",)), 0, True),
        (Demand(finished=1), Demand(finished=2), 4, False),
        (Demand(finished=1), Demand(finished=2), 5, True),
        (Demand(finished=1), Demand(finished=1), 99, False),
    ],
)
def test_significant_changes(told: Demand, now: Demand, since_s: float, *, expected: bool) -> None:
    assert is_significant(told, now, since_s=since_s) is expected


counters = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20)), max_size=30)


@given(steps=counters)
def test_counts_never_decrease(steps: list[tuple[str, int]]) -> None:
    tally, before = DemandTotals(), 0.0
    for id_, ok in steps:
        noted(tally, 0, **{"a": None, "b": None, id_: sample(ok)})
        measured = tally.measured("m", "t")
        assert measured is not None
        assert measured.requests >= before
        before = measured.requests


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


def test_a_release_counts_while_nothing_runs_and_requested_repositories_are_bounded() -> None:
    text = (
        'fleet_gateway_deployment_released{deployment="m"} 2\n'
        'fleet_gateway_deployment_in_flight{deployment="busy"} 1\n'
        'fleet_gateway_deployment_released{deployment="busy"} 1\n'
        'fleet_gateway_on_demand{repository="org/name"} 1\n'
        'fleet_gateway_on_demand{repository="../name"} 1\n'
    ) + "".join(f'fleet_gateway_on_demand{{repository="org/n{at}"}} 1\n' for at in range(200))
    sample = parse(text, {"m", "busy"})
    assert "org/name" in sample.requested
    assert "../name" not in sample.requested
    assert len(sample.requested) == 64
    totals = DemandTotals()
    totals.record({"g": sample}, {"g": "http://g"}, {"m", "busy"}, 0.0)
    released = {name: totals.demand(name) for name in ("m", "busy")}
    assert [one.released for one in released.values() if one is not None] == [2, 0]
    assert totals.requested() == sample.requested
