"""Errors of pydantic's validation as messages for users: what was expected, what was found, what to write. Pure."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from manifests.suggestions import describe_node, did_you_mean, nearest
from manifests.trees import Path
from manifests.yaml import nodes, parser
from manifests.yaml.nodes import YamlNode
from schemas import sizes
from schemas.deployment import HUB_REPO_PATTERN, ModelSource
from schemas.duration import Unit
from schemas.field_docstrings import field_docstrings
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


def _is_required(model: type[BaseModel], path: Path) -> bool:
    field = _field_at(model, path)
    return field is not None and field.is_required()


def field_description(model: type[BaseModel], path: Path) -> str:
    """Return the first line of the field's docstring."""
    parent = _type_at(model, path[:-1])
    if not path or not _is_model(parent):
        return ""
    name = next((n for n, field in parent.model_fields.items() if field.alias == path[-1]), "")
    return field_docstrings(parent).get(name, "").split("\n")[0]


def field_unit(model: type[BaseModel], path: Path) -> Unit | None:
    """Return the unit of a bare number at the path; None where no duration is expected."""
    # The last one belongs to the narrowest type.
    return next((mark for mark in reversed(_marks(model, path)) if isinstance(mark, Unit)), None)


def _marks(model: type[BaseModel], path: Path) -> list[Any]:
    """Return what the type of a field is annotated with, also one of several types."""
    field = _field_at(model, path)
    if field is None:
        return []
    options = [arg for arg in get_args(field.annotation) if hasattr(arg, "__metadata__")]
    return [*field.metadata, *(mark for option in options for mark in option.__metadata__)]


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
    """Return the type without Annotated[] and without `| None`; of several forms, the only model."""
    if hasattr(annotation, "__metadata__"):
        return _bare(get_args(annotation)[0])
    options = [arg for arg in get_args(annotation) if arg is not NoneType]
    models = [arg for arg in options if _is_model(_bare(arg))] if len(options) > 1 else options
    if get_origin(annotation) in (Union, UnionType) and len(models) == 1:
        return _bare(models[0])
    return annotation


def _is_model(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, BaseModel)


def relevant_errors(error: ValidationError, root: YamlNode) -> list[ErrorDetails]:
    """Return the errors with their paths in the document, except those that only follow from others.

    pydantic does not count a list's invalid items, so it takes the list for too short; and it cannot compute a default
    from an invalid neighbour, which has an error of its own. Where a value may have one of several forms, it has errors
    for each form: those of the form that comes closest are returned.
    """
    relevant: list[ErrorDetails] = []
    forms: dict[Path, dict[str | int, list[ErrorDetails]]] = {}
    for one in error.errors(include_url=False):
        if one["type"] == "default_factory_not_called":
            continue
        if one["type"] == "too_short" and not _is_short(one, root):
            continue
        path: Path = ()
        errors = relevant
        for part in one["loc"]:
            is_absent = nodes.find_node(root, (*path, part)) is None
            if not is_absent or part == "[key]" or one["type"] == "missing":
                path = (*path, part)
            else:  # no field, but pydantic's name of a form
                errors = forms.setdefault(path, {}).setdefault(part, [])
        errors.append({**one, "loc": path})
    for path, found in forms.items():
        distances = [_form_distance(errors[0], path) for errors in found.values()]
        relevant += list(found.values())[distances.index(min(distances))]
    return relevant


