"""Errors of pydantic's validation as messages for users: what was expected, what was found, what to write. Pure."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from manifests.suggestions import describe_node, did_you_mean, nearest
from manifests.trees import Path
from manifests.yaml import nodes
from manifests.yaml.nodes import YamlNode
from schemas.deployment import HUB_REPO_PATTERN, ModelSource
from schemas.duration import Unit
from schemas.meta import FLEET_OWNED, ObjectMeta


def known_fields(model: type[BaseModel], path: Path) -> tuple[str, ...]:
    """Return the names that users may write in the mapping at the path."""
    found = _type_at(model, path)
    if not _is_model(found):
        return ()
    theirs = (
        name for name in found.model_fields if found is not ObjectMeta or name not in FLEET_OWNED
    )
    names = tuple(found.model_fields[name].alias or name for name in theirs)
    return tuple(name for name in names if path or name != "status")


def field_default(model: type[BaseModel], path: Path) -> Any:
    """Return the field's default; None if it has none."""
    field = _field_at(model, path)
    return None if field is None or field.is_required() else field.get_default()


def field_description(model: type[BaseModel], path: Path) -> str:
    """Return the first line of the field's docstring."""
    field = _field_at(model, path)
    return (field.description or "").split("\n")[0] if field is not None else ""


def field_unit(model: type[BaseModel], path: Path) -> Unit | None:
    """Return the unit of a bare number at the path; None where no duration is expected."""
    field = _field_at(model, path)
    if field is None:
        return None
    options = [arg for arg in get_args(field.annotation) if hasattr(arg, "__metadata__")]
    marks = [*field.metadata, *(mark for option in options for mark in option.__metadata__)]
    # The last one belongs to the narrowest type.
    return next((mark for mark in reversed(marks) if isinstance(mark, Unit)), None)


def _field_at(model: type[BaseModel], path: Path) -> FieldInfo | None:
    parent = _type_at(model, path[:-1])
    return _field(parent, path[-1]) if path and _is_model(parent) else None


def _field(model: type[BaseModel], name: str | int) -> FieldInfo | None:
    return next((f for f in model.model_fields.values() if f.alias == name), None)


def _type_at(model: type[BaseModel], path: Path) -> Any:
    """Return the type of the value at the path; None if the path leaves the types."""
    found: Any = model
    for part in path:
        if _is_model(found):
            field = _field(found, part)
            found = _bare(field.annotation) if field is not None else None
        elif get_origin(found) is tuple:
            found = _bare(get_args(found)[0])
        elif get_origin(found) is dict:
            found = _bare(get_args(found)[1])
        else:
            return None
    return found


def _bare(annotation: Any) -> Any:
    """Return the type without Annotated[] and without `| None`."""
    if hasattr(annotation, "__metadata__"):
        return _bare(get_args(annotation)[0])
    options = [arg for arg in get_args(annotation) if arg is not NoneType]
    if NoneType in get_args(annotation) and len(options) == 1:
        return _bare(options[0])
    return annotation


def _is_model(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, BaseModel)


def relevant_errors(error: ValidationError, root: YamlNode) -> list[ErrorDetails]:
    """Return the errors, except those that only follow from others.

    pydantic does not count a list's invalid items, so it takes the list for too short; and it cannot compute a default
    from an invalid neighbour, which has an error of its own.
    """
    return [
        one
        for one in error.errors(include_url=False)
        if one["type"] != "default_factory_not_called"
        and (one["type"] != "too_short" or _is_short(one, root))
    ]


def _is_short(found: ErrorDetails, root: YamlNode) -> bool:
    node = nodes.find_node(root, found["loc"])
    content = node.content if node is not None else None
    least = found.get("ctx", {}).get("min_length", 0)
    return not isinstance(content, list) or len(content) < least


