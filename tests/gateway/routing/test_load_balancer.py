"""Load balancing: each strategy, points of Macs, scores, and large pools."""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.load_balancer import (
    SAMPLE_SIZE,
    SCAN_LIMIT,
    Scope,
    allowed,
    eligible_endpoints,
)
from gateway.routing.selection import ChosenEndpoint, choose
from gateway.routing.table import (
    BackendBuilder,
    EndpointHealth,
    EngineEndpoint,
    RoutingQuery,
    RoutingTable,
    ServedModel,
)
from gateway.state.build_table import endpoint_of
from schemas import chips
from schemas.chips import GIB
from schemas.meta import ObjectMeta
from schemas.replica import Endpoint, EndpointHardware, EndpointSpec
from schemas.routing import PrefixAffinity, Routing, ScoreWeights, Strategy
from schemas.wire.engine_address import EngineAddress
from tests.support.gateway_world import target
from tests.support.sampling import samples

A, B, C = (target(f"m-{n}", port=n + 1) for n in range(3))
DRAWS = [n / 1009 for n in range(1009)]


def table(*endpoints: EngineEndpoint, routing: Routing, site: str = "") -> RoutingTable:
    backend = BackendBuilder(site=site).backend(("m",), leased=endpoints, routing=routing)
    model = ServedModel(name="m", created=0, backends=(backend,), reason="")
    return RoutingTable(models=MappingProxyType({"m": model}))


def parts(
    found: RoutingTable, health: EndpointHealth, fill: Callable[[RoutingQuery], None]
) -> dict[str, float]:
    """Return the part of many requests that each engine gets without any change in between."""
    count: Counter[str] = Counter()
    for turn, draw in enumerate(DRAWS):
        query = RoutingQuery("m", draw)
        query.turn = turn
        fill(query)
        choice = choose(found, query, health)
        assert isinstance(choice, ChosenEndpoint)
        count[choice.endpoint.replica] += 1
    return {name: n / len(DRAWS) for name, n in count.items()}


def who(
    strategy: Strategy,
    *endpoints: EngineEndpoint,
    busy: dict[EngineEndpoint, int] | None = None,
    others: dict[EngineEndpoint, float] | None = None,
    free: dict[EngineEndpoint, float] | None = None,
    read: tuple[tuple[EngineEndpoint, float], ...] = (),
    routing: Routing | None = None,
) -> dict[str, float]:
    health = EndpointHealth(
        in_flight={t.origin: n for t, n in (busy or {}).items()},
        others_in_flight={t.origin: n for t, n in (others or {}).items()},
        headroom={t.origin: n for t, n in (free or {}).items()},
    )

    def fill(query: RoutingQuery) -> None:
        query.cached = [(t.mark, part) for t, part in read]

    routing = (routing or Routing()).model_copy(update={"strategy": strategy})
    return parts(table(*endpoints, routing=routing), health, fill)


EVENLY = pytest.approx({"m-0": 1 / 3, "m-1": 1 / 3, "m-2": 1 / 3}, abs=0.01)
LARGE = replace(A, concurrency=32)
ONLY_MEMORY = Routing(
    weights=ScoreWeights(model_loaded=0, memory_headroom=1, queue_depth=0, prefix_affinity=0)
)
NO_PREFIX = Routing(prefix_affinity=PrefixAffinity(enabled=False))


