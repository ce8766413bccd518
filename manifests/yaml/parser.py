"""Parsing of YAML text, to nodes with places or quickly to plain values. The only importer of ruamel.yaml and PyYAML.

Only the scanner and the parser of both libraries are used, event by event. Values are built here, so that a hostile
file cannot run code, nest deeper than the stack, or grow without limit through aliases.

ruamel reads YAML 1.2 and reports errors well, but is pure Python. libyaml (PyYAML's) is twenty times as fast: it reads
every text that both read alike, and ruamel all others, texts with errors among them. `parse_values` leaves out the
places, which cost more than the values.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from manifests.errors import ManifestError
from manifests.trees import Tree
from manifests.yaml import core_schema
from manifests.yaml.builder import MAX_DEPTH, MAX_NODES, Builder, StopError
from manifests.yaml.core_schema import dump
from manifests.yaml.nodes import Mark, YamlNode

# Part of the scanner's message, our message, and the remedy; first match wins.
_SCANNER_ERRORS: tuple[tuple[str, str, str], ...] = (
    (
        "found character '\\t'",
        "a tab stands where YAML wants spaces",
        "Indent with spaces",
    ),
    (
        "mapping values are not allowed",
        "a ':' stands where no field can begin",
        "Look at the indentation of this line and the one above; quote a text that has ': ' in it",
    ),
    (
        "found unexpected end of stream",
        "the file ends inside a quoted text",
        "Close the quote",
    ),
    (
        "found unexpected document separator",
        "the document ends inside a quoted text",
        "Close the quote",
    ),
    (
        "found unknown escape character",
        "an unknown escape stands in a text in double quotes",
        "Use single quotes, in which a backslash is a backslash",
    ),
    (
        "could not find expected ':'",
        "a line that should be a field has no ':'",
        "Write it as: name: value",
    ),
    (
        "expected <block end>",
        "this line does not belong to the block above",
        "Look at its indentation: fields of one mapping begin in the same column",
    ),
    (
        "expected ',' or",
        "a bracket is not closed, or a ',' is missing",
        "Close every [ and { and put ',' between their items",
    ),
    (
        "expected the node content",
        "the text ends, or a bracket closes, where a value should stand",
        "Write the value, and close every [ and {",
    ),
    (
        "incompatible YAML document",
        "it declares another version of YAML",
        "Remove the %YAML line; manifests are YAML 1.2",
    ),
    (
        "expected '<document start>'",
        "a document ends before this line, and no other begins",
        "Put --- between documents",
    ),
)


def explain_scanner_error(problem: str, context: str, text: str, line: int) -> tuple[str, str]:
    """Return the message of a scanner error, and a hint."""
    lines = text.splitlines()
    # The scanner reports the token after a tab, or the block; users can fix the tab.
    here = lines[line] if line < len(lines) else ""
    if "\t" in here[: len(here) - len(here.lstrip())]:
        problem = "found character '\\t'"
    for piece, message, hint in _SCANNER_ERRORS:
        if piece in problem or piece in repr(problem):
            return message, hint
    if problem.startswith("found character") and "cannot start" in problem:
        char = problem.split("'")[1] if "'" in problem else ""
        return f"a text cannot begin with {char} unless it is quoted", "Put it in double quotes"
    return f"{problem} {context}".strip(), ""


class NotPlainError(Exception):
    """The text contains something that only `Builder` can interpret."""


class ValueBuilder:
    """Collects the values of documents from events; empty documents are left out.

    Anything that needs a place, a check or a limit (anchors, tags, keys that are not texts, duplicates) raises
    NotPlainError: `Builder` reads such texts.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.documents: list[Tree] = []
        self._above: list[tuple[dict[str, Tree] | list[Tree] | None, str | None]] = []
        # The open mapping or list, and the key of a mapping whose value comes next.
        self._open: dict[str, Tree] | list[Tree] | None = None
        self._key: str | None = None
        self._count = 0

    def scalar(self, event: yaml.ScalarEvent) -> None:
        """Add a scalar, which may be a key.

        Raises:
            NotPlainError: the builder must read the text.

        """
        value = _plain_scalar(event)
        if self._key is None and isinstance(self._open, dict):
            if not isinstance(value, str) or value in self._open:
                raise NotPlainError
            self._key = value
            return
        self._put(value)

    def mapping(self, event: yaml.MappingStartEvent) -> None:
        """Begin a mapping.

        Raises:
            NotPlainError: the builder must read the text.

        """
        _check_braces(event, self._text)
        self._begin(event, {})

    def sequence(self, event: yaml.NodeEvent) -> None:
        """Begin a list.

        Raises:
            NotPlainError: the builder must read the text.

        """
        self._begin(event, [])

    def close(self, _event: object) -> None:
        """End the innermost mapping or list."""
        ended = self._open
        self._open, self._key = self._above.pop()
        if self._open is None:
            self.documents.append(ended)

    def _begin(self, event: yaml.NodeEvent, made: "dict[str, Tree] | list[Tree]") -> None:
        if event.anchor is not None or event.tag is not None or len(self._above) >= MAX_DEPTH:
            raise NotPlainError
        if self._open is not None:
            if self._key is None and isinstance(self._open, dict):
                raise NotPlainError  # a key that is not a text
            self._put(made)
        self._above.append((self._open, self._key))
        self._open = made
        self._key = None

    def _put(self, value: Tree) -> None:
        self._count += 1
        if self._count > MAX_NODES:
            raise NotPlainError
        into = self._open
        if isinstance(into, dict):
            assert self._key is not None
            into[self._key] = value
            self._key = None
        elif into is not None:
            into.append(value)
        elif value is not None:
            raise NotPlainError  # a scalar document, whose end readers see differently


