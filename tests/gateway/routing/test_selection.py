"""Endpoint selection: situations, and properties of all of them."""

from collections import Counter
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.selection import ChosenEndpoint, NoReadyEndpoint, UnknownModel, choose
from gateway.routing.table import (
    BackendBuilder,
    CanarySplit,
    EndpointHealth,
    EngineEndpoint,
    RoutingQuery,
    RoutingTable,
    ServedModel,
    WeightedBackend,
)
from schemas.routing import PrefixAffinity, Routing, Sessions, Strategy
from tests.support.gateway_strategies import endpoint_health
from tests.support.gateway_world import target
from tests.support.sampling import samples

A, B, C = (target(f"m-{n}", port=n + 1) for n in range(3))


def table(*backends: WeightedBackend) -> RoutingTable:
    model = ServedModel(name="m", created=0, backends=backends, reason="because.")
    return RoutingTable(models=MappingProxyType({"m": model}))


def leased(
    *endpoints: EngineEndpoint, weight: int = 1, orphans: tuple[EngineEndpoint, ...] = ()
) -> WeightedBackend:
    return BackendBuilder().backend(("m",), leased=endpoints, orphans=orphans, weight=weight)


def chosen(
    backends: tuple[WeightedBackend, ...],
    *,
    busy: dict[EngineEndpoint, int] | None = None,
    ejected: tuple[EngineEndpoint, ...] = (),
    failed: tuple[EngineEndpoint, ...] = (),
    draw: float = 0.0,
) -> str | None:
    health = EndpointHealth(
        in_flight={t.origin: n for t, n in (busy or {}).items()},
        ejected=frozenset(t.origin for t in ejected),
    )
    choice = choose(table(*backends), RoutingQuery("m", draw, frozenset(failed)), health)
    return choice.endpoint.replica if isinstance(choice, ChosenEndpoint) else None


@pytest.mark.parametrize(
    ("backends", "situation", "expected"),
    [
        pytest.param((leased(B, A),), {}, "m-0", id="ties-go-by-name"),
        pytest.param((leased(A, B),), {"busy": {A: 2, B: 1}}, "m-1", id="least-in-flight"),
        pytest.param((leased(A, B),), {"failed": (A,)}, "m-1", id="never-who-failed"),
        pytest.param((leased(A),), {"failed": (A,)}, None, id="nobody-is-left"),
        pytest.param((leased(A, B),), {"ejected": (A,)}, "m-1", id="rather-not-penalised"),
        pytest.param((leased(A),), {"ejected": (A,)}, "m-0", id="penalised-but-alone"),
        pytest.param(
            (leased(A, B, C),), {"ejected": (A, C), "failed": (B,)}, "m-0", id="both-at-once"
        ),
        pytest.param((leased(A, orphans=(B,)),), {}, "m-0", id="leased-before-orphan"),
        pytest.param(
            (leased(A, orphans=(B,)),), {"ejected": (A,)}, "m-0", id="penalised-before-orphan"
        ),
        pytest.param((leased(orphans=(B,)),), {}, "m-1", id="orphan-as-last-resort"),
        pytest.param(
            (leased(A, orphans=(B,)),), {"failed": (A,)}, "m-1", id="orphan-when-leased-failed"
        ),
        pytest.param((leased(orphans=(B,)),), {"failed": (B,)}, None, id="failed-orphan"),
        pytest.param((leased(A, weight=9), leased(B)), {"draw": 0.89}, "m-0", id="weight-below"),
        pytest.param((leased(A, weight=9), leased(B)), {"draw": 0.91}, "m-1", id="weight-above"),
        pytest.param((leased(A), leased(B)), {"draw": 1.0}, "m-1", id="draw-of-one"),
        pytest.param((leased(A), leased()), {"draw": 0.9}, "m-0", id="empty-backend-is-passed-by"),
        pytest.param(
            (leased(A), leased(B)), {"draw": 0.9, "failed": (B,)}, "m-0", id="other-backend"
        ),
        pytest.param((leased(A, weight=0), leased(B)), {}, "m-1", id="weight-zero-gets-nothing"),
        pytest.param((leased(A, weight=0),), {}, None, id="only-weight-zero"),
        pytest.param((leased(),), {}, None, id="nobody"),
    ],
)
def test_chosen_endpoint(
    backends: tuple[WeightedBackend, ...],
    situation: dict[str, Any],  # keyword arguments of `chosen`
    expected: str | None,
) -> None:
    assert chosen(backends, **situation) == expected


def test_a_refusal_says_why() -> None:
    assert choose(table(leased()), RoutingQuery("m", 0), EndpointHealth()) == NoReadyEndpoint(
        reason="because."
    )


@pytest.mark.parametrize(
    ("name", "nearest"), [("n", None), ("mm", "m"), ("x" * 100_000, None), ("", None)]
)
def test_an_unknown_name_gets_the_nearest_known_one(name: str, nearest: str | None) -> None:
    expected = UnknownModel(known=("m",), nearest=nearest)
    assert choose(table(leased(A)), RoutingQuery(name, 0), EndpointHealth()) == expected


def test_a_republished_endpoint_may_be_tried_again() -> None:
    again = target("m-0", port=1, version=2)
    assert chosen((leased(again),), failed=(A,)) == "m-0"


