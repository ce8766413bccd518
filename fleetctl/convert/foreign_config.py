"""What a comment says of a part of another tool's file that has no counterpart. Pure.

Another tool's configuration, asked field by field, so that nothing it says is lost without a word. Pure.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleetctl.support_bundle import redaction
from manifests import suggestions
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import Document
from manifests.trees import Path, show_path
from manifests.yaml import nodes, parser
from manifests.yaml.nodes import YamlNode

# A comment is read by whoever may read the repository; who holds a secret keeps it elsewhere.
_SECRET = re.compile(
    r"password|passwd|secret|token(?!s)|api_?key|credential|(^|[._])key($|[._])", re.IGNORECASE
)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class OmissionReason:
    """Why a part of a file has no counterpart."""

    says: str
    """What is instead of it, or what to do."""
    is_shown: bool = True
    """Whether each value below it is worth a comment of its own."""


def leaf_nodes(path: Path, node: YamlNode | None) -> Iterator[tuple[Path, YamlNode]]:
    if node is None:
        return
    if isinstance(node.content, dict):
        for key, entry in node.content.items():
            yield from leaf_nodes((*path, key), entry.node)
    elif isinstance(node.content, list):
        for index, item in enumerate(node.content):
            yield from leaf_nodes((*path, index), item)
    elif node.content is not None and node.content != "":
        yield path, node


def find_reason(
    reasons: Mapping[str, OmissionReason], inner: Sequence[str]
) -> OmissionReason | None:
    """Return the reason of the longest path that fits."""
    said = [normalize_key(part) for part in inner]
    fitting = [
        (len(names), reason)
        for path, reason in reasons.items()
        if len(names := [normalize_key(part) for part in path.split(".")]) <= len(said)
        and all(name in ("*", part) for name, part in zip(names, said, strict=False))
    ]
    return max(fitting, key=lambda one: one[0])[1] if fitting else None


def reason_lines(why: str, lines: Sequence[str]) -> list[str]:
    if len(lines) == 1:
        return [f"{lines[0]}: {why}"]
    return [f"{why}{':' if lines else ''}", *(f"  {line}" for line in lines)]


def shown_value(path: Path, node: YamlNode) -> str:
    if any(_SECRET.search(str(part)) for part in path):
        return "(a secret, not copied)"
    text = _USER_IN_URL.sub("", node.text.replace("\n", " "))
    if redaction.REDACTED in redaction.redact_text(text):
        return "(a secret, not copied)"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def normalize_key(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


_ASSIGNED = re.compile(r"(?:^|\s)(?:export\s+)?[A-Za-z_][A-Za-z0-9_]*=")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def read_documents(text: str, source: str) -> list[Document]:
    """Return the documents of a YAML file: mappings and lists.

    Raises:
        ManifestErrors: it is no YAML, is empty, or is nothing but a text.

    """
    parsed = parser.parse(text, source)
    if parsed.problems:
        raise ManifestErrors(parsed.problems)
    found = [Document(source=source, root=root) for root in parsed.documents]
    problems = [
        _no_fields_error(one) for one in found if not isinstance(one.root.content, dict | list)
    ]
    if not found:
        problems.append(ManifestError(source=source, message="says nothing"))
    if problems:
        raise ManifestErrors(problems)
    return found


def _no_fields_error(document: Document) -> ManifestError:
    # Its text is not shown: what is taken for YAML by mistake may well be a file of secrets.
    is_env = _ASSIGNED.search(document.root.text) is not None
    hint = "It looks like an .env file; did you mean import ring?" if is_env else ""
    return document.problem((), "expected YAML with fields, got one bare value", hint)


class ForeignConfig:
    """A mapping of another tool's file, with all below it.

    Names are found however they are spelled: `bind_address` and `bindAddress` are one; tools changed their minds.
    """

    def __init__(self, document: Document, at: Path = ()) -> None:
        self.document = document
        self.problems: list[ManifestError] = []
        self._at = at
        self._used: set[Path] = set()
        self._told: dict[Path, str] = {}

    def below(self, *path: str | int) -> "ForeignConfig | None":
        """Return the mapping at the path, which shares what was used and found wrong; None if it is not there."""
        found = self.where(*path)
        node = self._node(found)
        if found is None or node is None or not isinstance(node.content, dict):
            return None
        made = ForeignConfig(self.document, found)
        made.problems, made._used, made._told = self.problems, self._used, self._told
        return made

    def where(self, *path: str | int) -> Path | None:
        """Return the path as the file spells it; None if there is nothing."""
        found = self._at
        for part in path:
            node = nodes.find_node(self.document.root, found)
            content = node.content if node is not None else None
            if isinstance(content, list) and isinstance(part, int) and part < len(content):
                found = (*found, part)
                continue
            keys = content if isinstance(content, dict) else {}
            key = next(
                (key for key in keys if normalize_key(key) == normalize_key(str(part))), None
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
            self.refuse(
                path,
                f"expected a number of {least:g} or more, got {suggestions.describe_node(node)}",
            )
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
            self.refuse(path, f"expected true or false, got {suggestions.describe_node(node)}")
        return word in _TRUE

    def one_of(self, known: Mapping[str, str], *path: str | int) -> str | None:
        """Return what the word at the path means."""
        word = self.text(*path)
        if word is None:
            return None
        meant = {normalize_key(name): meaning for name, meaning in known.items()}
        if normalize_key(word) not in meant:
            hint = suggestions.did_you_mean(word, list(known), "Known are")
            self.refuse(path, f"is {word[:40]!r}, which means nothing here", hint)
            return None
        return meant[normalize_key(word)]

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
            self.refuse(path, f"expected a list, got {suggestions.describe_node(node)}")
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

    def left(self, reasons: Mapping[str, OmissionReason], otherwise: str) -> list[str]:
        """Return lines for everything that nobody asked for, what has one reason together.

        `reasons` are by path, in which `*` is any name; the longest that fits counts.
        """
        found: dict[str, list[str]] = {}
        for path, node in leaf_nodes(self._at, self._node(self._at)):
            if path in self._used:
                continue
            inner = path[len(self._at) :]
            reason = find_reason(reasons, [str(part) for part in inner if isinstance(part, str)])
            why = self._told.get(path, reason.says if reason is not None else otherwise)
            lines = found.setdefault(why, [])
            if reason is None or reason.is_shown:
                line = nodes.mark_of_key(self.document.root, path).line
                lines.append(f"line {line}: {show_path(inner)}: {shown_value(path, node)}")
        return [line for why, lines in found.items() for line in reason_lines(why, lines)]

    def _node(self, path: Path | None) -> YamlNode | None:
        return None if path is None else nodes.find_node(self.document.root, path)

    def _scalar(self, path: Sequence[str | int]) -> YamlNode | None:
        found = self.where(*path)
        node = self._node(found)
        if found is None or node is None:
            return None
        if isinstance(node.content, dict | list):
            self.refuse(path, f"expected one value, got {suggestions.describe_node(node)}")
            return None
        self._used.add(found)
        return None if node.content is None or node.content == "" else node
