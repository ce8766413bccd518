"""Calls as Python writes them: LFM2 between tokens, Llama 3.2 and 4 at the beginning of the answer."""

import re

from engine.text.formats.answer import AnswerFormat, FamilySign
from engine.text.formats.calls import GAP, NAME, LiteralCalls, read_unmarked_content
from engine.text.formats.literals import PYTHON
from engine.text.formats.reader import Reader, Steps
from engine.text.formats.tools import ToolSet

_LFM2_START, _LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
_LLAMA_START, _LLAMA_END = "<|python_start|>", "<|python_end|>"


def _calls(section: str, end: str) -> LiteralCalls:
    closing = rf"\]{GAP}{re.escape(end)}|{re.escape(end)}" if end else r"\]"
    return LiteralCalls(
        section=section,
        call=rf"(?:\[{GAP})?{NAME}\(",
        following=rf",{GAP}{NAME}\(|{closing}",
        quotes=PYTHON,
    )


_LFM2_CALLS = _calls(_LFM2_START, _LFM2_END)
_LLAMA_CALLS, _UNMARKED_CALLS = _calls(_LLAMA_START, _LLAMA_END), _calls("", "")


def _llama_content(reader: Reader, tools: ToolSet) -> Steps[None]:
    yield from read_unmarked_content(reader, tools, "[", _UNMARKED_CALLS.read, _LLAMA_CALLS.content)


LFM2 = AnswerFormat(
    name="lfm2",
    models="LFM2, LFM2.5",
    start=_LFM2_START,
    signs=(FamilySign((_LFM2_START,)), FamilySign(tokens=(_LFM2_START, _LFM2_END))),
    content=_LFM2_CALLS.content,
)
LLAMA = AnswerFormat(
    name="llama_pythonic",
    models="Llama 4, Llama 3.2 with Python's calls",
    start=_LLAMA_START,
    signs=(FamilySign((_LLAMA_START,)), FamilySign(("[func_name1(",))),
    content=_llama_content,
)
