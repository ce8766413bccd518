"""RFC 7386: a patch that looks like what it changes, in which null takes a field away. Pure.

RFC 6902: a list of operations on a document, each at a JSON pointer (RFC 6901). Pure; all of them, or none.
"""

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import NoReturn

from manifests.suggestions import nearest
from manifests.trees import Tree


def apply_merge_patch(document: Tree, patch: Tree) -> Tree:
    """Return the document as it is after the patch; lists are replaced as a whole."""
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
    """Return the patch that makes `after` of `before`; neither holds null, which such a patch cannot write."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    patch: dict[str, Tree] = {key: None for key in before if key not in after}
    for key, value in after.items():
        if key not in before:
            patch[key] = value
        elif not is_equal_json(before[key], value):
            patch[key] = create_merge_patch(before[key], value)
    return patch


def is_equal_json(one: Tree, other: Tree) -> bool:
    """Return whether two values are equal as JSON means it: true is not 1, and 1 is 1.0."""
    if isinstance(one, dict) and isinstance(other, dict):
        same = one.keys() == other.keys()
        return same and all(is_equal_json(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_equal_json, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


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
    """An operation that is none, or that cannot be done; its sentence says which and why."""


def apply_json_patch(document: Tree, operations: Tree) -> Tree:
    """Return the document after all operations, one after the other.

    Raises:
        PatchError: the first of them that cannot be done, with its number from 1.

    """
    if not isinstance(operations, list):
        raise PatchError(
            'a JSON patch is a list, such as [{"op": "replace", "path": "/spec/replicas", "value": 3}]'
        )
    found = deepcopy(document)
    for number, operation in enumerate(operations, 1):
        try:
            found = _apply_operation(found, _checked_operation(operation))
        except PatchError as error:
            raise PatchError(f"operation {number}{_operation_text(operation)}: {error}") from None
    return found


def _checked_operation(operation: Tree) -> dict[str, Tree]:
    if not isinstance(operation, dict):
        raise PatchError('is no operation; write {"op": ..., "path": ...}')
    op = operation.get("op")
    if not isinstance(op, str) or op not in _OPERATION_FIELDS:
        raise PatchError(f'has the "op" {json.dumps(op)}; there are {", ".join(_OPERATION_FIELDS)}')
    for field in _OPERATION_FIELDS[op]:
        if field not in operation:
            raise PatchError(f'"{field}" is missing')
    # What else stands there is ignored, as the RFC asks for.
    return operation


def _apply_operation(document: Tree, operation: Mapping[str, Tree]) -> Tree:
    path = _parse_pointer(operation["path"])
    match operation["op"]:
        case "add":
            return _add(document, path, deepcopy(operation["value"]))
        case "remove":
            return _remove(document, path)
        case "replace":
            _value_at(document, path)
            return _replace(document, path, deepcopy(operation["value"]))
        case "move":
            source = _parse_pointer(operation["from"])
            if path[: len(source)] == source and path != source:
                raise PatchError('"path" lies within "from"; nothing can be moved into itself')
            value = _value_at(document, source)
            return _add(_remove(document, source), path, value)
        case "copy":
            return _add(
                document, path, deepcopy(_value_at(document, _parse_pointer(operation["from"])))
            )
        case _:
            return _test(document, path, operation["value"])


def _parse_pointer(pointer: Tree) -> tuple[str, ...]:
    """Return the parts of a pointer: `/metadata/labels/a~1b` speaks of the label `a/b`."""
    if not isinstance(pointer, str):
        raise PatchError(f"{json.dumps(pointer)} is no path; write a text such as /spec/replicas")
    if not pointer:
        return ()
    if not pointer.startswith("/"):
        raise PatchError(
            f'the path "{pointer}" does not begin with a slash; write /spec/replicas, not spec.replicas'
        )
    if re.search("~(?![01])", pointer):
        raise PatchError(f'the path "{pointer}" has a lone "~"; write ~0 for it, and ~1 for a "/"')
    return tuple(
        part.replace("~1", "/").replace("~0", "~") for part in pointer.removeprefix("/").split("/")
    )


def _value_at(document: Tree, path: tuple[str, ...]) -> Tree:
    """Return the value at the path; refuse if there is none."""
    value = document
    for depth, token in enumerate(path):
        if isinstance(value, dict) and token in value:
            value = value[token]
        elif isinstance(value, list):
            value = value[_index(value, path[: depth + 1], len(value) - 1)]
        else:
            _refuse_missing(value, path[: depth + 1])
    return value


def _add(document: Tree, path: tuple[str, ...], value: Tree) -> Tree:
    if not path:
        return value
    parent = _value_at(document, path[:-1])
    if isinstance(parent, dict):
        parent[path[-1]] = value
    elif isinstance(parent, list):
        is_end = path[-1] == "-"
        parent.insert(len(parent) if is_end else _index(parent, path, len(parent)), value)
    else:
        _refuse_missing(parent, path)
    return document


def _remove(document: Tree, path: tuple[str, ...]) -> Tree:
    _value_at(document, path)
    if not path:
        raise PatchError("the whole object cannot be taken away; use `fleetctl delete`")
    parent = _value_at(document, path[:-1])
    if isinstance(parent, dict):
        del parent[path[-1]]
    elif isinstance(parent, list):
        del parent[int(path[-1])]
    return document


def _replace(document: Tree, path: tuple[str, ...], value: Tree) -> Tree:
    if not path:
        return value
    parent = _value_at(document, path[:-1])
    if isinstance(parent, dict):
        parent[path[-1]] = value
    elif isinstance(parent, list):
        parent[int(path[-1])] = value
    return document


def _test(document: Tree, path: tuple[str, ...], value: Tree) -> Tree:
    found = _value_at(document, path)
    if not is_equal_json(found, value):
        raise PatchError(f"it is {json.dumps(found)}, not {json.dumps(value)}; nothing was changed")
    return document


def _index(items: list[Tree], path: tuple[str, ...], last: int) -> int:
    token = path[-1]
    if not _INDEX.fullmatch(token) or int(token) > last:
        count = f"{len(items)} item{'' if len(items) == 1 else 's'}"
        raise PatchError(
            f'{_pointer_text(path[:-1])} is a list of {count}, and has no "{token}"; count from 0'
            ', and add at its end with "-"'
        )
    return int(token)


def _refuse_missing(value: Tree, path: tuple[str, ...]) -> NoReturn:
    where = _pointer_text(path[:-1])
    if not isinstance(value, dict):
        raise PatchError(f"{where} is {json.dumps(value)}, which has no fields")
    near = nearest(path[-1], sorted(value))
    hint = f"; did you mean {near}?" if near else ""
    raise PatchError(f'{where} has no "{path[-1]}"{hint}')


def _pointer_text(path: tuple[str, ...]) -> str:
    text = "".join(f"/{part.replace('~', '~0').replace('/', '~1')}" for part in path)
    return text or "the object"


def _operation_text(operation: Tree) -> str:
    """Return ` (replace /spec/replicas)`, as far as the operation says it."""
    if not isinstance(operation, dict):
        return ""
    words = [operation.get("op"), operation.get("path")]
    text = " ".join(word for word in words if isinstance(word, str) and word)
    return f" ({text})" if text else ""
