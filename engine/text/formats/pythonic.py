"""Calls as Python writes them: LFM2 between tokens, Llama 3.2 and 4 at the beginning of the answer."""

import re
from collections.abc import Container
from functools import partial

from engine.text.formats.answer import AnswerFormat
from engine.text.formats.calls import GAP, NAME, head, read_content
from engine.text.formats.literals import PYTHON, read_arguments
from engine.text.formats.reader import Delimiter, Reader, Steps
from engine.text.formats.tools import ToolSet
from engine.text.spans import SpanRole

_LFM2_START, _LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
_LLAMA_START, _LLAMA_END = "<|python_start|>", "<|python_end|>"


def _read_calls(reader: Reader, tools: ToolSet, *, start: str, end: str) -> Steps[bool]:
    opening = re.escape(start) + GAP if start else ""
    match = yield from reader.match(re.compile(rf"{opening}(?:\[{GAP})?{NAME}\("), 450)
    if match is None or (not start and match[1] not in tools):
        return False
    closing = rf"\]{GAP}{re.escape(end)}|{re.escape(end)}" if end else r"\]"
    following = re.compile(rf"{GAP}(?:,{GAP}{NAME}\(|{closing})")
    while match is not None:
        yield reader.take(match.end(), calls=head(match[1]))
        yield from read_arguments(reader, PYTHON, tools, match[1])
        match = yield from reader.match(following, 450)
        if match is not None and match[1] is None:
            yield reader.take(match.end())
            return True
    return True


def _lfm2_content(reader: Reader, tools: ToolSet) -> Steps[None]:
    read_call = partial(_read_calls, start=_LFM2_START, end=_LFM2_END)
    yield from read_content(reader, tools, Delimiter({_LFM2_START: ""}), read_call)


def _llama_content(reader: Reader, tools: ToolSet) -> Steps[None]:
    while True:
        reader.hold(reader.blanks_end())
        if reader.at < len(reader.text) or reader.is_final:
            break
        yield None
    is_call = False
    if reader.text.startswith("[", reader.at):
        is_call = yield from _read_calls(reader, tools, start="", end="")
    yield reader.release(SpanRole.HIDDEN if is_call else SpanRole.CONTENT)
    read_call = partial(_read_calls, start=_LLAMA_START, end=_LLAMA_END)
    yield from read_content(reader, tools, Delimiter({_LLAMA_START: ""}), read_call)


def _is_lfm2(template: str, vocabulary: Container[str]) -> bool:
    return _LFM2_START in template or (_LFM2_START in vocabulary and _LFM2_END in vocabulary)


def _is_llama(template: str, _: Container[str]) -> bool:
    return _LLAMA_START in template or "[func_name1(" in template


LFM2 = AnswerFormat(
    name="lfm2",
    models="LFM2, LFM2.5",
    start=_LFM2_START,
    matches=_is_lfm2,
    content=_lfm2_content,
)
LLAMA = AnswerFormat(
    name="llama_pythonic",
    models="Llama 4, Llama 3.2 with Python's calls",
    start=_LLAMA_START,
    matches=_is_llama,
    content=_llama_content,
)
