"""Links to engines that a test plays: calls, windows, cancellation, and engines that break the rules or speak no link."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import uvloop
from typing_extensions import override

from gateway.forwarding.router import LoadTracker
from gateway.upstream.call import BrokenResponseError, EngineCall, UnreachableError, UpstreamError
from gateway.upstream.dialer import Dialer
from gateway.upstream.engine_links import EngineLinks
from gateway.upstream.response_head import ResponseHead
from machinery import engine_link
from machinery.clock import NEVER, SystemClock
from machinery.engine_link import EngineGauges, Failure, FrameReader, RequestHead, StatusHead
from schemas.wire.engine_address import EngineAddress
from tests.support.link_client import send_all
from tests.support.tcp_server import tcp_server
from tests.support.waiting import until

GAUGES = engine_link.encode_head(EngineGauges(replica="m-0", is_ready=True, in_flight=0, queued=0))
HELLO = engine_link.SWITCHING + engine_link.frame(0, engine_link.GAUGES, GAUGES)
STATUS = engine_link.encode_head(StatusHead(200, b"content-type: text/event-stream\r\n"))
REQUEST = engine_link.encode_request(RequestHead("POST", "/v1/x", b"", 2), b"{}")


def failure(message: str, last_event: bytes = b"") -> bytes:
    return engine_link.encode_head(Failure(message, last_event))


class Call(EngineCall, kw_only=True):
    """A call that keeps what it receives."""

    heads: list[ResponseHead] = msgspec.field(default_factory=list)
    data: bytearray = msgspec.field(default_factory=bytearray)
    errors: list[UpstreamError] = msgspec.field(default_factory=list)
    signs: list[bytes] = msgspec.field(default_factory=list)
    records: list[bytes] = msgspec.field(default_factory=list)
    is_done: bool = False

    @override
    def on_head(self, head: ResponseHead) -> None:
        self.heads.append(head)

    @override
    def on_body(self, data: bytes) -> None:
        self.data += data

    @override
    def on_recorded(self, events: bytes, records: list[bytes]) -> None:
        self.data += events
        self.records += records

    @override
    def on_refused(self, last_event: bytes) -> None:
        self.on_end(last_event)

    @override
    def on_end(self, data: bytes) -> None:
        self.data += data
        self.is_done = True

    @override
    def on_progress(self, record: bytes) -> None:
        self.signs.append(record)

    @override
    def on_error(self, error: UpstreamError) -> None:
        self.errors.append(error)
        self.is_done = True


@dataclass
class Engine:
    """The engine's end of each link, in the order of their opening."""

    hello: bytes = HELLO
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    frames: list[tuple[int, int, bytes]] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    """The number of frames in each read."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.writers.append(writer)
        writer.write(self.hello)
        frames = FrameReader(engine_link.MAX_REQUEST_PAYLOAD)
        while data := await reader.read(1 << 16):
            batch = list(frames.feed(data))
            self.reads.append(len(batch))
            self.frames += batch

    def send(self, stream: int, kind: int, payload: bytes = b"") -> None:
        self.writers[-1].write(engine_link.frame(stream, kind, payload))

    def kinds(self, stream: int) -> list[int]:
        return [kind for number, kind, _ in self.frames if number == stream]


@dataclass
class Stand:
    """One engine and a gateway's links."""

    engine: Engine
    links: EngineLinks
    origin: EngineAddress

    def call(self, **fields: Any) -> Call:
        call = Call(
            origin=self.origin,
            raw=REQUEST,
            **{"silence_s": 30.0, "until_s": NEVER, **fields},
        )
        self.links.send(call)
        return call

    async def calling(self, number: int, **fields: Any) -> Call:
        call = self.call(**fields)
        await until(lambda: engine_link.REQUEST in self.engine.kinds(number), what="the request")
        return call


