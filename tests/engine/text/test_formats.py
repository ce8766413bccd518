"""Formats of model families: what a template writes comes back equal, whole and in any pieces."""

import json
import re
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.grammar.calls import HarmonySyntax
from engine.text.formats import registry
from engine.text.formats.answer import AnswerContext, AnswerFormat
from engine.text.formats.calls import value_as_json
from engine.text.formats.reader import AnswerParser
from engine.text.formats.tools import ToolSet
from engine.text.reasoning import ThinkingMarkers, ThinkingState
from engine.text.spans import SpanRole
from tests.engine.text.renderers import RENDERERS, Call, Renderer

FORMATS = {form.name: form for form in (*registry.FORMATS, registry.PLAIN)}
CASES = [(name, renderer) for name, listed in RENDERERS.items() for renderer in listed]
IDS = [f"{name}-{renderer.__name__}" for name, renderer in CASES]
THINK = ThinkingMarkers(start="<think>", end="</think>")
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "flag": {"$ref": "#/$defs/flag"},
    "items": {"type": ["array", "null"]},
    "nested": {"oneOf": [{"type": "object"}, {"$ref": "#/$defs/none"}]},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "$defs": {"flag": {"type": "boolean"}, "none": {"type": "null"}},
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g-2")
)
_CODE = ["    x = 1\n", "\treturn {'a': [1, 2]}\n", "if a < b and c > d:\n", "\n", "  "]
_MARKS = [
    "<tool_call>x</tool_call>", "</tool_call>", "</function>", "</parameter>", "<parameter=a>",
    "</arg_value>", "</think>", "<|call|", "[TOOL_CALLS]", "[ARGS]", '{"name": "f"}', '"', "'", "\\",
    "</invoke>", "<![CDATA[", "]]>", "</param>", "<|close|>", "<|eom|", "</atem:parameter>", "null", "123", "True", "}", "]", ")", "`", "it's", 'say "x" now',
]  # fmt: skip
WORDS = st.sampled_from([*_CODE, *_MARKS, "Größe", "漢字", "🦜", "a", " ", "\n"])
STRINGS = st.lists(WORDS, max_size=8).map("".join)
SCALARS = st.none() | st.booleans() | st.integers(-999, 999) | STRINGS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["a", "b_c", "d1"]), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": STRINGS,
        "count": st.integers(-999, 999),
        "ratio": st.none() | st.sampled_from([0.5, -2.25, 1e9]),
        "flag": st.booleans(),
        "items": st.none() | st.lists(VALUES, max_size=3),
        "nested": st.none() | st.dictionaries(st.sampled_from(["a", "b_c"]), VALUES, max_size=3),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "g-2"]), ARGUMENTS), min_size=1, max_size=5)


def parser_of(
    form: AnswerFormat,
    thinking: ThinkingMarkers | None = None,
    state: ThinkingState = ThinkingState.FREE,
    tools: Any = TOOLS,
) -> AnswerParser:
    return form.new_parser(AnswerContext(thinking=thinking, state=state, tools=ToolSet(tools)))


