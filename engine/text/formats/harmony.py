"""gpt-oss's format, harmony: messages in channels. `analysis` is reasoning, `final` and announcements are text.

A message to a recipient is a call. A recipient outside of `functions` is a tool of OpenAI's own runtime; such a call is
given on, too, and a body that is no JSON as the argument `input`.
"""

import re

from engine.grammar.calls import HarmonySyntax
from engine.text.formats.answer import AnswerContext, AnswerFormat, FamilySign
from engine.text.formats.calls import DONE, head, read_json
from engine.text.formats.literals import argument_piece, quoted_piece, skip_blanks
from engine.text.formats.reader import Delimiter, Reader, Steps
from engine.text.formats.tools import ToolSet
from engine.text.reasoning import ThinkingMarkers, ThinkingState
from engine.text.spans import SpanRole

_ANALYSIS = ThinkingMarkers(start="<|channel|>analysis<|message|>", end="<|end|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_BODY_END = Delimiter(dict.fromkeys((*_ENDS, "<|start|>", "<|channel|>"), ""))
_HEADER = re.compile(
    r"(?:<\|start\|>)?([^<]{0,300})(?:<\|channel\|>([^<]{0,300}))?(?:<\|constrain\|>[^<]{0,50})?<\|message\|>"
)
_WINDOW = 800
_RECIPIENT = re.compile(r"to=([^\s<]{1,256})")


def _answer(reader: Reader, context: AnswerContext) -> Steps[None]:
    if context.state.is_open:
        yield from _read_body(reader, SpanRole.REASONING)
    elif context.state is ThinkingState.CONTINUED_ANSWER:
        yield from _read_body(reader, SpanRole.CONTENT)
    while True:
        if not (yield from reader.has_more()):
            return
        header = yield from reader.match(_HEADER, _WINDOW)
        if header is None:
            # Not in the format, or the header is cut.
            is_cut = reader.is_final and _BODY_END.here(reader.text, reader.at) is not None
            role = SpanRole.HIDDEN if is_cut else SpanRole.CONTENT
            yield reader.take(min(reader.at + 1, len(reader.text)), role)
            yield from _read_body(reader, role)
            continue
        names = f"{header[1]} {header[2] or ''}"
        recipient = _RECIPIENT.search(names)
        yield reader.take(header.end())
        if recipient is not None and recipient[1] != "assistant" and context.tools is not None:
            yield from _read_call(reader, recipient[1].removeprefix("functions."))
        else:
            is_reasoning = (header[2] or "").startswith("analysis")
            yield from _read_body(reader, SpanRole.REASONING if is_reasoning else SpanRole.CONTENT)


def _read_body(reader: Reader, role: SpanRole) -> Steps[None]:
    reader.is_thinking = role is SpanRole.REASONING
    end = yield from reader.until(_BODY_END, role)
    if end is None:
        return
    reader.is_thinking = False
    if end[0] in _ENDS:
        yield reader.take(end.end())


def _read_call(reader: Reader, name: str) -> Steps[None]:
    has_body = yield from skip_blanks(reader)
    yield reader.take(reader.at, calls=head(name))
    if has_body and reader.text[reader.at] == "{":
        yield from read_json(reader)
        end = yield from reader.until(_BODY_END, SpanRole.HIDDEN)
    else:
        is_empty = not has_body or _BODY_END.here(reader.text, reader.at) is True
        yield reader.take(reader.at, calls=argument_piece("{" if is_empty else '{"input": "'))
        end = yield from reader.until(_BODY_END, quoted_piece)
        yield reader.take(reader.at, calls=argument_piece("}" if is_empty else '"}'))
    if end is not None and end[0] in _ENDS:
        yield reader.take(end.end())
    if end is not None or not reader.is_cut:
        yield reader.take(reader.at, calls=(DONE,))


def _content(reader: Reader, tools: ToolSet) -> Steps[None]:
    context = AnswerContext(thinking=None, state=ThinkingState.FREE, tools=tools)
    yield from _answer(reader, context)


FORMAT = AnswerFormat(
    name="harmony",
    models="gpt-oss",
    start="<|channel|>commentary to=",
    signs=(FamilySign(("<|message|>",), ("<|channel|>", "<|message|>", "<|start|>")),),
    content=_content,
    answer=_answer,
    thinking=_ANALYSIS,
    syntax=HarmonySyntax(),
)
