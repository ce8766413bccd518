"""Errors have the format of the API that the path belongs to, whichever part refuses."""

from typing import Any

import aiohttp
import anthropic
import orjson
import pytest

from tests.gateway.apis.conftest import Stage
from tests.support.gateway_api_scripts import refuses
from tests.support.gateway_world import Running

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
VERSION = {"anthropic-version": "2023-06-01"}


def api_of(told: dict[str, Any]) -> str:
    if isinstance(told.get("error"), str):
        return "ollama"
    if told.get("type") == "error":
        assert set(told["error"]) == {"type", "message"}
        return "anthropic"
    assert set(told["error"]) == {"message", "type", "param", "code"}
    return "openai"


SHAPES = [
    ("GET", "/v1/messages", {}, 405, "anthropic"),
    ("GET", "/v1/messages/count_tokens", {}, 405, "anthropic"),
    ("GET", "/v1/messages/batches", {}, 404, "anthropic"),
    ("POST", "/v1/messages/batches", {}, 404, "anthropic"),
    ("GET", "/v1/models/nope", VERSION, 404, "anthropic"),
    ("GET", "/v1/assistants", VERSION, 404, "anthropic"),
    ("GET", "/v1/models/nope", {}, 404, "openai"),
    ("GET", "/v1/chat/completions", {}, 405, "openai"),
    ("GET", "/v1/messagesque", {}, 404, "openai"),
    ("GET", "/nowhere", {}, 404, "openai"),
    ("GET", "/api/chat", {}, 405, "ollama"),
    ("GET", "/api/blobs/x", {}, 404, "ollama"),
    ("POST", "/api/tags", {}, 405, "ollama"),
    ("POST", "/api/show", {}, 400, "ollama"),
    ("POST", "/api/create", {}, 400, "ollama"),
    ("GET", "/api/cluster/nowhere", {}, 404, "openai"),
    ("GET", "/api/dashboard/requests?limit=x", {}, 400, "openai"),
]


@pytest.mark.parametrize(("method", "path", "headers", "status", "api"), SHAPES)
async def test_refusals_have_their_apis_shape(
    shared_stage: Stage,
    http: aiohttp.ClientSession,
    method: str,
    path: str,
    headers: dict[str, str],
    status: int,
    api: str,
) -> None:
    async with http.request(method, shared_stage.gateway.url + path, headers=headers) as answer:
        told = await answer.json()
        assert (answer.status, api_of(told)) == (status, api), told
        assert answer.content_type == "application/json"
        if status == 405:
            assert f"use {answer.headers['allow']}" in str(told)


@pytest.mark.parametrize(("method", "path", "headers", "api"), [(*s[:3], s[4]) for s in SHAPES])
async def test_so_do_those_of_the_door(
    closed: Running,
    http: aiohttp.ClientSession,
    method: str,
    path: str,
    headers: dict[str, str],
    api: str,
) -> None:
    async with http.request(method, closed.url + path, headers=headers) as answer:
        told = await answer.json()
        assert (answer.status, api_of(told)) == (401, api), told
        assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_anthropics_client_understands_what_is_not_there(
    messenger: anthropic.AsyncAnthropic,
) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        await messenger.models.retrieve("nope")
    told: Any = caught.value.body
    assert told["error"]["type"] == "not_found_error"
    assert "'nope' does not exist" in told["error"]["message"]
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        await messenger.messages.batches.list()


@pytest.mark.parametrize(
    ("path", "more", "says"),
    [
        ("/api/chat", {"max_tokens": 2}, "Unknown field: 'max_tokens'. Did you mean 'options.num_predict'?"),
        ("/api/chat", {"temperature": 2}, "'temperature'. Did you mean 'options.temperature'?"),
        ("/api/chat", {"reasoning_effort": "low"}, "'reasoning_effort'. Did you mean 'think'?"),
        ("/api/chat", {"colour": 2}, "Unknown field: 'colour'."),
        ("/api/generate", {"response_format": {}}, "'response_format'. Did you mean 'format'?"),
        ("/api/chat", {"options": {"max_tokens": 2}}, "option: 'max_tokens'. Did you mean 'num_predict'?"),
        ("/api/chat", {"options": {"repetition_penalty": 2}}, "Did you mean 'repeat_penalty'?"),
        ("/v1/messages", {"stop": ["x"]}, "Unknown field: 'stop'. Did you mean 'stop_sequences'?"),
        ("/v1/messages", {"response_format": {}}, "'response_format'. Did you mean 'output_config.format'?"),
        ("/v1/messages", {"max_completion_tokens": 1}, "Did you mean 'max_tokens'?"),
        ("/v1/messages", {"metadata": {"stop": 1}}, "Unknown field 'stop' in 'metadata'"),
    ],
)  # fmt: skip
async def test_a_field_is_named_as_it_was_sent(
    shared_stage: Stage, http: aiohttp.ClientSession, path: str, more: dict[str, Any], says: str
) -> None:
    body = {"model": "m", **({"max_tokens": 9} if "v1" in path else {}), **more}
    body |= {"prompt": "x"} if path.endswith("generate") else {"messages": HELLO}
    async with http.post(shared_stage.gateway.url + path, json=body) as answer:
        told = orjson.loads(await answer.read())["error"]
        assert answer.status == 400
        message = told if isinstance(told, str) else told["message"]
        assert says in message
    assert not shared_stage.engine.calls


@pytest.mark.parametrize(("path", "field"), [("/api/chat", "think"), ("/v1/messages", "thinking")])
async def test_an_engine_that_knows_no_effort(
    stage: Stage, http: aiohttp.ClientSession, path: str, field: str
) -> None:
    stage.plays(refuses(400, "It has no place for an effort; leave 'reasoning_effort' out."))
    body = {"model": "m", "messages": HELLO, "max_tokens": 9, "thinking": {"type": "disabled"}}
    if path == "/api/chat":
        body = {"model": "m", "messages": HELLO, "think": True}
    async with http.post(stage.gateway.url + path, json=body) as answer:
        assert answer.status == 400
        assert f"leave '{field}' out" in await answer.text()


@pytest.mark.parametrize("call", ["call_a", "call_b"])
async def test_a_result_needs_its_call(
    stage: Stage, messenger: anthropic.AsyncAnthropic, call: str
) -> None:
    used = {"type": "tool_use", "id": "call_a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": call, "content": "x"}
    turns: Any = [
        *HELLO,
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    if call == "call_a":
        await messenger.messages.create(model="m", max_tokens=9, messages=turns)
        turns.pop(1)
    with pytest.raises(anthropic.BadRequestError) as caught:
        await messenger.messages.create(model="m", max_tokens=9, messages=turns)
    at = "messages[1]" if call == "call_a" else "messages[2]"
    message = str(caught.value)
    assert f"'{at}.content[0].tool_use_id': a tool_result answers a tool_use" in message
    assert f"none has the id '{call}'" in message.replace("\\", "")
    assert "tool_calls" not in message
