"""Overlays: a folder with patches for one site, merged onto the folders that sites have in common. Pure.

A folder with a document of `kind: Overlay` (usually `overlay.yaml`) is an overlay. Its `base` names the folders or
files below it; its other documents are patches of their objects, or further objects. A base may be an overlay itself.
Files are read through `ReadBase`: from the disk for `fleetctl apply`, from a commit for a GitSource.

Patches are strategic merges as in kustomize and kubectl, without schemas: mappings merge by key, lists of mappings with
a name merge by name, everything else is replaced. Values of a patch keep their file and line for error messages.
"""

import json
import posixpath
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from manifests import suggestions
from manifests.errors import ManifestError
from manifests.sources import SUFFIXES
from manifests.trees import Path, show_path
from manifests.yaml import nodes
from manifests.yaml.nodes import MappingEntry, Mark, YamlNode
from schemas.meta import API_VERSION

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
            found = merged[name]
            merged[name] = None if found is None else _merge(context, found, item, here)
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


KIND = "Overlay"
# A longer chain is a mistake; each level costs a copy.
_MAX_DEPTH = 10
_FIELDS = ("apiVersion", "kind", "metadata", "base")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDocument:
    """A parsed document and its file."""

    source: str
    root: YamlNode


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedDocuments:
    """The documents of files, and their problems."""

    documents: tuple[SourceDocument, ...] = ()
    problems: tuple[ManifestError, ...] = ()


# Reads the documents of a file, or of a folder and its subfolders.
ReadBase: TypeAlias = Callable[[str], ParsedDocuments]


@dataclass(slots=True, kw_only=True)
class _OverlayRun:
    """One combination in progress; `above` are the overlays being resolved, the outermost first."""

    read: ReadBase
    problems: list[ManifestError] = field(default_factory=list)
    above: list[str] = field(default_factory=list)


def combine(documents: Sequence[SourceDocument], read: ReadBase) -> ParsedDocuments:
    """Return the documents with every overlay among them resolved."""
    run = _OverlayRun(read=read)
    combined = _combine(run, documents)
    return ParsedDocuments(documents=tuple(combined), problems=tuple(run.problems))


def is_overlay(root: YamlNode) -> bool:
    kind = nodes.find_node(root, ("kind",))
    return kind is not None and kind.content == KIND


def _combine(run: _OverlayRun, documents: Sequence[SourceDocument]) -> list[SourceDocument]:
    overlays = _overlays(run, documents)
    plain = [
        one
        for one in documents
        if _folder_of(one.source, overlays) is None and not is_overlay(one.root)
    ]
    for folder, overlay in overlays.items():
        # The whole folder belongs to an overlay, even if only its overlay.yaml was named.
        there = run.read(folder or ".")
        inner = {posixpath.dirname(one.source) for one in there.documents if is_overlay(one.root)}
        patches = [
            one
            for one in there.documents
            if _folder_of(one.source, inner) == folder and not is_overlay(one.root)
        ]
        run.problems.extend(there.problems)
        plain.extend(_overlaid(run, folder, overlay, patches))
    return plain


def _overlays(run: _OverlayRun, documents: Sequence[SourceDocument]) -> dict[str, SourceDocument]:
    """Return the overlays among the documents by their folders."""
    overlays: dict[str, SourceDocument] = {}
    for found in documents:
        if not is_overlay(found.root):
            continue
        if not found.source.endswith(SUFFIXES):
            hint = "Name the folder: fleetctl apply -f sites/berlin"
            _report(run, found, ("kind",), "must be in a folder, not in a stream", hint)
            continue
        folder = posixpath.dirname(found.source)
        first = overlays.setdefault(folder, found)
        if first is not found:
            there = f"{first.source}:{first.root.mark.line}"
            _report(
                run, found, ("kind",), "is the folder's second overlay", f"The first is {there}"
            )
    return overlays


def _folder_of(source: str, folders: Iterable[str]) -> str | None:
    """Return the innermost of the folders that contains a file."""
    above = [folder for folder in folders if not folder or source.startswith(f"{folder}/")]
    return max(above, key=len, default=None)


def _overlaid(
    run: _OverlayRun, folder: str, overlay: SourceDocument, patches: Sequence[SourceDocument]
) -> list[SourceDocument]:
    """Return the bases of an overlay with its patches applied."""
    bases = _bases(run, overlay)
    name = folder or "."
    if name in run.above:
        circle = " -> ".join([*run.above[run.above.index(name) :], name])
        _report(run, overlay, ("base",), f"is circular: {circle}", "Break the circle")
        return []
    if len(run.above) >= _MAX_DEPTH:
        _report(run, overlay, ("base",), f"is more than {_MAX_DEPTH} overlays deep", "")
        return []
    run.above.append(name)
    below: list[SourceDocument] = []
    for at, base in bases:
        found = run.read(posixpath.normpath(posixpath.join(folder, base)))
        run.problems.extend(_blamed(overlay, at, found.problems))
        below.extend(_combine(run, found.documents))
    run.above.pop()
    return _patched(run, below, patches)


