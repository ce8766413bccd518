"""Canary splits: the new version gets its part, alone or beside a route's weights."""

import random
from collections import Counter
from itertools import pairwise
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.selection import ChosenEndpoint, choose
from gateway.routing.table import (
    BackendBuilder,
    CanarySplit,
    EndpointHealth,
    EngineEndpoint,
    RoutingQuery,
    RoutingTable,
    ServedModel,
)
from gateway.state.build_table import TableInputs, build_table
from schemas.deployment import CanaryStatus, ModelDeploymentStatus
from tests.support.clock import FakeClock
from tests.support.gateway_strategies import endpoint_health
from tests.support.gateway_world import deployment, route, target
from tests.support.sampling import samples

OLD = tuple(target(f"a-{n}", "a", port=n + 1, template="old") for n in range(3))
NEW = (target("a-3", "a", port=4, template="new"),)
OTHER = (target("b-0", "b", port=9, template="b"),)
RANDOM = random.Random(7)
DRAWS = [RANDOM.random() for _ in range(1500)]


def status(weight: int, outcome: str = "Running", template: str = "new") -> ModelDeploymentStatus:
    since = FakeClock().now()
    canary = CanaryStatus(template=template, weight=weight, since=since).model_copy(
        update={"outcome": outcome}
    )
    return ModelDeploymentStatus(canary=canary)


def table(
    *endpoints: EngineEndpoint, weight: int = 20, outcome: str = "Running", **weights: int
) -> RoutingTable:
    table_inputs = TableInputs(
        deployments={name: deployment(name, "both") for name in ("a", "b")},
        statuses={"a": status(weight, outcome)},
        routes={"r": route("r", "public", **weights)} if weights else {},
        leased={t.replica: t for t in endpoints},
    )
    return build_table(table_inputs, ())


def parts(found: RoutingTable, model: str, **situation: object) -> dict[str, float]:
    """Return the part of the requests that each template gets."""
    failed = situation.get("failed", frozenset())
    assert isinstance(failed, frozenset)
    ejected = situation.get("ejected", frozenset())
    assert isinstance(ejected, frozenset)
    health = EndpointHealth(ejected=ejected)
    count: Counter[str] = Counter()
    for draw in DRAWS:
        choice = choose(found, RoutingQuery(model, draw, failed), health)
        if isinstance(choice, ChosenEndpoint):
            count[choice.endpoint.template] += 1
    return {template: n / len(DRAWS) for template, n in count.items()}


@pytest.mark.parametrize(
    ("endpoints", "weight", "outcome", "expected"),
    [
        pytest.param((*OLD, *NEW), 20, "Running", {"new": 0.2, "old": 0.8}, id="a-fifth"),
        pytest.param((*OLD, *NEW), 100, "Running", {"new": 1.0}, id="everything"),
        pytest.param((*OLD, *NEW), 0, "Running", {"old": 1.0}, id="not-begun"),
        pytest.param((*OLD, *NEW), 20, "Failed", {"old": 1.0}, id="found-bad"),
        pytest.param((*OLD, *NEW), 20, "Passed", {"new": 0.25, "old": 0.75}, id="like-any-other"),
        pytest.param(NEW, 20, "Running", {"new": 1.0}, id="only-the-new"),
        pytest.param(OLD, 20, "Running", {"old": 1.0}, id="only-the-old"),
    ],
)
def test_the_part_of_the_new_version(
    endpoints: tuple[EngineEndpoint, ...], weight: int, outcome: str, expected: dict[str, float]
) -> None:
    found = parts(table(*endpoints, weight=weight, outcome=outcome), "a")
    assert found == pytest.approx(expected, abs=0.035)


def test_it_is_a_part_of_the_deployments_part_of_a_route() -> None:
    routed = table(*OLD, *NEW, *OTHER, a=30, b=70)
    expected = {"b": 0.7, "old": 0.24, "new": 0.06}
    assert parts(routed, "public") == pytest.approx(expected, abs=0.035)
    # While the new version is missing, the old one has the deployment's whole part, and no more.
    gone = table(*OLD, *OTHER, a=30, b=70)
    assert parts(gone, "public") == pytest.approx({"b": 0.7, "old": 0.3}, abs=0.035)


def test_a_failed_version_leaves_all_requests_to_the_other() -> None:
    routing_table = table(*OLD, *NEW)
    assert parts(routing_table, "a", failed=frozenset(NEW)) == {"old": 1.0}
    assert parts(routing_table, "a", failed=frozenset(OLD)) == {"new": 1.0}
    assert parts(routing_table, "a", ejected=frozenset({NEW[0].origin})) == {"old": 1.0}


def test_a_name_that_several_deployments_serve() -> None:
    found = parts(table(*OLD, *NEW, *OTHER), "both")
    assert found["b"] == pytest.approx(0.2, abs=0.035)
    assert found["new"] == pytest.approx(0.16, abs=0.035)


