"""Failover: engines that die, hang, drain or send invalid data before the client got a byte."""

import asyncio

import orjson
import pytest

from gateway.limits import GatewayLimits
from machinery.clock import SystemClock
from schemas.wire.engine_address import EngineAddress
from store import keys
from tests.support import gateway_engine_faults, gateway_engine_scripts
from tests.support.gateway_calls import with_routing
from tests.support.gateway_engine_scripts import chat, dies_at_once, refuses, slow, streams
from tests.support.gateway_fake_engine import Call, FakeEngine, Script
from tests.support.gateway_world import (
    Running,
    deployment,
    published,
    route,
    running_gateway,
)
from tests.support.waiting import until

FAILURES = [
    pytest.param(dies_at_once, id="dies-at-once"),
    pytest.param(gateway_engine_scripts.dies_after_the_head, id="dies-after-the-head"),
    pytest.param(gateway_engine_scripts.dies_in_the_first_event, id="dies-in-the-first-event"),
    pytest.param(gateway_engine_scripts.dies_mid_answer, id="dies-mid-answer"),
    pytest.param(refuses(503, "draining"), id="draining"),
    pytest.param(refuses(429, "queue_full"), id="queue-full"),
    pytest.param(refuses(500, "broken"), id="broken"),
    pytest.param(refuses(502, "bad-gateway"), id="bad-gateway"),
    pytest.param(refuses(504, "timeout"), id="timeout"),
    *(pytest.param(script, id=name) for name, script in gateway_engine_faults.WRONG.items()),
]
NOW = SystemClock().monotonic


@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize("script", FAILURES)
async def test_another_engine_answers(gateway: Running, script: Script, mode: str) -> None:
    bad, good = await gateway.serve(script, chat)
    status, body, response = await gateway.chat(stream=mode == "streamed")
    assert status == 200
    assert b"m-1" in (body if mode == "streamed" else orjson.dumps(body))
    assert response.headers["x-fleet-attempts"] == "2"
    assert response.headers["x-fleet-replica"] == "m-1"
    assert (len(bad.calls), len(good.calls)) == (1, 1)
    assert good.calls[0].body == bad.calls[0].body
    # It is not tried again for a moment.
    await gateway.chat()
    assert len(bad.calls) == 1


@pytest.mark.parametrize("patience_s", [1.0])
async def test_the_answering_replica_must_be_the_requested_one(gateway: Running) -> None:
    """Another engine took over the port of one that is gone."""
    (stranger,) = await gateway.start(chat, of="other")
    await gateway.world.put(deployment("m"), published(FakeEngine("m-0", chat, stranger.port), "m"))
    await gateway.knows("m", ready=1)
    status, body, _ = await gateway.chat()
    assert status == 503
    assert "other-0 answers there" in body["error"]["message"]


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("patience_s", [1.0])
async def test_an_engines_refusal_is_passed_on_if_no_other_remains(
    gateway: Running, status: int
) -> None:
    (engine,) = await gateway.serve(refuses(status, "busy"))
    got, body, response = await gateway.chat()
    assert (got, body["error"]["code"]) == (status, "busy")
    assert response.headers["retry-after"] == "1"
    assert len(engine.calls) > 1  # until the patience of the deployment is over


async def test_a_clients_mistake_is_not_tried_twice(gateway: Running) -> None:
    engine, other = await gateway.serve(refuses(400, "bad"), chat)
    status, _, _ = await gateway.chat()
    assert (status, len(engine.calls), len(other.calls)) == (400, 1, 0)


@pytest.mark.parametrize("patience_s", [1.0])
async def test_when_all_are_dead_each_was_tried_once(gateway: Running) -> None:
    engine, other = await gateway.serve(dies_at_once, dies_at_once)
    status, body, response = await gateway.chat()
    assert (status, body["error"]["code"]) == (503, "upstream_failed")
    assert response.headers["retry-after"] == "1"
    assert response.headers["x-fleet-attempts"] == "2"
    assert (len(engine.calls), len(other.calls)) == (1, 1)


@pytest.mark.parametrize("patience_s", [1.0])
async def test_no_endpoint_is_reachable(gateway: Running) -> None:
    (engine,) = await gateway.serve(chat)
    await engine.kill()
    status, body, response = await gateway.chat()
    assert (status, body["error"]["code"]) == (503, "upstream_unreachable")
    assert response.headers["retry-after"] == "1"


