"""Kimi's calls: K2's section of calls with JSON arguments, and K3's elements, in which all parts of an answer stand."""

from engine.grammar.calls import CallSyntax, Expression
from engine.text.formats.answer import AnswerFormat, FamilySign
from engine.text.formats.calls import GAP, NAME, Sections, Tags, read_content
from engine.text.formats.reader import Delimiter, Reader, Steps
from engine.text.formats.tools import ToolSet
from engine.text.reasoning import ThinkingMarkers

_SECTIONS = Sections(
    section="<|tool_calls_section_begin|>",
    head=rf"<\|tool_call_begin\|>{GAP}(?:functions\.)?{NAME}(?::\d{{1,6}})?{GAP}<\|tool_call_argument_begin\|>",
    tail="<|tool_call_end|>",
    section_end="<|tool_calls_section_end|>",
)

_TAGS = Tags(
    section="<|open|>tools<|sep|>",
    section_end="<|close|>tools<|sep|>",
    call=rf'<\|open\|>call tool="{NAME}"[^<]{{0,64}}<\|sep\|>',
    call_prefix="<|open|>call ",
    close="<|close|>call<|sep|>",
    argument=r'<\|open\|>argument key="([^<\n"]{1,256})"(?: type="([a-z]{1,16})")?<\|sep\|>',
    argument_prefix="<|open|>argument ",
    argument_end="<|close|>argument<|sep|>",
    has_types=True,
    whole=rf"<\|open\|>json[^<]{{0,64}}<\|sep\|>{GAP}\{{",
)
# Around text, and behind the whole answer.
_FRAMES = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
_FRAME = Delimiter(dict.fromkeys(_FRAMES, ""))
_FRAME_OR_CALLS = Delimiter(dict.fromkeys((*_FRAMES, _TAGS.section), ""))


def _read_element(reader: Reader, tools: ToolSet) -> Steps[bool]:
    frame = next((mark for mark in _FRAMES if reader.text.startswith(mark, reader.at)), None)
    if frame is None:
        return (yield from _TAGS.read(reader, tools))
    yield reader.take(reader.at + len(frame))
    return True


def _k3_content(reader: Reader, tools: ToolSet) -> Steps[None]:
    yield from read_content(reader, tools, _FRAME_OR_CALLS, _read_element)


def _k3_text(reader: Reader) -> Steps[None]:
    yield from read_content(reader, ToolSet(), _FRAME, _read_element)


FORMAT = AnswerFormat(
    name="kimi",
    models="Kimi K2, Kimi Linear",
    start=_SECTIONS.section,
    signs=(
        FamilySign((_SECTIONS.section,)),
        FamilySign(tokens=(_SECTIONS.section, "<|tool_call_begin|>")),
    ),
    content=_SECTIONS.content,
    syntax=CallSyntax(
        section=(_SECTIONS.section,),
        before=("<|tool_call_begin|>functions.",),
        middle=(Expression(r":[0-9]{1,3}"), "<|tool_call_argument_begin|>"),
        after=("<|tool_call_end|>",),
        section_end=(_SECTIONS.section_end,),
        between=(),
    ),
)
K3 = AnswerFormat(
    name="kimi_k3",
    models="Kimi K3",
    start=_TAGS.section,
    signs=(FamilySign(tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),),
    content=_k3_content,
    text=_k3_text,
    thinking=ThinkingMarkers(start="<|open|>think<|sep|>", end="<|close|>think<|sep|>"),
)
