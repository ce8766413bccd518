"""Request translation: expected values, and no crash for any input."""

import json
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RefusedError as EngineRefusedError
from engine.openai import embeddings, request_body, tokenization
from gateway.apis.adapter import ApiAdapter
from gateway.apis.anthropic import request_translator
from gateway.apis.anthropic.adapter import AnthropicAdapter
from gateway.apis.anthropic.request_translator import AnthropicMessage
from gateway.apis.ollama import request_translator as ollama_request_translator
from gateway.apis.ollama.adapter import OllamaAdapter
from gateway.apis.ollama.request_translator import OllamaFunction, OllamaToolCall
from gateway.request import HttpRequest, InferenceRequest
from gateway.state.table_cache import TableCache
from machinery.clock import SystemClock
from schemas.wire.errors import Refusal, RefusedError
from tests.support.sampling import samples

JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5), st.sampled_from([2**70, "user", "assistant", "tool", "text"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
GOOD: dict[str, list[Any]] = {
    "messages": [[{"role": "user", "content": "hi"}]],
    "system": ["be kind", [{"type": "text", "text": "x"}]],
    "options": [{"temperature": 0, "num_ctx": 9}],
    "tools": [[{"name": "f", "input_schema": {}}], [{"function": {"name": "f"}}]],
    "prompt": ["hi"], "input": ["hi", ["hi"]], "max_tokens": [5], "stream": [False, True],
    "format": ["json", {"type": "object"}], "think": [True, "high"], "raw": [True],
    "tool_choice": [{"type": "auto"}, {"type": "tool", "name": "f"}], "top_k": [3],
    "thinking": [{"type": "enabled", "budget_tokens": 2000}], "stop_sequences": [["x"]],
    "metadata": [{"user_id": "me"}], "keep_alive": ["5m", 0], "logprobs": [True],
}  # fmt: skip
PATHS = ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/v1/messages",
         "/v1/messages/count_tokens"]  # fmt: skip


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, bytes]:
    """Return a path and a nearly valid body."""
    names = draw(st.lists(st.sampled_from(sorted(GOOD)), max_size=6, unique=True))
    body = {"model": "m"} | {name: draw(st.sampled_from(GOOD[name])) for name in names}
    if draw(st.booleans()):
        body[draw(st.sampled_from([*GOOD, "model", "colour"]))] = draw(JSON)
    # Unlike orjson, this writes numbers of more than 64 bits.
    return draw(st.sampled_from(PATHS)), json.dumps(body).encode()


def surface(path: str) -> ApiAdapter:
    table_cache = SimpleNamespace(table=SimpleNamespace(models={"m": None}))
    if path.startswith("/api"):
        return OllamaAdapter(cast("TableCache", table_cache), SystemClock())
    return AnthropicAdapter()


def read(path: str, body: bytes) -> InferenceRequest:
    http_request = HttpRequest(
        path=path, query=b"", headers=[], fields={}, request_id=b"1", body=body
    )
    return surface(path).read(http_request)[0]


def answered(path: str, body: bytes) -> InferenceRequest | Refusal:
    try:
        return read(path, body)
    except RefusedError as error:
        return error.refusal


def judged(ask: InferenceRequest) -> str:
    """Return the engine's error; empty if it accepts the request."""
    parse: Any = {
        "/v1/chat/completions": request_body.parse_chat,
        "/v1/completions": request_body.parse_completion,
        "/v1/embeddings": embeddings.parse,
        "/tokenize": tokenization.parse,
    }[ask.path]
    try:
        parse(ask.body)
    except EngineRefusedError as error:
        return error.refusal.message
    return ""


@settings(max_examples=samples(150))
@given(asked())
def test_every_request_becomes_an_engine_request_or_a_refusal(one: tuple[str, bytes]) -> None:
    found = answered(*one)
    if isinstance(found, Refusal):
        assert 400 <= found.status < 500
        assert found.message
        return
    assert orjson.loads(found.body)["model"] == found.model
    # Engines may refuse values, but must know the names.
    assert "Unknown parameter" not in judged(found)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"7", b"\xff", b'{"model": "\\ud800"}', b'{"model": 7}',
        b'{"model": "m", "messages": ' + b"[" * 100_000,
        b'{"model": "m", "prompt": "x", "options": ' + b'{"a":' * 400 + b"1" + b"}" * 400 + b"}",
        b'{"model": "m", "max_tokens": 5, "messages": [], "tools": [' + b"[" * 400 + b"]" * 401 + b"}",
        b'{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "tools":'
        b' [{"name": "f", "input_schema": {"a": ' + b"[" * 400 + b"]" * 400 + b"}}]}",
    ],
)  # fmt: skip
def test_hostile_bodies_are_refused(path: str, raw: bytes) -> None:
    found = answered(path, raw)
    # Some are harmless on some paths.
    assert isinstance(found, InferenceRequest) or found.status == 400