@pytest.mark.parametrize(
    ("strategy", "situation", "expected"),
    [
        pytest.param("Scored", {}, EVENLY, id="scored-all-idle"),
        pytest.param("LeastLoaded", {}, EVENLY, id="least-loaded-all-idle"),
        pytest.param("RoundRobin", {"busy": {A: 9}}, EVENLY, id="turns-look-at-no-load"),
        pytest.param("Random", {"busy": {A: 9}}, EVENLY, id="chance-looks-at-no-load"),
        pytest.param("HardwareAware", {}, EVENLY, id="twins-by-chance"),
        pytest.param("Scored", {"busy": {A: 1, B: 1}}, {"m-2": 1.0}, id="scored-idle-one"),
        pytest.param("LeastLoaded", {"busy": {A: 2, B: 1, C: 3}}, {"m-1": 1.0}, id="fewest"),
        pytest.param(
            "PowerOfTwo",
            {"busy": {A: 1, B: 2, C: 3}},
            pytest.approx({"m-0": 2 / 3, "m-1": 1 / 3}, abs=0.02),
            id="never-the-busiest-of-three",
        ),
        pytest.param("Scored", {"free": {A: 0.1, B: 0.5}}, {"m-2": 1.0}, id="unknown-is-free"),
        pytest.param("Scored", {"free": {A: 0.9, B: 0.91, C: 0.2}},
                     pytest.approx({"m-0": 0.5, "m-1": 0.5}, abs=0.01), id="nearly-as-free"),
        pytest.param("Scored", {"read": ((B, 0.8),)}, {"m-1": 1.0}, id="read-before"),
        pytest.param("Scored", {"read": ((B, 0.9), (A, 0.4))}, {"m-1": 1.0}, id="read-more"),
        pytest.param("LeastLoaded", {"read": ((B, 0.1),)}, {"m-1": 1.0}, id="affinity-first"),
        pytest.param("HardwareAware", {"read": ((B, 0.1),)}, {"m-1": 1.0}, id="affinity-too"),
        pytest.param("RoundRobin", {"read": ((B, 1.0),)}, EVENLY, id="turns-are-turns"),
        pytest.param("Random", {"read": ((B, 1.0),)}, EVENLY, id="chance-is-chance"),
        pytest.param("LeastLoaded", {"read": ((B, 1.0),), "routing": NO_PREFIX}, EVENLY,
                     id="affinity-is-off"),
        pytest.param("LeastLoaded", {"read": ((B, 1.0),), "busy": {B: 2}},
                     pytest.approx({"m-0": 0.5, "m-2": 0.5}, abs=0.01), id="beyond-the-bound"),
        pytest.param("LeastLoaded", {"read": ((B, 0.9), (A, 0.4)), "busy": {B: 4, C: 4}},
                     {"m-0": 1.0}, id="the-next-longest-within-it"),
        pytest.param("LeastLoaded", {"read": ((B, 1.0),), "busy": {A: 3, B: 3, C: 3}},
                     {"m-1": 1.0}, id="as-busy-as-all"),
    ],
)  # fmt: skip
def test_who_is_asked(
    strategy: Strategy, situation: dict, expected: dict[str, float]  # type: ignore[type-arg]  # keyword arguments of `who`
) -> None:  # fmt: skip
    assert who(strategy, A, B, C, **situation) == expected


def test_a_queue_is_short_beside_what_its_engine_does_at_once() -> None:
    assert who("Scored", LARGE, B, busy={LARGE: 7, B: 1}) == {"m-0": 1.0}
    assert who("LeastLoaded", LARGE, B, busy={LARGE: 7, B: 1}) == {"m-1": 1.0}


def test_weights_decide_what_counts() -> None:
    busy, free = {A: 9}, {A: 0.9, B: 0.1}
    assert who("Scored", A, B, routing=ONLY_MEMORY, busy=busy, free=free) == {"m-0": 1.0}
    assert who("Scored", A, B, busy=busy, free=free) == {"m-1": 1.0}


def test_others_requests_count_as_ours() -> None:
    assert who("LeastLoaded", A, B, busy={A: 1}, others={B: 9.0}) == {"m-0": 1.0}


def mac(chip: str, gpu_cores: int, memory_gib: int) -> EndpointHardware:
    return EndpointHardware(chip=chip, gpu_cores=gpu_cores, memory_bytes=memory_gib * GIB)


def published(hardware: EndpointHardware, millions: int = 0) -> EngineEndpoint:
    """Return the endpoint that the gateway makes of an agent's."""
    spec = EndpointSpec(
        node="mac-1",
        replica_uid="u",
        deployment="m",
        url="http://10.0.0.1:4100",
        served_names=("m",),
        parameters=millions,
        hardware=hardware,
    )
    engine_endpoint = endpoint_of(Endpoint(metadata=ObjectMeta(name="m-0"), spec=spec), 1)
    assert engine_endpoint is not None
    return engine_endpoint


M4_PRO, M1 = mac("Apple M4 Pro", 20, 48), mac("Apple M1", 8, 16)
NOT_KNOWN = EndpointHardware()


