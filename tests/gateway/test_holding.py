"""Requests for a deployment at zero wait for a replica: not too many, not too long, not for nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from gateway.server import GatewayLimits
from schemas.autoscaling import Autoscaling
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.meta import Condition, ConditionStatus
from store import keys
from tests.gateway.fake_engine import FakeEngine, running
from tests.gateway.scripts import chat, dies_at_once
from tests.gateway.test_http import CHAT, error_of
from tests.gateway.world import Running, World, deployment, published, route, running_gateway
from tests.support.waiting import until


def sleeping(name: str, *served: str, **fields: object) -> ModelDeployment:
    made = deployment(name, *served)
    autoscaling = Autoscaling.model_validate({"minReplicas": 0, "maxReplicas": 2, **fields})
    return made.model_copy(
        update={"spec": made.spec.model_copy(update={"autoscaling": autoscaling})}
    )


@asynccontextmanager
async def holding(
    world: World, *, timeout_s: float = 20.0, limit: int = 64
) -> AsyncIterator[Running]:
    limits = GatewayLimits(drain_timeout_s=0.0, hold_timeout_s=timeout_s, hold_limit=limit)
    async with running_gateway(world.transport, limits) as gateway:
        yield gateway


async def waits(gateway: Running, number: int, of: str = "m") -> None:
    await until(
        lambda: gateway.gateway.room.waiting().get(of, 0) == number or None,
        what=f"{number} requests that wait",
    )


async def test_a_request_waits_for_the_first_replica(
    world: World, http: aiohttp.ClientSession
) -> None:
    async with holding(world) as gateway, running(FakeEngine("m-0", chat)) as engine:
        await world.put(sleeping("m", "fast"), route("r", "public", m=1))
        await gateway.knows("public", ready=0)

        async def ask(model: str) -> str:
            async with http.post(gateway.url + CHAT, json={"model": model}) as response:
                assert response.status == 200
                return str((await response.json())["choices"][0]["message"]["content"])

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(model)) for model in ("m", "fast", "public")]
            await waits(gateway, 3)
            async with http.get(f"{gateway.url}/metrics") as response:
                text = await response.text()
            assert 'fleet_gateway_deployment_waiting{deployment="m"} 3\n' in text
            # Another change of the table is not what they wait for.
            await world.put(deployment("other"))
            await gateway.knows("other", ready=0)
            await waits(gateway, 3)
            await world.put(published(engine, "m"))
        assert [task.result() for task in asked] == ["hello from m-0"] * 3
        await waits(gateway, 0)
        assert gateway.gateway.loads.by_deployment() == {"m": 0}


async def test_after_its_time_the_client_is_told_that_it_starts(
    world: World, http: aiohttp.ClientSession
) -> None:
    said = Condition(
        type="Progressing", status=ConditionStatus.TRUE, reason="Loading", message="1 of 1"
    )
    await world.put_status("m", ModelDeploymentStatus(conditions=(said,)))
    async with holding(world, timeout_s=0.2) as gateway:
        await world.put(sleeping("m"))
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
        await waits(gateway, 0)


async def test_one_too_many_is_turned_away_at_once(
    world: World, http: aiohttp.ClientSession
) -> None:
    async with holding(world, limit=1) as gateway:
        await world.put(sleeping("m"))
        await gateway.knows("m", ready=0)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(http.post(gateway.url + CHAT, json={"model": "m"}))
            await waits(gateway, 1)
            async with http.post(gateway.url + CHAT, json={"model": "m"}) as response:
                error = await error_of(response)
                assert (response.status, error["code"], error["type"]) == (
                    429,
                    "model_starting",
                    "rate_limit_error",
                )
                assert int(response.headers["retry-after"]) > 0
                assert error["message"] == (
                    "The model 'm' is starting, and 1 requests wait for it already; repeat the "
                    "request later."
                )
            # Who leaves waits no more, and makes room.
            first.cancel()
            await waits(gateway, 0)


@pytest.mark.parametrize(
    "declared",
    [
        pytest.param(deployment("m"), id="not-autoscaled"),
        pytest.param(sleeping("m", minReplicas=1), id="never-at-zero"),
    ],
)
async def test_who_is_not_at_zero_by_autoscaling_is_not_waited_for(
    world: World, http: aiohttp.ClientSession, declared: ModelDeployment
) -> None:
    async with holding(world) as gateway:
        await world.put(declared)
        await gateway.knows("m", ready=0)
        async with http.post(gateway.url + CHAT, json={"model": "m"}) as response:
            assert (await error_of(response))["code"] == "model_not_ready"


async def test_a_window_without_replicas_counts_as_well(world: World) -> None:
    window = {"start": "0 0 * * *", "end": "0 1 * * *", "minReplicas": 0}
    scaled = Autoscaling.model_validate_json(
        '{"maxReplicas":2,"schedule":[{"start":"0 0 * * *","end":"0 1 * * *","minReplicas":0}]}'
    )
    assert scaled.schedule[0].start == window["start"]
    made = sleeping("m")
    spec = made.spec.model_copy(update={"autoscaling": scaled})
    async with holding(world) as gateway:
        await world.put(made.model_copy(update={"spec": spec}))
        await gateway.knows("m", ready=0)
        assert gateway.gateway.keeper.table.models["m"].sleepers == ((1, "m"),)


async def test_a_replica_that_just_went_is_waited_for_again(
    world: World, http: aiohttp.ClientSession
) -> None:
    """The request came in the moment in which the last replica ended: nobody has seen it."""
    async with holding(world) as gateway, running(FakeEngine("m-1", chat)) as fresh:
        async with running(FakeEngine("m-0", chat)) as engine:
            await world.put(sleeping("m"), published(engine, "m"))
            await gateway.knows("m", ready=1)
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(http.post(gateway.url + CHAT, json={"model": "m"}))
            await waits(gateway, 1)
            await world.delete(keys.endpoint_key("mac-1", "m-0"))
            await world.put(published(fresh, "m"))
            response = await asked
            assert response.status == 200
            response.release()


async def test_a_request_that_an_engine_died_of_does_not_wait(
    world: World, http: aiohttp.ClientSession
) -> None:
    async with holding(world) as gateway, running(FakeEngine("m-0", dies_at_once)) as engine:
        await world.put(sleeping("m"), published(engine, "m"))
        await gateway.knows("m", ready=1)
        async with http.post(gateway.url + CHAT, json={"model": "m"}) as response:
            assert (response.status, (await error_of(response))["code"]) == (
                503,
                "upstream_failed",
            )
