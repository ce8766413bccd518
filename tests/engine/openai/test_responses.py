"""Requests of `/v1/responses`, and the endpoint as OpenAI's own client sees it."""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from engine.openai import request_body, responses
from engine.openai.request_body import Conversation, RequestPolicy
from engine.openai.responses import ResponsesRequest
from schemas.wire.errors import Refusal, RefusedError
from tests.support.engine_process import Engine

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def parse(**fields: Any) -> ResponsesRequest:
    return responses.parse(json.dumps({"model": "m", "input": "hi"} | fields).encode())


def refused(**fields: Any) -> Refusal:
    with pytest.raises(RefusedError) as caught:
        parse(**fields)
    return caught.value.refusal


def messages(request: ResponsesRequest) -> list[Any]:
    assert isinstance(request.chat.prompt, Conversation)
    return list(request.chat.prompt.messages)


def test_a_request_becomes_the_equivalent_chat() -> None:
    request = parse(
        instructions="be brief", max_output_tokens=7, temperature=0.5, top_p=0.9, stream=True
    )
    turns = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    chat = {"model": "m", "messages": turns, "max_completion_tokens": 7, "temperature": 0.5}
    assert request.chat == request_body.parse_chat(
        json.dumps(chat | {"top_p": 0.9, "stream": True}).encode()
    )


HISTORY: list[dict[str, Any]] = [
    {"role": "developer", "content": "use tools"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}", "status": "completed"},
    {"type": "function_call_output", "call_id": "c2", "output": "none", "status": None},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sun"}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    {"role": "user", "content": "so?"},
]  # fmt: skip


def test_items_of_one_turn_become_one_message() -> None:
    turns = messages(parse(input=HISTORY))
    assert [turn["role"] for turn in turns] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "user",
    ]  # fmt: skip
    message = turns[2]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "hm")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [
        {"city": "Oslo"},
        {},
    ]
    assert [turn["content"] for turn in turns[3:]] == ["none", "sun", "no", "so?"]
    assert turns[3]["name"] == "weather"


def test_images_of_messages_and_results_become_parts_of_a_chat() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"}
    text = {"type": "input_text", "text": "sun"}
    items = [
        {"role": "user", "content": [text, image]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [image, text]},
    ]
    body = json.dumps({"model": "m", "input": items}).encode()
    user, _, result = messages(responses.parse(body, policy=RequestPolicy(sees_images=True)))
    assert [part["type"] for part in user["content"]] == ["text", "image"]
    assert [part["type"] for part in result["content"]] == ["image", "text"]
    with pytest.raises(RefusedError) as caught:
        responses.parse(body)
    assert caught.value.refusal.param == "input[0].content[1].type"
    assert "spec.model.vision" in caught.value.refusal.message


PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
BASIC: dict[str, Any] = {"type": "function", "name": "close", "parameters": {"type": "object"}}
BROKEN: dict[str, Any] = BASIC | {"parameters": {"type": 5}}
NAMESPACE: dict[str, Any] = {"type": "namespace", "name": "agents", "tools": [BASIC, PATCH]}


def test_tools_of_an_agent_become_functions_and_hosted_ones_are_left_out() -> None:
    hosted = [
        {"type": "web_search"},
        {"type": "image_generation"},
        {"type": "web_search_2025_08_26"},
    ]
    request = parse(tools=[PATCH, *hosted, NAMESPACE])
    assert request.chat.toolbox is not None
    functions = [tool["function"] for tool in request.chat.toolbox.template_tools]
    names = ["apply_patch", "agents__close", "agents__apply_patch"]
    assert [function["name"] for function in functions] == list(request.tools) == names
    assert functions[0]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert functions[0]["description"].endswith("`input` matches this lark grammar:\nstart: /.+/")
    assert request.chat.ignored == ("tools.web_search", "tools.image_generation")
    assert [tool["type"] for tool in request.echo["tools"]] == ["custom", "namespace"]
    body = json.dumps({"model": "m", "input": "hi", "tools": [PATCH, *hosted]}).encode()
    with pytest.raises(RefusedError) as caught:
        responses.parse(body, policy=RequestPolicy(refuses_unknown=True))
    assert caught.value.refusal.param == "tools"


def test_what_codex_sends_back_becomes_a_history() -> None:
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": "x", "phase": None, "id": "msg_1"},
        {"type": "reasoning", "summary": [], "encrypted_content": ""},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": 'a\n"b"', "status": "completed"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "namespace": "agents", "name": "close", "arguments": "{}"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_image", "image_url": "data:"}]},
        {"type": "reasoning", "content": None, "summary": [{"type": "summary_text", "text": "sum"}], "encrypted_content": "x"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": [{}], "logprobs": None}]},
        HISTORY[2],
        {"type": "compaction", "encrypted_content": "x"},
        {"role": "user", "content": "y"},
    ]  # fmt: skip
    request = parse(input=items)
    turns = messages(request)
    assert [turn["role"] for turn in turns] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
    ]
    calls = [call["function"] for call in turns[1]["tool_calls"]]
    assert calls[0] == {"name": "apply_patch", "arguments": {"input": 'a\n"b"'}}
    assert calls[1]["name"] == turns[3]["name"] == "agents__close"
    assert "reasoning_content" not in turns[1]
    assert (turns[4]["content"], turns[4]["reasoning_content"]) == ("ok", "sum")
    assert set(request.chat.ignored) == {
        "input.web_search_call", "input.encrypted_content", "input.compaction", "messages.image_url",
    }  # fmt: skip


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("conversation", {"conversation": "conv_1"}),
    ("background", {"background": True}),
    ("include", {"include": ["message.output_text.logprobs"]}),
    ("prompt", {"prompt": {"id": "p"}}),
    ("max_tool_calls", {"max_tool_calls": 3}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("seed", {"seed": 1}),
    ("max_tokens", {"max_tokens": 1}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("temperature", {"temperature": 3}),
    ("reasoning.summary", {"reasoning": {"summary": "long"}}),
    ("reasoning.effort", {"reasoning": {"effort": "extreme"}}),
    ("text.format.name", {"text": {"format": {"type": "json_schema", "schema": {}}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    (
        "text.format.schema",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}},
    ),
    ("tool_choice", {"tool_choice": "maybe"}),
    ("tool_choice.name", {"tool_choice": {"type": "function"}, "tools": [WEATHER]}),
    (
        "tool_choice.name",
        {"tool_choice": {"type": "function", "name": "other"}, "tools": [WEATHER]},
    ),
    ("tool_choice", {"tool_choice": {"type": "web_search"}, "tools": [WEATHER]}),
    ("tools[0].parameters.type", {"tools": [{**WEATHER, "parameters": {"type": 5}}]}),
    ("text.format", {"text": {"format": {"type": "xml"}}}),
    ("tools[0].type", {"tools": [{"type": "telepathy"}]}),
    ("tools[1].tools[0].parameters.type", {"tools": [WEATHER, NAMESPACE | {"tools": [BROKEN]}]}),
    ("tools[1].tools[1].name", {"tools": [WEATHER, NAMESPACE | {"tools": [BASIC, BASIC]}]}),
    ("tool_choice", {"tool_choice": "required", "tools": [{"type": "web_search"}]}),
    ("tools[0].name", {"tools": [{"type": "function"}]}),
    ("stream_options", {"stream_options": {}}),
    ("metadata.a", {"metadata": {"a": 1}}),
    ("input", {"input": []}),
    ("input", {"input": None}),
    ("input[0]", {"input": [5]}),
    ("input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("input[0].role", {"input": [{"role": "robot", "content": "x"}]}),
    (
        "input[0].content[0].type",
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    ),
    (
        "input[0].content[0].text",
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
    ),
    ("input", {"input": [HISTORY[2]]}),
    ("input[3].call_id", {"input": [{"type": "web_search_call"}, *HISTORY[1:3], HISTORY[6]]}),
    ("input[1].call_id", {"input": [HISTORY[1], HISTORY[6]]}),
    ("input[1].name", {"input": [HISTORY[4], {**HISTORY[5], "name": ""}]}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED, ids=lambda value: str(value)[:50])
def test_unsupported_values_are_refused_under_their_own_names(
    param: str, fields: dict[str, Any]
) -> None:
    refusal = refused(**fields)
    assert (refusal.status, refusal.param) == (400, param)
    assert "messages[" not in refusal.message


NEUTRAL: list[dict[str, Any]] = [
    {"store": False, "background": False, "truncation": "disabled", "include": []},
    {"store": True, "truncation": "auto", "include": ["reasoning.encrypted_content"]},
    {"reasoning": {"summary": "detailed"}, "include": ["file_search_call.results"]},
    {"client_metadata": {"turn_id": "t", "n": None}},
    {"previous_response_id": None, "conversation": None, "top_logprobs": 0},
    {
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tools": [],
        "tool_choice": "auto",
    },
    {"reasoning": {}, "stream_options": None, "service_tier": "auto", "parallel_tool_calls": True},
    {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
def test_neutral_values_are_accepted(fields: dict[str, Any]) -> None:
    assert messages(parse(**fields)) == messages(parse())


@pytest.mark.mlx
def test_an_answer_equals_that_of_the_chat(engine: Engine, client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="tiny", input="hello", instructions="x", max_output_tokens=20, temperature=0,
        metadata={"who": "me"},
    )  # fmt: skip
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "hello"}]
    chat = engine.post("/v1/chat/completions", messages=messages, max_tokens=20, temperature=0).json
    assert answer.output_text == chat["choices"][0]["message"]["content"]
    assert (answer.status, answer.metadata) == ("incomplete", {"who": "me"})
    assert answer.usage is not None
    assert answer.usage.total_tokens == chat["usage"]["total_tokens"]
    assert answer.to_dict()["store"] is False
    assert answer.id.startswith("resp_")


@pytest.mark.mlx
def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "input": "hello",
        "max_output_tokens": 30,
        "temperature": 0,
    }
    whole = client.responses.create(**options)
    with client.responses.create(stream=True, **options) as stream:
        found: list[Any] = list(stream)
    assert [event.sequence_number for event in found] == list(range(len(found)))
    shown = "".join(event.delta for event in found if event.type == "response.output_text.delta")
    last = found[-1].response
    assert shown == whole.output_text == last.output_text
    assert whole.usage is not None
    assert (found[-1].type, last.usage.output_tokens) == ("response.incomplete", 30)
    assert last.usage.input_tokens == whole.usage.input_tokens
    assert len({event.response.id for event in (found[0], found[-1])}) == 1


class City(BaseModel):
    """Schema of the answer."""

    name: str
    is_big: bool


@pytest.mark.mlx
def test_a_schema_is_parsed_and_a_tool_is_called(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "input": "hello", "temperature": 0}
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "is_big": {"type": "boolean"}},
        "required": ["name", "is_big"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "name": "city", "schema": schema, "strict": True}
    answer = client.responses.create(text={"format": shape}, **options)  # type: ignore[call-overload]
    City.model_validate_json(answer.output_text)
    assert (answer.status, answer.text.format.schema_) == ("completed", schema)
    parsed = client.responses.parse(text_format=City, max_output_tokens=40, **options)
    assert parsed.status == "incomplete" or isinstance(parsed.output_parsed, City)
    options |= {"tools": [WEATHER]}
    with client.responses.stream(
        tool_choice={"type": "function", "name": "weather"}, parallel_tool_calls=False, **options
    ) as stream:
        kinds = {event.type for event in stream}
        called = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    call = called.output[-1]
    assert call.type == "function_call"
    assert call.name == "weather"
    assert len(json.loads(call.arguments)["city"]) <= 8
    history: list[Any] = [{"role": "user", "content": "hello"}, *called.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "sun"})
    again = client.responses.create(**options | {"input": history, "max_output_tokens": 5})
    assert again.usage is not None
    assert called.usage is not None
    assert again.usage.input_tokens > called.usage.input_tokens


@pytest.mark.mlx
def test_late_refusals_have_their_own_names_too(engine: Engine) -> None:
    reply = engine.post("/v1/responses", input="abc " * 6000)
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert reply.error["code"] == "context_length_exceeded"
    reply = engine.post("/v1/responses", input="x", fleet={"tokens": []})
    assert (reply.status, reply.error["param"]) == (400, "fleet")
    reply = engine.post("/v1/responses", input="x", model="other")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
