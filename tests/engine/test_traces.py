"""Spans of an engine: below the gateway's attempt, with its phases; a bad collector costs nothing else."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from gateway.telemetry.otel import OtelTracer
from schemas.wire.exit_codes import ExitCode
from tests.support.engine_process import START_S, Engine, Start, eventually
from tests.support.gateway_calls import CHAT
from tests.support.gateway_real_engine import in_front_of
from tests.support.trace_collector import (
    Collector,
    clear_environment,
    collecting,
    integers,
    strings,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
TOKEN = "Bearer of-the-collector"
UNSAMPLED = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"}


@pytest.fixture(autouse=True)
def no_tracing_of_the_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    clear_environment(monkeypatch)
    yield  # noqa: PT022 - monkeypatch undoes it afterwards


def settings(collector: Collector) -> dict[str, str]:
    """Return the environment of an engine, with a header that holds a token."""
    return {
        "FLEET_LOG_LEVEL": "debug",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={TOKEN.replace(' ', '%20')}",
    }


async def ready(start: Start, model: Path, collector: Collector) -> Engine:
    engine = start(model, variables=settings(collector))
    await asyncio.to_thread(eventually, engine.is_ready, within_s=START_S)
    return engine


def secrets_of_children(engine: Engine) -> list[str]:
    """Return the variables that children of the engine have and only the engine needs."""
    children = psutil.Process(engine.process.pid).children(recursive=True)
    assert children, "the workers that tokenize"
    return [name for child in children for name in child.environ() if name.startswith("OTEL_")]


@pytest.mark.ci
async def test_phases_are_below_the_gateways_attempt_and_a_collector_that_hangs_delays_nothing(
    start_process: Start, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting() as collector:
        engine = await ready(start_process, tiny, collector)
        assert not secrets_of_children(engine)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        tracer = OtelTracer()
        async with in_front_of(engine, tracer) as gateway, aiohttp.ClientSession() as http:
            messages = [{"role": "user", "content": "hello"}]
            body = {"model": "tiny", "messages": messages, "max_tokens": 5, "temperature": 0}
            asked = {"x-request-id": "mine"}
            async with http.post(gateway.url + CHAT, json=body, headers=asked) as response:
                assert response.status == 200
                usage = (await response.json())["usage"]
            await until(lambda: collector.of("decode"), what="the engine's spans")
            await until(lambda: collector.of("attempt"), what="the gateway's spans")
        await asyncio.to_thread(tracer.close)
        check_tree(collector, usage["prompt_tokens"])
        lines = [
            json.loads(line) for line in engine.stderr.read_text().splitlines() if line[0] == "{"
        ]
        about = [line["message"] for line in lines if line.get("request_id") == "mine"]
        assert about == ["request has a slot", "request begins to generate", "request"]
        # What is not sampled is not recorded.
        count = len(collector.spans)
        await asyncio.to_thread(engine.chat, headers=UNSAMPLED, max_tokens=1)
        # A collector that hangs delays neither answers nor the end.
        collector.goes_on.clear()
        posts = collector.posts
        assert (await asyncio.to_thread(engine.chat, max_tokens=1)).status == 200
        await until(lambda: collector.posts > posts, what="the collector to hang")
        assert len(collector.spans) == count
        assert (await asyncio.to_thread(engine.chat, max_tokens=1)).status == 200
        engine.process.send_signal(signal.SIGTERM)
        # The SDK would wait for 30 s.
        assert await asyncio.to_thread(engine.wait, 20) == ExitCode.OK


def check_tree(collector: Collector, prompt_tokens: int) -> None:
    """Check the spans of one request of five tokens at a gateway and its engine."""
    assert set(collector.services) == {"fleet-gateway", "fleet-engine"}
    assert collector.services["fleet-engine"]["fleet.node"] == "mac-1"
    assert collector.services["fleet-engine"]["fleet.replica"] == "tiny-0"
    assert TOKEN in collector.tokens
    (attempt,) = collector.of("attempt")
    (request,) = collector.below(attempt).values()
    assert request.name == "chat tiny"
    assert request.kind == request.SPAN_KIND_SERVER
    assert request.trace_id == attempt.trace_id
    told = strings(request)
    assert told["fleet.request_id"] == "mine"
    assert told["fleet.outcome"] == "ok"
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.provider.name"] == "mlx-fleet"
    (reasons,) = [a for a in request.attributes if a.key == "gen_ai.response.finish_reasons"]
    assert [v.string_value for v in reasons.value.array_value.values] == ["length"]
    counts = integers(request)
    assert counts["gen_ai.usage.input_tokens"] == prompt_tokens
    assert counts["gen_ai.usage.output_tokens"] == 5
    assert counts["http.response.status_code"] == 200
    phases = collector.below(request)
    assert list(phases) == ["queue", "prefill", "decode"]
    queue, prefill, decode = phases.values()
    assert request.start_time_unix_nano <= queue.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert prefill.start_time_unix_nano < prefill.end_time_unix_nano
    assert decode.start_time_unix_nano < decode.end_time_unix_nano
    assert decode.end_time_unix_nano <= request.end_time_unix_nano


@pytest.mark.ci
def test_a_wrong_variable_is_refused_at_the_start(start_process: Start, tiny: Path) -> None:
    engine = start_process(tiny, variables={"OTEL_TRACES_EXPORTER": "zipkin"})
    assert engine.wait() == ExitCode.UNUSABLE
    assert "OTEL_TRACES_EXPORTER=zipkin: only otlp and none are supported" in engine.last_words()
