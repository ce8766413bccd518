"""Overlays: a folder that says what is different at one site, laid over the folders that say what is the same. Pure.

A folder with a document of `kind: Overlay` (by custom `overlay.yaml`) is an overlay: its `base` names the folders or files
that it is laid over, its other documents are patches of their objects, or further objects. A base may be an overlay again.
Files come through `Read`: from the disk for `fleetctl apply`, out of a commit for a GitSource.
"""

import json
import posixpath
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from manifests import nodes, patching, words
from manifests.errors import ManifestError
from manifests.nodes import Mark, Node
from manifests.sources import SUFFIXES
from manifests.tree import show_path
from schemas.meta import API_VERSION

KIND = "Overlay"
# Sites of a fleet of fleets; a chain that is longer is a mistake, and costs its length in copies.
_MAX_DEPTH = 10
_FIELDS = ("apiVersion", "kind", "metadata", "base")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A parsed document and its file."""

    source: str
    root: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What files hold, and what is wrong with them."""

    documents: tuple[Placed, ...] = ()
    problems: tuple[ManifestError, ...] = ()


# The documents of a file, or of a folder and all below it.
Read: TypeAlias = Callable[[str], Found]


@dataclass(slots=True, kw_only=True)
class _Run:
    """One combining on its way; `above` are the overlays that are being resolved, the outermost first."""

    read: Read
    problems: list[ManifestError] = field(default_factory=list)
    above: list[str] = field(default_factory=list)


def combine(documents: Sequence[Placed], read: Read) -> Found:
    """Return the documents with every overlay among them carried out."""
    run = _Run(read=read)
    combined = _combine(run, documents)
    return Found(documents=tuple(combined), problems=tuple(run.problems))


def is_overlay(root: Node) -> bool:
    kind = nodes.find(root, ("kind",))
    return kind is not None and kind.content == KIND


def _combine(run: _Run, documents: Sequence[Placed]) -> list[Placed]:
    overlays = _overlays(run, documents)
    plain = [
        one
        for one in documents
        if _folder_of(one.source, overlays) is None and not is_overlay(one.root)
    ]
    for folder, overlay in overlays.items():
        # A folder is an overlay with all that lies in it, also where only its overlay.yaml was named.
        there = run.read(folder or ".")
        inner = {posixpath.dirname(one.source) for one in there.documents if is_overlay(one.root)}
        patches = [
            one
            for one in there.documents
            if _folder_of(one.source, inner) == folder and not is_overlay(one.root)
        ]
        run.problems.extend(there.problems)
        plain.extend(_laid_over(run, folder, overlay, patches))
    return plain


def _overlays(run: _Run, documents: Sequence[Placed]) -> dict[str, Placed]:
    """Return the overlays among the documents by their folders."""
    overlays: dict[str, Placed] = {}
    for found in documents:
        if not is_overlay(found.root):
            continue
        if not found.source.endswith(SUFFIXES):
            hint = "Name the folder: fleetctl apply -f sites/berlin"
            _complain(run, found, ("kind",), "is a folder's, not a stream's", hint)
            continue
        folder = posixpath.dirname(found.source)
        first = overlays.setdefault(folder, found)
        if first is not found:
            there = f"{first.source}:{first.root.mark.line}"
            _complain(run, found, ("kind",), "is the folder's second", f"The first is {there}")
    return overlays


def _folder_of(source: str, folders: Iterable[str]) -> str | None:
    """Return the innermost of the folders that a file lies in."""
    above = [folder for folder in folders if not folder or source.startswith(f"{folder}/")]
    return max(above, key=len, default=None)


def _laid_over(run: _Run, folder: str, overlay: Placed, patches: Sequence[Placed]) -> list[Placed]:
    """Return what an overlay makes of its bases."""
    bases = _bases(run, overlay)
    name = folder or "."
    if name in run.above:
        circle = " -> ".join([*run.above[run.above.index(name) :], name])
        _complain(run, overlay, ("base",), f"goes in a circle: {circle}", "Break it")
        return []
    if len(run.above) >= _MAX_DEPTH:
        _complain(run, overlay, ("base",), f"is more than {_MAX_DEPTH} overlays deep", "")
        return []
    run.above.append(name)
    below: list[Placed] = []
    for at, base in bases:
        found = run.read(posixpath.normpath(posixpath.join(folder, base)))
        run.problems.extend(_blamed(overlay, at, found.problems))
        below.extend(_combine(run, found.documents))
    run.above.pop()
    return _patched(run, below, patches)


