"""The output parser: the same text gives the same deltas, however it is cut into tokens."""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.jobs import FinishReason, TokenLogprobs, TokenOutput
from engine.text.formats.answer import AnswerContext, AnswerFormat
from engine.text.formats.registry import FORMATS, PLAIN
from engine.text.formats.tools import ToolSet
from engine.text.output_parser import Delta, OutputParser, ToolCallDelta
from engine.text.reasoning import (
    ThinkingMarkers,
    ThinkingState,
    continued_state,
    thinking_state,
)
from engine.text.spans import StopMatcher

MARKERS = ThinkingMarkers(start="<think>", end="</think>")
TOOLS = tuple({"type": "function", "function": {"name": name}} for name in ("f", "g"))


@dataclass(slots=True)
class Pieces:
    """A vocabulary whose tokens are pieces of one text, in order."""

    pieces: Sequence[str]
    _new: str = field(default="")

    def add_token(self, token: int) -> None:
        self._new += self.pieces[token]

    def finalize(self) -> None:
        """Do nothing: no text is held back here."""

    @property
    def last_segment(self) -> str:
        new, self._new = self._new, ""
        return new


def parse_pieces(
    pieces: Sequence[str], finish: FinishReason = "stop", **options: Any
) -> tuple[Delta, OutputParser]:
    """Parse pieces as tokens; return the joined delta and the parser."""
    parser = OutputParser(
        detokenizer=Pieces(pieces),
        stops=StopMatcher(options.get("stops", ())),
        answer=(options.get("call_format") or PLAIN).new_parser(
            AnswerContext(
                thinking=options.get("thinking"),
                state=options.get("state", ThinkingState.FREE),
                tools=ToolSet(options["tools"]) if options.get("call_format") else None,
            )
        ),
        must_call=options.get("must_call", False),
        is_parallel=options.get("is_parallel", True),
        call_seed="seed",
    )
    logprobs = TokenLogprobs(logprob=-1.0, top_tokens=array("i"), top_logprobs=array("f"))
    deltas: list[Delta] = []
    for token in range(len(pieces)):
        is_last = finish == "length" and token == len(pieces) - 1
        output = TokenOutput(
            job_id=1, token=token, logprobs=logprobs, finish=finish if is_last else None
        )
        deltas.append(parser.take(output))
        if parser.is_over:
            break
    if not parser.is_over:
        deltas.append(
            parser.take(TokenOutput(job_id=1, token=-1, finish="stop", logprobs=logprobs))
        )
    return Delta.joined(deltas), parser


def joined(delta: Delta) -> list[ToolCallDelta]:
    """Join the pieces of each call."""
    tool_call_deltas: list[ToolCallDelta] = []
    for piece in delta.tool_calls:
        if piece.name is not None:
            assert piece.index == len(tool_call_deltas)
            tool_call_deltas.append(piece)
        else:
            assert piece.index == len(tool_call_deltas) - 1
            tool_call_deltas[-1] = msgspec.structs.replace(
                tool_call_deltas[-1], arguments=tool_call_deltas[-1].arguments + piece.arguments
            )
    return tool_call_deltas


def visible(delta: Delta, parser: OutputParser) -> Any:
    return delta.content, delta.reasoning, joined(delta), parser.finish


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


_MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "<t", "STOP"]
_CALLS = [
    '{"name": "f", "arguments": {"a": "</tool_call>"}}',
    '{"name": "x", "arguments": {}}',
]
PARTS = st.sampled_from([*_MARKS, *_CALLS, "\n", " ", "a", "b", "{"])
TEXTS = st.lists(PARTS, max_size=12).map("".join)
CUTS = st.lists(st.integers(0, 80), max_size=12)
CALL_FORMATS = st.sampled_from([None, PLAIN, *FORMATS])


@given(
    text=TEXTS,
    cuts=CUTS,
    stops=st.sampled_from([(), ("STOP",), ("ab", "a<"), ("\n",)]),
    state=st.sampled_from(ThinkingState),
    call_format=CALL_FORMATS,
    is_parallel=st.booleans(),
)
def test_the_cuts_do_not_change_the_result(
    text: str,
    cuts: list[int],
    stops: tuple[str, ...],
    state: ThinkingState,
    call_format: AnswerFormat | None,
    *,
    is_parallel: bool,
) -> None:
    options: dict[str, Any] = {
        "stops": stops,
        "thinking": MARKERS,
        "state": state,
        "call_format": call_format,
        "tools": TOOLS,
        "is_parallel": is_parallel,
    }
    whole = visible(*parse_pieces([text], **options))
    assert visible(*parse_pieces(list(text), **options)) == whole
    assert visible(*parse_pieces(cut(text, cuts), **options)) == whole


