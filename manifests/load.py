"""Loading of manifests: documents with their places, and the typed objects they declare. Reads files, not the store.

Fields that the fleet maintains (`status`, and `schemas.meta.FLEET_OWNED` in `metadata`) are refused, because they would
have no effect. Exception: an object with a `metadata.uid` is output of `fleetctl get -o yaml` that is applied again;
there they are ignored.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import BinaryIO, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError, to_json

from machinery.gc_pause import pause_collection
from manifests import overlay, sources, suggestions, validation_errors
from manifests.documents import Document, ParsedDocuments
from manifests.errors import ManifestError, ManifestErrors
from manifests.trees import Path, Tree, key_of
from manifests.trees import derived_node_labels as derived_labels
from manifests.yaml import nodes, parser
from manifests.yaml.nodes import YamlNode
from schemas import kinds
from schemas.kinds import Kind
from schemas.meta import API_VERSION, FLEET_OWNED, ApiModel, ApiObject, ObjectKey, ObjectMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedObject:
    """An object and the document that declares it."""

    obj: ApiObject
    document: Document

    @property
    def source(self) -> str:
        return self.document.source

    @property
    def line(self) -> int:
        return self.document.line

    @property
    def key(self) -> ObjectKey:
        return key_of(self.obj)


__all__ = [
    "LoadedObject",
    "load_documents",
    "load_objects",
    "parse_texts",
    "read_model",
    "read_objects",
]

Model = TypeVar("Model", bound=ApiModel)

_WRITERS = {
    "Replica": "the reconciler writes it for a ModelDeployment",
    "Endpoint": "a node's agent writes it for a ready replica",
    "Event": "the fleet writes it",
    "FabricTest": "`fleetctl fabric bench` and the leader write it, for as long as it runs",
}
_OWNED = frozenset(ObjectMeta.model_fields[name].alias or name for name in FLEET_OWNED)
# Manifests may not even contain a key's hash: more people read Git than may use models.
_API_KEY = "an API key is a secret; do not put secrets in manifests"


def load_objects(
    paths: Sequence[str], *, recursive: bool = False, stdin: BinaryIO | None = None
) -> list[LoadedObject]:
    """Return every object in the files, the folders and standard input ("-").

    Raises:
        ManifestErrors: all problems in any of them.

    """
    with pause_collection():  # ten thousand manifests are a million objects, which all live on
        documents, problems = _scan(paths, recursive=recursive, stdin=stdin)
        loaded, more = _read_documents(documents)
    if problems or more:
        raise ManifestErrors([*problems, *more])
    return loaded


def load_documents(
    paths: Sequence[str], *, recursive: bool = False, stdin: BinaryIO | None = None
) -> list[Document]:
    """Return every document in the files, the folders and standard input ("-").

    Raises:
        ManifestErrors: a file cannot be read or is not YAML, or there is no document at all.

    """
    documents, problems = _scan(paths, recursive=recursive, stdin=stdin)
    if problems:
        raise ManifestErrors(problems)
    return documents


def read_objects(documents: Iterable[Document]) -> list[LoadedObject]:
    """Return the documents as typed objects, in their order.

    Raises:
        ManifestErrors: all problems in any of them.

    """
    loaded, problems = _read_documents(documents)
    if problems:
        raise ManifestErrors(problems)
    return loaded


def read_model(document: Document, model: type[Model]) -> Model:
    """Return a document that is not an API object, such as a simulated fleet, as a model.

    Raises:
        ManifestErrors: all problems in it.

    """
    if not isinstance(document.root.content, dict):
        message = f"expected a mapping, got {suggestions.describe_node(document.root)}"
        raise ManifestErrors([document.problem((), message)])
    try:
        tree = nodes.plain_value(document.root)
        return model.model_validate_json(_json(tree), by_alias=True, by_name=False)
    except ValidationError as error:
        details = validation_errors.relevant_errors(error, document.root)
        raise ManifestErrors([_manifest_error(document, d, model) for d in details]) from error


def _scan(
    paths: Sequence[str], *, recursive: bool, stdin: BinaryIO | None
) -> tuple[list[Document], list[ManifestError]]:
    texts = _read_texts(sources.read_all(paths, recursive=recursive, stdin=stdin))
    combined = overlay.combine(texts.documents, _read_base)
    documents = list(combined.documents)
    problems = [*texts.problems, *combined.problems]
    if not documents and not problems:
        named = ", ".join(sources.STDIN_NAME if p == sources.STDIN else p for p in paths)
        message = "no object in it: it is empty, or has only comments"
        problems.append(ManifestError(source=named or "no file", message=message))
    return documents, problems


def _read_texts(texts: Iterable[tuple[str, str | ManifestError]]) -> ParsedDocuments:
    """Return the result of `parse_texts`, with places on demand."""
    documents: list[Document] = []
    problems: list[ManifestError] = []
    for name, text in texts:
        trees = None if isinstance(text, ManifestError) else parser.parse_values(text)
        kinds_there = [tree.get("kind") for tree in trees or () if isinstance(tree, dict)]
        if trees is None or isinstance(text, ManifestError) or "List" in kinds_there:
            parsed_documents = parse_texts([(name, text)])
            documents.extend(parsed_documents.documents)
            problems.extend(parsed_documents.problems)
            continue
        roots = cache(partial(parser.parse, text, name))
        documents.extend(
            Document(source=name, root=partial(_root, roots, index), tree=tree)
            for index, tree in enumerate(trees)
        )
    return ParsedDocuments(documents=tuple(documents), problems=tuple(problems))


def _root(roots: Callable[[], parser.ParsedFile], index: int) -> YamlNode:
    return roots().documents[index]


def parse_texts(texts: Iterable[tuple[str, str | ManifestError]]) -> ParsedDocuments:
    """Return the documents of files, given as names and texts (or the error of reading them)."""
    documents: list[Document] = []
    problems: list[ManifestError] = []
    for name, text in texts:
        if isinstance(text, ManifestError):
            problems.append(text)
            continue
        parsed = parser.parse(text, name)
        problems.extend(parsed.problems)
        roots = [item for root in parsed.documents for item in _unpacked(root)]
        documents.extend(Document(source=name, root=root) for root in roots)
    return ParsedDocuments(documents=tuple(documents), problems=tuple(problems))


def _read_base(path: str) -> ParsedDocuments:
    """Return the documents of an overlay's base."""
    return _read_texts(sources.read_all([path], recursive=True, stdin=None))


