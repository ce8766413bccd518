"""Metrics, log lines and request ids of an engine."""

import contextlib
import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from engine.request_log import LineBudget
from tests.support.engine_process import Engine, eventually

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
CHAT = 'endpoint="/v1/chat/completions"'
TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


def increases(engine: Engine, before: dict[str, float]) -> dict[str, float]:
    """Return the increase of each sample."""
    after = engine.metrics()
    return {
        name: round(value - before.get(name, 0), 6)
        for name, value in after.items()
        if value != before.get(name, 0)
    }


def lines(engine: Engine) -> Iterator[dict[str, Any]]:
    for line in engine.stderr.read_text().splitlines():
        if line.startswith("{"):  # warnings of transformers are not JSON
            yield json.loads(line)


def line_of(engine: Engine, request_id: str) -> dict[str, Any]:
    """Return the log line of a request; it is written after the answer."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        found[:] = [line for line in lines(engine) if line.get("request_id") == request_id]
        return bool(found)

    eventually(is_there, what=f"a log line of {request_id}")
    assert len(found) == 1
    return found[0]


def test_a_request_is_counted_and_logged(engine: Engine) -> None:
    before = engine.metrics()
    reply = engine.chat("a secret word", headers={**TRACE, "x-request-id": "mine/1"}, max_tokens=8)
    usage = reply.json["usage"]
    assert reply.headers["x-request-id"] == "mine/1"
    line = line_of(engine, "mine/1")
    # The worker updates its gauges after it has delivered the tokens of a step.
    eventually(lambda: increases(engine, before).get("steps_total", 0) >= 8)
    found = increases(engine, before)
    assert found[f'requests_total{{{CHAT},outcome="ok"}}'] == 1
    for name in (
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert found[f"{name}_count{{{CHAT}}}"] == 1
        assert found[f'{name}_bucket{{{CHAT},le="+Inf"}}'] == 1
    assert found[f'requests_finished_total{{{CHAT},finished_reason="length"}}'] == 1
    assert found[f"request_prompt_tokens_sum{{{CHAT}}}"] == usage["prompt_tokens"]
    assert found[f"request_generation_tokens_sum{{{CHAT}}}"] == 8
    # Each token but the first follows one.
    assert found["inter_token_latency_seconds_count"] == 7
    decode_s = found[f"request_decode_time_seconds_sum{{{CHAT}}}"]
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(decode_s, abs=1e-4)
    prefill_s = found[f"request_prefill_time_seconds_sum{{{CHAT}}}"]
    inference_s = found[f"request_inference_time_seconds_sum{{{CHAT}}}"]
    assert inference_s == pytest.approx(prefill_s + decode_s, abs=1e-4)
    assert found["prompt_tokens_total"] == usage["prompt_tokens"]
    assert found["generation_tokens_total"] == 8
    assert found["prefill_seconds_total"] > 0
    assert found["decode_seconds_total"] > 0
    for field in ("time", "level", "process", "logger", "left_out"):
        line.pop(field, None)  # tests before may have had lines left out
    seconds = [line.pop(name) for name in ("queue_s", "ttft_s", "total_s")]
    assert seconds == sorted(seconds)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert line == {
        "message": "request",
        "request_id": "mine/1",
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
        "endpoint": "/v1/chat/completions",
        "model": "tiny",
        "status": 200,
        "outcome": "ok",
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": cached,
        "completion_tokens": 8,
    }
    log = engine.stderr.read_text()
    assert "secret" not in log
    assert reply.json["choices"][0]["message"]["content"] not in log


def test_gauges(engine: Engine) -> None:
    # Prompts that the prefix cache holds nearly whole are too short to be measured. The first sample of the speed may be
    # taken after the first answer, so there are two.
    for word in ("something", "more"):
        engine.chat(f"{word} to measure " * 20, max_tokens=3)
    # The worker updates its gauges after it has delivered the tokens of a step.
    eventually(lambda: engine.metrics()["memory_kv_bytes"] == 0)
    found = engine.metrics()
    assert found["ready"] == 1
    assert found["num_sequences_in_flight"] == found["num_requests_waiting"] == 0
    assert found["memory_active_bytes"] >= found["model_loaded_bytes"] > 500_000
    assert found["memory_peak_bytes"] > found["memory_active_bytes"]
    assert found["decode_tokens_per_second"] > 0
    assert found["prefill_tokens_per_second"] > 0
    assert found["prefill_chunk_tokens"] > 0
    assert found["memory_kv_limit_bytes"] > 0
    assert found["kv_cache_usage_ratio"] == 0


def test_the_use_of_the_kv_caches(engine: Engine) -> None:
    found: dict[str, float] = {}

    def is_used() -> bool:
        found.update(engine.metrics())
        return found["kv_cache_usage_ratio"] > 0

    with contextlib.closing(engine.begin(max_tokens=3000)):
        eventually(is_used)
    expected = found["memory_kv_bytes"] / found["memory_kv_limit_bytes"]
    assert found["kv_cache_usage_ratio"] == pytest.approx(expected)
    assert 0 < expected <= 1


def wrong_body(engine: Engine) -> int:
    return engine.chat(temperature=-1).status


def no_such_path(engine: Engine) -> int:
    return engine.post("/v1/made/up").status


def wrong_method(engine: Engine) -> int:
    return engine.request("GET", "/v1/chat/completions").status


@pytest.mark.parametrize(
    ("ask", "status", "series"),
    [
        (wrong_body, 400, f'{CHAT},outcome="invalid"'),
        (no_such_path, 404, 'endpoint="other",outcome="invalid"'),
        (wrong_method, 405, f'{CHAT},outcome="invalid"'),
    ],
)
def test_refusals_are_counted(
    engine: Engine, ask: Callable[[Engine], int], status: int, series: str
) -> None:
    before = engine.metrics()
    assert ask(engine) == status
    assert increases(engine, before)[f"requests_total{{{series}}}"] == 1


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_disconnect_is_counted_and_logged(engine: Engine, *, is_streamed: bool) -> None:
    before, id_ = engine.metrics(), f"leaving-{is_streamed}"
    connection = engine.begin(headers={"x-request-id": id_}, max_tokens=3000, stream=is_streamed)
    eventually(lambda: engine.busy() == (1, 0))
    if is_streamed:
        assert connection.getresponse().readline().startswith(b"data: ")
    connection.close()
    line = line_of(engine, id_)
    assert (line["outcome"], line["model"]) == ("client_gone", "tiny")
    assert line["completion_tokens"] < 3000
    found = increases(engine, before)
    assert found[f'requests_total{{{CHAT},outcome="client_gone"}}'] == 1
    assert f"e2e_request_latency_seconds_count{{{CHAT}}}" not in found


def test_a_stream_that_breaks_off_is_no_success(engine: Engine) -> None:
    headers = {"x-request-id": "too-long", "x-request-timeout": "0.5"}
    reply = engine.chat(stream=True, max_tokens=4000, headers=headers)
    assert reply.status == 200
    line = line_of(engine, "too-long")
    assert (line["status"], line["outcome"]) == (200, "deadline")


@pytest.mark.parametrize("given", ["x" * 129, "two words", "caf\u00e9", ""])
def test_an_invalid_request_id_is_replaced(engine: Engine, given: str) -> None:
    replies = [engine.chat(max_tokens=1, headers={"x-request-id": given}) for _ in range(2)]
    ids = {reply.headers["x-request-id"] for reply in replies}
    assert len(ids) == 2
    assert all(len(id_) == 32 for id_ in ids)
    for id_ in ids:
        assert line_of(engine, id_)["status"] == 200


def test_every_response_has_a_request_id(engine: Engine) -> None:
    for reply in (
        engine.health(),
        engine.request("GET", "/v1/models", headers={"x-request-id": "m"}),
        engine.post("/v1/made/up", headers={"x-request-id": "u"}),
        engine.chat(stream=True, max_tokens=2, headers={"x-request-id": "s"}),
    ):
        assert reply.headers["x-request-id"]
    assert line_of(engine, "s")["completion_tokens"] == 2
    assert not [line for line in lines(engine) if line.get("request_id") == "m"]


def test_progress_grows_while_the_engine_works(engine: Engine) -> None:
    ready = engine.request("GET", "/ready")
    assert (ready.status, ready.json) == (200, {"ready": True, "models": ["tiny", "fast"]})
    before = engine.health().json
    assert before["busy"] is False
    assert engine.chat(max_tokens=5).status == 200
    after = engine.health().json
    assert after["progress"] > before["progress"]
    running = engine.begin(max_tokens=3000)
    eventually(lambda: bool(engine.health().json["busy"]))
    first = engine.health().json["progress"]
    eventually(lambda: engine.health().json["progress"] > first)
    running.close()


def test_cached_blocks_are_listed(engine: Engine) -> None:
    # Unlike the prompts of other tests, and more than two blocks.
    tokens = [300 + number % 7 + number % 11 for number in range(150)]
    assert engine.post("/v1/completions", prompt=tokens, max_tokens=1).status == 200

    def cache() -> Any:
        return engine.request("GET", "/cache").json

    block = cache()["block"]
    first = hashlib.blake2b(little_endian(tokens[:block]), digest_size=8)
    second = hashlib.blake2b(
        first.digest() + little_endian(tokens[block : 2 * block]), digest_size=8
    )
    # The worker publishes the blocks after the answer.
    eventually(lambda: {first.hexdigest(), second.hexdigest()} <= set(cache()["blocks"]))
    assert engine.health().json["cachedBlocks"] == len(cache()["blocks"])


def little_endian(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def test_lines_of_refused_requests_are_limited_and_counted(engine: Engine) -> None:
    """One connection could fill a disk with them; the metrics count all."""
    before, count = engine.metrics(), 600
    # Behind what other tests have logged.
    begin = len(engine.stderr.read_bytes())
    for _ in range(count):
        assert engine.request("POST", "/v1/chat/completions", b"{}").status == 400
    assert increases(engine, before)[f'requests_total{{{CHAT},outcome="invalid"}}'] == count
    engine.chat("hi", headers={"x-request-id": "after-the-refusals"})
    last = line_of(engine, "after-the-refusals")
    written = engine.stderr.read_bytes()[begin:].decode().splitlines()
    refused = [json.loads(line) for line in written if '"outcome": "invalid"' in line]
    assert len(refused) < count / 2
    left_out = sum(line.get("left_out", 0) for line in [*refused, last])
    assert len(refused) + left_out == count


def test_the_budget_of_lines_refills() -> None:
    budget = LineBudget()
    assert sum(budget.take(0.0) for _ in range(1000)) == 200
    assert budget.left_out == 800
    assert [budget.take(0.2), budget.take(0.2)] == [True, False]
    assert sum(budget.take(1e6) for _ in range(1000)) == 200
