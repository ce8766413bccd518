"""Words that applications send to other servers: one row for each, with the request that shows what it does.

Adapters by request, several in one batch and in PEFT's format have engines of their own (tests/engine/test_lora_modules.py).
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engine_process import Engine, Reply

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

Json = dict[str, Any]
HELLO = [{"role": "user", "content": "hello"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def prompt_tokens(reply: Reply) -> int:
    count: int = reply.json["usage"]["prompt_tokens"]
    return count


def has(*path: Any) -> Callable[[Reply], bool]:
    """Return whether the answer has something at this path."""

    def look(reply: Reply) -> bool:
        found: Any = reply.json
        for step in path:
            found = found[step]
        return bool(found or found == 0)

    return look


CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
# The prompt of an answer that is still open (28 with a new turn).
OPEN_TOKENS = 19

WORDS: list[tuple[str, str, Json, Callable[[Reply], bool]]] = [
    (
        "chat_template_kwargs",
        CHAT,
        {"chat_template_kwargs": {"enable_thinking": False}},
        lambda reply: not reply.json["choices"][0]["message"].get("reasoning_content"),
    ),
    (
        "tool name",
        CHAT,
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "4"},
            ]
        },
        has("choices"),
    ),
    (
        "max_tokens -1",
        CHAT,
        {"max_tokens": -1, "stop": ["e", "a", "o", "i", " ", "t", "n", "s", "\n"]},
        has("choices"),
    ),
    ("repeat_penalty", CHAT, {"repeat_penalty": 1.9}, has("choices")),
    (
        "ignore_eos",
        CHAT,
        {"ignore_eos": True},
        lambda reply: reply.json["usage"]["completion_tokens"] == 8,
    ),
    (
        "continue_final_message",
        CHAT,
        {
            "messages": [*HELLO, {"role": "assistant", "content": "We hold"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        # The turn stays open: the end of the message, and the beginning of another one, are not written.
        lambda reply: prompt_tokens(reply) == OPEN_TOKENS,
    ),
    (
        "min_tokens",
        CHAT,
        {"min_tokens": 6},
        lambda reply: reply.json["usage"]["completion_tokens"] >= 6,
    ),
    (
        "include",
        RESPONSES,
        {"input": "hello", "include": ["reasoning.encrypted_content"]},
        has("output"),
    ),
    ("truncation auto", RESPONSES, {"input": "hello", "truncation": "auto"}, has("output")),
    (
        "reasoning.summary",
        RESPONSES,
        {"input": "hello", "reasoning": {"summary": "auto"}},
        has("output"),
    ),
    ("max_model_len", "/v1/models", {}, lambda r: r.json["data"][0]["max_model_len"] == 4096),
]


@pytest.mark.parametrize(("word", "path", "fields", "shows"), WORDS, ids=[one[0] for one in WORDS])
def test_each_word_does_what_it_says(
    engine: Engine, word: str, path: str, fields: Json, shows: Callable[[Reply], bool]
) -> None:
    given: Json = {"temperature": 0}
    if path == CHAT:
        given |= {"messages": HELLO, "max_tokens": 8}
    elif path == RESPONSES:
        given |= {"max_output_tokens": 8}
    else:
        given = {}
    if path == "/v1/models":
        reply = engine.request("GET", path)
    else:
        reply = engine.post(path, **given | fields)
    assert reply.status == 200, reply.raw
    assert shows(reply), reply.raw
