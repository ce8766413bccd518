"""Writes grammars of answers in llguidance's Lark dialect, with reasoning and tool calls. Pure.

A marker that is one token of the vocabulary (`<tool_call>`) is written as that token, and text cannot contain it. A
marker of ordinary tokens is matched in the text. In both cases free text must not spell the marker, because it would
open a call that the grammar does not enforce.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
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
class ValueRules:
    """The rules of text that a client prescribes."""

    rules: tuple[str, ...]
    """They define the rule `value`."""
    client_grammar: str = ""
    """A whole grammar of the client, to which `value` refers. Its rules are in a namespace of their own."""


def json_value(schema: Json) -> ValueRules:
    """Return the rules of JSON that matches a normalized schema."""
    return ValueRules(rules=(f"value: {json_rule(schema)}",))


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
    return join(specials, thought, ["answer: value", *value.rules], value.client_grammar)


def json_grammar(schema: Json, specials: Specials, thought: ReasoningMarkers | None) -> str:
    """Return the grammar of a JSON answer."""
    return answer_grammar(json_value(schema), specials, thought)


def join(
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
    end = literal(thought.end, specials)
    blanks = r"AIR: /[\x20\n]{0,4}/"
    if thought.end in specials:
        others = {text: token for text, token in specials.items() if text != thought.start}
        shape = [f"thinking: thought {end} AIR", *free_text("thought", [thought.end], others)]
    else:
        shape = ["thinking: thought AIR", f"thought[lazy]: /(?s:.*){_escape(thought.end)}/"]
    opening = "thinking" if thought.is_open else f"({literal(thought.start, specials)} thinking)?"
    return [f"start: {opening} answer", *shape, blanks]


def free_text(name: str, markers: Sequence[str], specials: Specials) -> list[str]:
    """Return the rules of any text without some markers; the model may use its other control tokens in it.

    The rule `{name}_lead` is such a text up to a control token, or nothing.
    """
    allowed = sorted(token for text, token in specials.items() if text not in markers)
    lead = f"({name.upper()}? <[{','.join(map(str, allowed))}]>)*" if allowed else ""
    without = "".join(f" & ~/(?s:.*){_escape(marker)}(?s:.*)/" for marker in markers)
    return [
        f"{name}: {name}_lead {name.upper()}?",
        f"{name}_lead: {lead}",
        f"{name.upper()}: /(?s:.+)/{without}",
    ]


def lazy_text(end: str, specials: Specials) -> tuple[str, str]:
    """Return the kind of a rule and its expression: any text up to the first `end`, which is included."""
    if end in specials:
        return "", f"/(?s:.*)/ {literal(end, specials)}"
    return "[lazy]", f"/(?s:.*){_escape(end)}/"


def json_rule(schema: Json) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return f"%json {json.dumps({**schema, 'x-guidance': _BLANKS})}"


def literal(text: str, specials: Specials) -> str:
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


def _escape(text: str) -> str:
    return "".join(one if one.isalnum() else f"\\x{ord(one):02x}" for one in text)
