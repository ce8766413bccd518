"""Client connections byte by byte: framing, pipelining, limits, slow and leaving clients, shutdown."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from typing_extensions import override

from gateway.http.cors import AllowedOrigins
from gateway.limits import GatewayLimits
from tests.support.clock import HurriedClock
from tests.support.gateway_engine_scripts import DONE, chat, echo, slow, streams
from tests.support.gateway_fake_engine import FakeEngine
from tests.support.gateway_raw_client import CHAT, RawClient, connected, get, post
from tests.support.gateway_world import Running, running_gateway
from tests.support.waiting import until, until_async

BODY = b'{"model":"m"}'
STREAM = b'{"model":"m","stream":true}'


class SkippingClock(HurriedClock):
    """The system clock, with skipped time."""

    skipped_s = 0.0

    @override
    def monotonic(self) -> float:
        return super().monotonic() + self.skipped_s


@dataclass
class Fleet:
    """A gateway, one engine that answers with what it was sent, and a connection."""

    gateway: Running
    engine: FakeEngine
    client: RawClient
    clock: SkippingClock

    def connections(self) -> int:
        return len(self.gateway.gateway._server.server_state.connections)

    async def is_asked(self) -> None:
        await until(lambda: self.engine.calls, what="a request at the engine")

    async def is_free(self) -> None:
        await until(lambda: not self.connections(), what="no connection")
        await until(lambda: not self.gateway.gateway.load_tracker.total(), what="no load")


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    origins = AllowedOrigins(["https://chat.example.com"])
    limits = GatewayLimits(max_body_bytes=1000, drain_timeout_s=0.0, origins=origins)
    clock = SkippingClock()
    async with (
        running_gateway(limits=limits, clock=clock) as gateway,
        connected(gateway.url) as client,
    ):
        (engine,) = await gateway.serve(echo)
        yield Fleet(gateway, engine, client, clock)


async def test_keep_alive(fleet: Fleet) -> None:
    for number in range(3):
        body = b'{"model":"m","n":%d}' % number
        await fleet.client.send(post(body))
        answer = await fleet.client.answer()
        assert (answer.status, answer.body) == (200, body)
        assert "connection" not in answer.headers
        assert answer.headers["x-fleet-replica"] == "m-0"
    assert fleet.engine.links == 1


async def test_pipelined_requests_are_answered_in_their_order(fleet: Fleet) -> None:
    fleet.engine.script = slow(0.02, echo)
    bodies = [b'{"model":"m","n":%d}' % number for number in range(3)]
    await fleet.client.send(
        post(bodies[0]) + get("/health") + post(bodies[1]) + get("/nothing") + post(bodies[2])
    )
    answers = [await fleet.client.answer() for _ in range(5)]
    assert [answer.status for answer in answers] == [200, 200, 200, 404, 200]
    assert [answer.body for answer in answers[::2]] == bodies
    assert b'"endpoints":1' in answers[1].body


async def test_pipelined_behind_a_stream_and_in_pieces(fleet: Fleet) -> None:
    fleet.engine.script = streams(5, pause_s=0.01)
    await fleet.client.send(post(STREAM))
    raw = post(BODY, "expect: 100-continue")
    head, _, body = raw.partition(b"\r\n\r\n")
    await fleet.client.send(head[:30], head[30:] + b"\r\n\r\n")
    first = await fleet.client.answer()
    assert first.body.endswith(DONE)
    fleet.engine.script = echo
    assert await fleet.client.line() == b"HTTP/1.1 100 Continue\r\n"
    await fleet.client.line()
    await fleet.client.send(body)
    assert (await fleet.client.answer()).body == BODY


@pytest.mark.parametrize("size", [1, 7, 64])
async def test_however_it_is_cut(fleet: Fleet, size: int) -> None:
    raw = post(BODY, "x-session-id: s") + post(BODY, "transfer-encoding: x")[:0] + post(BODY)
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    await fleet.client.send(*pieces, pause_s=0)
    for _ in range(2):
        assert (await fleet.client.answer()).body == BODY


def chunked(*chunks: bytes, trailer: bytes = b"", more: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n%b\r\n"
    framed = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head % (CHAT.encode(), more) + framed + b"0\r\n" + trailer + b"\r\n"


async def test_a_chunked_body(fleet: Fleet) -> None:
    await fleet.client.send(chunked(b'{"mod', b'el":"m"', b"}", trailer=b"authorization: x\r\n"))
    assert (await fleet.client.answer()).body == BODY
    sent = fleet.engine.calls[0]
    assert sent.headers["content-length"] == "13"
    assert "authorization" not in sent.headers


async def test_expect_100_continue(fleet: Fleet) -> None:
    head, _, body = post(BODY, "expect: 100-continue").partition(b"\r\n\r\n")
    await fleet.client.send(head + b"\r\n\r\n")
    assert await fleet.client.line() == b"HTTP/1.1 100 Continue\r\n"
    assert await fleet.client.line() == b"\r\n"
    await fleet.client.send(body)
    assert (await fleet.client.answer()).body == BODY


@pytest.mark.parametrize(
    "raw",
    [post(b"x" * 1001, "expect: 100-continue")[:-1001], chunked(*[b"x" * 300] * 4)],
    ids=["expect", "chunked"],
)
async def test_too_much_is_refused_while_it_comes(fleet: Fleet, raw: bytes) -> None:
    await fleet.client.send(raw)
    assert (await fleet.client.answer()).code == "body_too_large"


@pytest.mark.parametrize("more", [[], ["connection: keep-alive"]])
async def test_http_10(fleet: Fleet, more: list[str]) -> None:
    fleet.engine.script = chat
    await fleet.client.send(post(STREAM, "expect: 100-continue", *more, version="1.0"))
    answer = await fleet.client.answer()
    assert answer.headers["connection"] == "close"
    assert "transfer-encoding" not in answer.headers
    assert answer.body.endswith(DONE)


async def test_connection_close(fleet: Fleet) -> None:
    await fleet.client.send(post(BODY, "connection: close") + post(BODY))
    answer = await fleet.client.answer()
    assert (answer.headers["connection"], answer.body) == ("close", BODY)
    assert await fleet.client.is_closed()
    assert len(fleet.engine.calls) == 1


async def test_a_body_that_is_just_not_too_large(fleet: Fleet) -> None:
    body = BODY[:-1] + b" " * (1000 - len(BODY)) + b"}"
    await fleet.client.send(post(body) + chunked(body))
    for _ in range(2):
        assert (await fleet.client.answer()).body == body


@pytest.mark.parametrize("count", [1001, 100_000])
async def test_a_body_that_is_too_large(fleet: Fleet, count: int) -> None:
    await fleet.client.send(post(b"x" * count)[:-500], b"x" * 500)
    answer = await fleet.client.answer()
    assert (answer.status, answer.code) == (413, "body_too_large")
    assert answer.headers["connection"] == "close"
    assert await fleet.client.is_closed()


async def test_too_large_behind_another(fleet: Fleet) -> None:
    fleet.engine.script = slow(0.03, echo)
    await fleet.client.send(post(BODY) + post(b"x" * 2000))
    assert (await fleet.client.answer()).body == BODY
    assert (await fleet.client.answer()).code == "body_too_large"


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/nothing"])
@pytest.mark.parametrize(
    "head",
    [
        pytest.param("\r\n".join(f"x-{n}: y" for n in range(101)), id="many"),
        pytest.param("x: " + "y" * 66_000, id="long"),
        pytest.param("\r\n".join(f"x-{n}: {'y' * 1000}" for n in range(70)), id="much"),
    ],
)
async def test_heads_that_are_too_large(fleet: Fleet, path: str, head: str) -> None:
    await fleet.client.send(post(BODY, head, path=path))
    answer = await fleet.client.answer()
    assert (answer.status, answer.code) == (431, "headers_too_large")
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/nothing"])
@pytest.mark.parametrize(
    "codings",
    [
        ["transfer-encoding: gzip, chunked"],
        ["transfer-encoding: identity", "transfer-encoding: chunked"],
    ],
)
async def test_other_transfer_codings_are_not_implemented(
    fleet: Fleet, path: str, codings: list[str]
) -> None:
    raw = post(BODY, *codings, path=path).replace(b"content-length: 13\r\n", b"")
    await fleet.client.send(raw.replace(BODY, b"d\r\n%b\r\n0\r\n\r\n" % BODY) + get("/health"))
    answer = await fleet.client.answer()
    assert (answer.status, answer.code) == (501, "unknown_transfer_coding")
    assert answer.headers["connection"] == "close"
    assert await fleet.client.is_closed()
    assert fleet.engine.calls == []


async def test_nonsense_after_a_good_request(fleet: Fleet) -> None:
    fleet.engine.script = slow(0.02, echo)
    await fleet.client.send(post(BODY) + b"nonsense\r\n\r\n")
    assert (await fleet.client.answer()).body == BODY
    assert (await fleet.client.answer()).code == "invalid_http"


@pytest.mark.parametrize(("method", "status"), [("GET", 405), ("HEAD", 405), ("OPTIONS", 204)])
async def test_other_methods(fleet: Fleet, method: str, status: int) -> None:
    await fleet.client.send(get(CHAT, method=method))
    answer = await fleet.client.answer(is_head=method != "GET")  # neither has a body
    allowed = "POST, OPTIONS" if method == "OPTIONS" else "POST"
    assert (answer.status, answer.headers["allow"]) == (status, allowed)
    await fleet.client.send(post(BODY))
    assert (await fleet.client.answer()).body == BODY


async def test_an_empty_line_before_a_request(fleet: Fleet) -> None:
    await fleet.client.send(b"\r\n" + post(BODY) + b"\r\n\r\n" + post(BODY))
    for _ in range(2):
        assert (await fleet.client.answer()).body == BODY


@pytest.mark.parametrize(
    ("origin", "status", "allowed"),
    [
        ("https://chat.example.com", 200, "https://chat.example.com"),
        ("http://localhost:3000", 200, "http://localhost:3000"),
        ("https://evil.example.com", 403, None),
        ("null", 403, None),
    ],
)
async def test_web_pages(fleet: Fleet, origin: str, status: int, allowed: str | None) -> None:
    asks = ["access-control-request-method: POST", "access-control-request-headers: x-a"]
    said = f"origin: {origin}"
    await fleet.client.send(get(CHAT, said, *asks, method="OPTIONS"))
    preflight = await fleet.client.answer(is_head=status == 200)
    assert preflight.status == (204 if allowed else 403)
    assert preflight.headers.get("access-control-allow-headers") == ("x-a" if allowed else None)
    await fleet.client.send(get("/v1/models", said) + post(BODY, said))
    for _ in range(2):
        answer = await fleet.client.answer()
        assert answer.status == status
        assert answer.headers.get("access-control-allow-origin") == allowed
        assert "access-control-allow-credentials" not in answer.headers
    assert len(fleet.engine.calls) == (1 if allowed else 0)
    await until(lambda: fleet.gateway.gateway.load_tracker.total() == 0)


FOR_EVER = slow(60.0, echo)


async def test_clients_that_leave_during_a_request(fleet: Fleet) -> None:
    raw = post(BODY)
    for cut in (0, 1, 40, raw.index(b"\r\n\r\n") + 3, len(raw) - 1):
        async with connected(fleet.gateway.url) as client:
            await client.send(raw[:cut])
            await until(lambda: fleet.connections() == 2)
        await until(lambda: fleet.connections() == 1)
    assert fleet.engine.calls == []


async def test_a_client_that_leaves_with_requests_waiting(fleet: Fleet) -> None:
    fleet.engine.script = streams(10_000, pause_s=0.001)
    await fleet.client.send(post(STREAM) + post(BODY) + post(BODY)[:-2])
    await fleet.is_asked()
    fleet.client.writer.transport.abort()
    await fleet.is_free()
    assert len(fleet.engine.calls) == 1


async def test_half_closing_is_leaving(fleet: Fleet) -> None:
    """Like nginx and Go: it cannot be told from a client that is gone, whose slot must be freed."""
    fleet.engine.script = FOR_EVER
    await fleet.client.send(post(BODY))
    await fleet.is_asked()
    fleet.client.writer.write_eof()
    assert await fleet.client.is_closed()
    await fleet.is_free()


async def test_silent_connections_are_closed(fleet: Fleet) -> None:
    await until(lambda: fleet.connections() == 1)
    fleet.clock.skipped_s = 59.0
    async with connected(fleet.gateway.url) as late:
        await late.send(post(BODY))
        assert (await late.answer()).status == 200
        fleet.clock.skipped_s = 61.0
        assert await fleet.client.is_closed()
        fleet.clock.skipped_s = 59.0 + 74.0
        await late.send(b"\r\n", post(BODY))  # the empty line is no request, and does not help
        assert (await late.answer()).status == 200
        fleet.clock.skipped_s += 76.0
        assert await late.is_closed()


@pytest.mark.parametrize("cut", [1, 50, -1])
@pytest.mark.parametrize("path", ["/v1/completions", "/nothing"])
async def test_requests_that_do_not_come(fleet: Fleet, path: str, cut: int) -> None:
    await fleet.client.send(post(BODY, path=path)[:cut])
    await until(lambda: fleet.connections() == 1)
    if path == "/nothing" and cut == -1:  # answered without its body
        assert (await fleet.client.answer()).status == 404
    else:
        await asyncio.sleep(0.02)
        fleet.clock.skipped_s = 61.0
        answer = await fleet.client.answer()
        assert (answer.status, answer.code) == (408, "body_timeout")
        assert answer.headers["connection"] == "close"
        assert await fleet.client.is_closed()
    assert fleet.engine.calls == []


@pytest.mark.parametrize("cut", [40, -1])
async def test_no_stream_is_cut_for_the_next_request(fleet: Fleet, cut: int) -> None:
    async def until_told(call: object) -> None:
        await event.wait()
        await streams(3, pause_s=0)(call)  # type: ignore[arg-type]  # a script, wrapped

    event = asyncio.Event()
    fleet.engine.script = until_told
    await fleet.client.send(post(STREAM) + post(BODY)[:cut])
    await fleet.is_asked()
    fleet.clock.skipped_s = 61.0
    await asyncio.sleep(0.05)  # several sweeps over late connections
    event.set()
    assert (await fleet.client.answer()).body.endswith(DONE)
    fleet.clock.skipped_s += 130.0
    assert (await fleet.client.answer()).status == 408


async def test_the_last_response_closes_the_connection(fleet: Fleet) -> None:
    fleet.engine.script = slow(0.1, echo)
    async with (
        connected(fleet.gateway.url) as idle,
        connected(fleet.gateway.url) as silent,
    ):
        await idle.send(get("/health"))
        await idle.answer()
        await fleet.client.send(post(BODY))
        await fleet.is_asked()
        fleet.gateway.gateway.stop()
        answer = await fleet.client.answer()
        assert (answer.status, answer.headers["connection"]) == (503, "close")  # no time to drain
        assert await fleet.client.is_closed()
        assert await idle.is_closed()
        assert await silent.is_closed()


async def refuses(url: str) -> bool:
    try:
        async with connected(url):
            return False
    except ConnectionError:
        return True


async def test_idle_connections_are_served_for_a_moment_more() -> None:
    async with (
        running_gateway(limits=GatewayLimits(drain_timeout_s=10.0)) as gateway,
        connected(gateway.url) as streaming,
        connected(gateway.url) as idle,
        connected(gateway.url) as cold,
    ):
        (engine,) = await gateway.serve(streams(3, pause_s=0.3))
        for client in (idle, cold):
            await client.send(get("/health"))
            assert "connection" not in (await client.answer()).headers
        await streaming.send(post(STREAM))
        await until(lambda: engine.calls)
        await streaming.line()
        gateway.gateway.stop()
        await until_async(lambda: refuses(gateway.url), what="no listener")
        engine.script = echo
        await idle.send(post(BODY))
        await cold.send(get("/health"))
        for client in (idle, cold):
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await client.is_closed()
        rest = await streaming.reader.readuntil(b"0\r\n\r\n")
        assert DONE in rest
        assert await streaming.is_closed()
