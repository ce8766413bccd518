"""Ollama's own Python client against a gateway."""

import asyncio
import math
from datetime import timedelta
from io import BytesIO

import aiohttp
import ollama
import orjson
import pytest

from gateway.apis.ollama import request_translator, response_translator
from machinery.clock import SystemClock
from manifests.load import load_objects
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource
from schemas.meta import ObjectMeta
from schemas.node import ModelGeometry, ModelReport, NodeStatus
from schemas.wire.errors import RefusedError
from store import codec, keys
from store.port import Put
from tests.gateway.apis.conftest import Stage
from tests.support.gateway_api_scripts import CALLS, dies, fails, refuses, says
from tests.support.gateway_fake_engine import Script
from tests.support.gateway_world import World, deployment, route
from tests.support.waiting import until

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
NS = 1_000_000_000


async def test_a_chat(stage: Stage, spoken: ollama.AsyncClient) -> None:
    done = await spoken.chat("m", HELLO)
    assert (done.message.role, done.message.content) == ("assistant", "Hello there")
    assert (done.model, done.done, done.done_reason) == ("m", True, "stop")
    assert (done.prompt_eval_count, done.eval_count) == (11, 5)
    assert done.load_duration == 0.25 * NS
    assert done.prompt_eval_duration == 0.5 * NS
    assert done.eval_duration == 2 * NS
    assert done.total_duration is not None
    assert done.total_duration > 0
    assert stage.path == "/v1/chat/completions"
    assert stage.asked == {
        "model": "m",
        "messages": HELLO,
        "stream": False,
        "fit_max_tokens": True,
        "include_performance": True,
    }


async def test_a_streamed_chat(stage: Stage, spoken: ollama.AsyncClient) -> None:
    stage.plays(says("Hello there", thought="I greet", finish="length"))
    parts = [part async for part in await spoken.chat("m", HELLO, stream=True, think=True)]
    assert "".join(part.message.content or "" for part in parts) == "Hello there"
    assert "".join(part.message.thinking or "" for part in parts) == "I greet"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 5)
    assert stage.asked["stream_options"] == {"include_usage": True}
    assert stage.asked["reasoning_effort"] == "medium"


async def test_calls_and_their_results(stage: Stage, spoken: ollama.AsyncClient) -> None:
    stage.plays(says(calls=True, finish="tool_calls"))
    wanted = [(one["name"], orjson.loads(one["arguments"])) for one in CALLS]
    whole = await spoken.chat("m", HELLO, tools=[WEATHER])
    streamed = [p async for p in await spoken.chat("m", HELLO, tools=[WEATHER], stream=True)]
    for calls in (
        whole.message.tool_calls,
        [call for part in streamed for call in part.message.tool_calls or ()],
    ):
        assert [(call.function.name, call.function.arguments) for call in calls or ()] == wanted
    assert streamed[-1].done_reason == "stop"
    assert stage.asked["tools"] == [WEATHER]
    results = [
        {"role": "tool", "content": "pong", "tool_name": "ping"},
        {"role": "tool", "content": "sunny"},
    ]
    await spoken.chat("m", [*HELLO, whole.message, *results])
    said, pong, sunny = stage.asked["messages"][1:]
    ids = {call["function"]["name"]: call["id"] for call in said["tool_calls"]}
    assert orjson.loads(said["tool_calls"][0]["function"]["arguments"]) == wanted[0][1]
    assert (pong["tool_call_id"], sunny["tool_call_id"]) == (ids["ping"], ids["weather"])


async def test_a_generation(stage: Stage, spoken: ollama.AsyncClient) -> None:
    done = await spoken.generate("m", "hello", system="be kind")
    assert (done.response, done.done_reason) == ("Hello there", "stop")
    assert stage.asked["messages"] == [{"role": "system", "content": "be kind"}, *HELLO]
    parts = [p async for p in await spoken.generate("m", "hello", stream=True)]
    assert "".join(part.response or "" for part in parts) == "Hello there"