async def test_requests_wait_for_engines_that_load_where_they_are_published_still() -> None:
    """An engine that was killed listens again before its agent reports that it is not ready."""
    limits = GatewayLimits(resume_timeout_s=30.0, drain_timeout_s=0)
    async with running_gateway(limits=limits) as gateway:
        (engine,) = await gateway.serve(chat)
        engine.script, engine.health = refuses(503, "loading"), 503
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(gateway.chat()) for _ in range(4)]
            probes = engine.probes
            await until(lambda: len(engine.calls) >= 4, what="all requests")
            await until(lambda: engine.probes > probes + 2, what="health checks")
            assert not any(task.done() for task in asking), "they wait"
            engine.script, engine.health = chat, 200
        assert [task.result()[0] for task in asking] == [200] * 4
        # Nobody was sent there again before a health check was answered.
        assert len(engine.calls) == 8


async def test_a_silent_engine_is_given_up() -> None:
    limits = GatewayLimits(request_timeout_s=0.1, resume_timeout_s=0.1, drain_timeout_s=0)
    async with running_gateway(limits=limits) as gateway:
        (engine,) = await gateway.serve(slow(30))
        status, body, _ = await gateway.chat()
        assert (status, body["error"]["code"]) == (504, "upstream_timeout")
        await until(lambda: engine.abandoned, what="the engine noticing")


async def test_load_is_spread(gateway: Running) -> None:
    engine, other = await gateway.serve(slow(60), slow(60))
    async with asyncio.TaskGroup() as group:
        chats = [group.create_task(gateway.chat()) for _ in range(8)]
        await until(lambda: len(engine.calls) + len(other.calls) == 8, what="all requests")
        for task in chats:
            task.cancel()
    assert (len(engine.calls), len(other.calls)) == (4, 4)
    await until(lambda: engine.abandoned + other.abandoned == 8, what="the engines noticing")
    assert gateway.gateway.load_tracker.total() == 0


async def test_a_route_shares_out_and_engines_are_called_by_their_own_name(
    gateway: Running,
) -> None:
    (a,) = await gateway.serve(gateway_engine_scripts.echo, of="a")
    (b,) = await gateway.serve(gateway_engine_scripts.echo, of="b")
    await gateway.world.put(route("r", "public", a=3, b=1))
    await gateway.knows("public", ready=2)
    for _ in range(40):
        status, body, response = await gateway.chat(model="public")
        assert status == 200
        assert body["model"] == response.headers["x-fleet-replica"][0]
    assert len(a.calls) > len(b.calls) > 0


async def test_sixteen_streams_and_one_engine_killed(gateway: Running) -> None:
    """Clients without a byte get everything from the other engine; the others get an error."""
    steady = streams(20, pause_s=0.01)
    victim, _ = await gateway.serve(slow(0.15, steady), steady)

    async def kill() -> None:
        await until(lambda: len(victim.calls) == 8, what="the victim's share")
        await victim.kill()

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(gateway.chat(stream=True)) for _ in range(16)]
        group.create_task(kill())
    results = [task.result() for task in asked]
    assert [status for status, _, _ in results] == [200] * 16
    assert len({body for _, body, _ in results}) == 1
    assert all(body.endswith(gateway_engine_scripts.DONE) for _, body, _ in results)
    attempts = sorted(r.headers["x-fleet-attempts"] for _, _, r in results)
    assert attempts == ["1"] * 8 + ["2"] * 8


NOW = SystemClock().monotonic


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_an_engine_that_was_stopped_loses_its_requests_to_others(
    gateway: Running, is_streamed: bool
) -> None:
    """Like SIGSTOP: it accepts, and answers neither requests nor health checks."""
    stopped = FakeEngine("m-0", gateway_engine_faults.says_nothing, health=None)
    declared = with_routing("m", healthCheck={"timeout": "1s"})
    hung, _ = await gateway.serve(stopped, chat, of=declared)
    found = await asyncio.gather(*(gateway.chat(stream=is_streamed) for _ in range(4)))
    assert [status for status, _, _ in found] == [200] * 4
    assert hung.calls
    assert 'breaker{replica="m-0"} 2' in await gateway.metrics()
    assert 'ejections_total{replica="m-0"} 1' in await gateway.metrics()
    # From now on no request waits for it...
    before = len(hung.calls)
    for _ in range(10):
        await gateway.chat()
    assert len(hung.calls) == before
    # ... until its health check succeeds, without a new endpoint.
    hung.health, hung.script = 200, chat
    await until(lambda: not gateway.gateway.load_tracker.outliers.ejected(NOW()), what="its return")
    await asyncio.gather(*(gateway.chat() for _ in range(8)))
    assert len(hung.calls) > before


