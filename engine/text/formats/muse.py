"""Muse's format: messages with a recipient. `to=self` is reasoning, and calls stand between tags in other messages."""

import re

from engine.text.formats.answer import AnswerContext, AnswerFormat, FamilySign
from engine.text.formats.calls import NAME, Tags
from engine.text.formats.reader import Delimiter, Reader, Steps
from engine.text.formats.tools import ToolSet
from engine.text.reasoning import ThinkingMarkers, ThinkingState
from engine.text.spans import SpanRole

_TAGS = Tags(
    section="<atem:function_calls>",
    section_end="</atem:function_calls>",
    call=rf'<atem:invoke name="{NAME}">',
    call_prefix="<atem:invoke name=",
    close="</atem:invoke>",
    argument=r'<atem:parameter name="([^>\n"]{1,256})"[^>]{0,64}>',
    argument_prefix="<atem:parameter name=",
    argument_end="</atem:parameter>",
)
_ENDS = ("<|eom|>", "<|eot|>", "<|start|>")
_BODY_END = Delimiter(dict.fromkeys(_ENDS, ""))
_BODY_END_OR_CALLS = Delimiter(dict.fromkeys((*_ENDS, _TAGS.section), ""))
_HEADER = re.compile(r"(?:<\|start\|>)?([^<]{0,300})<\|message\|>")
_WINDOW = 350
_SELF = re.compile(r"\bto=self\s*\Z")


def _answer(reader: Reader, context: AnswerContext) -> Steps[None]:
    role = SpanRole.REASONING if context.state.is_open else SpanRole.CONTENT
    is_begun = context.state.is_open or context.state is ThinkingState.CONTINUED_ANSWER
    while True:
        if not is_begun:
            if not (yield from reader.has_more()):
                return
            header = yield from reader.match(_HEADER, _WINDOW)
            role = SpanRole.CONTENT
            if header is not None:
                yield reader.take(header.end())
                role = SpanRole.REASONING if _SELF.search(header[1]) else role
            elif end := _BODY_END.search(reader.text, reader.at, is_final=True)[1]:
                if end.start() == reader.at:  # a marker outside of its place
                    yield reader.take(end.end())
                    continue
        is_begun = False
        yield from _read_body(reader, role, context.tools)


def _read_body(reader: Reader, role: SpanRole, tools: ToolSet | None) -> Steps[None]:
    """Read a message, with its calls, and the marker of its end."""
    reader.is_thinking = role is SpanRole.REASONING
    has_calls = tools is not None and role is SpanRole.CONTENT
    while True:
        end = yield from reader.until(_BODY_END_OR_CALLS if has_calls else _BODY_END, role)
        if end is None:
            return
        if end[0] == _TAGS.section and tools is not None:
            is_call = yield from _TAGS.read(reader, tools)
            if not is_call:
                yield reader.take(reader.at + len(_TAGS.section), role)
            continue
        reader.is_thinking = False
        if end[0] != "<|start|>":
            yield reader.take(end.end())
        return


def _content(reader: Reader, tools: ToolSet) -> Steps[None]:
    context = AnswerContext(thinking=None, state=ThinkingState.FREE, tools=tools)
    yield from _answer(reader, context)


FORMAT = AnswerFormat(
    name="muse",
    models="Muse Spark, Muse Glimmer",
    start=_TAGS.section,
    signs=(FamilySign((_TAGS.section,)),),
    content=_content,
    answer=_answer,
    # The prompt ends with the role, and a blank follows.
    thinking=ThinkingMarkers(start=" to=self<|message|>", end="<|eom|>"),
)
