"""Request bodies: accepted values, refused values and the parsed request."""

import dataclasses
import json
import re
from typing import Any

import pytest

from engine.jobs import SamplingParams
from engine.openai import limits, parameters, request_body
from engine.openai.request_body import GenerationRequest, RequestPolicy, TextPrompts
from schemas.sampling import Sampling
from tests.support.engine_requests import TURNS, chat, complete, refused

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
def test_neutral_values_are_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


def test_every_sampling_parameter_is_parsed() -> None:
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
    expected = SamplingParams(**given, logit_bias=((7, 100.0), (9, -3.5)))  # type: ignore[arg-type]
    bias = {"9": -3.5, "7": 100}
    assert chat(**given, logit_bias=bias).sampling == expected
    assert complete(**given, logit_bias=bias).sampling == expected
    assert chat().sampling == SamplingParams(temperature=1.0)
    assert (chat(seed=5).seed, chat().seed) == (5, None)


def test_a_top_p_or_temperature_of_zero_is_greedy() -> None:
    assert chat(top_p=0, top_k=7).sampling == SamplingParams(temperature=1.0, top_k=1)
    assert chat(temperature=1e-9).sampling == SamplingParams(temperature=0.0)


def test_no_limit_and_no_stop_word_as_other_servers_say_it() -> None:
    free = {"max_tokens": 2**31, "fit_max_tokens": True}
    assert chat(max_tokens=-1) == chat(max_completion_tokens=-1) == chat(**free)
    assert complete(max_tokens=-1) == complete(**free)
    assert chat(stop="").stops == chat(stop=[""]).stops == ()
    assert chat(stop=["a", "", "b"]).stops == ("a", "b")
    assert len(chat(stop=[str(number) for number in range(64)]).stops) == 64


def test_answers_that_must_not_end_early() -> None:
    assert chat(min_tokens=3).min_tokens == complete(min_tokens=3).min_tokens == 3
    assert chat(ignore_eos=True).min_tokens > 10**9
    assert chat(ignore_eos=False, min_tokens=3).min_tokens == 3
    object_ = {"type": "json_object"}
    assert refused(chat, ignore_eos=True, response_format=object_).param == "ignore_eos"
    assert refused(chat, min_tokens=2, response_format=object_).param == "min_tokens"
    assert chat(min_tokens=2, response_format={"type": "text"}).min_tokens == 2


STRICT = RequestPolicy(refuses_unknown=True)


