"""Tests of `manifests.three_way`: a table that decides each field, and properties of any merge."""

from collections.abc import Mapping
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests import three_way, trees
from manifests.three_way import MergeResult, OtherManagers
from manifests.trees import ABSENT, Path, Tree
from tests.support.sampling import samples

PATHS: tuple[Path, ...] = (("a",), ("b",), ("m", "x"), ("m", "y"), ("m", "n", "z"))
Flat = dict[Path, Tree]

values: st.SearchStrategy[Tree] = st.sampled_from([0, 1, "t", [1], [1, 2]])
said = st.dictionaries(st.sampled_from(PATHS), values)
full = st.fixed_dictionaries(dict.fromkeys(PATHS, values))
who = st.dictionaries(st.sampled_from(PATHS), st.sampled_from(["scale", "edit"]), max_size=3)


def tree_of(flat: Mapping[Path, Tree]) -> dict[str, Tree]:
    tree: dict[str, Tree] = {}
    for path, value in flat.items():
        tree = trees.with_value(tree, path, value)
    return tree


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def merged(base: Flat, ours: Flat, theirs: Flat, claims: OtherManagers) -> MergeResult:
    return three_way.merge(tree_of(base), tree_of(ours), tree_of(theirs), claims)


def claims_of(owners: Mapping[Path, str], *, force: three_way.Force = False) -> OtherManagers:
    return OtherManagers(updates={dotted(path): name for path, name in owners.items()}, force=force)


def verdict(base: Flat, ours: Flat, theirs: Flat, owners: Mapping[Path, str], path: Path) -> str:
    """Decide one field: "ours", "theirs", "gone", "kept" or "conflict"."""
    is_theirs_news = theirs[path] != base[path] if path in base else path in owners
    if path not in ours:
        if path not in base or is_theirs_news or path in owners:
            return "theirs"
        return "gone"
    if ours[path] == theirs[path]:
        return "theirs"
    if not is_theirs_news:
        return "ours"
    return "kept" if path in base and base[path] == ours[path] else "conflict"


@settings(max_examples=samples(100), deadline=None)
@given(base=said, ours=said, theirs=full, owners=who)
def test_each_field_is_merged_as_the_table_says(
    base: Flat, ours: Flat, theirs: Flat, owners: dict[Path, str]
) -> None:
    result = merged(base, ours, theirs, claims_of(owners))
    disagreements = {disagreement.path: disagreement for disagreement in result.kept_by_others}
    conflicts = {conflict.path: conflict for conflict in result.conflicts}
    removed = {path for gone in result.removed for path in PATHS if path[: len(gone)] == gone}
    for path in PATHS:
        decided = verdict(base, ours, theirs, owners, path)
        now = trees.value_at(cast("Tree", dict(result.tree)), path)
        assert (path in disagreements, path in conflicts) == (
            decided == "kept",
            decided == "conflict",
        )
        if path in removed and not {path} & {*base, *ours, *owners}:
            continue  # a default that nobody declared is removed with its mapping
        assert (path in removed) == (decided == "gone")
        if decided == "gone":
            assert now is trees.ABSENT
            continue
        assert now == (ours[path] if decided == "ours" else theirs[path])
        if path in disagreements or path in conflicts:
            clash = disagreements.get(path) or conflicts[path]
            assert (clash.theirs, clash.ours) == (theirs[path], ours[path])
            assert clash.owner == owners.get(path, "")


@settings(max_examples=samples(100), deadline=None)
@given(base=said, ours=said, theirs=full, owners=who)
def test_force_applies_every_field_of_the_manifest(
    base: Flat, ours: Flat, theirs: Flat, owners: dict[Path, str]
) -> None:
    result = merged(base, ours, theirs, claims_of(owners, force=True))
    assert (result.kept_by_others, result.conflicts) == ((), ())
    for path, value in ours.items():
        assert trees.value_at(cast("Tree", dict(result.tree)), path) == value


@settings(max_examples=samples(100), deadline=None)
@given(base=said, ours=said, theirs=full)
def test_merging_again_changes_nothing(base: Flat, ours: Flat, theirs: Flat) -> None:
    first = merged(base, ours, theirs, claims_of({}, force=True))
    again = three_way.merge(tree_of(ours), tree_of(ours), dict(first.tree), OtherManagers())
    assert again.tree == first.tree
    assert (again.kept_by_others, again.conflicts, again.owned) == ((), (), ())


@settings(max_examples=samples(100), deadline=None)
@given(base=full, later=said, owners=who)
def test_fields_of_one_writer_are_never_lost(
    base: Flat, later: Flat, owners: dict[Path, str]
) -> None:
    """An unchanged manifest keeps every change of others, and reports it."""
    theirs = {**base, **later}
    result = merged(base, base, theirs, claims_of(owners))
    assert result.tree == tree_of(theirs)
    assert {disagreement.path for disagreement in result.kept_by_others} == {
        p for p in PATHS if base[p] != theirs[p]
    }


@settings(max_examples=samples(100), deadline=None)
@given(before=full, after=full)
def test_changed_paths_finds_every_difference(before: Flat, after: Flat) -> None:
    found = set(trees.changed_paths(tree_of(before), tree_of(after)))
    assert found == {path for path in PATHS if before[path] != after[path]}


def test_an_added_mapping_is_a_change_of_every_field_in_it() -> None:
    assert [*trees.changed_paths({}, {"m": {"x": 1, "y": None}})] == [
        ("m",),
        ("m", "x"),
        ("m", "y"),
    ]
    assert [*trees.changed_paths({"m": {"x": 1}}, {"m": 2})] == [("m",), ("m", "x")]


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
