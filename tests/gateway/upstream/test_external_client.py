"""Calls to external servers that answer with raw bytes: split, truncated, surplus, slow and hostile responses."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from typing_extensions import override

from gateway.forwarding.router import LoadTracker
from gateway.upstream.call import BrokenResponseError, UnreachableError, WholeCall
from gateway.upstream.dialer import Dialer
from gateway.upstream.engine_links import EngineLinks
from gateway.upstream.response_head import ResponseHead
from machinery import engine_link
from machinery.clock import NEVER, Clock, SystemClock
from machinery.engine_link import RequestHead
from schemas.wire.engine_address import EngineAddress
from tests.support.clock import FakeClock
from tests.support.gateway_raw_server import (
    CHUNKED,
    LENGTH,
    Answering,
    Server,
    in_steps,
    serving,
    then_closing,
)
from tests.support.ports import free_port
from tests.support.waiting import until

C = TypeVar("C", bound=WholeCall)
HEAD = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def running(clock: Clock) -> AsyncIterator[EngineLinks]:
    links = EngineLinks(clock, Dialer(clock), LoadTracker(random.Random(1)), silence_s=60.0)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(links.run())
        await until(lambda: links.external.session is not None, what="the session")
        yield links
        links.close()
        task.cancel()


@pytest.fixture
async def links() -> AsyncIterator[EngineLinks]:
    async with running(SystemClock()) as links:
        yield links


@asynccontextmanager
async def external(
    *answers: Answering | bytes,
) -> AsyncIterator[tuple[Server, EngineAddress]]:
    async with serving(*answers) as (server, origin):
        yield server, origin._replace(external="chat/outside")


def begin(
    links: EngineLinks, origin: EngineAddress, *, silence_s: float = 60.0, until_s: float = NEVER
) -> WholeCall:
    return send(links, WholeCall(**fields(origin, silence_s, until_s)))


def fields(
    origin: EngineAddress, silence_s: float = 60.0, until_s: float = NEVER
) -> dict[str, Any]:
    raw = engine_link.encode_request(RequestHead("POST", "/v1/x", b"", 0), b"")
    limits = {"silence_s": silence_s, "until_s": until_s, "limit": 1 << 30}
    return {"origin": origin, "raw": raw, **limits}


def send(links: EngineLinks, call: C) -> C:
    links.send(call)
    return call


async def ask(
    links: EngineLinks, origin: EngineAddress, *, silence_s: float = 60.0, until_s: float = NEVER
) -> bytes:
    call = begin(links, origin, silence_s=silence_s, until_s=until_s)
    try:
        return b"%d %b" % await call.response
    finally:
        call.cancel()


async def failure(links: EngineLinks, origin: EngineAddress) -> BrokenResponseError:
    with pytest.raises(BrokenResponseError) as caught:
        await ask(links, origin)
    return caught.value


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("data", [LENGTH, CHUNKED], ids=["length", "chunked"])
async def test_any_split_gives_the_same_answer_and_the_connection_again(
    links: EngineLinks, data: bytes, size: int
) -> None:
    async with external(in_steps(data, size)) as (server, origin):
        assert [await ask(links, origin) for _ in range(3)] == [b"200 hello"] * 3
        assert (server.connections, server.requests) == (1, 3)
        assert links.connections() == 1


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", b"204 ", id="no-content"),
        pytest.param(HEAD + b"content-length: 0\r\n\r\n", b"200 ", id="empty"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH, b"200 hello", id="continue"),
        pytest.param(
            b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + CHUNKED, b"200 hello", id="hints"
        ),
    ],
)
async def test_unusual_but_valid(links: EngineLinks, data: bytes, expected: bytes) -> None:
    async with external(data) as (server, origin):
        assert [await ask(links, origin) for _ in range(2)] == [expected] * 2
        assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(LENGTH.replace(b"X-A: b", b"Connection: close"), id="asked-to-close"),
        pytest.param(b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", id="http-1.0"),
        pytest.param(LENGTH + LENGTH, id="surplus"),
        pytest.param(then_closing(LENGTH), id="closed-after"),
        pytest.param(then_closing(HEAD + b"\r\nhello"), id="ends-with-connection"),
    ],
)
async def test_such_connections_are_not_used_again(
    links: EngineLinks, answer: Answering | bytes
) -> None:
    async with external(answer) as (server, origin):
        for _ in range(2):
            assert await ask(links, origin) == b"200 hello"
            await until(lambda: links.connections() == 0, what="the end of the connection")
        assert server.connections == 2


async def flood(writer: asyncio.StreamWriter) -> None:
    """Send interim responses for ever."""
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 100)
        await writer.drain()


async def endless_head(writer: asyncio.StreamWriter) -> None:
    """Send headers for ever, slowly."""
    writer.write(HEAD)
    while True:
        writer.write(b"x: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.5)


@pytest.mark.parametrize(
    ("answer", "had_bytes"),
    [
        pytest.param(then_closing(b""), False, id="nothing"),
        pytest.param(then_closing(b"", is_abrupt=True), False, id="reset"),
        pytest.param(then_closing(LENGTH[:20]), True, id="half-a-head"),
        pytest.param(then_closing(LENGTH[:-1]), True, id="half-a-body"),
        pytest.param(then_closing(CHUNKED[:-2]), True, id="no-last-chunk"),
        pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", True, id="not-http"),
        pytest.param(b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n", True, id="upgrade"),
        pytest.param(b"HTTP/1.1 999 x\r\ncontent-length: 0\r\n\r\n", True, id="status"),
        pytest.param(CHUNKED.replace(b"2\r\n", b"zz\r\n"), True, id="bad-chunk"),
        pytest.param(CHUNKED.replace(b"3;x=y\r\n", b"zz\r\n"), True, id="bad-second-chunk"),
        pytest.param(CHUNKED.replace(b"2\r\n", b"-2\r\n"), True, id="negative-chunk"),
        pytest.param(CHUNKED.replace(b"2\r\n", b"1\r\n"), True, id="chunk-longer-than-its-size"),
        pytest.param(CHUNKED.replace(b"2\r\n", b"f" * 17 + b"\r\n"), True, id="giant-chunk"),
        pytest.param(HEAD + b"x: " + b"y" * 500_000, True, id="giant-header"),
        pytest.param(HEAD + b"x: y\r\n" * 100_000, True, id="giant-head"),
        pytest.param(b"HTTP/1.1 200 " + b"y" * 500_000, True, id="giant-status-line"),
        pytest.param(
            HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello", True, id="two-lengths"
        ),
        pytest.param(
            HEAD + b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello", True, id="twice-a-length"
        ),
        pytest.param(
            CHUNKED.replace(b"OK\r\n", b"OK\r\ncontent-length: 5\r\n"), True, id="length-and-chunks"
        ),
        pytest.param(
            CHUNKED.replace(b"chunked\r\n", b"chunked\r\ncontent-length: 5\r\n"),
            True,
            id="chunks-and-length",
        ),
        pytest.param(CHUNKED.replace(b"chunked", b"gzip, chunked"), True, id="coding"),
        pytest.param(CHUNKED.replace(b"chunked", b"xchunked"), True, id="unknown-coding"),
        pytest.param(HEAD + b"content-length: +5\r\n\r\nhello", True, id="signed-length"),
        pytest.param(HEAD + b"content-length: 5, 5\r\n\r\nhello", True, id="list-of-lengths"),
        pytest.param(HEAD + b"x y: z\r\n\r\n", True, id="space-in-name"),
        pytest.param(HEAD + b"x: \0\r\n\r\n", True, id="nul"),
        pytest.param(LENGTH + b"garbage", True, id="garbage-after"),
    ],
)
async def test_broken_answers(
    links: EngineLinks, answer: Answering | bytes, had_bytes: bool
) -> None:
    async with external(answer) as (server, origin), asyncio.timeout(30):
        error = await failure(links, origin)
        assert error.had_bytes == had_bytes
        assert not error.is_silence
        assert "\n" not in str(error)
        assert len(str(error)) < 300
        await until(lambda: server.ended or server.writers[0].is_closing(), what="the end")
        assert links.connections() == 0


@pytest.mark.parametrize("answer", [flood, endless_head, b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_a_head_that_never_ends_is_silence(
    links: EngineLinks, answer: Answering | bytes
) -> None:
    async with external(answer) as (server, origin), asyncio.timeout(30):
        with pytest.raises(BrokenResponseError, match=r"silent for 0\.5 s") as caught:
            await ask(links, origin, silence_s=0.5)
        assert caught.value.is_silence
        await until(lambda: links.connections() == 0, what="the end of the connection")
        assert server.requests == 1


async def test_an_end_of_chunks_that_never_comes_is_silence(links: EngineLinks) -> None:
    """Trailers and extensions of chunks are no signs of life."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED[:-2])
        while True:
            writer.write(b"x: y\r\n")
            await writer.drain()
            await asyncio.sleep(0.1)

    async with external(answer) as (_, origin), asyncio.timeout(30):
        with pytest.raises(BrokenResponseError):
            await ask(links, origin, silence_s=0.5)
        await until(lambda: links.connections() == 0, what="the end of the connection")