def _blamed(overlay: Placed, at: int, problems: Sequence[ManifestError]) -> list[ManifestError]:
    """Return the problems; of what could not be read at all, where it was named."""
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


def _patched(run: _Run, below: Sequence[Placed], patches: Sequence[Placed]) -> list[Placed]:
    there: dict[tuple[object, object], Placed | None] = {_key(one.root): one for one in below}
    twice = [one for one in below if there[_key(one.root)] is not one]
    more: list[Placed] = []
    for patch in patches:
        key = _key(patch.root)
        base = there.get(key)
        if base is None:
            # What is in no base is an object of the overlay's own; nothing else can be meant by it.
            if patching.directive(patch.root) is None:
                more.append(patch)
            else:
                names = [str(name) for kind, name in there if kind == key[0]]
                hint = words.did_you_mean(str(key[1]), names, "The bases have")
                message = f"no base has {key[0]}/{key[1]}, so there is nothing to patch"
                _complain(run, patch, (patching.DIRECTIVE,), message, hint)
            continue
        about = f"{key[0]}/{key[1]}"
        root, problems = patching.merged(base.root, patch.root, source=patch.source, about=about)
        run.problems.extend(problems)
        there[key] = None if root is None else Placed(source=base.source, root=root)
    kept = [one for one in there.values() if one is not None]
    # Declared twice is what the loader says of them, in its words.
    return [*kept, *twice, *more]


def _key(root: Node) -> tuple[object, object]:
    kind, name = nodes.find(root, ("kind",)), nodes.find(root, ("metadata", "name"))
    told = (
        None if one is None or isinstance(one.content, dict | list) else one.content
        for one in (kind, name)
    )
    kind_word, name_word = told
    # What has no name is nobody's patch.
    return (kind_word, name_word) if kind_word and name_word else (None, id(root))


def _bases(run: _Run, overlay: Placed) -> list[tuple[int, str]]:
    """Return the bases that an overlay names; complains of everything that is wrong with it."""
    content = overlay.root.content
    assert isinstance(content, dict)
    for key, entry in content.items():
        if key not in _FIELDS:
            hint = words.did_you_mean(key, _FIELDS, "An Overlay has")
            _complain(run, overlay, (key,), "unknown field", hint, mark=entry.mark)
    version = nodes.find(overlay.root, ("apiVersion",))
    if version is None or version.content != API_VERSION:
        shown = "is required but not given" if version is None else f"is not {API_VERSION}"
        _complain(run, overlay, ("apiVersion",), shown, f"Write: apiVersion: {API_VERSION}")
    base = nodes.find(overlay.root, ("base",))
    hint = "Write: base: [../../base]"
    if base is None or not isinstance(base.content, list) or not base.content:
        message = "is required but not given" if base is None else "expected a list of folders"
        _complain(run, overlay, ("base",), message, hint)
        return []
    found: list[tuple[int, str]] = []
    for at, item in enumerate(base.content):
        text = item.content
        if not isinstance(text, str) or not text or text.startswith("/"):
            shown = words.show(item) if not isinstance(text, str) else json.dumps(text)
            message = f"expected a folder relative to this one, got {shown}"
            _complain(run, overlay, ("base", at), message, hint)
        else:
            found.append((at, text))
    return found


def _complain(
    run: _Run,
    found: Placed,
    path: tuple[str | int, ...],
    message: str,
    hint: str,
    *,
    mark: Mark | None = None,
) -> None:
    mark = mark or nodes.mark_of_value(found.root, path)
    _, name = _key(found.root)
    kind = nodes.find(found.root, ("kind",))
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
