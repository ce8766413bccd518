"""Response bodies: log probabilities, messages with tool calls, performance."""

from array import array
from typing import Any

import orjson
import pytest

from engine.jobs import SamplingParams, TokenLogprobs
from engine.openai import response_body
from engine.openai.request_body import Conversation, GenerationRequest, TextPrompts
from engine.openai.response_body import (
    CompleteChoice,
    Echo,
    RequestTiming,
    ResponseFormatter,
    ResponseTotals,
    TextOffset,
    Usage,
)
from engine.text.output_parser import Delta, ScoredToken, ToolCallDelta

WORLD = "世".encode()
PIECES = {1: b"a", 2: WORLD[:1], 3: WORLD[1:], 4: b" bc"}


def spell(token: int) -> bytes:
    return PIECES[token]


def scored(*tokens: int, logprob: float = -0.5) -> tuple[ScoredToken, ...]:
    logprobs = TokenLogprobs(
        logprob=logprob,
        top_tokens=array("i", (1, 2)),
        top_logprobs=array("f", (-0.25, float("-inf"))),
    )
    return tuple(ScoredToken(token=token, logprobs=logprobs) for token in tokens)


def test_half_a_character_has_bytes() -> None:
    logprobs = response_body.chat_logprobs(scored(2, 3), spell)
    assert [token["bytes"] for token in logprobs["content"]] == [[0xE4], [0xB8, 0x96]]
    assert [token["token"] for token in logprobs["content"]] == ["\ufffd", "\ufffd\ufffd"]
    assert logprobs["content"][0]["top_logprobs"][1]["logprob"] == -9999.0


def test_text_offsets_count_characters() -> None:
    offset = TextOffset()
    first = response_body.completion_logprobs(scored(1, 2, 3), spell, offset)
    rest = response_body.completion_logprobs(scored(4, 1), spell, offset)
    assert first["text_offset"] + rest["text_offset"] == [0, 1, 1, 2, 5]
    stray = TextOffset()
    pieces = (b"a", WORLD[:1], b"b", WORLD[1:2], b"c", WORLD)
    text = b"".join(pieces).decode(errors="replace")
    assert [text[stray.take(piece)] for piece in pieces] == [
        "a",
        "\ufffd",
        "b",
        "\ufffd",
        "c",
        "世",
    ]
    assert first["top_logprobs"][0] == {"a": -0.25, "\ufffd": -9999.0}


def formatter(*, is_chat: bool = True, top_logprobs: int | None = None) -> ResponseFormatter:
    request = GenerationRequest(
        model="m",
        prompt=Conversation(messages=()) if is_chat else TextPrompts(contents=("x",)),
        max_tokens=None,
        sampling=SamplingParams(temperature=0),
        seed=None,
        stops=(),
        is_streamed=True,
        has_usage=False,
        top_logprobs=top_logprobs,
    )
    return ResponseFormatter(
        id="i",
        created=1,
        request=request,
        fingerprint="fp",
        spell=spell,
        offsets=(TextOffset(),),
        echoes=(Echo((1,), ""),),
    )


TOTALS = ResponseTotals(usage=Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1))
CALLS = (
    ToolCallDelta(index=0, id="a", name="f", arguments='{"x"'),
    ToolCallDelta(index=1, id="b", name="g"),
    ToolCallDelta(index=0, arguments=":1}"),
    ToolCallDelta(index=1, arguments="{}"),
)


def test_a_message_with_only_calls_has_no_content() -> None:
    delta = Delta(tool_calls=CALLS, reasoning="hm")
    body = orjson.loads(
        formatter().full_body([CompleteChoice(delta=delta, finish="tool_calls")], TOTALS)
    )
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "id": "a",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"x":1}'},
                    },
                    {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
                ],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        }
    ]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_a_chunk_has_one_entry_for_each_call() -> None:
    def entries(calls: tuple[ToolCallDelta, ...]) -> list[dict[str, Any]]:
        chunk = formatter().delta_chunk(0, Delta(tool_calls=calls))
        (choice,) = orjson.loads(chunk.removeprefix(b"data: "))["choices"]
        found: list[dict[str, Any]] = choice["delta"]["tool_calls"]
        return found

    first = {"index": 0, "id": "a", "type": "function"}
    second = {"index": 1, "id": "b", "type": "function"}
    assert entries(CALLS) == [
        {**first, "function": {"arguments": '{"x":1}', "name": "f"}},
        {**second, "function": {"arguments": "{}", "name": "g"}},
    ]
    assert entries(CALLS[2:3]) == [{"index": 0, "function": {"arguments": ":1}"}}]


@pytest.mark.parametrize("is_chat", [True, False])
def test_an_empty_answer_has_all_fields(*, is_chat: bool) -> None:
    complete = CompleteChoice(delta=Delta(), finish="stop")
    (choice,) = orjson.loads(
        formatter(is_chat=is_chat, top_logprobs=1).full_body([complete], TOTALS)
    )["choices"]
    nothing: dict[str, list[str] | None] = {"content": [], "refusal": None}
    empty: dict[str, list[str]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    assert choice["logprobs"] == (nothing if is_chat else empty)
    assert (choice["message"]["content"] if is_chat else choice["text"]) == ""


def test_performance() -> None:
    timing = RequestTiming(
        arrived_s=10.0,
        started_s=11.0,
        first_s=13.0,
        last_s=15.0,
        prompt_tokens=120,
        cached_tokens=20,
        generated_tokens=22,
        choices=2,
    )
    assert response_body.performance_body(timing) == {
        "queue_s": 1.0,
        "prefill_s": 2.0,
        "ttft_s": 3.0,
        "prompt_tokens_per_s": 50.0,
        "decode_tokens_per_s": 10.0,
        "cached_tokens": 20,
    }
