"""What a request may say, and what it is told if it says something else."""

import json
import re
from typing import Any

import pytest

from engine.errors import Refusal, RefusedError
from engine.jobs import SamplingParams
from engine.openai import limits, request_body
from engine.openai.request_body import Conversation, GenerationRequest, TextPrompts

TURNS = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> GenerationRequest:
    return request_body.parse_chat(json.dumps({"model": "m", "messages": TURNS} | fields).encode())


def complete(**fields: Any) -> GenerationRequest:
    return request_body.parse_completion(
        json.dumps({"model": "m", "prompt": "hi"} | fields).encode()
    )


def refused(call: Any, *arguments: Any, **fields: Any) -> Refusal:
    with pytest.raises(RefusedError) as caught:
        call(*arguments, **fields)
    return caught.value.refusal


NEUTRAL: list[dict[str, Any]] = [
    {"n": 1},
    {"presence_penalty": 0, "frequency_penalty": 0.0},
    {"logit_bias": {}},
    {"logit_bias": {"5": 0}},
    {"logprobs": False, "top_logprobs": None},
    {"tools": None, "tool_choice": "none", "parallel_tool_calls": True},
    {"tools": []},
    {"response_format": {"type": "text"}},
    {"temperature": None, "top_p": None, "max_tokens": None, "stop": None, "seed": None},
    {"top_k": 0, "min_p": 0, "repetition_penalty": 1, "xtc_probability": 0.0},
    {"top_k": -1, "top_p": 1},
    {"stream": None, "stream_options": None, "include_performance": False},
    {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
    {"session_id": "s"},
    {"safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "in_memory"},
    {"verbosity": "medium", "modalities": ["text"], "prediction": None, "audio": None},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
def test_values_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


def test_every_way_to_sample_reaches_the_job() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
    }
    wanted = SamplingParams(**given, logit_bias=((7, 100.0), (9, -3.5)))  # type: ignore[arg-type]
    bias = {"9": -3.5, "7": 100}
    assert chat(**given, logit_bias=bias).sampling == wanted
    assert complete(**given, logit_bias=bias).sampling == wanted
    assert chat().sampling == SamplingParams(temperature=1.0)
    assert (chat(seed=5).seed, chat().seed) == (5, None)


def test_the_smallest_share_is_the_likeliest_alone() -> None:
    assert chat(top_p=0, top_k=7).sampling == SamplingParams(temperature=1.0, top_k=1)
    assert chat(temperature=1e-9).sampling == SamplingParams(temperature=0.0)


def test_likelihoods_are_asked_for_in_two_ways() -> None:
    assert chat(logprobs=True).top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).top_logprobs == 20
    assert complete(logprobs=5).top_logprobs == 5
    assert complete(logprobs=0).top_logprobs == 0
    assert complete().top_logprobs is None


REFUSED = [
    ("tools", [1]),
    ("tool_choice", "required"),
    ("response_format", {"type": "yaml"}),
    ("logprobs", 1),
    ("top_logprobs", 3),
    ("top_logprobs", 21),
    ("logit_bias", {"x": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"07": 5}),
    ("logit_bias", {"7": 101}),
    ("logit_bias", {"7": "1"}),
    ("logit_bias", [5]),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 2.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.5),
    ("xtc_probability", -0.1),
    ("xtc_threshold", 0.6),
    ("n", 0),
    ("n", 129),
    ("n", True),
    ("functions", [{}]),
    ("function_call", {"name": "f"}),
    ("modalities", ["audio"]),
    ("audio", {"voice": "alloy", "format": "wav"}),
    ("prediction", {"type": "content", "content": "x"}),
    ("web_search_options", {}),
    ("store", True),
    ("verbosity", "low"),
    ("service_tier", "flex"),
    ("prompt_cache_retention", "24h"),
    ("reasoning_effort", "enormous"),
    ("metadata", {"a": 1}),
    ("user", 1),
    ("safety_identifier", 1),
    ("prompt_cache_key", 1),
    ("temperature", 2.1),
    ("temperature", -0.1),
    ("temperature", "1"),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_completion_tokens", 0),
    ("seed", 2**70),
    ("seed", "1"),
    ("stop", [""]),
    ("stop", ""),
    ("stop", [1]),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("include_performance", 1),
    ("fleet", {"tokens": [], "seed": 1, "prompt": "", "id": "x", "created": 1}),
    ("model", 1),
    ("messages", []),
    ("messages", "abc"),
    ("messages", None),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=str)
