"""Gaps that a real engine fills: completions with a suffix, Ollama's `suffix`, and llama.cpp's `/infill`."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import ollama
import openai
import pytest

from tests.support.engine_forks import forking
from tests.support.engine_process import START_S, Engine, eventually
from tests.support.gateway_real_engine import in_front_of, tiny_engine
from tests.support.gateway_world import Running

pytestmark = pytest.mark.mlx

BEFORE, BEHIND = "def add(a, b):\n    ", "\n\nprint(add(1, 2))\n"
PROMPT = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{BEHIND}<|fim_middle|>"
FILE = {"filename": "a.py", "text": "x = 1"}
WITH_FILE = f"<|repo_name|>project\n<|file_sep|>a.py\nx = 1\n<|file_sep|>\n{PROMPT}"
FILLED = "return a + b"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("infill")
    model, cache = folder / "model", folder / "blas"
    cache.mkdir(mode=0o700)
    command = [sys.executable, "-m", "tests.support.scripted_model", str(model), "edit", "{}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with forking(folder, cache) as start:
        engine = start(model)
        eventually(engine.is_ready, within_s=START_S)
        yield engine


@pytest.fixture
async def gateway(engine: Engine) -> AsyncIterator[Running]:
    async with in_front_of(engine) as gateway:
        yield gateway


def length(engine: Engine, text: str) -> int:
    count: int = engine.post("/tokenize", prompt=text).json["count"]
    return count


async def post(gateway: Running, path: str, **fields: Any) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}{path}", json={"model": "tiny", **fields}) as response,
    ):
        return response.status, await response.read()


@pytest.mark.ci
async def test_a_completion_with_a_suffix(engine: Engine, gateway: Running) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        whole = await client.completions.create(
            model="tiny", prompt=BEFORE, suffix=BEHIND, temperature=0, max_tokens=50
        )
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (FILLED, "stop")
        assert whole.choices[0].model_dump().get("stop_reason") is None
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == length(engine, PROMPT)
        stream = await client.completions.create(
            model="tiny", prompt=[BEFORE], suffix=BEHIND, temperature=0, max_tokens=50, stream=True
        )
        parts = [chunk.choices[0] async for chunk in stream]
        assert "".join(part.text for part in parts) == FILLED
        assert parts[-1].finish_reason == "stop"
        stopped = await client.completions.create(
            model="tiny", prompt=BEFORE, suffix=BEHIND, temperature=0, max_tokens=50, stop=" +"
        )
        assert stopped.choices[0].text == "return a"


async def test_ollamas_suffix(gateway: Running) -> None:
    async with ollama.AsyncClient(gateway.url) as client:
        cold = {"temperature": 0}
        whole = await client.generate("tiny", BEFORE, suffix=BEHIND, options=cold)
        assert (whole.response, whole.done_reason) == (FILLED, "stop")
        stream = await client.generate("tiny", BEFORE, suffix=BEHIND, options=cold, stream=True)
        assert "".join([part.response async for part in stream]) == FILLED


async def test_llama_cpps_infill_as_its_editor_extension_asks(
    engine: Engine, gateway: Running
) -> None:
    body = {
        "id_slot": 0, "input_prefix": "def add(a, b):\n", "input_suffix": BEHIND, "input_extra": [FILE], "prompt": "    ",
        "n_predict": 50, "top_k": 1, "top_p": 0.99, "n_indent": 4, "samplers": ["top_k", "infill"], "cache_prompt": True,
        "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "temperature": 0,
    }  # fmt: skip
    status, raw = await post(gateway, "/infill", **body)
    whole = json.loads(raw)
    assert (status, whole["content"], whole["stop"], whole["stop_type"]) == (
        *(200, FILLED),
        *(True, "eos"),
    ), whole
    assert whole["tokens_evaluated"] == length(engine, WITH_FILE)
    assert whole["timings"]["predicted_n"] == whole["tokens_predicted"] > 0
    status, raw = await post(gateway, "/infill", **body, stream=True)
    events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line]
    assert "".join(event["content"] for event in events) == FILLED
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    # The extension has a prompt read in advance, and wants no text.
    status, raw = await post(gateway, "/infill", **{**body, "n_predict": 0})
    assert (status, json.loads(raw)["content"]) == (200, "")
    # At the end of a file nothing is behind the gap.
    status, raw = await post(gateway, "/infill", input_prefix=BEFORE, temperature=0)
    assert json.loads(raw)["content"] == FILLED
    assert (await post(gateway, "/infill", input_prefix=1))[0] == 400


@pytest.mark.ci
async def test_a_model_without_the_tokens_refuses_and_names_some_that_have_them(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with tiny_engine(tmp_path_factory.mktemp("plain")) as engine:
        async with in_front_of(engine) as gateway:
            for path, fields in (
                ("/v1/completions", {"prompt": "a", "suffix": "b"}),
                ("/api/generate", {"prompt": "a", "suffix": "b"}),
                ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
            ):
                status, raw = await post(gateway, path, **fields)
                assert (status, b"Qwen2.5-Coder" in raw) == (400, True), raw
