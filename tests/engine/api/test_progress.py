"""Signs of progress on a link, with the tokens of whole answers, from which another engine continues."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.forwarding.resume_log import ResumeLog
from machinery import engine_link
from tests.support.engine_process import START_S, Engine, Start, eventually
from tests.support.link_client import JSON_LINE, linked

ASKS = {"x-fleet-resumable": "1", "x-fleet-progress": "0.05"}
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 600}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", MESSAGES | {"temperature": 0}),
    ("/v1/chat/completions", MESSAGES | {"temperature": 0, "n": 2}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 600, "echo": True, "temperature": 0}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 600, "temperature": 0}),
]


def ask(
    engine: Engine, path: str, body: bytes, headers: dict[str, str]
) -> tuple[list[bytes], bytes]:
    """Return the resume records of signs of progress, empty ones included, and the body of a 200."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
    with linked(engine.port) as link:
        link.request(1, path, body, lines=JSON_LINE + lines)
        link.send(1, engine_link.WINDOW, engine_link.encode_window(1 << 26))
        status, _, answer = link.response(1)
        assert status == 200, answer[:500]
        kinds = [kind for kind, _ in link.frames[1]]
        comments = [payload for kind, payload in link.frames[1] if kind == engine_link.PROGRESS]
        assert kinds[len(comments)] == engine_link.STATUS  # none after the response has begun
    return comments, answer


def comparable(raw: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(raw)
    for name in ("id", "created", "created_at", "completed_at"):
        answer.pop(name, None)
    for item in answer.get("output", ()):
        del item["id"]
    return answer


@pytest.mark.ci
@pytest.mark.mlx
@pytest.mark.parametrize(("path", "fields"), CASES, ids=str)
def test_a_whole_answer_continues_from_any_sign(
    engine: Engine, path: str, fields: dict[str, Any]
) -> None:
    body = json.dumps({"model": "tiny"} | fields).encode()
    comments, whole = ask(engine, path, body, ASKS)
    comments = [comment for comment in comments if comment]
    assert len(comments) > 1
    choices = fields.get("n", 1)
    for cut in {1, len(comments)}:
        resume_log = ResumeLog(10_000)
        for comment in comments[:cut]:
            resume_log.add(comment)
        point = resume_log.resume_point(choices)
        assert point is not None
        assert point.tokens
        more, rest = ask(engine, path, point.resume_body(body), ASKS)
        assert comparable(rest) == comparable(whole)
        for one in filter(None, more):
            resume_log.add(one)  # an engine that continues tells only what is new
        resume_point = resume_log.resume_point(choices)
        assert resume_point is not None
        assert point.tokens <= resume_point.tokens <= 600 * choices


@pytest.mark.ci
@pytest.mark.mlx
def test_progress_is_shown_only_to_those_that_ask(engine: Engine) -> None:
    body = json.dumps({"model": "tiny"} | MESSAGES).encode()
    assert ask(engine, "/v1/chat/completions", body, {})[0] == []
    # Without `fleet`, and of log probabilities, which the next engine does not know, only the fact.
    assert set(ask(engine, "/v1/chat/completions", body, {"x-fleet-progress": "0.05"})[0]) == {b""}
    logprobs = json.dumps({"model": "tiny", "logprobs": True} | MESSAGES).encode()
    assert set(ask(engine, "/v1/chat/completions", logprobs, ASKS)[0]) == {b""}


@pytest.mark.ci
@pytest.mark.mlx
def test_a_stream_shows_progress_until_its_first_event(start: Start, tiny: Path) -> None:
    """Also while the request waits for a slot that another has."""
    engine = start(tiny, concurrency=1)
    eventually(engine.is_ready, within_s=START_S)
    running = engine.begin(max_tokens=600)
    eventually(lambda: engine.busy()[0] == 1)
    body = json.dumps({"model": "tiny", "stream": True} | MESSAGES | {"max_tokens": 3}).encode()
    interims, events = ask(engine, "/v1/chat/completions", body, ASKS)
    assert interims
    assert set(interims) == {b""}
    assert events.count(b"data: {") > 1
    assert running.getresponse().status == 200
    running.close()