def read(
    parser: AnswerParser, pieces: Iterable[str], *, is_cut: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """Return content, reasoning and calls; check that no text is lost or moved."""
    spans, written = [], ""
    for piece in pieces:
        spans += list(parser.feed(piece))
        written += piece
    spans += list(parser.flush(is_cut=is_cut))
    assert "".join(span.text for span in spans) == written
    texts = {role: "".join(span.text for span in spans if span.role is role) for role in SpanRole}
    calls: list[tuple[str, str]] = []
    for call in (call for span in spans for call in span.calls):
        if call.name is not None:
            calls.append((call.name, call.arguments))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return texts[SpanRole.CONTENT], texts[SpanRole.REASONING], calls


def parsed(calls: Sequence[tuple[str, str]]) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


# A closing tag with what follows it in a call ends a value, wherever it stands.
_AMBIGUOUS = re.compile(
    r"</(arg_value|parameter|invoke|function)>\s*(</(tool_call|function|invoke)>|<parameter=)"
)


@pytest.mark.parametrize(("name", "renderer"), CASES, ids=IDS)
@given(
    calls=CALLS,
    cuts=st.lists(st.integers(0, 3000), max_size=40),
    before=st.sampled_from(["", "Ok. ", "I look: 1 < 2\n"]),
    thought=st.sampled_from(["", "Hm <b>", "so\n\nwhat </thin"]),
)
def test_calls_come_back_as_they_were_written(
    name: str, renderer: Renderer, calls: list[Call], cuts: list[int], before: str, thought: str
) -> None:
    assume(not _AMBIGUOUS.search(str(calls).replace("\\n", "\n").replace("\\t", "\t")))
    is_first = name in ("llama", "llama_pythonic")  # their calls stand at the beginning
    before = "" if is_first else before
    if name == "harmony":
        head = (
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
        )
        if before:
            head += f"<|channel|>commentary<|message|>{before}<|end|><|start|>assistant"
    elif name == "muse":
        head = f" to=self<|message|>{thought}<|eom|><|start|>assistant" if thought else ""
        head += f" to=user<|message|>{before}<|eom|><|start|>assistant" if before else ""
    elif name == "kimi_k3":
        head = f"<|open|>think<|sep|>{thought}<|close|>think<|sep|>" if thought else ""
        head += f"<|open|>response<|sep|>{before}<|close|>response<|sep|>"
    else:
        head = (f"<think>\n{thought}\n</think>\n\n" if thought else "") + before
    text = head + renderer(calls)
    thinking = None if name == "harmony" else FORMATS[name].thinking or THINK
    expected = (before, thought, calls)
    for pieces in ([text], list(text), cut(text, cuts)):
        content, reasoning, written = read(parser_of(FORMATS[name], thinking), pieces)
        assert (content, reasoning, parsed(written)) == expected


@pytest.mark.ci
@pytest.mark.parametrize(("name", "renderer"), CASES, ids=IDS)
@given(calls=CALLS, at=st.integers(0, 3000), cuts=st.lists(st.integers(0, 3000), max_size=20))
def test_a_cut_answer_does_not_depend_on_its_pieces(
    name: str, renderer: Renderer, calls: list[Call], at: int, cuts: list[int]
) -> None:
    text = renderer(calls)[:at]
    for is_cut in (False, True):
        whole = read(parser_of(FORMATS[name]), [text], is_cut=is_cut)
        assert read(parser_of(FORMATS[name]), list(text), is_cut=is_cut) == whole
        assert read(parser_of(FORMATS[name]), cut(text, cuts), is_cut=is_cut) == whole
        assert len(whole[2]) <= len(calls)


@pytest.mark.parametrize("name", FORMATS)
@given(
    text=st.lists(st.sampled_from([*_MARKS, *_CODE, "START", "END", "f", "(", "{", "["])),
    cuts=st.lists(st.integers(0, 300), max_size=20),
)
def test_any_text_gives_the_same_in_any_pieces(name: str, text: list[str], cuts: list[int]) -> None:
    form = FORMATS[name]
    start, _, end = RENDERERS[name][0]([("f", {"text": ""})]).partition("f")
    whole_text = "".join(text).replace("START", start).replace("END", end)
    whole = read(parser_of(form, THINK), [whole_text])
    assert read(parser_of(form, THINK), list(whole_text)) == whole
    assert read(parser_of(form, THINK), cut(whole_text, cuts)) == whole


STRANGE = {
    "hermes": "<tool_call>{",
    "glm": "<tool_call>f<arg_key>text</arg_key><arg_value>",
    "qwen_coder": "<tool_call><function=f><parameter=text>",
    "minimax": '<minimax:tool_call><invoke name="f"><parameter name="nested">',
    "harmony": '<|channel|>commentary to=functions.f<|message|>{"text": "',
    "kimi": '<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": ',
    "lfm2": "<|tool_call_start|>[f(nested=",
    "gemma4": "<|tool_call>call:f{nested:",
    "llama": '{"name": "f", "parameters": {"a": ',
    "mistral": "[TOOL_CALLS] [",
    "minicpm": '<function name="f"><param name="text"><![CDATA[',
    "muse": '<atem:function_calls><atem:invoke name="f"><atem:parameter name="nested">',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|open|>argument key="nested" type="object"<|sep|>',
}
ELEMENTS = [" ", "\n", "x", "<", '"', "\\", "[", "{", "}", "{'a':[", "1,", "a=1, ", "</parameter>\n", "</arg_value>",
            '"b",', "'a': 1,", "[]", "\\n", "True, ", "<tool_call>", "<parameter=a>", "<|end|>", "```json\n", "漢", "</think>", '<|"|>', "[TOOL_CALLS]"]  # fmt: skip


def opened(name: str) -> AnswerParser:
    """Return a parser that has read the beginning of an answer in a format."""
    parser = parser_of(FORMATS.get(name, registry.PLAIN), THINK)
    _ = list(parser.feed(STRANGE.get(name, "<think>")))
    return parser


@pytest.mark.parametrize("name", [*STRANGE, "none"])
def test_what_waits_for_more_text_is_bounded(name: str) -> None:
    for element in ELEMENTS:
        parser, size = opened(name), 0
        piece = element * (1024 // len(element))
        for _ in range(8):
            size += sum(len(span.text) for span in parser.feed(piece))
            assert len(parser._reader.text) - parser._reader.at < 3_000, element
        size += sum(len(span.text) for span in parser.flush())
        assert size >= 8 * len(piece), element


@pytest.mark.ci
@pytest.mark.parametrize("name", [*STRANGE, "none"])
def test_the_cost_of_text_is_linear(name: str) -> None:
    def cost(element: str, size: int) -> float:
        parser = opened(name)
        began = time.process_time()
        for _ in parser.feed(element * (size // len(element))):
            pass
        for _ in parser.flush():
            pass
        return time.process_time() - began

    for element in ELEMENTS:
        assert any(
            cost(element, 1 << 18) <= max(2.6 * cost(element, 1 << 17), 0.02) for _ in range(5)
        ), element


LITERALS = [
    *("a:b,", "a=1, ", "=a, ", "1:2, ", "'''a''', ", "'\\x41', ", "{'a':b:c,", "{a: ["),
    *('"a" "b" ', "漢:'é', "),
]


@pytest.mark.ci
@pytest.mark.parametrize("element", LITERALS)
def test_8_mib_of_literals_never_hold_the_event_loop_for_long(element: str) -> None:
    """A value of an XML form is converted in one step; other values are read as they come, in pieces like tokens."""

    def cost(step: Any, *given: Any) -> float:
        began = time.process_time()
        step(*given)
        return time.process_time() - began

    for size in ((1 << 15) - 16, 8 << 20):
        value = "[" + element * (size // len(element.encode()))
        assert min(cost(value_as_json, value, frozenset({"array"})) for _ in range(3)) < 0.3
    for name in ("lfm2", "gemma4", "hermes", "minimax"):
        parser, piece = opened(name), element * (4096 // len(element))
        _ = list(parser.feed("["))
        assert (
            min(cost(lambda text, feed=parser.feed: list(feed(text)), piece) for _ in range(8))
            < 0.3
        )


@pytest.mark.parametrize("name", ["lfm2", "llama_pythonic"])
def test_escapes_of_python_strings(name: str) -> None:
    written = r"\x41\u0041\U0001f600\ud83d\ude00\n\'\\x4"
    text = RENDERERS[name][0]([("f", {"text": "@"})]).replace("@", written)
    for pieces in ([text], list(text)):
        _, _, calls = read(parser_of(FORMATS[name]), pieces)
        assert parsed(calls) == [("f", {"text": "AA😀😀\n'\\x4"})]


def test_json_that_is_no_call_is_shown_while_it_comes() -> None:
    parser = parser_of(FORMATS["llama"])
    opening = '{"parameters": {"a": "'
    assert not list(parser.feed(opening))
    shown = [span for _ in range(8) for span in parser.feed("x" * 1_000)]
    assert all(span.role is SpanRole.CONTENT for span in shown)
    assert sum(len(span.text) for span in shown) > 7_000
    marked = parser_of(FORMATS["hermes"])  # there the name may stand behind long arguments
    text = '<tool_call>{"arguments": {"a": "' + "x" * 9_000 + '"}, "name": "f"}</tool_call>'
    assert parsed(read(marked, cut(text, range(0, 9_000, 100)))[2]) == [("f", {"a": "x" * 9_000})]


def bare(kinds: Any) -> Any:
    schema = {"type": "object", "properties": {"a": kinds}, "$defs": {"s": {"type": "string"}}}
    return ({"type": "function", "function": {"name": "f", "parameters": schema}},)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "  x\n", "  x\n"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "02134", "02134"),
        ({"type": ["string", "null"]}, "123", "123"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "80331", "80331"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"type": "string", "nullable": True}, "5", "5"),
        ({"$ref": "#/$defs/s"}, "5", "5"),
        ({"allOf": [{"$ref": "#/$defs/s"}, {"description": "d"}]}, "5", "5"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "7"}, "7", "7"),
        ({"type": "integer"}, "about 3", "about 3"),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, " 3\n", 3),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        (
            {"type": "array"},
            "['a', None, (1, 2.5), {'b': True,}]",
            ["a", None, [1, 2.5], {"b": True}],
        ),
        ({"type": "object"}, '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ({"type": "object"}, "{'a': 'it\\'s', b: \"x\"", {"a": "it's", "b": "x"}),
        ({"type": "object"}, "no object", "no object"),
        ({"items": {"type": "string"}}, '["a"]', ["a"]),
        ({}, "5", 5),
        ({}, "five", "five"),
        ({"$ref": "#/$defs/missing"}, "five", "five"),
        ({"$ref": "#/properties/a"}, "five", "five"),
    ],
)
def test_values_have_their_declared_types(schema: Any, text: str, value: Any) -> None:
    written = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    for pieces in ([written], list(written)):
        _, _, calls = read(parser_of(FORMATS["glm"], tools=bare(schema)), pieces)
        assert parsed(calls) == [("f", {"a": value})]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        # A second call in one section, the end behind a newline, and text behind calls.
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n', "", [("f", {})]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>so', "so", [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "", [("unknown", {})]),
        ("qwen_coder", "<function=f>\n<parameter=text>\nx\n</parameter>\n</function>", "", [("f", {"text": "x"})]),
        ("qwen_coder", "use <function=x> here", "use <function=x> here", []),
        ("qwen_coder", "<tool_call><function=f><parameter=text>x</function></tool_call>", "", [("f", {"text": "x"})]),
        ("qwen_coder", "<tool_call><function=f><parameter=text>x\n", "", [("f", {"text": "x\n"})]),
        ("glm", "<tool_call>f</tool_call>", "", [("f", {})]),
        ("glm", "the tag <tool_call> opens a call", "the tag <tool_call> opens a call", []),
        ("minicpm", 'so <function name="x"></function>', 'so <function name="x"></function>', []),
        ("minicpm", "<function name=f><param name='text'> a</param></function>!", "!", [("f", {"text": " a"})]),
        ("muse", "Hi<|eot|>", "Hi", []),
        ("muse", " to=commentary<|message|>Hm.<atem:function_calls>no<|eom|><|start|>assistant to=user<|message|>Ok", "Hm.<atem:function_calls>noOk", []),
        ("kimi_k3", "<|open|>response<|sep|>Hi<|close|>response<|sep|><|close|>message<|sep|>", "Hi", []),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>', "", [("f", {})]),
        ("mistral_v11", "hm[TOOL_CALLS]f[CALL_ID]x1[ARGS]{}", "hm", [("f", {})]),
        ("mistral_v11", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', "", [("f", {})]),
        ("llama", '<|python_tag|>{"type": "function", "name": "x", "parameters": {}}', "", [("x", {})]),
        ("llama", '<|python_tag|>brave_search.call(query="a, b")', "", [("brave_search", {"query": "a, b"})]),
        ("llama", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("llama_pythonic", "[1, 2]", "[1, 2]", []),
        ("llama_pythonic", "[f(text='it's', count=3)]", "", [("f", {"text": "it's", "count": 3})]),
        ("harmony", " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", [("f", {})]),
        ("harmony", "<|channel|>commentary to=python<|message|>1+1<|call|>", "", [("python", {"input": "1+1"})]),
        ("harmony", "<|channel|>final<|message|>Hi<|return|>", "Hi", []),
        ("harmony", "Hi", "Hi", []),
        ("gemma4", '<|tool_call>call:f{text:<|"|>a {b}, "c"<|"|>,count:2}<tool_call|>', "", [("f", {"text": 'a {b}, "c"', "count": 2})]),
        ("lfm2", '<|tool_call_start|>[f(text="[x]", items=[1, "]"])]<|tool_call_end|>!', "!", [("f", {"text": "[x]", "items": [1, "]"]})]),
    ],
)  # fmt: skip
def test_variants_that_models_write(name: str, text: str, content: str, calls: list[Any]) -> None:
    for pieces in ([text], list(text)):
        shown, _, written = read(parser_of(FORMATS[name]), pieces)
        assert (shown, parsed(written)) == (content, calls)


def test_harmony_separates_channels_also_in_a_begun_answer() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    form = FORMATS["harmony"]
    assert read(parser_of(form), list(text)) == ("Hi", "Hm.", [])
    opened = parser_of(form, state=ThinkingState.OPEN)
    assert read(opened, text.removeprefix("<|channel|>analysis<|message|>")) == ("Hi", "Hm.", [])
    assert read(parser_of(form, state=ThinkingState.CONTINUED_ANSWER), "i")[0] == "i"


def test_every_format_is_tested_and_documented() -> None:
    assert RENDERERS.keys() == FORMATS.keys()
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    for form in FORMATS.values():
        demanded = isinstance(form.syntax, HarmonySyntax) or (form.syntax and form.syntax.tags)
        enforced = "no" if form.syntax is None else "on demand" if demanded else "always"
        if form is registry.PLAIN:
            assert f"| {form.models} | `{form.name}` |" in page
        else:
            assert f"| {form.models} | `{form.name}` | {enforced} |" in page
