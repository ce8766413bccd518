"""Engines that hang, stutter, talk nonsense or drain: who asked gets an answer, and others are not hurt."""

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest

from gateway.routing.table import Origin
from gateway.server import GatewayLimits
from machinery.clock import SystemClock
from schemas.deployment import ModelDeployment
from schemas.routing import Routing
from store import keys
from tests.gateway import faults
from tests.gateway.fake_engine import Call, FakeEngine, running
from tests.gateway.scripts import chat, dies_at_once, refuses, slow
from tests.gateway.test_failover import CHAT, ask
from tests.gateway.world import Running, World, deployment, published, running_gateway
from tests.support.waiting import until

NOW = SystemClock().monotonic


def routed(name: str, **routing: Any) -> ModelDeployment:
    """Return a deployment with what is given of `spec.routing`."""
    made = deployment(name)
    declared = Routing.model_validate_json(orjson.dumps(routing))
    return made.model_copy(update={"spec": made.spec.model_copy(update={"routing": declared})})


async def serve(
    world: World, gateway: Running, declared: ModelDeployment, *engines: FakeEngine
) -> None:
    name = declared.name
    await world.put(declared, *(published(engine, name) for engine in engines))
    await gateway.knows(name, ready=len(engines))


async def metrics(http: aiohttp.ClientSession, gateway: Running) -> str:
    async with http.get(f"{gateway.url}/metrics") as response:
        return await response.text()


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fault", faults.WRONG)
async def test_what_is_no_answer_is_asked_elsewhere(
    world: World, gateway: Running, http: aiohttp.ClientSession, fault: str, is_streamed: bool
) -> None:
    wrong = FakeEngine("m-0", faults.WRONG[fault])
    async with running(wrong), running(FakeEngine("m-1", chat)) as good:
        await serve(world, gateway, deployment("m"), wrong, good)
        status, body, response = await ask(http, gateway, stream=is_streamed)
        assert status == 200
        assert b"m-1" in (body if is_streamed else orjson.dumps(body))
        assert response.headers["x-fleet-attempts"] == "2"


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_an_engine_that_was_stopped_loses_its_requests_to_others(
    world: World, gateway: Running, http: aiohttp.ClientSession, is_streamed: bool
) -> None:
    """As with SIGSTOP: it accepts, and answers neither requests nor the question how it is."""
    hung = FakeEngine("m-0", faults.says_nothing, health=None)
    gateway.gateway.prober.probe_s = 0.3
    async with running(hung), running(FakeEngine("m-1", chat)) as good:
        await serve(world, gateway, deployment("m"), hung, good)
        asked = [ask(http, gateway, stream=is_streamed) for _ in range(4)]
        found = await asyncio.gather(*asked)
        assert [status for status, _, _ in found] == [200] * 4
        assert hung.calls
        assert 'breaker{replica="m-0"} 2' in await metrics(http, gateway)
        assert 'ejections_total{replica="m-0"} 1' in await metrics(http, gateway)
        # From now on nobody waits for it...
        before = len(hung.calls)
        for _ in range(10):
            await ask(http, gateway)
        assert len(hung.calls) == before
        # ... until it says that it is well, without having been published anew.
        hung.health, hung.script = 200, chat
        await until(lambda: not gateway.gateway.loads.circuits.shunned(NOW()), what="its return")
        await asyncio.gather(*(ask(http, gateway) for _ in range(8)))
        assert len(hung.calls) > before


