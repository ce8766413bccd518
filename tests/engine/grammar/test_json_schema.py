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
        (
            {"type": "integer", "minimum": -1e30, "maximum": 1e40},
            "$.minimum: this keyword cannot be enforced; use a number from -9e+18 to 9e+18",
        ),
        ({"properties": {"a": {"exclusiveMaximum": 2**63}}}, "$.properties.a.exclusiveMaximum"),
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
        ({"type": "integer", "minimum": 0, "maximum": 1e30}, {"type": "integer", "minimum": 0}),
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


def patterned(text: str) -> Any:
    return {"type": "string", "pattern": text}


TOGETHER: dict[str, Any] = {
    "members of allOf": {"allOf": [patterned("a"), patterned("b")]},
    "a member and its parent": patterned("a") | {"allOf": [{"pattern": "b"}]},
    "a reference beside a pattern": {
        "$defs": {"x": patterned("a")},
        "$ref": "#/$defs/x",
        "pattern": "b",
    },
    "references": {
        "$defs": {"x": patterned("a"), "y": {"allOf": [patterned("b")]}},
        "allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
    },
    "alternatives beside a pattern": patterned("a") | {"anyOf": [{"pattern": "b"}, INTEGER]},
    "two formats": {"allOf": [{"format": "email"}, {"format": "uri"}]},
    "one property": {
        "allOf": [{"properties": {"a": patterned("a")}}, {"properties": {"a": patterned("b")}}]
    },
    "a property and all others": {
        "allOf": [
            {"properties": {"a": patterned("a")}},
            {"additionalProperties": patterned("b")},
        ]
    },
    "a property and a pattern of names": {
        "properties": {"a": patterned("a")},
        "patternProperties": {"^a": patterned("b")},
    },
    "deep items": {
        "allOf": [
            {"items": {"properties": {"a": {"items": patterned("a")}}}},
            {"prefixItems": [INTEGER, {"properties": {"a": {"items": patterned("b")}}}]},
        ]
    },
    "a recursive part": {
        "$defs": {"x": {"properties": {"next": {"$ref": "#/$defs/x"}, "v": patterned("a")}}},
        "allOf": [
            {"$ref": "#/$defs/x"},
            {
                "properties": {
                    "next": {"properties": {"next": {"properties": {"v": patterned("b")}}}}
                }
            },
        ],
    },
    "one alternative of several": {
        "allOf": [{"anyOf": [patterned("a"), patterned("b")]}, patterned("b")]
    },
}


@pytest.mark.parametrize("name", TOGETHER)
def test_a_text_must_match_one_pattern_and_one_format_at_most(name: str) -> None:
    with pytest.raises(GrammarError, match="hold together") as caught:
        normalize_schema(TOGETHER[name])
    assert str(caught.value).startswith("$")
    # Of a tool that is not strict they are left out: Claude Code 2.1.332 has two patterns in `allOf`.
    assert "'pattern':" not in str(normalize_schema(TOGETHER[name], is_strict=False))


APART: dict[str, Any] = {
    "a pattern and a format": {"allOf": [patterned("a"), {"format": "email", "minLength": 3}]},
    "alternatives": {"anyOf": [patterned("a"), patterned("b"), {"format": "uri"}]},
    "different properties": {
        "allOf": [
            {"properties": {"a": patterned("a"), "z": {"properties": {"a": patterned("c")}}}},
            {"properties": {"b": patterned("b"), "y": {"properties": {"a": patterned("d")}}}},
        ]
    },
    "the same part twice": {
        "$defs": {"x": patterned("a")},
        "allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}],
    },
    "other names": {"properties": {"a": patterned("a")}, "additionalProperties": patterned("b")},
    "a recursive part beside another property": {
        "$defs": {"x": {"properties": {"next": {"$ref": "#/$defs/x"}, "v": patterned("a")}}},
        "allOf": [{"$ref": "#/$defs/x"}, {"properties": {"w": patterned("b")}}],
    },
    "one of many forms": {
        "oneOf": [
            {"properties": {"kind": {"const": at}, "id": patterned(f"^{at}")}} for at in range(40)
        ]
    },
}


@pytest.mark.parametrize("name", APART)
def test_patterns_of_different_texts_are_accepted(name: str) -> None:
    normalize_schema(APART[name])


def test_the_comparison_of_patterns_is_bounded() -> None:
    """References that branch at each level spell more places than could ever be compared."""
    shared: dict[str, Any] = {
        f"d{at}": {"properties": {name: {"$ref": f"#/$defs/d{at + 1}"} for name in "ab"}}
        for at in range(40)
    }
    shared["d40"] = patterned("a")
    one, other = {"$ref": "#/$defs/d0"}, {"additionalProperties": {"$ref": "#/$defs/d1"}}
    with pytest.raises(GrammarError, match="too many patterns to compare"):
        normalize_schema({"$defs": shared, "allOf": [one, other]})
