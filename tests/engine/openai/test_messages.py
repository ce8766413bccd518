"""Messages of a chat: refused by path, and converted for chat templates."""

from typing import Any

import pytest

from engine.openai.request_body import Conversation
from tests.support.engine_requests import chat, refused

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def call(**changes: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": "f", "arguments": "{}"} | changes
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}


MESSAGES = [
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": [], "content": "x"}], "messages[0].role"),
    ([{"role": "function", "content": "x", "name": "f"}], "messages[0].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([1], "messages[0]"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "assistant", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": "x", "name": ""}], "messages[0].name"),
    ([{"role": "user", "content": "x", "colour": "red"}], "messages[0].colour"),
    ([{"role": "user", "content": "x", "tool_calls": []}], "messages[0].tool_calls"),
    (
        [{"role": "assistant", "content": "x", "function_call": {}, "audio": {"id": "a"}}],
        "messages[0].audio",
    ),
    (
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
        "messages[0].tool_calls[0].id",
    ),
    ([call(arguments="{")], "messages[0].tool_calls[0].function.arguments"),
    ([call(arguments="[1]")], "messages[0].tool_calls[0].function.arguments"),
    ([call(name="")], "messages[0].tool_calls[0].function.name"),
    ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ([{"role": "tool", "content": "x", "tool_call_id": "c1"}, CALLED], "messages[0].tool_call_id"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        "messages[0].content[0].type",
    ),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "file"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES, ids=str)
def test_malformed_messages_are_refused_by_path(messages: Any, param: str) -> None:
    assert refused(chat, messages=messages).param == param


def test_messages_are_converted_for_templates() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ours = {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None}
    named = {"role": "user", "content": "d", "name": "bob"}
    sorry = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    result = {"role": "tool", "content": "42", "tool_call_id": "c1"}
    request = chat(
        messages=[{"role": "developer", "content": parts}, ours, named, sorry, CALLED, result]
    )
    function = {"name": "f", "arguments": {"x": 1}}
    assert isinstance(request.prompt, Conversation)
    assert request.prompt.messages == (
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "c"},
        named,
        {"role": "assistant", "content": "no"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"},
    )
