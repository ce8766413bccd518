"""Manifests to typed objects that know their file and line. Reads files; never the store.

Fields that the fleet keeps (`status`, and in `metadata` what `schemas.meta.FLEET_OWNED` lists) are
refused, because they would have no effect. One exception: an object with a `metadata.uid` is output of
`fleetctl get -o yaml` that somebody applies again, and there they are dropped without a word.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import BinaryIO, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from machinery.garbage import collector_held
from manifests import complaints, nodes, overlay, sources, wording, words, yamlio
from manifests.derived import node_labels as derived_labels
from manifests.document import Document, Loaded
from manifests.errors import ManifestError, ManifestErrors
from manifests.nodes import Node
from manifests.overlay import Found, Placed
from manifests.tree import Path, Tree
from schemas import kinds
from schemas.kinds import Kind
from schemas.meta import API_VERSION, FLEET_OWNED, ApiModel, ApiObject, ObjectKey, ObjectMeta

__all__ = ["Document", "Loaded", "load", "load_objects", "parse", "read_as", "read_objects"]

Model = TypeVar("Model", bound=ApiModel)

_WRITERS = {
    "Replica": "the reconciler writes it for a ModelDeployment",
    "Endpoint": "a node's agent writes it for a ready replica",
    "Event": "the fleet writes it",
    "FabricTest": "`fleetctl fabric bench` writes it, for as long as it runs",
}
_OWNED = frozenset(ObjectMeta.model_fields[name].alias or name for name in FLEET_OWNED)
# Not even its hash: what is in Git is read by more people than may ask for models.
_API_KEY = "an API key is a secret, and secrets do not belong into manifests"


def load_objects(
    paths: Sequence[str], *, recursive: bool = False, stdin: BinaryIO | None = None
) -> list[Loaded]:
    """Return every object in the files, the folders and ("-") standard input.

    Raises:
        ManifestErrors: everything that is wrong in any of them.

    """
    with collector_held():  # ten thousand manifests are a million objects, which all stay
        documents, problems = _scan(paths, recursive=recursive, stdin=stdin)
        loaded, more = _read(documents)
    if problems or more:
        raise ManifestErrors([*problems, *more])
    return loaded


def load(
    paths: Sequence[str], *, recursive: bool = False, stdin: BinaryIO | None = None
) -> list[Document]:
    """Return every document in the files, the folders and ("-") standard input.

    Raises:
        ManifestErrors: a file cannot be read or is not YAML, or there is no document at all.

    """
    documents, problems = _scan(paths, recursive=recursive, stdin=stdin)
    if problems:
        raise ManifestErrors(problems)
    return documents


def read_objects(documents: Iterable[Document]) -> list[Loaded]:
    """Return the documents as typed objects, in their order.

    Raises:
        ManifestErrors: everything that is wrong with any of them.

    """
    loaded, problems = _read(documents)
    if problems:
        raise ManifestErrors(problems)
    return loaded


def read_as(document: Document, model: type[Model]) -> Model:
    """Return a document that is no API object, such as a simulated fleet, as a value of our own.

    Raises:
        ManifestErrors: everything that is wrong with it.

    """
    if not isinstance(document.root.content, dict):
        message = f"expected a mapping, got {words.show(document.root)}"
        raise ManifestErrors([document.problem((), message)])
    try:
        tree = json.dumps(nodes.plain(document.root))
        return model.model_validate_json(tree, by_alias=True, by_name=False)
    except ValidationError as error:
        details = complaints.of(error, document.root)
        raise ManifestErrors([_translated(document, d, model) for d in details]) from error


def _scan(
    paths: Sequence[str], *, recursive: bool, stdin: BinaryIO | None
) -> tuple[list[Document], list[ManifestError]]:
    texts = list(sources.read_all(paths, recursive=recursive, stdin=stdin))
    quick = _quick(texts)
    if quick is not None:
        documents, problems = quick
    else:
        found = parse(texts)
        combined = overlay.combine(found.documents, _read_base)
        documents = [Document(source=one.source, root=one.root) for one in combined.documents]
        problems = [*found.problems, *combined.problems]
    if not documents and not problems:
        named = ", ".join(sources.STDIN_NAME if p == sources.STDIN else p for p in paths)
        message = "no object in it: it is empty, or has only comments"
        problems.append(ManifestError(source=named or "no file", message=message))
    return documents, problems


def _quick(
    texts: Sequence[tuple[str, str | ManifestError]],
) -> tuple[list[Document], list[ManifestError]] | None:
    """Return what `parse` would, places to be found out later where it can be so; None if there is an overlay."""
    documents: list[Document] = []
    problems: list[ManifestError] = []
    for name, text in texts:
        trees = None if isinstance(text, ManifestError) else yamlio.trees(text)
        kinds_there = [tree.get("kind") for tree in trees or () if isinstance(tree, dict)]
        if overlay.KIND in kinds_there:
            return None
        if trees is None or isinstance(text, ManifestError) or "List" in kinds_there:
            found = parse([(name, text)])
            if any(overlay.is_overlay(one.root) for one in found.documents):
                return None
            documents.extend(Document(source=one.source, root=one.root) for one in found.documents)
            problems.extend(found.problems)
            continue
        roots = cache(partial(yamlio.parse, text, name))
        documents.extend(
            Document(source=name, root=partial(_root, roots, index), tree=tree)
            for index, tree in enumerate(trees)
        )
    return documents, problems


def _root(roots: Callable[[], yamlio.Parsed], index: int) -> Node:
    return roots().documents[index]


def parse(texts: Iterable[tuple[str, str | ManifestError]]) -> Found:
    """Return the documents of files, given as names and texts (or what was wrong with reading them)."""
    documents: list[Placed] = []
    problems: list[ManifestError] = []
    for name, text in texts:
        if isinstance(text, ManifestError):
            problems.append(text)
            continue
        parsed = yamlio.parse(text, name)
        problems.extend(parsed.problems)
        roots = [item for root in parsed.documents for item in _unpacked(root)]
        documents.extend(Placed(source=name, root=root) for root in roots)
    return Found(documents=tuple(documents), problems=tuple(problems))


def _read_base(path: str) -> Found:
    """Return what a base of an overlay holds."""
    return parse(sources.read_all([path], recursive=True, stdin=None))


def _unpacked(root: Node) -> list[Node]:
    """Return the items of a `kind: List`, which `get -o yaml` writes for several objects."""
    content = root.content
    if not isinstance(content, dict) or set(content) - {"apiVersion", "kind", "metadata", "items"}:
        return [root]
    kind, items = nodes.find(root, ("kind",)), nodes.find(root, ("items",))
    is_list = kind is not None and kind.content == "List"
    if not is_list or items is None or not isinstance(items.content, list):
        return [root]
    return items.content


def _read(documents: Iterable[Document]) -> tuple[list[Loaded], list[ManifestError]]:
    loaded: list[Loaded] = []
    problems: list[ManifestError] = []
    places: dict[ObjectKey, Document] = {}
    for document in documents:
        found = _object(document)
        problems.extend(found if isinstance(found, list) else [])
        key = ObjectKey(document.text_at("kind") or "", document.text_at("metadata", "name") or "")
        if all(key) and key in places:
            problems.append(_duplicate(document, places[key]))
        elif isinstance(found, ApiObject):
            loaded.append(Loaded(obj=found, document=document))
        places.setdefault(key, document)
    return loaded, problems


def _duplicate(document: Document, first: Document) -> ManifestError:
    there = f"{first.source}:{first.line}"
    hint = "Remove one of them, or give it another name"
    return document.problem(
        ("metadata", "name"), f"is declared twice, first at {there}", hint, at_key=True
    )


def _object(document: Document) -> ApiObject | list[ManifestError]:
    """Return the document as an object, or everything that is wrong with it."""
    if not isinstance(document.tree, dict):
        message = f"expected an object, got {words.show(document.root)}"
        return [document.problem((), message, "Begin with: apiVersion, kind, metadata, spec")]
    problems = _version_problems(document)
    kind = _kind(document)
    if isinstance(kind, ManifestError):
        return [*problems, kind]
    tree, owned = _without_fleet_owned(document)
    problems.extend(owned)
    try:
        found = kind.type.model_validate_json(json.dumps(tree), by_alias=True, by_name=False)
    except ValidationError as error:
        details = complaints.of(error, document.root)
        # apiVersion was looked at above, in better words
        rest = [d for d in details if d["loc"] != ("apiVersion",)]
        return [*problems, *(_translated(document, d, kind.type) for d in rest)]
    return problems or found


def _version_problems(document: Document) -> list[ManifestError]:
    if document.text_at("apiVersion") == API_VERSION:
        return []
    node = nodes.find(document.root, ("apiVersion",))
    hint = f"Write: apiVersion: {API_VERSION}"
    if node is None:
        return [document.problem(("apiVersion",), "is required but not given", hint)]
    message = f"unknown version {words.show(node)}; there is only {API_VERSION}"
    return [document.problem(("apiVersion",), message, hint)]


def _kind(document: Document) -> Kind | ManifestError:
    """Return the kind that users may write."""
    known = [kind.name for kind in kinds.KINDS if kind.written_by_users]
    word = document.text_at("kind")
    if word is None:
        node = nodes.find(document.root, ("kind",))
        if node is None:
            every = f"One of: {', '.join(known)}"
            return document.problem(("kind",), "is required but not given", every)
        return document.problem(("kind",), f"expected a string, got {words.show(node)}")
    kind = kinds.by_name(word)
    if kind is None and word.lower() in ("apikey", "apikeys"):
        return document.problem(("kind",), _API_KEY, "Run: fleetctl create apikey NAME")
    if kind is None:
        alias = kinds.by_alias(word)
        options = [alias.name] if alias is not None and alias.written_by_users else known
        hint = words.did_you_mean(alias.name if alias else word, options, "Known are")
        return document.problem(("kind",), f"unknown kind {json.dumps(word)}", hint)
    if not kind.written_by_users:
        writer = _WRITERS.get(kind.name, "the fleet writes it")
        return document.problem(("kind",), f"a {kind.name} is not for users: {writer}")
    return kind


def _without_fleet_owned(document: Document) -> tuple[object, list[ManifestError]]:
    """Return the tree without what the fleet keeps, and complaints unless it came from the fleet."""
    assert isinstance(document.tree, dict)
    tree = {**document.tree}
    metadata = tree.get("metadata")
    owned: list[Path] = [("status",)] if "status" in tree else []
    if isinstance(metadata, dict):
        owned.extend(("metadata", alias) for alias in _OWNED if alias in metadata)
        tree["metadata"] = {k: v for k, v in metadata.items() if k not in _OWNED}
    tree.pop("status", None)
    if document.text_at("metadata", "uid"):
        return _without_derived_labels(tree, document.tree), []
    message = "is written by the fleet"
    return tree, [document.problem(p, message, "Remove it", at_key=True) for p in owned]


def _without_derived_labels(tree: dict[str, Tree], printed: dict[str, Tree]) -> dict[str, Tree]:
    """Return a node without the labels that `fleetctl get` added; stored, they would outlive what they say."""
    metadata = tree["metadata"]
    assert isinstance(metadata, dict)
    labels = metadata.get("labels")
    if tree.get("kind") != "Node" or "name" not in metadata or not isinstance(labels, dict):
        return tree
    derived = derived_labels(printed)
    own = {key: value for key, value in labels.items() if derived.get(key) != value}
    return {**tree, "metadata": {**metadata, "labels": own}}


def _translated(document: Document, found: ErrorDetails, model: type[ApiModel]) -> ManifestError:
    is_key = bool(found["loc"]) and found["loc"][-1] == "[key]"
    path = found["loc"][:-1] if is_key else found["loc"]
    node = nodes.find(document.root, path)
    message, hint = wording.explain(found, path=path, node=node, model=model)
    at_key = is_key or found["type"] in ("missing", "extra_forbidden")
    return document.problem(path, message, hint, at_key=at_key)
