"""Input that takes too long, as the clients of a real engine see it: counted, refused, and no delay for others."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.engine_forks import forking
from tests.support.engine_process import START_S, Engine, Start, eventually

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

LOOP = "{% for x in range(99999) %}" * 3 + "{% endfor %}" * 3
TURN = {"role": "user", "content": "hello"}
COSTLY: dict[str, Any] = {"messages": [TURN] * 20, "max_tokens": 1}


@pytest.fixture(scope="module")
def limited(
    tiny: Path, blas_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Yield an engine whose chat template loops for 20 messages; a slot and three places, bodies of 256 KiB."""
    folder = tmp_path_factory.mktemp("limited")
    model = Path(shutil.copytree(tiny, folder / "model"))
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = (
        "{# tools <|tool_call_start|> #}{% if messages|length == 20 %}"
        + LOOP
        + "{% endif %}"
        + config["chat_template"]
    )
    path.write_text(json.dumps(config))
    with forking(folder, blas_cache) as function:
        engine = function(
            model, concurrency=1, queue_depth=3, input_limit_s=1, max_body_bytes=1 << 18
        )
        eventually(engine.is_ready, within_s=START_S)
        yield engine


@pytest.mark.ci
def test_what_waits_for_a_lane_is_counted_and_refused(limited: Engine) -> None:
    def send(_: int) -> Any:
        reply = limited.post("/v1/chat/completions", **COSTLY)
        return reply.status, reply.error["code"], reply.headers

    with ThreadPoolExecutor(12) as pool:
        replies = pool.map(send, range(12))
        eventually(lambda: limited.busy() == (0, 4))
        health = limited.health().json
        assert health["busy"]
        metrics = limited.request("GET", "/metrics").raw.decode()
        assert re.search(r"num_requests_waiting 4\n", metrics)
        found = list(replies)
    assert sorted((status, code) for status, code, _ in found) == [
        *[(400, "input_too_costly")] * 4,
        *[(429, "queue_full")] * 8,
    ]
    full = [headers for status, _, headers in found if status == 429]
    assert {headers["x-fleet-queued"] for headers in full} == {"4"}
    assert all(int(headers["retry-after"]) >= 1 for headers in full)
    assert limited.busy() == (0, 0)
    assert limited.health().json["progress"] > health["progress"]
    assert limited.chat().status == 200


def test_calls_without_a_grammar_are_counted(limited: Engine) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for choice in (
        "auto",
        "none",
        "required",
    ):  # "required" takes another format, which is enforced
        assert limited.chat(max_tokens=1, tools=[tool], tool_choice=choice).status == 200
    metrics = limited.request("GET", "/metrics").raw.decode()
    assert 'fleet_engine_unenforced_calls_total{format="lfm2"} 1\n' in metrics


@pytest.mark.ci
def test_a_lost_worker_costs_one_request(limited: Engine) -> None:
    assert limited.chat().status == 200
    server = psutil.Process(limited.process.pid).children()[0]
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(limited.post, "/v1/chat/completions", **COSTLY)
        eventually(lambda: any(worker.cpu_times().user > 0.1 for worker in server.children()))
        for worker in server.children():
            worker.kill()
        lost = reply.result()
    assert (lost.status, lost.error["code"]) == (503, "input_worker_lost")
    assert lost.headers["retry-after"] == "1"
    assert limited.chat().status == 200
    os.kill(server.pid, signal.SIGKILL)
    assert limited.chat().status == 200


def test_few_large_bodies_are_read_at_once(limited: Engine) -> None:
    text = b'{"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "'
    part = text + b"x" * (200 << 10)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n"
    begun = head.format(len(part) + 100).encode() + part
    with contextlib.ExitStack() as stack:

        def is_full() -> bool:
            stack.close()  # a request that came before one of them took its place
            # Seven fit into 1 MiB, of which each takes what it has beyond 64 KiB.
            for _ in range(7):
                address = ("127.0.0.1", limited.port)
                line = stack.enter_context(socket.create_connection(address, timeout=30))
                line.sendall(begun)
            limited.health()  # the engine has read what was sent before
            return limited.chat("y" * (170 << 10)).status == 429

        eventually(is_full, what="it is taken")
        refused = limited.chat("y" * (170 << 10))
        assert refused.error["code"] == "bodies_full"
        assert limited.chat().status == 200
    eventually(lambda: limited.chat("y" * (170 << 10)).status == 400)


@pytest.mark.ci
def test_an_engine_that_ends_leaves_no_worker(tiny: Path, start: Start) -> None:
    engine = start(tiny)
    eventually(engine.is_ready, within_s=START_S)
    assert engine.chat().status == 200
    processes = psutil.Process(engine.process.pid).children(recursive=True)
    assert len(processes) >= 2
    os.kill(engine.process.pid, signal.SIGKILL)
    engine.wait()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []
