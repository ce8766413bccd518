"""Events and bodies of the Responses API, validated by OpenAI's own client."""

import json
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from engine.openai import responses
from engine.openai.response_body import Usage
from engine.openai.response_events import ResponseEventBuilder
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