@given(text=TEXTS, cuts=CUTS, stops=st.sampled_from([(), ("STOP",), ("b<", "a")]))
def test_tokens_come_with_the_content_that_they_spell(
    text: str, cuts: list[int], stops: tuple[str, ...]
) -> None:
    pieces = [piece for piece in cut(text, cuts) if piece]
    delta, _ = parse_pieces(pieces, stops=stops, thinking=MARKERS, call_format=PLAIN, tools=TOOLS)
    tokens = [scored.token for scored in delta.scored]
    assert tokens == sorted(set(tokens))
    # Their text contains the whole content, and each spells a part of it.
    spelled = "".join(pieces[token] for token in tokens)
    rest = iter(spelled)
    assert all(character in rest for character in delta.content)
    if not delta.tool_calls and not delta.reasoning and delta.content == text:
        assert tokens == list(range(len(pieces)))
    assert bool(tokens) == bool(delta.content)


def test_tokens_held_back_come_later_and_none_after_a_stop_word() -> None:
    delta, parser = parse_pieces(["a", "ST", "x", "b", "ST", "OP", "c"], stops=("STOP",))
    assert delta.content == "aSTxb"
    assert [scored.token for scored in delta.scored] == [0, 1, 2, 3]
    assert parser.finish == "stop"
    assert parser.tokens == [0, 1, 2, 3, 4, 5]


def test_a_partly_shown_token_counts() -> None:
    delta, _ = parse_pieces(["xy", "zST", "OP"], stops=("STOP",))
    assert (delta.content, [scored.token for scored in delta.scored]) == ("xyz", [0, 1])


@pytest.mark.parametrize(
    ("text", "state", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", ThinkingState.FREE, "hm", "yes"),
        ("\n<think>hm</think>yes", ThinkingState.FREE, "hm", "yes"),
        ("\nhm\n\nso</think>\nyes\n", ThinkingState.OPEN, "hm\n\nso", "yes\n"),
        ("\n\n<think>no", ThinkingState.CLOSED, "", "<think>no"),
        ("yes <think>no</think>", ThinkingState.FREE, "", "yes <think>no</think>"),
        ("<think>cut off \n", ThinkingState.FREE, "cut off", ""),
        (" more</think>\n\nyes", ThinkingState.CONTINUED_REASONING, " more", "yes"),
        (" yes <think>no", ThinkingState.CONTINUED_ANSWER, "", " yes <think>no"),
        ("  <thi", ThinkingState.FREE, "", "  <thi"),
        ("<think></think>", ThinkingState.FREE, "", ""),
    ],
)
def test_reasoning_is_separated_from_the_answer(
    text: str, state: ThinkingState, reasoning: str, content: str
) -> None:
    delta, parser = parse_pieces(list(text), thinking=MARKERS, state=state)
    assert (delta.reasoning, delta.content) == (reasoning, content)
    assert parser.finish == "stop"
    assert bool(delta.scored) == bool(content)


def test_reasoning_tokens_are_counted() -> None:
    _, parser = parse_pieces(["<think>", "a", "b", "</think>", "c"], thinking=MARKERS)
    assert parser.reasoning_tokens == 4
    _, parser = parse_pieces(["a", "</think>", "c"], thinking=MARKERS, state=ThinkingState.OPEN)
    assert parser.reasoning_tokens == 2
    _, parser = parse_pieces(["a", "b"], thinking=MARKERS)
    assert parser.reasoning_tokens == 0


def test_stop_words_apply_to_content_only() -> None:
    text = '<think>STOP</think>a<tool_call>{"name": "f", "arguments": {"x": "STOP"}}</tool_call>'
    options: dict[str, Any] = {"thinking": MARKERS, "call_format": PLAIN, "tools": TOOLS}
    delta, parser = parse_pieces([text], stops=("STOP",), **options)
    assert delta.reasoning == "STOP"
    assert delta.content == "a"
    assert [json.loads(call.arguments) for call in joined(delta)] == [{"x": "STOP"}]
    assert parser.finish == "tool_calls"


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("<think>so", ThinkingState.CONTINUED_REASONING),
        ("<think>so</think>\nOne", ThinkingState.CONTINUED_ANSWER),
        ("One", ThinkingState.CONTINUED_ANSWER),
    ],
)
def test_a_begun_answer_gives_the_thinking_state(text: str, state: ThinkingState) -> None:
    assert continued_state(text, MARKERS) is state
    assert continued_state(text, None) is ThinkingState.CONTINUED_ANSWER