@pytest.mark.parametrize(
    ("found", "points"),
    [
        (M1, 10 + 4 + 4),
        (mac("Apple M2 Ultra", 76, 192), 45 + 38 + 48),
        (mac("Apple M3 Max", 40, 128), 40 + 20 + 32),
        (M4_PRO, 35 + 10 + 12),
        (mac("Apple M5", 10, 32), 30 + 5 + 8),
        (mac("Apple M7 Max", 40, 64), 60 + 20 + 16),
        (mac("Apple M5 Mega", 40, 64), 30 + 20 + 16),
        (mac("Intel", 0, 16), 4),
        (NOT_KNOWN, 0),
    ],
)
def test_an_endpoint_has_the_points_of_its_mac(found: EndpointHardware, points: float) -> None:
    assert published(found).points == points
    assert points == chips.machine_points(
        chip=found.chip, gpu_cores=found.gpu_cores, memory_bytes=found.memory_bytes
    )


@pytest.mark.parametrize(
    ("millions", "found", "expected"),
    [
        (0, NOT_KNOWN, True),
        (500, NOT_KNOWN, False),
        (500, M1, True),
        (3_000, M1, False),
        (8_030, M4_PRO, True),
        (14_000, M4_PRO, True),
        (29_000, M4_PRO, True),
        (32_000, M4_PRO, False),
        (70_000, mac("Apple M3 Ultra", 60, 256), True),
    ],
)
def test_an_endpoint_is_fit_if_its_mac_meets_the_size_tier(
    millions: int, found: EndpointHardware, expected: bool
) -> None:
    assert published(found, millions).is_fit is expected
    tier = chips.size_tier(millions * 10**6)
    meets = chips.meets_tier(tier, gpu_cores=found.gpu_cores, memory_bytes=found.memory_bytes)
    assert meets is expected


STRONG, WEAK = replace(A, points=150.0), replace(B, points=20.0)
TOO_SMALL = replace(C, points=500.0, is_fit=False)


@pytest.mark.parametrize(
    ("endpoints", "busy", "expected"),
    [
        pytest.param((STRONG, WEAK), {}, "m-0", id="more-points"),
        pytest.param((STRONG, WEAK), {STRONG: 3}, "m-0", id="busier-but-stronger"),
        pytest.param((STRONG, WEAK), {STRONG: 4}, "m-1", id="nearly-full"),
        pytest.param((STRONG, WEAK), {STRONG: 4, WEAK: 4}, "m-0", id="all-nearly-full"),
        pytest.param((STRONG, WEAK, TOO_SMALL), {}, "m-0", id="too-small-for-the-model"),
        pytest.param((TOO_SMALL,), {}, "m-2", id="best-there-is"),
        pytest.param((STRONG, TOO_SMALL), {STRONG: 4}, "m-0", id="small-ones-only-if-nobody-else"),
    ],
)
def test_hardware(
    endpoints: tuple[EngineEndpoint, ...], busy: dict[EngineEndpoint, int], expected: str
) -> None:
    assert who("HardwareAware", *endpoints, busy=busy) == {expected: 1.0}
    more = tuple(target(f"x-{n}", port=50 + n) for n in range(2))
    assert set(who("HardwareAware", *more, replace(C, is_fit=False))) == {"x-0", "x-1"}


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        pytest.param({}, {"m-0"}, id="unknown"),
        pytest.param({"x": 1.0}, {"m-0"}, id="nine-points-behind-unknown-is-no-penalty"),
        pytest.param({"s": 0.2}, {"m-0"}, id="four-points-are-too-few"),
        pytest.param({"s": 0.6}, {"m-1"}, id="twelve-points-decide"),
        pytest.param({"s": 1.0, "x": 1.0}, {"m-0"}, id="both-alike"),
    ],
)
def test_the_measured_load_of_the_gpu_takes_points(
    gpu: dict[str, float], expected: set[str]
) -> None:
    nine_ahead = replace(A, node="s", points=59.0), replace(B, node="x", points=50.0)
    routing_table = table(*nine_ahead, routing=Routing(strategy="HardwareAware"))
    assert set(parts(routing_table, EndpointHealth(gpu_load=gpu), lambda _: None)) == expected