def _blamed(
    overlay: SourceDocument, at: int, problems: Sequence[ManifestError]
) -> list[ManifestError]:
    """Return the problems; a base that cannot be read is reported where it is named."""
    mark = nodes.mark_of_value(overlay.root, ("base", at))
    return [
        one
        if one.line
        else ManifestError(
            source=overlay.source,
            line=mark.line,
            column=mark.column,
            about=KIND,
            path=show_path(("base", at)),
            message=f"{one.source} {one.message}",
            hint=one.hint,
        )
        for one in problems
    ]


def _patched(
    run: _OverlayRun, below: Sequence[SourceDocument], patches: Sequence[SourceDocument]
) -> list[SourceDocument]:
    there: dict[tuple[object, object], SourceDocument | None] = {
        _key(one.root): one for one in below
    }
    twice = [one for one in below if there[_key(one.root)] is not one]
    more: list[SourceDocument] = []
    for patch in patches:
        key = _key(patch.root)
        base = there.get(key)
        if base is None:
            # A document that no base has is an object of the overlay itself, unless it has a directive.
            if patch_directive(patch.root) is None:
                more.append(patch)
            else:
                names = [str(name) for kind, name in there if kind == key[0]]
                hint = suggestions.did_you_mean(str(key[1]), names, "The bases have")
                message = f"no base has {key[0]}/{key[1]}, so there is nothing to patch"
                _report(run, patch, (DIRECTIVE,), message, hint)
            continue
        about = f"{key[0]}/{key[1]}"
        root, problems = apply_patch(base.root, patch.root, source=patch.source, about=about)
        run.problems.extend(problems)
        there[key] = None if root is None else SourceDocument(source=base.source, root=root)
    merged = [one for one in there.values() if one is not None]
    # The loader reports objects that are declared twice.
    return [*merged, *twice, *more]


def _key(root: YamlNode) -> tuple[object, object]:
    kind, name = nodes.find_node(root, ("kind",)), nodes.find_node(root, ("metadata", "name"))
    values = (
        None if one is None or isinstance(one.content, dict | list) else one.content
        for one in (kind, name)
    )
    kind_word, name_word = values
    # A document without a name patches nothing.
    return (kind_word, name_word) if kind_word and name_word else (None, id(root))


def _bases(run: _OverlayRun, overlay: SourceDocument) -> list[tuple[int, str]]:
    """Return the bases that an overlay names; reports every problem with it."""
    content = overlay.root.content
    assert isinstance(content, dict)
    for key, entry in content.items():
        if key not in _FIELDS:
            hint = suggestions.did_you_mean(key, _FIELDS, "An Overlay has")
            _report(run, overlay, (key,), "unknown field", hint, mark=entry.mark)
    version = nodes.find_node(overlay.root, ("apiVersion",))
    if version is None or version.content != API_VERSION:
        shown = "is required but not given" if version is None else f"is not {API_VERSION}"
        _report(run, overlay, ("apiVersion",), shown, f"Write: apiVersion: {API_VERSION}")
    base = nodes.find_node(overlay.root, ("base",))
    hint = "Write: base: [../../base]"
    if base is None or not isinstance(base.content, list) or not base.content:
        message = "is required but not given" if base is None else "expected a list of folders"
        _report(run, overlay, ("base",), message, hint)
        return []
    found: list[tuple[int, str]] = []
    for at, item in enumerate(base.content):
        text = item.content
        if not isinstance(text, str) or not text or text.startswith("/"):
            shown = (
                suggestions.describe_node(item) if not isinstance(text, str) else json.dumps(text)
            )
            message = f"expected a folder relative to this one, got {shown}"
            _report(run, overlay, ("base", at), message, hint)
        else:
            found.append((at, text))
    return found


def _report(
    run: _OverlayRun,
    found: SourceDocument,
    path: tuple[str | int, ...],
    message: str,
    hint: str,
    *,
    mark: Mark | None = None,
) -> None:
    mark = mark or nodes.mark_of_value(found.root, path)
    _, name = _key(found.root)
    kind = nodes.find_node(found.root, ("kind",))
    word = str(kind.content) if kind is not None else ""
    run.problems.append(
        ManifestError(
            source=found.source,
            line=mark.line,
            column=mark.column,
            about=f"{word}/{name}" if isinstance(name, str) else word,
            path=show_path(path),
            message=message,
            hint=hint,
        )
    )
