"""Answers over the engine link: those of plain HTTP, whatever the request asks for and however the link carries them."""

import json
import re
from collections import defaultdict
from typing import Any, TypeAlias

import pytest

from machinery import engine_link
from tests.support.engine_process import Engine
from tests.support.link_client import JSON_LINE, linked

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(240)]

Json: TypeAlias = dict[str, Any]
Answer: TypeAlias = tuple[int, Any]
"""A status, and what is comparable of the body."""

CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BASE: dict[str, Json] = {
    CHAT: {"messages": [{"role": "user", "content": "héllo"}], "max_tokens": 24},
    TEXT: {"prompt": "We hold these", "max_tokens": 24},
    RESPONSE: {"input": "héllo", "max_output_tokens": 24},
}
PLACE = {
    "type": "object",
    "properties": {"at": {"type": "string", "maxLength": 6}},
    "required": ["at"],
    "additionalProperties": False,
}
FUNCTION = {"name": "place", "parameters": PLACE}
TOOLS = {
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
    "max_tokens": 200,
}
FORMAT: Json = {
    "type": "json_schema",
    "json_schema": {"name": "place", "schema": PLACE, "strict": True},
}
ENDS_AT_ONCE = {"temperature": 0, "logit_bias": {"2": 100}}
QUICK: list[tuple[str, Json]] = [
    (CHAT, {"n": 3, "logprobs": True}),
    (TEXT, {"echo": True, "logprobs": 2}),
    (RESPONSE, {}),
]
OTHERS: list[tuple[str, Json]] = [
    (CHAT, {}),
    (CHAT, {"temperature": 0}),
    (CHAT, {"n": 2}),
    (CHAT, TOOLS),
    (CHAT, {"response_format": FORMAT, "max_tokens": 200}),
    (CHAT, {"logprobs": True, "top_logprobs": 3}),
    (CHAT, {"stop": ["e", "th"], "max_tokens": 200}),
    (CHAT, {"stop": ["e", "th"], "max_tokens": 200, "n": 3, "logprobs": True}),
    (CHAT, {"max_tokens": 1}),
    (CHAT, {"max_tokens": 1, "n": 3}),
    (CHAT, ENDS_AT_ONCE),
    (CHAT, {"ignore_eos": True, "temperature": 2}),
    (CHAT, {"top_logprobs": 3}),  # refused
    (CHAT, {"messages": [{"role": "user", "content": "a " * 5000}]}),  # too long
    (TEXT, {}),
    (TEXT, {"echo": True, "logprobs": 2, "max_tokens": 0}),
    (TEXT, {"prompt": ["We hold", "these truths"], "n": 2}),
    (TEXT, {"n": 2, "stop": "a"}),
    (TEXT, ENDS_AT_ONCE),
    (RESPONSE, {"max_output_tokens": 200, "tools": [{"type": "function", **FUNCTION}]}),
    (RESPONSE, {"max_output_tokens": 200, "text": {"format": {**FORMAT["json_schema"], "type": "json_schema"}}}),
    (RESPONSE, {"temperature": 0, "max_output_tokens": 1}),
]  # fmt: skip
WAYS = (
    b"",
    b"x-fleet-resumable: 1\r\n",
    b"x-fleet-progress: 0.05\r\n",
    b"x-fleet-resumable: 1\r\nx-fleet-progress: 0.05\r\n",
)
TIMES = ("created", "created_at", "completed_at")
ID = re.compile(r"\b(chatcmpl|cmpl|resp|msg|rs|fc)([-_])[0-9A-Za-z_-]+")


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.ci) for case in OTHERS)],
    ids=str,
)
def test_an_answer_is_that_of_plain_http(
    engine: Engine, path: str, fields: Json, *, is_streamed: bool
) -> None:
    asked = {"model": "tiny", "seed": 7, **BASE[path], **fields}
    if path == RESPONSE:
        del asked["seed"]
        asked = {"temperature": 0, **asked}
    if is_streamed:
        asked["stream"] = True
        if path != RESPONSE:
            asked["stream_options"] = {"include_usage": True}
    body = json.dumps(asked).encode()
    engine.request("POST", path, body)  # from now on the prompt is in the cache
    expected = approximate(over_http(engine, path, body))
    for lines in WAYS:
        assert over_link(engine, path, body, lines) == expected, lines
    assert over_link(engine, path, body, b"x-request-timeout: 600\r\n") == expected


def over_http(engine: Engine, path: str, body: bytes) -> Answer:
    reply = engine.request("POST", path, body)
    return comparable(reply.status, reply.headers, reply.raw)


def over_link(engine: Engine, path: str, body: bytes, lines: bytes) -> Answer:
    with linked(engine.port) as link:
        link.request(1, path, body, lines=JSON_LINE + lines)
        status, headers, raw = link.response(1)
        kinds = [kind for kind, _ in link.frames[1]]
        link.gauges()
        # One head before everything but signs of progress, and nothing after the end.
        assert [kind for kind, _ in link.frames[1]] == kinds
        assert kinds.count(engine_link.STATUS) == kinds.count(engine_link.END) == 1
        begin = kinds.index(engine_link.STATUS)
        assert set(kinds[:begin]) <= {engine_link.PROGRESS}
        assert engine_link.PROGRESS not in kinds[begin:]
        has_records = engine_link.RECORDED in kinds
        assert not has_records or engine_link.EVENTS not in kinds
        text = {name.decode(): value.decode() for name, value in headers.items()}
        return comparable(status, text, raw)