async def test_a_long_prompt_is_no_hanging_engine(gateway: Running) -> None:
    """It is silent for longer than a hanging engine may be, but passes its health checks."""
    gateway.gateway.health_checker.probe_s = 0.2
    busy, _ = await gateway.serve(slow(2.5), chat)
    status, _, response = await gateway.chat()
    assert (status, response.headers["x-fleet-replica"]) == (200, "m-0")
    assert busy.probes


async def test_a_hanging_engine_is_awaited_if_there_is_no_other(gateway: Running) -> None:
    gateway.gateway.health_checker.probe_s = 0.1
    (hung,) = await gateway.serve(FakeEngine("m-0", slow(2.5), health=None))
    status, _, _ = await gateway.chat()
    assert (status, len(hung.calls)) == (200, 1)
    assert hung.probes


@pytest.mark.parametrize("limit", ["firstToken", "attempt"])
async def test_silence_beyond_a_limit_is_retried_elsewhere(gateway: Running, limit: str) -> None:
    late, _ = await gateway.serve(slow(3600), chat, of=with_routing("m", timeouts={limit: "1s"}))
    status, body, _ = await gateway.chat(stream=True)
    assert (status, len(late.calls)) == (200, 1)
    assert b"m-1" in body
    await until(lambda: late.abandoned, what="the slow engine noticing")


async def test_the_clients_own_limit_holds_and_is_passed_on(gateway: Running) -> None:
    (late,) = await gateway.serve(slow(30), of=with_routing("m", timeouts={"request": "60s"}))
    headers = {"x-request-timeout": "0.3"}
    async with gateway.post(json={"model": "m"}, headers=headers) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (504, "request_timeout")
    assert "within 0.3 s (1 replica was tried)" in error["message"]
    assert 0 < float(late.calls[0].headers["x-request-timeout"]) <= 0.3
    # The engine is not to blame for a short deadline of the client.
    assert not gateway.gateway.load_tracker.outliers.ejected(NOW())


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", "1e9"])
async def test_a_limit_that_makes_no_sense_is_refused(gateway: Running, text: str) -> None:
    (engine,) = await gateway.serve(chat)
    headers = {"x-request-timeout": text}
    async with gateway.post(json={"model": "m"}, headers=headers) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "x-request-timeout")
    assert not engine.calls


async def test_a_drain_under_load_fails_no_request(gateway: Running) -> None:
    """Requests in the queue of the draining engine are rejected at once."""
    draining = asyncio.Event()

    async def drains(call: Call) -> None:
        await draining.wait()
        await refuses(503, "draining")(call)

    (old,) = await gateway.serve(drains)
    (new,) = await gateway.start(FakeEngine("m-1", chat))
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(gateway.chat(stream=True)) for _ in range(40)]
        await until(lambda: len(old.calls) == 40, what="all being there")
        await gateway.world.put(published(new, "m"))
        await gateway.knows("m", ready=2)
        draining.set()
    assert [task.result()[0] for task in asked] == [200] * 40


async def test_dead_engines_are_not_stormed(gateway: Running) -> None:
    """All engines fail under hundreds of requests: there are hardly more attempts than requests, with Retry-After."""
    engines = await gateway.serve(*[refuses(500, "broken")] * 4)
    found = []
    for _ in range(20):
        found += await asyncio.gather(*(gateway.chat() for _ in range(10)))
    assert {status for status, _, _ in found} == {500}
    assert all(response.headers["retry-after"] for _, _, response in found)
    attempts = sum(len(engine.calls) for engine in engines)
    # The first failure of each engine is free: these were in flight before it was known to fail.
    assert attempts <= 200 + 10 + 200 * 0.2 + 4 * 10
    assert 'attempts_total{outcome="over_budget"}' in await gateway.metrics()