@asynccontextmanager
async def standing(engine: Engine | None = None) -> AsyncIterator[Stand]:
    engine, clock = engine or Engine(), SystemClock()
    async with tcp_server(engine.serve) as port:
        links = EngineLinks(clock, Dialer(clock), LoadTracker(random.Random(1)), silence_s=30.0)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(links.run())
            try:
                yield Stand(engine, links, EngineAddress("127.0.0.1", port))
            finally:
                running.cancel()
                links.close()
                await asyncio.sleep(0)


async def test_calls_share_one_link_and_end_each_for_itself() -> None:
    async with standing() as stand:
        engine = stand.engine
        one, two, three = [stand.call() for _ in range(3)]
        await until(lambda: engine_link.REQUEST in engine.kinds(3), what="three requests")
        for stream in (1, 2, 3):
            engine.send(stream, engine_link.PROGRESS, b"")
            engine.send(stream, engine_link.STATUS, STATUS)
        engine.send(2, engine_link.END, b"two")
        engine.send(1, engine_link.EVENTS, b"on")
        engine.send(3, engine_link.FAIL, failure("the slot is gone"))
        engine.send(1, engine_link.END, b"e")
        await until(lambda: one.is_done and two.is_done and three.is_done, what="the ends")
        assert (bytes(one.data), bytes(two.data)) == (b"one", b"two")
        assert [call.signs for call in (one, two)] == [[b""], [b""]]
        assert one.heads[0].passed == b"content-type: text/event-stream\r\n"
        assert str(three.errors[0]) == "the slot is gone"
        assert stand.links.connections() == 1
        assert not stand.links.links[stand.origin].calls


async def test_requests_of_one_iteration_share_a_write_and_keep_their_order() -> None:
    async with standing() as stand:
        first = stand.call()
        await until(lambda: stand.engine.frames, what="the first request, which opens the link")
        dropped, *others = [stand.call() for _ in range(4)]
        number = dropped.stream_id
        dropped.cancel()
        await until(lambda: len(stand.engine.frames) == 6, what="the others")
        assert stand.engine.reads[-1] == 5
        assert stand.engine.kinds(number) == [engine_link.REQUEST, engine_link.CANCEL]
        for call in (first, *others):
            assert stand.engine.kinds(call.stream_id) == [engine_link.REQUEST]


async def test_records_come_with_their_events_whatever_arrives_at_once() -> None:
    async with standing() as stand:
        engine, call, other = stand.engine, await stand.calling(1), await stand.calling(2)
        large = engine_link.encode_recorded(b"r3", b"x" * 300_000)
        most = engine_link.MAX_RESPONSE_PAYLOAD
        for stream in (1, 2):
            engine.send(stream, engine_link.STATUS, STATUS)
            for record, events in ((b"r1", b"one"), (b"", b""), (b"r2", b"two")):
                payload = engine_link.encode_recorded(record, events)
                engine.send(stream, engine_link.RECORDED, payload)
            for at in range(0, len(large), most):
                is_last = at + most >= len(large)
                kind = engine_link.RECORDED if is_last else engine_link.RECORDED_PART
                engine.send(stream, kind, large[at : at + most])
        engine.send(1, engine_link.END)
        engine.send(2, engine_link.FAIL, failure("no", b"refused"))
        await until(lambda: call.is_done and other.is_done, what="the ends")
        assert bytes(call.data) == b"onetwo" + b"x" * 300_000
        assert call.records == other.records == [b"r1", b"", b"r2", b"r3"]
        assert bytes(other.data) == bytes(call.data) + b"refused"
        assert not other.errors
        granted = [
            engine_link.decode_window(payload)
            for number, kind, payload in engine.frames
            if (number, kind) == (1, engine_link.WINDOW)
        ]
        assert sum(granted) >= engine_link.WINDOW_BYTES // 2


