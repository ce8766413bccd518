"""LiteLLM as a black box: three APIs give the same answers from a real engine."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway_real_engine import in_front_of, tiny_engine

# Importing LiteLLM alone takes seconds of CPU.
pytestmark = [pytest.mark.mlx, pytest.mark.timeout(240)]

# `make test` creates it; LiteLLM pins older versions of our dependencies.
PYTHON = Path(__file__).parents[3] / ".venv-litellm" / "bin" / "python"
CLIENT = Path(__file__).parents[2] / "support" / "gateway_litellm_client.py"


@pytest.fixture(scope="module")
async def found(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Any]]:
    assert PYTHON.exists(), f"{PYTHON} is not there; run `make .venv-litellm/.ready`"
    # Otherwise it downloads the prices of models.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with tiny_engine(tmp_path_factory.mktemp("litellm")) as engine:
        async with in_front_of(engine) as gateway:
            process = await asyncio.create_subprocess_exec(
                PYTHON, CLIENT, gateway.url, env=environment, stdout=asyncio.subprocess.PIPE
            )
            out, _ = await process.communicate()
            assert process.returncode == 0
            yield json.loads(out.splitlines()[-1])


async def test_every_provider_gets_the_same_answer(found: dict[str, Any]) -> None:
    wanted = found["openai"]["whole"]
    assert wanted["text"]
    assert (wanted["finish"], wanted["completion"]) == ("length", 8)
    for name in ("anthropic", "ollama_chat"):
        got = found[name]
        assert got["whole"] == wanted, name
        assert got["streamed"] == {"text": wanted["text"], "finish": "length"}, name


async def test_the_older_way_to_ask_ollama(found: dict[str, Any]) -> None:
    # It adds a prompt of its own, so the text differs.
    got = found["ollama"]
    assert got["whole"]["completion"] == 8
    assert got["streamed"]["text"] == got["whole"]["text"]


async def test_embeddings(found: dict[str, Any]) -> None:
    assert found["openai"]["widths"] == found["ollama"]["widths"] == [64, 64]


async def test_a_model_that_is_not_there(found: dict[str, Any]) -> None:
    for name, got in found.items():
        assert "does not exist" in got["refused"], name
    assert found["openai"]["refused"].startswith("NotFoundError")
    assert found["anthropic"]["refused"].startswith("NotFoundError")
