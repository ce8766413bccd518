"""Gemma's calls: a name and arguments in braces, with a token as the quotation mark."""

import re
from collections.abc import Container
from functools import partial

from engine.text.formats.answer import AnswerFormat
from engine.text.formats.calls import GAP, NAME, head, read_content
from engine.text.formats.literals import Quotes, read_arguments, token_quotes
from engine.text.formats.reader import Delimiter, Reader, Steps
from engine.text.formats.tools import ToolSet

_GEMMA4, _FUNCTION_GEMMA = token_quotes('<|"|>'), token_quotes("<escape>")


def _read_calls(
    reader: Reader, tools: ToolSet, *, start: str, end: str, quotes: Quotes
) -> Steps[bool]:
    call = rf"call:{GAP}{NAME}{GAP}\{{"
    match = yield from reader.match(re.compile(rf"{re.escape(start)}{GAP}{call}"), 500)
    if match is None:
        return False
    following = re.compile(rf"{GAP}(?:,?{GAP}{call}|{re.escape(end)})")
    while match is not None:
        yield reader.take(match.end(), calls=head(match[1]))
        yield from read_arguments(reader, quotes, tools, match[1])
        match = yield from reader.match(following, 500)
        if match is not None and match[1] is None:
            yield reader.take(match.end())
            return True
    return True


def _content(
    reader: Reader, tools: ToolSet, *, start: str, end: str, quotes: Quotes
) -> Steps[None]:
    read_call = partial(_read_calls, start=start, end=end, quotes=quotes)
    yield from read_content(reader, tools, Delimiter({start: ""}), read_call)


def _gemma4_content(reader: Reader, tools: ToolSet) -> Steps[None]:
    yield from _content(reader, tools, start="<|tool_call>", end="<tool_call|>", quotes=_GEMMA4)


def _function_gemma_content(reader: Reader, tools: ToolSet) -> Steps[None]:
    start, end = "<start_function_call>", "<end_function_call>"
    yield from _content(reader, tools, start=start, end=end, quotes=_FUNCTION_GEMMA)


def _matches(template: str, _: Container[str]) -> bool:
    return "<|tool_call>" in template and "<tool_call|>" in template


def _is_function_gemma(template: str, _: Container[str]) -> bool:
    return "<start_function_call>" in template


FORMAT = AnswerFormat(
    name="gemma4",
    models="Gemma 4",
    start="<|tool_call>",
    matches=_matches,
    content=_gemma4_content,
)
FUNCTION_GEMMA = AnswerFormat(
    name="function_gemma",
    models="FunctionGemma",
    start="<start_function_call>",
    matches=_is_function_gemma,
    content=_function_gemma_content,
)