def test_both_sides_spread_their_requests() -> None:
    more = (*NEW, target("a-4", "a", port=5, template="new"))
    routing_table = table(*OLD, *more, weight=50)
    count = Counter(
        choice.endpoint.replica
        for draw in DRAWS
        if isinstance(
            choice := choose(routing_table, RoutingQuery("a", draw), EndpointHealth()),
            ChosenEndpoint,
        )
    )
    assert {name: n / len(DRAWS) for name, n in count.items()} == pytest.approx(
        {"a-0": 1 / 6, "a-1": 1 / 6, "a-2": 1 / 6, "a-3": 1 / 4, "a-4": 1 / 4}, abs=0.03
    )


engines = st.builds(
    lambda number, of, template: target(
        f"{of}-{number}", of, port=number + (10 if of == "b" else 1), template=template
    ),
    st.integers(0, 5),
    st.sampled_from("ab"),
    st.sampled_from(["old", "new"]),
)


@settings(max_examples=samples(50))
@given(
    some=st.lists(engines, max_size=8),
    weight=st.integers(0, 100),
    weights=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    health=endpoint_health,
    draw=st.floats(0, 1),
    failed=st.frozensets(engines, max_size=4),
)
def test_only_endpoints_of_the_model_are_chosen(
    some: list[EngineEndpoint],
    weight: int,
    weights: tuple[int, int],
    health: EndpointHealth,
    draw: float,
    failed: frozenset[EngineEndpoint],
) -> None:
    routing_table = table(*some, weight=weight, a=weights[0], b=weights[1])
    for name in ("a", "b", "both", "public"):
        choice = choose(routing_table, RoutingQuery(name, draw, failed), health)
        mine = {
            t
            for backend in routing_table.models[name].backends
            if backend.weight
            for t in backend.leased
        }
        if isinstance(choice, ChosenEndpoint):
            assert choice.endpoint in mine - failed
        else:
            assert not mine - failed, "a trial leaves nobody unserved"


@settings(max_examples=samples(20))
@given(weight=st.integers(0, 100), new=st.integers(1, 4), old=st.integers(1, 4))
def test_weights_converge(weight: int, new: int, old: int) -> None:
    endpoints = [
        target(f"a-{n}", "a", port=n + 1, template="new" if n < new else "old")
        for n in range(new + old)
    ]
    maker = BackendBuilder({"a": CanarySplit(template="new", weight=weight)})
    model = ServedModel(
        name="a", created=0, backends=(maker.backend(("a",), leased=endpoints),), reason=""
    )
    routing_table = RoutingTable(models=MappingProxyType({"a": model}))
    assert parts(routing_table, "a").get("new", 0.0) == pytest.approx(weight / 100, abs=0.035)


def sides(found: RoutingTable, model: str, draw: float) -> dict[str, str]:
    """Return the template that answers each of many new sessions."""
    said = {}
    for number in range(len(DRAWS)):
        query = RoutingQuery(model, draw)
        query.session = f"session-{number}"
        choice = choose(found, query, EndpointHealth())
        assert isinstance(choice, ChosenEndpoint)
        said[query.session] = choice.endpoint.template
    return said


def test_a_session_has_the_same_side_at_every_gateway_and_keeps_it_when_weights_grow() -> None:
    known = [sides(table(*OLD, *NEW, weight=weight), "a", 0.1) for weight in (0, 20, 60, 100)]
    assert known[1] == sides(table(*OLD, *NEW, weight=20), "a", 0.9), "whatever else is drawn"
    for less, more in pairwise(known):
        assert {s for s, t in less.items() if t == "new"} <= {
            s for s, t in more.items() if t == "new"
        }
    count = [Counter(side.values())["new"] / len(DRAWS) for side in known]
    assert count == pytest.approx([0, 0.2, 0.6, 1], abs=0.035)


def test_sessions_are_shared_out_by_a_routes_weights_and_a_trials_at_once() -> None:
    routed = table(*OLD, *NEW, *OTHER, a=30, b=70)
    count = Counter(sides(routed, "public", 0.5).values())
    found = {template: n / len(DRAWS) for template, n in count.items()}
    assert found == pytest.approx({"b": 0.7, "old": 0.24, "new": 0.06}, abs=0.035)


def test_a_conversation_without_a_name_stays_on_the_side_it_was_drawn_for() -> None:
    routed = table(*OLD, *NEW, *OTHER, a=30, b=70)
    for engine in (*OLD, *NEW, *OTHER):
        for draw in DRAWS[:50]:
            query = RoutingQuery("public", draw)
            query.sticky_mark = engine.mark
            assert choose(routed, query, EndpointHealth()) == ChosenEndpoint(endpoint=engine)
    # A rejected version gets no session back.
    query = RoutingQuery("public", 0.1)
    query.sticky_mark = NEW[0].mark
    bad = choose(table(*OLD, *NEW, *OTHER, a=30, b=70, outcome="Failed"), query, EndpointHealth())
    assert isinstance(bad, ChosenEndpoint)
    assert bad.endpoint.template == "old"