async def test_chunks_that_become_invalid_end_the_response(links: EngineLinks) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        head, _, rest = CHUNKED.partition(b"3;x=y")
        writer.write(head)
        await asyncio.sleep(0.1)
        writer.write(b"zz" + rest)

    async with external(answer) as (server, origin), asyncio.timeout(30):
        for count in (1, 2):
            assert "the body is not valid" in str(await failure(links, origin))
            assert (server.connections, links.connections()) == (count, 0)


async def test_a_connection_closed_while_idle_costs_nothing(links: EngineLinks) -> None:
    """The server closes the connection in the moment in which the next request is sent."""
    async with external(LENGTH, then_closing(b"", is_abrupt=True), LENGTH) as (server, origin):
        assert await ask(links, origin) == b"200 hello"
        assert await ask(links, origin) == b"200 hello"
        assert (server.connections, server.requests) == (2, 3)


async def test_a_fresh_connection_gets_no_second_chance(links: EngineLinks) -> None:
    async with external(then_closing(b"")) as (server, origin):
        await failure(links, origin)
        assert server.requests == 1


async def test_after_a_first_byte_nothing_is_sent_again(links: EngineLinks) -> None:
    async with external(LENGTH, then_closing(LENGTH[:9])) as (server, origin):
        await ask(links, origin)
        await failure(links, origin)
        assert server.requests == 2


