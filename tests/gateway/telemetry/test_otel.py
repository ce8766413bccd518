"""Traces: the client's context reaches engines; with a collector, the gateway adds its spans."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from gateway.__main__ import main
from gateway.request import HttpRequest
from gateway.telemetry.otel import OtelTracer
from gateway.upstream import request_encoder
from machinery.environment import are_traces_enabled
from tests.support.gateway_calls import CHAT
from tests.support.gateway_engine_scripts import chat, dies_at_once, dies_mid_stream
from tests.support.gateway_world import Running, World, running_gateway
from tests.support.trace_collector import clear_environment, collecting, strings
from tests.support.waiting import until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture(autouse=True)
def no_tracing_of_the_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without this machine's OpenTelemetry environment."""
    clear_environment(monkeypatch)
    yield  # noqa: PT022 - monkeypatch undoes it afterwards


async def ask(gateway: Running, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url, body = gateway.url + CHAT, {"model": "m", "stream": True}
    async with gateway.http.post(url, json=body, headers=named) as response:
        await response.read()
        return response.status


async def test_a_clients_context_reaches_engines_as_it_came(gateway: Running) -> None:
    (engine,) = await gateway.serve(chat)
    await ask(gateway, traceparent=GIVEN, tracestate="a=1,b=2")
    assert engine.calls[0].headers["traceparent"] == GIVEN
    assert engine.calls[0].headers["tracestate"] == "a=1,b=2"
    for bad in ("00-0-0-01", GIVEN.replace("00-4", "ff-4"), GIVEN.upper(), "x" * 5000):
        await ask(gateway, traceparent=bad, tracestate="a=1")
        assert "traceparent" not in engine.calls[-1].headers
        assert "tracestate" not in engine.calls[-1].headers


@asynccontextmanager
async def traced(world: World, monkeypatch: pytest.MonkeyPatch, url: str) -> AsyncIterator[Running]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    assert are_traces_enabled()
    tracer = OtelTracer()
    try:
        async with running_gateway(world.transport, tracer=tracer) as gateway:
            yield gateway
    finally:
        await asyncio.to_thread(tracer.close)


async def test_spans_of_a_request_that_was_tried_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting() as collector, traced(world, monkeypatch, collector.url) as gateway:
        bad, good = await gateway.serve(dies_at_once, chat)
        assert await ask(gateway, traceparent=GIVEN, x_request_id="mine") == 200
        await until(lambda: len(collector.spans) == 4, what="the spans")
        (root,) = collector.of("chat m")
        (stream,) = collector.of("stream")
        failed, answered = sorted(collector.of("attempt"), key=lambda s: s.start_time_unix_nano)
        assert set(collector.services) == {"fleet-gateway"}
        assert root.trace_id.hex() == TRACE
        assert root.parent_span_id.hex() == PARENT
        assert root.kind == Span.SPAN_KIND_SERVER
        for child in (failed, answered, stream):
            assert (child.trace_id, child.parent_span_id) == (root.trace_id, root.span_id)
            assert root.start_time_unix_nano <= child.start_time_unix_nano
            assert child.start_time_unix_nano <= child.end_time_unix_nano
            assert child.end_time_unix_nano <= root.end_time_unix_nano
        assert strings(failed) == {
            "fleet.node": "mac-1",
            "fleet.replica": "m-0",
            "server.address": "mac-1",
            "fleet.outcome": "broken",
        }
        assert failed.status.code == failed.status.STATUS_CODE_ERROR
        assert strings(answered)["fleet.outcome"] == "answered"
        assert strings(root)["fleet.request_id"] == "mine"
        assert strings(root)["gen_ai.request.model"] == "m"
        assert strings(root)["gen_ai.operation.name"] == "chat"
        assert strings(root)["gen_ai.provider.name"] == "mlx-fleet"
        for engine, span in ((bad, failed), (good, answered)):
            sent = engine.calls[0].headers["traceparent"]
            assert sent == f"00-{TRACE}-{span.span_id.hex()}-01"


async def test_a_stream_that_broke_is_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting() as collector, traced(world, monkeypatch, collector.url) as gateway:
        await gateway.serve(dies_mid_stream)
        await ask(gateway)
        await until(lambda: collector.of("chat m") or None, what="the span")
        (root,) = collector.of("chat m")
        assert root.status.code == root.status.STATUS_CODE_ERROR
        assert strings(root)["fleet.outcome"] == "interrupted"
        assert not root.parent_span_id


async def test_what_is_not_sampled_is_passed_on_as_that(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting() as collector, traced(world, monkeypatch, collector.url) as gateway:
        (engine,) = await gateway.serve(chat)
        await ask(gateway, traceparent=GIVEN[:-1] + "0")
        sent = engine.calls[0].headers["traceparent"]
        assert re.fullmatch(f"00-{TRACE}-[0-9a-f]{{16}}-00", sent)
    assert not collector.spans


@pytest.mark.parametrize("is_there", [True, False], ids=["hangs", "is-down"])
async def test_a_bad_collector_costs_spans_and_nothing_else(
    world: World, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    """Requests are answered while it hangs, and the gateway ends."""
    async with collecting() as collector:
        collector.goes_on.clear()
        url = collector.url if is_there else "http://127.0.0.1:9"
        async with traced(world, monkeypatch, url) as gateway:
            await gateway.serve(chat)
            assert await ask(gateway) == 200
            if is_there:
                await until(lambda: collector.posts, what="the collector to hang")
            for _ in range(20):
                assert await ask(gateway) == 200


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, False),
    ],
)
def test_tracing_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], *, expected: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert are_traces_enabled() is expected


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("OTEL_TRACES_EXPORTER", "console", "only otlp and none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "only http/protobuf is supported"),
    ],
)
def test_unsupported_operations_are_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        are_traces_enabled()


def test_a_wrong_variable_is_refused_at_the_start() -> None:
    result = CliRunner().invoke(
        main, ["--port", "0", "--etcd", "unix:/s"], env={"OTEL_TRACES_EXPORTER": "zipkin"}
    )
    assert result.exit_code == 2
    assert "OTEL_TRACES_EXPORTER=zipkin: only otlp and none are supported" in result.stderr


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_no_header_of_a_stranger_makes_another_one(parent: bytes, state: bytes) -> None:
    """Engines get one header line each, or none."""
    for given_parent in (parent, GIVEN.encode()):
        headers = [(b"traceparent", given_parent), (b"tracestate", state)]
        request = HttpRequest(path="/", headers=headers, fields=dict(headers))
        context = request_encoder.parse_context(request)
        if context[0]:
            written = request_encoder.trace_lines(*context)
            assert written.count(b"\r") == written.count(b"\n") == 1 + bool(context[1])
            assert written.endswith(b"\r\n")
