"""Tests of `schemas.kinds`: names, round trips through the store, unknown fields."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from schemas.field_docstrings import field_docstrings
from schemas.kinds import KINDS, Kind, by_alias, by_name
from schemas.meta import API_VERSION, ApiObject
from store import codec
from store.port import KeyValue
from tests.support.sampling import samples
from tests.support.schemas_strategies import objects

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def item(value: bytes) -> KeyValue:
    return KeyValue(key="/k", value=value, create_revision=1, mod_revision=9)


@every_kind
@settings(max_examples=samples(20, quick=3))
@given(data=st.data())
def test_an_object_survives_a_round_trip_through_the_store(kind: Kind, data: st.DataObject) -> None:
    obj = data.draw(objects(kind.type))
    assert isinstance(obj, ApiObject)
    assert codec.decode(kind.type, item(codec.encode(obj))) == obj
    stored = codec.decode_object(kind.type, item(codec.encode_spec(obj)))
    assert stored.metadata == obj.metadata.model_copy(update={"resource_version": "9"})
    assert codec.encode_spec(stored) == codec.encode_spec(obj)
    status = getattr(obj, "status", None)
    if status is not None:
        joined = codec.with_status(stored, item(codec.encode(status)))
        assert joined.model_copy(update={"metadata": obj.metadata}) == obj


@every_kind
@settings(max_examples=samples(10, quick=2))
@given(data=st.data())
def test_a_copy_is_that_of_pydantic(kind: Kind, data: st.DataObject) -> None:
    obj, other = data.draw(objects(kind.type)), data.draw(objects(kind.type))
    before, fields = dict(vars(obj)), set(obj.model_fields_set)
    for update in (None, {"metadata": vars(other)["metadata"]}, {"spec": vars(other).get("spec")}):
        made, expected = obj.model_copy(update=update), BaseModel.model_copy(obj, update=update)
        assert type(made) is type(obj)
        assert made == expected
        assert made.model_fields_set == expected.model_fields_set
        assert made.model_dump_json() == expected.model_dump_json()
    assert (vars(obj), obj.model_fields_set) == (before, fields)


def trees(node: Any) -> list[dict[str, Any]]:
    """Return every JSON object schema inside, except maps with free keys."""
    if isinstance(node, list):
        return [tree for one in node for tree in trees(one)]
    if not isinstance(node, dict):
        return []
    free = {"labels", "annotations", "nodeSelector", "matchLabels"}
    return [node, *(tree for k, v in node.items() if k not in free for tree in trees(v))]


@every_kind
@settings(max_examples=samples(8, quick=2))
@given(data=st.data())
def test_an_unknown_field_is_refused_at_every_depth(kind: Kind, data: st.DataObject) -> None:
    tree = json.loads(codec.encode(data.draw(objects(kind.type))))
    for inner in trees(tree):
        inner["colour"] = "red"
        with pytest.raises(ValidationError, match="colour"):
            kind.type.model_validate_json(json.dumps(tree))
        del inner["colour"]


@every_kind
def test_a_kind_is_found_by_its_names_only(kind: Kind) -> None:
    assert by_name(kind.name) is kind
    for word in (kind.name, kind.plural, kind.short, kind.name.upper(), kind.plural.title()):
        assert by_alias(word) is kind
    assert by_name(kind.plural) is None
    assert kind.type.model_fields["kind"].default == kind.name


def test_names_are_unambiguous_and_unknown_ones_are_none() -> None:
    words = [word for k in KINDS for word in (k.name.lower(), k.plural, k.short)]
    assert len(words) == len(set(words))
    assert by_name("Pod") is None
    assert by_alias("pods") is None
    assert by_alias("") is None


@every_kind
def test_another_version_and_another_kind_are_refused(kind: Kind) -> None:
    for wrong in ({"apiVersion": "fleet/v2"}, {"apiVersion": 1}, {"kind": "Pod"}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            kind.type.model_validate_json(json.dumps({"metadata": {"name": "a"}} | wrong))
    assert API_VERSION == "fleet/v1alpha1"


def test_every_user_field_has_a_docstring() -> None:
    """The reference pages and the editor schema are generated from these docstrings."""

    def bare(model: type[BaseModel]) -> list[str]:
        found = [
            f"{model.__name__}.{n}"
            for n in model.model_fields
            if not field_docstrings(model).get(n)
        ]
        for field in model.model_fields.values():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                found.extend(bare(inner))
        return [name for name in found if not name.endswith(".kind")]

    written = [bare(k.type.model_fields["spec"].annotation) for k in KINDS if k.written_by_users]  # type: ignore[arg-type]
    assert [name for names in written for name in names] == []
