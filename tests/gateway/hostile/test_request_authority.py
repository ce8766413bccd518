"""No request can name a backend: it reaches the published engine or none."""

import pytest

from tests.support.gateway_raw_stand import BODY, LAST, Stand, post

_WAYS = {
    "Host": post(BODY, b"host: 127.0.0.1:%d"),
    "forwarded": post(
        BODY,
        b"forwarded: host=127.0.0.1:%d",
        b"x-forwarded-host: 127.0.0.1:%d",
        b"x-forwarded-for: 127.0.0.1",
        b"x-original-url: http://127.0.0.1:%d/",
        b"x-rewrite-url: http://127.0.0.1:%d/",
    ),
    "ours": post(
        BODY,
        b"x-fleet-node: 127.0.0.1:%d",
        b"x-fleet-replica: http://127.0.0.1:%d",
        b"x-fleet-resumable: 1",
        b"x-fleet-origin: 127.0.0.1:%d",
    ),
    "a whole URL": post(BODY, path=b"http://127.0.0.1:%d/v1/chat/completions"),
    "another's words": post(
        b'{"model":"m","api_base":"http://127.0.0.1:%d","base_url":"http://127.0.0.1:%d",'
        b'"url":"http://127.0.0.1:%d","endpoint":"127.0.0.1:%d"}'
    ),
}


def pointing(data: bytes, port: int) -> bytes:
    """Return the request with the port in it, and its length as before."""
    return data.replace(b"%d", b"%05d" % port)


@pytest.mark.parametrize("data", _WAYS.values(), ids=_WAYS)
async def test_ignored_headers_do_not_change_the_engine(stand: Stand, data: bytes) -> None:
    port = stand.elsewhere.ports[0]
    head, _, body = data.partition(b"\r\n\r\n")
    body = pointing(body, port)
    head = pointing(head, port).rpartition(b"content-length: ")[0]
    whole = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
    assert await stand.statuses(whole + LAST) == [200, 200]
    (received,) = stand.engine.requests
    assert b"%d" % port not in received.head


@pytest.mark.parametrize(
    "name", [b"http://127.0.0.1:%d/m", b"m@127.0.0.1:%d", b"//127.0.0.1:%d", b"../m", b"m/../../x"]
)
async def test_a_name_is_a_name(stand: Stand, name: bytes) -> None:
    body = b'{"model":"%b"}' % pointing(name, stand.elsewhere.ports[0])
    assert await stand.statuses(post(body) + LAST) == [404, 200]
    assert not stand.engine.requests


@pytest.mark.parametrize(
    "line",
    [
        b"CONNECT 127.0.0.1:%d HTTP/1.1",
        b"GET http://127.0.0.1:%d/v1/models HTTP/1.1",
        b"GET //127.0.0.1:%d/v1/models HTTP/1.1",
        b"POST @127.0.0.1:%d/v1/chat/completions HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"TRACE /v1/chat/completions HTTP/1.1",
        b"POST /v1/chat/completions\0 HTTP/1.1",
        b"POST /v1/\xff\xfe HTTP/1.1",
        b"POST /v1/%%ff%%00 HTTP/1.1",
        b"POST /v1/../v1/chat/completions HTTP/1.1",
        b"POST /v1/chat%%2fcompletions HTTP/1.1",
        b"POST http://[::1/v1/chat/completions HTTP/1.1",
        b"PRI * HTTP/2.0",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_targets_that_are_none(stand: Stand, line: bytes) -> None:
    line = line.replace(b"%%", b"%").replace(b"%d", b"%d" % stand.elsewhere.ports[0])
    data = line + b"\r\nhost: gateway\r\ncontent-length: 0\r\n\r\n"
    found = await stand.statuses(data + LAST)
    assert found
    assert found[0] < 500
    assert not stand.engine.requests
