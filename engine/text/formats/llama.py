"""Llama 3.1's calls: JSON objects at the beginning of the answer, or behind a token; one in an answer."""

import re

from engine.text.formats.answer import AnswerFormat, FamilySign
from engine.text.formats.calls import (
    GAP,
    NAME,
    head,
    read_content,
    read_objects,
    read_unmarked_content,
)
from engine.text.formats.literals import PYTHON, read_arguments
from engine.text.formats.reader import Delimiter, Reader, Steps
from engine.text.formats.tools import ToolSet

_START = "<|python_tag|>"
_NEXT = re.compile(rf"{GAP}(?:[;,]{GAP})?(?:<\|python_tag\|>{GAP})?(?=\{{)")
_TAGGED = re.compile(rf"<\|python_tag\|>{GAP}(?:(?=\{{)|{NAME}\.call\()")


def _read_tagged(reader: Reader, tools: ToolSet) -> Steps[bool]:
    match = yield from reader.match(_TAGGED, 400)
    if match is None:
        return False
    if match[1] is not None:  # a tool that Meta's runtime has, such as brave_search
        yield reader.take(match.end(), calls=head(match[1]))
        yield from read_arguments(reader, PYTHON, tools, match[1])
        return True
    reader.hold(match.end())
    return (yield from read_objects(reader, tools, _NEXT))


def _read_first(reader: Reader, tools: ToolSet) -> Steps[bool]:
    return (yield from read_objects(reader, tools, _NEXT, known_only=True))


def _marked_content(reader: Reader, tools: ToolSet) -> Steps[None]:
    yield from read_content(reader, tools, Delimiter({_START: ""}), _read_tagged)


def _content(reader: Reader, tools: ToolSet) -> Steps[None]:
    yield from read_unmarked_content(reader, tools, "{", _read_first, _marked_content)


FORMAT = AnswerFormat(
    name="llama",
    models="Llama 3.1, 3.2 and 3.3",
    start=_START,
    signs=(FamilySign(('"parameters": dictionary of argument name',)),),
    content=_content,
    is_single=True,
)