async def test_options(stage: Stage, spoken: ollama.AsyncClient) -> None:
    mapped = {"temperature": 0, "top_p": 0.5, "top_k": 40.0, "min_p": 0.1, "seed": 7, "stop": ["x"]}
    more = {"num_predict": 9, "repeat_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 1}
    idle = {
        "num_ctx": 2048,
        "mirostat": 0,
        "repeat_last_n": 64,
        "num_gpu": 99,
        "use_mmap": True,
        "tfs_z": None,
    }
    options = {**mapped, **more, **idle}
    await spoken.chat("m", HELLO, options=options, keep_alive="5m", format="json")
    renamed = {"max_tokens": 9, "repetition_penalty": 1.1}
    sent = {**mapped, **more, **renamed, "top_k": 40, "response_format": {"type": "json_object"}}
    for name in ("num_predict", "repeat_penalty"):
        del sent[name]
    assert sent.items() <= stage.asked.items()
    assert not idle.keys() & stage.asked.keys()
    await spoken.chat(
        "m", HELLO, options={"num_predict": -1, "seed": -1}, format={"type": "object"}
    )
    assert not {"max_tokens", "seed"} & stage.asked.keys()
    assert stage.asked["response_format"]["json_schema"]["schema"] == {"type": "object"}


async def test_likelihoods(stage: Stage, spoken: ollama.AsyncClient) -> None:
    token = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    shown = {**token, "top_logprobs": [token]}
    stage.plays(says("Hi", logprobs={"content": [shown]}))
    done = await spoken.chat("m", HELLO, logprobs=True, top_logprobs=1)
    assert done.logprobs is not None
    assert (done.logprobs[0].token, done.logprobs[0].logprob) == ("Hi", -0.5)
    assert {"logprobs": True, "top_logprobs": 1}.items() <= stage.asked.items()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_no_prompt_has_the_model_loaded(
    stage: Stage, spoken: ollama.AsyncClient, *, is_streamed: bool
) -> None:
    if is_streamed:
        (done,) = [p async for p in await spoken.generate("m", stream=True, keep_alive=-1)]
    else:
        done = await spoken.generate("m", keep_alive=-1)
    assert (done.response, done.done, done.done_reason) == ("", True, "load")
    assert stage.path == "/tokenize"
    chat = await spoken.chat("m")
    assert (chat.message.content, chat.done_reason) == ("", "load")


@pytest.mark.parametrize(
    ("path", "body", "says_"),
    [
        ("chat", {"model": "nobody", "messages": HELLO}, "does not exist"),
        ("chat", {"model": "m", "messages": HELLO, "colour": 1}, "Unknown field: 'colour'"),
        ("chat", {"model": "m", "messages": "hello"}, "'messages'"),
        ("chat", {"model": "m", "messages": [{"role": "user", "images": [7]}]}, "must be base64"),
        (
            "generate",
            {"model": "m", "prompt": "x", "images": ["aGk="], "raw": True},
            "'images' is for chats",
        ),
        ("chat", {"model": "m", "messages": [{"role": "tool", "content": "x"}]}, "tool_calls"),
        ("chat", {"model": "m", "messages": HELLO, "options": {"temprature": 1}}, "'temperature'"),
        ("chat", {"model": "m", "messages": HELLO, "think": "much"}, '"high"'),
        ("generate", {"model": "m", "prompt": "x", "suffix": "y", "system": "z"}, "for chats"),
        ("generate", {"model": "m", "prompt": "x", "context": [1]}, "/api/chat"),
        ("generate", {"model": "m", "prompt": "x", "raw": True, "system": "y"}, "'system'"),
        ("show", {"model": "nobody"}, "does not exist"),
        ("show", {}, "model"),
        ("pull", {"model": "nobody"}, "does not exist"),
        ("pull", {"model": "hf.co/org/name"}, "fleetctl run org/name"),
        ("create", {"model": "n", "from": "org/name"}, 'repo: "org/name"'),
        ("create", {"model": "n", "from": "hf.co/org/name"}, 'repo: "org/name"'),
        ("create", {"model": "n", "from": "m:latest"}, "backends: [{deployment: m}]"),
        ("create", {"model": "n", "from": "./own.gguf"}, 'path: "./own.gguf"'),
        ("create", {"model": "m"}, "fleetctl apply"),
        ("copy", {"source": "m", "destination": "a:b"}, "metadata: {name: a-b}"),
        ("copy", {"source": "nobody", "destination": "x"}, "does not exist"),
        ("copy", {"source": "m"}, "destination"),
        ("delete", {"model": "m"}, "fleetctl delete modeldeployment/m"),
        ("push", {"model": "m"}, "models export"),
        ("chat", {"model": "m", "messages": HELLO, "keep_alive": "soon"}, "'keep_alive'"),
        ("chat", {"model": "m", "messages": HELLO, "options": {"mirostat": 2}}, "'mirostat'"),
        ("chat", {"model": "m", "messages": HELLO, "options": {"num_ctx": 9000}}, "at most 4096"),
    ],
)
async def test_refusals_teach(
    shared_stage: Stage, http: aiohttp.ClientSession, path: str, body: object, says_: str
) -> None:
    async with http.post(f"{shared_stage.gateway.url}/api/{path}", json=body) as response:
        told = orjson.loads(await response.read())
        assert response.status in (400, 404)
        assert set(told) == {"error"}
        assert says_ in told["error"]
        manifest = told["error"].partition("`fleetctl apply -f FILE`:\n")[2]
        if manifest:
            assert load_objects(["-"], stdin=BytesIO(manifest.encode()))
    assert not shared_stage.engine.calls


async def test_an_engines_refusal_is_in_the_clients_words(
    stage: Stage, spoken: ollama.AsyncClient
) -> None:
    stage.plays(refuses(400, "Invalid 'repetition_penalty': too low."))
    with pytest.raises(ollama.ResponseError, match="'repeat_penalty': too low") as caught:
        await spoken.chat("m", HELLO, options={"repeat_penalty": -1})
    assert caught.value.status_code == 400


@pytest.mark.parametrize("script", [dies("one two"), fails("one two")])
async def test_a_stream_that_breaks_ends_with_an_error(
    stage: Stage, spoken: ollama.AsyncClient, script: Script
) -> None:
    stage.plays(script)
    received: list[ollama.ChatResponse] = []

    async def listen() -> None:
        async for part in await spoken.chat("m", HELLO, stream=True):
            received.append(part)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(ollama.ResponseError):
        await listen()
    assert "".join(part.message.content or "" for part in received) == "one two"
    assert not any(part.done for part in received)


async def test_lines(stage: Stage, http: aiohttp.ClientSession) -> None:
    url = stage.gateway.url + "/api/chat"
    async with http.post(url, json={"model": "m:latest", "messages": HELLO}) as response:
        assert response.content_type == "application/x-ndjson"
        lines = (await response.read()).decode().splitlines()
    told = [orjson.loads(line) for line in lines]
    assert {one["model"] for one in told} == {"m:latest"}
    assert all(one["created_at"] for one in told)
    assert stage.asked["model"] == "m"


async def test_what_is_there(
    stage: Stage, spoken: ollama.AsyncClient, world: World, http: aiohttp.ClientSession
) -> None:
    spec = ModelDeploymentSpec(model=ModelSource(path="/n"), context_length=2048, replicas=0)
    await world.put(ModelDeployment(metadata=ObjectMeta(name="n"), spec=spec), deployment("o"))
    await stage.gateway.knows("o", ready=0)
    assert [model.model for model in (await spoken.list()).models] == ["m", "n", "o"]
    running = (await spoken.ps()).models
    assert [(model.model, model.context_length) for model in running] == [("m", 4096)]
    shown = await spoken.show("n:latest")
    assert shown.modelinfo is not None
    assert shown.modelinfo["mlx.context_length"] == 2048
    assert shown.capabilities == ["completion", "tools"]
    assert (await spoken.pull("m")).status == "success"
    lines = [line.status async for line in await spoken.pull("m", stream=True)]
    assert lines == ["pulling m", "success"]
    async with http.get(f"{stage.gateway.url}/api/version") as response:
        assert await response.json() == {"version": response_translator.VERSION}
    for method in ("GET", "HEAD"):
        agent = {"user-agent": "ollama/0.13.0 (arm64 darwin) Go/go1.24.1"}
        async with http.request(method, stage.gateway.url + "/", headers=agent) as response:
            assert response.status == 200
            assert await response.text() == ("Ollama is running" if method == "GET" else "")


async def test_keep_alive_keeps_a_deployment_from_zero(
    stage: Stage, spoken: ollama.AsyncClient
) -> None:
    activator = stage.gateway.gateway.activator
    await spoken.chat("m", HELLO)
    assert activator.demand().get("m", 0) == 0
    (model,) = (await spoken.ps()).models
    assert model.expires_at is not None
    assert model.expires_at.year == 9999
    await spoken.chat("m", HELLO, keep_alive="1h30m")
    assert activator.demand()["m"] == 1
    assert activator.waiting().get("m", 0) == 0
    (model,) = (await spoken.ps()).models
    assert model.expires_at is not None
    duration = model.expires_at - SystemClock().now()
    assert timedelta(hours=1, minutes=20) < duration <= timedelta(hours=1, minutes=30)
    await spoken.chat("m", HELLO, keep_alive=0)
    assert activator.demand().get("m", 0) == 0
    assert activator.releases() == {"m": 1}
    await spoken.chat("m", HELLO)
    assert activator.releases() == {}
    calls = len(stage.engine.calls)
    assert (await spoken.generate("m", keep_alive=0)).done_reason == "unload"
    assert activator.releases() == {"m": 1}
    assert len(stage.engine.calls) == calls, "no engine is asked"
    await spoken.generate("m", keep_alive=-1)
    (model,) = (await spoken.ps()).models
    assert model.expires_at is not None
    assert model.expires_at < SystemClock().now() + timedelta(hours=24, minutes=1)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("5m", 300), ("1h0.5s", 3600.5), ("250ms", 0.25), ("90", 90), (7.5, 7.5), (0, 0), ("0s", 0)],
)
def test_durations_of_go(given: float | str, seconds: float) -> None:
    assert request_translator.keep_alive_s(given) == seconds


