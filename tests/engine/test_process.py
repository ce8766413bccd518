"""The process of an engine: start, full queue, drain, and every exit code."""

import json
import shutil
import signal
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from identity.credentials import Credentials
from identity.names import Role
from machinery.clock import SystemClock
from schemas.trust import TlsMode
from schemas.wire.exit_codes import ExitCode
from tests.support.engine_process import Engine, Start, eventually
from tests.support.identities import TestAuthority

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
READY_S = 60
JSON = {"content-type": "application/json"}


def ready(engine: Engine) -> Engine:
    eventually(engine.is_ready, within_s=READY_S)
    return engine


def test_an_engine_does_not_start_with_another_nodes_identity(
    start: Start, tiny: Path, tmp_path: Path
) -> None:
    folder = TestAuthority(tmp_path / "fleet").issue(Role.NODE, "mac-2")
    engine = start(tiny, identity_dir=folder.path)
    assert engine.wait() == ExitCode.UNUSABLE
    assert "expected that of node mac-1" in engine.last_words()


def test_an_engine_with_an_identity_answers_nobody_without_one(
    start: Start, tiny: Path, tmp_path: Path
) -> None:
    fleet = TestAuthority(tmp_path / "fleet")
    folder = fleet.issue(Role.NODE, "mac-1")
    folder.write_trust(fleet.snapshot(mode=TlsMode.STRICT))
    engine = start(tiny, identity_dir=folder.path)
    eventually(engine.answers, within_s=READY_S)
    refused = engine.chat()
    assert (refused.status, refused.error["code"]) == (503, "tls_required")
    stranger = ssl.create_default_context(cadata=fleet.authority.pem)
    stranger.check_hostname = False
    gateway = Credentials(fleet.issue(Role.GATEWAY, "edge"), SystemClock())
    name = fleet.identity(Role.NODE, "mac-1").dns_name
    assert over_tls(engine.port, stranger, name) == b""
    context = gateway.client(frozenset({Role.NODE})).context
    assert over_tls(engine.port, context, name).startswith(b"HTTP/1.1 ")


