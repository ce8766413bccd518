"""Hermes' calls, one JSON object between tags: Hermes, Qwen 2.5, Qwen3 and LongCat."""

from functools import partial

from engine.grammar.calls import CallSyntax
from engine.text.formats.answer import AnswerFormat, FamilySign
from engine.text.formats.calls import DONE, read_content, read_object
from engine.text.formats.reader import Delimiter, Reader, Steps
from engine.text.formats.tools import ToolSet
from engine.text.spans import SpanRole


def _content(reader: Reader, tools: ToolSet, *, start: str, end: str) -> Steps[None]:
    closing = Delimiter({end: ""})

    def read_call(reader: Reader, tools: ToolSet) -> Steps[bool]:
        reader.hold(reader.at + len(start))
        yield from reader.hold_blanks()
        if not reader.text.startswith("{", reader.at):
            return False
        is_call, is_open = yield from read_object(reader, tools)
        if not is_call:
            return False
        match = yield from reader.until(closing, SpanRole.HIDDEN)
        if match is not None:
            yield reader.take(match.end())
        if is_open and (match is not None or not reader.is_cut):
            yield reader.take(reader.at, calls=(DONE,))
        return True

    yield from read_content(reader, tools, Delimiter({start: ""}), read_call)


def _syntax(start: str, end: str) -> CallSyntax:
    return CallSyntax(
        section=(start,),
        before=('\n{"name": "',),
        middle=('", "arguments": ',),
        after=(f"}}\n{end}",),
    )


SYNTAX = _syntax("<tool_call>", "</tool_call>")
FORMAT = AnswerFormat(
    name="hermes",
    models="Hermes 2 and 3, Qwen 2.5, Qwen3",
    start="<tool_call>",
    signs=(FamilySign(("<tool_call>", "name")),),
    content=partial(_content, start="<tool_call>", end="</tool_call>"),
    syntax=SYNTAX,
)
LONGCAT = AnswerFormat(
    name="longcat",
    models="LongCat Flash",
    start="<longcat_tool_call>",
    signs=(FamilySign(("<longcat_tool_call>",)),),
    content=partial(_content, start="<longcat_tool_call>", end="</longcat_tool_call>"),
    syntax=_syntax("<longcat_tool_call>", "</longcat_tool_call>"),
)
