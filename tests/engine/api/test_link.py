"""The engine link of a real engine on a raw socket: streams, windows, cancellation, refusals, garbage and death."""

import contextlib
import json
import random
import signal
import socket
from pathlib import Path

import pytest

from machinery import engine_link
from machinery.engine_link import CANCEL, END, EVENTS, FAIL, GAUGES, PING, PROGRESS, REQUEST, STATUS
from tests.support.engine_process import START_S, Engine, Start, eventually
from tests.support.link_client import JSON_LINE, linked, upgrade

pytestmark = pytest.mark.mlx


def text(body: bytes) -> str:
    events = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
    return "".join(
        choice["delta"].get("content", "") for event in events for choice in event["choices"]
    )


def test_streams_of_one_link_are_answered_side_by_side(engine: Engine) -> None:
    plain = engine.chat(max_tokens=24, temperature=0).json["choices"][0]["message"]["content"]
    with linked(engine.port) as link:
        for stream in range(1, 9):
            link.chat(stream, max_tokens=24, stream=True)
        link.chat(9, max_tokens=24)
        for stream in range(1, 9):
            status, headers, body = link.response(stream)
            assert (status, headers[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
            assert body.endswith(b"data: [DONE]\n\n")
            assert text(body) == plain
        status, headers, body = link.response(9)
        assert status == 200
        assert json.loads(body)["choices"][0]["message"]["content"] == plain
        # The load is a frame of the link, not of each response.
        assert not [name for name in headers if name.startswith(b"x-fleet-")]
        kind, payload = link.frames[0][0]
        assert kind == GAUGES
        assert engine_link.decode_gauges(payload).is_ready


def test_the_tokens_of_one_step_are_written_together(engine: Engine) -> None:
    with linked(engine.port) as link:
        for stream in range(1, 9):
            link.chat(stream, max_tokens=200, stream=True)
        for stream in range(1, 9):
            link.response(stream)
        frames = sum(map(len, link.frames.values()))
        assert frames > 8 * 20
        # One read for each step, not one for each token.
        assert len(link.reads) < frames / 3


def test_refusals_are_whole_responses(engine: Engine) -> None:
    with linked(engine.port) as link:
        link.chat(1, model="other")
        link.request(2, "/v1/unknown", b"{}")
        link.request(3, "/v1/chat/completions", b"{")
        link.request(4, "/v1/chat/completions", b"x" * (40 << 20))
        link.request(5, "/v1/models", b"", method="GET")
        assert [link.response(stream)[0] for stream in range(1, 6)] == [404, 404, 400, 413, 200]
        assert json.loads(link.response(1)[2])["error"]["code"] == "model_not_found"


def test_a_body_in_many_frames_arrives_whole(engine: Engine) -> None:
    with linked(engine.port) as link:
        body = json.dumps({"model": "tiny", "prompt": "a " * 100_000}).encode()
        assert len(body) > 3 * engine_link.BODY_BYTES
        link.request(1, "/tokenize", body)
        link.send(1, engine_link.WINDOW, engine_link.encode_window(8 << 20))
        link.chat(2, max_tokens=2)
        assert link.response(2)[0] == 200
        direct = engine.request("POST", "/tokenize", body)
        assert (link.response(1)[0], link.response(1)[2]) == (direct.status, direct.raw)


def test_cancelling_a_stream_frees_its_slot(engine: Engine) -> None:
    with linked(engine.port) as link:
        link.chat(1, max_tokens=3000, stream=True)
        link.wait(1, EVENTS)
        assert link.gauges().in_flight == 1
        link.send(1, CANCEL)
        eventually(lambda: engine.busy() == (0, 0))
        assert link.gauges().in_flight == 0
        link.chat(2, max_tokens=2)
        assert link.response(2)[0] == 200
        assert not any(kind in (END, FAIL) for kind, _ in link.frames[1])


def test_a_window_stalls_its_own_stream_only(engine: Engine) -> None:
    """A token is 200 bytes and more: 1,500 tokens with log probabilities are beyond the window."""
    with linked(engine.port) as link:
        link.chat(1, max_tokens=1500, stream=True, logprobs=True, top_logprobs=20)
        link.chat(2, max_tokens=300, stream=True)
        assert link.response(2)[0] == 200
        link.chat(3, max_tokens=1500)
        assert link.response(3)[0] == 200

        def sent() -> int:
            link.gauges()
            return sum(len(payload) for kind, payload in link.frames[1] if kind == EVENTS)

        eventually(lambda: engine.busy() == (0, 0))
        stalled = sent()
        most = engine_link.WINDOW_BYTES + engine_link.MAX_RESPONSE_PAYLOAD
        assert engine_link.WINDOW_BYTES <= stalled <= most
        link.send(1, engine_link.WINDOW, engine_link.encode_window(64 << 20))
        status, _, body = link.response(1)
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n")


def test_a_cancelled_stream_that_stalled_encodes_nothing_more(engine: Engine) -> None:
    """All of its tokens wait: hundreds of such streams would stop the event loop for a minute."""

    def gone() -> int:
        return engine.stderr.read_text().count('"outcome": "client_gone"')

    before = gone()
    with linked(engine.port) as link:
        link.chat(1, max_tokens=600, stream=True, logprobs=True, top_logprobs=20)
        link.wait(1, EVENTS)
        eventually(lambda: engine.busy() == (0, 0))
        link.send(1, CANCEL)
        eventually(lambda: gone() == before + 1, what="the end of the request")


def test_progress_is_shown_until_the_response_begins(engine: Engine) -> None:
    lines = JSON_LINE + b"x-fleet-progress: 0.05\r\nx-fleet-resumable: 1\r\n"
    with linked(engine.port) as link:
        link.chat(1, max_tokens=600, lines=lines)
        link.response(1)
        kinds = [kind for kind, _ in link.frames[1]]
        assert kinds.count(PROGRESS) > 1
        assert kinds[-2:] == [STATUS, END]
        records = [
            engine_link.decode_records(payload, 1)[0]
            for kind, payload in link.frames[1]
            if kind == PROGRESS and payload
        ]
        assert sum(len(record.tokens[0]) for record in records) > 1


def test_a_link_needs_its_upgrade_and_no_web_page_gets_one(engine: Engine) -> None:
    reply = engine.request("POST", "/v1/link", b"{}")
    assert (reply.status, reply.error["code"]) == (426, "upgrade_required")
    for line in (b"origin: http://evil.example\r\n",):
        connection, head = upgrade(engine.port, line)
        with connection:
            assert head.startswith(b"HTTP/1.1 403 ")


BROKEN = {
    "too large": engine_link.frame(1, REQUEST, b"x" * (engine_link.MAX_REQUEST_PAYLOAD + 1)),
    "no request": engine_link.frame(1, REQUEST, b"\x00\x04none"),
    "a long body": engine_link.frame(
        1,
        REQUEST,
        engine_link.encode_request(engine_link.RequestHead("POST", "/x", b"", 2), b"more"),
    ),
    "random": random.Random(4).randbytes(100_000),
    "HTTP": b"GET / HTTP/1.1\r\n\r\n" * 1000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_garbage_ends_its_link_only(engine: Engine, name: str) -> None:
    with linked(engine.port) as link, linked(engine.port) as other:
        other.chat(1, max_tokens=50, stream=True)
        try:
            link.connection.sendall(BROKEN[name])
            while not link.is_closed:
                link.read()
        except ConnectionError:
            pass
        assert other.response(1)[0] == 200


def test_half_a_frame_and_unknown_kinds_do_no_harm(engine: Engine) -> None:
    with linked(engine.port) as link:
        link.send(7, 99, b"of a later release")
        link.send(8, engine_link.BODY, b"of no stream")
        link.send(9, engine_link.WINDOW, b"\x00")
        whole = engine_link.frame(0, PING, b"")
        link.connection.sendall(whole[:3])
        link.connection.sendall(whole[3:])
        assert link.gauges().is_ready
        link.connection.sendall(whole[:5])
    assert engine.is_ready()


def test_the_end_of_a_link_ends_its_streams(engine: Engine) -> None:
    with linked(engine.port) as link:
        for stream in range(1, 5):
            link.chat(stream, max_tokens=3000, stream=True)
        link.wait(4, EVENTS)
        link.connection.shutdown(socket.SHUT_RDWR)
    eventually(lambda: engine.busy() == (0, 0))


def test_a_drain_is_reported_and_ends_the_link_after_the_last_stream(
    start: Start, tiny: Path
) -> None:
    engine = start(tiny, concurrency=2)
    eventually(engine.answers, within_s=START_S)
    with linked(engine.port) as link:
        eventually(lambda: link.gauges().is_ready, within_s=START_S)
        link.chat(1, max_tokens=400, stream=True)
        link.wait(1, EVENTS)
        engine.process.send_signal(signal.SIGTERM)
        eventually(lambda: not link.gauges().is_ready)
        link.chat(2, max_tokens=2)
        status, _, body = link.response(2)
        assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        assert link.response(1)[2].endswith(b"data: [DONE]\n\n")
        while not link.is_closed:
            link.read()
        assert engine_link.GOAWAY in [kind for kind, _ in link.frames[0]]
    assert engine.wait() == 0


def test_a_killed_engine_breaks_the_link(start: Start, tiny: Path) -> None:
    engine = start(tiny, concurrency=2)
    eventually(engine.is_ready, within_s=START_S)
    with linked(engine.port) as link:
        link.chat(1, max_tokens=3000, stream=True)
        link.wait(1, EVENTS)
        engine.process.send_signal(signal.SIGKILL)
        with contextlib.suppress(ConnectionError):
            while not link.is_closed:
                link.read()
        assert not any(kind == END for kind, _ in link.frames[1])
