"""Overlays: a folder with patches for one site, merged onto the folders that sites have in common. Pure.

A folder with a document of `kind: Overlay` (usually `overlay.yaml`) is an overlay. Its `base` names the folders or
files below it. Its other documents are patches of their objects, or new objects: `resources` lists the files of new
ones, as in kustomize. A base may be an overlay itself. Files are read through `ReadBase`: from the disk for `fleetctl
apply`, from a commit for a GitSource.
"""

import json
import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pydantic import ValidationError

from manifests import suggestions
from manifests.documents import Document, ParsedDocuments
from manifests.errors import ManifestError
from manifests.sources import SUFFIXES
from manifests.strategic_merge import DIRECTIVE, apply_patch
from manifests.trees import Tree, show_path
from manifests.yaml import nodes
from manifests.yaml.nodes import Mark, YamlNode
from schemas import kinds
from schemas.meta import API_VERSION

KIND = "Overlay"
# A longer chain is a mistake; each level costs a copy.
_MAX_DEPTH = 10
_FIELDS = ("apiVersion", "kind", "metadata", "base", "resources")
_KUSTOMIZE_PATCHES = ("patches", "patchesStrategicMerge", "patchesJson6902")

# Reads the documents of a file, or of a folder and its subfolders.
ReadBase: TypeAlias = Callable[[str], ParsedDocuments]
_Key: TypeAlias = tuple[object, object]


@dataclass(slots=True, kw_only=True)
class _OverlayRun:
    """One combination in progress; `above` are the overlays being resolved, the outermost first."""

    read: ReadBase
    problems: list[ManifestError] = field(default_factory=list)
    above: list[str] = field(default_factory=list)


def combine(documents: Sequence[Document], read: ReadBase) -> ParsedDocuments:
    """Return the documents with every overlay among them resolved."""
    run = _OverlayRun(read=read)
    combined = _combine(run, documents)
    return ParsedDocuments(documents=tuple(combined), problems=tuple(run.problems))


def is_overlay(document: Document) -> bool:
    return document.text_at("kind") == KIND


def _combine(run: _OverlayRun, documents: Sequence[Document]) -> list[Document]:
    overlays = _overlays(run, documents)
    plain = [
        document
        for document in documents
        if _folder_of(document.source, overlays) is None and not is_overlay(document)
    ]
    for folder, overlay in overlays.items():
        # The whole folder belongs to an overlay, even if only its overlay.yaml was named.
        there = run.read(folder or ".")
        inner = {
            posixpath.dirname(document.source)
            for document in there.documents
            if is_overlay(document)
        }
        patches = [
            document
            for document in there.documents
            if _folder_of(document.source, inner) == folder and not is_overlay(document)
        ]
        run.problems.extend(there.problems)
        plain.extend(_overlaid(run, folder, overlay, patches))
    return plain


def _overlays(run: _OverlayRun, documents: Sequence[Document]) -> dict[str, Document]:
    """Return the overlays among the documents by their folders."""
    overlays: dict[str, Document] = {}
    for document in documents:
        if not is_overlay(document):
            continue
        if not document.source.endswith(SUFFIXES):
            hint = "Name the folder: fleetctl apply -f sites/berlin"
            _report(run, document, ("kind",), "must be in a folder, not in a stream", hint)
            continue
        folder = posixpath.dirname(document.source)
        first = overlays.setdefault(folder, document)
        if first is not document:
            there = f"{first.source}:{first.line}"
            _report(
                run, document, ("kind",), "is the folder's second overlay", f"The first is {there}"
            )
    return overlays


def _folder_of(source: str, folders: Iterable[str]) -> str | None:
    """Return the innermost of the folders that contains a file."""
    above = [folder for folder in folders if not folder or source.startswith(f"{folder}/")]
    return max(above, key=len, default=None)


