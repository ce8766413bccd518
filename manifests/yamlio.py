"""YAML text to nodes with places, and back. The only importer of ruamel.yaml and PyYAML; reads no files.

Of both only the scanner and the parser are used, event by event: building values ourselves is what
keeps a hostile file from running code, from nesting deeper than our stack, and from growing beyond
all measure through aliases.

ruamel reads YAML 1.2 and says what is wrong, but is pure Python. libyaml (PyYAML's) is twenty times as fast; it reads
what both read alike, and whatever else there may be in a text is ruamel's.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
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

from manifests import faults
from manifests.builder import Builder, StopError
from manifests.emit import dump
from manifests.errors import ManifestError
from manifests.nodes import Mark, Node
from manifests.quick import NotPlainError, Trees
from manifests.tree import Tree

try:
    from yaml.cyaml import CParser
except ImportError:  # a PyYAML that was built without libyaml
    CParser = None

__all__ = ["Parsed", "dump", "parse", "trees"]

# What YAML 1.2 allows in a text (5.1), turned round; a byte order mark is taken off before.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TEXT_TAGS = ("!", "tag:yaml.org,2002:str")
# What libyaml, which reads YAML 1.1, takes otherwise; found by tests/manifests/test_yaml_twice.py.
_OTHER_SIGNS = ("\t", "\r", "\x85", "\u2028", "\u2029", "\ufeff", "\n%", "\n...")
_OTHER_BLOCKS = re.compile(r"[|>][-+0-9]*#|[|>][^\n]*\n *\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The documents of one file up to where it could be read, and what is wrong with it."""

    documents: tuple[Node, ...]
    problems: tuple[ManifestError, ...]


def parse(text: str, source: str) -> Parsed:
    """Return the documents of the text; empty ones are left out. Raises nothing."""
    text = text.removeprefix("\ufeff")
    found = _FORBIDDEN.search(text)
    if found is not None:
        return Parsed(documents=(), problems=(_forbidden(text, found, source),))
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
    return Parsed(documents=tuple(builder.roots), problems=tuple(builder.problems))


def trees(text: str) -> list[Tree] | None:
    """Return the documents' values without places; None if only `parse` can say what they are."""
    text = text.removeprefix("\ufeff")
    if (
        CParser is None
        or text.startswith(("%", "..."))
        or any(map(text.__contains__, _OTHER_SIGNS))
    ):
        return None
    if _OTHER_BLOCKS.search(text):
        return None
    made = Trees(text)
    takes: dict[type[object], Callable[[Any], None]] = {
        yaml.ScalarEvent: made.scalar,
        yaml.MappingStartEvent: made.mapping,
        yaml.SequenceStartEvent: made.sequence,
        yaml.MappingEndEvent: made.close,
        yaml.SequenceEndEvent: made.close,
        **dict.fromkeys(_NOTHING, lambda _: None),
    }
    try:
        next_event = CParser(text).get_event
        while type(event := next_event()) is not yaml.StreamEndEvent:
            takes[type(event)](event)
    except (NotPlainError, KeyError, yaml.YAMLError, ValueError):  # KeyError: an alias
        return None
    return made.documents


_NOTHING = (yaml.StreamStartEvent, yaml.DocumentStartEvent, yaml.DocumentEndEvent)


def _feed(builder: Builder, event: Any) -> None:
    match event:
        case DocumentStartEvent():
            builder.begin()
        case DocumentEndEvent():
            builder.end()
        case ScalarEvent():
            is_plain = event.style is None and event.tag is None
            if event.tag is not None:
                _check_tag(builder, event, allowed=_TEXT_TAGS)
            builder.scalar(_mark(event), event.value, is_plain=is_plain, anchor=event.anchor)
        case AliasEvent():
            builder.alias(_mark(event), event.anchor)
        case MappingStartEvent() | SequenceStartEvent():
            if event.tag is not None:
                _check_tag(builder, event, allowed=())
            is_mapping = isinstance(event, MappingStartEvent)
            builder.open(_mark(event), is_mapping=is_mapping, anchor=event.anchor)
        case MappingEndEvent() | SequenceEndEvent():
            builder.close()
        case _:  # the stream's beginning and end
            return


def _check_tag(builder: Builder, event: Any, *, allowed: tuple[str, ...]) -> None:
    tag = str(event.tag)
    if tag not in allowed:
        shown = tag.replace("tag:yaml.org,2002:", "!!")
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
    """Return the scanner's complaint in our words."""
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark is not None else (0, 0)
    message, hint = faults.explain(error.problem or "", error.context or "", text, line)
    return ManifestError(
        source=source,
        line=line + 1,
        column=column + 1,
        message=f"is not YAML: {message}",
        hint=hint,
    )
