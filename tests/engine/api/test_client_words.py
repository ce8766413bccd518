"""Words that applications send to other servers: one row for each, with the request that shows what it does.

Adapters by request, several in one batch and in PEFT's format have engines of their own (tests/engine/test_lora_modules.py).
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from engine.openai import request_body
from engine.openai.request_body import RequestPolicy
from schemas.sampling import Sampling
from schemas.wire.errors import RefusedError
from tests.support.engine_process import Engine, Reply

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

Json = dict[str, Any]
HELLO = [{"role": "user", "content": "hello"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
PART = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}


def text(reply: Reply) -> str:
    choice = reply.json["choices"][0]
    found: str = choice["text"] if "text" in choice else choice["message"]["content"] or ""
    return found


def prompt_tokens(reply: Reply) -> int:
    count: int = reply.json["usage"]["prompt_tokens"]
    return count


def is_left_out(name: str) -> Callable[[Reply], bool]:
    return lambda reply: name in reply.headers["warning"]


def has(*path: Any) -> Callable[[Reply], bool]:
    """Return whether the answer has something at this path."""

    def look(reply: Reply) -> bool:
        found: Any = reply.json
        for step in path:
            found = found[step]
        return bool(found or found == 0)

    return look


CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
# Prompts of `Bob: hello` (`hello` has 16 tokens), and of an answer that is still open (28 with a new turn).
NAMED_TOKENS, OPEN_TOKENS = 20, 19
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}

WORDS: list[tuple[str, str, Json, Callable[[Reply], bool]]] = [
    (
        "chat_template_kwargs",
        CHAT,
        {"chat_template_kwargs": {"enable_thinking": False}},
        lambda reply: not reply.json["choices"][0]["message"].get("reasoning_content"),
    ),
    (
        "name",
        CHAT,
        {"messages": [{"role": "user", "content": "hello", "name": "Bob"}]},
        # The template has no place for names: `Bob: ` is written before the text.
        lambda reply: prompt_tokens(reply) == NAMED_TOKENS,
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
    (
        "echo and logprobs",
        COMPLETION,
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        lambda reply: text(reply) == "We hold these"
        and reply.json["choices"][0]["logprobs"]["token_logprobs"][0] is None,
    ),
    ("repeat_penalty", CHAT, {"repeat_penalty": 1.9}, has("choices")),
    (
        "more than 4 stops",
        CHAT,
        {"stop": ["zq1", "zq2", "zq3", "zq4", "zq5", ""]},
        lambda reply: reply.json["choices"][0]["finish_reason"] == "length",
    ),
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
        "guided_json",
        CHAT,
        {"guided_json": SCHEMA, "max_tokens": 40},
        lambda reply: json.loads(text(reply)).keys() == {"a"},
    ),
    (
        "guided_regex",
        CHAT,
        {"guided_regex": "[ab]{3}"},
        lambda reply: set(text(reply)) <= {"a", "b"} and len(text(reply)) == 3,
    ),
    (
        "guided_choice",
        CHAT,
        {"guided_choice": ["yes", "no"]},
        lambda reply: text(reply) in ("yes", "no"),
    ),
    (
        "guided_grammar",
        CHAT,
        {"guided_grammar": 'root ::= "ab" "c"'},
        lambda reply: text(reply) == "abc",
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
    (
        "store",
        RESPONSES,
        {"input": "hello", "store": True},
        lambda reply: reply.json["store"] is False,
    ),
    ("truncation auto", RESPONSES, {"input": "hello", "truncation": "auto"}, has("output")),
    (
        "reasoning.summary",
        RESPONSES,
        {"input": "hello", "reasoning": {"summary": "auto"}},
        has("output"),
    ),
    ("cache_control", CHAT, {"messages": [{"role": "user", "content": [PART]}]}, has("choices")),
    (
        "message ids",
        CHAT,
        {"messages": [{"role": "user", "content": "hello", "id": "m1", "timestamp": 1}]},
        has("choices"),
    ),
    ("unknownParameters Warn", CHAT, {"top_n_sigma": 1.0}, is_left_out("top_n_sigma")),
    (
        "/tokenize",
        "/tokenize",
        {"prompt": "We hold these"},
        lambda reply: reply.json["count"] == len(reply.json["tokens"]) > 0,
    ),
    ("/detokenize", "/detokenize", {"tokens": [60, 61]}, has("prompt")),
    ("max_model_len", "/v1/models", {}, lambda r: r.json["data"][0]["max_model_len"] == 4096),
]


@pytest.mark.parametrize(("word", "path", "fields", "shows"), WORDS, ids=[one[0] for one in WORDS])
def test_each_word_does_what_it_says(
    engine: Engine, word: str, path: str, fields: Json, shows: Callable[[Reply], bool]
) -> None:
    given: Json = {"temperature": 0}
    if path == CHAT:
        given |= {"messages": HELLO, "max_tokens": 8}
    elif path == COMPLETION:
        given |= {"prompt": "We hold these", "max_tokens": 8}
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


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ],
)
def test_similarity_is_for_embedding_models(engine: Engine, path: str, fields: Json) -> None:
    """With an embedding model they answer: tests/engine/openai/test_similarity.py, tests/engine/batch/test_embedder.py."""
    reply = engine.post(path, **fields)
    assert reply.status == 400
    assert "embedding" in reply.error["message"]


def test_a_deployment_may_refuse_what_it_would_leave_out() -> None:
    raw = json.dumps({"model": "m", "messages": HELLO, "top_n_sigma": 1.0}).encode()
    assert request_body.parse_chat(raw).ignored == ("top_n_sigma",)
    with pytest.raises(RefusedError, match="top_n_sigma"):
        request_body.parse_chat(raw, policy=RequestPolicy(refuses_unknown=True))


def test_a_name_that_no_server_has_is_always_refused(engine: Engine) -> None:
    reply = engine.chat(temprature=1)
    assert (reply.status, reply.error["param"]) == (400, "temprature")
    assert "temperature" in reply.error["message"]


def test_what_is_left_out_is_counted(engine: Engine) -> None:
    engine.chat(top_n_sigma=1.0)
    metrics = engine.request("GET", "/metrics").raw.decode()
    assert 'parameter="top_n_sigma"' in metrics


def test_a_chat_without_max_tokens_gets_the_deployments_default() -> None:
    raw = json.dumps({"model": "m", "messages": HELLO}).encode()
    policy = RequestPolicy(sampling=Sampling(max_tokens=77))
    assert request_body.parse_chat(raw, policy=policy).default_max_tokens == 77
