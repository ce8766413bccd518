"""Writes grammars of answers in llguidance's Lark dialect, with reasoning and tool calls. Pure.

A marker that is one token of the vocabulary (`<tool_call>`) is written as that token, and text cannot contain it. A
marker of ordinary tokens is matched in the text. In both cases free text must not spell the marker, because it would
open a call that the grammar does not enforce.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Json: TypeAlias = Any
# The special tokens (those that are no piece of ordinary text), by their spelling.
Specials: TypeAlias = Mapping[str, int]

# At most one blank between two parts of JSON: otherwise a random model would write blanks forever.
_BLANKS = {"whitespace_pattern": r"\x20?"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningMarkers:
    """The markers around reasoning before the answer."""

    start: str
    end: str
    is_open: bool
    """True if the prompt has opened it already; otherwise the model may open it or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSchema:
    """A function that may be called, and the schema of its arguments."""

    name: str
    parameters: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """A dialect's syntax of calls whose arguments are JSON."""

    start: str
    """Opens a call, or a section of calls."""
    before: str
    """Text between `start` and the name."""
    middle: str
    """Text between the name and its arguments."""
    after: str
    """Text between the arguments and `end`."""
    end: str
    """Closes the part that `start` opened; may be empty."""
    between: str = ""
    """Text between one call and the next; a model may omit it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRules:
    """The rules of text that a client prescribes."""

    rules: tuple[str, ...]
    """They define the rule `value`."""
    client_grammar: str = ""
    """A whole grammar of the client, to which `value` refers. Its rules are in a namespace of their own."""


def json_value(schema: Json) -> ValueRules:
    """Return the rules of JSON that matches a normalized schema."""
    return ValueRules(rules=(f"value: {_json(schema)}",))


def pattern_value(pattern: str) -> ValueRules:
    """Return the rules of text that matches a whole regular expression of Rust's crate `regex`."""
    # A slash would end the expression, and a line break the rule.
    parts = re.sub(r"\\.|[/\n\r]", _escape_in_pattern, pattern, flags=re.DOTALL)
    return ValueRules(rules=("value: VALUE", f"VALUE: /(?:{parts})/"))


def _escape_in_pattern(found: re.Match[str]) -> str:
    text = found.group()
    if text in ("\\\n", "\\\r"):
        text = text[1]
    return {"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(text, text)


def choice_value(texts: Iterable[str]) -> ValueRules:
    """Return the rules of text that is one of `texts`."""
    return ValueRules(rules=(f"value: {' | '.join(json.dumps(text) for text in texts)}",))


def client_value(grammar: str) -> ValueRules:
    """Return the rules of text that matches a checked grammar of the client (client_grammar.py)."""
    return ValueRules(rules=("value: @client",), client_grammar=grammar)


def answer_grammar(value: ValueRules, specials: Specials, thought: ReasoningMarkers | None) -> str:
    """Return the grammar of an answer that is a value."""
    return _join(specials, thought, ["answer: value", *value.rules], value.client_grammar)


def json_grammar(schema: Json, specials: Specials, thought: ReasoningMarkers | None) -> str:
    """Return the grammar of a JSON answer."""
    return answer_grammar(json_value(schema), specials, thought)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """The functions that may be called, the syntax of calls, and the form of answers without calls."""

    form: CallSyntax
    functions: tuple[FunctionSchema, ...]
    must_call: bool
    is_parallel: bool
    instead: ValueRules | None = None
    """The form of an answer without calls; None allows any text, with or without calls behind it."""


def call_grammar(calling: CallRules, specials: Specials, thought: ReasoningMarkers | None) -> str:
    """Return the grammar of an answer that must or may call functions."""
    form = calling.form
    start, between = _literal(form.start, specials), _literal(form.between, specials)
    gap = f"{between}? " if between else ""
    more = f"({gap}{start} body)*" if calling.is_parallel else ""
    if calling.must_call:
        rules = [f"answer: {start} body {more}"]
    elif calling.instead is not None:
        rules = [f"answer: {start} body {more} | value", *calling.instead.rules]
    elif form.start in specials:
        rules = [f"answer: TEXT ({start} body {more})?", f"TEXT: {_text_without(form.start)}"]
    else:
        # Lazy: the text ends with the first marker.
        rules = [
            f"answer: TEXT | marked body {more}",
            f"TEXT: {_text_without(form.start)}",
            f"marked[lazy]: /(?s:.*){_escape(form.start)}/",
        ]
    before, after = _literal(form.before, specials), _literal(form.after + form.end, specials)
    names = " | ".join(f"call{at}" for at in range(len(calling.functions)))
    rules.append(f"body: {before} ({names}) {after}")
    for at, function in enumerate(calling.functions):
        middle = _literal(function.name + form.middle, specials)
        rules += [f"call{at}: {middle} args{at}", f"args{at}: {_json(function.parameters)}"]
    client_grammar = "" if calling.instead is None else calling.instead.client_grammar
    return _join(specials, thought, rules, client_grammar)


def _join(
    specials: Specials,
    thought: ReasoningMarkers | None,
    rules: Iterable[str],
    client_grammar: str,
) -> str:
    own = "\n".join([*_start(specials, thought), *rules])
    if not client_grammar:
        return own
    grammars = [
        {"name": "answer", "lark_grammar": own},
        {"name": "client", "lark_grammar": client_grammar},
    ]
    return json.dumps({"grammars": grammars})


def _start(specials: Specials, thought: ReasoningMarkers | None) -> list[str]:
    if thought is None:
        return ["start: answer"]
    end = _literal(thought.end, specials)
    blanks = r"AIR: /[\x20\n]{0,4}/"
    if thought.end in specials:
        shape = [f"thinking: THOUGHT {end} AIR", f"THOUGHT: {_text_without(thought.end)}"]
    else:
        shape = ["thinking: thought AIR", f"thought[lazy]: /(?s:.*){_escape(thought.end)}/"]
    opening = "thinking" if thought.is_open else f"({_literal(thought.start, specials)} thinking)?"
    return [f"start: {opening} answer", *shape, blanks]


def _json(schema: Json) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return f"%json {json.dumps({**schema, 'x-guidance': _BLANKS})}"


def _literal(text: str, specials: Specials) -> str:
    """Return a text as Lark literals; special tokens are written as tokens."""
    if not text:
        return ""
    names = sorted(specials, key=len, reverse=True)
    pattern = "|".join(re.escape(name) for name in names)
    parts = re.split(f"({pattern})", text) if names else [text]
    written = [
        f"<[{specials[part]}]>" if part in specials else json.dumps(part) for part in parts if part
    ]
    return written[0] if len(written) == 1 else f"({' '.join(written)})"


def _text_without(marker: str) -> str:
    """Return a terminal for any text that does not contain the marker."""
    return f"/(?s:.*)/ & ~/(?s:.*){_escape(marker)}(?s:.*)/"


def _escape(text: str) -> str:
    return "".join(one if one.isalnum() else f"\\x{ord(one):02x}" for one in text)
