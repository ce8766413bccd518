"""Plain values to YAML text, in the order people know from kubectl. Pure; reads nothing.

Our own few lines instead of a library's: fast for thousands of objects, and every text that an old
reader could take for something else is quoted.
"""

from collections.abc import Iterator, Mapping

from manifests.scalars import spell
from manifests.tree import Tree

_ORDER = ("apiVersion", "kind", "metadata", "spec", "status")

# A key that shares its line with its value must be shorter than 1024 characters (YAML 1.2, 7.4.2).
_MAX_KEY = 500


def dump(tree: Tree) -> str:
    """Return the tree as one YAML document."""
    if isinstance(tree, dict):
        first = {key: tree[key] for key in _ORDER if key in tree}
        tree = {**first, **{key: value for key, value in tree.items() if key not in first}}
    return "".join(f"{line}\n" for line in _lines(tree, ""))


def _lines(tree: Tree, pad: str) -> Iterator[str]:
    if isinstance(tree, dict) and tree:
        yield from _mapping(tree, pad)
    elif isinstance(tree, list) and tree:
        for item in tree:
            yield from _item(item, pad)
    else:
        yield f"{pad}{_inline(tree)}"


def _mapping(tree: Mapping[str, Tree], pad: str) -> Iterator[str]:
    for key, value in tree.items():
        spelled = spell(key)
        is_long = len(spelled) >= _MAX_KEY
        head = f"{pad}? {spelled}\n{pad}:" if is_long else f"{pad}{spelled}:"
        if isinstance(value, dict | list) and value:
            yield head
            yield from _lines(value, pad if isinstance(value, list) and not is_long else f"{pad}  ")
        else:
            yield f"{head} {_inline(value)}"


def _item(item: Tree, pad: str) -> Iterator[str]:
    """Yield an item of a list: its first line follows the dash."""
    first, *rest = _lines(item, f"{pad}  ")
    yield f"{pad}- {first[len(pad) + 2 :]}"
    yield from rest


def _inline(value: Tree) -> str:
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, list):
        return "[]"
    return spell(value)
