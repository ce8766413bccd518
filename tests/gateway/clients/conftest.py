"""Fixtures: a gateway in front of a real engine, and programs that use it in an environment of their own."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from gateway.limits import GatewayLimits
from tests.support.engine_process import Engine
from tests.support.gateway_real_engine import in_front_of, tiny_engine
from tests.support.gateway_world import Running

# `make test` creates it.
PYTHON = Path(__file__).parents[3] / ".venv-clients" / "bin" / "python"
PROGRAMS = Path(__file__).parents[2] / "support" / "clients"

RunClient: TypeAlias = Callable[[str], Awaitable[dict[str, Any]]]


@pytest.fixture(scope="session")
def clients_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    # Clients rarely send a limit of their own, and random weights find no end: never by a greedy choice, rarely by a draw.
    folder, limit = (
        tmp_path_factory.mktemp("clients"),
        {"maxTokens": 150, "temperature": 0},
    )
    with tiny_engine(folder, has_markers=False, sampling=limit) as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(
    clients_engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    limits = GatewayLimits(drain_timeout_s=0.0, state_dir=tmp_path_factory.mktemp("state"))
    async with in_front_of(clients_engine, limits=limits) as running:
        yield running


@pytest.fixture(scope="module")
def run_client(gateway: Running) -> RunClient:
    """Return a function that runs a program of `PROGRAMS` and returns what it prints."""

    async def run(name: str) -> dict[str, Any]:
        assert PYTHON.exists(), f"{PYTHON} is not there; run `make .venv-clients/.ready`"
        # Otherwise LiteLLM downloads the prices of models.
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        process = await asyncio.create_subprocess_exec(
            *(PYTHON, PROGRAMS / f"{name}_client.py", gateway.url),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found

    return run
