"""Grammars of tool calls: what a family's template writes is allowed, with the family's own control tokens."""

from functools import cached_property
from typing import Any

import pytest
from tokenizers import AddedToken

from engine.grammar import calls, lark
from engine.grammar.calls import CallRules
from engine.grammar.lark import FunctionSchema, ReasoningMarkers
from engine.grammar.llguidance_backend import LlgCompiler
from engine.text.formats import registry
from tests.engine.text.renderers import RENDERERS
from tests.support.text_codecs import byte_level

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"enum": ["x", "y"]},
        "d": {"$ref": "#/$defs/d"},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"d": {"type": "array", "items": {"type": "integer"}}},
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = (
    FunctionSchema(name="f", parameters=SCHEMA),
    FunctionSchema(name="g-2", parameters=EMPTY),
    FunctionSchema(name="any", parameters={"type": "object"}),
)
TOKENS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "[TOOL_CALLS]", "[ARGS]",
    "[CALL_ID]", "<minimax:tool_call>", "</minimax:tool_call>", "<seed:tool_call>", "</seed:tool_call>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|other|>",
]  # fmt: skip
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("f", {"a": "  if x < 1:\n    y", "b": 3, "c": "x", "d": [1, 2]}),
    ("g-2", {}),
    ("f", {"a": ""}),
]
ENFORCED = [form for form in registry.FORMATS if form.syntax is not None]


class Tokens:
    """A vocabulary of bytes, with or without control tokens, and a compiler for it."""

    def __init__(self, *, has_marks: bool) -> None:
        self._has_marks = has_marks

    @cached_property
    def tokenizer(self) -> Any:
        tokenizer = byte_level()
        if self._has_marks:
            tokenizer.add_tokens([AddedToken(mark, special=True) for mark in TOKENS])
        return tokenizer

    @cached_property
    def specials(self) -> dict[str, int]:
        marks = TOKENS if self._has_marks else ()
        return {mark: self.tokenizer.token_to_id(mark) for mark in marks}

    @cached_property
    def _compiler(self) -> LlgCompiler:
        ends = (self.tokenizer.token_to_id("</s>"),)
        return LlgCompiler(serialized=self.tokenizer.to_str, eos_ids=ends)

    def accepts(self, grammar: str, text: str) -> str:
        """Return "ended" if the text may end here, "open" if it is allowed, and the rest that is not allowed."""
        matcher = self._compiler.matcher(grammar)
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        for at, token in enumerate(tokens):
            matcher.take(token)
            if matcher.fault is not None:
                return str(self.tokenizer.decode(tokens[at:], skip_special_tokens=False))
        return "ended" if matcher._matcher.is_accepting() else "open"


MARKED, BARE = Tokens(has_marks=True), Tokens(has_marks=False)


def grammar_of(form: Any, tokens: Tokens, thought: Any = None, **more: Any) -> str:
    given = {"must_call": True, "is_parallel": True, **more}
    rules = CallRules(syntax=form.syntax, functions=FUNCTIONS, **given)
    return calls.call_grammar(rules, tokens.specials, thought)


@pytest.mark.parametrize(
    ("form", "tokens"),
    [
        pytest.param(form, tokens, id=f"{form.name}-{kind}")
        for form in ENFORCED
        for kind, tokens in (("marked", MARKED), ("bare", BARE))
        if form.name != "harmony" or tokens is MARKED  # without its tokens it is no gpt-oss
    ],
)
@pytest.mark.parametrize("must_call", [True, False])
def test_what_the_template_writes_is_allowed(form: Any, tokens: Tokens, *, must_call: bool) -> None:
    grammar = grammar_of(form, tokens, must_call=must_call)
    # Calls of gpt-oss end the answer.
    count = 1 if form.name == "harmony" else len(CALLS)
    for renderer in RENDERERS[form.name][:1]:
        for chosen in ([call] for call in CALLS):
            assert tokens.accepts(grammar, renderer(chosen)) == "ended"
        assert tokens.accepts(grammar, renderer(CALLS[:count])) == "ended"


@pytest.mark.parametrize("form", ENFORCED, ids=lambda form: form.name)
def test_other_arguments_and_names_are_forbidden(form: Any) -> None:
    grammar = grammar_of(form, MARKED)
    write = RENDERERS[form.name][0]
    assert MARKED.accepts(grammar, write([("unknown", {})])) not in ("ended", "open")
    assert MARKED.accepts(grammar, write([("f", {"b": 3})])) not in ("ended", "open")
    assert MARKED.accepts(grammar, write([("f", {"a": "", "b": "no"})])) not in ("ended", "open")
    assert MARKED.accepts(grammar, write([("f", {"a": "", "c": "z"})])) not in ("ended", "open")
    assert MARKED.accepts(grammar, "Hello") not in ("ended", "open")


@pytest.mark.parametrize("form", ENFORCED, ids=lambda form: form.name)
def test_without_a_need_to_call_text_may_hold_other_control_tokens(form: Any) -> None:
    grammar = grammar_of(form, MARKED, must_call=False)
    if form.name == "harmony":
        text = (
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
        )
        assert MARKED.accepts(grammar, text) == "ended"
        return
    assert MARKED.accepts(grammar, "") == "ended"
    assert MARKED.accepts(grammar, "a <|other|><think>b</think> <|other|>c") == "ended"
    call = RENDERERS[form.name][0](CALLS[:1])
    assert MARKED.accepts(grammar, f"so: <|other|>{call}") == "ended"
    assert MARKED.accepts(grammar, f"so: {call}\n") == "ended"  # no further call is forced
    assert MARKED.accepts(grammar, f"so: {call}\n{call}") == "ended"


@pytest.mark.parametrize("form", ENFORCED, ids=lambda form: form.name)
def test_one_call_only(form: Any) -> None:
    grammar = grammar_of(form, MARKED, is_parallel=False)
    write = RENDERERS[form.name][0]
    assert MARKED.accepts(grammar, write(CALLS[:1])) == "ended"
    if form.name != "harmony":
        assert MARKED.accepts(grammar, write(CALLS[:2])) != "ended"


def test_reasoning_may_hold_other_control_tokens() -> None:
    thought = ReasoningMarkers(start="<think>", end="</think>", is_open=False)
    (hermes,) = (form for form in ENFORCED if form.name == "hermes")
    call = RENDERERS["hermes"][0](CALLS[:1])
    for tokens in (MARKED, BARE):
        grammar = grammar_of(hermes, tokens, thought)
        assert tokens.accepts(grammar, f"<think>a <|other|> b</think>\n\n{call}") == "ended"
        assert tokens.accepts(grammar, call) == "ended"


def test_gpt_oss_writes_a_form_in_its_final_channel() -> None:
    grammar = calls.harmony_answer(lark.json_value(EMPTY), MARKED.specials)
    think = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
    for before in ("", think):
        assert MARKED.accepts(grammar, before + "<|channel|>final<|message|>{}") == "ended"
    assert MARKED.accepts(grammar, "{}") not in ("ended", "open")