def _unpacked(root: YamlNode) -> list[YamlNode]:
    """Return the items of a `kind: List`, which `get -o yaml` writes for several objects."""
    content = root.content
    if not isinstance(content, dict) or set(content) - {"apiVersion", "kind", "metadata", "items"}:
        return [root]
    kind, items = nodes.find_node(root, ("kind",)), nodes.find_node(root, ("items",))
    is_list = kind is not None and kind.content == "List"
    if not is_list or items is None or not isinstance(items.content, list):
        return [root]
    return items.content


def _read_documents(
    documents: Iterable[Document],
) -> tuple[list[LoadedObject], list[ManifestError]]:
    loaded: list[LoadedObject] = []
    problems: list[ManifestError] = []
    places: dict[ObjectKey, Document] = {}
    for document in documents:
        found = _object(document)
        problems.extend(found if isinstance(found, list) else [])
        key = ObjectKey(document.text_at("kind") or "", document.text_at("metadata", "name") or "")
        if all(key) and key in places:
            problems.append(_duplicate(document, places[key]))
        elif isinstance(found, ApiObject):
            loaded.append(LoadedObject(obj=found, document=document))
        places.setdefault(key, document)
    return loaded, problems


def _duplicate(document: Document, first: Document) -> ManifestError:
    there = f"{first.source}:{first.line}"
    hint = "Remove one of them, or give it another name"
    return document.problem(
        ("metadata", "name"), f"is declared twice, first at {there}", hint, at_key=True
    )


def _object(document: Document) -> ApiObject | list[ManifestError]:
    """Return the document as an object, or all its problems."""
    declared = document.tree
    if not isinstance(declared, dict):
        message = f"expected an object, got {suggestions.describe_node(document.root)}"
        return [document.problem((), message, "Begin with: apiVersion, kind, metadata, spec")]
    problems = _version_problems(document)
    kind = _kind(document)
    if isinstance(kind, ManifestError):
        return [*problems, kind]
    tree, owned = _without_fleet_owned(document, declared)
    problems.extend(owned)
    try:
        api_object = kind.type.model_validate_json(_json(tree), by_alias=True, by_name=False)
    except ValidationError as error:
        details = validation_errors.relevant_errors(error, document.root)
        # apiVersion was checked above, with a better message
        rest = [d for d in details if d["loc"] != ("apiVersion",)]
        return [*problems, *(_manifest_error(document, d, kind.type) for d in rest)]
    return problems or api_object


