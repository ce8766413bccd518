"""What the types' validator complains of, in words for people. Pure; raises nothing.

A table from pydantic's error types to sentences: what was expected, what is there, what to write.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from pydantic import BaseModel, StringConstraints
from pydantic_core import ErrorDetails

from manifests import fields
from manifests.nodes import Node
from manifests.tree import Path
from manifests.words import did_you_mean, nearest, show
from schemas.deployment import ModelPath, ServedName
from schemas.meta import LabelKey, LabelValue, ObjectName
from schemas.quantity import Quantity

_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_NAME_RULE = (
    'expected lower-case letters, digits, "-" and ".", beginning and ending with a letter or digit'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """One complaint of the validator, and what it is about."""

    path: Path
    node: Node | None
    """What stands there; None if nothing does."""
    context: Mapping[str, object]
    model: type[BaseModel]
    fallback: str

    @property
    def key(self) -> str:
        """Return the field's name as the beginning of an example line."""
        last = self.path[-1] if self.path else ""
        return f"{last}: " if isinstance(last, str) and last else "- "


Words = tuple[str, str]
"""Message and hint."""


def explain(found: ErrorDetails, *, path: Path, node: Node | None, model: type[BaseModel]) -> Words:
    """Return what is wrong and what would cure it."""
    complaint = Complaint(
        path=path,
        node=node,
        context=found.get("ctx", {}),
        model=model,
        fallback=found["msg"],
    )
    speak = _TABLE.get(found["type"])
    return speak(complaint) if speak is not None else (_lower_first(complaint.fallback), "")


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _missing(it: Complaint) -> Words:
    says = fields.description(it.model, it.path)
    return "is required but not given", f"Meaning: {says}".rstrip(".") if says else ""


def _unknown(it: Complaint) -> Words:
    word = str(it.path[-1])
    return "unknown field", did_you_mean(word, fields.known(it.model, it.path[:-1]), "Known are")


def _integer(it: Complaint) -> Words:
    content = it.node.content if it.node is not None else None
    default = fields.default(it.model, it.path)
    example = str(default) if isinstance(default, int) else "2"
    if isinstance(content, str):
        word = content.strip().lower().replace("_", "").replace(",", "")
        if word in _NUMBERS:
            example = str(_NUMBERS.index(word))
        elif word.isascii() and word.isdigit():
            example = word
    elif isinstance(content, float) and content.is_integer():
        example = str(int(content))
    return f"expected an integer, got {show(it.node)}", f"Write: {it.key}{example}"


def _string(it: Complaint) -> Words:
    message = f"expected a string, got {show(it.node)}"
    if it.node is None or isinstance(it.node.content, dict | list):
        return message, ""
    if it.node.content is None:
        return message, "Write a value, or remove the line"
    if (unit := fields.unit(it.model, it.path)) is not None:
        example = unit.example(it.node.content)
        return f"expected a duration, got {show(it.node)}", f"Write: {it.key}{example}"
    return message, f"Write it in quotes: {it.key}{json.dumps(it.node.text)}"


def _boolean(it: Complaint) -> Words:
    text = str(it.node.content).lower() if it.node is not None else ""
    example = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(text, text)
    example = example if example in ("true", "false") else "true"
    return f"expected true or false, got {show(it.node)}", f"Write: {it.key}{example}"


def _mapping(it: Complaint) -> Words:
    known = fields.known(it.model, it.path)
    hint = f"Its fields are: {', '.join(known)}" if known else ""
    return f"expected a mapping, got {show(it.node)}", hint


def _list(it: Complaint) -> Words:
    message = f"expected a list, got {show(it.node)}"
    if it.node is None or isinstance(it.node.content, dict | list) or not it.node.text:
        return message, "Write one item per line, each after a '-'"
    return message, f"Write: {it.key}[{it.node.text}]"


def _choice(it: Complaint) -> Words:
    # Texts are quoted there, numbers are not.
    options = re.findall(r"'([^']*)'|(\d+)", str(it.context.get("expected", "")))
    options = [text or number for text, number in options]
    message = f"expected {' or '.join(options)}, got {show(it.node)}"
    close = nearest(it.node.text, options) if it.node is not None else None
    return message, f"Write: {it.key}{close}" if close else ""


def _at_least(it: Complaint) -> Words:
    return f"must be {it.context.get('ge')} or more, got {show(it.node)}", ""


def _at_most(it: Complaint) -> Words:
    return f"must be {it.context.get('le')} or less, got {show(it.node)}", ""


def _too_few(it: Complaint) -> Words:
    least, has = it.context.get("min_length"), it.context.get("actual_length")
    return f"needs {least} {'item' if least == 1 else 'items'} or more, has {has}", ""


def _too_long(it: Complaint) -> Words:
    length = len(it.node.text) if it.node is not None else 0
    return f"has {length} characters; at most {it.context.get('max_length')} are allowed", ""


def _empty(_: Complaint) -> Words:
    return "must not be empty", ""


def _value(it: Complaint) -> Words:
    return str(it.context.get("error", it.fallback)), ""


def _pattern(it: Complaint) -> Words:
    pattern = it.context.get("pattern")
    rule = next((says for of, says in _rules() if of == pattern), f"does not match {pattern}")
    hint = ""
    if rule == _NAME_RULE and it.node is not None:
        slug = re.sub(r"[^a-z0-9.]+", "-", it.node.text.lower()).strip("-.")
        hint = f"Write: {it.key}{slug}" if slug else ""
    # A key stands for itself: what stands at its path is its value.
    if pattern == _pattern_of(LabelKey):
        return rule, ""
    return f"{rule}; got {show(it.node)}", hint


def _rules() -> tuple[tuple[str | None, str], ...]:
    return (
        (_pattern_of(ObjectName), _NAME_RULE),
        (
            _pattern_of(LabelKey),
            'a label\'s key has letters, digits, "-", "_" and ".", beginning with a letter or digit, '
            'and before it, if need be, a prefix in lower case and "/"',
        ),
        (
            _pattern_of(LabelValue),
            'expected letters, digits, "-", "_" and ".", beginning and ending with a letter or digit',
        ),
        (_pattern_of(ServedName), 'expected letters, digits, ".", "_", ":", "/" and "-"'),
        (_pattern_of(ModelPath), "expected a path without control characters"),
        (_pattern_of(Quantity), "expected a quantity of bytes such as 512Mi, 96Gi or 1.5G"),
    )


def _pattern_of(annotated: object) -> str | None:
    """Return the pattern a type of schemas/ was declared with, so that it is spelled only there."""
    found = (arg for arg in get_args(annotated) if isinstance(arg, StringConstraints))
    constraint = next(found, None)
    return str(constraint.pattern) if constraint is not None else None


_TABLE: Mapping[str, Callable[[Complaint], Words]] = {
    "missing": _missing,
    "extra_forbidden": _unknown,
    "int_type": _integer,
    "int_from_float": _integer,
    "int_parsing_size": _integer,
    "string_type": _string,
    "bool_type": _boolean,
    "model_type": _mapping,
    "dict_type": _mapping,
    "tuple_type": _list,
    "list_type": _list,
    "literal_error": _choice,
    "enum": _choice,
    "greater_than_equal": _at_least,
    "less_than_equal": _at_most,
    "too_short": _too_few,
    "string_too_long": _too_long,
    "string_too_short": _empty,
    "string_pattern_mismatch": _pattern,
    "value_error": _value,
}
