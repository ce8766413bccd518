"""Clients that disconnect, stall or send malformed HTTP, and signals under load. Tests wait for states, not for times."""

import contextlib
import http.client
import json
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_process import START_S, Engine, Start, eventually

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]


def steps(engine: Engine) -> int:
    return int(engine.health().json["steps"])


def raw(engine: Engine, data: bytes) -> socket.socket:
    """Open a connection and send bytes as they are."""
    line = socket.create_connection(("127.0.0.1", engine.port), timeout=30)
    line.sendall(data)
    return line


def head(length: int, path: str = "/v1/chat/completions", more: str = "") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {length}{more}", "", ""]).encode()


def answer_of(engine: Engine, text: str, **fields: Any) -> str:
    reply = engine.chat(text, **fields)
    assert reply.status == 200, reply.raw
    content: str = reply.json["choices"][0]["message"]["content"]
    return content


def is_idle(engine: Engine) -> bool:
    return engine.busy() == (0, 0)


def test_a_disconnect_while_in_prefill(engine: Engine) -> None:
    text = "one two three " * 1500  # thousands of tokens: many chunks
    before = steps(engine)
    fields: dict[str, Any] = {"prompt": text[:9000], "max_tokens": 1, "model": "tiny"}
    connection = engine.connect()
    connection.request("POST", "/v1/completions", json.dumps(fields))
    eventually(lambda: engine.busy() == (1, 0))
    connection.close()
    eventually(lambda: is_idle(engine))
    assert steps(engine) >= before
    assert engine.chat().status == 200


@pytest.mark.ci
def test_a_stop_under_load(start: Start, tiny: Path) -> None:
    """Running requests finish, queued ones are refused at once, and the process exits with 0."""
    engine = start(tiny, concurrency=16, queue_depth=8)
    eventually(engine.is_ready, within_s=START_S)
    streams = [engine.begin(max_tokens=600, stream=True) for _ in range(16)]
    # Requests get slots in the order in which their inputs are ready, which need not be that of their arrival.
    eventually(lambda: engine.busy() == (16, 0))
    waiting = [engine.begin(max_tokens=5) for _ in range(8)]
    eventually(lambda: engine.busy() == (16, 8))
    engine.process.send_signal(signal.SIGTERM)
    for connection in waiting:
        response = connection.getresponse()
        assert response.getheader("retry-after")
        assert (response.status, json.load(response)["error"]["code"]) == (503, "draining")
    for connection in streams:
        blocks = connection.getresponse().read().split(b"\n\n")
        assert blocks[-2] == b"data: [DONE]"
        assert (
            json.loads(blocks[-3].removeprefix(b"data: "))["choices"][0]["finish_reason"]
            == "length"
        )
    for connection in (*streams, *waiting):
        connection.close()
    assert engine.wait() == 0
    assert "Traceback" not in engine.stderr.read_text()


def test_an_incomplete_body(engine: Engine) -> None:
    lines = [raw(engine, head(500) + b'{"model": "tiny", "mess') for _ in range(20)]
    assert engine.chat().status == 200
    for line in lines[:10]:
        line.close()
    for line in lines[10:]:
        line.shutdown(socket.SHUT_WR)
        assert line.recv(100) == b""  # there is no request to answer
        line.close()
    eventually(lambda: engine.stderr.read_text().count('"outcome": "client_gone"') >= 20)
    assert '"outcome": "error"' not in engine.stderr.read_text()
    assert is_idle(engine)
    assert engine.chat().status == 200


def test_a_body_that_arrives_byte_by_byte(engine: Engine) -> None:
    fields = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
    body = json.dumps(fields | {"temperature": 0}).encode()
    line = raw(engine, head(len(body)))
    for at in range(len(body)):
        line.sendall(body[at : at + 1])
        if at == len(body) // 2:
            assert answer_of(engine, "hello", max_tokens=3)  # others do not wait for it
    answer = http.client.HTTPResponse(line)
    answer.begin()
    assert answer.status == 200
    assert json.load(answer)["choices"][0]["message"]["content"] == answer_of(
        engine, "hello", max_tokens=3
    )
    line.close()


MALFORMED = {
    "many headers": (
        head(2, more="\r\n" + "\r\n".join(f"x-{n}: {'y' * 900}" for n in range(200))),
        b"HTTP/1.1 431",
    ),
    "a long path": (
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"HTTP/1.1 431",
    ),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 400, b"HTTP/1.1 400"),
    "a negative length": (head(-5), b"HTTP/1.1 400"),
    "two lengths": (head(5, more="\r\ncontent-length: 6") + b"{}", b"HTTP/1.1 400"),
    "a bad chunk": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"",
    ),
    "a huge length": (head(99_999_999_999_999) + b"{", b"HTTP/1.1 413"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_requests_are_refused(engine: Engine, case: str) -> None:
    data, answer = MALFORMED[case]
    with raw(engine, b"") as line, contextlib.suppress(OSError):
        # A client that sends too much may find the connection closed before it reads the answer.
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        assert line.recv(65536).startswith(answer)
    assert is_idle(engine)
    assert engine.chat().status == 200


def test_an_endless_header(engine: Engine) -> None:
    """The parser refuses it long before memory is exhausted."""
    line = raw(engine, b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-bomb: ")
    sent = 0
    with contextlib.suppress(OSError):  # the engine closes the connection
        while sent < 256 << 20:
            sent += line.send(b"y" * 65536)
    assert sent < 64 << 20
    line.close()
    assert engine.chat().status == 200


@pytest.mark.ci
def test_a_killed_client_does_not_affect_fifteen_others(engine: Engine) -> None:
    texts = [f"number {n} " + "and more words " * (n % 5) for n in range(15)]
    alone = [answer_of(engine, text, max_tokens=60) for text in texts]
    victim = engine.begin(max_tokens=4000, stream=True)
    response = victim.getresponse()
    began = threading.Barrier(16)

    def chat(text: str) -> str:
        began.wait(30)
        return answer_of(engine, text, max_tokens=60)

    with ThreadPoolExecutor(15) as pool:
        answers = [pool.submit(chat, text) for text in texts]
        began.wait(30)
        eventually(lambda: engine.busy()[0] > 8)
        assert response.readline().startswith(b"data: ")
        # Unread bytes make the kernel send a reset, as for a killed process.
        victim.close()
        together = [answer.result() for answer in answers]
    assert together == alone


def test_a_client_that_does_not_read_delays_no_other(engine: Engine) -> None:
    idle = [engine.begin(max_tokens=2000, stream=True) for _ in range(4)]
    eventually(lambda: engine.busy()[0] == 4)
    assert answer_of(engine, "hello", max_tokens=20)
    for connection in idle:
        connection.close()
    eventually(lambda: is_idle(engine))