def _overlaid(
    run: _OverlayRun, folder: str, overlay: Document, patches: Sequence[Document]
) -> list[Document]:
    """Return the bases of an overlay with its patches applied."""
    _check_fields(run, overlay)
    bases = _paths(run, overlay, "base", required="Write: base: [../../base]")
    name = folder or "."
    if name in run.above:
        circle = " -> ".join([*run.above[run.above.index(name) :], name])
        _report(run, overlay, ("base",), f"is circular: {circle}", "Break the circle")
        return []
    if len(run.above) >= _MAX_DEPTH:
        _report(run, overlay, ("base",), f"is more than {_MAX_DEPTH} overlays deep", "")
        return []
    run.above.append(name)
    below: dict[_Key, Document] = {}
    for at, base in bases:
        documents = run.read(posixpath.normpath(posixpath.join(folder, base)))
        run.problems.extend(_blamed(overlay, at, documents.problems))
        for document in _combine(run, documents.documents):
            first = below.setdefault(_key(document), document)
            if first is not document:
                message = f"has {document.text_at('kind')}/{document.text_at('metadata', 'name')} at {document.source}:{document.line}"
                hint = f"{first.source}:{first.line} has it, too: remove one of them"
                _report(run, overlay, ("base", at), message, hint)
    run.above.pop()
    return _patched(run, overlay, below, patches)


def _blamed(overlay: Document, at: int, problems: Sequence[ManifestError]) -> list[ManifestError]:
    """Return the problems; a base that cannot be read is reported where it is named."""
    mark = nodes.mark_of_value(overlay.root, ("base", at))
    return [
        problem
        if problem.line
        else ManifestError(
            source=overlay.source,
            line=mark.line,
            column=mark.column,
            about=KIND,
            path=show_path(("base", at)),
            message=f"{problem.source} {problem.message}",
            hint=problem.hint,
        )
        for problem in problems
    ]


def _patched(
    run: _OverlayRun,
    overlay: Document,
    below: Mapping[_Key, Document],
    patches: Sequence[Document],
) -> list[Document]:
    there: dict[_Key, Document | None] = dict(below)
    resources = _resources(run, overlay, patches)
    new: list[Document] = []
    for patch in patches:
        key = _key(patch)
        base = there.get(key)
        if patch.source in (resources or ()):
            if base is not None:
                hint = "Remove the file from resources to patch the object"
                message = f"is new by the overlay's resources, but {base.source} has it, too"
                _report(run, patch, ("metadata", "name"), message, hint)
            new.append(patch)
        elif base is None:
            if _is_new(run, patch, there, must_be_listed=resources is not None):
                new.append(patch)
        else:
            about = f"{key[0]}/{key[1]}"
            root, problems = apply_patch(base.root, patch.root, source=patch.source, about=about)
            run.problems.extend(problems)
            there[key] = None if root is None else Document(source=base.source, root=root)
    return [*(document for document in there.values() if document is not None), *new]


def _is_new(
    run: _OverlayRun,
    patch: Document,
    there: Mapping[_Key, Document | None],
    *,
    must_be_listed: bool,
) -> bool:
    """Return whether a document that no base has is a new object; report it if it is a patch without a target.

    Without `resources`, a complete object is new, unless its name is one typing error away from one in a base.
    """
    kind, name = _key(patch)
    if kind is None:
        return True  # the loader reports documents without a kind or a name
    names = [str(one) for of_kind, one in there if of_kind == kind]
    tree = patch.tree
    is_directive = isinstance(tree, dict) and DIRECTIVE in tree
    missing = _missing_fields(str(kind), tree)
    typos = [one for one in names if suggestions.is_typing_error(str(name), one)]
    if not (is_directive or missing or must_be_listed or typos):
        return True
    message = f"no base has {kind}/{name}, so there is nothing to patch"
    near = typos[0] if typos else suggestions.nearest(str(name), names)
    hints = [f"Did you mean {near}?"] if near else []
    if not hints and names:
        hints = [f"The bases have: {', '.join(names[:20])}."]
    if missing and not is_directive:
        hints.append(f"A new object needs {', '.join(missing)}")
    elif not is_directive:
        file = posixpath.basename(patch.source)
        hints.append(f"If it is a new object, write in the overlay: resources: [{file}]")
    place = (DIRECTIVE,) if is_directive else ("metadata", "name")
    _report(run, patch, place, message, " ".join(hints))
    return False


