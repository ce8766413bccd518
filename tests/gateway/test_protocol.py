"""The way of requests to models over HTTP/1.1, byte by byte: framing, pipelining, limits."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from gateway.http.cors import AllowedOrigins
from gateway.server import GatewayLimits
from tests.gateway.fake_engine import FakeEngine, running
from tests.gateway.raw_client import CHAT, RawClient, connected, get, post
from tests.gateway.scripts import DONE, chat, echo, slow, streams
from tests.gateway.world import Running, World, running_gateway
from tests.support.waiting import until

BODY = b'{"model":"m"}'
STREAM = b'{"model":"m","stream":true}'


@dataclass
class Fleet:
    """A gateway, one engine that answers with what it was sent, and a connection."""

    gateway: Running
    engine: FakeEngine
    client: RawClient


@pytest.fixture
async def fleet(world: World) -> AsyncIterator[Fleet]:
    limits = GatewayLimits(
        max_body_bytes=1000,
        drain_timeout_s=0.0,
        origins=AllowedOrigins(["https://chat.example.com"]),
    )
    async with (
        running(FakeEngine("m-0", echo)) as engine,
        running_gateway(world.transport, limits) as gateway,
        connected(gateway.url) as client,
    ):
        await world.serve("m", engine)
        await gateway.knows("m", ready=1)
        yield Fleet(gateway, engine, client)


async def test_keep_alive(fleet: Fleet) -> None:
    for number in range(3):
        body = b'{"model":"m","n":%d}' % number
        await fleet.client.send(post(body))
        answer = await fleet.client.answer()
        assert (answer.status, answer.body) == (200, body)
        assert "connection" not in answer.headers
        assert answer.headers["x-fleet-replica"] == "m-0"
    assert fleet.engine.connections == 1


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


async def test_trailers_and_extensions_without_end(fleet: Fleet) -> None:
    raw = chunked(BODY, trailer=b"a: b\r\n" * 30_000)
    for at in range(0, len(raw), 4096):
        await fleet.client.send(raw[at : at + 4096])
        await asyncio.sleep(0)
    answer = await fleet.client.answer()
    assert (answer.status, answer.code) == (431, "headers_too_large")
    assert fleet.engine.calls == []


async def test_expect_100_continue(fleet: Fleet) -> None:
    head, _, body = post(BODY, "expect: 100-continue").partition(b"\r\n\r\n")
    await fleet.client.send(head + b"\r\n\r\n")
    assert await fleet.client.line() == b"HTTP/1.1 100 Continue\r\n"
    assert await fleet.client.line() == b"\r\n"
    await fleet.client.send(body)
    assert (await fleet.client.answer()).body == BODY


async def test_expect_100_continue_for_too_much(fleet: Fleet) -> None:
    await fleet.client.send(post(b"x" * 1001, "expect: 100-continue")[:-1001])
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


@pytest.mark.parametrize("count", [1001, 100_000])
async def test_a_body_that_is_too_large(fleet: Fleet, count: int) -> None:
    await fleet.client.send(post(b"x" * count)[:-500], b"x" * 500)
    answer = await fleet.client.answer()
    assert (answer.status, answer.code) == (413, "body_too_large")
    assert answer.headers["connection"] == "close"
    assert await fleet.client.is_closed()


async def test_a_chunked_body_that_is_too_large(fleet: Fleet) -> None:
    await fleet.client.send(chunked(*[b"x" * 300] * 4))
    assert (await fleet.client.answer()).code == "body_too_large"


async def test_a_body_that_is_just_not_too_large(fleet: Fleet) -> None:
    body = BODY[:-1] + b" " * (1000 - len(BODY)) + b"}"
    await fleet.client.send(post(body) + chunked(body))
    for _ in range(2):
        assert (await fleet.client.answer()).body == body


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


async def test_as_many_headers_as_may_be(fleet: Fleet) -> None:
    await fleet.client.send(post(BODY, *[f"x-{n}: y" for n in range(98)]))
    assert (await fleet.client.answer()).status == 200


_BOTH = ["content-length: 13", "transfer-encoding: chunked"]


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"nonsense\r\n\r\n", id="no-http"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="tls"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="http2"),
        pytest.param(post(BODY, "transfer-encoding: chunked"), id="length-and-chunks"),
        pytest.param(post(BODY, "content-length: 14"), id="two-lengths"),
        pytest.param(post(BODY).replace(b": 13", b": +13"), id="signed-length"),
        pytest.param(post(BODY).replace(b": 13", b": 13, 13"), id="length-list"),
        pytest.param(post(BODY).replace(b": 13", b": 99999999999999999999"), id="huge-length"),
        pytest.param(post(BODY).replace(b"-length: ", b"-length : "), id="space-before-colon"),
        pytest.param(post(BODY, " folded"), id="folded"),
        pytest.param(post(BODY, "x: a\0b"), id="nul"),
        pytest.param(chunked(BODY).replace(b"chunked", b"chunked, gzip"), id="not-chunked-last"),
        pytest.param(chunked(BODY).replace(b"d;ext=1", b"-d"), id="negative-chunk"),
        pytest.param(chunked(BODY).replace(b"d;ext=1", b"fffffffffffffffff"), id="huge-chunk"),
        pytest.param(get("a b"), id="space-in-target"),
    ],
)
async def test_what_is_not_http(fleet: Fleet, raw: bytes) -> None:
    await fleet.client.send(raw)
    answer = await fleet.client.answer()
    assert (answer.status, answer.code) == (400, "invalid_http")
    assert answer.headers["connection"] == "close"
    assert answer.headers["content-type"] == "application/json"
    assert await fleet.client.is_closed()
    assert fleet.engine.calls == []


async def test_nonsense_after_a_good_request(fleet: Fleet) -> None:
    fleet.engine.script = slow(0.02, echo)
    await fleet.client.send(post(BODY) + b"nonsense\r\n\r\n")
    assert (await fleet.client.answer()).body == BODY
    assert (await fleet.client.answer()).code == "invalid_http"


@pytest.mark.parametrize(("method", "status"), [("GET", 405), ("HEAD", 405), ("OPTIONS", 405)])
async def test_other_methods(fleet: Fleet, method: str, status: int) -> None:
    await fleet.client.send(get(CHAT, method=method))
    answer = await fleet.client.answer(is_head=method == "HEAD")
    assert (answer.status, answer.headers["allow"]) == (status, "POST")
    await fleet.client.send(post(BODY))
    assert (await fleet.client.answer()).body == BODY


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
async def test_nobody_is_upgraded(fleet: Fleet, upgrade: str) -> None:
    asked = (f"upgrade: {upgrade}", "connection: upgrade", "sec-websocket-key: x")
    await fleet.client.send(post(BODY, *asked) + get("/health", *asked) + post(BODY))
    answers = [await fleet.client.answer() for _ in range(3)]
    assert [answer.status for answer in answers] == [200] * 3
    assert answers[2].body == BODY


@pytest.mark.parametrize(
    ("target", "host"),
    [
        (f"http://evil.example:1234{CHAT}", "evil.example"),
        (f"{CHAT}?url=http://evil.example/", "127.0.0.1:1"),
        (CHAT, "169.254.169.254"),
    ],
)
async def test_no_request_names_a_backend(fleet: Fleet, target: str, host: str) -> None:
    raw = post(BODY, "x-forwarded-host: evil.example", path=target)
    await fleet.client.send(raw.replace(b"host: gateway", f"host: {host}".encode()))
    assert (await fleet.client.answer()).body == BODY
    assert fleet.engine.calls[0].headers["host"] == f"127.0.0.1:{fleet.engine.port}"


@pytest.mark.parametrize(
    "line", ["CONNECT evil.example:80", "CONNECT /", "GET http://[", "OPTIONS *"]
)
async def test_targets_that_are_no_path(fleet: Fleet, line: str) -> None:
    await fleet.client.send(f"{line} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
    assert (await fleet.client.answer()).status in (400, 404, 405)


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
    await until(lambda: fleet.gateway.gateway.loads.total() == 0)
