"""vLLM's `structured_outputs` and `guided_*`: parsed, or refused by the name of their parameter."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.openai import request_body
from engine.openai.output_options import RequiredText
from schemas.wire.errors import RefusedError
from tests.support.sampling import samples


def form(**fields: Any) -> RequiredText | None:
    """Return the form of a completion; a chat has the same."""
    body = {"model": "tiny", "prompt": "hello"} | fields
    parsed = request_body.parse_completion(json.dumps(body).encode()).format
    del body["prompt"]
    body["messages"] = [{"role": "user", "content": "hello"}]
    assert request_body.parse_chat(json.dumps(body).encode()).format == parsed
    return parsed


def refusal(**fields: Any) -> tuple[str | None, str]:
    with pytest.raises(RefusedError) as caught:
        form(**fields)
    return caught.value.refusal.param, caught.value.refusal.message


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", {"type": "integer"}),
        ("json", '{"type": "integer"}'),
        ("regex", "[a-z]+"),
        ("choice", ["yes", "no"]),
        ("grammar", 'start: "a" | "b"'),
        ("grammar", 'root ::= "a" | [bc]+'),
    ],
)
def test_both_names_mean_the_same(kind: str, value: Any) -> None:
    old, new = form(**{f"guided_{kind}": value}), form(structured_outputs={kind: value})
    assert old is not None
    assert new is not None
    assert (old.value, old.param) == (new.value, f"guided_{kind}")
    assert new.param == f"structured_outputs.{kind}"


def test_nothing_is_asked_for() -> None:
    bodies: list[dict[str, Any]] = [
        {"guided_json": None},
        {"structured_outputs": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "regex": None}},
    ]
    for fields in bodies:
        assert form(**fields) is None


def test_any_object() -> None:
    wanted = form(structured_outputs={"json_object": True})
    assert wanted is not None
    assert wanted.schema == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": {"typo": 1}}, "guided_json", "typo"),
        ({"guided_json": {"pattern": "["}, "guided_regex": "a"}, "guided_regex", "ask for several"),
        ({"guided_regex": ""}, "guided_regex", "at least 1 character"),
        ({"guided_regex": "a" * 2_001}, "guided_regex", "at most 2000"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": ["a"] * 1_001}, "guided_choice", "at most 1000"),
        ({"guided_choice": ["a" * 40_000]}, "guided_choice", "40000 characters"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]", "at least 1 character"),
        ({"guided_grammar": "start: A & B"}, "guided_grammar", "Line 1: '&'"),
        ({"guided_grammar": 'start: "a"\n%json {}'}, "guided_grammar", "Line 2: '%json'"),
        ({"guided_grammar": "start: @answer"}, "guided_grammar", "'@answer'"),
        (
            {"guided_grammar": "root ::= other"},
            "guided_grammar",
            "Line 1: there is no rule 'other'",
        ),
        ({"guided_grammar": 'a ::= "b"'}, "guided_grammar", "no rule 'root'"),
        ({"guided_grammar": 'root ::= "b"\nroot ::= "c"'}, "guided_grammar", "defined twice"),
        ({"guided_grammar": 'root ::= "b"\n::='}, "guided_grammar", "Line 1: '\"b\"'"),
        ({"guided_grammar": 'root ::= "b"\n  %'}, "guided_grammar", "Line 2: '%' is not GBNF"),
        ({"guided_grammar": 'root ::= "\\ud800"'}, "guided_grammar", "not a character"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "xml"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "several",
        ),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "'guided_regex'"),
        (
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            "ignore_eos",
            "'structured_outputs'",
        ),
    ],
)
def test_refusals_name_the_parameter(fields: dict[str, Any], param: str, words: str) -> None:
    at, message = refusal(**fields)
    assert (at, words in message) == (param, True), message


def test_a_response_format_beside_it_is_refused() -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "response_format": {"type": "json_object"},
        "guided_regex": "a",
    }
    with pytest.raises(RefusedError, match="'response_format' and 'guided_regex' ask for two"):
        request_body.parse_chat(json.dumps(body).encode())
    body["response_format"] = {"type": "text"}
    assert request_body.parse_chat(json.dumps(body).encode()).format is not None


_SIGNS = st.text("ab:=|()[]{}/\\\"'&@%<>~?*+-#\n ", max_size=60)


@settings(max_examples=samples(300))
@given(text=_SIGNS | _SIGNS.map(lambda rest: f"root ::= {rest}"))
def test_any_text_is_read_or_refused(text: str) -> None:
    for kind in ("json", "regex", "grammar"):
        with contextlib.suppress(RefusedError):
            form(**{f"guided_{kind}": text})
