"""Routing over HTTP: sessions, header rules, fallbacks and route settings."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gateway.server import GatewayLimits
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeSpec
from schemas.replica import Endpoint
from schemas.route import Backend, HeaderMatch, ModelRoute, ModelRouteSpec, RouteRule
from schemas.routing import Routing, Sessions
from store import codec
from tests.support.gateway_calls import scaled_to_zero
from tests.support.gateway_engine_scripts import echo
from tests.support.gateway_fake_engine import FakeEngine, running
from tests.support.gateway_world import Running, World, deployment, published, running_gateway
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


@asynccontextmanager
async def engines(count: int, of: str = "m") -> AsyncIterator[list[FakeEngine]]:
    async with AsyncExitStack() as stack:
        made = [FakeEngine(f"{of}-{n}", echo) for n in range(count)]
        yield [await stack.enter_async_context(running(engine)) for engine in made]


async def asked(
    http: aiohttp.ClientSession,
    gateway: Running,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
    path: str = CHAT,
) -> str:
    """Return the replica that answered."""
    async with http.post(gateway.url + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return response.headers["x-fleet-replica"]


@pytest.fixture
async def three(world: World, gateway: Running) -> AsyncIterator[list[FakeEngine]]:
    """Three engines of m, used in turn unless affinity holds a request."""
    async with engines(3) as made:
        turns = deployment("m")
        spec = turns.spec.model_copy(update={"routing": Routing(strategy="RoundRobin")})
        await world.put(turns.model_copy(update={"spec": spec}), *(published(e, "m") for e in made))
        await gateway.knows("m", ready=3)
        yield made


Sent = tuple[dict[str, Any], dict[str, str], str]
MORE = [*HELLO, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "so?"}]
NAMED: dict[str, Sent] = {
    "body": ({"session_id": "s", "messages": HELLO}, {}, CHAT),
    "header": ({"messages": HELLO}, {"X-Session-Id": "s"}, CHAT),
    "completion": ({"session_id": "s", "prompt": "x"}, {}, "/v1/completions"),
    "conversation": ({"conversation": "s", "input": "x"}, {}, "/v1/responses"),
    "conversation-object": ({"conversation": {"id": "s"}, "input": "x"}, {}, "/v1/responses"),
    "conversation-that-goes-on": ({"messages": MORE}, {}, CHAT),
    "responses-that-go-on": ({"input": MORE}, {}, "/v1/responses"),
}


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("sent", NAMED.values(), ids=NAMED)
async def test_a_conversation_stays_where_it_is(
    gateway: Running, http: aiohttp.ClientSession, sent: Sent
) -> None:
    body, headers, path = sent
    answers = [await asked(http, gateway, {"model": "m", **body}, headers, path) for _ in range(4)]
    assert len(set(answers)) == 1


@pytest.mark.usefixtures("three")
async def test_without_one_they_take_turns(gateway: Running, http: aiohttp.ClientSession) -> None:
    count = Counter(
        [await asked(http, gateway, {"model": "m", "messages": HELLO}) for _ in "x" * 6]
    )
    assert set(count.values()) == {2}
    others = [{"session_id": str(n), "messages": HELLO} for n in range(6)]
    count = Counter([await asked(http, gateway, {"model": "m", **body}) for body in others])
    assert set(count.values()) == {2}


async def test_a_session_moves_with_its_first_failure_and_stays_there(
    gateway: Running, http: aiohttp.ClientSession, three: list[FakeEngine]
) -> None:
    body = {"model": "m", "session_id": "s", "messages": HELLO}
    first = await asked(http, gateway, body)
    [dead] = [engine for engine in three if engine.replica == first]
    await dead.kill()
    second = await asked(http, gateway, body)
    assert second != first
    assert {await asked(http, gateway, body) for _ in range(3)} == {second}


async def test_rules_fallbacks_and_what_a_route_says(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async with engines(1, "a") as [a], engines(1, "b") as [b], engines(1, "c") as [c]:
        team = HeaderMatch(name="X-Team", value="research")
        rules = (
            RouteRule(
                headers=(team, HeaderMatch(name="x-beta")), backends=(Backend(deployment="c"),)
            ),
            RouteRule(headers=(team,), backends=(Backend(deployment="b"),)),
        )
        spec = ModelRouteSpec(
            model="all", backends=(Backend(deployment="a"),), rules=rules, fallbacks=("none", "c"),
            routing=Routing(sessions=Sessions(enabled=False)),
        )  # fmt: skip
        await world.put(
            *(deployment(name) for name in "abc"),
            ModelRoute(metadata=ObjectMeta(name="r"), spec=spec),
            *(published(engine, engine.replica[0]) for engine in (a, b, c)),
        )
        await gateway.knows("all", ready=3)

        async def who(**headers: str) -> str:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            return await asked(http, gateway, {"model": "all", "messages": HELLO}, sent)

        assert await who() == "a-0"
        assert await who(x_team="research") == "b-0"
        assert await who(x_team="research", X_BETA="") == "c-0"
        assert await who(x_team="sales", x_beta="1") == "a-0"
        await a.kill()
        assert await who() == "c-0"
        await b.kill()
        assert await who(x_team="research") == "c-0"
        assert gateway.gateway.table_cache.table.models["all"].routing.sessions.enabled is False


async def test_a_gateway_asks_its_own_site_first(world: World, http: aiohttp.ClientSession) -> None:
    """The node's label, which its owner can change, wins over the agent's site."""
    limits = GatewayLimits(drain_timeout_s=0.0, site="berlin")
    async with engines(2) as made, running_gateway(world.transport, limits) as gateway:
        await world.put(deployment("m", replicas=2), *(at(e, "paris") for e in made))
        node = Node(
            metadata=ObjectMeta(name="m-1", labels={"site": "berlin"}), spec=NodeSpec()
        )  # fmt: skip
        await world.transport.commit([], [codec.put_spec(node)])

        def is_labelled() -> bool:
            model = gateway.gateway.table_cache.table.models.get("m")
            return model is not None and [t.site for t in model.backends[0].leased] == [
                "paris",
                "berlin",
            ]

        await until(is_labelled, what="the label")
        assert {await asked(http, gateway, {"model": "m", "prompt": "x"}) for _ in "xxxx"} == {
            "m-1"
        }
        await made[1].kill()
        assert await asked(http, gateway, {"model": "m", "prompt": "x"}) == "m-0"


def at(engine: FakeEngine, site: str) -> Endpoint:
    """Return the engine's endpoint, on a node of the same name."""
    found = published(engine, "m")
    spec = found.spec.model_copy(update={"site": site, "node": engine.replica})
    return found.model_copy(update={"spec": spec})


async def test_a_backend_at_zero_is_waited_for_though_its_fallback_answers(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    """Otherwise it would stay at zero for as long as the fallback is healthy."""
    async with engines(1, "c") as [c]:
        spec = ModelRouteSpec(model="all", backends=(Backend(deployment="b"),), fallbacks=("c",))
        await world.put(
            scaled_to_zero("b"),
            deployment("c"),
            ModelRoute(metadata=ObjectMeta(name="r"), spec=spec),
            published(c, "c"),
        )
        await gateway.knows("all", ready=1)
        assert await asked(http, gateway, {"model": "all", "messages": HELLO}) == "c-0"
        assert gateway.gateway.activator.waiting() == {"b": 1}
