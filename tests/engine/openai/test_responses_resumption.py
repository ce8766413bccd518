"""Streams of /v1/responses that another engine continues: equal to an uninterrupted stream, event by event."""

import json
from typing import Any

import openai.types.responses as openai_types
import pydantic
import pytest

from gateway.forwarding.resume_log import ResumeLog
from tests.support.engine_process import Engine
from tests.support.link_client import RecordedReply, ask
from tests.support.sampling import samples

HEADERS = {"x-fleet-resumable": "1"}
BODY: dict[str, Any] = {"input": "héllo", "max_output_tokens": 24, "stream": True}
PLACE = {
    "type": "function",
    "name": "place",
    "parameters": {
        "type": "object",
        "properties": {"at": {"type": "string", "maxLength": 6}},
        "required": ["at"],
        "additionalProperties": False,
    },
}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.5, "top_p": 0.95},
    {"temperature": 0, "max_output_tokens": 200, "tools": [PLACE], "tool_choice": "required"},
]
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(openai_types.ResponseStreamEvent)


def blocks(raw: bytes) -> list[bytes]:
    return [block + b"\n\n" for block in raw.split(b"\n\n")[:-1]]


def comparable(raw: bytes) -> list[dict[str, Any]]:
    """Return the events without the times at which they were made."""
    found = [json.loads(block.partition(b"\ndata: ")[2]) for block in blocks(raw)]
    for event in found:
        EVENT.validate_python(event)
        event.get("response", {}).pop("completed_at", None)
    return found


@pytest.mark.ci
@pytest.mark.mlx
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_response_cut_after_any_event_continues_equally(
    engine: Engine, settings: dict[str, Any]
) -> None:
    body = json.dumps({"model": "tiny", **BODY, **settings}).encode()
    whole = ask(engine.port, "/v1/responses", body)
    expected = comparable(whole.raw)
    assert [event["sequence_number"] for event in expected] == list(range(len(expected)))
    pieces = whole.frames
    for cut in range(1, len(pieces), -(-len(pieces) // samples(1000, quick=20))):
        resume_log, passed = ResumeLog(10_000), b"".join(events for _, events in pieces[:cut])
        for record, _ in pieces[:cut]:
            resume_log.add(record)
        resume_point = resume_log.resume_point()
        assert resume_point is not None
        resumed = resume_point.resume_body(body)
        assert json.loads(resumed)["fleet"]["events"] == len(blocks(passed))
        reply = ask(engine.port, "/v1/responses", resumed)
        assert reply.status == 200, reply.raw
        for record, _ in reply.frames:
            resume_log.add(record)
        rest = reply.raw
        joined = comparable(passed + rest)
        assert without_deltas(joined) == without_deltas(expected)
        assert texts(joined) == texts(expected)
        assert [event["sequence_number"] for event in joined] == list(range(len(joined)))
        prompt, _, made = resume_log.usage()
        usage = joined[-1]["response"]["usage"]
        assert (prompt, made) == (usage["input_tokens"], usage["output_tokens"])


def without_deltas(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events but those that depend on how many tokens came at once, and their numbers."""
    return [
        {name: value for name, value in event.items() if name != "sequence_number"}
        for event in events
        if not event["type"].endswith(".delta")
    ]


def texts(events: list[dict[str, Any]]) -> dict[str, str]:
    """Return the joined deltas of each item."""
    found: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            found[event["item_id"]] = found.get(event["item_id"], "") + event["delta"]
    return found


@pytest.mark.mlx
def test_an_engine_that_gives_up_tells_gateway_and_client(engine: Engine) -> None:
    fields = {"model": "tiny", **BODY, "max_output_tokens": 4000, "temperature": 0}
    reply = RecordedReply(0, b"", [])
    for timeout_s in (0.3, 1, 3, 9, 27):  # a busy machine may need longer to the first token
        lines = f"x-request-timeout: {timeout_s}\r\n".encode()
        reply = ask(engine.port, "/v1/responses", json.dumps(fields).encode(), lines)
        if reply.frames:
            break
    passed = b"".join(events for _, events in reply.frames)
    assert b"response.failed" not in passed
    assert reply.failure is not None
    assert "x-request-timeout" in reply.failure.message
    last = comparable(passed + reply.failure.last_event)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")


@pytest.mark.mlx
def test_without_a_link_there_are_no_records(engine: Engine) -> None:
    reply = engine.post("/v1/responses", headers=HEADERS, **BODY)
    assert all(block.startswith(b"event: response.") for block in blocks(reply.raw))
