"""Routing over HTTP (sessions, rules, fallbacks, settings), and the load and ejections that choices depend on."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from gateway.forwarding import hedge
from gateway.forwarding.engine_stream import EngineStream
from gateway.forwarding.retry_state import WholeResponse
from gateway.forwarding.router import LoadTracker
from gateway.limits import GatewayLimits
from machinery.engine_link import EngineGauges
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeSpec
from schemas.route import Backend, HeaderMatch, ModelRoute, ModelRouteSpec, RouteRule
from schemas.routing import Routing, Sessions
from store import codec
from tests.support.gateway_calls import CHAT, scaled_to_zero, with_routing
from tests.support.gateway_engine_scripts import echo
from tests.support.gateway_fake_engine import FakeEngine
from tests.support.gateway_world import (
    Running,
    deployment,
    published,
    running_gateway,
    target,
)
from tests.support.waiting import until

ONE, OTHER = target("m-0", port=1), target("m-1", port=2)


def loads() -> LoadTracker:
    return LoadTracker(random.Random(1))


def told(
    running: int, queued: int = 0, free: float | None = None, kv: float | None = None
) -> EngineGauges:
    return EngineGauges("m-0", True, running, queued, free, kv)


def test_the_view_is_live_and_the_same_object() -> None:
    tracker = loads()
    health = tracker.health(0.0)
    tracker.begin(ONE)
    tracker.begin(ONE)
    assert dict(health.in_flight) == {ONE.origin: 2}
    tracker.outliers.record_failure(ONE, "gone", 0.0)
    assert set(health.ejected) == {ONE.origin}
    tracker.end(ONE)
    tracker.end(ONE)
    assert not health.in_flight
    assert tracker.health(1.0) is health
    assert tracker.by_deployment() == {"m": 0}


def test_others_load_is_what_an_engine_says_without_what_is_ours() -> None:
    tracker = loads()
    health = tracker.health(0.0)
    tracker.begin(ONE)
    tracker.record_gauges(ONE.origin, told(3, 2), 0.0)
    assert health.others_in_flight[ONE.origin] == 4
    tracker.record_gauges(ONE.origin, told(0), 0.0)
    assert health.others_in_flight[ONE.origin] == 0


def test_words_are_forgotten_after_a_few_seconds_and_memory_with_its_engine() -> None:
    tracker = loads()
    health = tracker.health(0.0)
    tracker.record_gauges(ONE.origin, told(3, free=0.25), 0.0)
    tracker.drop_old(2.9)
    assert health.others_in_flight == {ONE.origin: 3}
    tracker.drop_old(3.1)
    assert not health.others_in_flight
    assert health.headroom == {ONE.origin: 0.25}
    tracker.set_endpoints([OTHER.origin])
    assert not health.headroom


def test_the_use_of_kv_caches_is_the_mean_of_the_engines_that_report_it() -> None:
    tracker, both = loads(), {ONE.origin, OTHER.origin}
    assert tracker.kv_used(both) is None
    tracker.record_gauges(ONE.origin, told(1, kv=0.5), 0.0)
    assert tracker.kv_used(both) == 0.5
    tracker.record_gauges(OTHER.origin, told(1, kv=9.0), 0.0)
    assert tracker.kv_used(both) == 0.75
    tracker.set_endpoints([ONE.origin])
    assert tracker.kv_used(both) == 0.5


def test_more_than_all_memory_is_all_of_it() -> None:
    tracker = loads()
    tracker.record_gauges(ONE.origin, told(1, free=9.99), 0.0)
    assert tracker.health(0.0).headroom == {ONE.origin: 1.0}


def test_a_rest_ends_by_itself() -> None:
    tracker = loads()
    tracker.outliers.record_failure(ONE, "bad", 0.0)
    tracker.outliers.record_failure(OTHER, "full", 0.0, pause_s=4.0)
    assert tracker.health(0.9).ejected == {ONE.origin, OTHER.origin}
    assert tracker.health(1.1).ejected == {OTHER.origin}
    assert not tracker.health(4.1).ejected


def test_a_republished_endpoint_starts_anew() -> None:
    outliers = loads().outliers
    outliers.set_endpoints([ONE, OTHER], 0.0)
    outliers.record_failure(ONE, "gone", 0.0)
    outliers.record_failure(OTHER, "gone", 0.0)
    again = target("m-0", port=1, version=2)
    outliers.set_endpoints([again, OTHER], 1.0)
    assert outliers.ejected(1.0) == {OTHER.origin}
    assert outliers.phases(1.0) == {"m-0": 0, "m-1": 2}
    # A late failure from before the restart does not count for long.
    outliers.record_failure(again, "bad", 1.0)
    assert outliers.ejected(1.5) == {ONE.origin, OTHER.origin}
    assert outliers.ejected(2.1) == {OTHER.origin}
    outliers.set_endpoints([again], 3.0)
    assert not outliers.ejected(3.0)


def test_one_on_trial_is_shunned_by_all_others() -> None:
    outliers = loads().outliers
    for _ in range(3):
        outliers.record_failure(ONE, "bad", 0.0)
    assert not outliers.ejected(2.0)
    assert outliers.begin_trial(ONE, 2.0)
    assert outliers.ejected(2.0) == {ONE.origin}
    outliers.abandon_trial(ONE, 2.1)
    assert not outliers.ejected(2.1)
    assert outliers.begin_trial(ONE, 2.2)
    outliers.record_success(ONE, 2.2, 2.5)
    assert not outliers.ejected(2.5)
    outliers.drop_old(30.0)
    assert outliers.phases(30.0) == {}


def whole(name: str) -> WholeResponse:
    return WholeResponse(endpoint=target(name), status=200, passed=b"", body=b"")


async def later(result: WholeResponse | None, turns: int = 1) -> WholeResponse | None:
    for _ in range(turns):
        await asyncio.sleep(0)
    return result


async def never() -> None:
    await asyncio.Event().wait()


async def test_no_hedge_without_need() -> None:
    def rival() -> None:
        raise AssertionError("nobody is to be asked")

    assert await hedge.race(later(whole("m-0")), rival, after_s=60.0) == whole("m-0")
    assert await hedge.race(later(None), rival, after_s=60.0) is None


async def test_the_first_result_wins_and_a_failure_leaves_it_to_the_other() -> None:
    async def raced(
        first: hedge.AttemptCoroutine, second: hedge.AttemptCoroutine | None
    ) -> WholeResponse | EngineStream | None:
        return await hedge.race(first, lambda: second, after_s=0.0)

    assert await raced(never(), later(whole("m-1"))) == whole("m-1")
    assert await raced(later(whole("m-0"), 9), later(None)) == whole("m-0")
    assert await raced(later(None, 9), later(whole("m-1"), 20)) == whole("m-1")
    assert await raced(later(None, 9), later(None)) is None
    assert await raced(later(whole("m-0"), 9), None) == whole("m-0")


HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


async def asked(
    gateway: Running,
    headers: dict[str, str] | None = None,
    path: str = CHAT,
    **body: Any,
) -> str:
    """Return the replica that answered."""
    body = {"model": "m", "messages": HELLO, **body} if path == CHAT else {"model": "m", **body}
    async with gateway.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return str(response.headers["x-fleet-replica"])


@pytest.fixture
async def three(gateway: Running) -> list[FakeEngine]:
    """Three engines of m, used in turn unless affinity holds a request."""
    return await gateway.serve(echo, echo, echo, of=with_routing("m", strategy="RoundRobin"))


MORE = [*HELLO, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "so?"}]
NAMED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "body": ({"session_id": "s"}, {}, CHAT),
    "header": ({}, {"X-Session-Id": "s"}, CHAT),
    "completion": ({"session_id": "s", "prompt": "x"}, {}, "/v1/completions"),
    "conversation-that-goes-on": ({"messages": MORE}, {}, CHAT),
    "responses-that-go-on": ({"input": MORE}, {}, "/v1/responses"),
}


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(("body", "headers", "path"), NAMED.values(), ids=NAMED)
async def test_a_conversation_stays_where_it_is(
    gateway: Running, body: dict[str, Any], headers: dict[str, str], path: str
) -> None:
    assert len({await asked(gateway, headers, path, **body) for _ in range(4)}) == 1


@pytest.mark.usefixtures("three")
async def test_without_one_they_take_turns(gateway: Running) -> None:
    count = Counter([await asked(gateway) for _ in range(6)])
    assert set(count.values()) == {2}
    count = Counter([await asked(gateway, session_id=str(n)) for n in range(6)])
    assert set(count.values()) == {2}


async def test_a_session_moves_with_its_first_failure_and_stays_there(
    gateway: Running, three: list[FakeEngine]
) -> None:
    first = await asked(gateway, session_id="s")
    [dead] = [engine for engine in three if engine.replica == first]
    await dead.kill()
    second = await asked(gateway, session_id="s")
    assert second != first
    assert {await asked(gateway, session_id="s") for _ in range(3)} == {second}


def route_to(backend: str, **spec: Any) -> ModelRoute:
    made = ModelRouteSpec(model="all", backends=(Backend(deployment=backend),), **spec)
    return ModelRoute(metadata=ObjectMeta(name="r"), spec=made)


async def test_rules_fallbacks_and_what_a_route_says(gateway: Running) -> None:
    (a,), (b,), _ = [await gateway.serve(echo, of=name) for name in "abc"]
    team, beta = HeaderMatch(name="X-Team", value="research"), HeaderMatch(name="x-beta")
    rules = (
        RouteRule(headers=(team, beta), backends=(Backend(deployment="c"),)),
        RouteRule(headers=(team,), backends=(Backend(deployment="b"),)),
    )
    off = Routing(sessions=Sessions(enabled=False))
    await gateway.world.put(route_to("a", rules=rules, fallbacks=("none", "c"), routing=off))
    await gateway.knows("all", ready=3)

    async def who(**headers: str) -> str:
        return await asked(gateway, headers, model="all")

    assert await who() == "a-0"
    assert await who(**{"x-team": "research"}) == "b-0"
    assert await who(**{"x-team": "research", "X-BETA": ""}) == "c-0"
    assert await who(**{"x-team": "sales", "x-beta": "1"}) == "a-0"
    await a.kill()
    assert await who() == "c-0"
    await b.kill()
    assert await who(**{"x-team": "research"}) == "c-0"
    assert gateway.gateway.table_cache.table.models["all"].routing.sessions.enabled is False


async def test_a_gateway_asks_its_own_site_first() -> None:
    """The node's label, which its owner can change, wins over the agent's site."""
    limits = GatewayLimits(drain_timeout_s=0.0, site="berlin")
    async with running_gateway(limits=limits) as gateway:
        engines = await gateway.start(echo, echo)
        endpoints = [published(engine, "m") for engine in engines]
        places = [{"site": "paris", "node": engine.replica} for engine in engines]
        specs = [
            one.spec.model_copy(update=place) for one, place in zip(endpoints, places, strict=True)
        ]
        made = [
            one.model_copy(update={"spec": spec})
            for one, spec in zip(endpoints, specs, strict=True)
        ]
        await gateway.world.put(deployment("m", replicas=2), *made)
        node = Node(metadata=ObjectMeta(name="m-1", labels={"site": "berlin"}), spec=NodeSpec())
        await gateway.world.transport.commit([], [codec.put_spec(node)])

        def is_labelled() -> bool:
            model = gateway.gateway.table_cache.table.models.get("m")
            leased = model.backends[0].leased if model is not None else ()
            return [endpoint.site for endpoint in leased] == ["paris", "berlin"]

        await until(is_labelled, what="the label")
        assert {await asked(gateway) for _ in range(4)} == {"m-1"}
        await engines[1].kill()
        assert await asked(gateway) == "m-0"


async def test_a_backend_at_zero_is_waited_for_though_its_fallback_answers(
    gateway: Running,
) -> None:
    """Otherwise it would stay at zero for as long as the fallback is healthy."""
    await gateway.serve(echo, of="c")
    await gateway.world.put(scaled_to_zero("b"), route_to("b", fallbacks=("c",)))
    await gateway.knows("all", ready=1)
    assert await asked(gateway, model="all") == "c-0"
    assert gateway.gateway.activator.waiting() == {"b": 1}
