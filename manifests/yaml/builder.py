"""Builder of nodes from a parser's events, one document at a time. Does no I/O and imports no YAML library.

It uses a stack instead of recursion, and refuses documents beyond its limits.
"""

from dataclasses import dataclass, field, replace
from typing import NoReturn

from manifests.errors import ManifestError
from manifests.yaml import core_schema
from manifests.yaml.nodes import MappingEntry, Mark, YamlNode

# Deeper than any manifest; far below Python's stack and pydantic's JSON parser (200).
MAX_DEPTH = 64
# The limit of one file, with aliases expanded: about 4,000 deployments, and 5 s of reading.
MAX_NODES = 100_000
# Characters of a text that count as one node.
TEXT_PER_NODE = 40


class StopError(Exception):
    """The rest of the file cannot be read."""

    def __init__(self, problem: ManifestError) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(slots=True, kw_only=True)
class _Frame:
    """A mapping or list that is not complete yet."""

    mark: Mark
    is_mapping: bool
    anchor: str | None
    entries: dict[str, MappingEntry] = field(default_factory=dict)
    items: list[YamlNode] = field(default_factory=list)
    key: tuple[str, Mark] | None = None


class Builder:
    """Collects root nodes from events, and the problems that do not end the document."""

    def __init__(self, source: str) -> None:
        self.roots: list[YamlNode] = []
        self.problems: list[ManifestError] = []
        self._source = source
        self._nodes = 0
        self._stack: list[_Frame] = []
        self._anchors: dict[str, YamlNode] = {}
        self._root: YamlNode | None = None

    @property
    def awaits_value(self) -> bool:
        """True if the value of a field comes next."""
        return bool(self._stack) and self._stack[-1].key is not None

    def begin(self) -> None:
        """Begin a document; anchors are valid in one document."""
        self._stack, self._anchors, self._root = [], {}, None

    def end(self) -> None:
        """Keep the document, unless it is empty; a later one in the file may be broken."""
        if self._root is not None and self._root.content is not None:
            self.roots.append(self._root)

    def scalar(self, mark: Mark, text: str, *, is_plain: bool, anchor: str | None) -> None:
        """Add a scalar, which may be a key."""
        text = self._joined(mark, text)
        content: core_schema.Scalar = text
        if is_plain:
            try:
                content = core_schema.resolve(text)
            except ValueError as error:
                self._add(mark, str(error), "Put it in double quotes if it is a text")
        if self._wants_key():
            self._take_key(mark, content, text, is_plain=is_plain)
            return
        self._count(mark, 1)
        if not text and is_plain and self._stack and self._stack[-1].key is not None:
            mark = self._stack[-1].key[1]  # an empty value is at its key
        size = 1 + len(text) // TEXT_PER_NODE
        self._take(YamlNode(mark=mark, content=content, text=text, size=size), anchor)

    def alias(self, mark: Mark, anchor: str) -> None:
        """Add the node of an anchor once more."""
        node = self._anchors.get(anchor)
        if node is None:
            self.stop(
                mark,
                f"the alias *{anchor} has no complete anchor &{anchor} before it",
                f'Write "*{anchor}" in quotes if it is a text',
            )
        self._count(mark, node.size)
        if self._wants_key():
            self._take_key(mark, node.content, node.text, is_plain=False)
            return
        self._take(replace(node, mark=mark), None)

    def open(self, mark: Mark, *, is_mapping: bool, anchor: str | None) -> None:
        """Begin a mapping or a list."""
        if self._wants_key():
            self.stop(mark, "a field's name must be a text", "Write it as: name: value")
        if len(self._stack) >= MAX_DEPTH:
            self._too_deep(mark)
        self._count(mark, 1)
        self._stack.append(_Frame(mark=mark, is_mapping=is_mapping, anchor=anchor))

    def close(self) -> None:
        """End the innermost mapping or list."""
        frame = self._stack.pop()
        inner = [e.node for e in frame.entries.values()] if frame.is_mapping else frame.items
        node = YamlNode(
            mark=frame.mark,
            content=frame.entries if frame.is_mapping else frame.items,
            size=1 + sum(child.size for child in inner),
            height=1 + max((child.height for child in inner), default=0),
        )
        if len(self._stack) + node.height > MAX_DEPTH:  # aliases add levels as well
            self._too_deep(frame.mark)
        self._take(node, frame.anchor)

    def stop(self, mark: Mark, message: str, hint: str) -> NoReturn:
        """Stop reading the file."""
        raise StopError(self._problem(mark, message, hint))

    def _wants_key(self) -> bool:
        return bool(self._stack) and self._stack[-1].is_mapping and self._stack[-1].key is None

    def _take_key(self, mark: Mark, content: object, text: str, *, is_plain: bool) -> None:
        frame = self._stack[-1]
        if is_plain and text == "<<":
            self._add(mark, "merge keys (<<) are not part of YAML 1.2", "Write the fields out")
        elif not isinstance(content, str):
            self._add(mark, f"a field's name must be a text, not {text}", f'Write: "{text}":')
        frame.key = (text, mark)

    def _take(self, node: YamlNode, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = node
        if not self._stack:
            self._root = node
            return
        frame = self._stack[-1]
        if not frame.is_mapping:
            frame.items.append(node)
            return
        assert frame.key is not None
        (name, mark), frame.key = frame.key, None
        earlier = frame.entries.get(name)
        if earlier is not None:
            there = f"line {earlier.mark.line}"
            self._add(mark, f'"{name}" is given twice, first in {there}', "Remove one of them")
            return
        frame.entries[name] = MappingEntry(mark=mark, node=node)

    def _joined(self, mark: Mark, text: str) -> str:
        """Return the text with JSON's surrogate pairs joined."""
        if text.isascii():
            return text
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self._add(mark, "a text contains half of a surrogate pair", "Write it as UTF-8")
            return text.encode(errors="replace").decode()

    def _count(self, mark: Mark, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            self.stop(
                mark,
                f"the file holds more than {MAX_NODES:,} values, including those that aliases repeat",
                "Split it into several files",
            )

    def _too_deep(self, mark: Mark) -> NoReturn:
        self.stop(mark, f"is nested more than {MAX_DEPTH} levels deep", "Reduce the nesting")

    def _add(self, mark: Mark, message: str, hint: str) -> None:
        self.problems.append(self._problem(mark, message, hint))

    def _problem(self, mark: Mark, message: str, hint: str) -> ManifestError:
        return ManifestError(
            source=self._source, line=mark.line, column=mark.column, message=message, hint=hint
        )
