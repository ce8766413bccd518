"""Applies merge patches (RFC 7386) and JSON patches (RFC 6902) to trees. Pure; a JSON patch applies fully or not at all."""

import json
import re
from collections.abc import Mapping

from manifests import trees
from manifests.suggestions import nearest
from manifests.trees import ABSENT, Path, Tree


def apply_merge_patch(document: Tree, patch: Tree) -> Tree:
    """Return the document after a merge patch (RFC 7386); lists are replaced as a whole."""
    if not isinstance(patch, dict):
        return patch
    found = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = apply_merge_patch(found.get(key), value)
    return found


def create_merge_patch(before: Tree, after: Tree) -> Tree:
    """Return the merge patch from `before` to `after`; neither may hold null, which a merge patch cannot express."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    patch: dict[str, Tree] = {key: None for key in before if key not in after}
    for key, value in after.items():
        if key not in before:
            patch[key] = value
        elif not trees.is_equal(before[key], value):
            patch[key] = create_merge_patch(before[key], value)
    return patch


_OPERATION_FIELDS: Mapping[str, tuple[str, ...]] = {
    "add": ("path", "value"),
    "remove": ("path",),
    "replace": ("path", "value"),
    "move": ("from", "path"),
    "copy": ("from", "path"),
    "test": ("path", "value"),
}
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


class PatchError(Exception):
    """An operation that is invalid or cannot be applied."""


def apply_json_patch(document: Tree, operations: Tree) -> Tree:
    """Return the document after all operations of a JSON patch (RFC 6902).

    Raises:
        PatchError: the first operation that cannot be applied, with its number from 1.

    """
    if not isinstance(operations, list):
        raise PatchError(
            'a JSON patch is a list, such as [{"op": "replace", "path": "/spec/replicas", "value": 3}]'
        )
    found = document
    for number, operation in enumerate(operations, 1):
        try:
            found = _apply_operation(found, _checked_operation(operation))
        except PatchError as error:
            raise PatchError(f"operation {number}{_operation_text(operation)}: {error}") from None
    return found


def _checked_operation(operation: Tree) -> dict[str, Tree]:
    if not isinstance(operation, dict):
        raise PatchError('not an operation; write {"op": ..., "path": ...}')
    op = operation.get("op")
    if not isinstance(op, str) or op not in _OPERATION_FIELDS:
        raise PatchError(
            f'unknown "op" {json.dumps(op)}; use one of {", ".join(_OPERATION_FIELDS)}'
        )
    for field in _OPERATION_FIELDS[op]:
        if field not in operation:
            raise PatchError(f'"{field}" is missing')
    # Other fields are ignored, as the RFC requires.
    return operation


def _apply_operation(document: Tree, operation: Mapping[str, Tree]) -> Tree:
    steps = _parse_pointer(operation["path"])
    match operation["op"]:
        case "add":
            return _add(document, steps, operation["value"])
        case "remove":
            return _remove(document, steps)
        case "replace":
            path = _resolve(document, steps)
            value = operation["value"]
            return trees.with_value(document, path, value) if path else value
        case "move":
            source = _parse_pointer(operation["from"])
            if steps[: len(source)] == source and steps != source:
                raise PatchError('"path" is within "from"; a value cannot be moved into itself')
            value = _value_at(document, source)
            return _add(_remove(document, source), steps, value)
        case "copy":
            return _add(document, steps, _value_at(document, _parse_pointer(operation["from"])))
        case _:
            return _test(document, steps, operation["value"])


def _parse_pointer(pointer: Tree) -> tuple[str, ...]:
    """Return the parts of a JSON pointer (RFC 6901): `/metadata/labels/a~1b` names the label `a/b`."""
    if not isinstance(pointer, str):
        raise PatchError(
            f"{json.dumps(pointer)} is not a path; write a text such as /spec/replicas"
        )
    if not pointer:
        return ()
    if not pointer.startswith("/"):
        raise PatchError(
            f'the path "{pointer}" does not begin with a slash; write /spec/replicas, not spec.replicas'
        )
    if re.search("~(?![01])", pointer):
        raise PatchError(f'the path "{pointer}" has a single "~"; write ~0 for "~" and ~1 for "/"')
    return tuple(
        part.replace("~1", "/").replace("~0", "~") for part in pointer.removeprefix("/").split("/")
    )


def _resolve(document: Tree, steps: tuple[str, ...]) -> Path:
    """Return the path of the steps of a pointer; raise PatchError if a value does not exist."""
    value = document
    path: list[str | int] = []
    for depth in range(1, len(steps) + 1):
        path.append(_part(value, steps[:depth], is_new=False))
        child = trees.value_at(value, (path[-1],))
        assert child is not ABSENT  # _part refuses what does not exist
        value = child
    return tuple(path)


def _part(parent: Tree, steps: tuple[str, ...], *, is_new: bool) -> str | int:
    """Return the key or index of the last step in its parent; `is_new` allows a new key or the end of a list."""
    step = steps[-1]
    if isinstance(parent, list):
        if is_new and step == "-":
            return len(parent)
        return _index(parent, steps, len(parent) - (not is_new))
    if not isinstance(parent, dict) or (step not in parent and not is_new):
        where = _pointer_text(steps[:-1])
        if not isinstance(parent, dict):
            raise PatchError(f"{where} is {json.dumps(parent)}, which has no fields")
        near = nearest(steps[-1], sorted(parent))
        hint = f"; did you mean {near}?" if near else ""
        raise PatchError(f'{where} has no "{steps[-1]}"{hint}')
    return step


def _value_at(document: Tree, steps: tuple[str, ...]) -> Tree:
    value = trees.value_at(document, _resolve(document, steps))
    assert value is not ABSENT
    return value


def _add(document: Tree, steps: tuple[str, ...], value: Tree) -> Tree:
    if not steps:
        return value
    parent = _resolve(document, steps[:-1])
    part = _part(_value_at(document, steps[:-1]), steps, is_new=True)
    return trees.insert(document, (*parent, part), value)


def _remove(document: Tree, steps: tuple[str, ...]) -> Tree:
    path = _resolve(document, steps)
    if not path:
        raise PatchError("the whole object cannot be removed; use `fleetctl delete`")
    return trees.without(document, path)


def _test(document: Tree, steps: tuple[str, ...], value: Tree) -> Tree:
    found = _value_at(document, steps)
    if not trees.is_equal(found, value):
        raise PatchError(
            f"the value is {json.dumps(found)}, not {json.dumps(value)}; nothing was changed"
        )
    return document


def _index(items: list[Tree], path: tuple[str, ...], last: int) -> int:
    step = path[-1]
    if not _INDEX.fullmatch(step) or int(step) > last:
        count = f"{len(items)} item{'' if len(items) == 1 else 's'}"
        raise PatchError(
            f'{_pointer_text(path[:-1])} is a list of {count} without index "{step}"; indexes start at 0'
            ', and "-" appends'
        )
    return int(step)


def _pointer_text(path: tuple[str, ...]) -> str:
    text = "".join(f"/{part.replace('~', '~0').replace('/', '~1')}" for part in path)
    return text or "the object"


def _operation_text(operation: Tree) -> str:
    """Return ` (replace /spec/replicas)`, or the part of it that the operation has."""
    if not isinstance(operation, dict):
        return ""
    words = [operation.get("op"), operation.get("path")]
    text = " ".join(word for word in words if isinstance(word, str) and word)
    return f" ({text})" if text else ""