async def test_a_record_in_many_small_parts_is_joined_once() -> None:
    """To copy what has arrived for each part would take minutes."""
    async with standing() as stand:
        engine, call = stand.engine, await stand.calling(1)
        engine.send(1, engine_link.STATUS, STATUS)
        begin = engine_link.encode_recorded(b"r", bytes(8 << 20))
        sent, step = 0, 64 << 10

        def window() -> int:
            frames = [payload for _, kind, payload in engine.frames if kind == engine_link.WINDOW]
            return engine_link.WINDOW_BYTES + sum(map(engine_link.decode_window, frames)) - sent

        for at in range(0, len(begin), step):
            await until(lambda: window() >= 2 * step, what="the grant")
            engine.send(1, engine_link.RECORDED_PART, begin[at : at + step])
            sent += step
        engine.writers[0].write(engine_link.frame(1, engine_link.RECORDED_PART, b"x") * step)
        engine.send(1, engine_link.RECORDED, b"y")
        engine.send(1, engine_link.END)
        await until(lambda: call.is_done, what="the end")
        assert bytes(call.data) == bytes(8 << 20) + b"x" * step + b"y"


def test_a_flood_of_frames_lets_others_run() -> None:
    """uvloop, which a gateway runs on, reads 32 times before it does anything else."""
    count = 1_000_000

    async def flood() -> int:
        most = 0
        async with standing() as stand, asyncio.TaskGroup() as group:
            call = await stand.calling(1)
            engine = stand.engine.writers[0].get_extra_info("socket").fileno()
            data = engine_link.frame(1, engine_link.PROGRESS, b"") * count
            group.create_task(asyncio.to_thread(send_all, engine, data))
            while (before := len(call.signs)) < count:
                await asyncio.sleep(0)
                most = max(most, len(call.signs) - before)
        return most

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        most = runner.run(flood())
    assert most * engine_link.HEADER_BYTES <= 256 << 10, "more than one read"


