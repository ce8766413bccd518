"""Tools of one request, and the types that their schemas declare for arguments. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import orjson

Json: TypeAlias = Any
Tools: TypeAlias = Sequence[Mapping[str, Json]]  # as chat templates take them

ANY: Final[frozenset[str]] = frozenset()
TEXT: Final = frozenset({"string"})
# References that lead to references.
_MAX_STEPS: Final = 32
_KEYWORDS: Final = {
    "object": {"properties", "additionalProperties", "patternProperties"},
    "array": {"items", "prefixItems"},
    "string": {"pattern", "minLength", "maxLength", "format"},
}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools that an answer may call."""

    tools: Tools = ()
    _schemas: dict[str, Json] = field(init=False)

    def __post_init__(self) -> None:
        """Collect the schemas by name."""
        functions = [tool["function"] for tool in self.tools]
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        object.__setattr__(self, "_schemas", schemas)

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def kinds(self, name: str, argument: str) -> frozenset[str]:
        """Return the JSON types that an argument may have; ANY if the schema does not say."""
        root = self._schemas.get(name, {})
        named = _resolve(root, root).get("properties")
        schema = named.get(argument) if isinstance(named, Mapping) else None
        return _kinds(schema, root, _MAX_STEPS)


def _resolve(schema: Json, root: Json) -> Mapping[str, Json]:
    """Return the schema that a reference within `root` leads to."""
    for _ in range(_MAX_STEPS):
        if not isinstance(schema, Mapping):
            return {}
        ref = schema.get("$ref")
        if not isinstance(ref, str) or not ref.startswith("#"):
            return schema
        schema = root
        for step in ref.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, Sequence) and name.isdecimal() and int(name) < len(schema):
                schema = schema[int(name)]
            else:
                schema = schema.get(name) if isinstance(schema, Mapping) else None
    return {}


def _kinds(schema: Json, root: Json, steps: int) -> frozenset[str]:
    schema = _resolve(schema, root)
    if steps == 0:
        return ANY
    declared = schema.get("type")
    if isinstance(declared, str):
        kinds = frozenset({declared})
    elif isinstance(declared, list):
        kinds = frozenset(kind for kind in declared if isinstance(kind, str))
    elif "enum" in schema or "const" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        kinds = frozenset(_kind_of(value) for value in values)
    else:
        kinds = frozenset(kind for kind, words in _KEYWORDS.items() if words & schema.keys())
        for name in ("anyOf", "oneOf"):
            parts = schema.get(name)
            if not kinds and isinstance(parts, list) and parts:
                branches = [_kinds(part, root, steps - 1) for part in parts[:64]]
                kinds = frozenset().union(*branches) if all(branches) else ANY
        for part in schema["allOf"][:64] if isinstance(schema.get("allOf"), list) else ():
            both = _kinds(part, root, steps - 1)
            kinds = kinds & both or kinds or both
    return kinds | {"null"} if kinds and schema.get("nullable") is True else kinds


def _kind_of(value: Json) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if float(value).is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def quote(text: str) -> str:
    """Return a text as a JSON string."""
    written = json.dumps(text, ensure_ascii=False)
    try:
        written.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, UTF-8 cannot
        return json.dumps(text)
    return written


def json_kind(text: str) -> str | None:
    """Return the type of a JSON text; None if it is no JSON."""
    try:
        return _kind_of(orjson.loads(text))
    except orjson.JSONDecodeError:
        return None


def fits(kind: str | None, kinds: frozenset[str]) -> bool:
    """Return whether a value of a JSON type has one of the declared types."""
    return kind is not None and (
        not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    )
