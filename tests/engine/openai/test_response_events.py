"""Events and bodies of the Responses API, validated by OpenAI's own client."""

import json
import time
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from engine.openai import responses
from engine.openai.response_body import Usage
from engine.openai.response_events import ResponseEventBuilder
from engine.openai.response_tools import FreeformInput
from engine.text.output_parser import Delta, ToolCallDelta
from schemas.wire.errors import Refusal

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
BODY = json.dumps({"model": "m", "input": "hi", "tools": [TOOL]}).encode()


def event_builder() -> ResponseEventBuilder:
    return ResponseEventBuilder(id="resp_1", created=1, echo=responses.parse(BODY).echo)


def events(out: bytes) -> list[Any]:
    found = []
    for at, block in enumerate(out.decode().split("\n\n")[:-1]):
        name, data = block.split("\n")
        tree = json.loads(data.removeprefix("data: "))
        assert name == f"event: {tree['type']}"
        assert tree["sequence_number"] == at
        found.append(EVENTS.validate_python(tree))
    return found


TURN = [
    Delta(reasoning="let "),
    Delta(reasoning="me", content="I "),
    Delta(),
    Delta(content="look"),
    Delta(tool_calls=(ToolCallDelta(index=0, id="c1", name="weather", arguments='{"ci'),)),
    Delta(
        tool_calls=(
            ToolCallDelta(index=0, arguments="ty"),
            ToolCallDelta(index=0, arguments='":"x"}'),
        )
    ),
    Delta(tool_calls=(ToolCallDelta(index=1, id="c2", name="weather", arguments="{}"),)),
]


def test_a_turn_with_items_of_all_kinds() -> None:
    builder = event_builder()
    found = events(
        builder.begin()
        + b"".join(builder.add(delta) for delta in TURN)
        + builder.end("tool_calls", USAGE, now=9)
    )
    kinds = [event.type.removeprefix("response.") for event in found]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    answer = found[-1].response
    assert [item.type for item in answer.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert answer.output[0].content[0].text == "let me"
    assert answer.output_text == "I look"
    assert answer.output[2].arguments == '{"city":"x"}'
    assert (answer.output[3].call_id, answer.status) == ("c2", "completed")
    assert len({item.id for item in answer.output}) == 4
    assert answer.usage.output_tokens_details.reasoning_tokens == 2
    assert answer.usage.input_tokens_details.cached_tokens == 4
    whole = event_builder()
    for delta in TURN:
        whole.add(delta)
    assert whole.body("tool_calls", USAGE, now=9) == json.loads(response_of(found[-1]))


def response_of(event: BaseModel) -> str:
    return json.dumps(event.model_dump(by_alias=True, exclude_unset=True)["response"])


def test_a_cut_a_failed_and_an_empty_response() -> None:
    cut = event_builder()
    found = events(cut.begin() + cut.add(Delta(content="x")) + cut.end("length", USAGE, now=9))
    assert found[-1].type == "response.incomplete"
    assert found[-1].response.incomplete_details.reason == "max_output_tokens"
    assert found[-1].response.output[0].status == "incomplete"
    broken = event_builder()
    refusal = Refusal(status=503, message="shutting down")
    found = events(broken.begin() + broken.add(Delta(content="x")) + broken.fail(refusal))
    assert (found[-1].type, found[-1].response.error.message) == (
        "response.failed",
        "shutting down",
    )
    empty = event_builder()
    found = events(empty.begin() + empty.end("stop", USAGE, now=9))
    assert (found[-1].response.status, found[-1].response.output_text) == ("completed", "")


PATCH = {"type": "custom", "name": "apply_patch"}
AGENTS = {"type": "namespace", "name": "agents", "tools": [TOOL, PATCH]}
TEXT = '*** Begin "Patch"\n+\ttab \\ \u00e9 \U0001f600 </tool_call>\n*** End'
ARGUMENTS = [
    json.dumps({"input": TEXT}),
    json.dumps({"input": TEXT}, ensure_ascii=False).replace("\\n", "\n"),
    ' {\n"input" : ' + json.dumps(TEXT) + ', "more": 1}',
    json.dumps({"patch": TEXT}),
    json.dumps(TEXT),
    TEXT,
]


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_a_freeform_call_is_its_text_in_pieces_of_any_size(arguments: str, size: int) -> None:
    body = json.dumps({"model": "m", "input": "hi", "tools": [PATCH, AGENTS]}).encode()
    request = responses.parse(body)
    builder = ResponseEventBuilder(id="resp_1", created=1, echo=request.echo, tools=request.tools)
    pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    calls = [ToolCallDelta(index=0, id="c1", name="apply_patch")]
    calls += [ToolCallDelta(index=0, arguments=piece) for piece in pieces]
    calls.append(ToolCallDelta(index=1, id="c2", name="agents__weather", arguments="{}"))
    calls.append(ToolCallDelta(index=2, id="c3", name="agents__apply_patch", arguments=arguments))
    out = builder.begin() + b"".join(builder.add(Delta(tool_calls=(call,))) for call in calls)
    found = events(out + builder.end("tool_calls", USAGE, now=9))
    kind = "response.custom_tool_call_input"
    deltas = [e.delta for e in found if e.type == f"{kind}.delta" and e.output_index == 0]
    (done, _) = [event for event in found if event.type == f"{kind}.done"]
    first, second, third = found[-1].response.output
    assert "".join(deltas) == done.input == first.input == third.input == TEXT
    assert (first.type, first.name, first.call_id) == ("custom_tool_call", "apply_patch", "c1")
    assert (second.type, second.name, second.namespace) == ("function_call", "weather", "agents")
    assert (third.name, third.namespace) == ("apply_patch", "agents")


def test_a_freeform_call_of_8_mib_takes_linear_time() -> None:
    for text in ("x" * (8 << 20), "\\n" * (4 << 20), "\\ud800" * (1 << 20)):
        reader = FreeformInput()
        begun = time.process_time()
        for piece in ('{"input": "', text, '"}'):
            reader.take(piece)
        reader.end()
        assert time.process_time() - begun < 5  # 0.4 s at most; a quadratic one takes hours


def test_a_cut_freeform_call_shows_what_there_is() -> None:
    reader = FreeformInput()
    assert reader.take('{"input": "a\\') + reader.take("n\\ud83d") + reader.end() == "a\n"
