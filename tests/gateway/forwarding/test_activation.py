"""Waiting for a replica: of a deployment that is scaled to zero, and of one whose engines start again."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from gateway.limits import GatewayLimits
from machinery.clock import SystemClock
from schemas.autoscaling import Autoscaling, LoadForecast
from schemas.deployment import (
    ModelDeployment,
    ModelDeploymentStatus,
    NodeRefusal,
)
from schemas.meta import Condition, ConditionStatus
from schemas.route import ModelRoute
from store import keys
from tests.support.gateway_calls import scaled_to_zero, wait_for_waiting, with_routing
from tests.support.gateway_engine_scripts import DONE, chat, dies_at_once
from tests.support.gateway_fake_engine import Call
from tests.support.gateway_world import Running, deployment, published, route, running_gateway
from tests.support.waiting import until


@asynccontextmanager
async def holding(*objects: ModelDeployment | ModelRoute, **limits: Any) -> AsyncIterator[Running]:
    """Run a gateway that knows the objects, none of which has a replica."""
    limits = {"hold_timeout_s": 20.0, "keep_alive_s": 3.0, "drain_timeout_s": 0.0, **limits}
    async with running_gateway(limits=GatewayLimits(**limits)) as gateway:
        await gateway.world.put(*objects)
        await gateway.knows("m", ready=0)
        yield gateway


async def ask(gateway: Running, text: str = "hi", model: str = "m") -> int:
    status, _, _ = await gateway.chat(model=model, messages=[{"role": "user", "content": text}])
    return status


def condition(kind: str, reason: str, status: ConditionStatus) -> ModelDeploymentStatus:
    said = Condition(type=kind, status=status, reason=reason, message="x")
    return ModelDeploymentStatus(conditions=(said,))


async def test_requests_wait_for_the_first_replica() -> None:
    async with holding(scaled_to_zero("m", "fast"), route("r", "public", m=1)) as gateway:
        await gateway.knows("public", ready=0)
        (engine,) = await gateway.start(chat)
        async with asyncio.TaskGroup() as group:
            names = ("m", "fast", "public")
            asked = [group.create_task(ask(gateway, model=name)) for name in names]
            await wait_for_waiting(gateway, 3)
            waiting = 'fleet_gateway_deployment_waiting{deployment="m"} 3\n'
            assert waiting in await gateway.metrics()
            # They do not wait for this change of the table.
            await gateway.world.put(deployment("other"))
            await gateway.knows("other", ready=0)
            await wait_for_waiting(gateway, 3)
            await gateway.world.put(published(engine, "m"))
        assert [task.result() for task in asked] == [200] * 3
        await wait_for_waiting(gateway, 0)
        assert gateway.gateway.load_tracker.by_deployment() == {"m": 0}


async def test_after_the_wait_the_client_learns_that_the_model_starts() -> None:
    async with holding(scaled_to_zero("m"), hold_timeout_s=0.2) as gateway:
        status = condition("Progressing", "Loading", ConditionStatus.TRUE)
        await gateway.world.put_status("m", status)
        table_cache = gateway.gateway.table_cache
        await until(lambda: "Loading" in table_cache.table.models["m"].reason, what="the status")
        code, body, response = await gateway.chat()
        error = body["error"]
        assert (code, error["code"], error["type"]) == (503, "model_starting", "server_error")
        assert int(response.headers["retry-after"]) > 0
        assert error["message"] == (
            "The model 'm' is starting and was not ready within 0.2 s; repeat the request. "
            "ModelDeployment m: Loading: x."
        )
        await wait_for_waiting(gateway, 0)


async def test_one_too_many_is_turned_away_at_once() -> None:
    async with holding(scaled_to_zero("m"), hold_limit=1) as gateway, asyncio.TaskGroup() as group:
        first = group.create_task(gateway.chat())
        await wait_for_waiting(gateway, 1)
        status, body, response = await gateway.chat()
        error = body["error"]
        assert (status, error["code"], error["type"]) == (429, "model_starting", "rate_limit_error")
        assert int(response.headers["retry-after"]) > 0
        assert "1 requests wait for a replica of 'm' already" in error["message"]
        # A client that leaves makes room.
        first.cancel()
        await wait_for_waiting(gateway, 0)


@pytest.mark.parametrize(
    "declared",
    [
        pytest.param(deployment("m"), id="not-autoscaled"),
        pytest.param(scaled_to_zero("m", minReplicas=1), id="never-at-zero"),
    ],
)
async def test_a_new_deployment_is_waited_for_unless_it_cannot_run(
    declared: ModelDeployment,
) -> None:
    starting, unschedulable = (
        condition("Available", reason, ConditionStatus.FALSE)
        for reason in ("ReplicasStarting", "Unschedulable")
    )
    async with holding(declared) as gateway, asyncio.TaskGroup() as group:
        (engine,) = await gateway.start(chat)
        early = group.create_task(ask(gateway))  # nothing is reported yet
        await wait_for_waiting(gateway, 1)
        await gateway.world.put_status("m", starting)
        late = group.create_task(ask(gateway))
        await wait_for_waiting(gateway, 2)
        await gateway.world.put_status("m", unschedulable)
        assert [await early, await late] == [503, 503]
        _, body, _ = await gateway.chat()
        assert body["error"]["code"] == "model_not_ready"
        assert "ModelDeployment m: Unschedulable: x" in body["error"]["message"]
        # Its agent has not looked at the folder yet.
        refused = NodeRefusal(node="mac-1", reason="ModelNotInspected", message="x")
        looking = unschedulable.model_copy(update={"refusals": (refused,)})
        await gateway.world.put_status("m", looking)
        table_cache = gateway.gateway.table_cache
        await until(lambda: bool(table_cache.table.models["m"].awaited), what="the status")
        last = group.create_task(ask(gateway))
        await wait_for_waiting(gateway, 1)
        await gateway.world.put(published(engine, "m"))
        assert await last == 200


def contents(call: Call) -> int:
    return int(orjson.loads(call.body)["messages"][0]["content"])


@pytest.mark.parametrize(
    ("declared", "concurrency"),
    [(scaled_to_zero("m"), 1), (deployment("m"), 4)],
    ids=["zero", "new"],
)
async def test_a_burst_is_released_into_free_slots_oldest_first(
    declared: ModelDeployment, concurrency: int
) -> None:
    """40 requests wait for a first replica, which takes few at once and refuses more."""
    arrived: list[int] = []
    in_flight: set[int] = set()
    most = 0

    async def strict(call: Call) -> None:
        nonlocal most
        number = contents(call)
        if len(in_flight) >= concurrency:
            await call.answer(b'{"error":{"message":"full","code":"queue_full"}}', 429)
            return
        in_flight.add(number)
        most = max(most, len(in_flight))
        arrived.append(number)
        await asyncio.sleep(0.02)
        in_flight.remove(number)
        await chat(call)

    async with holding(declared) as gateway:
        (engine,) = await gateway.start(strict)
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number in range(40):
                tasks.append(group.create_task(ask(gateway, str(number))))
                await wait_for_waiting(gateway, number + 1)
            endpoint = published(engine, "m")
            spec = endpoint.spec.model_copy(update={"concurrency": concurrency})
            await gateway.world.put(endpoint.model_copy(update={"spec": spec}))
        assert [task.result() for task in tasks] == [200] * 40
        # Requests that are sent in one moment may overtake each other on their connections.
        assert all(abs(number - at) < concurrency for at, number in enumerate(arrived))
        assert (most, len(engine.calls)) == (concurrency, 40)  # none was refused
        await wait_for_waiting(gateway, 0)


async def test_requests_that_are_turned_away_for_now_wait_in_their_order(gateway: Running) -> None:
    """The only engine drains, and then another one serves."""
    order: list[int] = []

    async def draining(call: Call) -> None:
        await call.answer(b'{"error":{"message":"ends","code":"draining"}}', 503)

    async def serving(call: Call) -> None:
        order.append(contents(call))
        await chat(call)

    old, new = await gateway.start(draining, serving)
    await gateway.world.put(deployment("m"), published(old, "m"))
    await gateway.knows("m", ready=1)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(ask(gateway, "1"))
        await wait_for_waiting(gateway, 1)
        second = group.create_task(ask(gateway, "2"))
        await wait_for_waiting(gateway, 2)
        await until(lambda: len(old.calls) > 1, what="another attempt of the first request")
        await gateway.world.delete(keys.endpoint_key("mac-1", "m-0"))
        await gateway.world.put(published(new, "m"))
        assert [await first, await second] == [200, 200]
    assert order == [1, 2]


async def test_a_deployment_says_how_long_its_requests_wait() -> None:
    """Its engines take longer to start than those of others: the first request is answered all the same."""
    patient = with_routing("m", queueing={"coldStart": "60s"})
    async with holding(patient, resume_timeout_s=0.0) as gateway:
        (engine,) = await gateway.serve(chat, of=patient)
        # The agent has withdrawn the replica, before any request met the dead engine.
        await engine.kill()
        await gateway.world.delete(keys.endpoint_key("mac-1", "m-0"))
        await gateway.knows("m", ready=0)
        for endpoint in tuple(gateway.gateway.table_cache.table.models["m"].backends[0].orphans):
            gateway.gateway.table_cache.drop_orphan(endpoint)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(ask(gateway))
            await wait_for_waiting(gateway, 1)
            await engine.start()
            await gateway.world.put(published(engine, "m"))
        assert waiting.result() == 200


async def test_a_window_without_replicas_counts_as_well() -> None:
    window = '{"start":"0 0 * * *","end":"0 1 * * *","minReplicas":0}'
    scaled = Autoscaling.model_validate_json(f'{{"maxReplicas":2,"schedule":[{window}]}}')
    made = scaled_to_zero("m")
    spec = made.spec.model_copy(update={"autoscaling": scaled})
    async with holding(made.model_copy(update={"spec": spec})) as gateway:
        assert gateway.gateway.table_cache.table.models["m"].awaited == ((1, "m"),)


async def test_a_replica_that_just_went_is_waited_for_again(gateway: Running) -> None:
    """The request arrived in the moment in which the last replica ended, before the table showed it."""
    (engine,) = await gateway.serve(chat, of=scaled_to_zero("m"))
    await engine.kill()
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(ask(gateway))
        await wait_for_waiting(gateway, 1)
        await gateway.world.delete(keys.endpoint_key("mac-1", "m-0"))
        await engine.start()
        await gateway.world.put(published(engine, "m"))
    assert asked.result() == 200


@pytest.mark.ci
async def test_a_request_that_an_engine_died_of_does_not_wait(gateway: Running) -> None:
    await gateway.serve(dies_at_once, of=scaled_to_zero("m"))
    status, body, _ = await gateway.chat()
    assert (status, body["error"]["code"]) == (503, "upstream_failed")


async def test_a_cold_model_keeps_streams_alive() -> None:
    async with holding(scaled_to_zero("m"), keep_alive_s=0.05) as gateway:
        (engine,) = await gateway.start(chat)
        async with gateway.post(json={"model": "m", "stream": True}) as response:
            assert response.status == 200
            assert await response.content.readexactly(11) == b": waiting\n\n"
            await wait_for_waiting(gateway, 1)
            await gateway.world.put(published(engine, "m"))
            text = (await response.read()).replace(b": waiting\n\n", b"")
        assert b"m-0" in text
        assert text.endswith(DONE)


def loading(seconds: float, *gives_way: str) -> ModelDeploymentStatus:
    since = SystemClock().now()
    return ModelDeploymentStatus(
        loading=LoadForecast(seconds=seconds, since=since, gives_way=gives_way)
    )


async def test_clients_learn_how_long_the_model_loads() -> None:
    """Streams by a comment, one too many by `Retry-After`, Ollama's clients by `load_duration`."""
    limits = {"keep_alive_s": 0.05, "hold_limit": 2, "hold_timeout_s": 20.0}
    async with holding(scaled_to_zero("m"), **limits) as gateway:
        await gateway.world.put_status("m", loading(400, "qwen-0"))
        knows = gateway.gateway.table_cache.load_forecast
        await until(lambda: knows("m") is not None, what="the status")
        (engine,) = await gateway.start(chat)
        chats = {"model": "m", "stream": False, "messages": [{"role": "user", "content": "x"}]}

        async def ask_ollama() -> Any:
            async with gateway.post("/api/chat", json=chats) as answer:
                return await answer.json()

        async with (
            asyncio.TaskGroup() as group,
            gateway.post(json={"model": "m", "stream": True}) as response,
        ):
            line = await response.content.readline()
            assert re.fullmatch(rb": loading in (400|39\d) s: qwen-0 gives way\n", line)
            ollama = group.create_task(ask_ollama())
            await wait_for_waiting(gateway, 2)
            status, body, refused = await gateway.chat()
            assert (status, body["error"]["code"]) == (429, "model_starting")
            assert 300 < int(refused.headers["retry-after"]) <= 400
            await gateway.world.put(published(engine, "m"))
            assert (await response.read()).endswith(DONE)
        assert 0 < ollama.result()["load_duration"] <= ollama.result()["total_duration"]


async def test_a_model_that_stays_cold_is_an_event_at_the_end() -> None:
    limits = {"hold_timeout_s": 0.3, "keep_alive_s": 0.05}
    async with holding(scaled_to_zero("m"), **limits) as gateway:
        status, text, _ = await gateway.chat(stream=True)
        assert status == 200
        assert text.startswith(b": waiting\n\n")
        assert b'"code":"model_starting"' in text
