"""DeepSeek's calls: V3.1's section of calls with JSON arguments, that of V3 and R1, and V3.2's tags."""

from dataclasses import replace

from engine.grammar.calls import CallSyntax
from engine.text.formats.answer import AnswerFormat, FamilySign
from engine.text.formats.calls import GAP, NAME, Sections, Tags

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
# V3 and R1 write the kind of the tool first, and the arguments in a block of code.
_SECTIONS = Sections(
    section=_BEGIN,
    head=rf"{_CALL}(?:function{_SEPARATOR})?{GAP}{NAME}(?:{_SEPARATOR}|{GAP}\n```json\n)",
    tail=_CALL_END,
    section_end=_END,
)
_TAGS = Tags(
    section="<｜DSML｜function_calls>",
    section_end="</｜DSML｜function_calls>",
    call=rf'<｜DSML｜invoke name="{NAME}">',
    call_prefix="<｜DSML｜invoke name=",
    close="</｜DSML｜invoke>",
    argument=r'<｜DSML｜parameter name="([^>\n"]{1,256})" string="(true|false)">',
    argument_prefix="<｜DSML｜parameter name=",
    argument_end="</｜DSML｜parameter>",
    has_types=True,
)


FORMAT = AnswerFormat(
    name="deepseek",
    models="DeepSeek V3.1",
    start=_BEGIN,
    signs=(FamilySign((_BEGIN,)), FamilySign(tokens=(_BEGIN, _CALL))),
    content=_SECTIONS.content,
    syntax=CallSyntax(
        section=(_BEGIN,),
        before=(_CALL,),
        middle=(_SEPARATOR,),
        after=(_CALL_END,),
        section_end=(_END,),
        between=(),
    ),
)
V3 = replace(
    FORMAT,
    name="deepseek_v3",
    models="DeepSeek V3 and R1",
    signs=(FamilySign((_BEGIN, "```json")),),
    syntax=CallSyntax(
        section=(_BEGIN,),
        before=(f"{_CALL}function{_SEPARATOR}",),
        middle=("\n```json\n",),
        after=(f"\n```{_CALL_END}",),
        section_end=(_END,),
        between=("\n",),
    ),
)
V32 = AnswerFormat(
    name="deepseek_v32",
    models="DeepSeek V3.2",
    start=_TAGS.section,
    signs=(FamilySign(("｜DSML｜",)),),
    content=_TAGS.content,
)
