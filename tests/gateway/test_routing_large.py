"""A thousand engines: a request looks at a few of them, and nobody is forgotten, overrun, or asked who must not be."""

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.load_balancer import DRAWN, SMALL, Scope, allowed, candidates
from gateway.routing.query import EndpointHealth, RoutingQuery
from gateway.routing.selection import ChosenEndpoint, choose
from gateway.routing.table import BackendBuilder, EngineEndpoint, Origin, RoutingTable, ServedModel
from schemas.routing import Routing, Strategy
from tests.gateway.world import target

MANY = tuple(target(f"m-{n:04}", port=n + 1) for n in range(1000))


def table(*targets: EngineEndpoint, strategy: Strategy = "Scored") -> RoutingTable:
    share = BackendBuilder().share(("m",), leased=targets, routing=Routing(strategy=strategy))
    model = ServedModel(name="m", created=0, shares=(share,), reason="")
    return RoutingTable(models=MappingProxyType({"m": model}))


@dataclass
class Gateway:
    """One gateway's choices: it sees its own requests at once, and others' when it is told."""

    table: RoutingTable
    draws: random.Random
    in_flight: Counter[Origin] = field(default_factory=Counter)
    elsewhere: dict[Origin, float] = field(default_factory=dict)

    def ask(self, cached: tuple[tuple[int, float], ...] = ()) -> EngineEndpoint:
        wish = RoutingQuery("m", self.draws.random())
        wish.cached = cached
        standing = EndpointHealth(in_flight=self.in_flight, elsewhere=self.elsewhere)
        choice = choose(self.table, wish, standing)
        assert isinstance(choice, ChosenEndpoint)
        self.in_flight[choice.target.origin] += 1
        return choice.target


@given(
    count=st.integers(1, 1000),
    draw=st.floats(0, 1),
    well=st.sets(st.integers(0, 999), max_size=30),
    is_mostly_well=st.booleans(),
)
def test_few_are_looked_at_and_none_that_must_not_be(
    count: int, draw: float, well: set[int], is_mostly_well: bool
) -> None:
    targets = MANY[:count]
    ill = {t for n, t in enumerate(targets) if (n in well) is not is_mostly_well}
    wish = RoutingQuery("m", draw, frozenset(list(ill)[::2]))
    skipped = frozenset(t.origin for t in ill)
    found = candidates(targets, Scope(wish, EndpointHealth(), skipped))
    assert len(found) <= SMALL
    assert not ill & set(found)
    # However few they are, they are found.
    assert bool(found) == (len(ill) < count)


@pytest.mark.parametrize("strategy", ["Scored", "LeastLoaded", "PowerOfTwo", "HardwareAware"])
def test_the_busiest_has_little_more_than_the_average(strategy: Strategy) -> None:
    gateway = Gateway(table(*MANY, strategy=strategy), random.Random(5))
    for _ in range(4 * len(MANY)):
        gateway.ask()
    # One drawn of a thousand would be at 12 or more.
    assert max(gateway.in_flight.values()) <= 4 + (4 if strategy == "PowerOfTwo" else 2)
    assert len(gateway.in_flight) == len(MANY)


def test_chance_and_turns_leave_nobody_out() -> None:
    for strategy in ("Random", "RoundRobin"):
        found, draws = table(*MANY[:100], strategy=strategy), random.Random(5)
        count: Counter[str] = Counter()
        for turn in range(10_000):
            wish = RoutingQuery("m", draws.random())
            wish.turn = turn
            choice = choose(found, wish, EndpointHealth())
            assert isinstance(choice, ChosenEndpoint)
            count[choice.target.replica] += 1
        assert len(count) == 100
        assert max(count.values()) < (101 if strategy == "RoundRobin" else 150)


@pytest.mark.parametrize(
    ("count", "most"), [(3, 0.4), (5, 0.6), (16, 0.5), (17, 0.2), (1000, 0.01)]
)
def test_gateways_that_know_the_same_of_others_do_not_run_all_to_the_same_engine(
    count: int, most: float
) -> None:
    """Three gateways are told the same of all engines: one was idle a moment ago. That would be a herd of all three."""
    targets, herds = MANY[:count], 0
    found = table(*targets)
    for seed in range(300):
        idle = targets[seed % count]
        told = {t.origin: 2.0 for t in targets if t is not idle}
        gateways = [Gateway(found, random.Random(seed * 3 + n), elsewhere=told) for n in range(3)]
        herds += all(gateway.ask() is idle for gateway in gateways)
    assert herds / 300 < most


@pytest.mark.parametrize("count", [3, 10, 16])
def test_stale_news_leave_engines_even(count: int) -> None:
    """Three gateways hear of others every so many requests only; each request lasts as long as chance will have it."""
    targets, clock = MANY[:count], random.Random(1)
    found = table(*targets, strategy="LeastLoaded")
    gateways = [Gateway(found, random.Random(n)) for n in range(3)]
    running: list[tuple[float, Gateway, Origin]] = []
    worst = []
    for now in range(3000):
        if now % 30 == 0:
            had = sum((gateway.in_flight for gateway in gateways), Counter[Origin]())
            for one in gateways:
                one.elsewhere = {t.origin: had[t.origin] - one.in_flight[t.origin] for t in targets}
        while running and running[0][0] <= now:
            _, one, origin = heapq.heappop(running)
            one.in_flight[origin] -= 1
        one = clock.choice(gateways)
        asked = one.ask()
        heapq.heappush(running, (now + clock.expovariate(1 / (6 * count)), one, asked.origin))
        worst.append(sum(gateway.in_flight[asked.origin] for gateway in gateways) - 1)
    # Six at each on average; drawn blindly, a request meets six others, and more than that in a herd.
    assert sum(worst) / len(worst) < 5.8


@settings(max_examples=30)
@given(
    count=st.integers(2, SMALL),
    hot=st.integers(0, 1),
    requests=st.integers(1, 100),
    bound=st.integers(100, 300),
    strategy=st.sampled_from(["Scored", "LeastLoaded"]),
)
def test_nobody_gets_more_for_its_cache_than_the_bound(
    count: int, hot: int, requests: int, bound: int, strategy: Strategy
) -> None:
    """All prompts begin alike, one engine read that beginning, and no request ever ends."""
    routing = Routing(strategy=strategy)
    routing = routing.model_copy(
        update={"prefix_affinity": routing.prefix_affinity.model_copy(update={"bound": bound})}
    )
    share = BackendBuilder().share(("m",), leased=MANY[:count], routing=routing)
    model = ServedModel(name="m", created=0, shares=(share,), reason="")
    gateway = Gateway(RoutingTable(models=MappingProxyType({"m": model})), random.Random(hot))
    warm = MANY[hot]
    for _ in range(requests):
        loads = [gateway.in_flight[t.origin] for t in MANY[:count]]
        before = gateway.in_flight[warm.origin]
        # By its load alone nobody busier than another would be asked.
        if gateway.ask(((warm.mark, 1.0),)) is warm and before > min(loads):
            assert before + 1 <= allowed(loads, bound)


def test_one_large_pool_keeps_the_bound_by_the_average_of_who_was_drawn() -> None:
    gateway = Gateway(table(*MANY, strategy="LeastLoaded"), random.Random(1))
    warm = MANY[500]
    for _ in range(5 * len(MANY)):
        gateway.ask(((warm.mark, 1.0),))
    # 125 % of 5, and what the few who were drawn are off.
    assert 5 <= gateway.in_flight[warm.origin] <= 9
    assert DRAWN < SMALL
