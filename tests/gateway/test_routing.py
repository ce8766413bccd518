"""Choosing an engine: situations one by one, and what holds in all of them."""

from collections import Counter
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.query import EndpointHealth, RoutingQuery
from gateway.routing.selection import ChosenEndpoint, NoReadyEndpoint, UnknownModel, choose
from gateway.routing.table import (
    BackendBuilder,
    CanarySplit,
    EngineEndpoint,
    Origin,
    RoutingTable,
    ServedModel,
    WeightedBackend,
)
from schemas.routing import PrefixAffinity, Routing, Sessions, Strategy
from tests.gateway.world import target

A, B, C = (target(f"m-{n}", port=n + 1) for n in range(3))


def table(*shares: WeightedBackend) -> RoutingTable:
    model = ServedModel(name="m", created=0, shares=shares, reason="because.")
    return RoutingTable(models=MappingProxyType({"m": model}))


def leased(
    *targets: EngineEndpoint, weight: int = 1, orphans: tuple[EngineEndpoint, ...] = ()
) -> WeightedBackend:
    return BackendBuilder().share(("m",), leased=targets, orphans=orphans, weight=weight)


def chosen(
    shares: tuple[WeightedBackend, ...],
    *,
    busy: dict[EngineEndpoint, int] | None = None,
    penalised: tuple[EngineEndpoint, ...] = (),
    failed: tuple[EngineEndpoint, ...] = (),
    draw: float = 0.0,
) -> str | None:
    standing = EndpointHealth(
        in_flight={t.origin: n for t, n in (busy or {}).items()},
        penalised=frozenset(t.origin for t in penalised),
    )
    choice = choose(table(*shares), RoutingQuery("m", draw, frozenset(failed)), standing)
    return choice.target.replica if isinstance(choice, ChosenEndpoint) else None


