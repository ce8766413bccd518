"""Configuration of another tool, read field by field, with a comment line for every setting that is not converted.

Pure. `ForeignConfig` records which values were read; `omission_lines` reports all others.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fleetctl.support_bundle import redaction
from manifests import suggestions
from manifests.documents import Document
from manifests.errors import ManifestError, ManifestErrors
from manifests.trees import Path, show_path
from manifests.yaml import comments, nodes, parser
from manifests.yaml.nodes import YamlNode
from schemas import duration

# Comments end up in repositories, so values of keys that look secret are never copied into one.
_SECRET = re.compile(
    r"password|passwd|secret|token(?!s)|api_?key|credential|(^|[._])key($|[._])", re.IGNORECASE
)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_MAX_VALUE_LENGTH = 80
_MAX_COMMENT_LENGTH = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class OmissionReason:
    """Explanation for a setting that has no counterpart in a manifest."""

    text: str
    """The fleet's alternative, or what to do."""
    is_shown: bool = True
    """True if each value below the path gets its own comment line."""


def leaf_nodes(path: Path, node: YamlNode | None) -> Iterator[tuple[Path, YamlNode]]:
    """Yield every scalar below the node with its path; skip empty ones."""
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
    """Return the reason with the longest matching path; `*` in a path matches any name."""
    parts = [normalize_key(part) for part in inner]
    matching = [
        (len(names), reason)
        for path, reason in reasons.items()
        if len(names := [normalize_key(part) for part in path.split(".")]) <= len(parts)
        and all(name in ("*", part) for name, part in zip(names, parts, strict=False))
    ]
    return max(matching, key=lambda match: match[0])[1] if matching else None


def reason_lines(why: str, lines: Sequence[str]) -> list[str]:
    """Return comment lines: a single setting with its reason, or the reason above its settings."""
    if len(lines) == 1:
        return [f"{lines[0]}: {why}"]
    return [f"{why}{':' if lines else ''}", *(f"  {line}" for line in lines)]


def shown_value(path: Path, node: YamlNode) -> str:
    """Return the value for a comment, shortened; secrets are replaced."""
    if any(_SECRET.search(str(part)) for part in path):
        return "(a secret, not copied)"
    text = _USER_IN_URL.sub("", node.text.replace("\n", " "))
    if redaction.REDACTED in redaction.redact_text(text):
        return "(a secret, not copied)"
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 3]}..."


def shown_comment(text: str) -> str:
    """Return a comment for a manifest, shortened; one that looks like a secret is replaced."""
    if (_SECRET.search(text) and re.search(r"[:=]", text)) or (
        redaction.REDACTED in redaction.redact_text(text)
    ):
        return " (a comment that may hold a secret, not copied)"
    shown = _USER_IN_URL.sub("", "".join(char if char.isprintable() else "?" for char in text))
    return shown if len(shown) <= _MAX_COMMENT_LENGTH else f"{shown[: _MAX_COMMENT_LENGTH - 3]}..."


def normalize_key(word: str) -> str:
    """Return the key in lower case without separators: `bind_address` and `bindAddress` are equal."""
    return word.lower().replace("_", "").replace("-", "")


_ASSIGNED = re.compile(r"(?:^|\s)(?:export\s+)?[A-Za-z_][A-Za-z0-9_]*=")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def read_documents(text: str, source: str) -> list[Document]:
    """Return the documents of a YAML file; each is a mapping or a list.

    Raises:
        ManifestErrors: the file is not YAML, is empty, or holds a bare value.

    """
    parsed = parser.parse(text, source)
    if parsed.problems:
        raise ManifestErrors(parsed.problems)
    found = comments.read_comments(text, parsed.documents)
    documents = [
        Document(source=source, root=root, comments=own)
        for root, own in zip(parsed.documents, found, strict=True)
    ]
    problems = [
        _no_fields_error(document)
        for document in documents
        if not isinstance(document.root.content, dict | list)
    ]
    if not documents:
        problems.append(ManifestError(source=source, message="the file is empty"))
    if problems:
        raise ManifestErrors(problems)
    return documents


def _no_fields_error(document: Document) -> ManifestError:
    # Do not show the text: a file that is mistaken for YAML may contain secrets.
    is_env = _ASSIGNED.search(document.root.text) is not None
    hint = "It looks like an .env file; did you mean import ring?" if is_env else ""
    return document.problem((), "expected YAML with fields, got one bare value", hint)


