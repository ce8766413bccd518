"""LiteLLM as a black box: three APIs give the same answers from a real engine."""

from typing import Any

import pytest

from tests.gateway.clients.conftest import RunClient

# Importing LiteLLM alone takes seconds of CPU.
pytestmark = [pytest.mark.ci, pytest.mark.mlx, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
async def found(run_client: RunClient) -> dict[str, Any]:
    return await run_client("litellm")


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
