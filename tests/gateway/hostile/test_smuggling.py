"""Request smuggling: ambiguous requests are refused or are one request; the engine never gets a second."""

import pytest

from tests.support.gateway_raw_stand import BODY, LAST, Stand

SIZE = len(BODY)
SECOND_BODY = b'{"model":"m","prompt":"SMUGGLED"}'
SECOND = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (
    len(SECOND_BODY),
    SECOND_BODY,
)
CHUNK = b"%x\r\n%b\r\n0\r\n\r\n" % (SIZE, BODY)
LENGTH = b"content-length: %d" % SIZE
CHUNKED = b"transfer-encoding: chunked"


def raw(*headers: bytes, body: bytes = BODY, line: bytes = b"") -> bytes:
    line = line or b"POST /v1/chat/completions HTTP/1.1"
    return b"\r\n".join([line, b"host: gateway", *headers, b"", body])


def case(name: str, data: bytes) -> object:
    return pytest.param(data, id=name)


def lengths(name: str, *values: bytes) -> object:
    declared = [b"content-length: %b" % value for value in values]
    return case(name, raw(*declared, body=BODY + SECOND))


def codings(name: str, *headers: bytes) -> object:
    return case(name, raw(*headers, body=CHUNK + SECOND))


def chunks(name: str, body: bytes) -> object:
    return case(name, raw(CHUNKED, body=body + SECOND))


@pytest.mark.parametrize(
    "data",
    [
        codings("both, length first", b"content-length: 4", CHUNKED),
        codings("both, coding first", CHUNKED, b"content-length: 4"),
        case("both, all in the length", raw(b"content-length: 400", CHUNKED, body=CHUNK + SECOND)),
        lengths("two lengths", b"%d" % SIZE, b"%d" % (SIZE + len(SECOND))),
        lengths("the same length twice", b"%d" % SIZE, b"%d" % SIZE),
        lengths("a list of lengths", b"%d, %d" % (SIZE, SIZE)),
        lengths("plus", b"+%d" % SIZE),
        lengths("minus", b"-1"),
        lengths("hexadecimal", b"0x%x" % SIZE),
        lengths("empty", b""),
        lengths("beyond 64 bits", b"18446744073709551617"),
        lengths("very long", b"9" * 1000),
        case("a blank before the colon", raw(b"content-length : %d" % SIZE, body=BODY + SECOND)),
        codings("not last", b"transfer-encoding: chunked, identity"),
        codings("two codings", CHUNKED, b"transfer-encoding: identity"),
        codings("quoted", b'transfer-encoding: "chunked"', LENGTH),
        codings("vertical tab", b"transfer-encoding: \x0bchunked", LENGTH),
        codings("coding, blank before the colon", b"transfer-encoding : chunked", LENGTH),
        codings("folded coding", b"transfer-encoding:\r\n chunked", LENGTH),
        case("identity", raw(b"transfer-encoding: identity", LENGTH, body=BODY + SECOND)),
        case("folded header", raw(b"x-a: b\r\n c", LENGTH)),
        case("bare LF everywhere", raw(LENGTH).replace(b"\r\n", b"\n")),
        case("one bare LF", raw(b"x-a: b\nx-c: d", LENGTH)),
        case("bare CR", raw(b"x-a: b\rcontent-length: 0", LENGTH)),
        case("NUL in a value", raw(b"x-a: b\0c", LENGTH)),
        case("NUL in a name", raw(b"x-\0a: b", LENGTH)),
        case("no name", raw(b": b", LENGTH)),
        case("HTTP/1.2", raw(LENGTH, line=b"POST /v1/chat/completions HTTP/1.2")),
        case("two paths", raw(LENGTH, line=b"POST /v1/chat/completions /x HTTP/1.1")),
        chunks("size beyond 64 bits", b"f" * 18 + b"\r\n" + BODY),
        chunks("negative size", b"-1\r\n" + BODY),
        chunks("0x size", b"0x" + CHUNK),
        chunks("plus size", b"+" + CHUNK),
        chunks("a blank in the size", CHUNK.replace(b"\r\n", b" \r\n", 1)),
        chunks("bare LF after the size", CHUNK.replace(b"\r\n", b"\n")),
        chunks("bare LF in an extension", CHUNK.replace(b"\r\n", b";a\nb\r\n", 1)),
        chunks("size too small", b"%x\r\n%b\r\n0\r\n\r\n" % (SIZE - 5, BODY)),
        chunks("no end of a chunk", b"%x\r\n%bXX0\r\n\r\n" % (SIZE, BODY)),
        chunks("a length in the trailer", CHUNK[:-2] + b"content-length: 5\r\n\r\n"),
        chunks("a coding in the trailer", CHUNK[:-2] + CHUNKED + b"\r\n\r\n"),
    ],
)
async def test_what_is_refused(stand: Stand, data: bytes) -> None:
    # One response, and then the connection ends: the rest is ignored.
    assert await stand.statuses(data + LAST) == [400]
    assert not stand.engine.requests
    assert not stand.engine.leftover


@pytest.mark.parametrize(
    "data",
    [
        codings("xchunked", b"transfer-encoding: xchunked"),
        codings("gzip below chunked", b"transfer-encoding: gzip, chunked"),
        codings("two headers", b"transfer-encoding: identity", CHUNKED),
    ],
)
async def test_what_is_not_implemented(stand: Stand, data: bytes) -> None:
    assert await stand.statuses(data + LAST) == [501]
    assert not stand.engine.requests
    assert not stand.engine.leftover


@pytest.mark.parametrize(
    "data",
    [
        case("tabs around a length", raw(b"content-length:\t%d\t" % SIZE)),
        case("a name with an underscore", raw(b"transfer_encoding: chunked", LENGTH)),
        case("chunk extensions", raw(CHUNKED, body=CHUNK.replace(b"\r\n", b';a="b"\r\n', 1))),
        case("long chunk extension", raw(CHUNKED, body=CHUNK.replace(b"\r\n", b";%b\r\n" % (b"a" * 99999), 1))),
        case("another case", raw(b"transfer-encoding: Chunked", body=CHUNK)),
        case("a trailer", raw(CHUNKED, body=CHUNK[:-2] + b"x-session-id: evil\r\n\r\n")),
        case("an upgrade to h2c", raw(b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AA", LENGTH)),
        case("an upgrade to websocket", raw(b"connection: upgrade", b"upgrade: websocket", LENGTH)),
        case("many chunks", raw(CHUNKED, body=b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n")),
    ],
)  # fmt: skip
async def test_what_is_one_request(stand: Stand, data: bytes) -> None:
    assert await stand.statuses(data + LAST) == [200, 200]
    (received,) = stand.engine.requests
    assert received.body == BODY
    assert b"evil" not in received.head
    assert b"upgrade" not in received.head.lower()


async def test_a_second_request_in_the_body_is_a_body(stand: Stand) -> None:
    body = b'{"model":"m","prompt":"\\r\\n\\r\\n"}' + b" " * 10
    assert (
        await stand.statuses(raw(b"content-length: %d" % len(body), body=body) + LAST) == [200] * 2
    )
    (received,) = stand.engine.requests
    assert received.body == body


async def test_pipelined_requests_are_answered_in_turn(stand: Stand) -> None:
    data = b"".join(raw(b"x-request-id: r%d" % n, LENGTH) for n in range(20))
    received = await stand.say(data + LAST)
    found = [received.find(b"x-request-id: r%d\r\n" % n) for n in range(20)]
    assert found == sorted(found)
    assert found[0] >= 0
    assert len(stand.engine.requests) == 20
