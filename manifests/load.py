"""Manifests to typed objects that know their file and line. Reads files; never the store.

Fields that the fleet keeps (`status`, and in `metadata` what `schemas.meta.FLEET_OWNED` lists) are
refused, because they would have no effect. One exception: an object with a `metadata.uid` is output of
`fleetctl get -o yaml` that somebody applies again, and there they are dropped without a word.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from manifests import complaints, nodes, sources, wording, words, yamlio
from manifests.errors import ManifestError, ManifestErrors
from manifests.nodes import Node
from manifests.tree import Path, key_of, show_path
from schemas import kinds
from schemas.kinds import Kind
from schemas.meta import API_VERSION, FLEET_OWNED, ApiModel, ApiObject, ObjectKey, ObjectMeta

Model = TypeVar("Model", bound=ApiModel)

_WRITERS = {
    "Replica": "the reconciler writes it for a ModelDeployment",
    "Endpoint": "a node's agent writes it for a ready replica",
    "Event": "the fleet writes it",
    "FabricTest": "`fleetctl fabric bench` writes it, for as long as it runs",
}
# Not even its hash: what is in Git is read by more people than may ask for models.
_API_KEY = "an API key is a secret, and secrets do not belong into manifests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document of a file."""

    source: str
    root: Node

    @property
    def line(self) -> int:
        return self.root.mark.line

    def problem(
        self, path: Path, message: str, hint: str = "", *, at_key: bool = False
    ) -> ManifestError:
        """Return a problem of the field, at its place."""
        find = nodes.mark_of_key if at_key else nodes.mark_of_value
        mark = find(self.root, path)
        return ManifestError(
            source=self.source,
            line=mark.line,
            column=mark.column,
            about=self._about(),
            path=show_path(path),
            message=message,
            hint=hint,
        )

    def text_at(self, *path: str) -> str | None:
        """Return the text at the path; None if there is none."""
        node = nodes.find(self.root, path)
        return node.content if node is not None and isinstance(node.content, str) else None

    def _about(self) -> str:
        kind, name = self.text_at("kind"), self.text_at("metadata", "name")
        return f"{kind}/{name}" if kind and name else kind or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An object and where it was declared."""

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


def load_objects(
    paths: Sequence[str], *, recursive: bool = False, stdin: BinaryIO | None = None
) -> list[Loaded]:
    """Return every object in the files, the folders and ("-") standard input.

    Raises:
        ManifestErrors: everything that is wrong in any of them.

    """
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
    documents: list[Document] = []
    problems: list[ManifestError] = []
    for name, text in sources.read_all(paths, recursive=recursive, stdin=stdin):
        if isinstance(text, ManifestError):
            problems.append(text)
            continue
        parsed = yamlio.parse(text, name)
        problems.extend(parsed.problems)
        roots = [item for root in parsed.documents for item in _unpacked(root)]
        documents.extend(Document(source=name, root=root) for root in roots)
    if not documents and not problems:
        named = ", ".join(sources.STDIN_NAME if p == sources.STDIN else p for p in paths)
        message = "no object in it: it is empty, or has only comments"
        problems.append(ManifestError(source=named or "no file", message=message))
    return documents, problems


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
    if not isinstance(document.root.content, dict):
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
    node = nodes.find(document.root, ("apiVersion",))
    hint = f"Write: apiVersion: {API_VERSION}"
    if node is None:
        return [document.problem(("apiVersion",), "is required but not given", hint)]
    if node.content == API_VERSION:
        return []
    message = f"unknown version {words.show(node)}; there is only {API_VERSION}"
    return [document.problem(("apiVersion",), message, hint)]


def _kind(document: Document) -> Kind | ManifestError:
    """Return the kind that users may write."""
    known = [kind.name for kind in kinds.KINDS if kind.written_by_users]
    node = nodes.find(document.root, ("kind",))
    if node is None:
        every = f"One of: {', '.join(known)}"
        return document.problem(("kind",), "is required but not given", every)
    word = document.text_at("kind")
    if word is None:
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
    tree = nodes.plain(document.root)
    assert isinstance(tree, dict)
    metadata = tree.get("metadata")
    aliases = [ObjectMeta.model_fields[name].alias or name for name in FLEET_OWNED]
    owned: list[Path] = [("status",)] if "status" in tree else []
    if isinstance(metadata, dict):
        owned.extend(("metadata", alias) for alias in aliases if alias in metadata)
        tree["metadata"] = {k: v for k, v in metadata.items() if k not in aliases}
    tree.pop("status", None)
    if document.text_at("metadata", "uid"):
        return tree, []
    message = "is written by the fleet"
    return tree, [document.problem(p, message, "Remove it", at_key=True) for p in owned]


def _translated(document: Document, found: ErrorDetails, model: type[ApiModel]) -> ManifestError:
    is_key = bool(found["loc"]) and found["loc"][-1] == "[key]"
    path = found["loc"][:-1] if is_key else found["loc"]
    node = nodes.find(document.root, path)
    message, hint = wording.explain(found, path=path, node=node, model=model)
    at_key = is_key or found["type"] in ("missing", "extra_forbidden")
    return document.problem(path, message, hint, at_key=at_key)
