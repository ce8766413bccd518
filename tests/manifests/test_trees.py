"""Tests of `manifests.trees`: values at paths, changes of trees, and the differences between two trees."""

import pytest

from manifests import trees
from manifests.trees import ABSENT, Path, Tree

TREE: dict[str, Tree] = {"spec": {"replicas": 2, "pools": ["a", "b"], "note": None}}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ((), TREE),
        (("spec", "replicas"), 2),
        (("spec", "pools", 1), "b"),
        (("spec", "note"), None),
        (("spec", "pools", 2), ABSENT),
        (("spec", "pools", -1), ABSENT),
        (("spec", "pools", "1"), ABSENT),
        (("spec", "replicas", "x"), ABSENT),
        (("status",), ABSENT),
    ],
)
def test_value_at(path: Path, expected: trees.OptionalTree) -> None:
    assert trees.value_at(TREE, path) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("spec", "replicas"), {"replicas": 9, "pools": ["a", "b"], "note": None}),
        (("spec", "pools", 0), {"replicas": 2, "pools": [9, "b"], "note": None}),
        (("spec", "new", "x"), {**TREE["spec"], "new": {"x": 9}}),  # type: ignore[dict-item]
    ],
)
def test_with_value_leaves_its_argument_as_it_is(path: Path, expected: Tree) -> None:
    assert trees.with_value(TREE, path, 9) == {"spec": expected}
    assert TREE == {"spec": {"replicas": 2, "pools": ["a", "b"], "note": None}}


def test_with_value_refuses_a_position_that_a_list_does_not_have() -> None:
    with pytest.raises(IndexError):
        trees.with_value(TREE, ("spec", "pools", 2, "x"), 9)


def test_insert_adds_to_a_list_and_sets_a_field() -> None:
    assert trees.insert(["a", "b"], (1,), "x") == ["a", "x", "b"]
    assert trees.insert(["a", "b"], (2,), "x") == ["a", "b", "x"]
    assert trees.insert({"m": ["a"]}, ("m", 0), "x") == {"m": ["x", "a"]}
    assert trees.insert({"m": 1}, ("m",), "x") == {"m": "x"}


def test_without_removes_a_field_or_an_item() -> None:
    assert trees.without({"a": 1, "b": 2}, ("a",)) == {"b": 2}
    assert trees.without({"m": {"a": 1, "b": 2}}, ("m", "a")) == {"m": {"b": 2}}
    assert trees.without(["a", "b", "c"], (1,)) == ["a", "c"]
    assert trees.without({"a": 1}, ("b", "c")) == {"a": 1}


def test_json_equality_distinguishes_booleans_from_numbers() -> None:
    assert trees.is_equal({"a": [1, 2.0]}, {"a": [1.0, 2]})
    assert not trees.is_equal({"a": True}, {"a": 1})
    assert not trees.is_equal([1], [1, 2])


def test_paths_are_shown_as_users_write_them() -> None:
    assert trees.show_path(()) == ""
    assert trees.show_path(("spec", "backends", 0, "weight")) == "spec.backends[0].weight"
    assert trees.show_path(("metadata", "labels", "fleet/os")) == 'metadata.labels["fleet/os"]'