_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
# What users of model hubs write in spec.model.
_HUB_WORDS = frozenset(
    (
        "repo",
        "repository",
        "source",
        "hf",
        "huggingface",
        "url",
        "uri",
        "id",
        "name",
        "revision",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldError:
    """One validation error, and the field that it is about."""

    path: Path
    node: YamlNode | None
    """The value of the field; None if it is missing."""
    context: Mapping[str, object]
    model: type[BaseModel]
    fallback: str

    @property
    def key(self) -> str:
        """Return the field's name as the start of an example line."""
        last = self.path[-1] if self.path else ""
        return f"{last}: " if isinstance(last, str) and last else "- "


Explanation = tuple[str, str]
"""Message and hint."""


def explain_error(
    found: ErrorDetails, *, path: Path, node: YamlNode | None, model: type[BaseModel]
) -> Explanation:
    """Return the message of an error, and a hint."""
    error = FieldError(
        path=path,
        node=node,
        context=found.get("ctx", {}),
        model=model,
        fallback=found["msg"],
    )
    explain = _TABLE.get(found["type"])
    return explain(error) if explain is not None else (_lower_first(error.fallback), "")


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _missing(it: FieldError) -> Explanation:
    says = field_description(it.model, it.path)
    return "is required but not given", f"Meaning: {says}".rstrip(".") if says else ""


def _unknown(it: FieldError) -> Explanation:
    word = str(it.path[-1])
    if _type_at(it.model, it.path[:-1]) is ModelSource and word in _HUB_WORDS:
        return "unknown field", (
            "A model of a hub is written as hub: {repo: ORGANISATION/NAME}, with revision below hub too "
            "(docs/models.md)"
        )
    if it.path == ("metadata", "namespace"):
        return "unknown field", "Fleets have no namespaces. Remove it"
    return "unknown field", did_you_mean(word, known_fields(it.model, it.path[:-1]), "Known fields")


def _integer(it: FieldError) -> Explanation:
    content = it.node.content if it.node is not None else None
    meant: int | None = None
    if isinstance(content, str):
        meant = _integer_of(content)
    elif isinstance(content, float) and content.is_integer():
        meant = int(content)
    hint = "" if meant is None else f"Write: {it.key}{meant}"
    return f"expected an integer, got {describe_node(it.node)}", hint


def _integer_of(text: str) -> int | None:
    """Return the integer that a text means: `two`, `1_000` or `32k`, which is 32 x 1024 as for contexts and memory."""
    word = text.strip().lower().replace("_", "").replace(",", "")
    if word in _NUMBERS:
        return _NUMBERS.index(word)
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([km]?)i?", word, re.ASCII)
    if found is None:
        return None
    number = float(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2]]
    return int(number) if number.is_integer() else None


def _string(it: FieldError) -> Explanation:
    message = f"expected a string, got {describe_node(it.node)}"
    if it.node is None or isinstance(it.node.content, dict | list):
        return message, ""
    if it.node.content is None:
        return message, "Write a value, or remove the line"
    if (unit := field_unit(it.model, it.path)) is not None:
        example = unit.example(it.node.content)
        return f"expected a duration, got {describe_node(it.node)}", f"Write: {it.key}{example}"
    return message, f"Write it in quotes: {it.key}{json.dumps(it.node.text)}"


def _boolean(it: FieldError) -> Explanation:
    text = str(it.node.content).lower() if it.node is not None else ""
    example = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(text, text)
    example = example if example in ("true", "false") else "true"
    return f"expected true or false, got {describe_node(it.node)}", f"Write: {it.key}{example}"


def _mapping(it: FieldError) -> Explanation:
    known = known_fields(it.model, it.path)
    hint = f"Its fields are: {', '.join(known)}" if known else ""
    return f"expected a mapping, got {describe_node(it.node)}", hint


def _list(it: FieldError) -> Explanation:
    message = f"expected a list, got {describe_node(it.node)}"
    if it.node is None or isinstance(it.node.content, dict | list) or not it.node.text:
        return message, "Write one item per line, each after a '-'"
    return message, f"Write: {it.key}[{it.node.text}]"


def _choice(it: FieldError) -> Explanation:
    # pydantic quotes texts, but not numbers.
    options = re.findall(r"'([^']*)'|(\d+)", str(it.context.get("expected", "")))
    options = [text or number for text, number in options]
    message = f"expected {' or '.join(options)}, got {describe_node(it.node)}"
    close = nearest(it.node.text, options) if it.node is not None else None
    return message, f"Write: {it.key}{close}" if close else ""


def _at_least(it: FieldError) -> Explanation:
    return f"must be {it.context.get('ge')} or more, got {describe_node(it.node)}", ""


def _at_most(it: FieldError) -> Explanation:
    return f"must be {it.context.get('le')} or less, got {describe_node(it.node)}", ""


def _too_few(it: FieldError) -> Explanation:
    least, has = it.context.get("min_length"), it.context.get("actual_length")
    return f"needs {least} {'item' if least == 1 else 'items'} or more, has {has}", ""


def _too_long(it: FieldError) -> Explanation:
    length = len(it.node.text) if it.node is not None else 0
    return f"has {length} characters; at most {it.context.get('max_length')} are allowed", ""


def _empty(_: FieldError) -> Explanation:
    return "must not be empty", ""


def _value(it: FieldError) -> Explanation:
    unit, text = field_unit(it.model, it.path), it.node.content if it.node is not None else None
    meant = unit.translate(text) if unit is not None and isinstance(text, str) else None
    hint = f"Write: {it.key}{meant}" if meant is not None else ""
    return str(it.context.get("error", it.fallback)), hint


def _pattern(it: FieldError) -> Explanation:
    from manifests import patterns  # noqa: PLC0415 - it imports the models of all kinds

    pattern = str(it.context.get("pattern"))
    rule = patterns.rule(pattern)
    # For a key, the node at the path is the key's value, which is not what is wrong.
    if pattern == patterns.LABEL_KEY:
        return rule, ""
    hints = {
        patterns.NAME: _name_hint,
        patterns.QUANTITY: _quantity_hint,
        HUB_REPO_PATTERN: _repo_hint,
    }
    hint = hints[pattern](it) if pattern in hints and it.node is not None else ""
    return f"{rule}; got {describe_node(it.node)}", hint


def _name_hint(it: FieldError) -> str:
    """Return the nearest name of an object."""
    text = it.node.text if it.node is not None else ""
    slug = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
    return f"Write: {it.key}{slug}" if slug else ""


def _repo_hint(it: FieldError) -> str:
    """Return the repository that the address of its page means."""
    text = it.node.text if it.node is not None else ""
    found = re.match(r"https?://[^/]+/(?:models/)?([^/]+/[^/?#]+)", text)
    is_repo = found is not None and re.fullmatch(HUB_REPO_PATTERN, found[1])
    return f"Write: {it.key}{found[1]}" if found is not None and is_repo else ""


def _quantity_hint(it: FieldError) -> str:
    """Return the quantity that a text such as `24GB` or `24 gib` means."""
    text = it.node.text if it.node is not None else ""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([kmgt])(i?)b?", text.lower(), re.ASCII)
    if found is None:
        return ""
    number, unit, is_binary = found.groups()
    binary = f"{number}{unit.upper()}i"
    decimal = f"{number}{'k' if unit == 'k' else unit.upper()}"
    return f"Write: {it.key}{binary if is_binary else f'{decimal} or {binary}'}"


_TABLE: Mapping[str, Callable[[FieldError], Explanation]] = {
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