@pytest.mark.parametrize("given", [-1, "-1", "-5m", -0.5])
def test_for_ever(given: float | str) -> None:
    assert request_translator.keep_alive_s(given) == math.inf


@pytest.mark.parametrize("given", ["m", "5 m", "1h-5m", "9" * 200 + "s", "\u0661s"])
def test_no_durations(given: str) -> None:
    with pytest.raises(RefusedError, match="keep_alive"):
        request_translator.keep_alive_s(given)


async def test_a_pull_waits_until_the_model_is_ready(
    stage: Stage, spoken: ollama.AsyncClient, world: World
) -> None:
    await world.put(deployment("later"))
    await stage.gateway.knows("later", ready=0)
    told: list[str] = []

    async def pull() -> None:
        async for line in await spoken.pull("later:latest", stream=True):
            told.append(line.status or "")  # noqa: PERF401 - read while it grows

    async with asyncio.TaskGroup() as group:
        group.create_task(pull())
        await until(lambda: len(told) == 2, what="the reason why it is not ready")
        assert told[0] == "pulling later"
        assert "ModelDeployment later has no endpoint yet" in told[1]
        await world.serve("later", stage.engine)
    assert told[-1] == "success"


async def test_a_copy_of_what_is_declared_succeeds(
    stage: Stage, spoken: ollama.AsyncClient, world: World
) -> None:
    await world.put(route("copy", "copy", m=1))
    await stage.gateway.knows("copy", ready=1)
    assert (await spoken.copy("m", "copy:latest")).status == "success"
    with pytest.raises(ollama.ResponseError, match='model: "other"'):
        await spoken.copy("m", "other")
    with pytest.raises(ollama.ResponseError, match="fleetctl delete modeldeployment/m"):
        await spoken.delete("copy")


