"""GLM's calls: the name, and a pair of tags for each argument; GLM 4.7 and Laguna write no newlines."""

from collections.abc import Container

from engine.grammar.calls import CallSyntax, Expression, TagSyntax
from engine.text.formats.answer import AnswerFormat
from engine.text.formats.calls import GAP, Tags, read_content
from engine.text.formats.reader import Reader, Steps
from engine.text.formats.tools import ToolSet

_TAGS = Tags(
    section="<tool_call>",
    section_end="",
    call=rf"([^<>\s{{}}]{{1,256}}){GAP}(?=<arg_key>|</tool_call>)",
    call_prefix="",
    close="</tool_call>",
    argument=rf"<arg_key>([^<]{{1,256}})</arg_key>{GAP}<arg_value>",
    argument_prefix="<arg_key>",
    argument_end="</arg_value>",
)


def _matches(template: str, _: Container[str]) -> bool:
    return "<arg_key>" in template


def _content(reader: Reader, tools: ToolSet) -> Steps[None]:
    yield from read_content(reader, tools, _TAGS.start, _TAGS.read)


FORMAT = AnswerFormat(
    name="glm",
    models="GLM 4.5, 4.6, 4.7 and 5, Laguna",
    start="<tool_call>",
    matches=_matches,
    content=_content,
    syntax=CallSyntax(
        section=("<tool_call>",),
        before=(),
        middle=(Expression(r"\n?"),),
        after=("</tool_call>",),
        tags=TagSyntax(
            before="<arg_key>", middle="</arg_key>\n<arg_value>", end="</arg_value>", after="\n"
        ),
    ),
)