def test_neighbours_of_one_role_are_one_turn() -> None:
    turns = [
        AnthropicMessage(role="user", content="a"),
        AnthropicMessage(role="user", content=[{"type": "text", "text": "b"}]),
        AnthropicMessage(role="assistant", content=[{"type": "text", "text": "c"}]),
        AnthropicMessage(role="assistant", content="d"),
        AnthropicMessage(role="system", content="e"),
        AnthropicMessage(role="user", content="f"),
    ]
    shown = [
        (turn["role"], turn["content"]) for turn in request_translator.translate_messages(turns)
    ]
    assert shown == [
        ("user", "a\n\nb"), ("assistant", "c\n\nd"), ("system", "e"), ("user", "f"),
    ]  # fmt: skip


def test_images_become_parts_of_their_message() -> None:
    picture = {"source": {"type": "base64", "media_type": "image/webp", "data": "AA"}}
    image = {"type": "image", **picture}
    part = {"type": "image_url", "image_url": {"url": "data:image/webp;base64,AA"}}
    call = {"type": "tool_use", "id": "c1", "name": "shoot", "input": {}}
    turns = [
        AnthropicMessage(role="user", content="a"),
        AnthropicMessage(role="user", content=[image, {"type": "text", "text": "b"}]),
        AnthropicMessage(role="assistant", content=[call]),
        AnthropicMessage(
            role="user", content=[{"type": "tool_result", "tool_use_id": "c1", "content": [image]}]
        ),
    ]
    found = request_translator.translate_messages(turns)
    assert found[0]["content"] == [
        {"type": "text", "text": "a"},
        part,
        {"type": "text", "text": "b"},
    ]
    assert found[-1] == {"role": "tool", "tool_call_id": "c1", "content": [part]}
    said = ollama_request_translator.OllamaMessage(role="user", content="what", images=["AA"])
    assert ollama_request_translator.translate_messages([said])[0]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "text", "text": "what"},
    ]


def test_what_a_call_gave_back_belongs_to_it() -> None:
    def tool(**more: Any) -> ollama_request_translator.OllamaMessage:
        return ollama_request_translator.OllamaMessage(role="tool", content="x", **more)

    calls = [
        OllamaToolCall(function=OllamaFunction(name=name, arguments={"a": 1}))
        for name in ("f", "g", "f")
    ]
    said = ollama_request_translator.OllamaMessage(role="assistant", tool_calls=calls)
    found = ollama_request_translator.translate_messages(
        [said, tool(tool_name="g"), tool(), tool(tool_name="f")]
    )
    ids = [call["id"] for call in found[0]["tool_calls"]]
    assert len(set(ids)) == 3
    assert [one["tool_call_id"] for one in found[1:]] == [ids[1], ids[0], ids[2]]
    with pytest.raises(RefusedError):
        ollama_request_translator.translate_messages([said, tool(tool_name="h")])


@pytest.mark.parametrize(
    ("fields", "cut"),
    [({}, {"truncate_prompt_tokens": -1}), ({"truncate": False}, {})],
)
def test_long_texts_are_cut_unless_the_client_forbids_it(
    fields: dict[str, bool], cut: dict[str, int]
) -> None:
    body = orjson.dumps({"model": "m", "input": ["x"], **fields})
    translated = ollama_request_translator.embed_to_openai(
        ollama_request_translator.read_embed(body)
    )
    assert translated == {"model": "m", "input": ["x"], **cut}


def test_conversations_stick() -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    named = read("/v1/messages", orjson.dumps({**body, "metadata": {"user_id": "me"}}))
    assert named.session == "me"
    assert named.prompt == orjson.dumps(body["messages"])
    assert named.is_resumable
    assert not read("/api/embed", b'{"model": "m", "input": "x"}').prompt