def comparable(status: int, headers: dict[str, str], raw: bytes) -> Answer:
    """Return a response without ids and times, and a stream without the places at which its text is cut."""
    kind = headers["content-type"]
    if not kind.startswith("text/event-stream"):
        return status, (kind, plain(json.loads(raw)))
    events = [event for event in raw.decode().split("\n\n") if event and event[0] != ":"]
    if events[0].startswith("event: "):
        return status, (kind, *joined_events([plain(data_of(event)) for event in events]))
    assert events[-1] == "data: [DONE]"
    return status, (kind, *joined_chunks([plain(data_of(event)) for event in events[:-1]]))


def data_of(event: str) -> Json:
    data: Json = json.loads(event[event.index("data: ") + 6 :])
    return data


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if name not in TIMES}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return ID.sub(r"\1", value) if isinstance(value, str) else value


def approximate(value: Any) -> Any:
    """Return a value that equals one with other roundings: the rows of a batch leave at other steps."""
    if isinstance(value, dict):
        return {name: approximate(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(approximate, value))
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


def joined_chunks(chunks: list[Json]) -> tuple[Any, ...]:
    """Return the joined values of each choice, and what the chunks have beside choices."""
    choices: defaultdict[str, list[Any]] = defaultdict(list)
    around = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, value in leaves(choice, f"{choice['index']}"):
                choices[name].append(value)
        rest = chunk if not chunk["choices"] else {**chunk, "choices": None}
        if rest not in around:
            around.append(rest)
    joined = {
        name: "".join(values) if all(isinstance(value, str) for value in values) else values
        for name, values in choices.items()
    }
    return joined, around


def leaves(value: Any, name: str) -> list[tuple[str, Any]]:
    """Return what a chunk adds to a choice, by the path of it; lists of tokens are divided, calls are named."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key], f"{name}.{key}")]
    if isinstance(value, list) and name.endswith(".tool_calls"):
        return [leaf for call in value for leaf in leaves(call, f"{name}.{call['index']}")]
    if isinstance(value, list):
        return [(name, item) for item in value]
    is_nothing = value is None or name.endswith((".index", ".type"))
    return [] if is_nothing else [(name, value)]


def joined_events(events: list[Json]) -> tuple[Any, ...]:
    """Return the events of a response without their numbers, and the joined deltas of each part."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas: defaultdict[tuple[str, int], str] = defaultdict(str)
    others = []
    for event in events:
        del event["sequence_number"]
        if event["type"].endswith(".delta"):
            deltas[event["type"], event["output_index"]] += event["delta"]
        else:
            others.append(event)
    return others, deltas


@pytest.mark.ci
@pytest.mark.parametrize("path", [CHAT, RESPONSE])
def test_a_deadline_ends_an_answer_as_over_plain_http(engine: Engine, path: str) -> None:
    limit = {"max_output_tokens" if path == RESPONSE else "max_tokens": 3900}
    asked = {"model": "tiny", **BASE[path], **limit, "temperature": 0}
    whole, stream = (json.dumps({**asked, "stream": value}).encode() for value in (False, True))
    for body in (whole, stream):
        expected = late(engine, path, body, "0.001")
        assert (expected[0], expected[1]["error"]["code"]) == (504, "request_timeout")
        for lines in WAYS:
            with linked(engine.port) as link:
                late_line = b"x-request-timeout: 0.001\r\n"
                link.request(1, path, body, lines=JSON_LINE + late_line + lines)
                status, _, raw = link.response(1)
                assert (status, json.loads(raw)) == expected, lines
    for lines in WAYS:
        failed = cut_off(engine, path, stream, lines)
        assert "x-request-timeout" in json.dumps(failed)
        assert "[DONE]" not in json.dumps(failed)


def late(engine: Engine, path: str, body: bytes, timeout: str) -> tuple[int, Json]:
    reply = engine.request("POST", path, body, {"x-request-timeout": timeout})
    return reply.status, reply.json


def cut_off(engine: Engine, path: str, body: bytes, lines: bytes) -> Json:
    """Return the last event of a stream that its deadline ends; a busy machine needs longer to the first token."""
    for timeout_s in (0.2, 0.5, 1, 2, 4, 8, 16, 32):
        with linked(engine.port) as link:
            asked = JSON_LINE + b"x-request-timeout: %g\r\n" % timeout_s + lines
            link.request(1, path, body, lines=asked)
            link.send(1, engine_link.WINDOW, engine_link.encode_window(1 << 26))
            link.wait(1, engine_link.END, engine_link.FAIL)
            kind, payload = link.frames[1][-1]
            kinds = {kind for kind, _ in link.frames[1]}
            if not kinds & {engine_link.EVENTS, engine_link.RECORDED}:
                continue  # refused before the first token
            if b"resumable" in lines:
                assert kind == engine_link.FAIL
                return data_of(engine_link.decode_failure(payload).last_event.decode())
            assert kind == engine_link.END
            return data_of(payload.decode())
    raise AssertionError("no stream began before its deadline and ended after it")
