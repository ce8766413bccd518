"""Files of other tools, read value by value: YAML, and variables of .env files and Makefiles. Pure.

A `Source` records which values were read; `omission_lines` reports all others.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from machinery import redaction
from manifests import suggestions
from manifests.documents import Document
from manifests.errors import ManifestError, ManifestErrors
from manifests.trees import Path, show_path
from manifests.yaml import comments, nodes, parser
from manifests.yaml.comments import DocumentComments, FieldComments
from manifests.yaml.nodes import MappingEntry, Mark, YamlNode
from schemas import duration

# Comments end up in repositories, so values of keys that look secret are never copied into one.
_SECRET = re.compile(
    r"password|passwd|secret|token(?!s)|api_?key|credential|(^|[._])key($|[._])", re.IGNORECASE
)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_ASSIGNED = re.compile(r"(?:^|\s)(?:export\s+)?[A-Za-z_][A-Za-z0-9_]*=")
_VARIABLE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*(\?|::?)?=\s*(.*?)\s*")
# A rule of a Makefile, a line of its recipe, or a directive.
_MAKE = re.compile(
    r"\t.*|[A-Za-z0-9_.%$() /-]+:(?!=).*"
    r"|\s*(-?include|ifn?def|ifn?eq|else|endif|define|endef|export|unexport)\b.*"
)
NO_COUNTERPART = "the fleet has no such setting"


def normalize_key(word: str) -> str:
    """Return the key in lower case without separators: `bind_address` and `bindAddress` are equal."""
    return word.lower().replace("_", "").replace("-", "")


def shown_comment(text: str) -> str:
    """Return a comment for a manifest, shortened; one that looks like a secret is replaced."""
    has_secret_name = _SECRET.search(text) and re.search(r"[:=]", text)
    if has_secret_name or redaction.REDACTED in redaction.redact_text(text):
        return " (a comment that may hold a secret, not copied)"
    return _shorten("".join(char if char.isprintable() else "?" for char in text), 400)


def _shown_value(path: Path, node: YamlNode) -> str:
    """Return the value for a comment, shortened; secrets are replaced."""
    text = _USER_IN_URL.sub("", node.text.replace("\n", " "))
    has_secret_name = any(_SECRET.search(str(part)) for part in path)
    if has_secret_name or redaction.REDACTED in redaction.redact_text(text):
        return "(a secret, not copied)"
    return _shorten(text, 80)


def _shorten(text: str, length: int) -> str:
    text = _USER_IN_URL.sub("", text)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def read_documents(text: str, source: str) -> list[Document]:
    """Return the documents of a YAML file; each is a mapping or a list.

    Raises:
        ManifestErrors: the file is not YAML, is empty, or holds a bare value.

    """
    parsed = parser.parse(text, source)
    problems = list(parsed.problems)
    found = [] if problems else comments.read_comments(text, parsed.documents)
    documents = [
        Document(source=source, root=root, comments=own)
        for root, own in zip(parsed.documents, found, strict=False)
    ]
    for document in documents:
        if not isinstance(document.root.content, dict | list):
            # Do not show the text: a file that is mistaken for YAML may contain secrets.
            is_env = _ASSIGNED.search(document.root.text) is not None
            hint = "It looks like an .env file; did you mean import ring?" if is_env else ""
            message = "expected YAML with fields, got one bare value"
            problems.append(document.problem((), message, hint))
    if not documents and not problems:
        problems.append(ManifestError(source=source, message="the file is empty"))
    if problems:
        raise ManifestErrors(problems)
    return documents


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvTool:
    """The tool whose variables a file sets."""

    name: str
    known: tuple[str, ...]
    """Variables of which the file must set one: others could belong to any tool."""
    has_makefiles: bool = False
    """True if the tool's variables may be in a Makefile, whose rules are skipped."""


