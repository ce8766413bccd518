"""MiniCPM5's calls: a tag for the function without a section, and one for each argument, with CDATA around code."""

from collections.abc import Container

from engine.grammar.calls import CallSyntax, TagSyntax
from engine.text.formats.answer import AnswerFormat
from engine.text.formats.calls import NAME, Tags, read_content
from engine.text.formats.reader import Reader, Steps
from engine.text.formats.tools import ToolSet

_TAGS = Tags(
    section="",
    section_end="",
    call=rf"<function name=[\"']?{NAME}[\"']?\s{{0,8}}>",
    call_prefix="<function name=",
    close="</function>",
    argument=r"<param name=[\"']?([^>\n\"']{1,256})[\"']?\s{0,8}>",
    argument_prefix="<param name=",
    argument_end="</param>",
    is_bare=True,
    cdata=("<![CDATA[", "]]>"),
)


def _matches(template: str, _: Container[str]) -> bool:
    return '<function name="' in template and '<param name="' in template


def _content(reader: Reader, tools: ToolSet) -> Steps[None]:
    yield from read_content(reader, tools, _TAGS.start, _TAGS.read)


FORMAT = AnswerFormat(
    name="minicpm",
    models="MiniCPM5",
    start="<function name=",
    matches=_matches,
    content=_content,
    syntax=CallSyntax(
        section=('<function name="',),
        before=(),
        middle=('">',),
        after=("</function>",),
        tags=TagSyntax(before='<param name="', middle='">', end="</param>"),
    ),
)
