"""Documents of manifest files: their values, and the places of everything in them. Reads no files."""

from collections.abc import Callable
from dataclasses import dataclass

from manifests.errors import ManifestError
from manifests.trees import Path, Tree, show_path
from manifests.yaml import nodes
from manifests.yaml.comments import NO_COMMENTS, DocumentComments
from manifests.yaml.nodes import YamlNode


class Document:
    """One document of a file: its value, and the places of everything in it.

    Most files have no errors, so places may be given as a function that finds them on first use.
    """

    __slots__ = ("_root", "_tree", "comments", "source")

    def __init__(
        self,
        *,
        source: str,
        root: YamlNode | Callable[[], YamlNode],
        tree: Tree = None,
        comments: DocumentComments = NO_COMMENTS,
    ) -> None:
        """`comments` are known only where a file is converted."""
        self.comments = comments
        self.source = source
        self._root = root
        self._tree = tree

    @property
    def root(self) -> YamlNode:
        """The value with its places."""
        if not isinstance(self._root, YamlNode):
            self._root = self._root()
        return self._root

    @property
    def tree(self) -> Tree:
        """The plain value."""
        return nodes.plain_value(self.root) if self._tree is None else self._tree

    @property
    def line(self) -> int:
        return self.root.mark.line

    @property
    def is_printed(self) -> bool:
        """Return whether the document is output of `fleetctl get -o yaml`: only that has a uid."""
        return bool(self.text_at("metadata", "uid"))

    def problem(
        self, path: Path, message: str, hint: str = "", *, at_key: bool = False
    ) -> ManifestError:
        """Return a problem of the field, with its place."""
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
        if self._tree is None:
            node = nodes.find_node(self.root, path)
            return node.content if node is not None and isinstance(node.content, str) else None
        found: Tree = self._tree
        for part in path:
            found = found.get(part) if isinstance(found, dict) else None
        return found if isinstance(found, str) else None

    def _about(self) -> str:
        kind, name = self.text_at("kind"), self.text_at("metadata", "name")
        return f"{kind}/{name}" if kind and name else kind or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedDocuments:
    """The documents of files, and their problems."""

    documents: tuple[Document, ...] = ()
    problems: tuple[ManifestError, ...] = ()