def read_env(text: str, source: str, tool: EnvTool) -> Document:
    """Return the variables as a mapping with line numbers; a later assignment wins, as in python-dotenv.

    In a Makefile, `?=` does not replace an earlier value. The comments above a variable, up to an empty line, are its.

    Raises:
        ManifestErrors: a line sets no variable, or none of the tool's variables is set.

    """
    entries: dict[str, MappingEntry] = {}
    found: dict[Path, FieldComments] = {}
    problems: list[ManifestError] = []
    above: list[str] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        if line.lstrip().startswith("#"):
            above.append(line.lstrip()[1:].rstrip())
            continue
        own, above = above, []
        match = _VARIABLE.fullmatch(line)
        if tool.has_makefiles and (line.startswith("\t") or (not match and _MAKE.fullmatch(line))):
            continue
        if match is not None and (tool.has_makefiles or not match[2]):
            if match[2] != "?" or match[1] not in entries:
                mark, value = Mark(line=number, column=1), _unquote(match[3])
                node = YamlNode(mark=mark, content=value, text=value)
                entries[match[1]] = MappingEntry(mark=mark, node=node)
                found[(match[1],)] = FieldComments(above=tuple(own))
        elif line.strip():
            message = "expected NAME=VALUE"
            problems.append(ManifestError(source=source, line=number, column=1, message=message))
    if not entries:
        hint = "Did you mean import mesh, serving or localai?" if problems else ""
        message = "is not an .env file: no line is NAME=VALUE" if problems else "sets no variables"
        problems = [ManifestError(source=source, message=message, hint=hint)]
    elif not entries.keys() & set(tool.known):
        message = f"sets no variable of {tool.name}, such as {', '.join(tool.known[:3])}"
        problems = [ManifestError(source=source, message=message)]
    if problems:
        raise ManifestErrors(problems)
    root = YamlNode(mark=Mark(line=1, column=1), content=entries)
    return Document(source=source, root=root, comments=DocumentComments(fields=found))


def _unquote(value: str) -> str:
    if value[:1] in ("'", '"'):
        end = value.find(value[0], 1)
        return value[1:end] if end > 0 else value
    return "" if value.startswith("#") else re.split(r"\s+#", value, maxsplit=1)[0]


@dataclass(frozen=True, slots=True)
class Record:
    """Record of what was read of a file; the mappings in it share one."""

    problems: list[ManifestError] = field(default_factory=list)
    used: set[Path] = field(default_factory=set)
    reasons: dict[Path, str] = field(default_factory=dict)
    """Reasons of values that were read but have no counterpart."""
    copied_comments: set[Path] = field(default_factory=set)
    """The places whose comments have been copied into a manifest."""


