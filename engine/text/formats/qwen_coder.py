"""Qwen3-Coder's calls: a tag for the function, and one for each argument with the value on lines of its own."""

from collections.abc import Container

from engine.grammar.calls import CallSyntax, TagSyntax
from engine.text.formats.answer import AnswerFormat
from engine.text.formats.calls import NAME, Tags, read_content
from engine.text.formats.reader import Reader, Steps
from engine.text.formats.tools import ToolSet

_TAGS = Tags(
    section="<tool_call>",
    section_end="</tool_call>",
    call=rf"<function={NAME}>",
    call_prefix="<function=",
    close="</function>",
    argument=r"<parameter=([^>\n]{1,256})>",
    argument_prefix="<parameter=",
    argument_end="</parameter>",
    trims_newlines=True,
    is_bare=True,
)


def _matches(template: str, _: Container[str]) -> bool:
    return "<function=" in template and "<tool_call>" in template


def _content(reader: Reader, tools: ToolSet) -> Steps[None]:
    yield from read_content(reader, tools, _TAGS.start, _TAGS.read)


FORMAT = AnswerFormat(
    name="qwen_coder",
    models="Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5",
    start="<tool_call>",
    matches=_matches,
    content=_content,
    syntax=CallSyntax(
        section=("<tool_call>",),
        before=("\n<function=",),
        middle=(">\n",),
        after=("</function>\n</tool_call>",),
        tags=TagSyntax(before="<parameter=", middle=">\n", end="\n</parameter>", after="\n"),
    ),
)
