"""Seed-OSS's calls: Qwen3-Coder's tags in a section of its own, with the value directly between them."""

from collections.abc import Container

from engine.grammar.calls import CallSyntax, TagSyntax
from engine.text.formats.answer import AnswerFormat
from engine.text.formats.calls import NAME, Tags, read_content
from engine.text.formats.reader import Reader, Steps
from engine.text.formats.tools import ToolSet

_TAGS = Tags(
    section="<seed:tool_call>",
    section_end="</seed:tool_call>",
    call=rf"<function={NAME}>",
    call_prefix="<function=",
    close="</function>",
    argument=r"<parameter=([^>\n]{1,256})>",
    argument_prefix="<parameter=",
    argument_end="</parameter>",
)


def _matches(template: str, _: Container[str]) -> bool:
    return "<seed:tool_call>" in template


def _content(reader: Reader, tools: ToolSet) -> Steps[None]:
    yield from read_content(reader, tools, _TAGS.start, _TAGS.read)


FORMAT = AnswerFormat(
    name="seed",
    models="Seed-OSS",
    start="<seed:tool_call>",
    matches=_matches,
    content=_content,
    syntax=CallSyntax(
        section=("<seed:tool_call>",),
        before=("\n<function=",),
        middle=(">\n",),
        after=("</function>\n</seed:tool_call>",),
        tags=TagSyntax(before="<parameter=", middle=">", end="</parameter>", after="\n"),
    ),
)
