"""Token counts equal those of the request itself; extensions that other APIs' translations use."""

import orjson
import pytest

from tests.support.engine_process import Engine, Json

pytestmark = pytest.mark.mlx

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is there?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"messages": HELLO}, id="chat"),
        pytest.param({"messages": HELLO, "tools": [TOOL]}, id="tools"),
        pytest.param({"messages": HELLO, "tools": [TOOL], "tool_choice": "none"}, id="no-calls"),
        pytest.param({"messages": HELLO, "add_generation_prompt": False}, id="no-marker"),
        pytest.param({"messages": HELLO, "chat_template_kwargs": {"a": 1}}, id="variables"),
        pytest.param({"messages": HELLO, "response_format": {"type": "json_object"}}, id="format"),
    ],
)
def test_the_count_equals_the_usage_of_the_chat(engine: Engine, fields: Json) -> None:
    counted = engine.post("/tokenize", **fields, return_tokens=False).json
    answer = engine.post("/v1/chat/completions", **fields, max_tokens=1).json
    assert counted == {"count": answer["usage"]["prompt_tokens"], "max_model_len": 4096}


def test_tools_are_part_of_the_prompt(engine: Engine) -> None:
    bare = engine.post("/tokenize", messages=HELLO).json
    more = engine.post("/tokenize", messages=HELLO, tools=[TOOL]).json
    assert more["count"] > bare["count"]


def test_the_tokens_are_those_of_the_prompt(engine: Engine) -> None:
    first = engine.post("/tokenize", prompt="created equal").json
    again = engine.post("/tokenize", prompt=first["tokens"]).json
    assert first["count"] == again["count"] == len(first["tokens"])
    texts = [
        engine.post("/v1/completions", prompt=prompt, max_tokens=4, temperature=0).json["choices"]
        for prompt in ("created equal", first["tokens"])
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": HELLO, "prompt": "x"}, "messages"),
        ({"prompt": "x", "tools": [TOOL]}, "tools"),
        ({"prompt": ["x", "y"]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "x", "max_tokens": 3}, "max_tokens"),
        ({"prompt": "x", "return_tokens": 1}, "return_tokens"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ],
)
def test_wrong_requests_are_refused_by_name(engine: Engine, fields: Json, param: str) -> None:
    reply = engine.post("/tokenize", **fields)
    assert (reply.status, reply.error["param"]) == (400, param), reply.raw


def test_another_model_and_a_deadline(engine: Engine) -> None:
    assert engine.post("/tokenize", prompt="x", model="other").status == 404
    headers = {"x-request-timeout": "0.01"}
    reply = engine.post("/tokenize", prompt="hello " * 200_000, headers=headers)
    assert (reply.status, reply.error["code"]) == (504, "request_timeout")
    # The metrics count it like other requests.
    assert b'endpoint="/tokenize"' in engine.request("GET", "/metrics").raw


def test_max_tokens_is_fitted_to_the_rest_of_the_context(engine: Engine) -> None:
    prompt = [5] * 4090
    refused = engine.post("/v1/completions", prompt=prompt, max_tokens=50)
    assert refused.error["code"] == "context_length_exceeded"
    limits: tuple[Json, ...] = ({"max_tokens": 50}, {})
    for limit in limits:
        fitted = engine.post("/v1/completions", prompt=prompt, fit_max_tokens=True, **limit)
        assert fitted.json["usage"]["completion_tokens"] == 6
    full = engine.post("/v1/completions", prompt=[5] * 4096, max_tokens=5, fit_max_tokens=True)
    assert full.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_answer_names_its_stop_word(engine: Engine, *, is_streamed: bool) -> None:
    free = engine.chat(max_tokens=12).json["choices"][0]
    assert "stop_reason" not in free
    word = free["message"]["content"][4:7]
    reply = engine.chat(max_tokens=12, stop=["never to be seen", word], stream=is_streamed)
    assert f'"stop_reason":{orjson.dumps(word).decode()}' in reply.raw.decode()


def test_tokens_become_text_again(engine: Engine) -> None:
    tokens = engine.post("/tokenize", prompt="created equal").json["tokens"]
    assert engine.post("/detokenize", tokens=tokens).json == {"prompt": "created equal"}
    assert engine.post("/detokenize", tokens=[]).json == {"prompt": ""}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "tokens"),
        ({"tokens": "x"}, "tokens"),
        ({"tokens": [-1]}, "tokens[0]"),
        ({"tokens": [10**6]}, "tokens"),
        ({"tokens": [1] * 4097}, "tokens"),
        ({"tokens": [1], "prompt": "x"}, "prompt"),
        ({"tokens": [1], "model": "other"}, "model"),
    ],
)
def test_wrong_tokens_are_refused_by_name(engine: Engine, fields: Json, param: str) -> None:
    reply = engine.post("/detokenize", **fields)
    assert reply.status == (404 if param == "model" else 400)
    assert reply.json["error"]["param"] == param