def test_round_robin_skips_unavailable_endpoints() -> None:
    routing_table = table(A, B, C, routing=Routing(strategy="RoundRobin"))
    health = EndpointHealth(ejected=frozenset({B.origin}))

    def skip(query: RoutingQuery) -> None:
        query.failed = frozenset({A})

    assert parts(routing_table, health, skip) == {"m-2": 1.0}


HERE, THERE = replace(A, site="here"), replace(B, site="there")


@pytest.mark.parametrize(
    ("busy", "ejected", "site", "expected"),
    [
        pytest.param({A: 9}, (), "here", {"m-0": 1.0}, id="ours-although-busier"),
        pytest.param({}, (HERE,), "here", {"m-1": 1.0}, id="ours-cannot"),
        pytest.param({A: 9}, (), "", {"m-1": 1.0}, id="a-gateway-of-no-site"),
        pytest.param({B: 9}, (), "elsewhere", {"m-0": 1.0}, id="nobody-there"),
    ],
)
def test_sites(
    busy: dict[EngineEndpoint, int],
    ejected: tuple[EngineEndpoint, ...],
    site: str,
    expected: dict[str, float],
) -> None:
    health = EndpointHealth(
        in_flight={t.origin: n for t, n in busy.items()},
        ejected=frozenset(t.origin for t in ejected),
    )
    routing_table = table(HERE, THERE, routing=Routing(), site=site)
    assert parts(routing_table, health, lambda _: None) == expected


MANY = tuple(target(f"m-{n:04}", port=n + 1) for n in range(1000))


@dataclass
class Gateway:
    """One gateway's choices: its own requests are known at once, others' when reported."""

    table: RoutingTable
    draws: random.Random
    in_flight: Counter[EngineAddress] = field(default_factory=Counter)
    others_in_flight: dict[EngineAddress, float] = field(default_factory=dict)

    def ask(self, cached: tuple[tuple[int, float], ...] = ()) -> EngineEndpoint:
        query = RoutingQuery("m", self.draws.random())
        query.cached = cached
        health = EndpointHealth(in_flight=self.in_flight, others_in_flight=self.others_in_flight)
        choice = choose(self.table, query, health)
        assert isinstance(choice, ChosenEndpoint)
        self.in_flight[choice.endpoint.origin] += 1
        return choice.endpoint


@given(
    count=st.integers(1, 1000),
    draw=st.floats(0, 1),
    well=st.sets(st.integers(0, 999), max_size=30),
    is_mostly_well=st.booleans(),
)
def test_few_are_looked_at_and_none_that_must_not_be(
    count: int, draw: float, well: set[int], is_mostly_well: bool
) -> None:
    endpoints = MANY[:count]
    ill = {t for n, t in enumerate(endpoints) if (n in well) is not is_mostly_well}
    query = RoutingQuery("m", draw, frozenset(list(ill)[::2]))
    skipped = frozenset(t.origin for t in ill)
    engine_endpoints = eligible_endpoints(endpoints, Scope(query, EndpointHealth(), skipped))
    assert len(engine_endpoints) <= SCAN_LIMIT
    assert not ill & set(engine_endpoints)
    # However few they are, they are found.
    assert bool(engine_endpoints) == (len(ill) < count)


@pytest.mark.parametrize("strategy", ["Scored", "LeastLoaded", "PowerOfTwo", "HardwareAware"])
def test_the_busiest_has_little_more_than_the_average(strategy: Strategy) -> None:
    gateway = Gateway(table(*MANY, routing=Routing(strategy=strategy)), random.Random(5))
    for _ in range(4 * len(MANY)):
        gateway.ask()
    # One drawn of a thousand would be at 12 or more.
    assert max(gateway.in_flight.values()) <= 4 + (4 if strategy == "PowerOfTwo" else 2)
    assert len(gateway.in_flight) == len(MANY)