def test_what_the_engine_does_not_do_is_refused_by_name(name: str, value: Any) -> None:
    refusal = refused(chat, **{name: value})
    assert (refusal.status, re.split(r"[.\[]", refusal.param or "")[0]) == (400, name)
    assert refusal.type == "invalid_request_error"
    assert name in refusal.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("suffix", "x"),
        ("logprobs", 6),
        ("logprobs", True),
        ("echo", "yes"),
        ("messages", TURNS),
        ("top_logprobs", 1),
        ("max_completion_tokens", 5),
        ("metadata", {}),
    ],
)
def test_completions_have_names_of_their_own(name: str, value: Any) -> None:
    assert refused(complete, **{name: value}).param == name


def test_completions_know_what_chats_do_not() -> None:
    assert complete(suffix="", best_of=3, n=3, echo=True) == complete(n=3, echo=True)
    assert complete(echo=True).is_echoed
    assert refused(complete, echo=True, logprobs=1).param == "echo"
    assert refused(complete, best_of=3, n=2).param == "best_of"
    for name in ("echo", "best_of", "suffix"):
        assert refused(chat, **{name: 1}).code == "unknown_parameter"


def test_an_unknown_name_gets_the_nearest_known_one() -> None:
    refusal = refused(chat, temprature=1)
    assert (refusal.param, refusal.code) == ("temprature", "unknown_parameter")
    assert "'temperature'" in refusal.message


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
def test_messages_are_checked(messages: Any, param: str) -> None:
    assert refused(chat, messages=messages).param == param


def test_messages_become_what_templates_take() -> None:
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


@pytest.mark.parametrize(
    ("prompt", "contents"),
    [
        ("hi", ("hi",)),
        (["hi"], ("hi",)),
        ([1, 2], ((1, 2),)),
        ([[1, 2]], ((1, 2),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
    ids=str,
)
def test_prompts_come_in_four_shapes(prompt: Any, contents: Any) -> None:
    request = complete(prompt=prompt, n=2)
    assert request.prompt == TextPrompts(contents=contents)
    assert request.size == 2 * len(contents)


@pytest.mark.parametrize("prompt", [[], None, 3, [1, "a"], ["a", 1], [True], [-1]], ids=str)
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert (refused(complete, prompt=prompt).param or "").split("[")[0] == "prompt"


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff{", b"[1]", b'"x"', b"[" * 5000, b'{"a":NaN}'])
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    assert refused(request_body.parse_chat, raw).status == 400


def test_both_limits_at_once_are_refused() -> None:
    assert refused(chat, max_tokens=1, max_completion_tokens=2).param == "max_tokens"


@pytest.mark.parametrize("tokens", [[], [512], [-1], [10**30]], ids=str)
def test_tokens_must_exist(tokens: list[int]) -> None:
    assert refused(limits.check_tokens, tokens, 512).param == "prompt"


@pytest.mark.parametrize(
    ("request_", "prompt_tokens", "budget"),
    [
        pytest.param(chat(), 90, 10, id="a chat takes what is left"),
        pytest.param(complete(), 50, 16, id="a completion takes sixteen"),
        pytest.param(complete(), 95, 5, id="or what is left"),
        pytest.param(chat(max_completion_tokens=10), 90, 10, id="an exact fit"),
    ],
)
def test_budget(request_: GenerationRequest, prompt_tokens: int, budget: int) -> None:
    assert limits.resolve_max_tokens(request_, prompt_tokens, 100) == budget


@pytest.mark.parametrize(
    ("request_", "prompt_tokens", "numbers"),
    [
        (chat(), 100, ("100 tokens", "resulted in 100")),
        (chat(max_tokens=11), 90, ("100 tokens", "101 tokens (90 in the messages, 11 in")),
        (complete(max_tokens=1), 100, ("100 tokens", "your prompt resulted in 100")),
    ],
)
def test_no_room(request_: GenerationRequest, prompt_tokens: int, numbers: tuple[str, str]) -> None:
    refusal = refused(limits.resolve_max_tokens, request_, prompt_tokens, 100)
    assert refusal.code == "context_length_exceeded"
    assert all(number in refusal.message for number in numbers)
