"""Loads and unloads as clients of LM Studio and llama-swap ask for them."""

import asyncio
from typing import Any

from gateway.limits import GatewayLimits
from tests.support.gateway_calls import scaled_to_zero
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_world import Running, deployment, published, running_gateway
from tests.support.waiting import until

LOAD, UNLOAD = "/api/v1/models/load", "/api/v1/models/unload"


async def post(gateway: Running, path: str, body: object = None) -> tuple[int, Any]:
    async with gateway.post(path, json=body) as response:
        is_json = response.content_type == "application/json"
        return response.status, await (response.json() if is_json else response.text())


async def running(gateway: Running) -> list[str]:
    async with gateway.get("/running") as response:
        return [model["model"] for model in (await response.json())["running"]]


async def test_a_load_answers_when_the_model_is_ready_and_an_unload_ends_it() -> None:
    limits = GatewayLimits(drain_timeout_s=0.0)
    async with running_gateway(limits=limits) as gateway:
        await gateway.world.put(scaled_to_zero("m"), deployment("fixed"))
        await gateway.knows("m", ready=0)
        await gateway.knows("fixed", ready=0)
        (engine,) = await gateway.start(chat)
        activator = gateway.gateway.activator
        assert await running(gateway) == []
        async with asyncio.TaskGroup() as group:
            body = {"model": "m", "context_length": 1024, "echo_load_config": True}
            load = group.create_task(post(gateway, LOAD, body))
            await until(lambda: activator.demand().get("m") == 1, what="the demand")
            await gateway.world.put(published(engine, "m"))
        status, answer = load.result()
        assert status == 200
        assert answer.pop("load_time_seconds") > 0
        assert answer == {
            "type": "llm",
            "instance_id": "m",
            "status": "loaded",
            "load_config": {"context_length": 4096},
        }
        assert await running(gateway) == ["m"]

        assert await post(gateway, UNLOAD, {"instance_id": "m"}) == (200, {"instance_id": "m"})
        assert activator.releases() == {"m": 2}
        assert 'fleet_gateway_deployment_released{deployment="m"} 2' in await gateway.metrics()
        assert (await gateway.chat())[0] == 200
        assert activator.releases() == {}, "it is used again"
        assert await post(gateway, "/api/models/unload") == (200, {"msg": "ok"})
        assert activator.releases() == {"m": 2}
        assert await post(gateway, "/api/models/unload/m") == (200, "OK")

        refused: list[tuple[str, object, str]] = [
            (UNLOAD, {"instance_id": "fixed"}, "fixed always keeps a replica"),
            ("/api/models/unload/fixed", None, "fixed always keeps a replica"),
            (UNLOAD, {"instance_id": "none"}, "does not exist"),
            (LOAD, {"model": "m", "context_length": 9000}, "a context of 4096 tokens"),
            (LOAD, {"model": "m", "gpu": 1}, "Unknown field: 'gpu'"),
        ]
        for path, sent, words in refused:
            status, answer = await post(gateway, path, sent)
            assert status in (400, 404)
            assert words in str(answer["error"])
