"""Tools, formats and reasoning through the official client, on a model of random weights."""

import enum
import json
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.support.engine_process import Engine

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
# A random model writes strings and numbers of any length, so every schema here has bounds.
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
}
PING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "ping", "description": "Ping.", "parameters": PING}},
]
HELLO: Any = [{"role": "user", "content": "hello"}]
OFF = {"reasoning_effort": "none"}


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    given: dict[str, Any] = {"messages": HELLO, "max_tokens": 250, "seed": 3, **OFF, **fields}
    return client.chat.completions.create(model="tiny", **given).choices[0]


def check(calls: Any) -> None:
    for call in calls:
        schema = {"weather": WEATHER, "ping": PING}[call.function.name]
        jsonschema.validate(json.loads(call.function.arguments), schema)
        assert call.id.startswith("call_")
        assert call.type == "function"
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(2))
def test_a_required_call_is_made_and_matches(client: openai.OpenAI, seed: int) -> None:
    choice = ask(client, tools=TOOLS, tool_choice="required", seed=seed, max_tokens=400)
    calls = choice.message.tool_calls
    check(calls if choice.finish_reason == "tool_calls" else calls[:-1])  # the last may be cut off
    assert choice.finish_reason in ("tool_calls", "length")
    assert choice.message.content is None


@pytest.mark.parametrize("most", [1, 5, 12])
def test_a_call_cut_before_its_name_is_not_text(client: openai.OpenAI, most: int) -> None:
    choice = ask(client, tools=TOOLS, tool_choice="required", max_tokens=most)
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert not choice.message.content


@pytest.mark.parametrize("name", ["weather", "ping"])
def test_a_named_function_is_called(client: openai.OpenAI, name: str) -> None:
    wanted: Any = {"type": "function", "function": {"name": name}}
    choice = ask(client, tools=TOOLS, tool_choice=wanted, parallel_tool_calls=False)
    assert [call.function.name for call in choice.message.tool_calls] == [name]
    check(choice.message.tool_calls)
    assert choice.finish_reason == "tool_calls"


def test_only_allowed_tools_are_called(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "ping"}}]
    allowed: Any = {"mode": "required", "tools": tools}
    wanted: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    choice = ask(client, tools=TOOLS, tool_choice=wanted, parallel_tool_calls=False)
    assert [call.function.name for call in choice.message.tool_calls] == ["ping"]


def test_several_calls_come_in_one_answer(client: openai.OpenAI) -> None:
    found = [
        ask(client, tools=TOOLS, tool_choice="required", seed=seed, max_tokens=600).message
        for seed in (0, 2)
    ]
    for message in found:
        check(message.tool_calls[:-1])
    assert max(len(message.tool_calls) for message in found) > 1


def test_with_auto_an_opened_call_is_completed(client: openai.OpenAI) -> None:
    marker = 510  # <tool_call>
    free = ask(client, tools=TOOLS, max_tokens=20, logit_bias={str(marker): -100})
    assert free.message.tool_calls is None
    assert free.message.content
    assert free.finish_reason == "length"
    called = ask(client, tools=TOOLS, logit_bias={str(marker): 100}, parallel_tool_calls=False)
    assert called.finish_reason == "tool_calls"
    check(called.message.tool_calls)


def test_with_none_no_call_is_made(client: openai.OpenAI) -> None:
    choice = ask(client, tools=TOOLS, tool_choice="none", max_tokens=60, temperature=2)
    assert choice.message.tool_calls is None
    assert "<tool_call>" not in choice.message.content


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_of_calls_equals_the_whole_answer(
    client: openai.OpenAI, temperature: float
) -> None:
    options: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "required",
        "temperature": temperature,
        "parallel_tool_calls": False,
    }
    whole = ask(client, **options)
    given: dict[str, Any] = {"messages": HELLO, "max_tokens": 250, "seed": 3, **OFF, **options}
    with client.chat.completions.stream(model="tiny", **given) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert any(event.type == "tool_calls.function.arguments.done" for event in events)
    theirs = final.message.tool_calls or []
    ours = whole.message.tool_calls
    assert [(their.id, their.function.name, their.function.arguments) for their in theirs] == [
        (our.id, our.function.name, our.function.arguments) for our in ours
    ]
    assert final.finish_reason == whole.finish_reason == "tool_calls"


def test_calls_and_results_become_part_of_the_prompt(client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "pong"},
    ]
    assert ask(client, messages=messages, tools=TOOLS, max_tokens=5).message is not None
    assert ask(client, messages=messages, max_tokens=5).message is not None


