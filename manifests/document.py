"""A document of a manifest, and the object it declares, with where everything in it stands. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from manifests import nodes
from manifests.errors import ManifestError
from manifests.nodes import Node
from manifests.tree import Path, Tree, key_of, show_path
from schemas.meta import ApiObject, ObjectKey


class Document:
    """One document of a file: its value, and where everything in it stands.

    Most files have no faults, and nobody asks for the places in them: they may be given as a way to find them out.
    """

    __slots__ = ("_root", "_tree", "source")

    def __init__(self, *, source: str, root: Node | Callable[[], Node], tree: Tree = None) -> None:
        self.source = source
        self._root = root
        self._tree = tree

    @property
    def root(self) -> Node:
        """The value with its places."""
        if not isinstance(self._root, Node):
            self._root = self._root()
        return self._root

    @property
    def tree(self) -> Tree:
        """The value."""
        return nodes.plain(self.root) if self._tree is None else self._tree

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
            source=mark.source or self.source,
            line=mark.line,
            column=mark.column,
            about=self._about(),
            path=show_path(path),
            message=message,
            hint=hint,
        )

    def text_at(self, *path: str) -> str | None:
        """Return the text at the path; None if there is none."""
        found = self.tree
        for part in path:
            found = found.get(part) if isinstance(found, dict) else None
        return found if isinstance(found, str) else None

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
