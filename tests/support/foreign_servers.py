"""Servers that the fleet did not start: mlx_lm.server as a process, and another fleet's gateway over HTTPS."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from gateway.limits import GatewayLimits
from machinery.clock import SystemClock
from machinery.tls_server import ServerCertificate
from schemas.route import ModelRoute
from store.memory import MemoryTransport
from tests.support.gateway_calls import put_api_key
from tests.support.gateway_fake_engine import FakeEngine
from tests.support.gateway_world import Running, World, running_gateway
from tests.support.ports import free_port
from tests.support.store_certificates import Authority


def route_with(external: dict[str, Any], **spec: Any) -> ModelRoute:
    """Return the route `chat` with one external endpoint, its only backend if `spec` names none."""
    tree = {
        "apiVersion": "fleet/v1alpha1",
        "kind": "ModelRoute",
        "metadata": {"name": "chat"},
        "spec": {
            "model": "chat",
            "backends": [{"external": "outside"}],
            "external": [{"name": "outside", **external}],
            **spec,
        },
    }
    return ModelRoute.model_validate_json(orjson.dumps(tree))


@dataclass(frozen=True)
class MlxLmServer:
    """mlx_lm.server with a tiny model."""

    process: subprocess.Popen[bytes]
    url: str
    model: str

    async def wait_ready(self) -> None:
        async with aiohttp.ClientSession() as http:
            for _ in range(600):
                assert self.process.poll() is None, "mlx_lm.server ended"
                try:
                    async with http.get(f"{self.url}/v1/models") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.2)
        raise AssertionError("mlx_lm.server does not answer")


@contextmanager
def mlx_lm_server(folder: Path) -> Iterator[MlxLmServer]:
    """Start the server, and end it."""
    model, port = folder / "model", free_port()
    make = [sys.executable, "-m", "tests.support.tiny_model", str(model), "--endless"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model)]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
    try:
        yield MlxLmServer(process, f"http://127.0.0.1:{port}", str(model))
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class OtherFleet:
    """The gateway of another fleet, with HTTPS and keys."""

    running: Running
    authority: Authority
    engine: FakeEngine


@asynccontextmanager
async def other_fleet(folder: Path, engine: FakeEngine, key: str) -> AsyncIterator[OtherFleet]:
    """Start a gateway with HTTPS that asks for the key, before the engine of its model m."""
    world, authority = World(MemoryTransport(SystemClock())), Authority(folder, "theirs")
    files = authority.issue("gateway")
    limits = GatewayLimits(
        drain_timeout_s=0.0,
        asks_for_keys=True,
        certificate=ServerCertificate(files.certificate, files.key),
    )
    await put_api_key(world, key)
    async with running_gateway(world.transport, limits) as running:
        await world.serve("m", engine)
        await running.knows("m", ready=1)
        await running.knows_keys()
        yield OtherFleet(running, authority, engine)
