"""The fields of a kind, read from the schemas: what they are called, take and mean. Pure."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from fleetctl.errors import FleetctlError
from fleetctl.kinds import kind_of

Schema: TypeAlias = Mapping[str, Any]
"""A JSON Schema (draft 2020-12), as pydantic makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field: what it is called, takes and means."""

    name: str
    type: str
    """Such as string, []Toleration, map[string]string, or a model's name."""
    is_required: bool
    description: str
    values: tuple[str, ...]
    """The only ones there are; none if others are possible."""
    default: str
    """As JSON; empty if there is none worth a line."""
    limits: str
    schema: Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The schema of one kind, and what it refers to."""

    kind: str
    root: Schema
    definitions: Mapping[str, Schema]

    def fields(self, schema: Schema) -> list[Field]:
        """Return the fields of an object, or of what a list or a mapping holds; none if it has none."""
        found: dict[str, Field] = {}
        for part in self.parts(schema):
            needed = part.get("required", ())
            for name, inner in part.get("properties", {}).items():
                found[name] = self.field(name, inner, is_required=name in needed)
        return list(found.values())

    def field(self, name: str, schema: Schema, *, is_required: bool) -> Field:
        return Field(
            name=name,
            type=self.type_name(schema),
            is_required=is_required,
            description=one_line(str(schema.get("description") or self._described(schema))),
            values=tuple(self._values(schema)),
            default=_default(schema),
            limits="; ".join(dict.fromkeys(self._limits(schema))),
            schema=schema,
        )

    def parts(self, schema: Schema) -> Iterator[Schema]:
        """Yield the objects with fields of their own behind a schema: through references, choices, lists, mappings."""
        found = self._followed(schema)
        if "properties" in found:
            yield found
        for inner in _inner(found):
            yield from self.parts(inner)

    def type_name(self, schema: Schema) -> str:
        found = self._followed(schema)
        if "anyOf" in found:
            names = (self.type_name(one) for one in found["anyOf"] if one.get("type") != "null")
            return " or ".join(dict.fromkeys(names))
        if found.get("type") == "array":
            return f"[]{self.type_name(found.get('items', {}))}"
        if found.get("type") == "object":
            held = [*_mapped(found)]
            if held:
                return f"map[string]{self.type_name(held[0])}"
            return str(found.get("title", "object")) if "properties" in found else "object"
        return "time" if found.get("format") == "date-time" else str(found.get("type", "any"))

    def _followed(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self.definitions[schema["$ref"].removeprefix("#/$defs/")]
        return schema

    def _described(self, schema: Schema) -> str:
        """Return what a type says of itself, for fields that say nothing."""
        for part in (self._followed(schema), *self.parts(schema)):
            if part.get("description"):
                return str(part["description"])
        return ""

    def _values(self, schema: Schema) -> Iterator[str]:
        found = self._followed(schema)
        choices = [one for one in found.get("anyOf", ()) if one.get("type") != "null"]
        if "const" in found:
            yield str(found["const"])
        yield from map(str, found.get("enum", ()))
        if len(choices) == 1 or found.get("type") == "array":
            for inner in _inner(found):
                yield from self._values(inner)

    def _limits(self, schema: Schema) -> Iterator[str]:
        found = self._followed(schema)
        least, most = found.get("minimum"), found.get("maximum")
        if least is not None and most is not None:
            yield f"{least} to {most}"
        elif least is not None or most is not None:
            yield f"at least {least}" if least is not None else f"at most {most}"
        if found.get("exclusiveMinimum") is not None:
            yield f"more than {found['exclusiveMinimum']}"
        fewest, longest = found.get("minItems"), found.get("maxItems")
        if fewest or longest is not None:
            yield " ".join(
                [*([f"at least {fewest}"] if fewest else ()), *([f"at most {longest}"] if longest else ()), "items"]
            )  # fmt: skip
        if "pattern" in found:
            yield f"matches {found['pattern']}"
        for inner in _inner(found):
            if "properties" not in self._followed(inner):
                yield from self._limits(inner)


def _inner(schema: Schema) -> Iterator[Schema]:
    """Yield what a choice, a list or a mapping is made of."""
    yield from schema.get("anyOf", ())
    if isinstance(schema.get("items"), Mapping):
        yield schema["items"]
    yield from schema.get("prefixItems", ())
    yield from _mapped(schema)


def _mapped(schema: Schema) -> Iterator[Schema]:
    yield from schema.get("patternProperties", {}).values()
    if isinstance(schema.get("additionalProperties"), Mapping):
        yield schema["additionalProperties"]


def _default(schema: Schema) -> str:
    """Return the default as a line has it; nothing where the field then says nothing, or has fields of its own."""
    found = schema.get("default")
    if found in (None, "", [], {}) or isinstance(found, dict):
        return ""
    return orjson.dumps(found).decode()


def one_line(text: str) -> str:
    return " ".join(text.split())


def model_of(kind_name: str) -> Model:
    """Return the schema of a kind, by any of its names."""
    kind = kind_of(kind_name)
    root = kind.type.model_json_schema(by_alias=True)
    return Model(kind=kind.name, root=root, definitions=root.get("$defs", {}))


def find(model: Model, path: tuple[str, ...]) -> Field:
    """Return the field at a path; of the empty path the object itself.

    Raises:
        FleetctlError: there is none; with the nearest.

    """
    found = Field(
        name="",
        type=model.kind,
        is_required=False,
        description=one_line(str(model.root.get("description", ""))),
        values=(),
        default="",
        limits="",
        schema=model.root,
    )
    for number, name in enumerate(path):
        fields = {one.name: one for one in model.fields(found.schema)}
        if name not in fields:
            where = ".".join((model.kind, *path[:number]))
            raise FleetctlError(_no_field(where, name, list(fields)))
        found = fields[name]
    return found


def _no_field(where: str, name: str, known: list[str]) -> str:
    if not known:
        return f"{where} has no fields, so there is no {name!r} in it"
    low = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), low, n=1)
    hint = f"did you mean {low[near[0]]}?" if near else f"there are {', '.join(known)}"
    return f"{where} has no field {name!r}; {hint}"
