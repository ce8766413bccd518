"""Resumption in values: streams cut at every event and every byte, in every way an engine can fail."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import pytest
from typing_extensions import override

from gateway.forwarding.attempt import AttemptRunner, AttemptWaiter
from gateway.forwarding.engine_stream import EngineStream, StreamReceiver
from gateway.forwarding.model_state import RequestTerms
from gateway.forwarding.policy import DEFAULT_POLICY
from gateway.forwarding.resume_log import ResumeLog
from gateway.forwarding.resumption import Resumer
from gateway.forwarding.retry_state import RetryState
from gateway.forwarding.router import LoadTracker, Router
from gateway.metrics.gateway_metrics import GatewayMetrics
from gateway.metrics.version_metrics import VersionMetrics
from gateway.request import InferenceRequest
from gateway.state.build_table import TableInputs, build_table
from gateway.state.table_cache import TableCache
from gateway.upstream.call import (
    BrokenResponseError,
    CallCarrier,
    EngineCall,
    UnreachableError,
    Upstream,
)
from gateway.upstream.response_head import read_head
from machinery import engine_link
from machinery.clock import SystemClock
from machinery.engine_link import ResumeRecord, ResumeStart
from schemas.wire.streams import WAITING
from store.memory import MemoryTransport
from tests.support.gateway_resume_engine import (
    BODY,
    CASES,
    CHAT,
    WITH_USAGE,
    Request,
    check,
    events,
    expected_stream,
)
from tests.support.gateway_world import deployment, target
from tests.support.resume_records import CommentReader


@pytest.mark.parametrize(("path", "body"), CASES, ids=["chat", "usage", "completion"])
def test_fake_engines_record_as_real_ones_do(path: str, body: dict[str, Any]) -> None:
    check(frames(events(Request(path, body))))


# Without sockets: every byte.


@dataclass(frozen=True)
class Answering(CallCarrier):
    """An engine that answers in a task."""

    task: asyncio.Task[None]

    @override
    def drop(self, call: EngineCall) -> None:
        call.connection = None
        self.task.cancel()

    @override
    def pause(self, call: EngineCall) -> None:
        pass

    @override
    def resume(self, call: EngineCall) -> None:
        pass

    @override
    def fail_call(self, call: EngineCall, why: str, *, is_silence: bool) -> None:
        raise NotImplementedError


@dataclass
class Cut(Upstream):
    """Engines whose streams break after a number of bytes, one after another."""

    cuts: list[int] = field(default_factory=list)
    size: int = 0
    asked: list[bytes] = field(default_factory=list)
    is_gone: bool = False
    """True if no engine is reachable."""

    @override
    def send(self, call: EngineCall) -> None:
        answer = asyncio.get_running_loop().create_task(self._answer(call))
        call.connection = Answering(answer)

    async def _answer(self, call: EngineCall) -> None:
        if self.is_gone:
            call.on_error(UnreachableError("connection refused"))
            return
        self.asked.append(call.raw)
        head, body = engine_link.decode_request(call.raw)
        number = len(self.asked)
        request = Request(head.path, orjson.loads(body))
        data = b"".join(events(request, seed=number, id_=f"x-{number}"))
        is_cut = bool(self.cuts)
        if is_cut:
            data = data[: self.cuts.pop(0)]
        call.on_head(read_head(200, [b"content-type: text/event-stream"]))
        comments = CommentReader()
        for at in range(0, len(data), self.size):
            arrived = comments.feed(data[at : at + self.size])
            pairs = [engine_link.split_recorded(payload) for _, payload in arrived]
            if pairs:
                shown = b"".join(part for _, part in pairs)
                call.on_recorded(shown, [record for record, _ in pairs])
            await asyncio.sleep(0)  # a call that was given up ends here
        if is_cut:
            call.on_error(BrokenResponseError("it broke", had_bytes=True))
        else:
            call.on_end(b"")


def content(chunk: bytes) -> bytes:
    """Return the content of one HTTP/1.1 chunk."""
    line, _, rest = chunk.partition(b"\r\n")
    assert rest.endswith(b"\r\n")
    assert int(line, 16) == len(rest) - 2
    return rest[:-2]


class Reader(StreamReceiver):
    """Reads a stream, and has it continued, as the handler does."""

    def __init__(self, stream: EngineStream) -> None:
        self._stream = stream
        self._arrived = asyncio.Queue[bytes | BrokenResponseError]()
        stream.attach(self)

    async def read(self) -> bytes:
        """Return the next events; empty at the end."""
        found = await self._arrived.get()
        if isinstance(found, BrokenResponseError):
            raise found
        return found

    @override
    def on_events(self, events: bytes) -> None:
        self._arrived.put_nowait(events)

    @override
    def chunk_writer(self) -> Callable[[bytes], object]:
        return lambda chunk: self._arrived.put_nowait(content(chunk))

    @override
    def on_stream_end(self) -> None:
        self._arrived.put_nowait(b"")

    @override
    def on_stream_broken(self, error: BrokenResponseError) -> None:
        self._arrived.put_nowait(error)

    @override
    def on_suspended(self) -> None:
        pytest.fail("its reader reads")

    @override
    def on_engine_died(self) -> None:
        self._search = asyncio.get_running_loop().create_task(self._continue())

    async def _continue(self) -> None:
        try:
            while not await self._stream.find_next():
                self._arrived.put_nowait(WAITING)
        except BrokenResponseError as error:
            self._arrived.put_nowait(error)
        else:
            self._stream.attach(self)


class Carried:
    """Streams, forwarded as the gateway does."""

    def __init__(self, replicas: int = 3, patience_s: float = 5.0) -> None:
        clock, entropy = SystemClock(), random.Random(0)
        self.engines = Cut()
        self.metrics = GatewayMetrics(in_flight=lambda: 0, endpoints=lambda: 0, refused=lambda: 0)
        self._targets = [target(f"m-{n}", port=n + 1) for n in range(replicas)]
        leased = {endpoint.replica: endpoint for endpoint in self._targets}
        table_inputs = TableInputs(
            deployments={"m": deployment("m")}, statuses={}, routes={}, leased=leased
        )
        table_cache = TableCache(MemoryTransport(clock), clock)
        table_cache.table = build_table(table_inputs, [])
        loads = LoadTracker(entropy)
        attempts = AttemptRunner(
            upstream=self.engines,
            load_tracker=loads,
            versions=VersionMetrics(),
            table_cache=table_cache,
            metrics=self.metrics,
            clock=clock,
        )
        router = Router(table_cache=table_cache, load_tracker=loads, clock=clock, random=entropy)
        self._resumer = Resumer(attempts=attempts, router=router, keep_alive_s=0.05)
        self._terms = RequestTerms(policy=replace(DEFAULT_POLICY, recovery_s=patience_s))

    async def stream(
        self, *cuts: int, path: str = CHAT, body: dict[str, Any] = BODY, size: int = 10_000
    ) -> tuple[EngineStream, RetryState]:
        """Begin a stream that breaks at each of the cuts."""
        self.engines.cuts, self.engines.size, state = (
            list(cuts),
            size,
            RetryState(terms=self._terms),
        )
        self.engines.asked.clear()
        ask = InferenceRequest(
            path=path,
            model="m",
            body=orjson.dumps(body),
            request_id=b"r",
            is_streamed=True,
            is_resumable=True,
        )
        waiter = AttemptWaiter()
        attempt = self._resumer.attempts.start(ask, self._targets[0], state, waiter)
        result = await waiter.wait(attempt)
        assert isinstance(result, EngineStream)
        self._resumer.watch(result, ask, state)
        return result, state


async def read(stream: EngineStream) -> AsyncIterator[bytes]:
    reader = Reader(stream)
    while piece := await reader.read():
        yield piece
    stream.close()


@pytest.mark.parametrize(("path", "body"), CASES, ids=["chat", "usage", "completion"])
@pytest.mark.parametrize(("size", "step"), [(10_000, 1), (7, 9)])
async def test_cut_at_every_byte(path: str, body: dict[str, Any], size: int, step: int) -> None:
    told = events(Request(path, body))
    whole, first, carried = b"".join(told), len(told[0]), Carried()
    for cut in range(first, len(whole), step):
        stream, state = await carried.stream(cut, path=path, body=body, size=size)
        got = [piece async for piece in read(stream)]
        assert b"".join(got) == expected_stream(path, body), cut
        assert all(piece.endswith(b"\n\n") for piece in got)
        assert state.resumptions == 1
        assert state.usage == (11, 4, 8)
        assert stream.attempt.is_counted


async def test_repeated_cuts() -> None:
    """Cuts within the next engine's first event are its failure."""
    chooser, carried = random.Random(1), Carried(replicas=8)
    told = events(Request(CHAT, WITH_USAGE))
    whole, first = len(b"".join(told)), len(told[0])
    for _ in range(200):
        cuts = [chooser.randrange(first, whole), *(chooser.randrange(whole // 2) for _ in "ab")]
        size = chooser.choice((1, 50, 10_000))
        stream, state = await carried.stream(*cuts, body=WITH_USAGE, size=size)
        assert b"".join([piece async for piece in read(stream)]) == expected_stream(
            CHAT, WITH_USAGE
        )
        assert state.resumptions <= 3


async def test_resumptions_are_limited() -> None:
    carried = Carried(replicas=9)
    stream, state = await carried.stream(400, 300, 300, 300, 300)
    with pytest.raises(
        BrokenResponseError, match=r"it broke; it is not resumed: .*(3 times|before they)"
    ):
        _ = [piece async for piece in read(stream)]
    assert carried.metrics.resumptions.value("too_often") == 1
    stream.close()
    assert state.usage[0] == 11
    assert 0 < state.usage[2] < 8


async def test_clients_hear_that_they_are_waited_for() -> None:
    carried = Carried(patience_s=0.5)
    stream, _ = await carried.stream(400)
    carried.engines.is_gone = True
    received: list[bytes] = []

    reader = Reader(stream)

    async def hear() -> None:
        while piece := await reader.read():
            received.append(piece)

    with pytest.raises(BrokenResponseError, match="no replica of 'm' could continue it within"):
        await hear()
    assert received.count(WAITING) > 3
    assert carried.metrics.resumptions.value("nobody") == 1
    assert carried.metrics.attempts.value("unreachable") >= 3


def frames(events: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the records and the events of a stream, as they are sent."""
    frames = CommentReader().feed(b"".join(events))
    return [engine_link.split_recorded(payload) for _, payload in frames]


def test_what_is_kept_is_bounded() -> None:
    resume_log = ResumeLog(100)
    for record, _ in frames(events(Request(CHAT, BODY), length=2000))[:-2]:
        resume_log.add(record)
    assert resume_log.is_lost
    assert resume_log.resume_point() is None
    # Its usage is still known.
    assert resume_log.usage()[:2] == (11, 4)
    assert resume_log.usage()[2] == pytest.approx(2000, rel=0.4)  # held-back tokens share a record


def test_invalid_records_continue_nothing() -> None:
    start = ResumeStart(1, "p", "x-1", 7, 11, 4)
    first = engine_link.encode_head(ResumeRecord({0: [5]}, start))
    for more, count in (
        (b"\xc1", 1),
        (first, 0),
        (engine_link.encode_head(ResumeRecord({1: []})), 1),
    ):
        resume_log = ResumeLog(100)
        resume_log.add(b"")
        assert resume_log.resume_point() is None
        resume_log.add(first)
        point = resume_log.resume_point()
        assert point is not None
        assert point.choices == [[5]]
        assert resume_log.usage() == (11, 4, 1)
        resume_log.add(more)
        assert resume_log.resume_point(count) is None
