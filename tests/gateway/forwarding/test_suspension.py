"""Streams whose clients read nothing: they free their engine for others, and continue without a seam."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson
import pytest

from gateway.limits import GatewayLimits
from schemas.routing import Queueing, Routing
from tests.support.gateway_fake_engine import Call
from tests.support.gateway_world import Running, deployment, published, running_gateway
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
TOKENS = 600
TEXT_BYTES = 40_000  # 24 MB in all: more than the kernel's buffers hold


@dataclass
class LongAnswer:
    """An engine's script: an answer that does not fit into any buffer."""

    resumed_from: list[int] = field(default_factory=list)

    async def __call__(self, call: Call) -> None:
        body = orjson.loads(call.body)
        if body["messages"] == "short":
            # There is one slot.
            await until(lambda: call.engine.abandoned == 1, limit_s=60, what="a free slot")
            await call.answer(b'{"id":"x","choices":[]}')
            return
        fleet = body.get("fleet")
        first = 0 if fleet is None else len(fleet["tokens"])
        if fleet is not None:
            assert fleet["tokens"] == list(range(first))
            self.resumed_from.append(first)
        await call.begin_stream()
        for token in range(first, TOKENS):
            await call.chunk(event(token, is_first=token == first))
        await call.chunk(b"data: [DONE]\n\n")
        await call.send(b"0\r\n\r\n")


def event(token: int, *, is_first: bool) -> bytes:
    fields: dict[str, object] = {"tokens": [token]}
    if is_first:
        fields |= {"seed": 1, "prompt": "p", "id": "x", "created": 1, "cached_tokens": 0}
    if token == TOKENS - 1:
        fields["usage"] = {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": TOKENS}
    return b": fleet " + orjson.dumps(fields) + b"\n" + shown(token)


def shown(token: int) -> bytes:
    return b'data: {"id":"x","text":"%d %b"}\n\n' % (token, b"x" * TEXT_BYTES)


@asynccontextmanager
async def stalled(gateway: Running) -> AsyncIterator[asyncio.StreamReader]:
    """Ask for the long answer, and read nothing of it."""
    port = int(gateway.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    body = b'{"model":"m","messages":"long","stream":true}'
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % (CHAT.encode(), len(body)) + body)
    try:
        yield reader
    finally:
        writer.transport.abort()


async def ask_shortly(gateway: Running) -> int:
    """Return the status of a short request."""
    async with asyncio.timeout(60):
        return (await gateway.chat(messages="short"))[0]


def unframed(raw: bytes) -> bytes:
    """Return the body of a chunked response."""
    _, _, rest = raw.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body, rest = body + rest[:length], rest[length + 2 :]
        if not length:
            break
    return body


@asynccontextmanager
async def serving(script: LongAnswer, queueing: Queueing | None) -> AsyncIterator[Running]:
    """Run a gateway that takes engines from stalled clients at once, with an engine that has one slot."""
    limits = GatewayLimits(yield_timeout_s=0.0, drain_timeout_s=0)
    async with running_gateway(limits=limits) as gateway:
        declared = deployment("m")
        spec = declared.spec.model_copy(update={"routing": Routing(queueing=queueing)})
        (engine,) = await gateway.start(script)
        endpoint = published(engine, "m")
        slots = endpoint.spec.model_copy(update={"concurrency": 1})
        await gateway.world.put(
            declared.model_copy(update={"spec": spec}), endpoint.model_copy(update={"spec": slots})
        )
        await gateway.knows("m", ready=1)
        yield gateway


@pytest.mark.ci
@pytest.mark.parametrize("waits_at", ["gateway", "engine"])
async def test_a_client_that_reads_nothing_frees_the_engine_for_others(waits_at: str) -> None:
    script = LongAnswer()
    queueing = Queueing(concurrency=1) if waits_at == "gateway" else None
    async with serving(script, queueing) as gateway:
        load_tracker = gateway.gateway.load_tracker
        async with stalled(gateway) as reader:
            handler = gateway.gateway.handler
            context = await until(lambda: next(iter(handler.contexts), None), what="the request")
            await until(lambda: context.blocked_since_s < float("inf"), what="full buffers")
            assert gateway.gateway.metrics.suspensions.value() == 0  # alone, it keeps its engine
            assert await ask_shortly(gateway) == 200
            assert gateway.gateway.metrics.suspensions.value() == 1
            raw = await asyncio.wait_for(reader.read(), 120)
        assert unframed(raw) == b"".join(map(shown, range(TOKENS))) + b"data: [DONE]\n\n"
        assert raw.endswith(b"0\r\nx-fleet-resumed: 1\r\n\r\n")
        assert len(script.resumed_from) == 1
        assert gateway.gateway.metrics.resumptions.value("resumed") == 1
        assert gateway.gateway.metrics.requests.value("m", "ok") == 2
        assert load_tracker.total() == 0


async def test_a_suspended_client_that_leaves_costs_nothing() -> None:
    script = LongAnswer()
    async with serving(script, Queueing(concurrency=1)) as gateway:
        async with stalled(gateway):
            assert await ask_shortly(gateway) == 200
            assert gateway.gateway.metrics.suspensions.value() == 1
        handler = gateway.gateway.handler
        await until(lambda: not handler.contexts, limit_s=30, what="the end of the request")
        assert gateway.gateway.load_tracker.total() == 0
        assert script.resumed_from == []
        assert gateway.gateway.metrics.requests.value("m", "client_gone") == 1
