"""The strategies one by one: situations, the points of Macs, what a score is made of."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import pytest

from gateway.routing import hardware
from gateway.routing.query import EndpointHealth, RoutingQuery
from gateway.routing.selection import ChosenEndpoint, choose
from gateway.routing.table import BackendBuilder, EngineEndpoint, RoutingTable, ServedModel
from schemas.chips import GIB
from schemas.replica import EndpointHardware
from schemas.routing import PrefixAffinity, Routing, ScoreWeights, Strategy
from tests.gateway.world import target

A, B, C = (target(f"m-{n}", port=n + 1) for n in range(3))
DRAWS = [n / 1009 for n in range(1009)]


def table(*targets: EngineEndpoint, routing: Routing, site: str = "") -> RoutingTable:
    share = BackendBuilder(site=site).share(("m",), leased=targets, routing=routing)
    model = ServedModel(name="m", created=0, shares=(share,), reason="")
    return RoutingTable(models=MappingProxyType({"m": model}))


def parts(
    found: RoutingTable, standing: EndpointHealth, fill: Callable[[RoutingQuery], None]
) -> dict[str, float]:
    """Return which part of many requests each engine gets; nothing changes between them."""
    count: Counter[str] = Counter()
    for turn, draw in enumerate(DRAWS):
        wish = RoutingQuery("m", draw)
        wish.turn = turn
        fill(wish)
        choice = choose(found, wish, standing)
        assert isinstance(choice, ChosenEndpoint)
        count[choice.target.replica] += 1
    return {name: n / len(DRAWS) for name, n in count.items()}


def who(
    strategy: Strategy,
    *targets: EngineEndpoint,
    busy: dict[EngineEndpoint, int] | None = None,
    others: dict[EngineEndpoint, float] | None = None,
    free: dict[EngineEndpoint, float] | None = None,
    read: tuple[tuple[EngineEndpoint, float], ...] = (),
    routing: Routing | None = None,
) -> dict[str, float]:
    standing = EndpointHealth(
        in_flight={t.origin: n for t, n in (busy or {}).items()},
        elsewhere={t.origin: n for t, n in (others or {}).items()},
        headroom={t.origin: n for t, n in (free or {}).items()},
    )

    def fill(wish: RoutingQuery) -> None:
        wish.cached = [(t.mark, part) for t, part in read]

    routing = (routing or Routing()).model_copy(update={"strategy": strategy})
    return parts(table(*targets, routing=routing), standing, fill)


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
def test_points(found: EndpointHardware, points: float) -> None:
    assert hardware.points(found) == points


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
def test_minimums(millions: int, found: EndpointHardware, expected: bool) -> None:
    assert hardware.is_fit(millions, found) is expected


STRONG, WEAK = replace(A, points=150.0), replace(B, points=20.0)
TOO_SMALL = replace(C, points=500.0, is_fit=False)


@pytest.mark.parametrize(
    ("targets", "busy", "expected"),
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
    targets: tuple[EngineEndpoint, ...], busy: dict[EngineEndpoint, int], expected: str
) -> None:
    assert who("HardwareAware", *targets, busy=busy) == {expected: 1.0}
    more = tuple(target(f"x-{n}", port=50 + n) for n in range(2))
    assert set(who("HardwareAware", *more, replace(C, is_fit=False))) == {"x-0", "x-1"}


def test_a_turn_passes_by_who_cannot_be_asked() -> None:
    found = table(A, B, C, routing=Routing(strategy="RoundRobin"))
    standing = EndpointHealth(penalised=frozenset({B.origin}))

    def skip(wish: RoutingQuery) -> None:
        wish.failed = frozenset({A})

    assert parts(found, standing, skip) == {"m-2": 1.0}


HERE, THERE = replace(A, site="here"), replace(B, site="there")


@pytest.mark.parametrize(
    ("busy", "penalised", "site", "expected"),
    [
        pytest.param({A: 9}, (), "here", {"m-0": 1.0}, id="ours-although-busier"),
        pytest.param({}, (HERE,), "here", {"m-1": 1.0}, id="ours-cannot"),
        pytest.param({A: 9}, (), "", {"m-1": 1.0}, id="a-gateway-of-no-site"),
        pytest.param({B: 9}, (), "elsewhere", {"m-0": 1.0}, id="nobody-there"),
    ],
)
def test_sites(
    busy: dict[EngineEndpoint, int],
    penalised: tuple[EngineEndpoint, ...],
    site: str,
    expected: dict[str, float],
) -> None:
    standing = EndpointHealth(
        in_flight={t.origin: n for t, n in busy.items()},
        penalised=frozenset(t.origin for t in penalised),
    )
    found = table(HERE, THERE, routing=Routing(), site=site)
    assert parts(found, standing, lambda _: None) == expected