async def test_attempts_are_limited(gateway: Running) -> None:
    await gateway.serve(*[dies_at_once] * 3, of=with_routing("m", retries={"maxAttempts": 2}))
    status, _, response = await gateway.chat()
    assert (status, response.headers["x-fleet-attempts"]) == (503, "2")


async def test_an_ejected_engine_gets_one_request_on_trial(gateway: Running) -> None:
    bad, _ = await gateway.serve(refuses(500, "x"), slow(0.01))
    outliers = gateway.gateway.load_tracker.outliers
    await asyncio.gather(*(gateway.chat() for _ in range(8)))
    assert len(bad.calls) >= 3
    assert gateway.gateway.metrics.ejections.value("m-0") == 1
    await until(lambda: outliers.phases(NOW()).get("m-0") == 1, what="half open")
    before, bad.script = len(bad.calls), slow(0.2)
    found = await asyncio.gather(*(gateway.chat() for _ in range(8)))
    assert [status for status, _, _ in found] == [200] * 8
    assert len(bad.calls) == before + 1
    assert outliers.phases(NOW())["m-0"] == 0


async def test_a_restarted_engine_is_used_as_soon_as_it_is_published(gateway: Running) -> None:
    engine, _ = await gateway.serve(chat, chat)
    await engine.kill()
    await asyncio.gather(*(gateway.chat() for _ in range(8)))
    assert gateway.gateway.load_tracker.outliers.is_open(EngineAddress("127.0.0.1", engine.port))
    await gateway.world.delete(keys.endpoint_key("mac-1", "m-0"))
    await gateway.knows("m", ready=1)
    await engine.start()
    await gateway.world.put(published(engine, "m"))
    await gateway.knows("m", ready=2)
    before = len(engine.calls)
    await until(lambda: not gateway.gateway.load_tracker.outliers.ejected(NOW()), what="the news")
    await asyncio.gather(*(gateway.chat() for _ in range(8)))
    assert len(engine.calls) > before


async def test_an_engine_tells_what_others_have_it_do(gateway: Running) -> None:
    async def tells(call: Call) -> None:
        # The fake reports "queued: 7" in every response.
        await call.answer(b"{}", x_fleet_in_flight="3", x_fleet_memory_free="40")

    await gateway.serve(tells)
    await gateway.chat()
    health = gateway.gateway.load_tracker.health(NOW())
    assert list(health.others_in_flight.values()) == [9.0]  # all but our own
    assert list(health.headroom.values()) == [0.4]


async def test_a_slow_engine_gets_a_rival(gateway: Running) -> None:
    hedging = {"after": "50ms", "budget": 50}
    late, _ = await gateway.serve(slow(30), chat, of=with_routing("m", hedging=hedging))
    status, _, response = await gateway.chat()
    assert (status, response.headers["x-fleet-replica"]) == (200, "m-1")
    await until(lambda: late.abandoned, what="the loser being cut")
    text = await gateway.metrics()
    assert 'hedges_total{outcome="asked"} 1' in text
    assert 'hedges_total{outcome="won"} 1' in text
    # So few requests allow one rival in ten seconds: this one waits for the engine that is asked first.
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(gateway.chat(stream=True))
        await until(lambda: len(late.calls) == 2, what="the second being asked")
        await late.kill()
    assert b"m-1" in waiting.result()[1]
    assert gateway.gateway.load_tracker.total() == 0


async def test_one_names_trouble_is_not_anothers(gateway: Running) -> None:
    """While one model's engines hang, another model is served as usual."""
    stopped = FakeEngine("a-0", gateway_engine_faults.says_nothing, health=None)
    (hung,) = await gateway.serve(stopped, of="a")
    await gateway.serve(chat, of="b")
    async with asyncio.TaskGroup() as group:
        stuck = [group.create_task(gateway.chat(model="a")) for _ in range(20)]
        await until(lambda: len(hung.calls) == 20, what="all hanging")
        found = [await gateway.chat(model="b") for _ in range(20)]
        assert {status for status, _, _ in found} == {200}
        for task in stuck:
            task.cancel()
    await until(lambda: gateway.gateway.load_tracker.total() == 0 or None, what="their leaving")
