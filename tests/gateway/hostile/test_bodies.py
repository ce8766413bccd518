"""Bodies and headers that try to break parsers."""

import pytest

from tests.support.gateway_raw_stand import LAST, Stand, post

CHATS = (b"/v1/chat/completions", b"/v1/messages", b"/api/chat")
"""One path of each API."""
WRONG = b"\xff\xfe"


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(nested(100_000), id="deep list"),
        pytest.param(b'{"model":"m","messages":' + b"[" * 1_000_000, id="deep, never closed"),
        pytest.param(b'{"model":"m","messages":%b}' % nested(100_000), id="deep messages"),
        pytest.param(b'{"model":"m","x":%b}' % nested(100_000), id="deep unknown field"),
        pytest.param(b'{"model":%b}' % nested(100_000), id="deep model"),
        pytest.param(b'{"model":"%b"}' % WRONG, id="no UTF-8"),
        pytest.param(b'{"model":"\\ud800"}', id="half a surrogate pair"),
        pytest.param(b'{"model":"m"}\0', id="NUL after"),
        pytest.param(b'{"model":"m","x":"a\0b"}', id="NUL inside"),
        pytest.param(b'{"model":"m"}{"model":"m"}', id="two bodies"),
        pytest.param(b'\xef\xbb\xbf{"model":"m"}', id="byte order mark"),
        pytest.param('{"model":"m"}'.encode("utf-16"), id="UTF-16"),
        pytest.param(b'{"model":' + b"1" * 100_000 + b"}", id="a number for a name"),
        pytest.param(b'{"model":["m"]}', id="a list for a name"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"null", id="null"),
    ],
)
async def test_what_no_engine_hears(stand: Stand, path: bytes, body: bytes) -> None:
    # The connection continues: the body was wrong, not the framing.
    assert await stand.statuses(post(body, path=path) + LAST) == [400, 200]
    assert not stand.engine.requests


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"model":"m","messages":"%b"}' % WRONG, id="no UTF-8"),
        pytest.param(b'{"model":"m","messages":[{"role":"%b"}]}' % WRONG, id="no UTF-8 in a role"),
        pytest.param(b'{"model":"m","%b":1}' % WRONG, id="no UTF-8 in a name"),
        pytest.param(b'{"model":"m","max_tokens":%b}' % (b"9" * 100_000), id="huge number"),
        pytest.param(b'{"model":"m","temperature":1e999999}', id="no float"),
        pytest.param(b'{"model":"m","session_id":%b}' % nested(500), id="deep session"),
        pytest.param(b'{"model":"m","messages":[{"role":%b}]}' % nested(900), id="deep role"),
        pytest.param(b'{"model":"m","messages":[null,1,"x",[],{}]}', id="odd messages"),
        pytest.param(b'{"model":"other","model":"m"}', id="a name twice"),
    ],
)
async def test_what_the_engine_judges(stand: Stand, body: bytes) -> None:
    assert await stand.statuses(post(body) + LAST) == [200, 200]
    assert [received.body for received in stand.engine.requests] == [body]


@pytest.mark.parametrize(
    ("body", "received"),
    [
        (b'{"model":"other","model":"alias"}', b'{"model":"m"}'),
        (b'{"mod\\u0065l":"alias","x":"%b"}' % WRONG, b'{"model":"m","x":"%b"}' % WRONG),
        (
            b'{"x":{"model":"alias"},"model":"alias","y":1%b}' % (b"0" * 30),
            b'{"x":{"model":"alias"},"model":"m","y":1%b}' % (b"0" * 30),
        ),
    ],
    ids=["twice", "escaped", "nested"],
)
async def test_another_name_changes_nothing_else(
    stand: Stand, body: bytes, received: bytes
) -> None:
    assert await stand.statuses(post(body) + LAST) == [200, 200]
    assert [request.body for request in stand.engine.requests] == [received]


async def test_the_last_of_two_names_counts(stand: Stand) -> None:
    # Same as engines' parsers: a check of one name must not admit another.
    assert await stand.statuses(post(b'{"model":"m","model":"other"}') + LAST) == [404, 200]
    assert not stand.engine.requests


@pytest.mark.parametrize("name", ["x" * 1_000_000, "\u00fc" * 500_000, "a\\r\\nx-evil: 1\\u0000"])
async def test_odd_names(stand: Stand, name: str) -> None:
    received = await stand.say(post(b'{"model":"%b"}' % name.encode()) + LAST)
    assert received.startswith(b"HTTP/1.1 404")
    assert len(received) < 4000
    assert b"\r\nx-evil" not in received


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([b"x-a: " + b"a" * 70_000], 431),
        ([b"x-%d: %b" % (n, b"a" * 700) for n in range(100)], 431),
        ([b"x-%d: a" % n for n in range(5_000)], 431),
        ([b"x" * 70_000 + b": a"], 431),
    ],
    ids=["one long", "many long", "many", "a long name"],
)
async def test_too_much_of_a_head(stand: Stand, headers: list[bytes], status: int) -> None:
    assert await stand.statuses(post(b'{"model":"m"}', *headers) + LAST) == [status]
    assert not stand.engine.requests


async def test_a_head_without_end(stand: Stand) -> None:
    endless = [b"POST /v1/chat/completions HTTP/1.1\r\n", *[b"x-a: %b\r\n" % (b"a" * 1000)] * 1000]
    assert await stand.statuses(*endless) == [431]


async def test_a_trailer_without_end(stand: Stand) -> None:
    begin = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    endless = [begin, b"2\r\n{}\r\n0\r\n", *[b"x-a: %b\r\n" % (b"a" * 1000)] * 1000]
    assert await stand.statuses(*endless) == [431]
    assert not stand.engine.requests


async def test_a_body_without_end(stand: Stand) -> None:
    begin = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    before = stand.rss()
    endless = [begin, *[b"10000\r\n%b\r\n" % (b" " * 65536)] * 1000]  # 64 MB; 8 are allowed
    assert await stand.statuses(*endless) == [413]
    assert stand.rss() - before < 48 << 20
    assert not stand.engine.requests


@pytest.mark.parametrize("name", [b"x-session-id", b"authorization", b"cookie", b"x-request-id"])
async def test_headers_that_are_no_text(stand: Stand, name: bytes) -> None:
    received = await stand.say(post(b'{"model":"m"}', name + b": " + WRONG) + LAST)
    assert received.startswith(b"HTTP/1.1 200")
    (request,) = stand.engine.requests
    assert WRONG not in request.head