def test_the_end_of_a_prompt_gives_the_thinking_state() -> None:
    assert thinking_state("<|assistant|><think>\n", MARKERS) is ThinkingState.OPEN
    assert thinking_state("<think>\n\n</think>\n\n", MARKERS) is ThinkingState.CLOSED
    assert thinking_state("I like <think> tags\n<|assistant|>", MARKERS) is ThinkingState.FREE


CALL = '<tool_call>\n{"name": "%s", "arguments": {"a": %s}}\n</tool_call>'


DEEP_CALL = '<tool_call>{"name": "f", "arguments": "%s"}</tool_call>' % ("[" * 5000)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        (CALL % ("f", 1), "", [("f", {"a": 1})]),
        (f"so: {CALL % ('f', 1)}\n{CALL % ('g', 2)}\n", "so: ", [("f", {"a": 1}), ("g", {"a": 2})]),
        (CALL % ("f", '"</tool_call>"'), "", [("f", {"a": "</tool_call>"})]),
        (CALL % ("f", 1) + "\nand more", "\nand more", [("f", {"a": 1})]),
        (CALL % ("unknown", 1), "", [("unknown", {"a": 1})]),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ("<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, []),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", {})]),
        ('<tool_call>{"name": ["f"], "arguments": {}}</tool_call>', None, []),
        (DEEP_CALL, "", [("f", "[" * 5000)]),
        (CALL % ("f", r'"\ud800 ü"'), "", [("f", {"a": "\ud800 ü"})]),
    ],
)
def test_calls_are_parsed_and_other_text_is_shown(
    text: str, content: str | None, calls: list[Any]
) -> None:
    delta, parser = parse_pieces(list(text), call_format=PLAIN, tools=TOOLS)
    assert delta.content == (text if content is None else content)
    written = [
        (call.name, call.arguments if "[[" in call.arguments else json.loads(call.arguments))
        for call in joined(delta)
    ]
    assert written == calls
    assert all(call.arguments.encode() for call in joined(delta))
    assert len({call.id for call in joined(delta)}) == len(calls)
    assert parser.finish == ("tool_calls" if calls else "stop")


def test_without_parallel_calls_the_first_call_ends_the_answer() -> None:
    text = CALL % ("f", 1) + "\n" + CALL % ("g", 2)
    delta, parser = parse_pieces(list(text), call_format=PLAIN, tools=TOOLS, is_parallel=False)
    assert [call.name for call in joined(delta)] == ["f"]
    assert parser.finish == "tool_calls"
    assert len(parser.tokens) == len(CALL % ("f", 1))


def test_a_cut_answer_ends_with_length_even_after_a_call() -> None:
    delta, parser = parse_pieces(
        [CALL % ("f", 1), "\n<tool_"], "length", call_format=PLAIN, tools=TOOLS
    )
    assert len(joined(delta)) == 1
    assert parser.finish == "length"


def test_arguments_are_streamed_even_if_they_are_cut() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "x{'
    delta, parser = parse_pieces(list(text), "length", call_format=PLAIN, tools=TOOLS)
    (call,) = joined(delta)
    assert (call.name, call.arguments) == ("f", '{"a": "x{')
    assert (delta.content, parser.finish) == ("", "length")
    assert len(delta.tool_calls) == 1 + len(call.arguments)


def test_text_after_the_arguments_is_hidden() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}, "id": 7}\n</tool_call>so'
    delta, _ = parse_pieces(list(text), call_format=PLAIN, tools=TOOLS)
    assert (joined(delta)[0].arguments, delta.content) == ("{}", "so")


def test_text_beside_calls_that_must_be_made_is_hidden() -> None:
    text = "Sure. " + CALL % ("f", 1) + "<tool_c"
    options: dict[str, Any] = {"call_format": PLAIN, "tools": TOOLS, "must_call": True}
    delta, parser = parse_pieces(list(text), "length", **options)
    assert (delta.content, len(joined(delta)), parser.finish) == ("", 1, "length")


def test_call_ids_are_derived() -> None:
    texts = [CALL % ("f", 1), CALL % ("f", 1)]
    (first, _), (second, _) = (
        parse_pieces(texts, call_format=PLAIN, tools=TOOLS) for _ in range(2)
    )
    assert [call.id for call in first.tool_calls] == [call.id for call in second.tool_calls]
