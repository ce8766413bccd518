"""Anthropic's own Python client against a gateway."""

import time
from typing import Any

import aiohttp
import anthropic
import msgspec
import orjson
import pytest

from gateway.apis.anthropic import context_edits
from gateway.apis.anthropic.context_edits import ContextManagement
from gateway.apis.anthropic.response_translator import MessageTranslator, rename_fields
from tests.gateway.apis.conftest import Stage
from tests.support.gateway_api_scripts import CALLS, dies, fails, refuses, says
from tests.support.gateway_fake_engine import FakeEngine, Script
from tests.support.gateway_world import World, deployment

HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "name": "weather",
    "description": "of a day",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}


async def test_a_message(stage: Stage, messenger: anthropic.AsyncAnthropic) -> None:
    done = await messenger.messages.create(
        model="m", max_tokens=9, messages=HELLO, system="be kind", metadata={"user_id": "somebody"},
        # Newer clients dropped these parameters; older ones send them.
        extra_body={"temperature": 0.5, "top_k": 3},
    )  # fmt: skip
    assert [(block.type, getattr(block, "text", "")) for block in done.content] == [
        ("text", "Hello there")
    ]
    assert (done.id, done.model, done.role, done.type) == ("msg_7", "m", "assistant", "message")
    assert (done.stop_reason, done.stop_sequence) == ("end_turn", None)
    usage = done.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (7, 4, 5)
    assert stage.path == "/v1/chat/completions"
    assert stage.asked == {
        "model": "m",
        "messages": [{"role": "system", "content": "be kind"}, *HELLO],
        "max_tokens": 9,
        "fit_max_tokens": True,
        "temperature": 0.5,
        "top_k": 3,
    }


async def test_a_streamed_message(stage: Stage, messenger: anthropic.AsyncAnthropic) -> None:
    stage.plays(says("Hello there", thought="I greet", calls=True, finish="tool_calls"))
    async with messenger.messages.stream(
        model="m", max_tokens=9, messages=HELLO, tools=[WEATHER]
    ) as stream:
        kinds = [event.type async for event in stream]
        done = await stream.get_final_message()
    thought, text, *calls = done.content
    assert (thought.type, getattr(thought, "thinking", "")) == ("thinking", "I greet")
    assert (text.type, getattr(text, "text", "")) == ("text", "Hello there")
    assert [(c.name, c.input) for c in calls if c.type == "tool_use"] == [
        (call["name"], orjson.loads(call["arguments"])) for call in CALLS
    ]
    assert (done.stop_reason, done.usage.input_tokens, done.usage.output_tokens) == (
        "tool_use", 7, 5,
    )  # fmt: skip
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


async def test_a_conversation_with_tools(stage: Stage, messenger: anthropic.AsyncAnthropic) -> None:
    stage.plays(says("Let me see.", thought="Hm.", calls=True, finish="tool_calls"))
    asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "tools": [WEATHER]}
    first = await messenger.messages.create(messages=HELLO, **asked)
    assert first.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": "call_a", "content": "sunny"},
        {
            "type": "tool_result",
            "tool_use_id": "call_b",
            "content": [{"type": "text", "text": "no route"}],
            "is_error": True,
        },
        {"type": "text", "text": "go on"},
    ]
    # The client sends the answer's content back unchanged.
    turns = [*HELLO, {"role": "assistant", "content": first.content}]
    turns.append({"role": "user", "content": results})
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    await messenger.messages.create(messages=turns, tool_choice=choice, **asked)
    said, sunny, lost, on = stage.asked["messages"][1:]
    assert (said["content"], said["reasoning_content"]) == ("Let me see.", "Hm.")
    assert [call["id"] for call in said["tool_calls"]] == ["call_a", "call_b"]
    assert sunny == {"role": "tool", "tool_call_id": "call_a", "content": "sunny"}
    assert lost["content"] == "Error: no route"
    assert on == {"role": "user", "content": "go on"}
    assert stage.asked["tool_choice"] == "required"
    assert stage.asked["parallel_tool_calls"] is False
    assert stage.asked["tools"][0]["function"]["description"] == "of a day"


