"""A real engine behind a gateway: a tiny model with random weights and embeddings."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from gateway.limits import GatewayLimits
from gateway.telemetry.recorder import Tracer
from machinery.clock import SystemClock
from store.memory import MemoryTransport
from tests.support.engine_forks import forking
from tests.support.engine_process import START_S, Engine, eventually
from tests.support.gateway_world import Running, World, deployment, endpoint, running_gateway


@contextmanager
def tiny_engine(folder: Path, *, has_markers: bool = True, **flags: object) -> Iterator[Engine]:
    """Start the engine, with these flags beside the usual ones, and end it.

    `has_markers`: False for a model that neither thinks nor has tokens around tool calls.
    """
    cache = folder / "blas"
    cache.mkdir(mode=0o700)
    model = folder / "model"
    command = [sys.executable, "-m", "tests.support.tiny_model", str(model), "--endless"]
    command += [] if has_markers else ["--no-markers"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    # The format of sentence-transformers; the model still has its head and generates.
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listing = [
        {"idx": at, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds)
    ]
    (model / "modules.json").write_text(json.dumps(listing))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    with forking(folder, cache) as start:
        engine = start(model, **flags)
        eventually(engine.is_ready, within_s=START_S)
        yield engine


@asynccontextmanager
async def in_front_of(
    engine: Engine, tracer: Tracer | None = None, limits: GatewayLimits | None = None
) -> AsyncIterator[Running]:
    """Start a gateway that serves the engine."""
    world = World(MemoryTransport(SystemClock()))
    await world.put(deployment("tiny"))
    await world.put(endpoint("tiny-0", "tiny", f"http://127.0.0.1:{engine.port}", node="mac-1"))
    async with running_gateway(world.transport, limits, tracer=tracer) as gateway:
        await gateway.knows("tiny", ready=1)
        yield gateway
