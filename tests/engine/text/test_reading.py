"""From tokens to deltas: however a text is cut into tokens, a client sees the same."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.jobs import FinishReason, TokenLogprobs, TokenOutput
from engine.text.output_parser import Delta, OutputParser, ToolCallDelta
from engine.text.reasoning import ReasoningParser, ThinkingMarkers, ThinkingState, thinking_state
from engine.text.spans import StopMatcher
from engine.text.tool_calls import PLAIN, ToolCallFormat, ToolCallParser, Tools

THINKING = ThinkingMarkers(start="<think>", end="</think>")
TOOLS = tuple({"type": "function", "function": {"name": name}} for name in ("f", "g"))


@dataclass(slots=True)
class Pieces:
    """A vocabulary whose tokens are pieces of one text, in order."""

    pieces: Sequence[str]
    _new: str = field(default="")

    def add_token(self, token: int) -> None:
        self._new += self.pieces[token]

    def finalize(self) -> None:
        """Nothing is ever held back here."""

    @property
    def last_segment(self) -> str:
        new, self._new = self._new, ""
        return new


def read(
    pieces: Sequence[str], finish: FinishReason = "stop", **how: Any
) -> tuple[Delta, OutputParser]:
    reading = OutputParser(
        detokenizer=Pieces(pieces),
        stops=StopMatcher(how.get("stops", ())),
        thoughts=ReasoningParser(how.get("thinking"), how.get("opening", ThinkingState.FREE)),
        calls=ToolCallParser(dialect=how.get("dialect"), tools=how.get("tools", ())),
        is_parallel=how.get("is_parallel", True),
        call_seed="seed",
    )
    likelihood = TokenLogprobs(logprob=-1.0, top=())
    deltas: list[Delta] = []
    for token in range(len(pieces)):
        is_last = finish == "length" and token == len(pieces) - 1
        made = TokenOutput(
            job_id=1, token=token, likelihood=likelihood, finish=finish if is_last else None
        )
        deltas.append(reading.take(made))
        if reading.is_over:
            break
    if not reading.is_over:
        deltas.append(
            reading.take(TokenOutput(job_id=1, token=-1, finish="stop", likelihood=likelihood))
        )
    return Delta.joined(deltas), reading


def joined(delta: Delta) -> list[ToolCallDelta]:
    """Join the pieces of each call."""
    found: list[ToolCallDelta] = []
    for piece in delta.tool_calls:
        if piece.name is not None:
            assert piece.index == len(found)
            found.append(piece)
        else:
            assert piece.index == len(found) - 1
            found[-1] = replace(found[-1], arguments=found[-1].arguments + piece.arguments)
    return found


def shown(delta: Delta, reading: OutputParser) -> Any:
    return delta.content, delta.reasoning, joined(delta), reading.finish


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(min(one, len(text)) for one in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


_MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "<t", "STOP"]
_CALLS = [
    '{"name": "f", "arguments": {"a": "</tool_call>"}}',
    '{"name": "x", "arguments": {}}',
]
PARTS = st.sampled_from([*_MARKS, *_CALLS, "\n", " ", "a", "b", "{"])
TEXTS = st.lists(PARTS, max_size=12).map("".join)
CUTS = st.lists(st.integers(0, 80), max_size=12)
DIALECTS = st.sampled_from(
    [None, PLAIN, ToolCallFormat(start="<t", end="", parse=PLAIN.parse, form=None, is_native=True)]
)


@given(
    text=TEXTS,
    cuts=CUTS,
    stops=st.sampled_from([(), ("STOP",), ("ab", "a<"), ("\n",)]),
    how=st.sampled_from(ThinkingState),
    dialect=DIALECTS,
    is_parallel=st.booleans(),
)
def test_how_the_text_is_cut_changes_nothing(
    text: str,
    cuts: list[int],
    stops: tuple[str, ...],
    how: ThinkingState,
    dialect: ToolCallFormat | None,
    *,
    is_parallel: bool,
) -> None:
    options: dict[str, Any] = {
        "stops": stops,
        "thinking": THINKING,
        "opening": how,
        "dialect": dialect,
        "tools": TOOLS,
        "is_parallel": is_parallel,
    }
    whole = shown(*read([text], **options))
    assert shown(*read(list(text), **options)) == whole
    assert shown(*read(cut(text, cuts), **options)) == whole


@given(text=TEXTS, cuts=CUTS, stops=st.sampled_from([(), ("STOP",), ("b<", "a")]))
def test_tokens_are_told_with_the_content_they_spell(
    text: str, cuts: list[int], stops: tuple[str, ...]
) -> None:
    pieces = [piece for piece in cut(text, cuts) if piece]
    delta, _ = read(pieces, stops=stops, thinking=THINKING, dialect=PLAIN, tools=TOOLS)
    tokens = [one.token for one in delta.scored]
    assert tokens == sorted(set(tokens))
    # What they spell has the whole content in it, and each spells some of it.
    spelled = "".join(pieces[token] for token in tokens)
    rest = iter(spelled)
    assert all(one in rest for one in delta.content)
    if not delta.tool_calls and not delta.reasoning and delta.content == text:
        assert tokens == list(range(len(pieces)))
    assert bool(tokens) == bool(delta.content)


def test_a_token_held_back_by_a_stop_word_is_told_later_and_none_behind_it() -> None:
    delta, reading = read(["a", "ST", "x", "b", "ST", "OP", "c"], stops=("STOP",))
    assert delta.content == "aSTxb"
    assert [one.token for one in delta.scored] == [0, 1, 2, 3]
    assert reading.finish == "stop"
    assert reading.tokens == [0, 1, 2, 3, 4, 5]


def test_a_token_that_is_half_shown_is_told() -> None:
    delta, _ = read(["xy", "zST", "OP"], stops=("STOP",))
    assert (delta.content, [one.token for one in delta.scored]) == ("xyz", [0, 1])


@pytest.mark.parametrize(
    ("text", "how", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", ThinkingState.FREE, "hm", "yes"),
        ("\n<think>hm</think>yes", ThinkingState.FREE, "hm", "yes"),
        ("\nhm\n\nso</think>\nyes\n", ThinkingState.OPEN, "hm\n\nso", "yes\n"),
        ("\n\n<think>no", ThinkingState.CLOSED, "", "<think>no"),
        ("yes <think>no</think>", ThinkingState.FREE, "", "yes <think>no</think>"),
        ("<think>cut off \n", ThinkingState.FREE, "cut off", ""),
        ("  <thi", ThinkingState.FREE, "", "  <thi"),
        ("<think></think>", ThinkingState.FREE, "", ""),
    ],
)
def test_thoughts_are_told_from_the_answer(
    text: str, how: ThinkingState, reasoning: str, content: str
) -> None:
    delta, reading = read(list(text), thinking=THINKING, opening=how)
    assert (delta.reasoning, delta.content) == (reasoning, content)
    assert reading.finish == "stop"
    assert bool(delta.scored) == bool(content)


def test_tokens_of_thoughts_are_counted() -> None:
    _, reading = read(["<think>", "a", "b", "</think>", "c"], thinking=THINKING)
    assert reading.reasoning_tokens == 4
    _, reading = read(["a", "</think>", "c"], thinking=THINKING, opening=ThinkingState.OPEN)
    assert reading.reasoning_tokens == 2
    _, reading = read(["a", "b"], thinking=THINKING)
    assert reading.reasoning_tokens == 0


def test_stop_words_are_for_content_alone() -> None:
    text = '<think>STOP</think>a<tool_call>{"name": "f", "arguments": {"x": "STOP"}}</tool_call>'
    options: dict[str, Any] = {"thinking": THINKING, "dialect": PLAIN, "tools": TOOLS}
    delta, reading = read([text], stops=("STOP",), **options)
    assert delta.reasoning == "STOP"
    assert delta.content == "a"
    assert [json.loads(call.arguments) for call in joined(delta)] == [{"x": "STOP"}]
    assert reading.finish == "tool_calls"


def test_the_end_of_a_prompt_says_who_opened_the_thinking() -> None:
    assert thinking_state("<|assistant|><think>\n", THINKING) is ThinkingState.OPEN
    assert thinking_state("<think>\n\n</think>\n\n", THINKING) is ThinkingState.CLOSED
    assert thinking_state("I like <think> tags\n<|assistant|>", THINKING) is ThinkingState.FREE


CALL = '<tool_call>\n{"name": "%s", "arguments": {"a": %s}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        (CALL % ("f", 1), "", [("f", {"a": 1})]),
        (f"so: {CALL % ('f', 1)}\n{CALL % ('g', 2)}\n", "so: ", [("f", {"a": 1}), ("g", {"a": 2})]),
        (CALL % ("f", '"</tool_call>"'), "", [("f", {"a": "</tool_call>"})]),
        (CALL % ("f", 1) + "\nand more", "\nand more", [("f", {"a": 1})]),
        (CALL % ("unknown", 1), CALL % ("unknown", 1), []),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ("<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, []),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", {})]),
        ('<tool_call>{"name": ["f"], "arguments": {}}</tool_call>', None, []),
        (CALL % ("f", r'"\ud800 ü"'), "", [("f", {"a": "\ud800 ü"})]),
    ],
)
def test_calls_are_read_and_what_is_none_is_shown(
    text: str, content: str | None, calls: list[Any]
) -> None:
    delta, reading = read(list(text), dialect=PLAIN, tools=TOOLS)
    assert delta.content == (text if content is None else content)
    assert [(call.name, json.loads(call.arguments)) for call in joined(delta)] == calls
    assert all(call.arguments.encode() for call in joined(delta))
    assert len({call.id for call in joined(delta)}) == len(calls)
    assert reading.finish == ("tool_calls" if calls else "stop")


def test_without_parallel_calls_the_first_ends_the_answer() -> None:
    text = CALL % ("f", 1) + "\n" + CALL % ("g", 2)
    delta, reading = read(list(text), dialect=PLAIN, tools=TOOLS, is_parallel=False)
    assert [call.name for call in joined(delta)] == ["f"]
    assert reading.finish == "tool_calls"
    assert len(reading.tokens) == len(CALL % ("f", 1))


def test_an_answer_that_was_cut_off_says_so_even_behind_a_call() -> None:
    delta, reading = read([CALL % ("f", 1), "\n<tool_"], "length", dialect=PLAIN, tools=TOOLS)
    assert len(joined(delta)) == 1
    assert reading.finish == "length"


def test_arguments_are_told_as_they_come_even_if_they_are_cut_off() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "x{'
    delta, reading = read(list(text), "length", dialect=PLAIN, tools=TOOLS)
    (call,) = joined(delta)
    assert (call.name, call.arguments) == ("f", '{"a": "x{')
    assert (delta.content, reading.finish) == ("", "length")
    assert len(delta.tool_calls) == 1 + len(call.arguments)


def test_what_follows_the_arguments_is_not_shown() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}, "id": 7}\n</tool_call>so'
    delta, _ = read(list(text), dialect=PLAIN, tools=TOOLS)
    assert (joined(delta)[0].arguments, delta.content) == ("{}", "so")


def test_a_dialect_without_an_end_marker_reads_all_calls_at_the_end() -> None:
    def parse(text: str, tools: Tools) -> Any:
        assert tools == TOOLS
        return [{"name": name, "arguments": {}} for name in text.split(",")]

    dialect = ToolCallFormat(start="[C]", end="", parse=parse, form=None, is_native=True)
    delta, _ = read(list("hm[C]f,g"), dialect=dialect, tools=TOOLS)
    assert delta.content == "hm"
    assert [call.name for call in delta.tool_calls] == ["f", "g"]


def test_ids_are_derived() -> None:
    texts = [CALL % ("f", 1), CALL % ("f", 1)]
    (one, _), (other, _) = (read(texts, dialect=PLAIN, tools=TOOLS) for _ in range(2))
    assert [call.id for call in one.tool_calls] == [call.id for call in other.tool_calls]
