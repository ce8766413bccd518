"""Gemma's calls: a name and arguments in braces, with a token as the quotation mark."""

import re

from engine.text.formats.answer import AnswerFormat, FamilySign
from engine.text.formats.calls import GAP, NAME, LiteralCalls
from engine.text.formats.literals import token_quotes


def _calls(start: str, end: str, quote: str) -> LiteralCalls:
    call = rf"call:{GAP}{NAME}{GAP}\{{"
    following = f",?{GAP}{call}|{re.escape(end)}"
    return LiteralCalls(section=start, call=call, following=following, quotes=token_quotes(quote))


FORMAT = AnswerFormat(
    name="gemma4",
    models="Gemma 4",
    start="<|tool_call>",
    signs=(FamilySign(("<|tool_call>", "<tool_call|>")),),
    content=_calls("<|tool_call>", "<tool_call|>", '<|"|>').content,
)
FUNCTION_GEMMA = AnswerFormat(
    name="function_gemma",
    models="FunctionGemma",
    start="<start_function_call>",
    signs=(FamilySign(("<start_function_call>",)),),
    content=_calls("<start_function_call>", "<end_function_call>", "<escape>").content,
)