async def test_a_long_prompt_is_no_hanging_engine(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    """It says nothing for longer than a hanging one may, but it says that it is well."""
    gateway.gateway.prober.probe_s = 0.2
    async with running(FakeEngine("m-0", slow(2.5))) as busy, running(FakeEngine("m-1", chat)) as o:
        await serve(world, gateway, deployment("m"), busy, o)
        status, _, response = await ask(http, gateway)
        assert (status, response.headers["x-fleet-replica"]) == (200, "m-0")
        assert busy.probes


async def test_a_hanging_engine_is_waited_for_when_there_is_nobody_else(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    gateway.gateway.prober.probe_s = 0.1
    async with running(FakeEngine("m-0", slow(2.5), health=None)) as hung:
        await serve(world, gateway, deployment("m"), hung)
        status, _, _ = await ask(http, gateway)
        assert (status, len(hung.calls)) == (200, 1)
        assert hung.probes


async def test_the_first_token_may_take_so_long(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async with running(FakeEngine("m-0", slow(30))) as late, running(FakeEngine("m-1", chat)) as o:
        await serve(world, gateway, routed("m", timeouts={"firstToken": "1s"}), late, o)
        status, body, _ = await ask(http, gateway, stream=True)
        assert status == 200
        assert b"m-1" in body
        await until(lambda: late.abandoned, what="the slow engine noticing")


async def test_silence_may_last_so_long_and_is_asked_elsewhere(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async with running(FakeEngine("m-0", slow(30))) as late, running(FakeEngine("m-1", chat)) as o:
        await serve(world, gateway, routed("m", timeouts={"attempt": "1s"}), late, o)
        status, body, _ = await ask(http, gateway)
        assert (status, len(late.calls)) == (200, 1)
        assert "m-1" in str(body)


@pytest.mark.parametrize("limit", [{"firstToken": "200ms"}, {"attempt": "200ms"}], ids=str)
async def test_limits_may_be_shorter_than_a_second(
    world: World, gateway: Running, http: aiohttp.ClientSession, limit: dict[str, str]
) -> None:
    """The request's own time ends before the usual sweep would have looked."""
    timeouts = {**limit, "request": "900ms"}
    async with running(FakeEngine("m-0", slow(30))) as late, running(FakeEngine("m-1", chat)) as o:
        await serve(world, gateway, routed("m", timeouts=timeouts), late, o)
        status, body, _ = await ask(http, gateway, stream=True)
        assert (status, len(late.calls)) == (200, 1)
        assert b"m-1" in body


async def test_the_clients_own_limit_holds_and_is_passed_on(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async with running(FakeEngine("m-0", slow(30))) as late:
        await serve(world, gateway, routed("m", timeouts={"request": "60s"}), late)
        headers = {"x-request-timeout": "0.3"}
        async with http.post(gateway.url + CHAT, json={"model": "m"}, headers=headers) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (504, "request_timeout")
        assert "within 0.3 s (1 replica was asked)" in error["message"]
        assert 0 < float(late.calls[0].headers["x-request-timeout"]) <= 0.3
        # It is not the engine's fault that the client is in a hurry.
        assert not gateway.gateway.loads.circuits.shunned(NOW())


async def test_a_names_own_limit_holds_if_the_client_names_none(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async with running(FakeEngine("m-0", slow(30))) as late, running(FakeEngine("m-1", chat)) as o:
        await serve(world, gateway, routed("m", timeouts={"request": "1s"}), late, o)
        status, body, _ = await ask(http, gateway)
        assert (status, body["error"]["code"]) == (504, "request_timeout")
        assert not o.calls


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", "1e9"])
async def test_a_limit_that_makes_no_sense_is_refused(
    world: World, gateway: Running, http: aiohttp.ClientSession, text: str
) -> None:
    async with running(FakeEngine("m-0", chat)) as engine:
        await serve(world, gateway, deployment("m"), engine)
        headers = {"x-request-timeout": text}
        async with http.post(gateway.url + CHAT, json={"model": "m"}, headers=headers) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "x-request-timeout")
        assert not engine.calls


async def test_a_drain_under_load_fails_nobody(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    """Whatever the draining engine still had in its queue is turned away at once."""
    draining = asyncio.Event()

    async def drains(call: Call) -> None:
        await draining.wait()
        await refuses(503, "draining")(call)

    async with running(FakeEngine("m-0", drains)) as old, running(FakeEngine("m-1", chat)) as new:
        await serve(world, gateway, deployment("m"), old)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(http, gateway, stream=True)) for _ in range(40)]
            await until(lambda: len(old.calls) == 40, what="all being there")
            await world.put(published(new, "m"))
            await gateway.knows("m", ready=2)
            draining.set()
        assert [task.result()[0] for task in asked] == [200] * 40


async def test_dead_engines_are_not_stormed(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    """All engines fail, hundreds ask: there are hardly more attempts than requests, and clients learn when to return."""
    engines = [FakeEngine(f"m-{number}", refuses(500, "broken")) for number in range(4)]
    async with running(engines[0]), running(engines[1]), running(engines[2]), running(engines[3]):
        await serve(world, gateway, deployment("m"), *engines)
        found = []
        for _ in range(20):
            found += await asyncio.gather(*(ask(http, gateway) for _ in range(10)))
        assert {status for status, _, _ in found} == {500}
        assert all(response.headers["retry-after"] for _, _, response in found)
        attempts = sum(len(engine.calls) for engine in engines)
        # The first of each engine are free: so many were on their way before it was known to fail.
        assert attempts <= 200 + 10 + 200 * 0.2 + 4 * 10
        assert 'attempts_total{outcome="over_budget"}' in await metrics(http, gateway)


async def test_no_more_than_so_many_are_asked(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    engines = [FakeEngine(f"m-{number}", dies_at_once) for number in range(3)]
    async with running(engines[0]), running(engines[1]), running(engines[2]):
        await serve(world, gateway, routed("m", retries={"maxAttempts": 2}), *engines)
        status, _, response = await ask(http, gateway)
        assert (status, response.headers["x-fleet-attempts"]) == (503, "2")


async def test_an_ejected_engine_gets_one_request_on_trial(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async with (
        running(FakeEngine("m-0", refuses(500, "x"))) as bad,
        running(FakeEngine("m-1", slow(0.01))) as good,
    ):
        await serve(world, gateway, deployment("m"), bad, good)
        circuits = gateway.gateway.loads.circuits
        await asyncio.gather(*(ask(http, gateway) for _ in range(8)))
        assert len(bad.calls) >= 3
        assert gateway.gateway.metrics.ejections.value("m-0") == 1
        await until(lambda: circuits.phases(NOW()).get("m-0") == 1, what="half open")
        before, bad.script = len(bad.calls), slow(0.2)
        found = await asyncio.gather(*(ask(http, gateway) for _ in range(8)))
        assert [status for status, _, _ in found] == [200] * 8
        assert len(bad.calls) == before + 1
        assert circuits.phases(NOW())["m-0"] == 0


async def test_a_restarted_engine_is_used_as_soon_as_it_is_published(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async with running(FakeEngine("m-0", chat)) as engine, running(FakeEngine("m-1", chat)) as o:
        await serve(world, gateway, deployment("m"), engine, o)
        await engine.kill()
        await asyncio.gather(*(ask(http, gateway) for _ in range(8)))
        assert gateway.gateway.loads.circuits.is_open(Origin("127.0.0.1", engine.port))
        await world.delete(keys.endpoint_key("mac-1", "m-0"))
        await gateway.knows("m", ready=1)
        await engine.start()
        await world.put(published(engine, "m"))
        await gateway.knows("m", ready=2)
        before = len(engine.calls)
        await until(lambda: not gateway.gateway.loads.circuits.shunned(NOW()), what="the news")
        await asyncio.gather(*(ask(http, gateway) for _ in range(8)))
        assert len(engine.calls) > before


async def test_an_engine_tells_what_others_have_it_do(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    async def tells(call: Call) -> None:
        # The fake says "queued: 7" in every answer.
        await call.answer(b"{}", x_fleet_in_flight="3", x_fleet_memory_free="40")

    async with running(FakeEngine("m-0", tells)) as engine:
        await serve(world, gateway, deployment("m"), engine)
        await ask(http, gateway)
        standing = gateway.gateway.loads.standing(NOW())
        assert list(standing.elsewhere.values()) == [9.0]  # all but the one that was ours
        assert list(standing.headroom.values()) == [0.4]


async def test_a_slow_engine_gets_a_rival(
    world: World, gateway: Running, http: aiohttp.ClientSession
) -> None:
    hedging = {"after": "50ms", "budget": 50}
    async with running(FakeEngine("m-0", slow(30))) as late, running(FakeEngine("m-1", chat)) as o:
        await serve(world, gateway, routed("m", hedging=hedging), late, o)
        status, _, response = await ask(http, gateway)
        assert (status, response.headers["x-fleet-replica"]) == (200, "m-1")
        await until(lambda: late.abandoned, what="the loser being cut")
        # There is one for every ten seconds of so few requests, and no more.
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(ask(http, gateway, stream=True))
            await until(lambda: len(late.calls) == 2, what="the second being asked")
            await late.kill()
        assert b"m-1" in waiting.result()[1]
        text = await metrics(http, gateway)
        assert 'hedges_total{outcome="asked"} 1' in text
        assert 'hedges_total{outcome="won"} 1' in text
        assert gateway.gateway.loads.total() == 0


async def test_one_names_trouble_is_not_anothers(world: World, http: aiohttp.ClientSession) -> None:
    """While everything of one model hangs, another's requests are answered as ever."""
    async with (
        running_gateway(world.transport, GatewayLimits(drain_timeout_s=0.0)) as gateway,
        running(FakeEngine("a-0", faults.says_nothing, health=None)) as hung,
        running(FakeEngine("b-0", chat)) as good,
    ):
        await serve(world, gateway, deployment("a"), hung)
        await serve(world, gateway, deployment("b"), good)
        async with asyncio.TaskGroup() as group:
            stuck = [group.create_task(ask(http, gateway, model="a")) for _ in range(20)]
            await until(lambda: len(hung.calls) == 20, what="all hanging")
            found = [await ask(http, gateway, model="b") for _ in range(20)]
            assert {status for status, _, _ in found} == {200}
            for task in stuck:
                task.cancel()
        await until(lambda: gateway.gateway.loads.total() == 0 or None, what="their leaving")