def over_tls(port: int, context: ssl.SSLContext, name: str) -> bytes:
    """Return the beginning of the answer to a health check over TLS; empty if it is refused."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=name) as tls:
                tls.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                return tls.recv(1024)
        except (ssl.SSLError, ConnectionError):
            return b""


@pytest.mark.ci
def test_probes_answer_while_the_model_loads(start_process: Start, tiny: Path) -> None:
    engine = start_process(tiny)
    eventually(engine.answers, within_s=READY_S)
    health = engine.health()
    assert (health.status, health.json["state"]) == (503, "Loading")
    early = engine.chat()
    assert (early.status, early.error["code"]) == (503, "loading")
    assert early.headers["retry-after"]
    waiting = engine.request("GET", "/ready")
    assert (waiting.status, waiting.error["code"]) == (503, "loading")
    assert "loading the model" in waiting.error["message"]
    assert waiting.headers["retry-after"]
    ready(engine)
    assert engine.request("GET", "/ready").status == 200
    health = engine.health()
    body = health.json
    assert body["pid"] == engine.process.pid
    assert (body["replica"], body["replicaUid"], body["node"]) == ("tiny-0", "uid-0", "mac-1")
    assert body["models"] == ["tiny", "fast"]
    assert body["loadedBytes"] == body["totalBytes"] > 500_000
    assert body["activeBytes"] > 0
    engine.process.send_signal(signal.SIGHUP)  # the terminal of a parent that ended
    assert engine.chat().status == 200
    assert_a_drain_refuses_a_prompt_in_the_tokenizer(engine)


def assert_a_drain_refuses_a_prompt_in_the_tokenizer(engine: Engine) -> None:
    huge = [engine.connect() for _ in range(8)]
    prompt = "one two three " * 85_000  # the last one waits for seconds
    for connection in huge:
        connection.request(
            "POST", "/tokenize", json.dumps({"model": "tiny", "prompt": prompt}), JSON
        )
    # The engine has read them when it answers a later request on another connection.
    assert engine.chat().status == 200
    engine.process.send_signal(signal.SIGTERM)
    response = huge[-1].getresponse()
    assert (response.status, json.load(response)["error"]["code"]) == (503, "draining")
    for connection in huge:
        connection.close()
    assert engine.wait() == 0
    assert "Traceback" not in engine.stderr.read_text()


def test_a_drain_lets_running_requests_finish(start: Start, tiny: Path) -> None:
    engine = ready(start(tiny, concurrency=1, queue_depth=2))
    assert_the_queue_is_bounded_and_in_order(engine)
    running = engine.begin(max_tokens=600)
    eventually(lambda: engine.busy() == (1, 0))
    waiting = engine.begin(max_tokens=600)
    eventually(lambda: engine.busy() == (1, 1))
    engine.process.send_signal(signal.SIGTERM)
    eventually(lambda: engine.health().json["state"] == "Draining")
    late = engine.chat()
    assert (late.status, late.error["code"]) == (503, "draining")
    assert late.headers["retry-after"]
    refused_late = waiting.getresponse()
    assert (refused_late.status, json.load(refused_late)["error"]["code"]) == (503, "draining")
    finished = running.getresponse()
    assert finished.status == 200
    assert json.load(finished)["usage"]["completion_tokens"] == 600
    running.close()
    waiting.close()
    assert engine.wait() == 0


def assert_the_queue_is_bounded_and_in_order(engine: Engine) -> None:
    running = engine.begin(max_tokens=4000)
    eventually(lambda: engine.busy() == (1, 0))
    leaving = engine.begin(max_tokens=5)
    staying = engine.begin(max_tokens=5)
    eventually(lambda: engine.busy() == (1, 2))
    refused = engine.chat()
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert refused.error["type"] == "rate_limit_error"
    assert refused.headers["retry-after"]
    assert (refused.headers["x-fleet-in-flight"], refused.headers["x-fleet-queued"]) == ("1", "2")
    leaving.close()
    eventually(lambda: engine.busy() == (1, 1))
    running.close()
    response = staying.getresponse()
    assert json.load(response)["usage"]["completion_tokens"] == 5
    staying.close()
    eventually(lambda: engine.busy() == (0, 0))


@pytest.mark.ci
def test_a_drain_waits_for_every_choice_and_for_deadlines(start: Start, tiny: Path) -> None:
    engine = ready(start(tiny, concurrency=4))
    loaded = engine.health().json["loadedBytes"]
    choices = engine.begin(n=3, max_tokens=200)
    hasty = engine.begin(max_tokens=4000, headers={"x-request-timeout": "1.5"})
    eventually(lambda: engine.busy() == (4, 0))
    waiting = engine.begin(n=2, max_tokens=5)
    eventually(lambda: engine.busy() == (4, 1))
    engine.process.send_signal(signal.SIGTERM)
    refused_late = waiting.getresponse()
    assert (refused_late.status, json.load(refused_late)["error"]["code"]) == (503, "draining")
    finished = choices.getresponse()
    assert finished.status == 200
    assert json.load(finished)["usage"]["completion_tokens"] == 3 * 200
    late = hasty.getresponse()
    assert (late.status, json.load(late)["error"]["code"]) == (504, "request_timeout")
    assert engine.wait() == 0
    for connection in (choices, hasty, waiting):
        connection.close()
    lines = [json.loads(line) for line in engine.stderr.read_text().splitlines()]
    outcomes = sorted(line["outcome"] for line in lines if line["message"] == "request")
    assert outcomes == ["deadline", "ok", "unavailable"]
    # Unloaded before the exit: wired memory of a dead process may stay wired until the machine restarts.
    (unloaded,) = (line for line in lines if line["message"] == "model unloaded")
    assert unloaded["active_bytes"] < loaded / 10


@pytest.mark.ci
@pytest.mark.parametrize("is_hurried", [True, False], ids=["second signal", "timeout"])
def test_a_drain_is_bounded(start: Start, tiny: Path, *, is_hurried: bool) -> None:
    engine = ready(start(tiny, drain_timeout_s=60 if is_hurried else 0.2))
    streamed = engine.begin(max_tokens=4000, stream=True)
    whole = engine.begin(max_tokens=4000)
    response = streamed.getresponse()
    assert response.readline().startswith(b"data: ")
    engine.process.send_signal(signal.SIGTERM)
    eventually(lambda: not engine.answers() or engine.health().json["state"] == "Draining")
    if is_hurried:
        engine.process.send_signal(signal.SIGTERM)
    events = [line for line in response.read().split(b"\n\n") if line]
    assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "draining"
    broken = whole.getresponse()
    assert (broken.status, json.load(broken)["error"]["code"]) == (503, "draining")
    streamed.close()
    whole.close()
    assert engine.wait() == 0


@pytest.mark.ci
def test_values_that_a_request_leaves_out_are_the_deployments_and_then_the_models(
    start: Start, tiny: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    recommended = {"temperature": 2.0, "top_k": 1}
    (model / "generation_config.json").write_text(json.dumps(recommended))
    engine = start(model, sampling={"maxTokens": 6})
    ready(engine)
    own: dict[str, Any] = {"temperature": None, "max_tokens": None}
    told = engine.chat(**own).json
    greedy = engine.chat(max_tokens=6).json
    assert told["choices"][0]["message"] == greedy["choices"][0]["message"]
    assert told["usage"]["completion_tokens"] == 6
    texts = {
        engine.chat(top_k=0, seed=seed, **own).json["choices"][0]["message"]["content"]
        for seed in range(4)
    }
    assert len(texts) == 4
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait() == 0


def test_a_port_in_use(start: Start, tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        engine = start(tiny, port=port)
        assert engine.wait() == 3
    assert engine.last_words().startswith(f"engine: port {port} is in use on 127.0.0.1")


@pytest.mark.ci
def test_a_crash_of_the_worker_ends_the_process(
    start_process: Start, tiny: Path, tmp_path: Path
) -> None:
    # An mlx_lm that cannot be imported is no fault of the model.
    (tmp_path / "mlx_lm.py").write_text('raise OSError("a library is missing")')
    engine = start_process(tiny, shadow=str(tmp_path))
    assert engine.wait(READY_S) == 1
    assert engine.last_words() == "engine: OSError: a library is missing"
