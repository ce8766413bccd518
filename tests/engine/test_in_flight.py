"""Requests in flight at a real engine: their phase and progress, and their cancellation by id."""

import contextlib
import json
from http.client import HTTPConnection
from typing import Any

import pytest

from engine.admission import Ticket
from engine.in_flight import report
from engine.jobs import Job, SamplingParams
from engine.request_log import RequestRecord
from schemas.wire.in_flight import MAX_REQUESTS, InFlightRequests
from tests.support.engine_process import Engine, Reply, Start, eventually

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
Json = dict[str, Any]


def in_flight(engine: Engine) -> list[Json]:
    reply = engine.request("GET", "/v1/in-flight")
    assert reply.status == 200
    InFlightRequests.model_validate_json(reply.raw)
    found: list[Json] = reply.json["requests"]
    assert reply.json["total"] == len(found)
    return found


def cancel(engine: Engine, request_id: str) -> Reply:
    return engine.request("POST", f"/v1/in-flight/{request_id}/cancel")


def answer(connection: HTTPConnection) -> tuple[int, bytes]:
    """Return the status and the body of an answer."""
    with contextlib.closing(connection):
        response = connection.getresponse()
        return response.status, response.read()


def one(engine: Engine, request_id: str) -> Json | None:
    return next((found for found in in_flight(engine) if found["id"] == request_id), None)


def test_a_stream_is_listed_and_cancelled(engine: Engine) -> None:
    connection = engine.begin(headers={"x-request-id": "a/b?c"}, max_tokens=3000, stream=True)
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")

    def is_generating() -> bool:
        found = one(engine, "a/b?c")
        return found is not None and found["generatedTokens"] > 2

    eventually(is_generating)
    found = one(engine, "a/b?c")
    assert found is not None
    assert (found["phase"], found["model"]) == ("generating", "tiny")
    assert found["endpoint"] == "/v1/chat/completions"
    assert found["prefilledTokens"] == found["promptTokens"] > 0
    assert found["seconds"] >= 0
    assert "hello" not in json.dumps(found)
    assert cancel(engine, "a/b%3Fc").json == {"id": "a/b?c", "cancelled": 1}
    rest = response.read().decode()
    connection.close()
    # An error that no gateway takes for a failure of the engine; and no end of the text.
    assert json.loads(rest.strip().rpartition("data: ")[2])["error"] == {
        "message": "This request was cancelled by an operator of the fleet.",
        "type": "invalid_request_error",
        "param": None,
        "code": "request_cancelled",
    }
    assert "[DONE]" not in rest
    assert one(engine, "a/b?c") is None
    assert engine.busy() == (0, 0)
    metrics = engine.request("GET", "/metrics").raw.decode()
    assert 'requests_total{endpoint="/v1/chat/completions",outcome="cancelled"}' in metrics
    assert 'endpoint="/v1/chat/completions",finished_reason="abort"}' in metrics


def test_all_requests_with_the_id_end_and_no_other(engine: Engine) -> None:
    twins = [engine.begin(headers={"x-request-id": "twin"}, max_tokens=3000) for _ in range(2)]
    other = engine.begin(headers={"x-request-id": "other"}, max_tokens=3000)
    eventually(lambda: len(in_flight(engine)) == 3)
    assert cancel(engine, "twin").json["cancelled"] == 2
    assert [answer(twin)[0] for twin in twins] == [499, 499]
    assert one(engine, "other") is not None
    assert cancel(engine, "other").json["cancelled"] == 1
    assert answer(other)[0] == 499


def test_an_unknown_id(engine: Engine) -> None:
    reply = cancel(engine, "nobody")
    assert (reply.status, reply.error["code"]) == (404, "request_not_found")
    assert "/v1/in-flight" in reply.error["message"]
    # A web page cannot cancel either.
    headers = {"origin": "http://evil.example"}
    reply = engine.request("POST", "/v1/in-flight/nobody/cancel", headers=headers)
    assert reply.status == 403


@pytest.mark.ci
def test_one_that_waits_is_cancelled(start: Start, tiny: Any) -> None:
    engine = start(tiny, concurrency=1)
    eventually(engine.is_ready, within_s=60)
    running = engine.begin(headers={"x-request-id": "first"}, max_tokens=4000)
    eventually(lambda: engine.busy() == (1, 0))
    waiting = engine.begin(headers={"x-request-id": "second"}, max_tokens=4000)
    eventually(lambda: engine.busy() == (1, 1))
    assert [found["phase"] for found in in_flight(engine)][1] == "queued"
    assert cancel(engine, "second").status == 200
    assert answer(waiting)[0] == 499
    assert engine.busy() == (1, 0)
    running.close()


def prefill_positions(engine: Engine, first: int) -> list[int]:
    """Send a prompt of 3,500 tokens, and return how many were read at each look."""
    tokens = [(first + number) % 97 + 100 for number in range(3500)]
    connection = engine.connect()
    body = json.dumps({"model": "tiny", "prompt": tokens, "max_tokens": 1})
    headers = {"x-request-id": "long", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", body.encode(), headers)
    seen: list[Json] = []

    def has_ended() -> bool:
        found = one(engine, "long")
        if found is not None:
            seen.append(found)
        return found is None and bool(seen)

    eventually(has_ended)
    assert answer(connection)[0] == 200
    return [found["prefilledTokens"] for found in seen if found["phase"] == "prefill"]


def test_the_progress_of_a_long_prompt_is_shown(engine: Engine) -> None:
    """While others generate, a prompt is read in pieces, and pieces show."""
    streams = [engine.begin(max_tokens=3900) for _ in range(2)]
    eventually(lambda: engine.busy() == (2, 0))
    for first in range(20):  # until a look falls between two pieces
        positions = prefill_positions(engine, first)
        assert positions == sorted(positions)
        assert all(position <= 3500 for position in positions)
        if any(0 < position < 3500 for position in positions):
            break
    else:
        pytest.fail("no look showed a part of a prompt")
    for stream in streams:
        stream.close()


def _record(number: int, *positions: int) -> RequestRecord:
    jobs = tuple(
        Job(id=at, prompt=(1, 2, 3, 4), max_tokens=1, sampling=SamplingParams(temperature=0))
        for at, _ in enumerate(positions)
    )
    ticket = Ticket(jobs=jobs, entered_s=1.0, started_s=2.0)
    return RequestRecord(
        id=f"r{number}", endpoint="/v1/completions", begun_s=1.0, is_generation=True, ticket=ticket
    )


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        pytest.param((), 0, id="not-begun"),
        pytest.param(((0, 3),), 3, id="one"),
        # A prompt that several jobs continue counts once; emitted tokens are no part of it.
        pytest.param(((0, 2), (1, 3)), 3, id="shared"),
        pytest.param(((0, 9),), 4, id="resumed"),
        pytest.param(((7, 3),), 0, id="another-job"),
    ],
)
def test_prefill_progress(positions: tuple[tuple[int, int], ...], expected: int) -> None:
    (request,) = report([_record(0, 0, 0)], positions, 3.5).requests
    assert (request.phase, request.prompt_tokens, request.prefilled_tokens) == (
        "prefill",
        4,
        expected,
    )
    assert request.seconds == 2.5


def test_the_list_is_bounded() -> None:
    requests = report([_record(number) for number in range(MAX_REQUESTS + 1)], (), 3.0)
    assert len(requests.requests) == MAX_REQUESTS
    assert requests.total == MAX_REQUESTS + 1
    assert requests.requests[0].id == "r0"
