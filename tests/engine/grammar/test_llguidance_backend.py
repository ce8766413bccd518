"""The llguidance backend: allowed tokens, limits, faults, and use from several threads."""

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from engine.errors import GrammarError
from engine.grammar import calls, json_schema, lark
from engine.grammar.calls import CallRules
from engine.grammar.lark import FunctionSchema, ReasoningMarkers
from engine.grammar.llguidance_backend import LlgCompiler
from engine.text.formats import hermes
from tests.support.grammars import allowed, encode, follow

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
INTEGER = {"type": "integer"}
ONE = lark.json_grammar(
    {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}, {}, None
)


def test_only_end_tokens_are_allowed_after_a_complete_output(loaded: Any) -> None:
    serialized = loaded.codec.serialized
    grammars = LlgCompiler(serialized=serialized, eos_ids=(0, 2))
    matcher = grammars.matcher(ONE)
    assert not allowed(matcher) & {0, 2}
    assert follow(matcher, encode(loaded, '{"a": 7}'))
    assert allowed(matcher) == {0, 2}
    matcher.take(0)
    assert matcher.fault is None
    assert allowed(matcher) == {0, 2}


@pytest.mark.parametrize("words", [5, 16, 40])
def test_a_mask_may_be_longer_or_shorter_than_the_vocabulary(grammars: Any, words: int) -> None:
    matcher = grammars.matcher(ONE)
    whole = allowed(matcher)
    assert allowed(matcher, words) == {token for token in whole if token < 32 * words}
    every_second = np.ones((words * 2), dtype=np.uint32)[::2]
    matcher.fill(every_second)
    assert not every_second.flags.c_contiguous
    assert every_second[-1] in (0, 1 << 2) or words <= 16


def test_a_forbidden_token_is_a_fault_of_one_output(grammars: Any) -> None:
    matcher, other = grammars.matcher(ONE), grammars.matcher(ONE)
    matcher.take(17)
    assert matcher.fault is not None
    assert not matcher.fault.is_costly
    assert allowed(matcher) == {2}
    matcher.take(2)
    assert other.fault is None
    assert len(allowed(other)) > 0


@pytest.mark.ci
def test_text_that_is_too_costly_to_match_is_a_fault_of_the_grammar(
    loaded: Any, grammars: Any
) -> None:
    pattern = {"type": "string", "pattern": "^((a{100}){100}){100}$"}
    matcher = grammars.matcher(lark.json_grammar(pattern, {}, None))
    for token in encode(loaded, '"' + "a" * 60_000):
        matcher.take(token)
        if matcher.fault is not None:
            break
    assert matcher.fault.is_costly
    assert allowed(matcher) == {2}


def test_blanks_are_bounded(loaded: Any, grammars: Any) -> None:
    for text, fits in (('{"a":1}', True), ('{ "a" : 1 }', True), ('{  "a":1}', False)):
        assert follow(grammars.matcher(ONE), encode(loaded, text)) is fits
    assert not follow(grammars.matcher(ONE), encode(loaded, "\n"))


def _calling(**changes: Any) -> CallRules:
    functions = (
        FunctionSchema(name="f", parameters={"type": "object", "properties": {"a": INTEGER}}),
        FunctionSchema(name="g", parameters={"type": "object", "additionalProperties": False}),
    )
    given: dict[str, Any] = {"functions": functions, "must_call": False, "is_parallel": True}
    return CallRules(syntax=hermes.SYNTAX, **given | changes)


CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
G = CALL % ("g", "{}")


@pytest.mark.parametrize(
    ("text", "fits", "required", "single"),
    [
        ("", True, False, True),
        ("just <text> with tool_call in it", True, False, True),
        (G, True, True, True),
        (f"well: {G}", True, False, True),
        (G + "\n" + G, True, True, False),
        (G + G, True, True, False),
        (CALL % ("f", '{"a": 1}'), True, True, True),
        (CALL % ("f", '{"a": "x"}'), False, False, False),
        (CALL % ("h", "{}"), False, False, False),
        (G + " more", False, False, False),
    ],
)
def test_opened_calls_are_enforced(
    speaker: Any, text: str, *, fits: bool, required: bool, single: bool
) -> None:
    for calling, wanted in (
        (_calling(), fits),
        (_calling(must_call=True), required),
        (_calling(is_parallel=False), single),
        (_calling(instead=lark.json_value(INTEGER)), required),
    ):
        matcher = speaker.grammars.matcher(
            calls.call_grammar(calling, speaker.codec.traits.specials, None)
        )
        is_matched = follow(matcher, encode(speaker, text)) and 2 in allowed(matcher)
        assert is_matched is wanted, calling


def test_a_marker_in_ordinary_letters_does_not_open_a_call(loaded: Any, grammars: Any) -> None:
    grammar = calls.call_grammar(_calling(), loaded.codec.traits.specials, None)
    letters = [token for one in "a <tool_call>" for token in encode(loaded, one)]
    assert not follow(grammars.matcher(grammar), letters)


