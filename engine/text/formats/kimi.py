"""Kimi K2's calls: a section of calls, numbered in it, with JSON arguments."""

from collections.abc import Container

from engine.grammar.calls import CallSyntax, Expression
from engine.text.formats.answer import AnswerFormat
from engine.text.formats.calls import GAP, NAME, Sections, read_content
from engine.text.formats.reader import Reader, Steps
from engine.text.formats.tools import ToolSet

_SECTIONS = Sections(
    section="<|tool_calls_section_begin|>",
    head=rf"<\|tool_call_begin\|>{GAP}(?:functions\.)?{NAME}(?::\d{{1,6}})?{GAP}<\|tool_call_argument_begin\|>",
    tail="<|tool_call_end|>",
    section_end="<|tool_calls_section_end|>",
)


def _matches(template: str, vocabulary: Container[str]) -> bool:
    return _SECTIONS.section in template or (
        _SECTIONS.section in vocabulary and "<|tool_call_begin|>" in vocabulary
    )


def _content(reader: Reader, tools: ToolSet) -> Steps[None]:
    yield from read_content(reader, tools, _SECTIONS.start, _SECTIONS.read)


FORMAT = AnswerFormat(
    name="kimi",
    models="Kimi K2, Kimi Linear",
    start=_SECTIONS.section,
    matches=_matches,
    content=_content,
    syntax=CallSyntax(
        section=(_SECTIONS.section,),
        before=("<|tool_call_begin|>functions.",),
        middle=(Expression(r":[0-9]{1,3}"), "<|tool_call_argument_begin|>"),
        after=("<|tool_call_end|>",),
        section_end=(_SECTIONS.section_end,),
        between=(),
    ),
)