def _json(tree: object) -> str | bytes:
    """Return the JSON that pydantic checks: strict models refuse the lists of Python where a field has a tuple."""
    try:
        return to_json(tree)
    except PydanticSerializationError:  # half of a pair of surrogates, which pydantic then reports
        return json.dumps(tree)


def _version_problems(document: Document) -> list[ManifestError]:
    if document.text_at("apiVersion") == API_VERSION:
        return []
    node = nodes.find_node(document.root, ("apiVersion",))
    hint = f"Write: apiVersion: {API_VERSION}"
    if node is None:
        return [document.problem(("apiVersion",), "is required but not given", hint)]
    message = f"unknown version {suggestions.describe_node(node)}; there is only {API_VERSION}"
    return [document.problem(("apiVersion",), message, hint)]


def _kind(document: Document) -> Kind | ManifestError:
    """Return the kind if users may write it, or the problem."""
    known = [kind.name for kind in kinds.KINDS if kind.written_by_users]
    word = document.text_at("kind")
    if word is None:
        node = nodes.find_node(document.root, ("kind",))
        if node is None:
            every = f"One of: {', '.join(known)}"
            return document.problem(("kind",), "is required but not given", every)
        return document.problem(
            ("kind",), f"expected a string, got {suggestions.describe_node(node)}"
        )
    kind = kinds.by_name(word)
    if kind is None and word.lower() in ("apikey", "apikeys"):
        return document.problem(("kind",), _API_KEY, "Run: fleetctl create apikey NAME")
    if kind is None:
        alias = kinds.by_alias(word)
        options = [alias.name] if alias is not None and alias.written_by_users else known
        hint = suggestions.did_you_mean(alias.name if alias else word, options, "Known are")
        return document.problem(("kind",), f"unknown kind {json.dumps(word)}", hint)
    if not kind.written_by_users:
        writer = _WRITERS.get(kind.name, "the fleet writes it")
        return document.problem(("kind",), f"users cannot write a {kind.name}: {writer}")
    return kind


def _without_fleet_owned(
    document: Document, declared: dict[str, Tree]
) -> tuple[object, list[ManifestError]]:
    """Return the tree without the fleet's fields, and a problem for each unless `get` printed the document."""
    tree = {**declared}
    metadata = tree.get("metadata")
    owned: list[Path] = [("status",)] if "status" in tree else []
    if isinstance(metadata, dict):
        owned.extend(("metadata", alias) for alias in _OWNED if alias in metadata)
        tree["metadata"] = {k: v for k, v in metadata.items() if k not in _OWNED}
    tree.pop("status", None)
    if document.is_printed:
        return _without_derived_labels(tree, declared), []
    message = "is set by the fleet"
    return tree, [document.problem(p, message, "Remove it", at_key=True) for p in owned]


def _without_derived_labels(tree: dict[str, Tree], printed: dict[str, Tree]) -> dict[str, Tree]:
    """Return a node without the labels that `fleetctl get` adds; stored, they would become stale."""
    metadata = tree["metadata"]
    assert isinstance(metadata, dict)
    labels = metadata.get("labels")
    if tree.get("kind") != "Node" or "name" not in metadata or not isinstance(labels, dict):
        return tree
    derived = derived_labels(printed)
    own = {key: value for key, value in labels.items() if derived.get(key) != value}
    return {**tree, "metadata": {**metadata, "labels": own}}


def _manifest_error(
    document: Document, found: ErrorDetails, model: type[ApiModel]
) -> ManifestError:
    is_key = bool(found["loc"]) and found["loc"][-1] == "[key]"
    path = found["loc"][:-1] if is_key else found["loc"]
    node = nodes.find_node(document.root, path)
    if is_key and node is not None:  # not the key's value, but the key is wrong
        node = YamlNode(mark=node.mark, content=str(path[-1]), text=str(path[-1]))
    message, hint = validation_errors.explain_error(found, path=path, node=node, model=model)
    at_key = is_key or found["type"] in ("missing", "extra_forbidden")
    return document.problem(path, message, hint, at_key=at_key)