@pytest.mark.parametrize(
    ("shares", "situation", "expected"),
    [
        pytest.param((leased(B, A),), {}, "m-0", id="ties-go-by-name"),
        pytest.param((leased(A, B),), {"busy": {A: 2, B: 1}}, "m-1", id="least-in-flight"),
        pytest.param((leased(A, B),), {"failed": (A,)}, "m-1", id="never-who-failed"),
        pytest.param((leased(A),), {"failed": (A,)}, None, id="nobody-is-left"),
        pytest.param((leased(A, B),), {"penalised": (A,)}, "m-1", id="rather-not-penalised"),
        pytest.param((leased(A),), {"penalised": (A,)}, "m-0", id="penalised-but-alone"),
        pytest.param(
            (leased(A, B, C),), {"penalised": (A, C), "failed": (B,)}, "m-0", id="both-at-once"
        ),
        pytest.param((leased(A, orphans=(B,)),), {}, "m-0", id="leased-before-orphan"),
        pytest.param(
            (leased(A, orphans=(B,)),), {"penalised": (A,)}, "m-0", id="penalised-before-orphan"
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
def test_who_is_chosen(
    shares: tuple[WeightedBackend, ...],
    situation: dict[str, Any],  # keyword arguments of `chosen`
    expected: str | None,
) -> None:
    assert chosen(shares, **situation) == expected


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
        BackendBuilder({"m": CanarySplit(template="", weight=30)}, "here").share,
        st.just(("m",)),
        weight=st.integers(0, 3),
        leased=some,
        orphans=some,
        routing=routings,
    ),
    min_size=1,
    max_size=3,
)
origins = st.builds(Origin, st.just("127.0.0.1"), st.integers(1, 6))
standings = st.builds(
    EndpointHealth,
    in_flight=st.dictionaries(origins, st.integers(1, 9)),
    elsewhere=st.dictionaries(origins, st.floats(0, 9)),
    headroom=st.dictionaries(origins, st.floats(0, 1)),
    penalised=st.frozensets(origins),
)
marks = engines.map(lambda t: t.mark)


@st.composite
def wishes(draw: st.DrawFn) -> RoutingQuery:
    """Return any request that may come, with whatever is remembered of it."""
    wish = RoutingQuery("m", draw(st.floats(0, 1)), draw(st.frozensets(engines)))
    wish.session = draw(st.sampled_from(["", "a session", "\ud800"]))
    wish.stays = draw(st.just(0) | marks)
    wish.cached = draw(st.lists(st.tuples(marks, st.floats(0, 1)), max_size=3))
    wish.turn = draw(st.integers(0, 9))
    return wish


@settings(max_examples=60)
@given(shares=all_shares, standing=standings, wish=wishes())
def test_what_always_holds(
    shares: list[WeightedBackend], standing: EndpointHealth, wish: RoutingQuery
) -> None:
    choice = choose(table(*shares), wish, standing)
    assert choice == choose(table(*shares), wish, standing), "nothing but what is given decides"
    heavy = [share for share in shares if share.weight > 0]
    left = [t for share in heavy for t in share.leased if t not in wish.failed]
    orphans = [t for share in heavy for t in share.orphans if t not in wish.failed]
    if not isinstance(choice, ChosenEndpoint):
        assert not left
        assert not orphans
        return
    if left:
        assert choice.target in left
    else:
        assert choice.target in orphans
    if any(t.origin not in standing.penalised for t in left):
        assert choice.target.origin not in standing.penalised


@settings(max_examples=60)
@given(engines=some, routing=routings, standing=standings, wish=wishes())
def test_our_own_site_comes_first(
    engines: tuple[EngineEndpoint, ...],
    routing: Routing,
    standing: EndpointHealth,
    wish: RoutingQuery,
) -> None:
    share = BackendBuilder(site="here").share(("m",), leased=engines, routing=routing)
    wish.stays = 0
    choice = choose(table(share), wish, standing)
    near = [t for t in engines if t.site == "here" and t not in wish.failed]
    if routing.site_affinity and any(t.origin not in standing.penalised for t in near):
        assert isinstance(choice, ChosenEndpoint)
        assert choice.target.site == "here"


@settings(max_examples=60)
@given(engines=some, routing=routings, standing=standings, wish=wishes(), other=st.floats(0, 1))
def test_a_named_session_stays_as_long_as_its_engine_is_well(
    engines: tuple[EngineEndpoint, ...],
    routing: Routing,
    standing: EndpointHealth,
    wish: RoutingQuery,
    other: float,
) -> None:
    share = BackendBuilder().share(("m",), leased=engines, routing=routing)
    wish.session = "a session"
    first = choose(table(share), wish, standing)
    if not isinstance(first, ChosenEndpoint) or not routing.sessions.enabled:
        return
    wish.stays, wish.draw, wish.cached = first.target.mark, other, ()
    busier = replace(standing, in_flight={**standing.in_flight, first.target.origin: 99})
    again = choose(table(share), wish, busier)
    is_well = first.target.origin not in standing.penalised
    assert not is_well or again == first
    wish.failed = frozenset({*wish.failed, first.target})
    assert choose(table(share), wish, busier) != first


@settings(max_examples=60)
@given(
    engines=some,
    standing=standings,
    wish=wishes(),
    mix=st.randoms(use_true_random=False),
)
def test_order_of_input_changes_nothing(
    engines: tuple[EngineEndpoint, ...], standing: EndpointHealth, wish: RoutingQuery, mix: object
) -> None:
    mixed = list(engines)
    mix.shuffle(mixed)  # type: ignore[attr-defined]  # hypothesis' Random
    one = choose(table(leased(*engines)), wish, standing)
    assert one == choose(table(leased(*mixed)), wish, standing)


@settings(max_examples=60)
@given(shares=all_shares, standing=standings, draw=st.floats(0, 1), order=st.permutations(range(3)))
def test_trying_again_and_again_tries_everybody_once(
    shares: list[WeightedBackend], standing: EndpointHealth, draw: float, order: list[int]
) -> None:
    failed: set[EngineEndpoint] = set()
    while isinstance(
        choice := choose(table(*shares), RoutingQuery("m", draw, failed), standing), ChosenEndpoint
    ):
        assert choice.target not in failed
        failed.add(choice.target)
    assert failed == {
        t for share in shares if share.weight for t in (*share.leased, *share.orphans)
    }


def test_equals_take_turns() -> None:
    """At low load no engine may be asked always, and none never."""
    asked = Counter(chosen((leased(A, B, C),), draw=n / 1000) for n in range(1000))
    assert set(asked) == {"m-0", "m-1", "m-2"}
    assert min(asked.values()) > 250
