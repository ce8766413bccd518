"""Plans: the same choices as `choose`, with fewer steps."""

from types import MappingProxyType
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.forwarding.router import RoutePlan
from gateway.routing.selection import ChosenEndpoint, choose
from gateway.routing.table import (
    BackendBuilder,
    EndpointHealth,
    EngineEndpoint,
    RoutingQuery,
    RoutingTable,
    ServedModel,
    WeightedBackend,
)
from schemas.routing import PrefixAffinity, Routing, ScoreWeights, Sessions, Strategy
from tests.support.gateway_world import target

ENDPOINTS = tuple(target(f"m-{n}", port=n + 1) for n in range(17))
parts = st.floats(0, 1, exclude_max=True)
weights = st.builds(
    ScoreWeights,
    model_loaded=st.integers(0, 9),
    memory_headroom=st.integers(0, 9),
    queue_depth=st.integers(1, 9),
    prefix_affinity=st.integers(0, 9),
)
routings = st.builds(
    Routing,
    strategy=st.sampled_from(("Scored", *get_args(Strategy))),
    weights=weights,
    sessions=st.builds(Sessions, enabled=st.booleans()),
    prefix_affinity=st.builds(PrefixAffinity, enabled=st.booleans(), bound=st.integers(100, 1000)),
)


def model_of(*backends: WeightedBackend) -> ServedModel:
    return ServedModel(name="m", created=0, backends=backends, reason="")


def backend_of(endpoints: tuple[EngineEndpoint, ...], routing: Routing) -> WeightedBackend:
    return BackendBuilder().backend(("m",), leased=endpoints, routing=routing)


@st.composite
def situations(draw: st.DrawFn) -> tuple[ServedModel, RoutingQuery, EndpointHealth]:
    """Return a model, a request for it, and the state of its endpoints."""
    count = draw(st.integers(1, len(ENDPOINTS)))
    used = ENDPOINTS[:count]
    marks = st.sampled_from([endpoint.mark for endpoint in ENDPOINTS[: count + 1]])
    model = model_of(backend_of(used, draw(routings)))
    query = RoutingQuery("m", draw(parts), draw(st.sets(st.sampled_from(used), max_size=1)))
    query.sticky_mark = draw(st.just(0) | marks)
    query.session = draw(st.sampled_from(("", "s")))
    query.cached = draw(st.lists(st.tuples(marks, parts), max_size=4))
    origins = st.sampled_from([engine_endpoint.origin for engine_endpoint in used])
    health = EndpointHealth(
        in_flight=draw(st.dictionaries(origins, st.integers(1, 12))),
        others_in_flight=draw(st.dictionaries(origins, st.sampled_from((0.0, 0.0, 0.0, 2.0)))),
        headroom=draw(st.dictionaries(origins, parts)),
        ejected=draw(st.sets(origins, max_size=1)),
    )
    return model, query, health


@given(situations())
def test_plan_and_routing_function_choose_the_same_endpoint_for_the_same_draw(
    situation: tuple[ServedModel, RoutingQuery, EndpointHealth],
) -> None:
    model, query, health = situation
    table = RoutingTable(models=MappingProxyType({"m": model}))
    planned = RoutePlan(model).pick(query, health)
    if planned is not None:
        assert planned == choose(table, query, health)


@pytest.mark.parametrize("count", [1, 2, 16])
def test_the_usual_model_is_planned(count: int) -> None:
    plan = RoutePlan(model_of(backend_of(ENDPOINTS[:count], Routing())))
    busy = EndpointHealth(in_flight={ENDPOINTS[0].origin: 3})
    assert isinstance(plan.pick(RoutingQuery("m", 0.5), busy), ChosenEndpoint)


@pytest.mark.parametrize(
    "model",
    [
        model_of(),
        model_of(backend_of(ENDPOINTS, Routing())),
        model_of(backend_of(ENDPOINTS[:2], Routing(strategy="RoundRobin"))),
        model_of(backend_of(ENDPOINTS[:2], Routing()), backend_of(ENDPOINTS[2:3], Routing())),
    ],
    ids=["no backend", "many endpoints", "turns", "two backends"],
)
def test_other_models_are_left_to_the_routing_function(model: ServedModel) -> None:
    plan = RoutePlan(model)
    assert plan.pick(RoutingQuery("m", 0.5), EndpointHealth()) is None
