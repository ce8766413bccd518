"""One document laid over another: mappings merge, lists of named mappings merge by name, all else is replaced. Pure.

A strategic merge as kustomize and kubectl have it, without schemas: what a list is merged by is read off its items.
What a patch says keeps its file and line, so that a fault in the merged object is reported where it was written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manifests.errors import ManifestError
from manifests.nodes import Entry, Mark, Node
from manifests.tree import Path, show_path

DIRECTIVE = "$patch"
# By what items of a list are told apart; the first that all of them have.
_IDENTITIES = ("name", "node", "deployment", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patch:
    """The document that is laid over another, for its complaints."""

    source: str
    about: str
    problems: list[ManifestError]

    def complain(self, mark: Mark, path: Path, message: str, hint: str) -> None:
        self.problems.append(
            ManifestError(
                source=mark.source or self.source,
                line=mark.line,
                column=mark.column,
                about=self.about,
                path=show_path(path),
                message=message,
                hint=hint,
            )
        )


def merged(
    base: Node, patch: Node, *, source: str, about: str
) -> tuple[Node | None, list[ManifestError]]:
    """Return the base with the patch over it, None if the patch deletes it; and what is wrong with the patch.

    `source` is the patch's file, `about` its object.
    """
    said = _Patch(source=source, about=about, problems=[])
    stamped = placed(patch, source)
    return _merge(said, base, stamped, ()), said.problems


def placed(node: Node, source: str) -> Node:
    """Return the node with every mark naming the file."""
    content = node.content
    if isinstance(content, dict):
        content = {
            key: Entry(mark=_in(entry.mark, source), node=placed(entry.node, source))
            for key, entry in content.items()
        }
    elif isinstance(content, list):
        content = [placed(item, source) for item in content]
    return replace(node, mark=_in(node.mark, source), content=content)


def directive(node: Node) -> str | None:
    """Return what `$patch` says of a mapping; None if it says nothing."""
    if not isinstance(node.content, dict) or DIRECTIVE not in node.content:
        return None
    return str(node.content[DIRECTIVE].node.content)


def _in(mark: Mark, source: str) -> Mark:
    return mark if mark.source else replace(mark, source=source)


def _merge(said: _Patch, base: Node, patch: Node, path: Path) -> Node | None:
    """Return what becomes of a value that both have; None if it goes."""
    over = patch.content
    if isinstance(over, dict):
        order = directive(patch)
        if order == "delete":
            return None
        if order == "replace":
            return _without_directive(said, patch, path)
        if order is not None:
            _unknown(said, patch, path)
        if isinstance(base.content, dict):
            return _mappings(said, base, patch, path)
        return _new(said, patch, path)
    if isinstance(over, list):
        return _lists(said, base, patch, path)
    return patch


def _mappings(said: _Patch, base: Node, patch: Node, path: Path) -> Node:
    assert isinstance(base.content, dict)
    assert isinstance(patch.content, dict)
    entries = dict(base.content)
    for key, entry in patch.content.items():
        if key == DIRECTIVE:
            continue
        here = (*path, key)
        there = entries.get(key)
        removes = entry.node.content is None or directive(entry.node) == "delete"
        if removes and there is None:
            what = "null" if entry.node.content is None else f"{DIRECTIVE}: delete"
            hint = "Remove the line, or look for how the base spells it"
            said.complain(entry.mark, here, f"{what} removes what the base does not have", hint)
        elif removes:
            del entries[key]
        elif there is None:
            entries[key] = replace(entry, node=_new(said, entry.node, here))
        else:
            after = _merge(said, there.node, entry.node, here)
            if after is not None:
                entries[key] = replace(entry, node=after)
    return replace(base, content=entries)


def _lists(said: _Patch, base: Node, patch: Node, path: Path) -> Node:
    assert isinstance(patch.content, list)
    replaces = any(_replaces_list(item) for item in patch.content)
    items = [item for item in patch.content if not _replaces_list(item)]
    there = base.content if isinstance(base.content, list) else []
    identity = None if replaces else _identity(there, items)
    if identity is None:
        fresh = [_new(said, item, (*path, at)) for at, item in enumerate(items)]
        return replace(patch, content=fresh)
    kept: dict[object, Node | None] = {_named(item, identity): item for item in there}
    for at, item in enumerate(items):
        here, name = (*path, at), _named(item, identity)
        if name in kept:
            found = kept[name]
            kept[name] = None if found is None else _merge(said, found, item, here)
        elif directive(item) == "delete":
            hint = f"There are: {', '.join(str(one) for one in kept)}"
            message = f"{DIRECTIVE}: delete of {identity} {name}, which the base does not have"
            said.complain(item.mark, here, message, hint)
        else:
            kept[name] = _new(said, item, here)
    # It stands where the base has it: what is wrong with an item is reported at the item.
    return replace(base, content=[item for item in kept.values() if item is not None])


def _replaces_list(item: Node) -> bool:
    """Return whether an item only says that the list is replaced."""
    content = item.content
    return (
        isinstance(content, dict) and set(content) == {DIRECTIVE} and directive(item) == "replace"
    )


def _identity(there: Sequence[Node], items: Sequence[Node]) -> str | None:
    """Return by which field the items of both lists are told apart; None if by none: then lists are atoms."""
    if not there or not items:
        return None
    for field in _IDENTITIES:
        ours, theirs = ([_named(item, field) for item in side] for side in (items, there))
        is_telling = all(name is not None for name in (*ours, *theirs))
        if is_telling and len(set(ours)) == len(ours) and len(set(theirs)) == len(theirs):
            return field
    return None


def _named(item: Node, field: str) -> object:
    if not isinstance(item.content, dict) or field not in item.content:
        return None
    name = item.content[field].node.content
    return None if isinstance(name, dict | list) else name


def _new(said: _Patch, node: Node, path: Path) -> Node:
    """Return what the base does not have, as it is to be; directives have nothing to direct there."""
    if isinstance(node.content, list):
        items = [item for item in node.content if not _replaces_list(item)]
        return replace(
            node, content=[_new(said, item, (*path, at)) for at, item in enumerate(items)]
        )
    if not isinstance(node.content, dict):
        return node
    order = directive(node)
    if order == "delete":
        hint = "Remove it, or look for how the base spells it"
        said.complain(node.mark, path, f"{DIRECTIVE}: delete of what the base does not have", hint)
    elif order not in (None, "replace"):
        _unknown(said, node, path)
    return _without_directive(said, node, path)


def _without_directive(said: _Patch, node: Node, path: Path) -> Node:
    assert isinstance(node.content, dict)
    entries = {
        key: replace(entry, node=_new(said, entry.node, (*path, key)))
        for key, entry in node.content.items()
        if key != DIRECTIVE
    }
    return replace(node, content=entries)


def _unknown(said: _Patch, node: Node, path: Path) -> None:
    assert isinstance(node.content, dict)
    entry = node.content[DIRECTIVE]
    shown = entry.node.text or directive(node)
    hint = f"Write {DIRECTIVE}: delete or {DIRECTIVE}: replace; without it, mappings are merged"
    said.complain(entry.mark, (*path, DIRECTIVE), f"unknown directive {shown}", hint)
