"""Plain values as manifests hold them, paths into them, and the operations that merges and patches share.

A tree is what JSON gives. Every operation returns a new tree and leaves its argument as it is. This module imports no
model: `fleetctl get` prints trees and must start quickly.
"""

import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, overload

if TYPE_CHECKING:  # pydantic takes longer to import than `fleetctl get` to answer
    from schemas.meta import ApiObject, ObjectKey

Tree: TypeAlias = "dict[str, Tree] | list[Tree] | str | int | float | bool | None"
Path: TypeAlias = tuple[str | int, ...]
"""Keys of mappings (str) and positions in lists (int), from the root."""


class AbsentType(Enum):
    """The type of `ABSENT`."""

    ABSENT = 0


ABSENT: Final = AbsentType.ABSENT
"""Stands for a field that is not there; None is a value that a manifest may give."""
OptionalTree: TypeAlias = Tree | Literal[AbsentType.ABSENT]


def show_path(path: Path) -> str:
    """Return the path as users write it: `spec.placement.pools[0]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[A-Za-z0-9_-]+", part):
            text += f".{part}" if text else part
        else:  # label keys have dots and slashes of their own
            text += f"[{json.dumps(part, ensure_ascii=False)}]"
    return text


def value_at(tree: Tree, path: Path) -> OptionalTree:
    """Return the value at the path, or ABSENT."""
    optional_tree = tree
    for part in path:
        child = _child(optional_tree, part)
        if child is ABSENT:
            return ABSENT
        optional_tree = child
    return optional_tree


def _child(tree: Tree, part: str | int) -> OptionalTree:
    if isinstance(tree, dict) and isinstance(part, str):
        return tree.get(part, ABSENT)
    if isinstance(tree, list) and isinstance(part, int) and 0 <= part < len(tree):
        return tree[part]
    return ABSENT


@overload
def with_value(tree: dict[str, Tree], path: Path, value: Tree) -> dict[str, Tree]: ...
@overload
def with_value(tree: Tree, path: Path, value: Tree) -> Tree: ...
def with_value(tree: Tree, path: Path, value: Tree) -> Tree:
    """Return the tree with the value at the path, which is not empty; mappings on the way are made.

    Raises:
        IndexError: the path goes to a position that a list does not have.

    """
    first, *rest = path
    if isinstance(tree, list) and isinstance(first, int):
        inner = with_value(tree[first], tuple(rest), value) if rest else value
        return [*tree[:first], inner, *tree[first + 1 :]]
    fields = tree if isinstance(tree, dict) else {}
    key = str(first)
    return {**fields, key: with_value(fields.get(key), tuple(rest), value) if rest else value}


@overload
def without(tree: dict[str, Tree], path: Path) -> dict[str, Tree]: ...
@overload
def without(tree: Tree, path: Path) -> Tree: ...
def without(tree: Tree, path: Path) -> Tree:
    """Return the tree without the value at the path, which is not empty; the same tree if it is absent."""
    if value_at(tree, path) is ABSENT:
        return tree
    parent, last = path[:-1], path[-1]
    found = value_at(tree, parent)
    left: Tree
    if isinstance(found, dict):
        left = {key: value for key, value in found.items() if key != last}
    else:
        assert isinstance(found, list)
        assert isinstance(last, int)
        left = [*found[:last], *found[last + 1 :]]
    return with_value(tree, parent, left) if parent else left


def insert(tree: Tree, path: Path, value: Tree) -> Tree:
    """Return the tree with the value added at the path: into a list before that position, into a mapping as that field.

    The parent of the path must be there.
    """
    parent, last = path[:-1], path[-1]
    found = value_at(tree, parent)
    if isinstance(found, list) and isinstance(last, int):
        longer: Tree = [*found[:last], value, *found[last:]]
        return with_value(tree, parent, longer) if parent else longer
    return with_value(tree, path, value)


def subtract(tree: Mapping[str, Tree], other: Mapping[str, Tree]) -> dict[str, Tree]:
    """Return the fields of the tree that the other does not have."""
    rest: dict[str, Tree] = {}
    for key, value in tree.items():
        if key not in other:
            rest[key] = value
            continue
        theirs = other[key]
        if isinstance(value, dict) and isinstance(theirs, dict):
            rest[key] = subtract(value, theirs)
    return rest


def overlay(tree: Mapping[str, Tree], over: Mapping[str, Tree]) -> dict[str, Tree]:
    """Return the tree with the fields of the other over it; mappings are merged."""
    merged = dict(tree)
    for key, value in over.items():
        there = merged.get(key)
        if isinstance(there, dict) and isinstance(value, dict):
            merged[key] = overlay(there, value)
        else:
            merged[key] = value
    return merged


def iter_paths(tree: Tree, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every field, mappings included; lists count as one value."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield (*path, key)
            yield from iter_paths(value, (*path, key))


def changed_paths(before: Tree, after: Tree, path: Path = ()) -> Iterator[Path]:
    """Yield the fields that differ; a mapping that is added or removed counts with every field in it."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from changed_paths(before.get(key), after.get(key), (*path, key))
        return
    if before == after:
        return
    yield path
    yield from iter_paths(before, path)
    yield from iter_paths(after, path)


def is_equal(one: Tree, other: Tree) -> bool:
    """Return whether two values are equal as JSON: true is not 1, and 1 is 1.0."""
    if isinstance(one, dict) and isinstance(other, dict):
        same = one.keys() == other.keys()
        return same and all(is_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def key_of(obj: "ApiObject") -> "ObjectKey":
    from schemas.meta import ObjectKey  # noqa: PLC0415 - as above

    return ObjectKey(obj.kind, obj.name)


def spec_of(obj: "ApiObject") -> object:
    """Return the object's spec; each kind narrows it, so the base class does not name it."""
    return getattr(obj, "spec", None)


def object_tree(obj: "ApiObject") -> dict[str, Tree]:
    """Return the whole object as `get -o yaml` prints it, without empty metadata."""
    tree: dict[str, Tree] = json.loads(obj.model_dump_json(by_alias=True, exclude_none=True))
    metadata = tree["metadata"]
    assert isinstance(metadata, dict)
    tree["metadata"] = {key: value for key, value in metadata.items() if value or key == "name"}
    return tree


def declared_tree(obj: "ApiObject") -> dict[str, Tree]:
    """Return the part of the object that a user declares: all but status and the metadata that the fleet sets."""
    tree = object_tree(obj)
    tree.pop("status", None)
    metadata = tree["metadata"]
    assert isinstance(metadata, dict)
    declared = ("name", "labels", "annotations")
    tree["metadata"] = {key: metadata[key] for key in declared if key in metadata}
    return tree


def derived_node_labels(node: dict[str, Tree]) -> dict[str, str]:
    """Return the labels that a Node has without its owner: name, hardware, and those its agent was started with.

    The same as `schemas.node.effective_labels`, for a tree.
    """
    metadata, status = node.get("metadata"), node.get("status")
    assert isinstance(metadata, dict)
    found = {"fleet/node": str(metadata["name"])}
    if not isinstance(status, dict) or not status:
        return found
    found["fleet/os"] = str(status.get("os", ""))
    found["fleet/chip"] = str(status.get("chip", "")).replace(" ", "-")
    given = status.get("labels")
    more = given if isinstance(given, dict) else {}
    return {**found, **{key: str(value) for key, value in more.items()}}
