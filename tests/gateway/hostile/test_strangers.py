"""Clients without a key, and clients that together want more than there is: memory, hosts and file descriptors."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.gateway_raw_stand import BODY, Stand, post, running_stand, statuses
from tests.support.gateway_recording_engine import SILENT
from tests.support.waiting import until, until_async

_MB = 1 << 20
_KEY = "sk-fleet-good"
_BODY_MEMORY_MB = 64
_LARGE = 7_900_000
_FILES = 64


@pytest.fixture(scope="module")
async def keyed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """A gateway that requires keys."""
    folder, memory = tmp_path_factory.mktemp("keyed"), str(_BODY_MEMORY_MB * _MB)
    async with running_stand(folder, "--max-body-memory", memory, key=_KEY) as made:
        yield made


async def send_unfinished(stand: Stand, stack: AsyncExitStack, *headers: bytes) -> list[bytes]:
    """Send 60 bodies of which the last byte is missing; return what each client has got a moment later."""
    return await send_all(stand, stack, post(b" " * _LARGE, *headers)[:-1])


async def send_all(stand: Stand, stack: AsyncExitStack, data: bytes) -> list[bytes]:
    """Send the data on 60 connections; return what each has got a moment later."""

    async def send() -> asyncio.StreamReader:
        reader, writer = await stack.enter_async_context(stand.connection())
        writer.write(data)
        try:
            async with asyncio.timeout(20):
                await writer.drain()
        except ConnectionError:
            pass  # refused before all was sent
        return reader

    readers = [await send() for _ in range(60)]
    return [await received(reader) for reader in readers]


async def received(reader: asyncio.StreamReader) -> bytes:
    try:
        async with asyncio.timeout(0.05):
            return await reader.read(1 << 16)
    except (TimeoutError, ConnectionError):
        return b""


async def test_bodies_of_clients_without_a_key_are_not_kept(keyed: Stand) -> None:
    before = keyed.rss()
    async with AsyncExitStack() as stack:
        answers = await send_unfinished(keyed, stack)
        assert keyed.rss() - before < 40 * _MB
        told = [answer for answer in answers if answer]
        assert told
        assert {status for answer in told for status in statuses(answer)} == {401}
        assert all(b"connection: close" in answer for answer in told)
        assert await keyed.is_well()


async def test_unfinished_bodies_of_all_clients_have_one_bound(keyed: Stand) -> None:
    before = keyed.rss()
    key = b"authorization: Bearer %b" % _KEY.encode()
    async with AsyncExitStack() as stack:
        answers = await send_unfinished(keyed, stack, key)
        # A growing buffer is up to an eighth larger than its content.
        assert keyed.rss() - before < _BODY_MEMORY_MB * _MB * 9 / 8 + 48 * _MB
        told = [answer for answer in answers if answer]
        assert {status for answer in told for status in statuses(answer)} == {503}
        assert all(b"retry-after: 1\r\n" in a and b"gateway_overloaded" in a for a in told)
        # One key gets half of it.
        assert (
            20 * _MB < await metric(keyed, "fleet_gateway_body_bytes") <= _BODY_MEMORY_MB * _MB / 2
        )
        assert await metric(keyed, 'fleet_gateway_shed_total{reason="body_memory"}') > 40
        # Bodies that arrive at once need none of that memory.
        assert await keyed.is_well()

    await until_async(lambda: _is_free(keyed), what="the memory of clients that left")


@pytest.mark.ci
async def test_requests_of_clients_that_read_no_answer_are_not_kept(keyed: Stand) -> None:
    """One such connection filled 550 MB: reading went on after each response, and a read was parsed whole."""
    before = keyed.rss()
    requests = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 5000

    async def send(stack: AsyncExitStack) -> None:
        _, writer = await stack.enter_async_context(keyed.connection())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                while True:
                    writer.write(requests)
                    await writer.drain()

    async with AsyncExitStack() as stack:
        await asyncio.gather(*(send(stack) for _ in range(20)))
        assert keyed.rss() - before < 48 * _MB
        assert await keyed.is_well()


async def _is_free(stand: Stand) -> bool:
    return await metric(stand, "fleet_gateway_body_bytes") == 0


@pytest.mark.ci
async def test_complete_bodies_are_counted_until_they_are_answered_and_given_back(
    keyed: Stand,
) -> None:
    key = b"authorization: Bearer %b" % _KEY.encode()
    body = b'{"model":"m","prompt":%b,"x":"%b"}' % (SILENT, b"x" * _LARGE)
    before = keyed.rss()
    async with AsyncExitStack() as stack:
        answers = await send_all(keyed, stack, post(body, key))
        held = [answer for answer in answers if not answer]
        assert keyed.engine.silent == len(held) == _BODY_MEMORY_MB * _MB // 2 // len(body)
        assert {status for answer in answers for status in statuses(answer)} == {503}
        assert keyed.rss() - before < _BODY_MEMORY_MB * _MB + 48 * _MB
        assert await metric(keyed, "fleet_gateway_body_bytes") == len(held) * len(body)
        assert await keyed.is_well()
    await until_async(lambda: _is_free(keyed), what="the memory of clients that left")
    await until(lambda: keyed.engine.silent == 0, what="the end of all requests")
    # Engines that refuse a body unread leave nothing of it behind, in neither API.
    keyed.engine.most_body = _MB
    text = b"x" * _LARGE
    chat = b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"%b"}]}' % text
    for path in (b"/v1/completions", b"/v1/messages"):
        for _ in range(10):
            data = post(chat, key, b"connection: close", path=path)
            assert await keyed.statuses(data) == [413]
    keyed.engine.most_body = 1 << 30
    assert await _is_free(keyed)
    assert keyed.rss() - before < 48 * _MB


@pytest.fixture
async def short(tmp_path: Path) -> AsyncIterator[Stand]:
    """A gateway of a model with a short context."""
    async with running_stand(tmp_path, context_length=4096) as made:
        yield made


@pytest.mark.ci
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/messages", b"/api/chat"])
async def test_bodies_larger_than_the_models_context_are_neither_kept_nor_translated(
    short: Stand, path: bytes
) -> None:
    limit, before = _MB + 64 * 4096, short.rss()
    # Neither the whole body nor the model's name has arrived.
    declared = post(b" " * _LARGE, path=path)
    async with AsyncExitStack() as stack:
        answers = await send_all(short, stack, declared[:200_000])
        assert {one for answer in answers for one in statuses(answer)} == {413}
        assert await metric(short, "fleet_gateway_body_bytes") == 0
    chunks = b"".join(
        b"10000\r\n%b\r\n" % (b" " * (1 << 16)) for _ in range(limit // (1 << 16) + 1)
    )
    head = declared.partition(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\n"
    assert await short.statuses(head + chunks) == [413]
    assert short.rss() - before < 40 * _MB
    # What is no message at all would be refused with 400 if it were read.
    text = b'{"messages":7,"x":"%b","model":"m%b"}'
    latest = b":latest" if path == b"/api/chat" else b""
    size = limit - len(text) + 4 - len(latest)
    close = b"connection: close"
    for more, status in ((0, 400), (1, 413)):
        body = text % (b"x" * (size + more), latest)
        assert len(body) == limit + more
        is_passed = path == b"/v1/chat/completions" and status == 400  # the engine reads it
        assert await short.statuses(post(body, close, path=path)) == [200 if is_passed else status]


async def metric(stand: Stand, name: str) -> float:
    text = await stand.say(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    found = re.search(rb"^%b (\S+)$" % re.escape(name.encode()), text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.ci
async def test_a_gateway_at_its_limit_of_files_serves_closes_the_idle_and_says_so(
    tmp_path: Path,
) -> None:
    async with running_stand(tmp_path, files=_FILES) as stand, AsyncExitStack() as stack:
        for _ in range(100):
            await stack.enter_async_context(stand.connection())
        for _ in range(10):
            assert await stand.is_well()
        assert await metric(stand, 'fleet_gateway_shed_total{reason="idle"}') > 0
        log = await until(
            lambda: stand.log.read_text() or None, what="a line about the limit of files"
        )
        assert "the limit of open files is reached" in log
        assert log.count("the limit of open files") < 5
        assert f'"limit": {_FILES}' in log or f'"limit":{_FILES}' in log


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"localhost:4000", 200),
        (b"LOCALHOST", 200),
        (b"127.0.0.1", 200),
        (b"[::1]:4000", 200),
        (b"evil.example", 403),
        (b"evil.example:4000", 403),
        (b"localhost.evil.example", 403),
        (b"127.0.0.1.evil.example:4000", 403),
    ],
)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/api/dashboard/requests", b"/metrics"])
async def test_a_rebound_name_gets_nothing_of_a_gateway_without_keys(
    unkeyed: Stand, host: bytes, status: int, path: bytes
) -> None:
    method, size = (b"POST", len(BODY)) if path.startswith(b"/v1/") else (b"GET", 0)
    head = b"%b %b HTTP/1.1\r\nhost: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    answer = await unkeyed.say(head % (method, path, host, size) + BODY[:size])
    assert statuses(answer) == [status]
    if status == 403:
        assert b'"code":"host_not_allowed"' in answer
        assert b"--allowed-host %b," % host.removesuffix(b":4000") in answer


@pytest.fixture(scope="module")
async def unkeyed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """A gateway on loopback with default flags."""
    async with running_stand(tmp_path_factory.mktemp("unkeyed")) as made:
        yield made