async def test_a_paused_call_is_granted_nothing_until_it_reads_again() -> None:
    async with standing() as stand:
        engine, call = stand.engine, await stand.calling(1)
        other = await stand.calling(2)
        half = b"x" * (engine_link.WINDOW_BYTES // 4)
        call.pause()
        for stream in (1, 2):
            engine.send(stream, engine_link.STATUS, STATUS)
            for _ in range(3):
                engine.send(stream, engine_link.EVENTS, half)
        await until(lambda: engine_link.WINDOW in engine.kinds(2), what="the other's window")
        assert len(other.data) == 3 * len(half)
        assert engine_link.WINDOW not in engine.kinds(1)
        assert call.silent_since == NEVER
        call.resume()
        await until(lambda: engine_link.WINDOW in engine.kinds(1), what="its window")
        granted = [
            payload
            for number, kind, payload in engine.frames
            if (number, kind) == (1, engine_link.WINDOW)
        ]
        assert [engine_link.decode_window(payload) for payload in granted] == [3 * len(half)]


async def test_a_cancelled_call_hears_nothing_and_its_engine_is_told() -> None:
    async with standing() as stand:
        engine, call = stand.engine, await stand.calling(1)
        call.cancel()
        engine.send(1, engine_link.STATUS, STATUS)
        engine.send(1, engine_link.END, b"late")
        await until(lambda: engine_link.CANCEL in engine.kinds(1), what="the cancellation")
        # Frames arrive in order: after the report the others have.
        async with asyncio.TaskGroup() as group:
            group.create_task(stand.links.probe(stand.origin))
            await until(lambda: engine_link.PING in engine.kinds(0), what="the probe")
            engine.send(0, engine_link.GAUGES, GAUGES)
        assert [*call.heads, *call.data, *call.errors] == []


async def test_large_bodies_take_turns_and_small_requests_pass() -> None:
    async with standing() as stand:
        engine = stand.engine
        head = RequestHead("POST", "/v1/x", b"", 12 << 20)
        raw, rest = engine_link.encode_request(head, b""), memoryview(b"y" * (12 << 20))
        for _ in range(2):
            stand.links.send(
                Call(origin=stand.origin, raw=raw, body=rest, silence_s=30.0, until_s=NEVER)
            )
        await stand.calling(3)

        def sent(stream: int) -> int:
            return sum(
                len(p) for n, kind, p in engine.frames if (n, kind) == (stream, engine_link.BODY)
            )

        await until(lambda: sent(1) == sent(2) == 12 << 20, what="both bodies")
        order = [
            n for n, kind, _ in engine.frames if kind in (engine_link.BODY, engine_link.REQUEST)
        ]
        assert order.index(2) < len(order) - 1 - order[::-1].index(1)  # neither waits for the other


async def test_the_end_of_a_link_fails_its_calls_and_the_next_opens_another() -> None:
    async with standing() as stand:
        calls = [await stand.calling(number) for number in (1, 2)]
        stand.engine.send(1, engine_link.STATUS, STATUS)
        await until(lambda: calls[0].heads, what="the head")
        stand.engine.writers[0].transport.abort()
        await until(lambda: all(call.is_done for call in calls), what="the errors")
        errors = [call.errors[0] for call in calls]
        assert all(isinstance(error, BrokenResponseError) for error in errors)
        assert [error.had_bytes for error in errors] == [True, False]  # type: ignore[union-attr]
        stand.engine.frames.clear()
        await stand.calling(1)
        assert len(stand.engine.writers) == 2


async def test_an_engine_that_goes_away_ends_what_runs_and_gets_nothing_new() -> None:
    async with standing() as stand:
        call = await stand.calling(1)
        stand.engine.send(0, engine_link.GOAWAY)
        await until(lambda: stand.origin not in stand.links.links, what="the goodbye")
        first = stand.engine.writers[0]
        stand.call()
        await until(lambda: len(stand.engine.writers) == 2, what="another link")
        for kind, payload in ((engine_link.STATUS, STATUS), (engine_link.END, b"whole")):
            first.write(engine_link.frame(1, kind, payload))
        await until(lambda: call.is_done, what="the end")
        assert bytes(call.data) == b"whole"


async def test_a_silent_call_is_given_up_and_a_probe_is_answered() -> None:
    async with standing() as stand:
        call = await stand.calling(1, silence_s=0.2)
        await until(lambda: call.is_done, what="the end of patience")
        assert str(call.errors[0]) == "silent for 0.2 s"
        assert isinstance(call.errors[0], BrokenResponseError)
        assert call.errors[0].is_silence
        async with asyncio.TaskGroup() as group:
            probe = group.create_task(stand.links.probe(stand.origin))
            await until(lambda: engine_link.PING in stand.engine.kinds(0), what="the probe")
            stand.engine.send(0, engine_link.GAUGES, GAUGES)
        assert probe.result().replica == "m-0"


async def test_another_replica_gets_no_request() -> None:
    async with standing() as stand:
        call = stand.call(replica="m-1")
        await until(lambda: call.is_done, what="the error")
        assert str(call.errors[0]) == "replica m-0 answers there, not m-1"
        assert isinstance(call.errors[0], UnreachableError)
        assert engine_link.REQUEST not in stand.engine.kinds(1)


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "it speaks no engine link"),
        (b"\x16\x03\x01 no HTTP", "it speaks no engine link"),
        (HELLO[:20], "the connection was lost"),
    ],
    ids=["404", "no HTTP", "half"],
)
async def test_an_engine_without_links_is_unreachable_and_named_once(
    hello: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Old(Engine):
        @override
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self.hello)
            await writer.drain()

    with caplog.at_level(logging.WARNING):
        async with standing(Old(hello)) as stand:
            for _ in range(2):
                call = stand.call()
                await until(lambda: call.is_done, what="the error")  # noqa: B023 - awaited here
                assert isinstance(call.errors[0], UnreachableError)
                assert why in str(call.errors[0])
    lines = [
        one for one in caplog.records if one.message.startswith("engine speaks no engine link")
    ]
    assert len(lines) == (why == "it speaks no engine link")