@pytest.mark.parametrize(
    ("finish", "more", "max_tokens", "reason", "sequence"),
    [
        ("stop", {}, 9, "end_turn", None),
        ("stop", {"stop_reason": "END"}, 9, "stop_sequence", "END"),
        ("length", {}, 5, "max_tokens", None),
        ("length", {}, 9, "model_context_window_exceeded", None),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_why_it_stopped(
    stage: Stage,
    messenger: anthropic.AsyncAnthropic,
    finish: str,
    more: dict[str, Any],
    max_tokens: int,
    reason: str,
    sequence: str | None,
    is_streamed: bool,
) -> None:
    stage.plays(says("Hi", finish=finish, **more))
    asked: dict[str, Any] = {"model": "m", "max_tokens": max_tokens, "messages": HELLO}
    if is_streamed:
        async with messenger.messages.stream(**asked, stop_sequences=["END"]) as stream:
            done: Any = await stream.get_final_message()
    else:
        done = await messenger.messages.create(**asked, stop_sequences=["END"])
    assert (done.stop_reason, done.stop_sequence) == (reason, sequence)
    assert stage.asked["stop"] == ["END"]


@pytest.mark.parametrize(
    ("more", "effort"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 31999}}, "high"),
        ({"thinking": {"type": "adaptive"}}, None),
    ],
)
async def test_how_much_to_think(
    stage: Stage, messenger: anthropic.AsyncAnthropic, more: Any, effort: str | None
) -> None:
    await messenger.messages.create(model="m", max_tokens=9, messages=HELLO, **more)
    variables = stage.asked.get("chat_template_kwargs", {})
    assert (stage.asked.get("reasoning_effort") or variables.get("reasoning_effort")) == effort


async def test_an_effort_is_left_to_the_template(
    stage: Stage, messenger: anthropic.AsyncAnthropic
) -> None:
    """Claude Code sends one to every model, and most templates have no levels."""
    await messenger.messages.create(
        model="m",
        max_tokens=5,
        messages=[{"role": "user", "content": "hello"}],
        extra_body={"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}},
    )
    assert "reasoning_effort" not in stage.asked
    assert stage.asked["chat_template_kwargs"]["reasoning_effort"] == "high"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_thoughts_may_be_left_out(
    stage: Stage, messenger: anthropic.AsyncAnthropic, *, is_streamed: bool
) -> None:
    stage.plays(says("Hi", thought="Hm"))
    asked: Any = {"thinking": {"type": "adaptive", "display": "omitted"}}
    asked = {"model": "m", "max_tokens": 9, "messages": HELLO, **asked}
    if is_streamed:
        async with messenger.messages.stream(**asked) as stream:
            done: Any = await stream.get_final_message()
    else:
        done = await messenger.messages.create(**asked)
    assert (done.content[0].thinking, done.content[0].signature) == ("", "msg_7")
    assert done.content[1].text == "Hi"


TURNS: Any = [
    block
    for at in range(5)
    for block in (
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": f"thought {at} " * 40, "signature": "s"},
                {"type": "tool_use", "id": f"t{at}", "name": "read" if at else "memo", "input": {"n": at}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": f"t{at}", "content": f"result {at} " * 400}],
        },
    )
]  # fmt: skip
CLEARED = "[This tool result was cleared to save context.]"


def edited(**edit: Any) -> Any:
    uses = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 4},
        **edit,
    }
    thinking = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}
    return {"context_management": {"edits": [thinking, uses]}}


@pytest.mark.parametrize(
    ("edit", "cleared"),
    [
        ({}, ["0", "1"]),
        ({"keep": {"type": "tool_uses", "value": 1}, "exclude_tools": ["memo"]}, ["1", "2", "3"]),
        ({"trigger": {"type": "input_tokens", "value": 4000}, "clear_tool_inputs": True}, ["0", "1"]),
        ({"trigger": {"type": "input_tokens", "value": 9000}}, []),
        ({"clear_at_least": {"type": "input_tokens", "value": 5000}}, []),
    ],
)  # fmt: skip
async def test_old_results_and_thinking_are_cleared(
    stage: Stage, messenger: anthropic.AsyncAnthropic, edit: Any, cleared: list[str]
) -> None:
    done: Any = await messenger.messages.create(
        model="m", max_tokens=9, messages=[*HELLO, *TURNS], extra_body=edited(**edit)
    )
    results = [m for m in stage.asked["messages"] if m["role"] == "tool"]
    assert [m["tool_call_id"][1] for m in results if m["content"] == CLEARED] == cleared
    turns = [m for m in stage.asked["messages"] if m["role"] == "assistant"]
    assert ["reasoning_content" in turn for turn in turns] == [False] * 3 + [True] * 2
    inputs = [orjson.loads(turn["tool_calls"][0]["function"]["arguments"]) for turn in turns]
    assert inputs[0] == ({} if "clear_tool_inputs" in edit else {"n": 0})
    thinking, *uses = done.context_management["applied_edits"]
    assert (thinking["type"], thinking["cleared_thinking_turns"]) == ("clear_thinking_20251015", 3)
    assert [use["cleared_tool_uses"] for use in uses] == ([len(cleared)] if cleared else [])
    assert all(use["cleared_input_tokens"] > 1000 for use in uses)


