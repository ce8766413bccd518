"""Candidates of a choice: their scores are those by which the load balancer chooses."""

import random
from types import MappingProxyType

import pytest

from gateway.routing.candidates import list_candidates
from gateway.routing.selection import ChosenEndpoint, choose
from gateway.routing.table import (
    BackendBuilder,
    EndpointHealth,
    EngineEndpoint,
    RoutingQuery,
    RoutingTable,
    ServedModel,
)
from schemas.routing import Routing
from tests.support.gateway_world import target

MODEL = "m"


def table_of(*endpoints: EngineEndpoint, routing: Routing | None = None) -> RoutingTable:
    backend = BackendBuilder().backend(("m",), leased=endpoints, routing=routing or Routing())
    model = ServedModel(name=MODEL, created=0, backends=(backend,), reason="")
    return RoutingTable(models=MappingProxyType({MODEL: model}))


def endpoints(count: int) -> list[EngineEndpoint]:
    return [target(f"m-{number}", port=number + 1) for number in range(count)]


def test_parts_add_up_to_the_score_and_the_best_is_first() -> None:
    endpoint, two, three = endpoints(3)
    health = EndpointHealth(
        in_flight={endpoint.origin: 4, two.origin: 1},
        headroom={two.origin: 0.5},
        gpu_load={"mac-1": 0.63},
        ejected=frozenset({three.origin}),
    )
    (backend,) = list_candidates(table_of(endpoint, two, three).models[MODEL], health)
    assert (backend.strategy, backend.is_fallback) == ("Scored", False)
    candidates = {candidate.endpoint.replica: candidate for candidate in backend.candidates}
    assert [candidate.endpoint.replica for candidate in backend.candidates] == ["m-1", "m-0", "m-2"]
    for candidate in candidates.values():
        assert candidate.score == pytest.approx(sum(candidate.parts.values()))
        assert set(candidate.parts) == {"modelLoaded", "memory", "queue"}
    # One of four slots is taken, and all of them at the other.
    assert candidates["m-1"].parts["queue"] == pytest.approx(
        0.75 * candidates["m-2"].parts["queue"]
    )
    assert candidates["m-0"].parts["queue"] == 0
    assert candidates["m-1"].parts["memory"] == pytest.approx(candidates["m-0"].parts["memory"] / 2)
    assert candidates["m-2"].is_ejected
    assert candidates["m-2"].gpu_load == 0.63
    assert candidates["m-0"].in_flight == 4


@pytest.mark.parametrize("seed", range(50))
def test_the_first_candidate_is_one_that_a_request_gets(seed: int) -> None:
    """Choices are random only among equals, so the first one is within the difference that counts as equal."""
    entropy = random.Random(seed)
    all_endpoints = endpoints(entropy.randint(1, 8))
    health = EndpointHealth(
        in_flight={endpoint.origin: entropy.randint(0, 6) for endpoint in all_endpoints},
        headroom={
            endpoint.origin: entropy.random()
            for endpoint in all_endpoints
            if entropy.random() < 0.7
        },
    )
    table: RoutingTable = table_of(*all_endpoints)
    (backend,) = list_candidates(table.models[MODEL], health)
    best = backend.candidates[0].score
    assert best is not None
    choice = choose(table, RoutingQuery(MODEL, entropy.random()), health)
    assert isinstance(choice, ChosenEndpoint)
    chosen = next(
        candidate
        for candidate in backend.candidates
        if candidate.endpoint.replica == choice.endpoint.replica
    )
    assert chosen.score is not None
    assert chosen.score == pytest.approx(best, abs=0.0051)


def test_other_strategies_have_no_score() -> None:
    endpoint, two = endpoints(2)
    health = EndpointHealth(in_flight={endpoint.origin: 2})
    table = table_of(endpoint, two, routing=Routing(strategy="LeastLoaded"))
    (backend,) = list_candidates(table.models[MODEL], health)
    assert backend.strategy == "LeastLoaded"
    assert [candidate.endpoint.replica for candidate in backend.candidates] == ["m-1", "m-0"]
    assert [candidate.score for candidate in backend.candidates] == [None, None]
