"""Normalized JSON Schemas: refused keywords and their places, omitted keywords, closed objects."""

import contextlib
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import GrammarError
from engine.grammar import json_schema
from engine.grammar.json_schema import find_failing_part, normalize_schema

INTEGER = {"type": "integer"}


def deep(levels: int) -> Any:
    found: Any = INTEGER
    for _ in range(levels):
        found = {"type": "array", "items": found}
    return found


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"not": INTEGER}, "$.not: this keyword cannot be enforced"),
        ({"properties": {"a": {"if": {}}}}, "$.properties.a.if"),
        ({"items": {"uniqueItems": True}}, "$.items.uniqueItems"),
        ({"anyOf": [INTEGER, {"nullable": True}]}, "$.anyOf[1].nullable"),
        ({"$defs": {"a": {"x-guidance": {"lenient": True}}}}, "$.$defs.a.x-guidance"),
        ({"format": "regex"}, "$.format: this keyword cannot be enforced; use one of the formats"),
        ({"pattern": "a" * 2001}, "$.pattern"),
        ({"multipleOf": 99991}, "$.multipleOf"),
        ({"type": "strin"}, "$.type: expected"),
        ({"type": []}, "$.type"),
        ({"required": "a"}, "$.required: expected a list of names"),
        ({"minLength": -1}, "$.minLength: expected a whole number"),
        ({"maxItems": True}, "$.maxItems"),
        ({"exclusiveMinimum": True}, "$.exclusiveMinimum: expected a number"),
        ({"items": [INTEGER]}, "$.items: a schema must be a JSON object"),
        ({"properties": []}, "$.properties: expected an object of schemas"),
        ({"anyOf": []}, "$.anyOf: expected a list of schemas"),
        ({"enum": []}, "$.enum: expected a list"),
        ({"enum": list(range(10_001))}, "$.enum: a schema can list at most 10000 values"),
        ({"const": [[[0] * 100] * 100] * 10}, "$.const"),
        ({"$ref": "http://example.org/a.json"}, "$.$ref: only references within"),
        ({"$ref": "#/$defs/a"}, "$.$ref: there is no '#/$defs/a'"),
        ({"$ref": "#"}, "$.$ref: '#' refers only to itself"),
        ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "refers only to itself"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 2}}}, "refers only to itself"),
        (deep(51), "nested at most 50 levels deep"),
        ({"anyOf": [INTEGER] * 2001}, "at most 2000 parts"),
        (
            {"properties": {str(at): INTEGER for at in range(401)}},
            "$: an object can have at most 400",
        ),
    ],
)
def test_unsupported_keywords_are_refused_with_their_place(wanted: Any, says: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(says)) as caught:
        normalize_schema(wanted)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("wanted", "enforced"),
    [
        ({"uniqueItems": True, "type": "array"}, {"type": "array"}),
        ({"format": "regex", "type": "string"}, {"type": "string"}),
        ({"properties": {"a": {"not": {}}}}, {"properties": {"a": {}}}),
        ({"type": "string", "nullable": True}, {"type": "string"}),
    ],
)
def test_a_schema_that_is_not_strict_is_enforced_as_far_as_possible(
    wanted: Any, enforced: Any
) -> None:
    found = normalize_schema(wanted, is_strict=False)
    if isinstance(found, dict):
        found.pop("additionalProperties", None)
    assert found == enforced


def test_recursion_through_properties_is_allowed() -> None:
    ref = {"$ref": "#/$defs/a"}
    for shared in (
        {"anyOf": [ref, INTEGER]},
        {"type": "array", "items": ref},
        {"$ref": "#/$defs/b"},
    ):
        wanted = {"$defs": {"a": shared, "b": INTEGER}, "type": "array", "items": ref}
        assert normalize_schema(wanted)["$defs"]["a"] == shared


def test_annotations_are_removed_and_enum_values_stay() -> None:
    wanted = {"title": "t", "default": {"not": 1}, "enum": [{"not": 1}], "description": "d"}
    assert normalize_schema(wanted) == {"enum": [{"not": 1}]}


def test_objects_are_closed_unless_open_or_composed() -> None:
    named: dict[str, Any] = {"properties": {"a": INTEGER}}
    closed = named | {"additionalProperties": False}
    assert normalize_schema(named) == closed
    assert normalize_schema({"items": named}) == {"items": closed}
    assert normalize_schema({"$defs": {"x": named}}) == {"$defs": {"x": closed}}
    for as_it_is in (
        named | {"additionalProperties": INTEGER},
        named | {"required": ["b"]},
        named | {"patternProperties": {"^x": {}}},
        {"type": "object"},
        {"allOf": [named, {"properties": {"b": INTEGER}}]},
        named | {"anyOf": [{"required": ["b"]}]},
    ):
        assert normalize_schema(as_it_is) == as_it_is


def test_normalizing_does_not_change_the_input() -> None:
    wanted = {"properties": {"a": {"properties": {"b": {"title": "x"}}}}}
    before = repr(wanted)
    normalize_schema(wanted)
    assert repr(wanted) == before


def test_the_failing_part_is_the_smallest_that_fails_alone() -> None:
    wanted = {"properties": {"a": INTEGER, "b": {"items": {"anyOf": [INTEGER, {"type": "bad"}]}}}}

    def fails(part: Any) -> bool:
        return "bad" in repr(part)

    assert find_failing_part(wanted, fails) == "$.properties.b.items.anyOf[1]"
    assert find_failing_part({"type": "bad"}, fails) == "$"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(sorted(json_schema.KEYWORDS)) | st.text(max_size=3), inner, max_size=4
    ),
    max_leaves=12,
)


@given(wanted=_JSON, is_strict=st.booleans())
def test_any_input_is_normalized_or_refused(wanted: Any, *, is_strict: bool) -> None:
    with contextlib.suppress(GrammarError):
        normalize_schema(wanted, is_strict=is_strict)
