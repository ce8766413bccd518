"""Ollama's own Python client against a gateway."""

import aiohttp
import ollama
import orjson
import pytest

from gateway.apis.ollama import response_translator
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource
from schemas.meta import ObjectMeta
from tests.gateway.apis.conftest import Stage
from tests.support.gateway_api_scripts import CALLS, dies, fails, refuses, says
from tests.support.gateway_fake_engine import Script
from tests.support.gateway_world import World, deployment

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
    idle = {"num_ctx": 8192, "mirostat": 0, "num_gpu": 99, "use_mmap": True, "tfs_z": None}
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
        ("chat", {"model": "m", "messages": [{"role": "user", "images": ["aGk="]}]}, "text only"),
        ("chat", {"model": "m", "messages": [{"role": "tool", "content": "x"}]}, "tool_calls"),
        ("chat", {"model": "m", "messages": HELLO, "options": {"temprature": 1}}, "'temperature'"),
        ("chat", {"model": "m", "messages": HELLO, "think": "much"}, '"high"'),
        ("generate", {"model": "m", "prompt": "x", "suffix": "y"}, "fill gaps"),
        ("generate", {"model": "m", "prompt": "x", "context": [1]}, "/api/chat"),
        ("generate", {"model": "m", "prompt": "x", "raw": True, "system": "y"}, "'system'"),
        ("generate", {"model": "m", "prompt": "", "keep_alive": 0}, "replicas"),
        ("show", {"model": "nobody"}, "does not exist"),
        ("show", {}, "model"),
        ("pull", {"model": "nobody"}, "does not exist"),
        ("create", {"model": "m"}, "fleetctl apply"),
    ],
)
async def test_refusals_teach(
    stage: Stage, http: aiohttp.ClientSession, path: str, body: object, says_: str
) -> None:
    async with http.post(f"{stage.gateway.url}/api/{path}", json=body) as response:
        told = orjson.loads(await response.read())
        assert response.status in (400, 404)
        assert set(told) == {"error"}
        assert says_ in told["error"]
    assert not stage.engine.calls


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
    async with http.get(f"{stage.gateway.url}/api/version") as response:
        assert await response.json() == {"version": response_translator.VERSION}
    for method in ("GET", "HEAD"):
        agent = {"user-agent": "ollama/0.13.0 (arm64 darwin) Go/go1.24.1"}
        async with http.request(method, stage.gateway.url + "/", headers=agent) as response:
            assert response.status == 200
            assert await response.text() == ("Ollama is running" if method == "GET" else "")
