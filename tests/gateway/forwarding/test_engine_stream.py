"""Streams after their first byte: interruption, leaving and slow clients, shutdown."""

import asyncio

import orjson
import pytest
from typing_extensions import override

from gateway.apis.adapter import ResponseTranslator
from gateway.apis.openai import OpenAiAdapter, ResponsesTranslator
from gateway.limits import GatewayLimits
from gateway.request import HttpRequest, InferenceRequest
from machinery.clock import NEVER
from tests.support import gateway_engine_scripts
from tests.support.clock import FakeClock
from tests.support.gateway_engine_scripts import DONE, delta, slow, streams
from tests.support.gateway_fake_engine import Call
from tests.support.gateway_world import Running, World, running_gateway
from tests.support.waiting import until, until_async

CHAT = "/v1/chat/completions"
STREAM = {"model": "m", "messages": [], "stream": True}


async def test_a_stream_that_breaks_says_so_and_is_not_done(gateway: Running) -> None:
    await gateway.serve(gateway_engine_scripts.dies_mid_stream)
    async with gateway.post(json=STREAM) as response:
        raw = await response.read()
    events = [orjson.loads(line[6:]) for line in raw.split(b"\n\n") if line]
    assert DONE not in raw
    assert [e["choices"][0]["delta"]["content"] for e in events[:-1]] == ["one", "two"]
    assert events[-1]["error"]["type"] == "server_error"
    assert events[-1]["error"]["code"] == "stream_interrupted"
    assert gateway.gateway.metrics.requests.value("m", "interrupted") == 1


class _EndlessTranslator(ResponsesTranslator):
    @override
    def end(self) -> bytes:
        raise ValueError("this stream has no end")


class _EndlessAdapter(OpenAiAdapter):
    @override
    def read(self, http_request: HttpRequest) -> tuple[InferenceRequest, ResponseTranslator | None]:
        return super().read(http_request)[0], _EndlessTranslator()


async def test_a_stream_whose_end_fails_in_the_gateway_ends_with_an_error_and_frees_its_engine(
    gateway: Running,
) -> None:
    reported: list[BaseException] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    handler = gateway.gateway.handler
    handler.adapters = {**handler.adapters, CHAT.encode(): _EndlessAdapter()}
    try:
        await gateway.serve(streams(2, pause_s=0.0))
        async with asyncio.timeout(20), gateway.post(json=STREAM) as response:
            raw = await response.read()
    finally:
        loop.set_exception_handler(None)
    assert b'"type":"error"' in raw.rsplit(b"data: ", 1)[1]
    assert [str(error) for error in reported] == ["this stream has no end"]
    assert gateway.gateway.load_tracker.total() == 0
    assert not handler.contexts


async def test_bytes_come_as_they_were_sent_and_when(gateway: Running) -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(delta("first"))
        await go_on.wait()
        await call.chunk(b": comment\n\ndata: odd   bytes \xff\n\n" + DONE)
        await call.send(b"0\r\n\r\n")

    await gateway.serve(script)
    async with gateway.post(json=STREAM) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-fleet-node"] == "mac-1"
        assert "x-fleet-queued" not in response.headers
        assert await response.content.readany() == delta("first")
        go_on.set()
        rest = await response.content.read()
        assert rest == b": comment\n\ndata: odd   bytes \xff\n\n" + DONE


@pytest.mark.parametrize("mode", ["whole", "streamed"])
async def test_a_client_that_leaves_frees_the_engine(gateway: Running, mode: str) -> None:
    is_streamed = mode == "streamed"
    script = streams(1000, pause_s=0.02) if is_streamed else slow(30)
    (engine,) = await gateway.serve(script)

    async def ask() -> None:
        async with gateway.post(json=STREAM | {"stream": is_streamed}) as response:
            await response.read()

    async with asyncio.TaskGroup() as group:
        client = group.create_task(ask())
        await until(lambda: engine.calls, what="the request at the engine")
        client.cancel()
    await until(lambda: engine.abandoned == 1, what="the engine noticing")
    await until(lambda: gateway.gateway.load_tracker.total() == 0)
    await until(
        lambda: gateway.gateway.metrics.requests.value("m", "client_gone"), what="the count"
    )


async def stream_without_reading(
    gateway: Running,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = orjson.dumps(STREAM)
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\n" % CHAT.encode())
    writer.write(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
    return reader, writer


async def test_a_client_that_reads_slowly_holds_the_engine_back(gateway: Running) -> None:
    sent = 0

    async def flood(call: Call) -> None:
        nonlocal sent
        await call.begin_stream()
        for _ in range(1000):
            await call.chunk(delta("x" * 20_000))
            sent += 1
        await call.send(b"0\r\n\r\n")

    await gateway.serve(flood)
    reader, writer = await stream_without_reading(gateway)
    await until(lambda: sent > 0, what="the first chunk")
    earlier = 0
    while earlier < sent:  # until the engine has to wait
        earlier = sent
        await asyncio.sleep(0.5)
    assert sent < 1000
    raw = await reader.read()
    assert sent == 1000
    assert raw.count(b"data: ") == 1000
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_reads_nothing_is_given_up(world: World) -> None:
    # Long before --request-timeout, the limit of an engine's silence.
    limits = GatewayLimits(send_timeout_s=0.2, drain_timeout_s=0)
    script = streams(1_000_000, pause_s=0.0, size=5000)  # more than all buffers of the kernel
    async with running_gateway(world.transport, limits) as gateway:
        (engine,) = await gateway.serve(script)
        _, writer = await stream_without_reading(gateway)
        await until(lambda: engine.abandoned == 1, what="the engine being freed")
        assert gateway.gateway.load_tracker.total() == 0
        writer.transport.abort()


async def test_a_client_that_reads_slowly_is_not_given_up() -> None:
    clock = FakeClock()
    limits = GatewayLimits(send_timeout_s=30.0, drain_timeout_s=0)
    script = streams(1_000_000, pause_s=0.0, size=5000)
    async with running_gateway(limits=limits, clock=clock) as gateway:
        (engine,) = await gateway.serve(script)
        reader, writer = await stream_without_reading(gateway)
        contexts = gateway.gateway.handler.contexts
        context = await until(lambda: next(iter(contexts), None), what="the request")
        for _ in range(5):
            # Reads until the gateway notices, then waits nearly as long as it may.
            await until(lambda: context.blocked_since_s < NEVER, what="a full buffer")
            unsent = context.response.unsent_bytes()
            while context.response.unsent_bytes() >= unsent:
                await reader.read(1 << 16)
            await clock.advance(25)
            assert engine.abandoned == 0

        async def is_given_up() -> bool:
            await clock.advance(10)
            return engine.abandoned == 1

        await until_async(is_given_up, what="the engine being freed")
        writer.transport.abort()
        gateway.gateway.stop()
        await clock.advance(5)


async def test_streams_beyond_the_drain_end_with_an_error() -> None:
    limits = GatewayLimits(drain_timeout_s=0.2)
    async with running_gateway(limits=limits) as gateway:
        (engine,) = await gateway.serve(streams(1000, pause_s=0.02))
        async with gateway.post(json=STREAM) as response:
            await response.content.readany()
            gateway.gateway.stop()
            raw = await response.content.read()
        assert orjson.loads(raw.split(b"\n\n")[-2][6:])["error"]["code"] == "gateway_shutting_down"
        await until(lambda: engine.abandoned == 1, what="the engine noticing")
