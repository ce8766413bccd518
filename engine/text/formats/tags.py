"""Calls with a tag for each argument: Qwen3-Coder, Seed-OSS, MiniMax M2, MiniCPM5 and GLM."""

from engine.grammar.calls import CallSyntax, Expression, TagSyntax
from engine.text.formats.answer import AnswerFormat, FamilySign
from engine.text.formats.calls import GAP, NAME, Tags

# The value is on lines of its own.
_QWEN_CODER_TAGS = Tags(
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
QWEN_CODER = AnswerFormat(
    name="qwen_coder",
    models="Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5",
    start="<tool_call>",
    signs=(FamilySign(("<function=", "<tool_call>")),),
    content=_QWEN_CODER_TAGS.content,
    syntax=CallSyntax(
        section=("<tool_call>",),
        before=("\n<function=",),
        middle=(">\n",),
        after=("</function>\n</tool_call>",),
        tags=TagSyntax(before="<parameter=", middle=">\n", end="\n</parameter>", after="\n"),
    ),
)

# Qwen3-Coder's tags in a section of its own, with the value directly between them.
_SEED_TAGS = Tags(
    section="<seed:tool_call>",
    section_end="</seed:tool_call>",
    call=rf"<function={NAME}>",
    call_prefix="<function=",
    close="</function>",
    argument=r"<parameter=([^>\n]{1,256})>",
    argument_prefix="<parameter=",
    argument_end="</parameter>",
)
SEED = AnswerFormat(
    name="seed",
    models="Seed-OSS",
    start="<seed:tool_call>",
    signs=(FamilySign(("<seed:tool_call>",)),),
    content=_SEED_TAGS.content,
    syntax=CallSyntax(
        section=("<seed:tool_call>",),
        before=("\n<function=",),
        middle=(">\n",),
        after=("</function>\n</seed:tool_call>",),
        tags=TagSyntax(before="<parameter=", middle=">", end="</parameter>", after="\n"),
    ),
)

_MINIMAX_TAGS = Tags(
    section="<minimax:tool_call>",
    section_end="</minimax:tool_call>",
    call=rf"<invoke name={GAP}[\"']?{NAME}[\"']?>",
    call_prefix="<invoke name=",
    close="</invoke>",
    argument=r"<parameter name=\"?([^>\n\"]{1,256})\"?>",
    argument_prefix="<parameter name=",
    argument_end="</parameter>",
)
MINIMAX = AnswerFormat(
    name="minimax",
    models="MiniMax M2",
    start="<minimax:tool_call>",
    signs=(FamilySign(("<minimax:tool_call>",)),),
    content=_MINIMAX_TAGS.content,
    syntax=CallSyntax(
        section=("<minimax:tool_call>", "\n"),
        before=('<invoke name="',),
        middle=('">\n',),
        after=("</invoke>\n",),
        section_end=("</minimax:tool_call>",),
        between=(),
        tags=TagSyntax(before='<parameter name="', middle='">', end="</parameter>", after="\n"),
    ),
)

# There is no section, and CDATA stands around code.
_MINICPM_TAGS = Tags(
    section="",
    section_end="",
    call=rf"<function name=[\"']?{NAME}[\"']?\s{{0,8}}>",
    call_prefix="<function name=",
    close="</function>",
    argument=r"<param name=[\"']?([^>\n\"']{1,256})[\"']?\s{0,8}>",
    argument_prefix="<param name=",
    argument_end="</param>",
    is_bare=True,
    cdata=("<![CDATA[", "]]>"),
)
MINICPM = AnswerFormat(
    name="minicpm",
    models="MiniCPM5",
    start="<function name=",
    signs=(FamilySign(('<function name="', '<param name="')),),
    content=_MINICPM_TAGS.content,
    syntax=CallSyntax(
        section=('<function name="',),
        before=(),
        middle=('">',),
        after=("</function>",),
        tags=TagSyntax(before='<param name="', middle='">', end="</param>"),
    ),
)

# GLM 4.7 and Laguna write no newlines.
_GLM_TAGS = Tags(
    section="<tool_call>",
    section_end="",
    call=rf"([^<>\s{{}}]{{1,256}}){GAP}(?=<arg_key>|</tool_call>)",
    call_prefix="",
    close="</tool_call>",
    argument=rf"<arg_key>([^<]{{1,256}})</arg_key>{GAP}<arg_value>",
    argument_prefix="<arg_key>",
    argument_end="</arg_value>",
)
GLM = AnswerFormat(
    name="glm",
    models="GLM 4.5, 4.6, 4.7 and 5, Laguna",
    start="<tool_call>",
    signs=(FamilySign(("<arg_key>",)),),
    content=_GLM_TAGS.content,
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