def strict_chat(**fields: Any) -> GenerationRequest:
    body = json.dumps({"model": "m", "messages": TURNS} | fields).encode()
    return request_body.parse_chat(body, policy=STRICT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mirostat", 2),
        ("skip_special_tokens", False),
        ("ttl", 60),
        ("provider", {"order": ["x"]}),
        ("service_tier", "flex"),
        ("verbosity", "low"),
        ("prediction", {"type": "content", "content": "x"}),
    ],
)
def test_what_only_others_have_is_left_out_or_refused(name: str, value: Any) -> None:
    assert chat(**{name: value}) == dataclasses.replace(chat(), ignored=(name,))
    assert chat(**{name: None}) == chat()
    assert strict_chat(**{name: None}) == strict_chat()
    refusal = refused(strict_chat, **{name: value})
    assert (refusal.param, refusal.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("name", sorted(parameters.REPLACEMENTS))
def test_what_would_change_the_answer_is_refused_with_a_way_out(name: str) -> None:
    for parse in (chat, complete, strict_chat):
        refusal = refused(parse, **{name: "x"})
        assert (refusal.param, refusal.code) == (name, "unsupported_parameter")
        assert parameters.REPLACEMENTS[name] in refusal.message


def test_no_parameter_is_in_two_tables() -> None:
    others = parameters.OTHERS.keys() | parameters.REPLACEMENTS.keys()
    assert len(others) == len(parameters.OTHERS) + len(parameters.REPLACEMENTS)
    assert not others & request_body.CHAT_PARAMETERS.names
    assert others & request_body.COMPLETION_PARAMETERS.names == set()


def test_a_deployment_fills_in_what_requests_leave_out() -> None:
    sampling = Sampling(max_tokens=50, temperature=0.5, top_k=7, repetition_penalty=1.5)
    policy = RequestPolicy(sampling=sampling)

    def parsed(**fields: Any) -> GenerationRequest:
        body = json.dumps({"model": "m", "messages": TURNS} | fields).encode()
        return request_body.parse_chat(body, policy=policy)

    filled = parsed()
    assert filled.sampling == SamplingParams(temperature=0.5, top_k=7, repetition_penalty=1.5)
    assert (filled.max_tokens, filled.default_max_tokens) == (None, 50)
    assert limits.resolve_max_tokens(filled, 10, 100) == 50
    assert limits.resolve_max_tokens(filled, 70, 100) == 30
    assert limits.resolve_max_tokens(parsed(max_tokens=-1), 10, 100) == 90
    assert limits.resolve_max_tokens(parsed(max_completion_tokens=3), 10, 100) == 3
    own = parsed(temperature=0, top_k=0, repeat_penalty=1.1)
    assert own.sampling == SamplingParams(temperature=0.0, repetition_penalty=1.1)
    assert parsed(temperature=None) == filled
    text = request_body.parse_completion(b'{"model":"m","prompt":"x"}', policy=policy)
    assert text.sampling == filled.sampling
    assert limits.resolve_max_tokens(text, 10, 100) == 50


def test_llama_cpps_name_of_the_repetition_penalty() -> None:
    assert chat(repeat_penalty=1.2).sampling == chat(repetition_penalty=1.2).sampling
    refusal = refused(chat, repeat_penalty=1.2, repetition_penalty=1.2)
    assert refusal.param == "repeat_penalty"


@pytest.mark.parametrize(
    "name", ["tools", "messages", "chat_template", "add_generation_prompt", "self", "max_tokens"]
)
def test_template_variables_replace_nothing_that_the_engine_sets(name: str) -> None:
    refusal = refused(chat, chat_template_kwargs={name: True})
    assert (refusal.status, refusal.param) == (400, f"chat_template_kwargs.{name}")


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": ""},
        {
            "role": "assistant",
            "content": "I look",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
    ],
)
def test_only_a_text_of_the_assistant_is_continued(last: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": "hi"}, last]
    assert refused(chat, messages=turns, continue_final_message=True).param == (
        "continue_final_message"
    )


def test_an_answer_continues_or_begins() -> None:
    turns = [{"role": "assistant", "content": "hi"}]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(chat, messages=turns, **both).param == "add_generation_prompt"
    usual = {"continue_final_message": False, "add_generation_prompt": True}
    assert chat(messages=turns, **usual) == chat(messages=turns)


def test_labels_of_frontends_are_dropped() -> None:
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [marked], "id": "m1", "timestamp": 1.5}
    request = chat(messages=[message], store=True, cache_prompt=False)
    assert request == chat(messages=[{"role": "user", "content": "hi"}])


def test_logprobs_of_chats_and_completions() -> None:
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
    ("web_search_options", {}),
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
    ("max_tokens", -2),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_completion_tokens", 0),
    ("seed", 2**70),
    ("seed", "1"),
    ("stop", [1]),
    ("stop", ["a"] * 65),
    ("chat_template_kwargs", [1]),
    ("chat_template_kwargs", {str(number): 1 for number in range(33)}),
    ("chat_template_kwargs", {"a": "x" * (16 << 10)}),
    ("cache_prompt", 1),
    ("ignore_eos", 1),
    ("min_tokens", -1),
    ("repeat_penalty", 2.1),
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
def test_unsupported_values_are_refused_by_name(name: str, value: Any) -> None:
    refusal = refused(chat, **{name: value})
    assert (refusal.status, re.split(r"[.\[]", refusal.param or "")[0]) == (400, name)
    assert refusal.type == "invalid_request_error"
    assert name in refusal.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("suffix", 1),
        ("logprobs", 6),
        ("logprobs", True),
        ("echo", "yes"),
        ("messages", TURNS),
        ("top_logprobs", 1),
        ("max_completion_tokens", 5),
        ("metadata", {}),
    ],
)
def test_values_that_completions_refuse(name: str, value: Any) -> None:
    assert refused(complete, **{name: value}).param == name