class Source:
    """A mapping in another tool's file, with everything below it.

    Keys match in any spelling (`bind_address`, `bindAddress`), because tools changed their spelling between releases.
    """

    def __init__(self, document: Document, at: Path = (), record: Record | None = None) -> None:
        """Read the mapping at a place of the document."""
        self.document, self.at = document, at
        self.record = Record() if record is None else record

    def section(self, *path: str | int) -> "Source | None":
        """Return the mapping at the path, or None."""
        place = self.find_path(*path)
        node = self._node(place)
        if place is None or node is None or not isinstance(node.content, dict):
            return None
        return Source(self.document, place, self.record)

    def find_path(self, *path: str | int) -> Path | None:
        """Return the path in the file's own spelling; None if it does not exist."""
        place = self.at
        for part in path:
            node = nodes.find_node(self.document.root, place)
            content = node.content if node is not None else None
            key: str | int | None = None
            if isinstance(content, list) and isinstance(part, int) and part < len(content):
                key = part
            elif isinstance(content, dict):
                word = normalize_key(str(part))
                key = next((name for name in content if normalize_key(name) == word), None)
            if key is None:
                return None
            place = (*place, key)
        return place

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
            value = float(node.text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf or isinstance(node.content, bool):
            got = suggestions.describe_node(node)
            self.refuse(path, f"expected a number of {least:g} or more, got {got}")
            return None
        return value

    def seconds(self, *path: str | int) -> float | None:
        """Return the seconds at the path: a number, or a duration such as 10s or 500ms."""
        node = self._scalar(path)
        if node is not None and not isinstance(node.content, bool):
            with suppress(ValueError):
                return duration.parse(node.text)
        return self.number(*path)

    def integer(self, *path: str | int, least: int = 0) -> int | None:
        """Return the integer at the path."""
        value = self.number(*path, least=least)
        if value is not None and value != int(value):
            self.refuse(path, f"expected a whole number, got {value:g}")
            return None
        return None if value is None else int(value)

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
        return meanings.get(normalize_key(word))

    def text_list(self, *path: str | int) -> list[str]:
        """Return the texts of the list at the path; a single text is split at commas."""
        node = self._node(self.find_path(*path))
        if node is not None and isinstance(node.content, list):
            items = [self.text(*path, index) or "" for index in range(len(node.content))]
        else:
            items = (self.text(*path) or "").split(",")
        return [item.strip() for item in items if item.strip()]

    def count(self, *path: str | int) -> int:
        """Return the length of the list at the path; 0 if there is none."""
        node = self._node(self.find_path(*path))
        if node is None or node.content is None:
            return 0
        if not isinstance(node.content, list):
            self.refuse(path, f"expected a list, got {suggestions.describe_node(node)}")
            return 0
        return len(node.content)

    def keys(self, *path: str | int) -> list[str]:
        """Return the keys of the mapping at the path, in the file's order; none if there is no mapping."""
        node = self._node(self.find_path(*path))
        return list(node.content) if node is not None and isinstance(node.content, dict) else []

    def refuse(self, path: Sequence[str | int], message: str, hint: str = "") -> None:
        """Record a problem at the path; `raise_problems` raises it."""
        place = self.find_path(*path)
        place = (*self.at, *path) if place is None else place
        self.record.problems.append(self.document.problem(place, message, hint))

    def explain(self, path: Sequence[str | int], why: str) -> None:
        """Make `omission_lines` report the value at the path with this reason, although it was read."""
        place = self.find_path(*path)
        if place is not None:
            self.record.used.discard(place)
            self.record.reasons[place] = why

    def raise_problems(self) -> None:
        """Raise all recorded problems.

        Raises:
            ManifestErrors: there is at least one problem.

        """
        if self.record.problems:
            raise ManifestErrors(self.record.problems)

    def omission_lines(self, reasons: Mapping[str, str]) -> list[str]:
        """Return comment lines for every value that was not read, grouped by reason.

        `reasons` maps paths to what the fleet has instead; `*` matches any name, and the longest matching path counts.
        """
        lines_by_reason: dict[str, list[str]] = {}
        for path, node in _leaf_nodes(self.at, self._node(self.at)):
            if path in self.record.used:
                continue
            inner = path[len(self.at) :]
            why = self.record.reasons.get(path) or _find_reason(reasons, inner)
            line = nodes.mark_of_key(self.document.root, path).line
            shown = f"line {line}: {show_path(inner)}: {_shown_value(path, node)}"
            lines_by_reason.setdefault(why, []).append(shown)
        lines: list[str] = []
        for why, values in lines_by_reason.items():
            several = [f"{why}:", *(f"  {value}" for value in values)]
            lines += several if len(values) > 1 else [f"{values[0]}: {why}"]
        return lines

    def _node(self, path: Path | None) -> YamlNode | None:
        return None if path is None else nodes.find_node(self.document.root, path)

    def _scalar(self, path: Sequence[str | int]) -> YamlNode | None:
        place = self.find_path(*path)
        node = self._node(place)
        if place is None or node is None:
            return None
        if isinstance(node.content, dict | list):
            self.refuse(path, f"expected one value, got {suggestions.describe_node(node)}")
            return None
        self.record.used.add(place)
        return None if node.content is None or node.content == "" else node


def _leaf_nodes(path: Path, node: YamlNode | None) -> Iterator[tuple[Path, YamlNode]]:
    """Yield every scalar below the node with its path; skip empty ones."""
    if node is None:
        return
    if isinstance(node.content, dict):
        for key, entry in node.content.items():
            yield from _leaf_nodes((*path, key), entry.node)
    elif isinstance(node.content, list):
        for index, item in enumerate(node.content):
            yield from _leaf_nodes((*path, index), item)
    elif node.content is not None and node.content != "":
        yield path, node


def _find_reason(reasons: Mapping[str, str], path: Path) -> str:
    """Return the reason with the longest matching path."""
    parts = [normalize_key(part) for part in path if isinstance(part, str)]
    best, found = 0, NO_COUNTERPART
    for pattern, reason in reasons.items():
        names = [normalize_key(name) for name in pattern.split(".")]
        is_match = len(names) <= len(parts) and all(
            name in ("*", part) for name, part in zip(names, parts, strict=False)
        )
        if is_match and len(names) > best:
            best, found = len(names), reason
    return found
