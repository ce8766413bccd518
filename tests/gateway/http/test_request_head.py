"""Heads read line by line: as llhttp reads them, or not at all."""

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.request_context import HeadReader

PATH = b"/v1/chat/completions"
FIRST = b"POST /v1/chat/completions HTTP/1.1"
USUAL = (b"Host: fleet", b"Content-Length: 2")


class Heard:
    """A head as llhttp reads it."""

    def __init__(self, data: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.url = self.body = b""
        self.is_complete = False
        parser = httptools.HttpRequestParser(self)
        parser.feed_data(data)
        self.method, self.version = parser.get_method(), parser.get_http_version()
        self.keeps_alive = parser.should_keep_alive()

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


def head(*lines: bytes, first: bytes = FIRST) -> bytes:
    return b"\r\n".join((first, *lines, b"", b""))


def reader() -> HeadReader:
    return HeadReader([PATH])


names = st.sampled_from(
    [
        b"Host",
        b"Content-Length",
        b"content-length",
        b"Connection",
        b"Transfer-Encoding",
        b"Upgrade",
        b"Expect",
        b"Authorization",
        b"X-A",
        b"Content-Length ",
        b" X-B",
        b"X\x00",
        b"",
    ]
)
values = st.sampled_from(
    [b"2", b"+2", b"2, 2", b"02", b"close", b"keep-alive", b"chunked", b"x", b"", b"a\tb", b"\xff"]
) | st.binary(max_size=6)
separators = st.sampled_from([b": ", b":", b":\t", b" : ", b": \r\n ", b":\n"])
lines = st.builds(lambda name, by, value: name + by + value, names, separators, values)


@given(st.lists(lines, max_size=5), st.lists(st.sampled_from(USUAL), max_size=3))
def test_what_is_read_is_what_llhttp_reads(some: list[bytes], usual: list[bytes]) -> None:
    """A head that is taken here must mean the same there, up to where its body ends."""
    data = head(*usual, *some)
    request = reader().read(data)
    if request is None:
        return
    body = b"x" * request.length
    heard = Heard(data + body)
    assert (heard.url, heard.method, heard.version) == (PATH, b"POST", "1.1")
    assert heard.headers == request.headers
    assert heard.body == body
    assert heard.is_complete
    assert request.size == len(data)


@pytest.mark.parametrize(
    "more",
    [b"Connection: close", b"Transfer-Encoding: chunked", b"Upgrade: h2c", b"Expect: 100-continue"],
)
def test_what_changes_the_connection_is_left_to_llhttp(more: bytes) -> None:
    assert reader().read(head(*USUAL)) is not None
    assert reader().read(head(*USUAL, more)) is None


@pytest.mark.parametrize(
    "data",
    [
        head(b"Host: fleet"),
        head(b"Content-Length: 2"),
        head(*USUAL, b"Host: other"),
        head(*USUAL, b"Content-Length: 2"),
        head(b"Host: fleet", b"Content-Length: -2"),
        head(*USUAL, first=b"GET /v1/chat/completions HTTP/1.1"),
        head(*USUAL, first=b"POST /v1/chat/completions HTTP/1.0"),
        head(*USUAL, first=b"POST /v1/models HTTP/1.1"),
        head(*USUAL, *[b"X-%d: y" % n for n in range(70)]),
        head(*USUAL, b"X: " + b"y" * 9000),
        head(*USUAL)[:-1],
        b"",
    ],
)
def test_other_heads_are_left_to_llhttp(data: bytes) -> None:
    assert reader().read(data) is None


def test_keys_are_never_kept_and_lines_are_bounded() -> None:
    read = reader()
    for number in range(20_000):
        key = b"sk-fleet-secret-%d" % number
        lines = (b"Authorization: Bearer " + key, b"X-Api-Key: " + key, b"X-Id: %d" % number)
        assert read.read(head(*USUAL, *lines)) is not None
    kept = b"".join(read._seen)
    assert b"secret" not in kept
    assert len(read._seen) <= 8192