def test_parameters_of_completions_only() -> None:
    assert complete(suffix="", best_of=3, n=3, echo=True) == complete(n=3, echo=True)
    assert complete(echo=True).is_echoed
    scored = complete(echo=True, logprobs=1, max_tokens=0)
    assert (scored.has_prompt_logprobs, scored.is_prompt_only, scored.max_tokens) == (True, True, 1)
    assert not complete(echo=True).has_prompt_logprobs
    assert refused(complete, max_tokens=0).param == "max_tokens"
    assert refused(chat, max_tokens=0).param == "max_tokens"
    assert refused(complete, best_of=3, n=2).param == "best_of"
    extra = [{"filename": "a.py"}]
    assert refused(complete, input_extra=extra).param == "input_extra[0]"
    assert refused(complete, suffix="x", echo=True).param == "echo"
    assert refused(complete, suffix="x", prompt=[1, 2]).param == "prompt"
    for name in ("echo", "best_of", "suffix", "input_extra"):
        assert refused(chat, **{name: 1}).code == "unknown_parameter"


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
def test_prompts_are_texts_or_tokens(prompt: Any, contents: Any) -> None:
    request = complete(prompt=prompt, n=2)
    assert request.prompt == TextPrompts(contents=contents)
    assert request.size == 2 * len(contents)


@pytest.mark.parametrize("prompt", [[], None, 3, [1, "a"], ["a", 1], [True], [-1]], ids=str)
def test_malformed_prompts_are_refused(prompt: Any) -> None:
    assert (refused(complete, prompt=prompt).param or "").split("[")[0] == "prompt"


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff{", b"[1]", b'"x"', b"[" * 5000, b'{"a":NaN}'])
def test_a_body_must_be_a_json_object(raw: bytes) -> None:
    assert refused(request_body.parse_chat, raw).status == 400


def test_max_tokens_may_be_set_once() -> None:
    assert refused(chat, max_tokens=1, max_completion_tokens=2).param == "max_tokens"


USER = {"role": "user", "content": "x"}


def test_the_number_of_messages_is_bounded() -> None:
    assert chat(messages=[USER] * 4096).is_chat
    refusal = refused(chat, messages=[USER] * 4097)
    assert (refusal.status, refusal.param) == (400, "messages")
    assert "4097" in refusal.message
    assert "4096" in refusal.message


@pytest.mark.parametrize("prompt", [[7] * 101, [[7], [7] * 101]], ids=["tokens", "lists"])
def test_more_tokens_than_the_context_are_refused_before_they_are_looked_at(prompt: Any) -> None:
    def parse(context_length: int | None) -> Any:
        # The last token is no token, which only a look at it finds out.
        body = {"model": "m", "prompt": [*prompt[:-1], "x"] if prompt[0] == 7 else prompt}
        return request_body.parse_completion(
            json.dumps(body).encode(), policy=RequestPolicy(context_length=context_length)
        )

    refusal = refused(parse, 100)
    assert (refusal.code, refusal.param) == ("context_length_exceeded", "prompt")
    assert "101 tokens" in refusal.message


def test_a_million_wrong_tokens_are_one_error() -> None:
    refusal = refused(complete, prompt=[1, *["x"] * 300_000])
    assert (refusal.status, refusal.param) == (400, "prompt[1]")


def test_a_resume_point_has_no_more_tokens_than_the_context() -> None:
    fleet = {"tokens": [1] * 101, "seed": 1, "prompt": "", "id": "x", "created": 1}
    body = {"model": "m", "messages": TURNS, "stream": True, "fleet": fleet}
    refusal = refused(
        request_body.parse_chat,
        json.dumps(body).encode(),
        is_resumable=True,
        policy=RequestPolicy(context_length=100),
    )
    assert (refusal.code, refusal.param) == ("context_length_exceeded", "fleet.tokens")
