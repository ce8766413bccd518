"""Helpers for tests with a listening gateway: requests, deployments, keys, metrics."""

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from gateway.limits import GatewayLimits
from schemas.autoscaling import Autoscaling
from schemas.deployment import ModelDeployment
from schemas.routing import Routing
from tests.support.gateway_engine_scripts import DONE, delta
from tests.support.gateway_world import (
    CHAT,
    Running,
    deployment,
    put_api_key,
    target,
)
from tests.support.waiting import until, until_async

__all__ = ["CHAT", "put_api_key"]


def with_routing(name: str, **routing: Any) -> ModelDeployment:
    """Return a deployment with these fields of `spec.routing`."""
    made = deployment(name)
    declared = Routing.model_validate_json(orjson.dumps(routing))
    return made.model_copy(update={"spec": made.spec.model_copy(update={"routing": declared})})


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    assert response.content_type == "application/json"
    body: dict[str, dict[str, Any]] = orjson.loads(await response.read())
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def scaled_to_zero(name: str, *served: str, **fields: object) -> ModelDeployment:
    made = deployment(name, *served)
    autoscaling = Autoscaling.model_validate({"minReplicas": 0, "maxReplicas": 2, **fields})
    return made.model_copy(
        update={"spec": made.spec.model_copy(update={"autoscaling": autoscaling})}
    )


async def wait_for_waiting(gateway: Running, number: int, of: str = "m") -> None:
    await until(
        lambda: gateway.gateway.activator.waiting().get(of, 0) == number or None,
        what=f"{number} requests that wait",
    )


def usage_event(number: int) -> bytes:
    body = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": number}}
    return b"data: " + orjson.dumps(body) + b"\n\n"


def version_counts(gateway: Running) -> dict[str, int]:
    counts = gateway.gateway.versions.of(target("m-0", template=""))
    outcomes = {name: getattr(counts, name) for name in ("ok", "error", "refused", "client_gone")}
    return {name: number for name, number in outcomes.items() if number}


@asynccontextmanager
async def gateway_process(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *flags, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def send_chats(
    http: aiohttp.ClientSession, gateway: Running, count: int, **body: Any
) -> None:
    for _ in range(count):
        async with http.post(gateway.url + CHAT, json={"model": "m", **body}) as response:
            await response.read()


async def streams_three_tokens(call: Any) -> None:
    """Stream three tokens, with usage."""
    await call.begin_stream()
    for word in ("a", "b", "c"):
        await call.chunk(delta(word))
        await asyncio.sleep(0.002)
    await call.chunk(usage_event(3) + DONE)
    await call.send(b"0\r\n\r\n")


SECRET, ADMIN = "sk-fleet-abc", "sk-fleet-admin"


KEYS_REQUIRED = GatewayLimits(drain_timeout_s=0.0, asks_for_keys=True)


async def wait_for_gateway(
    http: aiohttp.ClientSession, url: str, *, tls: ssl.SSLContext | None = None
) -> None:
    """Wait until a gateway process knows the model m."""

    async def is_ready() -> bool:
        try:
            async with http.get(f"{url}/health", ssl=tls or True) as response:
                return "m" in (await response.json())["models"]
        except aiohttp.ClientError:
            return False

    await until_async(is_ready, limit_s=60, what="the gateway")