engines = st.builds(
    lambda number, port, version, site, concurrency: replace(
        target(f"m-{number}", port=port, version=version),
        site=site,
        concurrency=concurrency,
        points=10.0 * number,
        is_fit=number > 2,
    ),
    st.integers(0, 5),
    st.integers(1, 6),
    st.integers(1, 2),
    st.sampled_from(["", "here", "there"]),
    st.integers(1, 8),
)
some = st.lists(engines, max_size=5, unique_by=lambda t: t.replica).map(tuple)
routings = st.builds(
    Routing,
    strategy=st.sampled_from(get_args(Strategy)),
    site_affinity=st.booleans(),
    prefix_affinity=st.builds(PrefixAffinity, enabled=st.booleans(), bound=st.integers(100, 200)),
    sessions=st.builds(Sessions, enabled=st.booleans()),
)
all_shares = st.lists(
    st.builds(
        BackendBuilder({"m": CanarySplit(template="", weight=30)}, "here").backend,
        st.just(("m",)),
        weight=st.integers(0, 3),
        leased=some,
        orphans=some,
        routing=routings,
    ),
    min_size=1,
    max_size=3,
)
marks = engines.map(lambda t: t.mark)


@st.composite
def queries(draw: st.DrawFn) -> RoutingQuery:
    """Return any request, with any remembered affinity."""
    query = RoutingQuery("m", draw(st.floats(0, 1)), draw(st.frozensets(engines)))
    query.session = draw(st.sampled_from(["", "a session", "\ud800"]))
    query.sticky_mark = draw(st.just(0) | marks)
    query.cached = draw(st.lists(st.tuples(marks, st.floats(0, 1)), max_size=3))
    query.turn = draw(st.integers(0, 9))
    return query


@settings(max_examples=samples(60))
@given(backends=all_shares, health=endpoint_health, query=queries())
def test_what_always_holds(
    backends: list[WeightedBackend], health: EndpointHealth, query: RoutingQuery
) -> None:
    choice = choose(table(*backends), query, health)
    assert choice == choose(table(*backends), query, health), "nothing but what is given decides"
    heavy = [backend for backend in backends if backend.weight > 0]
    endpoints = [t for backend in heavy for t in backend.leased if t not in query.failed]
    orphans = [t for backend in heavy for t in backend.orphans if t not in query.failed]
    if not isinstance(choice, ChosenEndpoint):
        assert not endpoints
        assert not orphans
        return
    if endpoints:
        assert choice.endpoint in endpoints
    else:
        assert choice.endpoint in orphans
    if any(t.origin not in health.ejected for t in endpoints):
        assert choice.endpoint.origin not in health.ejected


@settings(max_examples=samples(60))
@given(engines=some, routing=routings, health=endpoint_health, query=queries())
def test_our_own_site_comes_first(
    engines: tuple[EngineEndpoint, ...],
    routing: Routing,
    health: EndpointHealth,
    query: RoutingQuery,
) -> None:
    backend = BackendBuilder(site="here").backend(("m",), leased=engines, routing=routing)
    query.sticky_mark = 0
    choice = choose(table(backend), query, health)
    near = [t for t in engines if t.site == "here" and t not in query.failed]
    if routing.site_affinity and any(t.origin not in health.ejected for t in near):
        assert isinstance(choice, ChosenEndpoint)
        assert choice.endpoint.site == "here"


@settings(max_examples=samples(60))
@given(
    engines=some, routing=routings, health=endpoint_health, query=queries(), other=st.floats(0, 1)
)
def test_a_named_session_stays_as_long_as_its_engine_is_well(
    engines: tuple[EngineEndpoint, ...],
    routing: Routing,
    health: EndpointHealth,
    query: RoutingQuery,
    other: float,
) -> None:
    backend = BackendBuilder().backend(("m",), leased=engines, routing=routing)
    query.session = "a session"
    first = choose(table(backend), query, health)
    if not isinstance(first, ChosenEndpoint) or not routing.sessions.enabled:
        return
    query.sticky_mark, query.draw, query.cached = first.endpoint.mark, other, ()
    busier = replace(health, in_flight={**health.in_flight, first.endpoint.origin: 99})
    again = choose(table(backend), query, busier)
    is_well = first.endpoint.origin not in health.ejected
    assert not is_well or again == first
    query.failed = frozenset({*query.failed, first.endpoint})
    assert choose(table(backend), query, busier) != first


@settings(max_examples=samples(60))
@given(engines=some, health=endpoint_health, query=queries(), mix=st.randoms(use_true_random=False))
def test_order_of_input_changes_nothing(
    engines: tuple[EngineEndpoint, ...], health: EndpointHealth, query: RoutingQuery, mix: object
) -> None:
    mixed = list(engines)
    mix.shuffle(mixed)  # type: ignore[attr-defined]  # hypothesis' Random
    one = choose(table(leased(*engines)), query, health)
    assert one == choose(table(leased(*mixed)), query, health)


@settings(max_examples=samples(60))
@given(
    backends=all_shares,
    health=endpoint_health,
    draw=st.floats(0, 1),
    order=st.permutations(range(3)),
)
def test_retries_try_each_endpoint_once(
    backends: list[WeightedBackend], health: EndpointHealth, draw: float, order: list[int]
) -> None:
    failed: set[EngineEndpoint] = set()
    while isinstance(
        choice := choose(table(*backends), RoutingQuery("m", draw, failed), health), ChosenEndpoint
    ):
        assert choice.endpoint not in failed
        failed.add(choice.endpoint)
    assert failed == {
        t for backend in backends if backend.weight for t in (*backend.leased, *backend.orphans)
    }


def test_equals_take_turns() -> None:
    """At low load every engine must get requests."""
    asked = Counter(chosen((leased(A, B, C),), draw=n / 1000) for n in range(1000))
    assert set(asked) == {"m-0", "m-1", "m-2"}
    assert min(asked.values()) > 250