def frames_of(*frames: tuple[int, int, bytes]) -> bytes:
    return b"".join(engine_link.frame(*frame) for frame in frames)


BROKEN = {
    "END before STATUS": frames_of((1, engine_link.END, b"x")),
    "EVENTS before STATUS": frames_of((1, engine_link.EVENTS, b"x")),
    "STATUS twice": frames_of((1, engine_link.STATUS, STATUS), (1, engine_link.STATUS, STATUS)),
    "no STATUS": frames_of((1, engine_link.STATUS, b"\xc1")),
    "status 99": frames_of((1, engine_link.STATUS, engine_link.encode_head(StatusHead(99, b"")))),
    "a line in a header": frames_of(
        (
            1,
            engine_link.STATUS,
            engine_link.encode_head(StatusHead(200, b"warning: a\nset-cookie: b\r\n")),
        )
    ),
    "a frame beyond the limit": engine_link.frame(1, engine_link.EVENTS, b"x" * (1 << 20)),
    "RECORDED before STATUS": frames_of((1, engine_link.RECORDED, bytes(4))),
    "a RECORDED without its record": frames_of(
        (1, engine_link.STATUS, STATUS), (1, engine_link.RECORDED, b"\x00\x00\x00\x02x")
    ),
    "a RECORDED without end": frames_of(
        (1, engine_link.STATUS, STATUS), *[(1, engine_link.RECORDED_PART, bytes(128 << 10))] * 129
    ),
    "more than the window": frames_of(
        (1, engine_link.STATUS, STATUS), *[(1, engine_link.EVENTS, bytes(64 << 10))] * 5
    ),
    "no FAIL": frames_of((1, engine_link.FAIL, b"\xc1")),
    "no GAUGES": frames_of((0, engine_link.GAUGES, b"\x90")),
    "random": random.Random(7).randbytes(50_000),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_engine_that_breaks_the_rules_loses_its_link(name: str) -> None:
    async with standing() as stand:
        calls = [await stand.calling(number) for number in (1, 2)]
        stand.engine.writers[0].write(BROKEN[name])
        stand.engine.writers[0].write(BROKEN["random"])
        await until(lambda: all(call.errors for call in calls), what="the errors")
        assert all(isinstance(call.errors[0], BrokenResponseError) for call in calls)
        assert stand.origin not in stand.links.links
        stand.engine.frames.clear()
        await stand.calling(1)


async def hostile_frames(stand: Stand, count: int) -> int:
    """Send random frames to many calls; return the number of links that it took."""
    draw = random.Random(count)
    kinds = (*range(14, 26), 0, 255)
    payloads: tuple[bytes, ...] = (
        b"",
        b"x",
        STATUS,
        GAUGES,
        b"x" * 3000,
        engine_link.encode_window(1),
    )
    payloads += (failure("no", b"x"), engine_link.encode_recorded(b"r", b"x"))
    sent = 0
    while sent < count:
        calls = [stand.call() for _ in range(20)]
        await until(
            lambda: (link := stand.links.links.get(stand.origin)) is not None and link.is_open,
            what="a link",
        )
        writer = stand.engine.writers[-1]
        for _ in range(50):
            data = bytearray(
                engine_link.frame(draw.randrange(25), draw.choice(kinds), draw.choice(payloads))
            )
            if draw.random() < 0.001:
                data[draw.randrange(len(data))] = draw.randrange(256)
            writer.write(bytes(data))
            sent += 1
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        stand.engine.frames.clear()
    return len(stand.engine.writers)


@pytest.mark.parametrize(
    "count", [2_000, pytest.param(1_000_000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])]
)
async def test_hostile_frames_end_links_and_nothing_else(count: int) -> None:
    async with standing() as stand:
        assert await hostile_frames(stand, count) > 1
        await until(
            lambda: sum(len(link.calls) for link in stand.links.links.values()) == 0, what="no call"
        )
        call = stand.call()
        await until(lambda: stand.engine.frames, what="the request")
        call.cancel()