async def test_a_stream_tells_what_was_cleared(stage: Stage, http: aiohttp.ClientSession) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [*HELLO, *TURNS], "stream": True, **edited()}
    async with http.post(f"{stage.gateway.url}/v1/messages", json=body) as response:
        events = [
            orjson.loads(line[6:])
            for line in (await response.read()).splitlines()
            if line.startswith(b"data: ")
        ]
    (last,) = [event for event in events if event["type"] == "message_delta"]
    assert len(last["context_management"]["applied_edits"]) == 2


@pytest.mark.parametrize("piece", ["result", "thinking", "call"])
def test_clearing_8_mib_is_linear(piece: str) -> None:
    blocks: dict[str, Any] = {
        "result": {"type": "tool_result", "tool_use_id": "t0", "content": "x"},
        "thinking": {"type": "thinking", "thinking": "x"},
        "call": {"type": "tool_use", "id": "t0", "name": "f", "input": {}},
    }
    role = "user" if piece == "result" else "assistant"
    count = (8 << 20) // len(orjson.dumps(blocks[piece]))
    contents: Any = [(role, [dict(blocks[piece]) for _ in range(count)])]
    management = msgspec.convert(edited()["context_management"], ContextManagement)
    begun = time.process_time()
    context_edits.apply(management, contents, 0)
    assert time.process_time() - begun < 5  # 0.2 s here; the gateway takes 131,072 values


async def test_a_history_of_other_servers_goes_on(
    stage: Stage, http: aiohttp.ClientSession
) -> None:
    answer = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        {"type": "text", "text": "I", "citations": None, "parsed": {}},
        {
            "type": "tool_use",
            "id": "t1",
            "name": "f" * 128,
            "input": {"a": None},
            "caller": {"x": 1},
        },
    ]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": None, "status": "ok"}
    body = {
        "model": "m",
        "max_tokens": 9,
        "system": None,
        "colour": None,
        "messages": [
            *HELLO,
            {"role": "assistant", "content": answer, "id": "msg_1", "stop_reason": "tool_use"},
            {"role": "user", "content": [result]},
        ],
        "tools": [{**WEATHER, "name": "f" * 128, "strict": None}],
        "thinking": {"type": "enabled", "budget_tokens": 2048, "display": None},
    }
    async with http.post(f"{stage.gateway.url}/v1/messages", json=body) as response:
        assert response.status == 200, await response.text()
    call = stage.asked["messages"][1]["tool_calls"][0]["function"]
    assert call == {"name": "f" * 128, "arguments": '{"a":null}'}
    assert stage.asked["chat_template_kwargs"]["reasoning_effort"] == "low"


