"""What requests become: values for values, and never a crash, whatever clients send."""

import json
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.asks import Ask, Heard
from gateway.clients.surface import Surface
from gateway.errors import Refusal, RefusedError
from gateway.known.keeper import TableKeeper
from gateway.surfaces.anthropic import content
from gateway.surfaces.anthropic.content import Message
from gateway.surfaces.anthropic.surface import Anthropic
from gateway.surfaces.ollama import messages
from gateway.surfaces.ollama.messages import Call, Function
from gateway.surfaces.ollama.surface import Ollama
from machinery.clock import SystemClock
from nodeagent.engine.errors import RefusedError as EngineRefusedError
from nodeagent.engine.openai import bodies, embeddings, tokenizing

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
    """Return a path, and a body that is nearly right."""
    names = draw(st.lists(st.sampled_from(sorted(GOOD)), max_size=6, unique=True))
    body = {"model": "m"} | {name: draw(st.sampled_from(GOOD[name])) for name in names}
    if draw(st.booleans()):
        body[draw(st.sampled_from([*GOOD, "model", "colour"]))] = draw(JSON)
    # Unlike orjson, this writes numbers of more than 64 bits.
    return draw(st.sampled_from(PATHS)), json.dumps(body).encode()


def surface(path: str) -> Surface:
    keeper = SimpleNamespace(table=SimpleNamespace(models={"m": None}))
    if path.startswith("/api"):
        return Ollama(cast("TableKeeper", keeper), SystemClock())
    return Anthropic()


def read(path: str, body: bytes) -> Ask:
    heard = Heard(path=path, query=b"", headers=[], request_id=b"1", body=body)
    return surface(path).read(heard)[0]


def answered(path: str, body: bytes) -> Ask | Refusal:
    try:
        return read(path, body)
    except RefusedError as error:
        return error.refusal


def judged(ask: Ask) -> str:
    """Return why an engine refuses it; empty if it does not."""
    parse: Any = {
        "/v1/chat/completions": bodies.parse_chat,
        "/v1/completions": bodies.parse_completion,
        "/v1/embeddings": embeddings.parse,
        "/tokenize": tokenizing.parse,
    }[ask.path]
    try:
        parse(ask.body)
    except EngineRefusedError as error:
        return error.refusal.message
    return ""


@settings(max_examples=150)
@given(asked())
def test_whatever_is_asked_is_asked_of_an_engine_or_refused(one: tuple[str, bytes]) -> None:
    found = answered(*one)
    if isinstance(found, Refusal):
        assert 400 <= found.status < 500
        assert found.message
        return
    assert orjson.loads(found.body)["model"] == found.model
    # Engines may refuse values, but they know the names.
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
    assert isinstance(found, Ask) or found.status == 400


def test_neighbours_of_one_role_are_one_turn() -> None:
    turns = [
        Message(role="user", content="a"),
        Message(role="user", content=[{"type": "text", "text": "b"}]),
        Message(role="assistant", content=[{"type": "text", "text": "c"}]),
        Message(role="assistant", content="d"),
        Message(role="system", content="e"),
        Message(role="user", content="f"),
    ]
    shown = [(turn["role"], turn["content"]) for turn in content.translate(turns)]
    assert shown == [
        ("user", "a\n\nb"), ("assistant", "c\n\nd"), ("system", "e"), ("user", "f"),
    ]  # fmt: skip


def test_what_a_call_gave_back_belongs_to_it() -> None:
    def tool(**more: Any) -> messages.Message:
        return messages.Message(role="tool", content="x", **more)

    calls = [Call(function=Function(name=name, arguments={"a": 1})) for name in ("f", "g", "f")]
    said = messages.Message(role="assistant", tool_calls=calls)
    found = messages.translate([said, tool(tool_name="g"), tool(), tool(tool_name="f")])
    ids = [call["id"] for call in found[0]["tool_calls"]]
    assert len(set(ids)) == 3
    assert [one["tool_call_id"] for one in found[1:]] == [ids[1], ids[0], ids[2]]
    with pytest.raises(RefusedError):
        messages.translate([said, tool(tool_name="h")])


def test_conversations_stick() -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    named = read("/v1/messages", orjson.dumps({**body, "metadata": {"user_id": "me"}}))
    assert named.session == "me"
    assert named.prompt == orjson.dumps(body["messages"])
    assert not named.is_resumable
    assert read("/v1/messages", orjson.dumps({**body, "stream": True})).is_resumable
    assert not read("/api/embed", b'{"model": "m", "input": "x"}').prompt
