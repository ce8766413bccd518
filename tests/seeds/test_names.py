"""mlx-serving's names at a gateway with `--compat-names`: its health, its code of an error, and its metrics."""

import json
import re
from typing import Any

import orjson
import pytest

from gateway.limits import GatewayLimits
from machinery.clock import SystemClock
from store.memory import MemoryTransport
from tests.seeds import literals
from tests.support.gateway_calls import CHAT, error_of, send_chats
from tests.support.gateway_engine_scripts import chat
from tests.support.gateway_world import World, deployment, running_gateway

METRICS = re.findall(r"^# TYPE (\w+ \w+)", literals.SERVING_METRICS.text, re.MULTILINE)
HEALTH = set(re.findall(r'"(\w+)":', literals.SERVING_HEALTH.text))
(CODE,) = re.findall(r'"code": "(\w+)"', literals.SERVING_STREAM.text)
(PHRASE,) = re.findall(r'"error": "([\w ]+)"', literals.SERVING_STREAM.text)


@pytest.mark.parametrize("is_on", [True, False])
async def test_names_of_mlx_serving_are_used_with_the_flag_alone(is_on: bool) -> None:
    world = World(MemoryTransport(SystemClock()))
    limits = GatewayLimits(drain_timeout_s=0.0, hold_timeout_s=0.0, has_compat_names=is_on)
    async with running_gateway(world.transport, limits) as gateway:
        await gateway.serve(chat)
        await world.put(deployment("later"))
        await gateway.knows("m", ready=1)
        await gateway.knows("later", ready=0)
        await send_chats(gateway.http, gateway, 2)

        async def text(path: str) -> str:
            async with gateway.get(path) as response:
                assert response.status == 200
                return str(await response.text())

        async def refused(model: str, path: str = CHAT) -> dict[str, Any]:
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
            async with gateway.post(path, data=orjson.dumps(body)) as response:
                assert response.status in (404, 503)
                return await error_of(response)

        health, metrics = json.loads(await text("/health")), await text("/metrics")
        codes = [(await refused(model))["code"] for model in ("unknown", "later")]
        message = (await refused("unknown"))["message"]
        async with gateway.get("/v1/models/unknown") as response:
            codes.append((await error_of(response))["code"])
        if not is_on:
            assert health["status"] == "ok"
            assert "mlx_worker" not in metrics
            assert CODE not in codes
            assert "fleet_gateway_requests_total" in metrics
            return
        assert (health["status"], health["worldSize"], health["queueDepth"]) == ("healthy", 1, 0)
        assert set(health) >= HEALTH == {"status", "workerId", "uptime", "metrics"}
        assert health["metrics"]["totalRequestsHandled"] == 2
        # What the gateway tells without the flag is there, too.
        assert (health["modelsReady"], health["endpoints"]) == (1, 1)
        assert re.findall(r"^# TYPE (mlx_worker\w+ \w+)", metrics, re.MULTILINE) == METRICS
        assert 'mlx_worker_active_requests{worker_id="mac-1"} 0\n' in metrics
        assert 'mlx_worker_total_requests{worker_id="mac-1"} 2\n' in metrics
        assert codes == [CODE] * 3
        assert message.startswith(f"{PHRASE}: The model 'unknown' does not exist.")


async def test_names_of_models_are_told_only_to_keys_that_may_know_them() -> None:
    world = World(MemoryTransport(SystemClock()))
    limits = GatewayLimits(drain_timeout_s=0.0, asks_for_keys=True, has_compat_names=True)
    async with running_gateway(world.transport, limits) as gateway:
        await gateway.serve(chat)
        async with gateway.get("/health") as response:
            health = await response.json()
        assert (health["status"], health["modelsReady"], "models" in health) == (
            "healthy",
            1,
            False,
        )
        assert health["metrics"]["modelsLoaded"] == []
