"""Waiting for a replica: of a deployment that is scaled to zero, and of one whose engines start again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from gateway.server import GatewayLimits
from schemas.autoscaling import Autoscaling
from schemas.deployment import ModelDeployment, ModelDeploymentStatus, NodeRefusal
from schemas.meta import Condition, ConditionStatus
from schemas.routing import Queueing, Routing
from store import keys
from tests.support import gateway_engine_scripts
from tests.support.gateway_calls import (
    CHAT,
    error_of,
    post_chat,
    scaled_to_zero,
    wait_for_waiting,
)
from tests.support.gateway_engine_scripts import chat, dies_at_once
from tests.support.gateway_fake_engine import Call, FakeEngine, running
from tests.support.gateway_world import (
    Running,
    World,
    deployment,
    published,
    route,
    running_gateway,
)
from tests.support.waiting import until


@asynccontextmanager
async def holding(
    world: World, *, timeout_s: float = 20.0, limit: int = 64, keep_alive_s: float = 3.0
) -> AsyncIterator[Running]:
    limits = GatewayLimits(
        drain_timeout_s=0.0,
        keep_alive_s=keep_alive_s,
        hold_timeout_s=timeout_s,
        hold_limit=limit,
    )
    async with running_gateway(world.transport, limits) as gateway:
        yield gateway


async def test_a_request_waits_for_the_first_replica(
    world: World, http: aiohttp.ClientSession
) -> None:
    async with holding(world) as gateway, running(FakeEngine("m-0", chat)) as engine:
        await world.put(scaled_to_zero("m", "fast"), route("r", "public", m=1))
        await gateway.knows("public", ready=0)

        async def ask(model: str) -> str:
            async with http.post(gateway.url + CHAT, json={"model": model}) as response:
                assert response.status == 200
                return str((await response.json())["choices"][0]["message"]["content"])

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(model)) for model in ("m", "fast", "public")]
            await wait_for_waiting(gateway, 3)
            async with http.get(f"{gateway.url}/metrics") as response:
                text = await response.text()
            assert 'fleet_gateway_deployment_waiting{deployment="m"} 3\n' in text
            # They do not wait for this change of the table.
            await world.put(deployment("other"))
            await gateway.knows("other", ready=0)
            await wait_for_waiting(gateway, 3)
            await world.put(published(engine, "m"))
        assert [task.result() for task in asked] == ["hello from m-0"] * 3
        await wait_for_waiting(gateway, 0)
        assert gateway.gateway.load_tracker.by_deployment() == {"m": 0}


async def test_after_the_wait_the_client_learns_that_the_model_starts(
    world: World, http: aiohttp.ClientSession
) -> None:
    said = Condition(
        type="Progressing", status=ConditionStatus.TRUE, reason="Loading", message="1 of 1"
    )
    await world.put_status("m", ModelDeploymentStatus(conditions=(said,)))
    async with holding(world, timeout_s=0.2) as gateway:
        await world.put(scaled_to_zero("m"))
        await gateway.knows("m", ready=0)
        async with http.post(gateway.url + CHAT, json={"model": "m"}) as response:
            error = await error_of(response)
            assert (response.status, error["code"], error["type"]) == (
                503,
                "model_starting",
                "server_error",
            )
            assert int(response.headers["retry-after"]) > 0
            assert error["message"] == (
                "The model 'm' is starting and was not ready within 0.2 s; repeat the request. "
                "ModelDeployment m: Loading: 1 of 1."
            )
        await wait_for_waiting(gateway, 0)


async def test_one_too_many_is_turned_away_at_once(
    world: World, http: aiohttp.ClientSession
) -> None:
    async with holding(world, limit=1) as gateway:
        await world.put(scaled_to_zero("m"))
        await gateway.knows("m", ready=0)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(http.post(gateway.url + CHAT, json={"model": "m"}))
            await wait_for_waiting(gateway, 1)
            async with http.post(gateway.url + CHAT, json={"model": "m"}) as response:
                error = await error_of(response)
                assert (response.status, error["code"], error["type"]) == (
                    429,
                    "model_starting",
                    "rate_limit_error",
                )
                assert int(response.headers["retry-after"]) > 0
                assert error["message"] == (
                    "1 requests wait for a replica of 'm' already, the limit of --hold-limit; repeat "
                    "the request later."
                )
            # A client that leaves makes room.
            first.cancel()
            await wait_for_waiting(gateway, 0)


def available(reason: str) -> ModelDeploymentStatus:
    said = Condition(type="Available", status=ConditionStatus.FALSE, reason=reason, message="x")
    return ModelDeploymentStatus(conditions=(said,))


@pytest.mark.parametrize(
    "declared",
    [
        pytest.param(deployment("m"), id="not-autoscaled"),
        pytest.param(scaled_to_zero("m", minReplicas=1), id="never-at-zero"),
    ],
)
async def test_a_new_deployment_is_waited_for_unless_it_cannot_run(
    world: World, http: aiohttp.ClientSession, declared: ModelDeployment
) -> None:
    async with holding(world) as gateway, running(FakeEngine("m-0", chat)) as engine:
        await world.put(declared)
        await gateway.knows("m", ready=0)
        async with asyncio.TaskGroup() as group:
            early = group.create_task(status_of(http, gateway))  # nothing is reported yet
            await wait_for_waiting(gateway, 1)
            await world.put_status("m", available("ReplicasStarting"))
            late = group.create_task(status_of(http, gateway))
            await wait_for_waiting(gateway, 2)
            await world.put_status("m", available("Unschedulable"))
            assert [await early, await late] == [503, 503]
            async with http.post(gateway.url + CHAT, json={"model": "m"}) as response:
                error = await error_of(response)
                assert error["code"] == "model_not_ready"
                assert "ModelDeployment m: Unschedulable: x" in error["message"]
            # Its agent has not looked at the folder yet.
            refused = NodeRefusal(node="mac-1", reason="ModelNotInspected", message="x")
            looking = available("Unschedulable").model_copy(update={"refusals": (refused,)})
            await world.put_status("m", looking)
            table_cache = gateway.gateway.table_cache
            await until(lambda: bool(table_cache.table.models["m"].awaited), what="the status")
            last = group.create_task(status_of(http, gateway))
            await wait_for_waiting(gateway, 1)
            await world.put(published(engine, "m"))
            assert await last == 200


def contents(call: Call) -> int:
    return int(orjson.loads(call.body)["messages"][0]["content"])


async def ask_numbered(http: aiohttp.ClientSession, gateway: Running, number: int) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": str(number)}]}
    async with http.post(gateway.url + CHAT, json=body) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize(
    ("declared", "concurrency"),
    [(scaled_to_zero("m"), 1), (deployment("m"), 4)],
    ids=["zero", "new"],
)
async def test_a_burst_is_released_into_free_slots_oldest_first(
    world: World, http: aiohttp.ClientSession, declared: ModelDeployment, concurrency: int
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

    async with holding(world) as gateway, running(FakeEngine("m-0", strict)) as engine:
        await world.put(declared)
        await gateway.knows("m", ready=0)
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number in range(40):
                tasks.append(group.create_task(ask_numbered(http, gateway, number)))
                await wait_for_waiting(gateway, number + 1)
            endpoint = published(engine, "m")
            spec = endpoint.spec.model_copy(update={"concurrency": concurrency})
            await world.put(endpoint.model_copy(update={"spec": spec}))
        assert [task.result() for task in tasks] == [200] * 40
        # Requests that are sent in one moment may overtake each other on their connections.
        assert all(abs(number - at) < concurrency for at, number in enumerate(arrived))
        assert (most, len(engine.calls)) == (concurrency, 40)  # none was refused
        await wait_for_waiting(gateway, 0)


async def test_requests_that_are_turned_away_for_now_wait_in_their_order(
    world: World, http: aiohttp.ClientSession
) -> None:
    """The only engine drains, and then another one serves."""
    order: list[int] = []

    async def draining(call: Call) -> None:
        await call.answer(b'{"error":{"message":"ends","code":"draining"}}', 503)

    async def serving(call: Call) -> None:
        order.append(contents(call))
        await chat(call)

    async with (
        holding(world) as gateway,
        running(FakeEngine("m-0", draining)) as old,
        running(FakeEngine("m-1", serving)) as new,
    ):
        await world.put(deployment("m"), published(old, "m"))
        await gateway.knows("m", ready=1)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(ask_numbered(http, gateway, 1))
            await wait_for_waiting(gateway, 1)
            second = group.create_task(ask_numbered(http, gateway, 2))
            await wait_for_waiting(gateway, 2)
            await until(lambda: len(old.calls) > 1, what="another attempt of the first request")
            await world.delete(keys.endpoint_key("mac-1", "m-0"))
            await world.put(published(new, "m"))
            assert [await first, await second] == [200, 200]
        assert order == [1, 2]


async def withdrawn(world: World, gateway: Running) -> None:
    """The agent has withdrawn the replica, before any request met the dead engine."""
    await world.delete(keys.endpoint_key("mac-1", "m-0"))
    await gateway.knows("m", ready=0)
    for endpoint in tuple(gateway.gateway.table_cache.table.models["m"].backends[0].orphans):
        gateway.gateway.table_cache.drop_orphan(endpoint)


async def test_a_deployment_whose_replicas_all_start_again_is_waited_for(
    world: World, http: aiohttp.ClientSession
) -> None:
    async with holding(world) as gateway, running(FakeEngine("m-1", chat)) as fresh:
        async with running(FakeEngine("m-0", chat)) as engine:
            await world.put(deployment("m"), published(engine, "m"))
            await gateway.knows("m", ready=1)
        await withdrawn(world, gateway)
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(http.post(gateway.url + CHAT, json={"model": "m"}))
            await wait_for_waiting(gateway, 1)
            await world.put(published(fresh, "m"))
            response = await asked
            assert response.status == 200
            response.release()


@pytest.mark.ci
async def test_after_the_wait_the_client_learns_what_the_replicas_report(
    world: World, http: aiohttp.ClientSession
) -> None:
    told = (
        Condition(
            type="Available",
            status=ConditionStatus.FALSE,
            reason="ReplicaNotReady",
            message="0 of 1 replicas ready; m-0 on mac-1: Loading",
        ),
        Condition(
            type="Progressing",
            status=ConditionStatus.TRUE,
            reason="RolloutComplete",
            message="every replica runs revision 1",
        ),
    )
    limits = GatewayLimits(drain_timeout_s=0.0, resume_timeout_s=0.3)
    async with running_gateway(world.transport, limits) as gateway:
        async with running(FakeEngine("m-0", chat)) as engine:
            await world.put(deployment("m"), published(engine, "m"))
            await gateway.knows("m", ready=1)
        await world.put_status("m", ModelDeploymentStatus(conditions=told))
        await world.delete(keys.endpoint_key("mac-1", "m-0"))
        await gateway.knows("m", ready=0)
        errors_: list[dict[str, Any]] = []
        for _ in range(2):  # the first meets the dead engine, the second no endpoint at all
            began_s = asyncio.get_running_loop().time()
            async with http.post(gateway.url + CHAT, json={"model": "m"}) as response:
                errors_.append(await error_of(response))
            assert response.status == 503
            assert asyncio.get_running_loop().time() - began_s >= 0.3
        error = errors_[-1]
        assert error["code"] == "model_not_ready"
        assert "ReplicaNotReady: 0 of 1 replicas ready; m-0 on mac-1: Loading" in error["message"]
        assert "RolloutComplete" not in error["message"]
        # Scaled to 0 on purpose: waiting is of no use.
        await world.put(deployment("m", replicas=0))
        await until(
            lambda: not gateway.gateway.table_cache.table.models["m"].recovering,
            what="the change",
        )
        async with http.post(gateway.url + CHAT, json={"model": "m"}) as response:
            assert "is scaled to 0 replicas" in (await error_of(response))["message"]


async def test_a_deployment_says_how_long_its_requests_wait(
    world: World, http: aiohttp.ClientSession
) -> None:
    """Its engines take longer to start than those of others: the first request is answered all the same."""
    patient = deployment("m")
    routing = Routing(queueing=Queueing(cold_start="60s"))
    patient = patient.model_copy(
        update={"spec": patient.spec.model_copy(update={"routing": routing})}
    )
    limits = GatewayLimits(drain_timeout_s=0.0, resume_timeout_s=0.0)
    async with running_gateway(world.transport, limits) as gateway:
        async with running(FakeEngine("m-0", chat)) as engine:
            await world.put(patient, published(engine, "m"))
            await gateway.knows("m", ready=1)
        await withdrawn(world, gateway)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(status_of(http, gateway))
            await wait_for_waiting(gateway, 1)
            async with running(FakeEngine("m-0", chat)) as engine:
                await world.put(published(engine, "m"))
                assert await waiting == 200


async def status_of(http: aiohttp.ClientSession, gateway: Running) -> int:
    async with http.post(gateway.url + CHAT, json={"model": "m"}) as response:
        await response.read()
        return response.status


async def test_a_window_without_replicas_counts_as_well(world: World) -> None:
    window = {"start": "0 0 * * *", "end": "0 1 * * *", "minReplicas": 0}
    scaled = Autoscaling.model_validate_json(
        '{"maxReplicas":2,"schedule":[{"start":"0 0 * * *","end":"0 1 * * *","minReplicas":0}]}'
    )
    assert scaled.schedule[0].start == window["start"]
    made = scaled_to_zero("m")
    spec = made.spec.model_copy(update={"autoscaling": scaled})
    async with holding(world) as gateway:
        await world.put(made.model_copy(update={"spec": spec}))
        await gateway.knows("m", ready=0)
        assert gateway.gateway.table_cache.table.models["m"].awaited == ((1, "m"),)


async def test_a_replica_that_just_went_is_waited_for_again(
    world: World, http: aiohttp.ClientSession
) -> None:
    """The request arrived in the moment in which the last replica ended, before the table showed it."""
    async with holding(world) as gateway, running(FakeEngine("m-1", chat)) as fresh:
        async with running(FakeEngine("m-0", chat)) as engine:
            await world.put(scaled_to_zero("m"), published(engine, "m"))
            await gateway.knows("m", ready=1)
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(http.post(gateway.url + CHAT, json={"model": "m"}))
            await wait_for_waiting(gateway, 1)
            await world.delete(keys.endpoint_key("mac-1", "m-0"))
            await world.put(published(fresh, "m"))
            response = await asked
            assert response.status == 200
            response.release()


@pytest.mark.ci
async def test_a_request_that_an_engine_died_of_does_not_wait(
    world: World, http: aiohttp.ClientSession
) -> None:
    async with holding(world) as gateway, running(FakeEngine("m-0", dies_at_once)) as engine:
        await world.put(scaled_to_zero("m"), published(engine, "m"))
        await gateway.knows("m", ready=1)
        async with http.post(gateway.url + CHAT, json={"model": "m"}) as response:
            assert (response.status, (await error_of(response))["code"]) == (
                503,
                "upstream_failed",
            )


async def test_a_cold_model_keeps_streams_alive(world: World, http: aiohttp.ClientSession) -> None:
    async with (
        holding(world, keep_alive_s=0.05) as gateway,
        running(FakeEngine("m-0", chat)) as engine,
    ):
        await world.put(scaled_to_zero("m"))
        await gateway.knows("m", ready=0)
        body = {"model": "m", "stream": True}
        async with http.post(gateway.url + CHAT, json=body) as response:
            assert response.status == 200
            assert await response.content.readexactly(11) == b": waiting\n\n"
            await wait_for_waiting(gateway, 1)
            await world.put(published(engine, "m"))
            text = (await response.read()).replace(b": waiting\n\n", b"")
        assert b"m-0" in text
        assert text.endswith(gateway_engine_scripts.DONE)


async def test_a_model_that_stays_cold_is_an_event_at_the_end(
    world: World, http: aiohttp.ClientSession
) -> None:
    async with holding(world, timeout_s=0.3, keep_alive_s=0.05) as gateway:
        await world.put(scaled_to_zero("m"))
        await gateway.knows("m", ready=0)
        status, text, _ = await post_chat(http, gateway, stream=True)
        assert status == 200
        assert text.startswith(b": waiting\n\n")
        assert b'"code":"model_starting"' in text
