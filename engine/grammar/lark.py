"""Grammars written in llguidance's Lark: what an answer may look like, thinking and calls included. Pure.

A marker that is one token of the vocabulary (`<tool_call>`) is written as that token; text then cannot contain it.
A marker of ordinary tokens is looked for in the text. Either way the marker's spelling is kept out of free text,
or a call would open that nothing enforces.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Json: TypeAlias = Any
Specials: TypeAlias = Mapping[
    str, int
]  # the spelling of each token that is no piece of ordinary text

# One blank at most between two parts of JSON: a random model would otherwise write blanks for ever.
_BLANKS = {"whitespace_pattern": r"\x20?"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningMarkers:
    """How thinking goes before the answer."""

    start: str
    end: str
    is_open: bool
    """The prompt opened it already; otherwise the model may, and need not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSchema:
    """What may be called, and what its arguments have to match."""

    name: str
    parameters: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How a dialect writes calls whose arguments are JSON."""

    start: str
    """Opens a call, or a section of calls."""
    before: str
    """Between it and the name."""
    middle: str
    """Between the name and its arguments."""
    after: str
    end: str
    """Closes what `start` opened; may be empty."""
    between: str = ""
    """Between the end of one and the start of the next; a model may leave it out."""


def json_grammar(schema: Json, specials: Specials, thought: ReasoningMarkers | None) -> str:
    """Return the grammar of an answer that is JSON."""
    return _join(specials, thought, ["answer: value", f"value: {_json(schema)}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What may be called, how it is written, and what else an answer may be."""

    form: CallSyntax
    functions: tuple[FunctionSchema, ...]
    must_call: bool
    is_parallel: bool
    instead: Json = None
    """The schema of an answer without calls; None: any text, with calls behind it or not."""


def call_grammar(calling: CallRules, specials: Specials, thought: ReasoningMarkers | None) -> str:
    """Return the grammar of an answer that calls functions, or may."""
    form = calling.form
    start, between = _literal(form.start, specials), _literal(form.between, specials)
    gap = f"{between}? " if between else ""
    more = f"({gap}{start} body)*" if calling.is_parallel else ""
    if calling.must_call:
        rules = [f"answer: {start} body {more}"]
    elif calling.instead is not None:
        rules = [f"answer: {start} body {more} | value", f"value: {_json(calling.instead)}"]
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
    return _join(specials, thought, rules)


def _join(specials: Specials, thought: ReasoningMarkers | None, rules: Iterable[str]) -> str:
    if thought is None:
        return "\n".join(["start: answer", *rules])
    end = _literal(thought.end, specials)
    blanks = r"AIR: /[\x20\n]{0,4}/"
    if thought.end in specials:
        shape = [f"thinking: THOUGHT {end} AIR", f"THOUGHT: {_text_without(thought.end)}"]
    else:
        shape = ["thinking: thought AIR", f"thought[lazy]: /(?s:.*){_escape(thought.end)}/"]
    opening = "thinking" if thought.is_open else f"({_literal(thought.start, specials)} thinking)?"
    return "\n".join([f"start: {opening} answer", *shape, blanks, *rules])


def _json(schema: Json) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return f"%json {json.dumps({**schema, 'x-guidance': _BLANKS})}"


def _literal(text: str, specials: Specials) -> str:
    """Return a text as Lark's literals; what is one special token becomes that token."""
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
    """Return a terminal for any text in which a marker is not spelled out."""
    return f"/(?s:.*)/ & ~/(?s:.*){_escape(marker)}(?s:.*)/"


def _escape(text: str) -> str:
    return "".join(one if one.isalnum() else f"\\x{ord(one):02x}" for one in text)