async def test_nobody_listens(links: EngineLinks) -> None:
    with pytest.raises(UnreachableError, match="refused"):
        await ask(links, EngineAddress("127.0.0.1", free_port(), external="chat/outside"))


@pytest.mark.parametrize(
    "host", ["no-such-host.invalid", "a..b", "x" * 64 + ".example", "xn--a", "-", "[", "a:b:c"]
)
async def test_a_name_that_leads_nowhere_is_unreachable(links: EngineLinks, host: str) -> None:
    with pytest.raises(UnreachableError):
        await ask(links, EngineAddress(host, 80, external="chat/outside"))


async def test_unrequested_bytes_never_become_a_response(links: EngineLinks) -> None:
    async with external(LENGTH) as (server, origin):
        await ask(links, origin)
        server.writers[0].write(LENGTH.replace(b"hello", b"wrong"))
        await server.writers[0].drain()
        await asyncio.sleep(0.1)  # the bytes arrive; nothing tells so
        assert await ask(links, origin) == b"200 hello"
        assert server.connections == 2


async def test_a_request_that_is_given_up_closes_the_connection(links: EngineLinks) -> None:
    async with external(in_steps(b"", 1)) as (server, origin):
        call = begin(links, origin)
        await until(lambda: server.requests == 1, what="the request")
        call.cancel()
        await until(lambda: server.ended == 1, what="the server noticing")
        assert links.connections() == 0
        assert not links.external.calls


async def test_a_fault_of_ours_ends_the_call(
    links: EngineLinks, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(WholeCall):
        @override
        def on_head(self, head: ResponseHead) -> None:
            raise ValueError("a fault")

    async with external(LENGTH) as (_, origin):
        call = send(links, Faulty(**fields(origin)))
        with pytest.raises(BrokenResponseError, match="the gateway failed"):
            await call.response
    assert "a fault" in caplog.text
    assert not links.external.calls


async def test_a_slow_reader_stops_the_server(links: EngineLinks) -> None:
    class Slow(WholeCall):
        @override
        def on_head(self, head: ResponseHead) -> None:
            self.pause()

    sent = 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(HEAD + b"content-length: 100000000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x" * 100_000)
            await writer.drain()
            sent += 100_000

    async with external(answer) as (_, origin):
        call = send(links, Slow(**fields(origin, silence_s=0.2)))
        await until(lambda: call.is_paused, what="the pause")
        await asyncio.sleep(0.5)  # longer than the limit of silence
        assert sent < 30_000_000
        call.resume()
        _, body = await call.response
        assert len(body) == 100_000_000


async def test_silence_is_ended() -> None:
    clock = FakeClock()
    async with running(clock) as links, external(LENGTH, in_steps(b"", 1)) as (server, origin):
        assert await ask(links, origin) == b"200 hello"
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(failure(links, origin))
            await until(lambda: server.requests == 2, what="the second request")
            await clock.advance(59.9)
            assert not asking.done()
            await clock.advance(1.2)
        assert asking.result().is_silence
        assert server.requests == 2


@pytest.mark.parametrize(
    ("silence_s", "until_s", "expected"),
    [(0.2, NEVER, "silent for 0.2 s"), (60.0, 0.2, "its time was up")],
    ids=["silence", "time"],
)
async def test_a_limit_below_a_second_is_held(
    silence_s: float, until_s: float, expected: str
) -> None:
    clock = FakeClock()
    async with running(clock) as links, external(in_steps(b"", 1)) as (server, origin):
        call = begin(links, origin, silence_s=silence_s, until_s=until_s)
        await until(lambda: server.requests == 1, what="the request")
        await clock.advance(0.19)
        assert call.connection is not None
        await clock.advance(0.1)
        with pytest.raises(BrokenResponseError, match=f"^{expected}$"):
            await call.response