class Unit(enum.StrEnum):
    C = "C"
    F = "F"


class Place(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=10)
    unit: Unit


class Report(pydantic.BaseModel):
    places: list[Place] = pydantic.Field(max_length=2)
    kind: Literal["day", "night"]
    score: float | None
    nested: Place | None = None


@pytest.mark.parametrize("seed", range(2))
def test_pydantic_parses_what_a_random_model_writes(client: openai.OpenAI, seed: int) -> None:
    given: dict[str, Any] = {"messages": HELLO, "max_tokens": 400, "seed": seed, **OFF}
    parsed = client.chat.completions.parse(model="tiny", response_format=Report, **given)
    choice = parsed.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Report)


def test_any_json_object(client: openai.OpenAI) -> None:
    # Pushed towards the marks that close things, a random model comes to an end.
    bias = {str(token): 8 for token in (4, 63, 95)}
    choice = ask(client, response_format={"type": "json_object"}, logit_bias=bias, max_tokens=200)
    assert choice.finish_reason == "stop"
    assert isinstance(json.loads(choice.message.content), dict)


def test_reasoning_precedes_the_constrained_answer(client: openai.OpenAI) -> None:
    think, end = 508, 509
    parsed = ask(
        client,
        reasoning_effort="high",
        response_format=_format(PING),
        logit_bias={str(think): 100, str(end): 4},
        max_tokens=400,
    )
    assert parsed.message.reasoning_content
    assert "<think>" not in parsed.message.reasoning_content
    assert json.loads(parsed.message.content) == {}
    quiet = ask(client, response_format=_format(PING), logit_bias={str(think): 100})
    assert getattr(quiet.message, "reasoning_content", None) is None
    assert json.loads(quiet.message.content) == {}


def _format(schema: Any, **more: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema} | more}


def _tool(**function: Any) -> Any:
    return [{"type": "function", "function": {"name": "f"} | function}]


_LOOP = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
_BAD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
_EMPTY = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
_SCHEMA = "response_format.json_schema.schema"
_PARAMETERS = "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {}}, "response_format.type", "json_schema"),
        ({"response_format": "json"}, "response_format", "dictionary"),
        ({"response_format": {"type": "text", "a": 1}}, "response_format.a", "not permitted"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": _format([])}, _SCHEMA, "dictionary"),
        ({"response_format": _format(_BAD)}, _SCHEMA, "$.properties.a.uniqueItems"),
        ({"response_format": _format(_LOOP)}, _SCHEMA, "refers only to itself"),
        ({"response_format": _format(_EMPTY)}, _SCHEMA, "$.properties.a"),
        ({"response_format": _format({"x-guidance": {}})}, _SCHEMA, "x-guidance"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "function"),
        ({"tools": _tool(name="a b")}, "tools[0].function.name", "pattern"),
        ({"tools": _tool() + _tool()}, "tools[1].function.name", "two functions"),
        ({"tools": _tool(parameters={"type": "array"})}, f"{_PARAMETERS}.type", "object"),
        ({"tools": _tool(parameters=_BAD, strict=True)}, _PARAMETERS, "uniqueItems"),
        ({"tools": _tool(parameters=_EMPTY, strict=True)}, _PARAMETERS, "$.properties.a"),
        ({"tools": _tool(parameters=_LOOP)}, _PARAMETERS, "refers only to itself"),
        ({"tools": _tool(parameters={"type": "object", "minLength": -1})}, _PARAMETERS, "minL"),
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"tools": _tool(), "tool_choice": "any"}, "tool_choice", "required"),
        ({"tools": _tool(), "tool_choice": {"type": "x"}}, "tool_choice.type", "allowed_tools"),
        (
            {
                "tools": _tool(),
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool_choice.function.name",
            "'g'",
        ),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "minimal"),
    ],
)
def test_unsupported_constraints_are_refused_by_name(
    caller: Engine, fields: Any, param: str, says: str
) -> None:
    reply = caller.chat(**fields)
    assert reply.status == 400, reply.raw
    assert reply.error["param"] == param
    assert says in reply.error["message"]


def test_a_tool_that_is_not_strict_may_have_unsupported_keywords(caller: Engine) -> None:
    for schema in (_BAD, _EMPTY):
        reply = caller.chat(
            tools=_tool(parameters=schema),
            tool_choice="required",
            max_tokens=3,
            reasoning_effort="none",
        )
        assert reply.status == 200, reply.raw
