"""Client of agents and gateways: malformed answers, interrupted streams, refusals."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from insight import process_client
from insight.errors import ProcessError, ProcessRefusedError, ProcessUnreachableError
from insight.process_client import ProcessAddress
from tests.support.tcp_server import tcp_server

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def serve(answer: bytes, *, stays: bool = False) -> AsyncIterator[ProcessAddress]:
    """Run a server that sends this response to every request, and then closes the connection unless `stays`."""

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        if stays:
            await asyncio.Event().wait()

    async with tcp_server(answered) as port:
        yield ProcessAddress(label="node/mac-1", key="Node/mac-1", url=f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        pytest.param(b"", "Server disconnected", id="nothing"),
        pytest.param(b"220 mail ready\r\n\r\n", "Bad status line", id="no-http"),
        pytest.param(CHUNKED + b"5\r\nhello\r\n", "the output is incomplete", id="in-the-middle"),
        pytest.param(OK + b"content-length: 9\r\n\r\nhello", "is incomplete", id="too-short"),
        pytest.param(OK + b"content-length: 5\r\n\r\nhello", "is not JSON", id="no-json"),
        pytest.param(OK + b"content-length: 2\r\n\r\n[]", "is not a JSON object", id="no-object"),
    ],
)
async def test_malformed_responses_raise_unreachable(answer: bytes, message: str) -> None:
    async with serve(answer) as holder:
        with pytest.raises(ProcessUnreachableError, match=message) as refused:
            await process_client.fetch_json(holder, "/v1/vitals")
    assert refused.value.message.startswith("node/mac-1")
    assert holder.url in refused.value.message


async def test_an_endless_response_times_out() -> None:
    async with serve(CHUNKED + b"5\r\nhello\r\n", stays=True) as holder:
        with pytest.raises(ProcessUnreachableError, match=r"no answer within 0\.2 s"):
            await process_client.fetch(holder, "/health", limit_s=0.2)


async def test_a_response_over_the_size_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_client, "_LIMIT_BYTES", 1 << 20)
    body = b"x" * ((1 << 20) + 1)
    async with serve(OK + b"content-length: %d\r\n\r\n" % len(body) + body) as holder:
        with pytest.raises(ProcessError, match="the response is larger than 1 MiB"):
            await process_client.fetch(holder, "/health")


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        pytest.param(
            b'HTTP/1.1 401 No\r\ncontent-length: 33\r\n\r\n{"error":{"message":"no ticket"}}',
            401,
            "node/mac-1: no ticket",
            id="error-envelope",
        ),
        pytest.param(
            b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n",
            404,
            "node/mac-1: it does not know this path; is it an older release?",
            id="older-release",
        ),
        pytest.param(
            b"HTTP/1.1 302 No\r\nlocation: http://elsewhere/\r\ncontent-length: 0\r\n\r\n",
            302,
            "node/mac-1: HTTP status 302",
            id="redirects-are-not-followed",
        ),
    ],
)
async def test_refusals_carry_the_message_and_the_status(
    answer: bytes, status: int, message: str
) -> None:
    async with serve(answer) as holder:
        with pytest.raises(ProcessRefusedError) as refused:
            await process_client.fetch(holder, "/v1/vitals", bearer="a.b")
    assert refused.value.status == status
    assert refused.value.message.startswith(message)


async def test_an_invalid_url_raises_unreachable() -> None:
    holder = ProcessAddress(label="node/mac-1", key="Node/mac-1", url="nonsense://x y")
    with pytest.raises(
        ProcessUnreachableError, match="node/mac-1 does not answer at nonsense://x y: "
    ):
        await process_client.fetch(holder, "/health")
