"""Mistral's calls: a list of JSON objects up to v3, and from v11 on a name, perhaps an id, and JSON arguments."""

import re
from dataclasses import replace

from engine.grammar.calls import CallSyntax, Expression
from engine.text.formats.answer import AnswerFormat, FamilySign
from engine.text.formats.calls import GAP, NAME, Sections, read_content, read_objects
from engine.text.formats.reader import Reader, Steps
from engine.text.formats.tools import ToolSet

_START = "[TOOL_CALLS]"
_SECTIONS = Sections(
    section=_START,
    head=rf"{NAME}{GAP}(?:\[CALL_ID\]{GAP}[\w-]{{1,64}}{GAP})?\[ARGS\]",
    tail="",
    section_end="",
)
_LIST = re.compile(rf"\[TOOL_CALLS\]{GAP}\[{GAP}(?=\{{)")
_OTHER = re.compile(rf"\[TOOL_CALLS\]{GAP}[^\s\[]")
_START_OF_CALL = re.compile(f"{_LIST.pattern}|{_OTHER.pattern}")
_NEXT = re.compile(rf"{GAP},{GAP}(?=\{{)|{GAP}(\])")


def _read_call(reader: Reader, tools: ToolSet) -> Steps[bool]:
    other = yield from reader.match(_START_OF_CALL, 150)
    if other is None:
        return False
    if _LIST.match(other[0] + "{") is None:
        return (yield from _SECTIONS.read(reader, tools))
    reader.hold(other.end())
    return (yield from read_objects(reader, tools, _NEXT))


def _content(reader: Reader, tools: ToolSet) -> Steps[None]:
    yield from read_content(reader, tools, _SECTIONS.start, _read_call)


_V11 = CallSyntax(section=(_START,), before=(), middle=("[ARGS]",), after=())
FORMAT = AnswerFormat(
    name="mistral",
    models="Mistral 7B v0.3, Mixtral, Mistral Nemo, Mistral Small 2409 and 2501",
    start=_START,
    signs=(FamilySign((_START,)),),
    content=_content,
    syntax=CallSyntax(
        section=(_START, Expression(r"\x20?"), "["),
        before=('{"name": "',),
        middle=('", "arguments": ',),
        after=(Expression(r'(, "id": "[a-zA-Z0-9]{1,16}")?'), "}"),
        section_end=("]",),
        between=(", ",),
    ),
)
V11 = replace(
    FORMAT,
    name="mistral_v11",
    models="Magistral, Devstral, Mistral Small 2506 and later, Mistral Large 3",
    signs=(FamilySign((_START, "[ARGS]")),),
    syntax=_V11,
)
IDS = replace(
    V11,
    name="mistral_call_id",
    models="Mistral Small 3.2",
    signs=(FamilySign((_START, "[CALL_ID]")),),
    syntax=replace(_V11, middle=("[CALL_ID]", Expression("[a-zA-Z0-9]{9}"), "[ARGS]")),
)
