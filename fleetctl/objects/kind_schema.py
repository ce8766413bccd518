"""The fields of a kind, read from its JSON Schema. Pure, but imports models."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from fleetctl.cli.errors import FleetctlError
from fleetctl.objects.kind_args import kind_of

Schema: TypeAlias = Mapping[str, Any]
"""A JSON Schema (draft 2020-12), as pydantic generates it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSchema:
    """One field: its name, type and meaning."""

    name: str
    type: str
    """For example string, []Toleration, map[string]string, or the name of an object type."""
    is_required: bool
    description: str
    values: tuple[str, ...]
    """The allowed values; empty if any value of the type is allowed."""
    default: str
    """As JSON; empty if there is no simple default."""
    limits: str
    schema: Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSchema:
    """The schema of one kind, with the definitions it refers to."""

    kind: str
    root: Schema
    definitions: Mapping[str, Schema]

    def fields(self, schema: Schema) -> list[FieldSchema]:
        """Return the fields of an object, or of the items of a list or mapping."""
        field_schemas: dict[str, FieldSchema] = {}
        for part in self.parts(schema):
            needed = part.get("required", ())
            for name, inner in part.get("properties", {}).items():
                field_schemas[name] = self.field(name, inner, is_required=name in needed)
        return list(field_schemas.values())

    def field(self, name: str, schema: Schema, *, is_required: bool) -> FieldSchema:
        return FieldSchema(
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
        """Yield the object schemas behind a schema, through references, unions, lists and mappings."""
        found = self._followed(schema)
        if "properties" in found:
            yield found
        for inner in _inner_schemas(found):
            yield from self.parts(inner)

    def type_name(self, schema: Schema) -> str:
        found = self._followed(schema)
        if "anyOf" in found:
            names = (self.type_name(one) for one in found["anyOf"] if one.get("type") != "null")
            return " or ".join(dict.fromkeys(names))
        if found.get("type") == "array":
            return f"[]{self.type_name(found.get('items', {}))}"
        if found.get("type") == "object":
            held = [*_mapped_schemas(found)]
            if held:
                return f"map[string]{self.type_name(held[0])}"
            return str(found.get("title", "object")) if "properties" in found else "object"
        return "time" if found.get("format") == "date-time" else str(found.get("type", "any"))

    def _followed(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self.definitions[schema["$ref"].removeprefix("#/$defs/")]
        return schema

    def _described(self, schema: Schema) -> str:
        """Return the description of the type, for fields without their own."""
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
            for inner in _inner_schemas(found):
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
        for inner in _inner_schemas(found):
            if "properties" not in self._followed(inner):
                yield from self._limits(inner)


def _inner_schemas(schema: Schema) -> Iterator[Schema]:
    """Yield the schemas of the members of a union, a list or a mapping."""
    yield from schema.get("anyOf", ())
    if isinstance(schema.get("items"), Mapping):
        yield schema["items"]
    yield from schema.get("prefixItems", ())
    yield from _mapped_schemas(schema)


def _mapped_schemas(schema: Schema) -> Iterator[Schema]:
    yield from schema.get("patternProperties", {}).values()
    if isinstance(schema.get("additionalProperties"), Mapping):
        yield schema["additionalProperties"]


def _default(schema: Schema) -> str:
    """Return the default as JSON; empty if it is an empty value or an object."""
    found = schema.get("default")
    if found in (None, "", [], {}) or isinstance(found, dict):
        return ""
    return orjson.dumps(found).decode()


def one_line(text: str) -> str:
    return " ".join(text.split())


def schema_of(kind_name: str) -> KindSchema:
    """Return the schema of a kind, by its name or an alias."""
    kind = kind_of(kind_name)
    root = kind.type.model_json_schema(by_alias=True)
    return KindSchema(kind=kind.name, root=root, definitions=root.get("$defs", {}))


def find_field(model: KindSchema, path: tuple[str, ...]) -> FieldSchema:
    """Return the field at a path; the empty path is the object itself.

    Raises:
        FleetctlError: the field does not exist; the message has the nearest.

    """
    field_schema = FieldSchema(
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
        fields = {field.name: field for field in model.fields(field_schema.schema)}
        if name not in fields:
            where = ".".join((model.kind, *path[:number]))
            raise FleetctlError(_unknown_field(where, name, list(fields)))
        field_schema = fields[name]
    return field_schema


def _unknown_field(where: str, name: str, known: list[str]) -> str:
    if not known:
        return f"{where} has no fields, so {name!r} does not exist"
    low = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), low, n=1)
    hint = f"did you mean {low[near[0]]}?" if near else f"its fields are {', '.join(known)}"
    return f"{where} has no field {name!r}; {hint}"
