"""MiniMax M2's calls: a section of invocations, with a tag for each argument."""

from collections.abc import Container

from engine.grammar.calls import CallSyntax, TagSyntax
from engine.text.formats.answer import AnswerFormat
from engine.text.formats.calls import GAP, NAME, Tags, read_content
from engine.text.formats.reader import Reader, Steps
from engine.text.formats.tools import ToolSet

_TAGS = Tags(
    section="<minimax:tool_call>",
    section_end="</minimax:tool_call>",
    call=rf"<invoke name={GAP}[\"']?{NAME}[\"']?>",
    call_prefix="<invoke name=",
    close="</invoke>",
    argument=r"<parameter name=\"?([^>\n\"]{1,256})\"?>",
    argument_prefix="<parameter name=",
    argument_end="</parameter>",
)


def _matches(template: str, _: Container[str]) -> bool:
    return "<minimax:tool_call>" in template


def _content(reader: Reader, tools: ToolSet) -> Steps[None]:
    yield from read_content(reader, tools, _TAGS.start, _TAGS.read)


FORMAT = AnswerFormat(
    name="minimax",
    models="MiniMax M2",
    start="<minimax:tool_call>",
    matches=_matches,
    content=_content,
    syntax=CallSyntax(
        section=("<minimax:tool_call>", "\n"),
        before=('<invoke name="',),
        middle=('">\n',),
        after=("</invoke>\n",),
        section_end=("</minimax:tool_call>",),
        between=(),
        tags=TagSyntax(before='<parameter name="', middle='">', end="</parameter>", after="\n"),
    ),
)
