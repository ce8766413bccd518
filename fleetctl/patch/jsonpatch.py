"""RFC 6902: a list of operations on a document, each at a JSON pointer (RFC 6901). Pure; all of them, or none."""

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import NoReturn

from fleetctl.patch.merge import is_equal
from manifests.tree import Tree
from manifests.words import nearest

_TAKES: Mapping[str, tuple[str, ...]] = {
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


def patched(document: Tree, operations: Tree) -> Tree:
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
            found = _done(found, _checked(operation))
        except PatchError as error:
            raise PatchError(f"operation {number}{_shown(operation)}: {error}") from None
    return found


def _checked(operation: Tree) -> dict[str, Tree]:
    if not isinstance(operation, dict):
        raise PatchError('is no operation; write {"op": ..., "path": ...}')
    op = operation.get("op")
    if not isinstance(op, str) or op not in _TAKES:
        raise PatchError(f'has the "op" {json.dumps(op)}; there are {", ".join(_TAKES)}')
    for field in _TAKES[op]:
        if field not in operation:
            raise PatchError(f'"{field}" is missing')
    # What else stands there is ignored, as the RFC asks for.
    return operation


def _done(document: Tree, operation: Mapping[str, Tree]) -> Tree:
    path = _tokens(operation["path"])
    match operation["op"]:
        case "add":
            return _added(document, path, deepcopy(operation["value"]))
        case "remove":
            return _removed(document, path)
        case "replace":
            _at(document, path)
            return _replaced(document, path, deepcopy(operation["value"]))
        case "move":
            source = _tokens(operation["from"])
            if path[: len(source)] == source and path != source:
                raise PatchError('"path" lies within "from"; nothing can be moved into itself')
            value = _at(document, source)
            return _added(_removed(document, source), path, value)
        case "copy":
            return _added(document, path, deepcopy(_at(document, _tokens(operation["from"]))))
        case _:
            return _tested(document, path, operation["value"])


def _tokens(pointer: Tree) -> tuple[str, ...]:
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


def _at(document: Tree, path: tuple[str, ...]) -> Tree:
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


def _added(document: Tree, path: tuple[str, ...], value: Tree) -> Tree:
    if not path:
        return value
    parent = _at(document, path[:-1])
    if isinstance(parent, dict):
        parent[path[-1]] = value
    elif isinstance(parent, list):
        is_end = path[-1] == "-"
        parent.insert(len(parent) if is_end else _index(parent, path, len(parent)), value)
    else:
        _refuse_missing(parent, path)
    return document


def _removed(document: Tree, path: tuple[str, ...]) -> Tree:
    _at(document, path)
    if not path:
        raise PatchError("the whole object cannot be taken away; use `fleetctl delete`")
    parent = _at(document, path[:-1])
    if isinstance(parent, dict):
        del parent[path[-1]]
    elif isinstance(parent, list):
        del parent[int(path[-1])]
    return document


def _replaced(document: Tree, path: tuple[str, ...], value: Tree) -> Tree:
    if not path:
        return value
    parent = _at(document, path[:-1])
    if isinstance(parent, dict):
        parent[path[-1]] = value
    elif isinstance(parent, list):
        parent[int(path[-1])] = value
    return document


def _tested(document: Tree, path: tuple[str, ...], value: Tree) -> Tree:
    found = _at(document, path)
    if not is_equal(found, value):
        raise PatchError(f"it is {json.dumps(found)}, not {json.dumps(value)}; nothing was changed")
    return document


def _index(items: list[Tree], path: tuple[str, ...], last: int) -> int:
    token = path[-1]
    if not _INDEX.fullmatch(token) or int(token) > last:
        count = f"{len(items)} item{'' if len(items) == 1 else 's'}"
        raise PatchError(
            f'{_pointer(path[:-1])} is a list of {count}, and has no "{token}"; count from 0'
            ', and add at its end with "-"'
        )
    return int(token)


def _refuse_missing(value: Tree, path: tuple[str, ...]) -> NoReturn:
    where = _pointer(path[:-1])
    if not isinstance(value, dict):
        raise PatchError(f"{where} is {json.dumps(value)}, which has no fields")
    near = nearest(path[-1], sorted(value))
    hint = f"; did you mean {near}?" if near else ""
    raise PatchError(f'{where} has no "{path[-1]}"{hint}')


def _pointer(path: tuple[str, ...]) -> str:
    text = "".join(f"/{part.replace('~', '~0').replace('/', '~1')}" for part in path)
    return text or "the object"


def _shown(operation: Tree) -> str:
    """Return ` (replace /spec/replicas)`, as far as the operation says it."""
    if not isinstance(operation, dict):
        return ""
    words = [operation.get("op"), operation.get("path")]
    text = " ".join(word for word in words if isinstance(word, str) and word)
    return f" ({text})" if text else ""
