"""Normalizes JSON Schemas for the grammar library: known keywords only, limited size, no annotations. Pure.

llguidance ignores unknown keywords, and `x-guidance` in a client's schema would change its behaviour. So every keyword
is checked here by name. Keywords that cannot be enforced are refused by name. In schemas that are not strict (OpenAI's
tools by default) they are left out instead: the grammar then allows more than the schema, and never less.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import unquote

from engine.errors import GrammarError
from engine.grammar import pattern_limits

Json: TypeAlias = Any  # a parsed schema, or a part of it

# A schema of 2,000 properties compiles in 50 ms; llguidance's own parser stops at 128 levels of JSON.
_MAX_PARTS, _MAX_DEPTH, _MAX_VALUES, _MAX_PATTERN = 2_000, 50, 10_000, 2_000
# Any optional property may come next: llguidance gives up at 2,000 alternatives, and each property has four.
_MAX_OPTIONAL = 400
# llguidance allows seven digits, but with five (on SmolLM2's vocabulary) compiling already takes a second.
_MAX_MULTIPLE = 1_000
# llguidance's integers have 64 bits.
_MAX_BOUND = 9 * 10**18
# llguidance compares each pattern of property names with each other, again at each member of `allOf`.
_MAX_PATTERNED = 16
_MAX_TRIES = 30
"""Most compilations to find the faulty part of a schema."""

_ANY = object()
_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# Keywords of JSON Schema and OpenAPI that only describe. `discriminator` repeats what `oneOf` decides anyway.
_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "example",
        "$comment",
        "$schema",
        "$id",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "contentEncoding",
        "contentMediaType",
    }
)
_SCHEMA = frozenset({"additionalProperties", "items"})
_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
)
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_TEXTS = frozenset({"$ref", "$anchor", "pattern", "format"})
KEYWORDS = (
    _SCHEMA
    | _SCHEMAS
    | _NAMED
    | _COUNTS
    | _NUMBERS
    | _TEXTS
    | {"type", "required", "enum", "const"}
)
"""All keywords that are enforced."""
_COMPOSING = frozenset({"$ref", "anyOf", "oneOf"})


def normalize_schema(schema: Json, *, is_strict: bool = True) -> Json:
    """Return a schema in the form that the grammar library needs.

    Objects that list properties and do not mention additional ones are closed, as in OpenAI's strict mode: a model that
    may invent properties does so. Schemas that compose objects of several parts stay open. A schema that is not strict
    and whose patterns or formats cannot be enforced together is enforced without them.

    Raises:
        GrammarError: the schema is invalid, too large, or has a keyword that cannot be enforced; names the place.

    """
    walk = _SchemaWalk(is_strict=is_strict)
    clean = walk.read(schema, "$", 0)
    try:
        pattern_limits.check_patterns(clean, check_references(clean, walk.uses))
    except pattern_limits.PatternError:
        if is_strict:
            raise
        walk = _SchemaWalk(is_strict=False, has_patterns=False)
        clean = walk.read(schema, "$", 0)
    if not walk.is_composed:
        _close_objects(clean)
    return clean


@dataclass(slots=True, kw_only=True)
class _SchemaWalk:
    is_strict: bool
    has_patterns: bool = True
    """False leaves out `pattern` and `format`."""
    is_composed: bool = False
    uses: dict[str, str] = field(default_factory=dict)
    """Each reference, and a place where it is used."""
    _parts: int = 0
    _values: int = 0
    _patterned: int = 0

    def read(self, schema: Json, where: str, depth: int) -> Json:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise GrammarError(f"{where}: a schema can have at most {_MAX_PARTS} parts.")
        if depth > _MAX_DEPTH:
            raise GrammarError(
                f"{where[:200]}: a schema can be nested at most {_MAX_DEPTH} levels deep; "
                "use '$ref' for repeated parts."
            )
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise GrammarError(f"{where}: a schema must be a JSON object, true or false.")
        _check_optional(schema, where)
        if "allOf" in schema or (_COMPOSING & schema.keys() and "properties" in schema):
            self.is_composed = True
        clean: dict[str, Json] = {}
        for name, value in schema.items():
            if name in _ANNOTATIONS:
                continue
            kept = self._keyword(name, value, where, depth)
            if kept is not _ANY:
                clean[name] = kept
        return clean

    def _keyword(self, name: str, value: Json, where: str, depth: int) -> Json:
        here = f"{where}.{name}"
        if name in ("pattern", "format") and not self.has_patterns:
            return _ANY
        if name in _SCHEMA:
            return self.read(value, here, depth + 1)
        if name in _SCHEMAS:
            return self._list(name, value, where, depth)
        if name in _NAMED:
            return self._named(name, value, here, depth)
        if name in ("enum", "const"):
            return self._constants(name, value, here)
        return self._limit(name, value, here)

    def _list(self, name: str, value: Json, where: str, depth: int) -> Json:
        _expect(isinstance(value, list) and bool(value), f"{where}.{name}", "a list of schemas")
        return [self.read(one, f"{where}.{name}[{at}]", depth + 1) for at, one in enumerate(value)]

    def _named(self, name: str, value: Json, here: str, depth: int) -> Json:
        _expect(isinstance(value, Mapping), here, "an object of schemas")
        if name == "patternProperties":
            self._patterned += len(value)
            if self._patterned > _MAX_PATTERNED:
                raise GrammarError(
                    f"{here[:300]}: a schema can have at most {_MAX_PATTERNED} patterns of property names."
                )
        return {key: self.read(one, f"{here}.{key[:100]}", depth + 1) for key, one in value.items()}

    def _constants(self, name: str, value: Json, here: str) -> Json:
        _expect(name == "const" or (isinstance(value, list) and bool(value)), here, "a list")
        is_long = isinstance(value, list) and len(value) > _MAX_VALUES  # not worth a count
        self._values += len(value) if is_long else _count_values(value, here, 0)
        if self._values > _MAX_VALUES:
            raise GrammarError(
                f"{here}: a schema can list at most {_MAX_VALUES} values in 'enum' and 'const'."
            )
        return value

    def _limit(self, name: str, value: Json, here: str) -> Json:
        if name in _COUNTS:
            _expect(_is_count(value), here, "a whole number of 0 or more")
            return value
        if name not in _NUMBERS:
            return self._text(name, value, here)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        _expect(is_number, here, "a number (draft 4's true and false are not supported)")
        if name != "multipleOf" and abs(value) > _MAX_BOUND:
            return self._omit(here, f"use a number from -{_MAX_BOUND:.0e} to {_MAX_BOUND:.0e}")
        if name == "multipleOf" and not (0 < value <= _MAX_MULTIPLE):
            return self._omit(here, f"use a multiple of 1 to {_MAX_MULTIPLE}")
        return value

    def _text(self, name: str, value: Json, here: str) -> Json:
        if name == "type":
            listed = value if isinstance(value, list) else [value]
            is_known = bool(listed) and all(one in _TYPES for one in listed)
            _expect(is_known, here, f"one or more of {', '.join(_TYPES)}")
            return value
        if name == "required":
            fits = isinstance(value, list) and all(isinstance(one, str) for one in value)
            _expect(fits, here, "a list of names")
            return value
        if name in _TEXTS:
            _expect(isinstance(value, str), here, "a string")
        if name == "$ref" and not value.startswith("#"):
            raise GrammarError(f"{here}: only references within the schema ('#...') are supported.")
        if name == "$ref":
            self.uses[value] = here[:300]
        if name == "pattern" and len(value) > _MAX_PATTERN:
            return self._omit(here, f"use a pattern of at most {_MAX_PATTERN} characters")
        if name == "format" and value not in _FORMATS:
            return self._omit(here, f"use one of the formats {', '.join(sorted(_FORMATS))}")
        if name in _TEXTS:
            return value
        return self._omit(here, "leave it out, or describe it in the prompt")

    def _omit(self, here: str, cure: str) -> Json:
        """Leave a keyword out of the grammar, if the schema is not strict."""
        if self.is_strict:
            raise GrammarError(f"{here[:300]}: this keyword cannot be enforced; {cure}.")
        return _ANY


def _check_optional(schema: Mapping[str, Json], where: str) -> None:
    named, needed = schema.get("properties"), schema.get("required")
    if not isinstance(named, Mapping):
        return
    if len(named) - (len(needed) if isinstance(needed, list) else 0) > _MAX_OPTIONAL:
        raise GrammarError(
            f"{where[:200]}: an object can have at most {_MAX_OPTIONAL} properties that are not required."
        )


def _close_objects(schema: Json) -> None:
    """Forbid additional properties in objects that name some and do not mention additional ones."""
    if isinstance(schema, bool):
        return
    named = schema.get("properties")
    says = schema.keys() & {"additionalProperties", "patternProperties"}
    if named and not says and set(schema.get("required", ())) <= named.keys():
        schema["additionalProperties"] = False
    for _, part in _children(schema):
        _close_objects(part)


def check_nesting(value: Json) -> None:
    """Refuse a value that is nested too deeply to be printed by templates and by this process.

    Raises:
        GrammarError: the value is nested too deeply.

    """
    _count_values(value, "$", -_MAX_DEPTH)  # a level of a schema is two of JSON


def find_failing_part(schema: Json, fails: Callable[[Json], bool]) -> str:
    """Return the path of the smallest part of a schema that fails by itself."""
    where, left = "$", _MAX_TRIES
    # Deeply nested parts are each almost as large as the whole.
    left_bytes = 2 * len(str(schema))
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    found = True
    while found and left > 0:
        found = False
        for path, part in _children(schema):
            left -= 1
            left_bytes -= len(str(part))
            if isinstance(part, dict) and min(left, left_bytes) >= 0 and fails({**shared, **part}):
                where, schema, found = f"{where}.{path}", part, True
                break
    return where


def _children(schema: Json) -> Iterator[tuple[str, Json]]:
    for name, value in schema.items():
        if name in _SCHEMA:
            yield name, value
        elif name in _SCHEMAS:
            yield from ((f"{name}[{at}]", one) for at, one in enumerate(value))
        elif name in _NAMED:
            yield from ((f"{name}.{key[:100]}", one) for key, one in value.items())


def _count_values(value: Json, here: str, depth: int) -> int:
    """Count a value and the values in it."""
    if depth > _MAX_DEPTH:
        raise GrammarError(
            f"{here}: the value is nested too deeply; at most {_MAX_DEPTH} levels are allowed."
        )
    if isinstance(value, Mapping):
        return 1 + sum(_count_values(one, here, depth + 1) for one in value.values())
    if isinstance(value, list):
        return 1 + sum(_count_values(one, here, depth + 1) for one in value)
    return 1


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _expect(holds: bool, here: str, expected: str) -> None:  # noqa: FBT001 - an assertion
    if not holds:
        raise GrammarError(f"{here[:300]}: expected {expected}.")


def check_references(schema: Json, uses: Mapping[str, str]) -> Mapping[str, Json]:
    """Return the targets of references; refuse those that nothing can match because they refer only to themselves.

    `uses` maps each reference in the schema to a place where it is used. Recursion through properties and items is
    allowed, because it consumes text.

    Raises:
        GrammarError: a reference has no target, or leads back to itself.

    """
    targets = {ref: _target(schema, ref, where) for ref, where in uses.items()}
    founded: set[str] = set()
    while True:
        # The least fixed point: a reference is founded if its target is founded without the reference itself.
        found = {ref for ref, target in targets.items() if _is_founded(target, founded)}
        if found == founded:
            break
        founded = found
    for ref, where in uses.items():
        if ref not in founded:
            raise GrammarError(f"{where}: '{ref[:100]}' refers only to itself.")
    return targets


def _is_founded(part: Json, founded: set[str]) -> bool:
    if not isinstance(part, Mapping):
        return True
    if "$ref" in part and part["$ref"] not in founded:
        return False
    if not all(_is_founded(one, founded) for one in part.get("allOf", ())):
        return False
    return all(
        any(_is_founded(one, founded) for one in part[name])
        for name in ("anyOf", "oneOf")
        if name in part
    )


def _target(schema: Json, ref: str, where: str) -> Json:
    path = unquote(ref.removeprefix("#"))
    if path and not path.startswith("/"):
        return {}  # an anchor: the library resolves or refuses it
    target = schema
    for step in path.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and name in target:
            target = target[name]
        elif isinstance(target, list) and name.isdecimal() and int(name[:9]) < len(target):
            target = target[int(name)]
        else:
            raise GrammarError(f"{where}: there is no '{ref[:100]}' in this schema.")
    return target
