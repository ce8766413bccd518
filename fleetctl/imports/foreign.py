"""Another tool's configuration, asked field by field, so that nothing it says is lost without a word. Pure."""

import math
import re
from collections.abc import Mapping, Sequence

from fleetctl.imports import telling
from fleetctl.imports.telling import Reason
from manifests import nodes, words, yamlio
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import Document
from manifests.nodes import Node
from manifests.tree import Path, show_path

_ASSIGNED = re.compile(r"(?:^|\s)(?:export\s+)?[A-Za-z_][A-Za-z0-9_]*=")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def documents(text: str, source: str) -> list[Document]:
    """Return the documents of a YAML file: mappings and lists.

    Raises:
        ManifestErrors: it is no YAML, is empty, or is nothing but a text.

    """
    parsed = yamlio.parse(text, source)
    if parsed.problems:
        raise ManifestErrors(parsed.problems)
    found = [Document(source=source, root=root) for root in parsed.documents]
    problems = [_no_fields(one) for one in found if not isinstance(one.root.content, dict | list)]
    if not found:
        problems.append(ManifestError(source=source, message="says nothing"))
    if problems:
        raise ManifestErrors(problems)
    return found


def _no_fields(document: Document) -> ManifestError:
    # Its text is not shown: what is taken for YAML by mistake may well be a file of secrets.
    is_env = _ASSIGNED.search(document.root.text) is not None
    hint = "It looks like an .env file; did you mean import ring?" if is_env else ""
    return document.problem((), "expected YAML with fields, got one bare value", hint)


class Foreign:
    """A mapping of another tool's file, with all below it.

    Names are found however they are spelled: `bind_address` and `bindAddress` are one; tools changed their minds.
    """

    def __init__(self, document: Document, at: Path = ()) -> None:
        self.document = document
        self.problems: list[ManifestError] = []
        self._at = at
        self._used: set[Path] = set()
        self._told: dict[Path, str] = {}

    def below(self, *path: str | int) -> "Foreign | None":
        """Return the mapping at the path, which shares what was used and found wrong; None if it is not there."""
        found = self.where(*path)
        node = self._node(found)
        if found is None or node is None or not isinstance(node.content, dict):
            return None
        made = Foreign(self.document, found)
        made.problems, made._used, made._told = self.problems, self._used, self._told
        return made

    def where(self, *path: str | int) -> Path | None:
        """Return the path as the file spells it; None if there is nothing."""
        found = self._at
        for part in path:
            node = nodes.find(self.document.root, found)
            content = node.content if node is not None else None
            if isinstance(content, list) and isinstance(part, int) and part < len(content):
                found = (*found, part)
                continue
            keys = content if isinstance(content, dict) else {}
            key = next(
                (key for key in keys if telling.squeezed(key) == telling.squeezed(str(part))), None
            )
            if key is None:
                return None
            found = (*found, key)
        return found

    def text(self, *path: str | int) -> str | None:
        """Return the text at the path; a number counts as it is spelled, nothing at all as None."""
        found = self._scalar(path)
        return None if found is None else (found.text or str(found.content))

    def number(self, *path: str | int, least: float = 0) -> float | None:
        """Return the number at the path, also if it is quoted."""
        node = self._scalar(path)
        if node is None:
            return None
        try:
            found = float(node.text)
        except ValueError:
            found = math.nan
        if not least <= found < math.inf or isinstance(node.content, bool):
            self.refuse(path, f"expected a number of {least:g} or more, got {words.show(node)}")
            return None
        return found

    def whole(self, *path: str | int, least: int = 0) -> int | None:
        """Return the whole number at the path."""
        found = self.number(*path, least=least)
        if found is not None and found != int(found):
            self.refuse(path, f"expected a whole number, got {found:g}")
            return None
        return None if found is None else int(found)

    def truth(self, *path: str | int) -> bool | None:
        """Return what is said at the path, in the words of YAML 1.1 and 1.2."""
        node = self._scalar(path)
        if node is None:
            return None
        word = node.text.lower()
        if word not in (*_TRUE, *_FALSE):
            self.refuse(path, f"expected true or false, got {words.show(node)}")
        return word in _TRUE

    def one_of(self, known: Mapping[str, str], *path: str | int) -> str | None:
        """Return what the word at the path means."""
        word = self.text(*path)
        if word is None:
            return None
        meant = {telling.squeezed(name): meaning for name, meaning in known.items()}
        if telling.squeezed(word) not in meant:
            hint = words.did_you_mean(word, list(known), "Known are")
            self.refuse(path, f"is {word[:40]!r}, which means nothing here", hint)
            return None
        return meant[telling.squeezed(word)]

    def texts(self, *path: str | int) -> list[str]:
        """Return the texts of the list at the path; one text stands for a list of one, with commas between them."""
        node = self._node(self.where(*path))
        if node is None:
            return []
        if isinstance(node.content, list):
            made = [self.text(*path, index) for index in range(len(node.content))]
            return [one for one in made if one is not None]
        return [one.strip() for one in (self.text(*path) or "").split(",") if one.strip()]

    def count(self, *path: str | int) -> int:
        """Return how many items the list at the path has; 0 if there is none."""
        node = self._node(self.where(*path))
        if node is not None and node.content is not None and not isinstance(node.content, list):
            self.refuse(path, f"expected a list, got {words.show(node)}")
        return len(node.content) if node is not None and isinstance(node.content, list) else 0

    def refuse(self, path: Sequence[str | int], message: str, hint: str = "") -> None:
        """Note what is wrong at the path; `checked` raises it."""
        found = self.where(*path)
        where = found if found is not None else (*self._at, *path)
        self.problems.append(self.document.problem(where, message, hint))

    def tell(self, path: Sequence[str | int], why: str) -> None:
        """Have `left` speak of what stands at the path, although it was read, with this reason."""
        found = self.where(*path)
        if found is not None:
            self._used.discard(found)
            self._told[found] = why

    def checked(self) -> None:
        """Raise what was found wrong.

        Raises:
            ManifestErrors: something was.

        """
        if self.problems:
            raise ManifestErrors(self.problems)

    def left(self, reasons: Mapping[str, Reason], otherwise: str) -> list[str]:
        """Return lines for everything that nobody asked for, what has one reason together.

        `reasons` are by path, in which `*` is any name; the longest that fits counts.
        """
        found: dict[str, list[str]] = {}
        for path, node in telling.leaves(self._at, self._node(self._at)):
            if path in self._used:
                continue
            inner = path[len(self._at) :]
            reason = telling.reason(reasons, [str(part) for part in inner if isinstance(part, str)])
            why = self._told.get(path, reason.says if reason is not None else otherwise)
            lines = found.setdefault(why, [])
            if reason is None or reason.is_shown:
                line = nodes.mark_of_key(self.document.root, path).line
                lines.append(f"line {line}: {show_path(inner)}: {telling.value(path, node)}")
        return [line for why, lines in found.items() for line in telling.told(why, lines)]

    def _node(self, path: Path | None) -> Node | None:
        return None if path is None else nodes.find(self.document.root, path)

    def _scalar(self, path: Sequence[str | int]) -> Node | None:
        found = self.where(*path)
        node = self._node(found)
        if found is None or node is None:
            return None
        if isinstance(node.content, dict | list):
            self.refuse(path, f"expected one value, got {words.show(node)}")
            return None
        self._used.add(found)
        return None if node.content is None or node.content == "" else node
