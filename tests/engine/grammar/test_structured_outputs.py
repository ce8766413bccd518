"""Patterns, choices and grammars of clients: what they allow, and what they cost."""

import json
import re
import time
from typing import Any

import httpx
import openai
import pytest

from engine.errors import GrammarError
from engine.grammar import calls, client_grammar, lark
from engine.grammar.calls import CallRules
from engine.grammar.lark import FunctionSchema, ReasoningMarkers, ValueRules
from engine.text.formats import hermes
from tests.support.engine_process import Engine
from tests.support.grammars import allowed, encode, follow

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]


def fits(loaded: Any, grammars: Any, value: ValueRules, text: str) -> bool:
    """Return whether a text is a whole answer."""
    grammar = lark.answer_grammar(value, loaded.codec.traits.specials, None)
    grammars.check(grammar)
    matcher = grammars.matcher(grammar)
    return follow(matcher, encode(loaded, text)) and bool(
        allowed(matcher) & set(loaded.codec.eos_ids)
    )


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"[a-z]+\.com", ["ab.com"], ["ab", "ab.comx"]),
        (r"^(yes|no)$", ["yes", "no"], ["maybe"]),
        ("a/b", ["a/b"], ["a"]),
        (r"a\/b[\/]", ["a/b/"], ["a/b"]),
        ("a\nb", ["a\nb"], ["a b"]),
        ("a\\\nb", ["a\nb"], ["a b"]),
        ("a\\\\/", ["a\\/"], ["a/"]),
        ("a|b", ["a", "b"], ["ab"]),
    ],
)
def test_patterns(
    loaded: Any, grammars: Any, pattern: str, good: list[str], bad: list[str]
) -> None:
    value = lark.pattern_value(pattern)
    assert [fits(loaded, grammars, value, text) for text in good] == [True] * len(good)
    assert [fits(loaded, grammars, value, text) for text in bad] == [False] * len(bad)


def test_choices_are_plain_text(loaded: Any, grammars: Any) -> None:
    texts = ['say "a"', "back\\slash", "<b>", "é\n", "a/b"]
    value = lark.choice_value(texts)
    assert all(fits(loaded, grammars, value, text) for text in texts)
    assert not fits(loaded, grammars, value, "other")


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "x" answer ANSWER\nanswer: "-"\nANSWER: /[0-9]+/\nvalue: "unused"',
        'root ::= "x" dash num\ndash ::= "-"\nnum ::= [0-9]+',
    ],
)
def test_rules_of_a_client_do_not_meet_those_around_them(
    loaded: Any, grammars: Any, grammar: str
) -> None:
    value = lark.client_value(client_grammar.to_lark(grammar))
    assert fits(loaded, grammars, value, "x-17")
    assert not fits(loaded, grammars, value, "x-")
    specials = loaded.codec.traits.specials
    thought = ReasoningMarkers(start="<think>", end="</think>", is_open=False)
    matcher = grammars.matcher(lark.answer_grammar(value, specials, thought))
    assert follow(matcher, encode(loaded, "<think>hm</think>\nx-1"))


GBNF = r"""
# A list of moves
root   ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " "
           move "\n"){1,3}  # more
move   ::= (Pawn | non-pawn | castle) [+#]?
non-pawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
Pawn   ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"? | "\x41\u0042/" [^a-z/&\[\]"]
"""


def test_gbnf(loaded: Any, grammars: Any) -> None:
    value = lark.client_value(client_grammar.to_lark(GBNF))
    for text, is_whole in (
        ("1. e4 e5\n2. Nf3 Nc6+\n", True),
        ("1. e4 e5\n12. O-O-O exd5=Q#\n3. AB/- AB/é\n", True),
        ("1. e4 e5\n", False),
        ("1. e4 e9\n2. Nf3 Nc6\n", False),
        ("1. e4 AB/a\n2. Nf3 Nc6\n", False),
        ("1. e4 AB/[\n2. Nf3 Nc6\n", False),
    ):
        assert fits(loaded, grammars, value, text) is is_whole


def test_an_answer_is_a_call_or_has_the_form(loaded: Any, grammars: Any) -> None:
    empty = {"type": "object", "additionalProperties": False}
    rules = CallRules(
        syntax=hermes.SYNTAX,
        functions=(FunctionSchema(name="g", parameters=empty),),
        must_call=False,
        is_parallel=True,
        instead=lark.client_value('start: "yes" | "no"'),
    )
    grammar = calls.call_grammar(rules, loaded.codec.traits.specials, None)
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    for text, is_allowed in (("yes", True), (call, True), ("maybe", False)):
        assert follow(grammars.matcher(grammar), encode(loaded, text)) is is_allowed


@pytest.mark.parametrize(
    "grammar",
    [
        "start: A\nA: /" + "(" * 900 + "/",
        "start: " + "(" * 16_000 + '"a"' + ")" * 16_000,
        "start: a\n" + "\n".join(f"a{at}: a{at + 1} a{at + 1}" for at in range(1_000)),
        "start: start",
        'start: "' + "\\u0000" * 5_000,
        'start: x x x x x x\nx: x x | "a" | ""',
        "start: (A B){1,1000000000}\nA: /(a{1,1000}){1,1000}/\nB: /(.*a){50}/",
        "start: <[1]> <[99999999]> <nothing>",
        "start: %json",
        "start[lazy]: /.*/ \n%ignore /.*/",
        "root ::= [" + "a-" * 5_000,
    ],
)
def test_hostile_grammars_are_cheap(loaded: Any, grammars: Any, grammar: str) -> None:
    started, refusal = time.process_time(), "not refused"
    try:
        value = lark.client_value(client_grammar.to_lark(grammar))
        text = lark.answer_grammar(value, {}, None)
        grammars.check(text)
        matcher = grammars.matcher(text)
        for token in encode(loaded, "a" * 200):
            if matcher.fault is not None or token not in allowed(matcher):
                break
            matcher.take(token)
    except GrammarError as error:
        refusal = str(error)
    assert 5 < len(refusal) < 600
    assert time.process_time() - started < 10


def complete(engine: Engine, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 60, "temperature": 1, **fields}
    return httpx.post(f"{engine.url}/completions", json=body, timeout=60)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.ci)])
def test_answers_have_the_form(client: openai.OpenAI, caller: Engine, seed: int) -> None:
    for extra, pattern in (
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_regex": "[ab]{3}-[0-9]"}, "[ab]{3}-[0-9]"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [xy]'}}, "a[xy]"),
        ({"guided_json": {"enum": [1, 2]}}, "[12]"),
    ):
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=60,
            seed=seed,
            extra_body=extra,
        )
        assert re.fullmatch(pattern, answer.choices[0].message.content or "")
        completion = complete(caller, seed=seed, **extra).json()
        assert re.fullmatch(pattern, completion["choices"][0]["text"])
        assert completion["choices"][0]["finish_reason"] == "stop"


def test_a_form_that_cannot_be_compiled_is_refused(caller: Engine) -> None:
    for extra in (
        {"guided_regex": "(?=a)b"},
        {"guided_regex": "["},
        {"structured_outputs": {"grammar": "start: missing"}},
    ):
        answer = complete(caller, **extra)
        param = next(iter(extra))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(param)
        assert json.dumps(answer.json()).count("Invalid") == 1