class ForeignConfig:
    """A mapping in another tool's file, with everything below it.

    Keys match in any spelling (`bind_address`, `bindAddress`), because tools changed their spelling between releases.
    """

    def __init__(self, document: Document, at: Path = ()) -> None:
        self.document = document
        self.problems: list[ManifestError] = []
        self._at = at
        self._used: set[Path] = set()
        self._explanations: dict[Path, str] = {}
        self.taken_comments: set[Path] = set()
        """The places whose comments have been copied into a manifest."""

    @property
    def at(self) -> Path:
        """The place of this mapping in the document."""
        return self._at

    def section(self, *path: str | int) -> "ForeignConfig | None":
        """Return the mapping at the path, or None; it shares the lists of read values and problems."""
        found = self.find_path(*path)
        node = self._node(found)
        if found is None or node is None or not isinstance(node.content, dict):
            return None
        section = ForeignConfig(self.document, found)
        section.problems, section._used = self.problems, self._used
        section._explanations = self._explanations
        section.taken_comments = self.taken_comments
        return section

    def find_path(self, *path: str | int) -> Path | None:
        """Return the path in the file's own spelling; None if it does not exist."""
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
        """Return the text at the path; a number keeps its spelling, an empty value is None."""
        node = self._scalar(path)
        return None if node is None else (node.text or str(node.content))

    def number(self, *path: str | int, least: float = 0) -> float | None:
        """Return the number at the path, quoted or not."""
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

    def seconds(self, *path: str | int) -> float | None:
        """Return the seconds at the path: a number, or a duration such as 10s or 500ms."""
        node = self._scalar(path)
        if node is None or isinstance(node.content, bool):
            return self.number(*path)
        with suppress(ValueError):
            return duration.parse(node.text)
        return self.number(*path)

    def integer(self, *path: str | int, least: int = 0) -> int | None:
        """Return the integer at the path."""
        found = self.number(*path, least=least)
        if found is not None and found != int(found):
            self.refuse(path, f"expected a whole number, got {found:g}")
            return None
        return None if found is None else int(found)

    def boolean(self, *path: str | int) -> bool | None:
        """Return the truth value at the path, in any spelling of YAML 1.1 and 1.2."""
        node = self._scalar(path)
        if node is None:
            return None
        word = node.text.lower()
        if word not in (*_TRUE, *_FALSE):
            self.refuse(path, f"expected true or false, got {suggestions.describe_node(node)}")
        return word in _TRUE

    def choice(self, known: Mapping[str, str], *path: str | int) -> str | None:
        """Return the meaning of the word at the path; `known` maps words to meanings."""
        word = self.text(*path)
        if word is None:
            return None
        meanings = {normalize_key(name): meaning for name, meaning in known.items()}
        if normalize_key(word) not in meanings:
            hint = suggestions.did_you_mean(word, list(known), "Known values are")
            self.refuse(path, f"has the unknown value {word[:40]!r}", hint)
            return None
        return meanings[normalize_key(word)]

    def text_list(self, *path: str | int) -> list[str]:
        """Return the texts of the list at the path; a single text is split at commas."""
        node = self._node(self.find_path(*path))
        if node is None:
            return []
        if isinstance(node.content, list):
            items = [self.text(*path, index) for index in range(len(node.content))]
            return [item for item in items if item is not None]
        return [item.strip() for item in (self.text(*path) or "").split(",") if item.strip()]

    def count(self, *path: str | int) -> int:
        """Return the length of the list at the path; 0 if there is none."""
        node = self._node(self.find_path(*path))
        if node is not None and node.content is not None and not isinstance(node.content, list):
            self.refuse(path, f"expected a list, got {suggestions.describe_node(node)}")
        return len(node.content) if node is not None and isinstance(node.content, list) else 0

    def keys(self, *path: str | int) -> list[str]:
        """Return the keys of the mapping at the path, in the file's order; none if there is no mapping."""
        node = self._node(self.find_path(*path))
        return list(node.content) if node is not None and isinstance(node.content, dict) else []

    def refuse(self, path: Sequence[str | int], message: str, hint: str = "") -> None:
        """Record a problem at the path; `raise_problems` raises it."""
        found = self.find_path(*path)
        place = found if found is not None else (*self._at, *path)
        self.problems.append(self.document.problem(place, message, hint))

    def explain(self, path: Sequence[str | int], why: str) -> None:
        """Make `omission_lines` report the value at the path with this reason, although it was read."""
        found = self.find_path(*path)
        if found is not None:
            self._used.discard(found)
            self._explanations[found] = why

    def raise_problems(self) -> None:
        """Raise all recorded problems.

        Raises:
            ManifestErrors: there is at least one problem.

        """
        if self.problems:
            raise ManifestErrors(self.problems)

    def omission_lines(self, reasons: Mapping[str, OmissionReason], otherwise: str) -> list[str]:
        """Return comment lines for every value that was not read, grouped by reason.

        `reasons` maps paths to reasons; `*` matches any name, and the longest matching path counts. `otherwise` is
        the reason of values without a match.
        """
        lines_by_reason: dict[str, list[str]] = {}
        for path, node in leaf_nodes(self._at, self._node(self._at)):
            if path in self._used:
                continue
            inner = path[len(self._at) :]
            reason = find_reason(reasons, [str(part) for part in inner if isinstance(part, str)])
            why = self._explanations.get(path, reason.text if reason is not None else otherwise)
            lines = lines_by_reason.setdefault(why, [])
            if reason is None or reason.is_shown:
                line = nodes.mark_of_key(self.document.root, path).line
                lines.append(f"line {line}: {show_path(inner)}: {shown_value(path, node)}")
        return [line for why, lines in lines_by_reason.items() for line in reason_lines(why, lines)]

    def _node(self, path: Path | None) -> YamlNode | None:
        return None if path is None else nodes.find_node(self.document.root, path)

    def _scalar(self, path: Sequence[str | int]) -> YamlNode | None:
        found = self.find_path(*path)
        node = self._node(found)
        if found is None or node is None:
            return None
        if isinstance(node.content, dict | list):
            self.refuse(path, f"expected one value, got {suggestions.describe_node(node)}")
            return None
        self._used.add(found)
        return None if node.content is None or node.content == "" else node