def _missing_fields(kind: str, tree: Tree) -> list[str]:
    """Return the required fields that an object lacks."""
    found = kinds.by_name(kind)
    if found is None:
        return []
    try:
        found.type.model_validate_json(json.dumps(tree), by_alias=True, by_name=False)
    except ValidationError as error:
        return [show_path(one["loc"]) for one in error.errors() if one["type"] == "missing"]
    return []


def _resources(
    run: _OverlayRun, overlay: Document, patches: Sequence[Document]
) -> frozenset[str] | None:
    """Return the files of new objects; None if the overlay does not list them."""
    if nodes.find_node(overlay.root, ("resources",)) is None:
        return None
    folder = posixpath.dirname(overlay.source)
    files = {patch.source for patch in patches}
    resources: set[str] = set()
    for at, path in _paths(run, overlay, "resources"):
        place = posixpath.normpath(posixpath.join(folder, path))
        listed = {file for file in files if file == place or file.startswith(f"{place}/")}
        if not listed:
            hint = "Name files of this folder; put other folders in base"
            _report(run, overlay, ("resources", at), f"{path} has no manifest of the folder", hint)
        resources |= listed
    return frozenset(resources)


def _key(document: Document) -> _Key:
    kind, name = document.text_at("kind"), document.text_at("metadata", "name")
    # A document without a name patches nothing.
    return (kind, name) if kind and name else (None, id(document))


def _check_fields(run: _OverlayRun, overlay: Document) -> None:
    """Report unknown fields of an overlay, and another apiVersion."""
    content = overlay.root.content
    assert isinstance(content, dict)
    for key, entry in content.items():
        if key in _KUSTOMIZE_PATCHES:
            hint = "Remove it: every manifest of the folder that is not in resources is a patch"
            _report(run, overlay, (key,), "unknown field", hint, mark=entry.mark)
        elif key not in _FIELDS:
            hint = suggestions.did_you_mean(key, _FIELDS, "An Overlay has")
            _report(run, overlay, (key,), "unknown field", hint, mark=entry.mark)
    version = nodes.find_node(overlay.root, ("apiVersion",))
    if version is None or version.content != API_VERSION:
        shown = "is required but not given" if version is None else f"is not {API_VERSION}"
        _report(run, overlay, ("apiVersion",), shown, f"Write: apiVersion: {API_VERSION}")


def _paths(
    run: _OverlayRun, overlay: Document, name: str, *, required: str = ""
) -> list[tuple[int, str]]:
    """Return the paths that a field of an overlay lists; reports every problem with it."""
    node = nodes.find_node(overlay.root, (name,))
    if node is None or not isinstance(node.content, list) or (required and not node.content):
        message = "is required but not given" if node is None else "expected a list of folders"
        _report(run, overlay, (name,), message, required or f"Write: {name}: [new.yaml]")
        return []
    paths: list[tuple[int, str]] = []
    for at, item in enumerate(node.content):
        text = item.content
        if isinstance(text, str) and text and not text.startswith("/"):
            paths.append((at, text))
            continue
        shown = _shown(item)
        message = f"expected a folder relative to this one, got {shown}"
        _report(run, overlay, (name, at), message, required)
    return paths


def _shown(item: YamlNode) -> str:
    text = item.content
    return json.dumps(text) if isinstance(text, str) else suggestions.describe_node(item)


def _report(
    run: _OverlayRun,
    found: Document,
    path: tuple[str | int, ...],
    message: str,
    hint: str,
    *,
    mark: Mark | None = None,
) -> None:
    mark = mark or nodes.mark_of_value(found.root, path)
    kind, name = found.text_at("kind") or "", found.text_at("metadata", "name")
    run.problems.append(
        ManifestError(
            source=found.source,
            line=mark.line,
            column=mark.column,
            about=f"{kind}/{name}" if kind and name else kind,
            path=show_path(path),
            message=message,
            hint=hint,
        )
    )