def _form_distance(found: ErrorDetails, path: Path) -> int:
    """Return how far a value is from a form: 0 if its type is that of the form."""
    if found["loc"] != path or not found["type"].endswith(("_type", "literal_error")):
        return 0
    return 2 if found.get("ctx", {}).get("expected", "''") == "''" else 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The message about a wrong value, and the remedy."""

    message: str
    values: Sequence[str] = ()
    """Values in YAML that were probably meant. Only those that the field accepts are shown."""
    hint: str = ""
    """The remedy where none of the values is valid."""


def explain_error(
    found: ErrorDetails, *, path: Path, node: YamlNode | None, model: type[BaseModel]
) -> tuple[str, str]:
    """Return the message of an error, and a hint, which is itself valid."""
    error = FieldError(
        path=path,
        node=node,
        context=found.get("ctx", {}),
        model=model,
        fallback=found["msg"],
    )
    explain = _TABLE.get(found["type"])
    if explain is None:
        return (error.fallback[:1].lower() + error.fallback[1:]), ""
    explanation = explain(error)
    if found["loc"][-1:] == ("[key]",):  # a line to write would set the key's value
        return explanation.message, ""
    if node is not None and node.content is None and found["type"].endswith(("_type", "_error")):
        if _is_required(model, path):
            return explanation.message, explanation.hint or "Write a value"
        return explanation.message, "Write a value, or remove the line"
    values = [text for text in explanation.values if accepts(model, path, f"{error.key}{text}")]
    hint = f"Write: {error.key}{' or '.join(values)}" if values else explanation.hint
    return explanation.message, hint


def accepts(model: type[BaseModel], path: Path, line: str) -> bool:
    """Return whether the field at the path accepts a line such as `replicas: 2` or `- "7"`, whatever its neighbours are."""
    owner: type[BaseModel] = model
    rest = path
    for end in range(1, len(path)):
        found = _type_at(model, path[:end])
        if _is_model(found):
            owner, rest = found, path[end:]
    parsed = parser.parse(line, "")
    if parsed.problems:
        return False
    value = nodes.plain_value(parsed.documents[0])
    # An item is the only one of its list.
    place = tuple(0 if isinstance(part, int) else part for part in rest)
    for part in reversed(place[:-1]):
        value = [value] if part == 0 else {str(part): value}
    try:
        owner.model_validate_json(json.dumps(value), by_alias=True, by_name=False)
    except ValidationError as error:
        return all(one["loc"][: len(place)] != place for one in error.errors(include_url=False))
    return True


def _missing(it: FieldError) -> Explanation:
    says = field_description(it.model, it.path)
    hint = f"Meaning: {says}".rstrip(".") if says else ""
    return Explanation(message="is required but not given", hint=hint)


def _unknown(it: FieldError) -> Explanation:
    word = str(it.path[-1])
    if _type_at(it.model, it.path[:-1]) is ModelSource and word in _HUB_WORDS:
        hint = (
            "A model of a hub is written as hub: {repo: ORGANISATION/NAME}, with revision below hub too "
            "(docs/models.md)"
        )
    elif it.path == ("metadata", "namespace"):
        hint = "Fleets have no namespaces. Remove it"
    else:
        hint = did_you_mean(word, known_fields(it.model, it.path[:-1]), "Known fields")
    return Explanation(message="unknown field", hint=hint)


def _integer(it: FieldError) -> Explanation:
    content = it.node.content if it.node is not None else None
    meant: int | None = None
    if isinstance(content, str):
        meant = _integer_of(content)
    elif isinstance(content, float) and content.is_integer():
        meant = int(content)
    values = [] if meant is None else [str(meant)]
    return Explanation(message=f"expected an integer, got {describe_node(it.node)}", values=values)


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


def _number(it: FieldError) -> Explanation:
    content = it.node.content if it.node is not None else None
    return Explanation(
        message=f"expected a number, got {describe_node(it.node)}",
        values=[content] if isinstance(content, str) else [],
    )


def _string(it: FieldError) -> Explanation:
    got = describe_node(it.node)
    if it.node is None or isinstance(it.node.content, dict | list | None):
        return Explanation(message=f"expected a string, got {got}")
    if (unit := field_unit(it.model, it.path)) is not None:
        example = unit.example(it.node.content)
        return Explanation(message=f"expected a duration, got {got}", values=[example])
    from manifests import patterns  # noqa: PLC0415 - it imports the models of all kinds

    marks = _marks(it.model, it.path)
    if any(getattr(mark, "pattern", None) == patterns.QUANTITY for mark in marks):
        # A small number counts GB or GiB; a quoted one would be bytes.
        meant = sizes.meanings(f"{it.node.text}g") or [json.dumps(it.node.text)]
        return Explanation(message=f"{patterns.rule(patterns.QUANTITY)}; got {got}", values=meant)
    return Explanation(message=f"expected a string, got {got}", values=[json.dumps(it.node.text)])


def _time(it: FieldError) -> Explanation:
    got = describe_node(it.node)
    return Explanation(
        message=f"expected a time with its zone, got {got}", values=['"2026-12-01T08:00:00Z"']
    )


def _boolean(it: FieldError) -> Explanation:
    text = str(it.node.content).lower() if it.node is not None else ""
    meant = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(text, text)
    return Explanation(
        message=f"expected true or false, got {describe_node(it.node)}",
        values=[meant] if meant in ("true", "false") else [],
    )


def _mapping(it: FieldError) -> Explanation:
    known = known_fields(it.model, it.path)
    required = [name for name in known if _is_required(it.model, (*it.path, name))]
    text = it.node.content if it.node is not None else None
    return Explanation(
        message=f"expected a mapping, got {describe_node(it.node)}",
        # `hub: ORGANISATION/NAME` is meant for the only field without a default.
        values=[f"{{{required[0]}: {text}}}"]
        if len(required) == 1 and isinstance(text, str)
        else [],
        hint=f"Its fields are: {', '.join(known)}" if known else "",
    )


def _list(it: FieldError) -> Explanation:
    content = it.node.content if it.node is not None else None
    is_scalar = it.node is not None and not isinstance(content, dict | list)
    text = it.node.text if it.node is not None else ""
    return Explanation(
        message=f"expected a list, got {describe_node(it.node)}",
        values=[f"[{text if isinstance(content, str) else json.dumps(text)}]"] if is_scalar else [],
        hint="Write one item per line, each after a '-'",
    )


def _choice(it: FieldError) -> Explanation:
    # pydantic quotes texts, but not numbers.
    options = re.findall(r"'([^']*)'|(\d+)", str(it.context.get("expected", "")))
    options = [text or number for text, number in options]
    close = nearest(it.node.text, options) if it.node is not None else None
    return Explanation(
        message=f"expected {' or '.join(options)}, got {describe_node(it.node)}",
        values=[close] if close else [],
    )


def _out_of_range(it: FieldError) -> Explanation:
    words = {"ge": "{} or more", "le": "{} or less", "gt": "more than {}", "lt": "less than {}"}
    [bound] = [text.format(it.context[key]) for key, text in words.items() if key in it.context]
    return Explanation(message=f"must be {bound}, got {describe_node(it.node)}")


def _too_few(it: FieldError) -> Explanation:
    least, has = it.context.get("min_length"), it.context.get("actual_length")
    return Explanation(
        message=f"needs {least} {'item' if least == 1 else 'items'} or more, has {has}"
    )


def _too_long(it: FieldError) -> Explanation:
    length = len(it.node.text) if it.node is not None else 0
    most = it.context.get("max_length")
    return Explanation(message=f"has {length} characters; at most {most} are allowed")


def _empty(_: FieldError) -> Explanation:
    return Explanation(message="must not be empty")


def _value(it: FieldError) -> Explanation:
    unit, text = field_unit(it.model, it.path), it.node.content if it.node is not None else None
    meant = unit.translate(text) if unit is not None and isinstance(text, str) else None
    return Explanation(
        message=str(it.context.get("error", it.fallback)), values=[] if meant is None else [meant]
    )


def _pattern(it: FieldError) -> Explanation:
    from manifests import patterns  # noqa: PLC0415 - it imports the models of all kinds

    pattern = str(it.context.get("pattern"))
    rule = patterns.rule(pattern)
    values = {
        patterns.NAME: _near_names,
        patterns.QUANTITY: sizes.meanings,
        HUB_REPO_PATTERN: _near_repos,
    }
    text = it.node.text if it.node is not None else ""
    return Explanation(
        message=f"{rule}; got {describe_node(it.node)}",
        values=values[pattern](text) if pattern in values else (),
    )


def _near_names(text: str) -> list[str]:
    """Return the nearest name of an object."""
    slug = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
    return [slug] if slug else []


def _near_repos(text: str) -> list[str]:
    """Return the repository that the address of its page means."""
    return re.findall(r"^https?://[^/]+/(?:models/)?([^/]+/[^/?#]+)", text)


_TABLE: Mapping[str, Callable[[FieldError], Explanation]] = {
    "missing": _missing,
    "extra_forbidden": _unknown,
    "int_type": _integer,
    "int_from_float": _integer,
    "int_parsing_size": _integer,
    "float_type": _number,
    "string_type": _string,
    "datetime_type": _time,
    "datetime_parsing": _time,
    "datetime_from_date_parsing": _time,
    "timezone_aware": _time,
    "bool_type": _boolean,
    "model_type": _mapping,
    "dict_type": _mapping,
    "tuple_type": _list,
    "list_type": _list,
    "literal_error": _choice,
    "enum": _choice,
    "greater_than_equal": _out_of_range,
    "less_than_equal": _out_of_range,
    "greater_than": _out_of_range,
    "less_than": _out_of_range,
    "too_short": _too_few,
    "string_too_long": _too_long,
    "string_too_short": _empty,
    "string_pattern_mismatch": _pattern,
    "value_error": _value,
}
