"""Parsed YAML documents: values with their places. Pure; knows no API kind."""

from dataclasses import dataclass

from manifests.trees import Path, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place in a file; line and column start at 1."""

    line: int
    column: int
    source: str = ""
    """The file, if it is not the document's own: the file of an overlay's patch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingEntry:
    """One field of a mapping: the place of its key, and its value."""

    mark: Mark
    node: "YamlNode"


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlNode:
    """One value; aliases share nodes, so a tree of nodes may be larger than the file."""

    mark: Mark
    content: "dict[str, MappingEntry] | list[YamlNode] | str | int | float | bool | None"
    text: str = ""
    """A scalar as it is written in the file: 1.10 differs from 1.1 for a reader."""
    size: int = 1
    """Number of nodes in it, with aliases expanded; long texts count as several."""
    height: int = 1
    """Number of levels in it."""


def plain_value(node: YamlNode) -> Tree:
    """Return the value without places."""
    content = node.content
    if isinstance(content, dict):
        return {key: plain_value(entry.node) for key, entry in content.items()}
    if isinstance(content, list):
        return [plain_value(item) for item in content]
    return content


def find_node(root: YamlNode, path: Path) -> YamlNode | None:
    """Return the node at the path; None if there is none."""
    node: YamlNode | None = root
    for part in path:
        node = _child(node, part)
        if node is None:
            return None
    return node


def mark_of_value(root: YamlNode, path: Path) -> Mark:
    """Return the place of a value; for a missing one, the place of the key it is missing under."""
    node = find_node(root, path)
    if node is None:
        return mark_of_key(root, path)
    # A block begins a line below its key, and an empty value even later: users expect both at the key.
    is_below = isinstance(node.content, dict | list) or (node.content is None and not node.text)
    return mark_of_key(root, path) if is_below else node.mark


def mark_of_key(root: YamlNode, path: Path) -> Mark:
    """Return the place of the last key on the path that exists."""
    node, mark = root, root.mark
    for part in path:
        child = _child(node, part)
        if child is None:
            break
        if isinstance(node.content, dict) and isinstance(part, str):
            mark = node.content[part].mark
        else:
            mark = child.mark
        node = child
    return mark


def _child(node: YamlNode | None, part: str | int) -> YamlNode | None:
    if node is None:
        return None
    if isinstance(node.content, dict) and isinstance(part, str):
        entry = node.content.get(part)
        return entry.node if entry is not None else None
    if isinstance(node.content, list) and isinstance(part, int) and part < len(node.content):
        return node.content[part]
    return None