def _check_braces(event: yaml.MappingStartEvent, text: str) -> None:
    """Refuse `["a":1]`, a pair without braces, which some readers refuse; raises NotPlainError."""
    if event.flow_style and text[event.start_mark.index] != "{":
        raise NotPlainError


def _plain_scalar(event: yaml.ScalarEvent) -> core_schema.Scalar:
    """Return the value of a scalar.

    Raises:
        NotPlainError: it has an anchor or a tag.

    """
    if event.anchor is not None or event.tag is not None:
        raise NotPlainError
    text: str = event.value
    if event.style:
        return text
    return _resolve_cached(text) if len(text) < _LONG else _resolve(text)


def _resolve(text: str) -> core_schema.Scalar:
    if text == "<<":
        raise NotPlainError  # a merge key, or a text: the builder decides
    try:
        return core_schema.resolve(text)
    except ValueError as error:
        raise NotPlainError from error


# Manifests repeat the same few words, and ten thousand files are ten thousand parsers.
_resolve_cached = lru_cache(maxsize=4096)(_resolve)
_LONG = 64


try:
    from yaml.cyaml import CParser
except ImportError:  # a PyYAML that was built without libyaml
    CParser = None

__all__ = ["ParsedFile", "dump", "parse", "parse_values"]

# The complement of the characters that YAML 1.2 allows (5.1); a byte order mark is removed before.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TEXT_TAGS = ("!", "tag:yaml.org,2002:str")
# What libyaml, which reads YAML 1.1, reads otherwise; found by tests/manifests/yaml/test_parser.py.
_OTHER_SIGNS = ("\t", "\r", "\x85", "\u2028", "\u2029", "\ufeff", "\n%", "\n...")
_OTHER_BLOCKS = re.compile(r"[|>][-+0-9]*#|[|>][^\n]*\n *\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedFile:
    """The documents of a file up to its first fatal error, and its problems."""

    documents: tuple[YamlNode, ...]
    problems: tuple[ManifestError, ...]


def parse(text: str, source: str) -> ParsedFile:
    """Return the documents of the text; empty ones are left out. Raises nothing."""
    text = text.removeprefix("\ufeff")
    return _parse_fast(text, source) or _parse_slowly(text, source)


def _parse_fast(text: str, source: str) -> ParsedFile | None:
    """Return the documents of a text, by libyaml; None if ruamel may read it otherwise, or must explain a problem."""
    builder = Builder(source)
    if not _is_read_alike(text):
        return None
    try:
        for event in _fast_events(text):
            if isinstance(event, yaml.NodeEvent):
                is_empty = isinstance(event, yaml.ScalarEvent) and not (event.value or event.style)
                # The libraries place an empty value differently, unless it is placed at its key.
                if event.anchor is not None or (is_empty and not builder.awaits_value):
                    return None
            if isinstance(event, yaml.MappingStartEvent):
                _check_braces(event, text)
            _feed(builder, event)
    except (NotPlainError, StopError, yaml.YAMLError, ValueError):
        return None
    # The libraries see different ends of a scalar document.
    is_alike = all(isinstance(root.content, dict | list) for root in builder.roots)
    if builder.problems or not is_alike:
        return None
    return ParsedFile(documents=tuple(builder.roots), problems=())


def _parse_slowly(text: str, source: str) -> ParsedFile:
    """Return the documents and problems of a text, by ruamel."""
    found = _FORBIDDEN.search(text)
    if found is not None:
        return ParsedFile(documents=(), problems=(_forbidden(text, found, source),))
    builder = Builder(source)
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            _feed(builder, event)
    except StopError as stop:
        builder.problems.append(stop.problem)
    except MarkedYAMLError as error:
        builder.problems.append(_problem(error, text, source))
    except (YAMLError, ValueError) as error:  # ValueError: \U00110000 in a quoted text
        builder.problems.append(
            ManifestError(source=source, message=f"is not YAML: {str(error).splitlines()[0]}")
        )
    return ParsedFile(documents=tuple(builder.roots), problems=tuple(builder.problems))


def scalar_spans(text: str) -> list[tuple[int, int]]:
    """Return where scalars begin and end in a text that `parse` could read; a # inside of them begins no comment."""
    spans: list[tuple[int, int]] = []
    for event in YAML(typ="safe", pure=True).parse(text):
        if isinstance(event, ScalarEvent):
            start, end = event.start_mark.index, event.end_mark.index
            if event.style in ("|", ">"):
                # A comment may follow the sign of a block.
                start = text.find("\n", start, end) + 1 or end
            spans.append((start, end))
    return spans


def parse_values(text: str) -> list[Tree] | None:
    """Return the documents' values without places; None if only `parse` can read the text."""
    text = text.removeprefix("\ufeff")
    made = ValueBuilder(text)
    return made.documents if _is_read_alike(text) and _feed_fast(made, text) else None


def _is_read_alike(text: str) -> bool:
    """Return whether libyaml may read the text, as far as its signs tell."""
    if CParser is None or text.startswith(("%", "...")):
        return False
    if any(map(text.__contains__, _OTHER_SIGNS)):
        return False
    return _OTHER_BLOCKS.search(text) is None


def _feed_fast(builder: ValueBuilder, text: str) -> bool:
    """Feed libyaml's events to a builder; return whether it could read all of them."""
    takes: dict[type[object], Callable[[Any], None]] = {
        yaml.ScalarEvent: builder.scalar,
        yaml.MappingStartEvent: builder.mapping,
        yaml.SequenceStartEvent: builder.sequence,
        yaml.MappingEndEvent: builder.close,
        yaml.SequenceEndEvent: builder.close,
        **dict.fromkeys(_NOTHING, lambda _: None),
    }
    try:
        for event in _fast_events(text):
            takes[type(event)](event)
    except (NotPlainError, KeyError, yaml.YAMLError, ValueError):  # KeyError: an alias
        return False
    return True


_NOTHING = (yaml.StreamStartEvent, yaml.DocumentStartEvent, yaml.DocumentEndEvent)


def _fast_events(text: str) -> Iterator[yaml.Event]:
    """Yield libyaml's events; raises YAMLError and ValueError."""
    next_event = CParser(text).get_event
    while type(event := next_event()) is not yaml.StreamEndEvent:
        yield event


def _feed(builder: Builder, event: Any) -> None:
    """Give an event of either library to the builder."""
    match event:
        case DocumentStartEvent() | yaml.DocumentStartEvent():
            builder.begin()
        case DocumentEndEvent() | yaml.DocumentEndEvent():
            builder.end()
        case ScalarEvent() | yaml.ScalarEvent():
            is_plain = not event.style and event.tag is None
            _check_tag(builder, event, allowed=_TEXT_TAGS)
            builder.scalar(_mark(event), event.value, is_plain=is_plain, anchor=event.anchor)
        case AliasEvent() | yaml.AliasEvent():
            builder.alias(_mark(event), event.anchor)
        case MappingStartEvent() | yaml.MappingStartEvent():
            _check_tag(builder, event)
            builder.open(_mark(event), is_mapping=True, anchor=event.anchor)
        case SequenceStartEvent() | yaml.SequenceStartEvent():
            _check_tag(builder, event)
            builder.open(_mark(event), is_mapping=False, anchor=event.anchor)
        case (
            MappingEndEvent()
            | SequenceEndEvent()
            | yaml.MappingEndEvent()
            | yaml.SequenceEndEvent()
        ):
            builder.close()
        case _:  # the start and end of the stream
            return


def _check_tag(builder: Builder, event: Any, *, allowed: tuple[str, ...] = ()) -> None:
    if event.tag is not None and event.tag not in allowed:
        shown = str(event.tag).replace("tag:yaml.org,2002:", "!!")
        builder.stop(
            _mark(event),
            f"the tag {shown} is not allowed",
            "Manifests hold plain values: remove it",
        )


def _mark(event: Any) -> Mark:
    return Mark(line=event.start_mark.line + 1, column=event.start_mark.column + 1)


def _forbidden(text: str, found: re.Match[str], source: str) -> ManifestError:
    before = text[: found.start()]
    return ManifestError(
        source=source,
        line=before.count("\n") + 1,
        column=len(before) - (before.rfind("\n") + 1) + 1,
        message=f"is not YAML: the character U+{ord(found.group()):04X} is not allowed in a text",
        hint="Remove it; if the file is not text, this is the wrong file",
    )


def _problem(error: MarkedYAMLError, text: str, source: str) -> ManifestError:
    """Return the scanner's error as a problem."""
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark is not None else (0, 0)
    message, hint = explain_scanner_error(error.problem or "", error.context or "", text, line)
    return ManifestError(
        source=source,
        line=line + 1,
        column=column + 1,
        message=f"is not YAML: {message}",
        hint=hint,
    )
