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
    ([{"role": "user", "content": "x", "name": ""}], "messages[0].name"),
    (
        [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
        "messages[0].function_call",
    ),
    (
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
        "messages[0].tool_calls[0].id",
    ),
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


FOREIGN: list[dict[str, Any]] = [
    {"role": "user", "content": "x", "tool_calls": [], "timestamp": 5, "colour": "red"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
            {
                "type": "text",
                "text": "y",
                "annotations": [],
                "cache_control": {"type": "ephemeral"},
            },
        ],
        "reasoning": "hm",
        "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
        "provider_specific_fields": {"citations": []},
        "annotations": [{"type": "url_citation"}],
        "audio": {"id": "a"},
        "function_call": {},
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "extra_content": {"google": {"thought_signature": "s"}},
                "function": {"name": "f", "arguments": "{}", "parsed_arguments": None},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "name": "f", "content": None, "is_error": False},
    {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
    {"role": "user", "content": "z", "tool_call_id": None, "reasoning_content": None},
]


def test_a_history_of_other_servers_goes_on() -> None:
    request = chat(messages=FOREIGN)
    assert isinstance(request.prompt, Conversation)
    assert [turn["content"] for turn in request.prompt.messages] == ["x", "y", "", "", "z"]
    assert request.prompt.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert request.ignored == ()


def test_an_image_in_a_result_becomes_a_note_of_a_text_model() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    result = {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [{"type": "text", "text": "a"}, image],
    }
    request = chat(messages=[CALLED, result])
    assert isinstance(request.prompt, Conversation)
    assert "An image was left out" in request.prompt.messages[1]["content"]
    assert request.ignored == ("messages.image_url",)


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "Paris"])
def test_arguments_that_are_no_object_reach_the_template_as_text(arguments: str) -> None:
    prompt = chat(messages=[call(arguments=arguments)]).prompt
    assert isinstance(prompt, Conversation)
    function = {"name": "f", "arguments": {"arguments": arguments}}
    assert prompt.messages[0]["tool_calls"][0]["function"] == function


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
