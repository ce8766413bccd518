"""Strategic merge patches of YAML nodes, as in kustomize and kubectl but without schemas. Pure.

Mappings merge by key, lists of mappings with a name merge by name, everything else is replaced. Values of a patch keep
their file and line for error messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manifests.errors import ManifestError
from manifests.trees import Path, show_path
from manifests.yaml.nodes import MappingEntry, Mark, YamlNode

DIRECTIVE = "$patch"
# Fields that identify the items of a list; the first one that all items have is used.
_IDENTITIES = ("name", "node", "deployment", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patch:
    """The patch that is being merged, and its problems."""

    source: str
    about: str
    problems: list[ManifestError]

    def report(self, mark: Mark, path: Path, message: str, hint: str) -> None:
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


def apply_patch(
    base: YamlNode, patch: YamlNode, *, source: str, about: str
) -> tuple[YamlNode | None, list[ManifestError]]:
    """Return the base with the patch applied (None if the patch deletes it), and the problems of the patch.

    `source` is the patch's file, `about` its object.
    """
    context = _Patch(source=source, about=about, problems=[])
    stamped = with_source(patch, source)
    return _merge(context, base, stamped, ()), context.problems


def with_source(node: YamlNode, source: str) -> YamlNode:
    """Return the node with the file in every mark."""
    content = node.content
    if isinstance(content, dict):
        content = {
            key: MappingEntry(mark=_in(entry.mark, source), node=with_source(entry.node, source))
            for key, entry in content.items()
        }
    elif isinstance(content, list):
        content = [with_source(item, source) for item in content]
    return replace(node, mark=_in(node.mark, source), content=content)


def patch_directive(node: YamlNode) -> str | None:
    """Return the value of `$patch` in a mapping; None if there is none."""
    if not isinstance(node.content, dict) or DIRECTIVE not in node.content:
        return None
    return str(node.content[DIRECTIVE].node.content)


def _in(mark: Mark, source: str) -> Mark:
    return mark if mark.source else replace(mark, source=source)


def _merge(context: _Patch, base: YamlNode, patch: YamlNode, path: Path) -> YamlNode | None:
    """Return the merged value; None if the patch deletes it."""
    over = patch.content
    if isinstance(over, dict):
        order = patch_directive(patch)
        if order == "delete":
            return None
        if order == "replace":
            return _without_directive(context, patch, path)
        if order is not None:
            _report_unknown_directive(context, patch, path)
        if isinstance(base.content, dict):
            return _mappings(context, base, patch, path)
        return _new_node(context, patch, path)
    if isinstance(over, list):
        return _lists(context, base, patch, path)
    return patch


def _mappings(context: _Patch, base: YamlNode, patch: YamlNode, path: Path) -> YamlNode:
    assert isinstance(base.content, dict)
    assert isinstance(patch.content, dict)
    entries = dict(base.content)
    for key, entry in patch.content.items():
        if key == DIRECTIVE:
            continue
        here = (*path, key)
        there = entries.get(key)
        removes = entry.node.content is None or patch_directive(entry.node) == "delete"
        if removes and there is None:
            what = "null" if entry.node.content is None else f"{DIRECTIVE}: delete"
            hint = "Remove the line, or check the spelling in the base"
            context.report(entry.mark, here, f"{what} removes what the base does not have", hint)
        elif removes:
            del entries[key]
        elif there is None:
            entries[key] = replace(entry, node=_new_node(context, entry.node, here))
        else:
            after = _merge(context, there.node, entry.node, here)
            if after is not None:
                entries[key] = replace(entry, node=after)
    return replace(base, content=entries)


def _lists(context: _Patch, base: YamlNode, patch: YamlNode, path: Path) -> YamlNode:
    assert isinstance(patch.content, list)
    replaces = any(_replaces_list(item) for item in patch.content)
    items = [item for item in patch.content if not _replaces_list(item)]
    there = base.content if isinstance(base.content, list) else []
    identity = None if replaces else _identity(there, items)
    if identity is None:
        fresh = [_new_node(context, item, (*path, at)) for at, item in enumerate(items)]
        return replace(patch, content=fresh)
    merged: dict[object, YamlNode | None] = {
        _identity_value(item, identity): item for item in there
    }
    for at, item in enumerate(items):
        here, name = (*path, at), _identity_value(item, identity)
        if name in merged:
            node = merged[name]
            merged[name] = None if node is None else _merge(context, node, item, here)
        elif patch_directive(item) == "delete":
            hint = f"There are: {', '.join(str(one) for one in merged)}"
            message = f"{DIRECTIVE}: delete of {identity} {name}, which the base does not have"
            context.report(item.mark, here, message, hint)
        else:
            merged[name] = _new_node(context, item, here)
    # It keeps the base's place; the items have their own.
    return replace(base, content=[item for item in merged.values() if item is not None])


def _replaces_list(item: YamlNode) -> bool:
    """Return whether an item is only the directive to replace the list."""
    content = item.content
    return (
        isinstance(content, dict)
        and set(content) == {DIRECTIVE}
        and patch_directive(item) == "replace"
    )


def _identity(there: Sequence[YamlNode], items: Sequence[YamlNode]) -> str | None:
    """Return the field that identifies the items of both lists; None if there is none: then lists are replaced."""
    if not there or not items:
        return None
    for name_field in _IDENTITIES:
        ours, theirs = (
            [_identity_value(item, name_field) for item in side] for side in (items, there)
        )
        is_telling = all(name is not None for name in (*ours, *theirs))
        if is_telling and len(set(ours)) == len(ours) and len(set(theirs)) == len(theirs):
            return name_field
    return None


def _identity_value(item: YamlNode, field: str) -> object:
    if not isinstance(item.content, dict) or field not in item.content:
        return None
    name = item.content[field].node.content
    return None if isinstance(name, dict | list) else name


def _new_node(context: _Patch, node: YamlNode, path: Path) -> YamlNode:
    """Return a value that the base does not have; directives in it are errors."""
    if isinstance(node.content, list):
        items = [item for item in node.content if not _replaces_list(item)]
        return replace(
            node, content=[_new_node(context, item, (*path, at)) for at, item in enumerate(items)]
        )
    if not isinstance(node.content, dict):
        return node
    order = patch_directive(node)
    if order == "delete":
        hint = "Remove it, or check the spelling in the base"
        context.report(node.mark, path, f"{DIRECTIVE}: delete of what the base does not have", hint)
    elif order not in (None, "replace"):
        _report_unknown_directive(context, node, path)
    return _without_directive(context, node, path)


def _without_directive(context: _Patch, node: YamlNode, path: Path) -> YamlNode:
    assert isinstance(node.content, dict)
    entries = {
        key: replace(entry, node=_new_node(context, entry.node, (*path, key)))
        for key, entry in node.content.items()
        if key != DIRECTIVE
    }
    return replace(node, content=entries)


def _report_unknown_directive(context: _Patch, node: YamlNode, path: Path) -> None:
    assert isinstance(node.content, dict)
    entry = node.content[DIRECTIVE]
    shown = entry.node.text or patch_directive(node)
    hint = f"Write {DIRECTIVE}: delete or {DIRECTIVE}: replace; without it, mappings are merged"
    context.report(entry.mark, (*path, DIRECTIVE), f"unknown directive {shown}", hint)