async def test_sizes_come_from_macs_and_replicas(
    stage: Stage, spoken: ollama.AsyncClient, world: World
) -> None:
    geometry = ModelGeometry(
        model_type="qwen3", weights_bytes=2_300_000_000, layers=36, kv_heads=8, head_dim=128, kv_element_bytes=2,
        vocab_size=150_000, parameters=4_020_000_000,
    )  # fmt: skip
    status = NodeStatus(
        uid="u", hostname="mac", address="10.0.0.1", agent_version="1", os="Darwin", os_version="26.2",
        machine="arm64", chip="Apple M4", cpu_cores=10, gpu_cores=10, memory_bytes=16 << 30,
        allocatable_bytes=10 << 30, models=(ModelReport(path="/models/m", geometry=geometry),),
    )  # fmt: skip
    put = Put(key=keys.status_key("Node", "mac-1"), value=codec.encode(status))
    await world.transport.commit([], [put])
    (model,) = (await spoken.list()).models
    assert model.size == 2_300_000_000
    assert model.details is not None
    assert (model.details.family, model.details.parameter_size) == ("qwen3", "4.0B")
    shown = await spoken.show("m")
    assert shown.modelinfo is not None
    assert shown.modelinfo["qwen3.context_length"] == 4096
    assert "FROM /models/m" in (shown.modelfile or "")
    (running,) = (await spoken.ps()).models
    assert running.size_vram == 4  # the proof of the replica in the store