def test_a_stream_begins_with_the_tokens_of_the_prompt() -> None:
    translator = MessageTranslator("m", 9, shows_thoughts=True)
    translator.take_usage(lambda: (10, 4, 0))
    start = translator.events(
        b'data: {"id":"chatcmpl-1","choices":[{"delta":{"content":"a"}}]}\n\n'
    )
    usage = orjson.loads(start.split(b"data: ")[1].split(b"\n")[0])["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (6, 4)


def test_an_error_names_the_field_that_the_client_sent() -> None:
    text = "Invalid 'tools[3].function.name': too long. Invalid 'tools[0].function.parameters.x'."
    assert (
        rename_fields(text)
        == "Invalid 'tools[3].name': too long. Invalid 'tools[0].input_schema.x'."
    )


async def test_tokens_are_counted(stage: Stage, messenger: anthropic.AsyncAnthropic) -> None:
    counted = await messenger.messages.count_tokens(
        model="m", messages=HELLO, system=[{"type": "text", "text": "be kind"}], tools=[WEATHER]
    )
    assert counted.input_tokens == 42
    assert stage.path == "/tokenize"
    assert stage.asked.keys() == {"model", "messages", "tools", "return_tokens"}


async def test_beta_is_the_same(stage: Stage, messenger: anthropic.AsyncAnthropic) -> None:
    done = await messenger.beta.messages.create(model="m", max_tokens=9, messages=HELLO)
    assert getattr(done.content[0], "text", "") == "Hello there"


@pytest.mark.parametrize(
    ("body", "says_"),
    [
        ({}, "required field"),
        ({"max_tokens": 0}, "at least 1"),
        ({"temperature": 1.5}, "between 0 and 1"),
        ({"colour": 1}, "Unknown field: 'colour'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "source': it must be an object",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}
                ]
            },
            "of type 'base64'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
            "No image can stand here",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "text or image or tool_res",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be a string"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "user, assistant or system"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "prefill"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "input_schema"),
        ({"tools": [{"name": "x"}]}, "input_schema"),
        ({"mcp_servers": [{}]}, "MCP"),
        ({"thinking": {"type": "much"}}, "thinking"),
    ],
)
async def test_refusals_teach(
    shared_stage: Stage, http: aiohttp.ClientSession, body: dict[str, Any], says_: str
) -> None:
    given = {"model": "m", "max_tokens": 9, "messages": HELLO, **body} if body else {}
    async with http.post(
        f"{shared_stage.gateway.url}/v1/messages?beta=true", json=given
    ) as response:
        told = orjson.loads(await response.read())
        assert response.status == 400
        assert told["error"]["type"] == "invalid_request_error"
        assert says_ in told["error"]["message"]
        assert told["request_id"] == response.headers["request-id"]
    assert not shared_stage.engine.calls


@pytest.mark.parametrize(
    ("status", "type_", "error"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (404, "not_found_error", anthropic.NotFoundError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (503, "overloaded_error", anthropic.InternalServerError),
    ],
)
@pytest.mark.parametrize("patience_s", [1.0])
async def test_engines_refusals(
    stage: Stage,
    messenger: anthropic.AsyncAnthropic,
    status: int,
    type_: str,
    error: type[anthropic.APIStatusError],
) -> None:
    stage.plays(refuses(status, "no: 'stop' is too long"))
    with pytest.raises(error) as caught:
        await messenger.messages.create(model="m", max_tokens=9, messages=HELLO)
    told: Any = caught.value.body
    assert told["error"] == {"type": type_, "message": "no: 'stop_sequences' is too long"}
    assert caught.value.status_code == (529 if status == 503 else status)
    assert caught.value.request_id


@pytest.mark.parametrize("script", [dies("one two"), fails("one two")])
async def test_a_stream_that_breaks_ends_with_an_error(
    stage: Stage, messenger: anthropic.AsyncAnthropic, script: Script
) -> None:
    stage.plays(script)
    received: list[Any] = []

    async def listen() -> None:
        asked: Any = {"model": "m", "max_tokens": 9, "messages": HELLO, "stream": True}
        async for event in await messenger.messages.create(**asked):
            received.append(event)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(anthropic.APIStatusError, match="api_error"):
        await listen()
    texts = [event.delta.text for event in received if event.type == "content_block_delta"]
    assert "".join(texts) == "one two"
    assert "message_stop" not in [event.type for event in received]


async def test_models(
    stage: Stage, messenger: anthropic.AsyncAnthropic, world: World, http: aiohttp.ClientSession
) -> None:
    await world.put(*(deployment(f"n{number}") for number in range(4)))
    await stage.gateway.knows("n3", ready=0)
    names = ["m", "n0", "n1", "n2", "n3"]
    assert [model.id async for model in messenger.models.list(limit=2)] == names
    before = await messenger.models.list(before_id="n2", limit=2)
    assert [model.id for model in before.data] == ["n0", "n1"]
    info = await messenger.models.retrieve("n3")
    assert (info.id, info.type, info.lifecycle) == ("n3", "model", "active")
    async with http.get(f"{stage.gateway.url}/v1/models") as response:
        assert (await response.json())["object"] == "list"


async def test_nobody_is_there(world: World, messenger: anthropic.AsyncAnthropic) -> None:
    await world.serve("gone", FakeEngine("m-9", says(), port=1))
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await messenger.messages.create(model="nobody", max_tokens=9, messages=HELLO)
