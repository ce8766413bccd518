"""The way to etcd when it is bumpy: dead members, mute servers, garbage."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from machinery.clock import SystemClock
from store.errors import StoreError, UnavailableError
from store.etcd.adapter import CALL_S
from store.etcd.address import EtcdAddress
from store.etcd.http.json_api import JsonGateway
from store.etcd.http.transport import HttpTransport
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Put
from tests.store.tcp_etcd import TcpEtcd
from tests.support.ports import free_port

PUT = [Put(key="/route/a", value=b"1")]


@pytest.fixture(scope="module")
async def tcp(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TcpEtcd]:
    async with TcpEtcd(tmp_path_factory.mktemp("route")) as etcd:
        yield etcd


def dead() -> str:
    return f"http://127.0.0.1:{free_port()}"


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """Run a server that treats each connection so."""

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(guarded, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def saying(status: str, body: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    return answer


async def mute(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()  # all of it, that is until the client has enough


@pytest.mark.etcd
@pytest.mark.parametrize("before", [1, 4])
async def test_dead_members_are_passed_over(tcp: TcpEtcd, before: int) -> None:
    transport = HttpTransport(
        EtcdAddress(endpoints=(*(dead() for _ in range(before)), f"{tcp.url}/"))
    )
    revision = await transport.commit([], PUT)  # a write, and the first call of all
    assert await transport.get("/route/a") is not None
    async with aclosing(transport.watch("/route/", after_revision=revision - 1)) as watch:
        await anext(watch)
        assert (await anext(watch)).changes
    await transport.close()


@pytest.mark.etcd
async def test_many_failures_at_once_do_not_turn_back_to_the_dead(tcp: TcpEtcd) -> None:
    transport = HttpTransport(EtcdAddress(endpoints=(dead(), tcp.url)))
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(transport.grant(60)) for _ in range(32)]
    assert len({call.result() for call in calls}) == 32
    await transport.close()


@pytest.mark.etcd
async def test_a_watch_goes_on_at_another_member(tcp: TcpEtcd) -> None:
    async with serving(saying("503 Service Unavailable", b'{"code":14,"error":"x"}')) as broken:
        transport = HttpTransport(EtcdAddress(endpoints=(broken, tcp.url)))
        with pytest.raises(UnavailableError, match="watch refused"):
            await anext(transport.watch("/route/", after_revision=0))
        async with aclosing(transport.watch("/route/", after_revision=0)) as watch:
            await anext(watch)
        await transport.close()


async def test_when_all_are_dead_it_is_said_quickly_and_nothing_was_written() -> None:
    clock = SystemClock()
    transport = HttpTransport(EtcdAddress(endpoints=(dead(), dead())))
    started = clock.monotonic()
    for call in (transport.commit([], PUT), transport.get("/a"), transport.grant(5)):
        with pytest.raises(UnavailableError) as failed:
            await call
        assert not failed.value.ambiguous
    assert clock.monotonic() - started < 5
    await transport.close()


async def test_a_mute_server_is_given_up_in_time_and_a_write_may_have_happened() -> None:
    clock = SystemClock()
    async with serving(mute) as url:
        transport = HttpTransport(EtcdAddress(endpoints=(url,)), idle_s=0.5)
        started = clock.monotonic()
        with pytest.raises(UnavailableError) as failed:
            await transport.commit([], PUT)
        assert failed.value.ambiguous
        assert CALL_S * 0.9 < clock.monotonic() - started < CALL_S + 4
        started = clock.monotonic()
        with pytest.raises(UnavailableError):
            await anext(transport.watch("/a", after_revision=0))
        assert clock.monotonic() - started < 5
        await transport.close()


@pytest.mark.etcd
async def test_waiting_for_a_place_does_not_count(shared_etcd: EmbeddedEtcd) -> None:
    transport = HttpTransport(shared_etcd.address)
    async with asyncio.TaskGroup() as group:
        for n in range(1000):
            group.create_task(transport.get(f"/route/{n}"))
    await transport.close()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        pytest.param("200 OK", b"<html>welcome</html>", id="html"),
        pytest.param("200 OK", b'{"header":{"revision":"12"', id="cut"),
        pytest.param("200 OK", b"[]", id="list"),
        pytest.param("200 OK", b"{}", id="empty"),
        pytest.param("200 OK", b'{"kvs":[{"key":7}]}', id="odd-items"),
        pytest.param("200 OK", b'{"kvs":["a"],"header":"x"}', id="odd-header"),
        pytest.param("200 OK", b'{"kvs":[{"key":"%%%"}]}', id="bad-base64"),
        pytest.param("404 Not Found", b"404 page not found\n", id="not-found"),
        pytest.param("502 Bad Gateway", b'{"code":"bad_gateway"}', id="proxy"),
        pytest.param("500 Oops", b"\xff\xfe", id="bytes"),
    ],
)
async def test_garbage_is_an_error_of_the_store(status: str, body: bytes) -> None:
    async with serving(saying(status, body)) as url:
        transport = HttpTransport(EtcdAddress(endpoints=(url,)))
        for call in (
            transport.list("/"),
            transport.commit([], PUT),
            transport.grant(5),
            transport.keep_alive(1),
            transport.status(),
            anext(transport.watch("/", after_revision=0)),
        ):
            with pytest.raises(StoreError) as failed:
                await call
            assert type(failed.value) in (StoreError, UnavailableError)
        await transport.close()


async def test_a_web_server_in_the_way_is_passed_over(tcp: TcpEtcd) -> None:
    answer = saying("503 Service Unavailable", b"<html>sorry</html>")
    async with serving(answer) as url:
        route = JsonGateway(EtcdAddress(endpoints=(url, tcp.url)))
        assert "version" in await route.call("/maintenance/status", {})
        await route.close()
        alone = JsonGateway(EtcdAddress(endpoints=(url,)))
        with pytest.raises(UnavailableError, match="HTTP 503, and not an answer of etcd") as told:
            await alone.call("/kv/txn", {})
        assert told.value.ambiguous
        await alone.close()


async def test_an_answer_that_breaks_off_after_a_write_is_ambiguous() -> None:
    async with serving(saying("200 OK", b'{"header":')) as url:
        transport = HttpTransport(EtcdAddress(endpoints=(url,)))
        with pytest.raises(UnavailableError) as failed:
            await transport.commit([], PUT)
        assert failed.value.ambiguous
        await transport.close()


@pytest.mark.etcd
async def test_a_key_that_is_no_text_does_not_stop_a_list(tcp: TcpEtcd) -> None:
    route = JsonGateway(tcp.address)
    await route.call("/kv/put", {"key": "L2JpbmFyeS//", "value": "AA=="})  # /binary/ and 0xff
    transport = HttpTransport(replace(tcp.address))
    (item,) = (await transport.list("/binary/")).items
    assert await transport.get(item.key) == item
    await transport.close()
    await route.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (EtcdAddress(endpoints=("http://a:1", "http://b:2")), "http://a:1, http://b:2"),
        (EtcdAddress(endpoints=("http://a:1",), username="u", password="secret"), "http://a:1"),
    ],
)
def test_an_address_shows_no_secret(address: EtcdAddress, expected: str) -> None:
    assert str(address) == expected