def test_random_and_round_robin_reach_every_endpoint() -> None:
    for strategy in ("Random", "RoundRobin"):
        routing_table, draws = (
            table(*MANY[:100], routing=Routing(strategy=strategy)),
            random.Random(5),
        )
        count: Counter[str] = Counter()
        for turn in range(10_000):
            query = RoutingQuery("m", draws.random())
            query.turn = turn
            choice = choose(routing_table, query, EndpointHealth())
            assert isinstance(choice, ChosenEndpoint)
            count[choice.endpoint.replica] += 1
        assert len(count) == 100
        assert max(count.values()) < (101 if strategy == "RoundRobin" else 150)


@pytest.mark.parametrize(
    ("count", "most"), [(3, 0.4), (5, 0.6), (16, 0.5), (17, 0.2), (1000, 0.01)]
)
def test_gateways_that_know_the_same_of_others_do_not_run_all_to_the_same_engine(
    count: int, most: float
) -> None:
    """Three gateways get the same report of one idle engine, which would draw all of them."""
    endpoints, herds = MANY[:count], 0
    routing_table = table(*endpoints, routing=Routing())
    for seed in range(300):
        idle = endpoints[seed % count]
        told = {t.origin: 2.0 for t in endpoints if t is not idle}
        gateways = [
            Gateway(routing_table, random.Random(seed * 3 + n), others_in_flight=told)
            for n in range(3)
        ]
        herds += all(gateway.ask() is idle for gateway in gateways)
    assert herds / 300 < most


@pytest.mark.parametrize("count", [3, 10, 16])
def test_stale_news_leave_engines_even(count: int) -> None:
    """Three gateways get reports every few requests; each request lasts a random time."""
    endpoints, clock = MANY[:count], random.Random(1)
    routing_table = table(*endpoints, routing=Routing(strategy="LeastLoaded"))
    gateways = [Gateway(routing_table, random.Random(n)) for n in range(3)]
    running: list[tuple[float, Gateway, EngineAddress]] = []
    worst = []
    for now in range(3000):
        if now % 30 == 0:
            had = sum((gateway.in_flight for gateway in gateways), Counter[EngineAddress]())
            for one in gateways:
                one.others_in_flight = {
                    t.origin: had[t.origin] - one.in_flight[t.origin] for t in endpoints
                }
        while running and running[0][0] <= now:
            _, one, origin = heapq.heappop(running)
            one.in_flight[origin] -= 1
        one = clock.choice(gateways)
        asked = one.ask()
        heapq.heappush(running, (now + clock.expovariate(1 / (6 * count)), one, asked.origin))
        worst.append(sum(gateway.in_flight[asked.origin] for gateway in gateways) - 1)
    # Six at each on average; a random choice meets six others, a herd more.
    assert sum(worst) / len(worst) < 5.8


@settings(max_examples=samples(30))
@given(
    count=st.integers(2, SCAN_LIMIT),
    hot=st.integers(0, 1),
    requests=st.integers(1, 100),
    bound=st.integers(100, 300),
    strategy=st.sampled_from(["Scored", "LeastLoaded"]),
)
def test_affinity_never_exceeds_the_bound(
    count: int, hot: int, requests: int, bound: int, strategy: Strategy
) -> None:
    """All prompts begin alike, one engine has that beginning cached, and no request ends."""
    routing = Routing(strategy=strategy)
    routing = routing.model_copy(
        update={"prefix_affinity": routing.prefix_affinity.model_copy(update={"bound": bound})}
    )
    gateway = Gateway(table(*MANY[:count], routing=routing), random.Random(hot))
    warm = MANY[hot]
    for _ in range(requests):
        loads = [gateway.in_flight[t.origin] for t in MANY[:count]]
        before = gateway.in_flight[warm.origin]
        # By load alone, none busier than another would be chosen.
        if gateway.ask(((warm.mark, 1.0),)) is warm and before > min(loads):
            assert before + 1 <= allowed(loads, bound)


def test_a_large_pool_keeps_the_bound_by_the_sampled_average() -> None:
    gateway = Gateway(table(*MANY, routing=Routing(strategy="LeastLoaded")), random.Random(1))
    warm = MANY[500]
    for _ in range(5 * len(MANY)):
        gateway.ask(((warm.mark, 1.0),))
    # 125 % of 5, and the error of the sample.
    assert 5 <= gateway.in_flight[warm.origin] <= 9
    assert SAMPLE_SIZE < SCAN_LIMIT