@pytest.mark.parametrize(
    ("is_open", "text", "fits"),
    [
        (False, "7", True),
        (False, '<think>any {"thing"\n</think>\n\n7', True),
        (False, "hm 7", False),
        (True, "hm </think>7", True),
        (True, "</think>7", True),
        (True, "7", False),
        (True, "hm</think> <think>", False),
    ],
)
def test_reasoning_goes_first_and_is_free_text(
    speaker: Any, text: str, *, is_open: bool, fits: bool
) -> None:
    thought = ReasoningMarkers(start="<think>", end="</think>", is_open=is_open)
    matcher = speaker.grammars.matcher(
        lark.json_grammar(INTEGER, speaker.codec.traits.specials, thought)
    )
    assert (follow(matcher, encode(speaker, text)) and 2 in allowed(matcher)) is fits


def _nested(levels: int) -> Any:
    nested: Any = INTEGER
    for _ in range(levels):
        nested = {"type": "array", "items": nested}
    return nested


def _doubled(levels: int) -> Any:
    shared: dict[str, Any] = {
        f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(levels)
    }
    shared[f"d{levels}"] = {"type": "string", "pattern": "a+"}
    return {"$defs": shared, "$ref": "#/$defs/d0"}


_CROSSED = {
    "allOf": [
        {"anyOf": [{"properties": {f"a{at}{one}": {"type": "string"}}} for one in range(4)]}
        for at in range(9)
    ]
}


def _classes(count: int, at: int = 0) -> str:
    """Return a pattern of many overlapping classes of characters."""
    ranges = (f"[{chr(0x400 + 7 * n + at)}-{chr(0x430 + 7 * n + at)}]x" for n in range(count))
    return f"^({'|'.join(ranges)})*{chr(0x4E00 + at)}$"


HOSTILE: dict[str, Any] = {
    "patterns that meet": {"allOf": [{"pattern": f".*{chr(97 + at)}.*"} for at in range(25)]},
    "patterns of names that meet": {
        "allOf": [{"patternProperties": {_classes(150, at): {}}} for at in range(16)]
    },
    "a pattern that meets a format and a length": {
        "anyOf": [
            {"type": "string", "format": "uri", "pattern": _classes(150, at), "maxLength": 99}
            for at in range(300)
        ]
    },
    "a huge enum": {"enum": [f"value {at}" for at in range(9_000)]},
    "many properties": {"properties": {f"p{at}": {"type": "string"} for at in range(400)}},
    "deep": _nested(50),
    "doubled references": _doubled(15),
    "crossed alternatives": _CROSSED,
    "a pattern that explodes": {"type": "string", "pattern": "^(a|a)*b{900}(c{900}){900}$"},
    "a pattern of optional parts": {"type": "string", "pattern": "(a?){400}a{400}"},
    "a pattern that remembers": {"type": "string", "pattern": "^(.*a.{40})$"},
    "a nested pattern": {"type": "string", "pattern": "((((a{50}){50}){50}){50})"},
    "deep brackets": {"type": "string", "pattern": "(" * 900 + "a" + ")" * 900},
    "huge bounds": {"type": "string", "minLength": 2**31 - 1},
    "many items": {"type": "array", "items": INTEGER, "minItems": 2**31 - 1},
    "huge numbers": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "nothing fits": {"type": "integer", "minimum": 5, "maximum": 3},
    "endless": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_is_too_large_raises_an_error(grammars: Any, name: str) -> None:
    grammar, complaint = "", ""
    try:
        grammar = lark.json_grammar(json_schema.normalize_schema(HOSTILE[name]), {}, None)
        grammars.check(grammar)
    except GrammarError as error:
        complaint = str(error)
    if complaint:
        assert len(complaint) <= 400
        assert "x-guidance" not in complaint
        return
    matcher = grammars.matcher(grammar)
    dice = np.random.default_rng(1)
    for _ in range(60):
        token = int(dice.choice(sorted(allowed(matcher))))
        if token == 2:
            break
        matcher.take(token)


def test_one_thread_checks_grammars_that_another_uses(grammars: Any) -> None:
    texts = [lark.json_grammar({"const": f"value {at}"}, {}, None) for at in range(60)]

    def use(text: str) -> str:
        grammars.check(text)
        matcher = grammars.matcher(text)
        spelled: list[int] = []
        while True:
            token = min(allowed(matcher))
            if token == 2:
                return repr(spelled)
            matcher.take(token)
            spelled.append(token)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(use, texts * 3))
    assert found[:60] == found[60:120] == found[120:]
    assert len(set(found)) == 60


def test_a_request_holds_its_grammar_however_many_others_there_are(loaded: Any) -> None:
    """The worker would compile an evicted grammar again, between two tokens of all requests."""
    compiler = LlgCompiler(serialized=loaded.codec.serialized, eos_ids=(2,))
    texts = [lark.json_grammar({"const": f"value {at}"}, {}, None) for at in range(100)]
    held = [compiler.check(text) for text in texts]
    assert [compiler.check(text) for text in texts] == held
    assert len(compiler._living) == 100
    del held
    gc.collect()
    assert len(compiler._living) == 32


def test_an_invalid_grammar_is_refused(grammars: Any) -> None:
    with pytest.raises(GrammarError, match="nothing"):
        grammars.check("start: nothing")
    with pytest.raises(GrammarError, match="cannot be constrained"):
        LlgCompiler(serialized=lambda: json.dumps({}), eos_ids=(2,)).check(ONE)
