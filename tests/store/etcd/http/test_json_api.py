"""Tests of `store.etcd.http.json_api`: answers of every build of etcd, dead members, and servers that are not etcd."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, closing, suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery.clock import SystemClock
from store.errors import (
    CompactedError,
    LeaseLostError,
    NoSpaceError,
    PermissionDeniedError,
    StoreError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
)
from store.etcd.adapter import CALL_S
from store.etcd.address import EtcdAddress
from store.etcd.error_mapping import error_from_status
from store.etcd.http import json_api
from store.etcd.http.json_api import JsonGateway
from store.etcd.http.transport import HttpTransport
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import CreateRevisionGuard, Delete, ModRevisionGuard, Put, WatchBatch
from tests.support.ports import free_port
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.tcp_server import tcp_server

PUT = [Put(key="/route/a", value=b"1")]


def dead() -> str:
    return f"http://127.0.0.1:{free_port()}"


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """Run a server with this behaviour for each connection."""

    async with tcp_server(answer) as port:
        yield f"http://127.0.0.1:{port}"


def saying(status: str, body: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    return answer


async def mute(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()  # until the client closes the connection


@pytest.mark.etcd
@pytest.mark.parametrize("before", [1, 4])
async def test_dead_members_are_skipped(tcp: TcpEtcd, before: int) -> None:
    transport = HttpTransport(
        EtcdAddress(endpoints=(*(dead() for _ in range(before)), f"{tcp.url}/"))
    )
    revision = await transport.commit([], PUT)  # a write as the very first call
    assert await transport.get("/route/a") is not None
    async with aclosing(transport.watch("/route/", after_revision=revision - 1)) as watch:
        await anext(watch)
        assert (await anext(watch)).changes
    await transport.close()


@pytest.mark.etcd
async def test_concurrent_failures_rotate_endpoints_once(tcp: TcpEtcd) -> None:
    transport = HttpTransport(EtcdAddress(endpoints=(dead(), tcp.url)))
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(transport.grant(60)) for _ in range(32)]
    assert len({call.result() for call in calls}) == 32
    await transport.close()


@pytest.mark.etcd
async def test_a_watch_continues_at_another_member(tcp: TcpEtcd) -> None:
    async with serving(saying("503 Service Unavailable", b'{"code":14,"error":"x"}')) as broken:
        transport = HttpTransport(EtcdAddress(endpoints=(broken, tcp.url)))
        with pytest.raises(UnavailableError, match="watch refused"):
            await anext(transport.watch("/route/", after_revision=0))
        async with aclosing(transport.watch("/route/", after_revision=0)) as watch:
            await anext(watch)
        await transport.close()


async def test_unreachable_members_fail_fast_and_unambiguously() -> None:
    clock = SystemClock()
    transport = HttpTransport(EtcdAddress(endpoints=(dead(), dead())))
    started = clock.monotonic()
    for call in (transport.commit([], PUT), transport.get("/a"), transport.grant(5)):
        with pytest.raises(UnavailableError) as failed:
            await call
        assert not failed.value.ambiguous
    assert clock.monotonic() - started < 10
    await transport.close()


async def test_a_silent_server_times_out_and_a_write_is_ambiguous() -> None:
    clock = SystemClock()
    async with serving(mute) as url:
        transport = HttpTransport(EtcdAddress(endpoints=(url,)), idle_s=0.5)
        started = clock.monotonic()
        with pytest.raises(UnavailableError) as failed:
            await transport.commit([], PUT)
        assert failed.value.ambiguous
        assert CALL_S * 0.9 < clock.monotonic() - started < CALL_S + 10
        started = clock.monotonic()
        with pytest.raises(UnavailableError):
            await anext(transport.watch("/a", after_revision=0))
        assert clock.monotonic() - started < 10
        await transport.close()


@pytest.mark.etcd
async def test_a_watch_that_etcd_does_not_confirm_ends(shared_etcd: EmbeddedEtcd) -> None:
    """A proxy that holds back the answer, in front of an etcd that is well."""

    async def hold_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/watch " in head:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
            await reader.read()
            return
        there = await asyncio.open_unix_connection(shared_etcd.address.socket)
        with closing(there[1]):
            there[1].write(head.replace(b"keep-alive", b"close"))
            there[1].write(await reader.read(2**16))
            writer.write(await there[0].read(2**16))

    async with serving(hold_back) as url:
        transport = HttpTransport(EtcdAddress(endpoints=(url,)), idle_s=1.0)
        with pytest.raises(UnavailableError):
            async with asyncio.timeout(30):
                await anext(transport.watch("/a", after_revision=0))
        await transport.close()


@pytest.mark.etcd
async def test_a_watch_leaves_a_frozen_member_for_another(tcp: TcpEtcd) -> None:
    """Its connections stay, and calls are answered by the other one."""
    is_frozen = asyncio.Event()
    port = int(tcp.url.rpartition(":")[2])

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(2**16):
                if is_frozen.is_set():
                    await asyncio.Event().wait()
                writer.write(data)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pump(reader, there[1]))
                group.create_task(pump(there[0], writer))
        finally:
            there[1].close()

    async def follow(watch: AsyncGenerator[WatchBatch]) -> WatchBatch:
        """Return the first batch with a change; others say that etcd is there."""
        async with asyncio.timeout(30):
            while not (batch := await anext(watch)).changes:
                pass
        return batch

    async with serving(relay) as member:
        transport = HttpTransport(EtcdAddress(endpoints=(member, tcp.url)), idle_s=1.0)
        revision = await transport.commit([], PUT)
        async with aclosing(transport.watch("/route/", after_revision=revision)) as watch:
            await anext(watch)
            is_frozen.set()
            with pytest.raises(UnavailableError, match="endpoint of the watch"):
                await follow(watch)
        async with aclosing(transport.watch("/route/", after_revision=revision)) as watch:
            await anext(watch)
            await transport.commit([], PUT)
            assert [change.key for change in (await follow(watch)).changes] == ["/route/a"]
        await transport.close()


@pytest.mark.etcd
async def test_waiting_for_a_slot_does_not_count_as_call_time(shared_etcd: EmbeddedEtcd) -> None:
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
async def test_an_invalid_answer_is_a_store_error(status: str, body: bytes) -> None:
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


async def test_a_web_server_among_the_endpoints_is_skipped(tcp: TcpEtcd) -> None:
    answer = saying("503 Service Unavailable", b"<html>sorry</html>")
    async with serving(answer) as url:
        route = JsonGateway(EtcdAddress(endpoints=(url, tcp.url)))
        assert "version" in await route.call("/maintenance/status", {})
        await route.close()
        alone = JsonGateway(EtcdAddress(endpoints=(url,)))
        with pytest.raises(UnavailableError, match="HTTP 503, and not an answer of etcd") as info:
            await alone.call("/kv/txn", {})
        assert info.value.ambiguous
        await alone.close()


@pytest.mark.parametrize(
    ("status", "limit"), [("200 OK", "262144 KiB"), ("502 Bad Gateway", "64 KiB")]
)
async def test_an_endless_answer_is_not_read_to_its_end(status: str, limit: str) -> None:
    sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
        with suppress(ConnectionError):
            while True:
                writer.write(b"x" * 2**20)
                await writer.drain()
                sent += 2**20

    async with serving(answer) as url:
        transport = JsonGateway(EtcdAddress(endpoints=(url,)))
        with pytest.raises(UnavailableError, match=f"more than {limit} as one answer"):
            await transport.call("/kv/range", {}, limit_s=60)
        await transport.close()
    assert sent < 2**29


async def test_a_truncated_answer_to_a_write_is_ambiguous() -> None:
    async with serving(saying("200 OK", b'{"header":')) as url:
        transport = HttpTransport(EtcdAddress(endpoints=(url,)))
        with pytest.raises(UnavailableError) as failed:
            await transport.commit([], PUT)
        assert failed.value.ambiguous
        await transport.close()


@pytest.mark.etcd
async def test_a_key_that_is_not_utf8_does_not_break_a_list(tcp: TcpEtcd) -> None:
    route = JsonGateway(tcp.address)
    await route.call("/kv/put", {"key": "L2JpbmFyeS//", "value": "AA=="})  # /binary/ and 0xff
    transport = HttpTransport(replace(tcp.address))
    (item,) = (await transport.list("/binary/")).items
    assert await transport.get(item.key) == item
    await transport.close()
    await route.close()


def told(message: str, code: int) -> bytes:
    """Return an error as etcd 3.4 writes it."""
    return f'{{"error":"{message}","code":{code}}}'.encode()


COMPACTED = "etcdserver: mvcc: required revision has been compacted"
LEASE = "etcdserver: requested lease not found"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (told(COMPACTED, 11), CompactedError),
        (f'{{"code":11,"message":"{COMPACTED}"}}'.encode(), CompactedError),  # etcd 3.5
        (b'{"error":{"grpc_code":14,"http_code":503,"message":"no leader"}}', UnavailableError),
        (b'{"error":{"code":14,"message":"etcdserver: leader changed"}}', UnavailableError),
        (told(LEASE, 5), LeaseLostError),
        (f'{{"code": 5, "message": "{LEASE}", "details": []}}'.encode(), LeaseLostError),
        (told("etcdserver: request is too large", 3), TooLargeError),
        (told("grpc: received message larger than max (2 vs. 1)", 8), TooLargeError),
        (told("etcdserver: too many operations in txn request", 3), TooLargeError),
        (told("etcdserver: mvcc: database space exceeded", 8), NoSpaceError),
        (told("etcdserver: permission denied", 7), PermissionDeniedError),
        (told("etcdserver: invalid auth token", 16), UnauthenticatedError),
        (told("etcdserver: user name is empty", 3), UnauthenticatedError),
        (told("etcdserver: request timed out", 14), UnavailableError),
        (told("context deadline exceeded", 2), UnavailableError),
        (told("etcdserver: too many requests", 8), UnavailableError),
        (b"404 page not found\n", StoreError),
        (b"", StoreError),
        (b"{}", StoreError),
        (b'{"code":"not_found"}', StoreError),
        (b'{"error":{"code":"x","message":null}}', StoreError),
    ],
)
def test_error_bodies_are_mapped_to_errors(body: bytes, expected: type[StoreError]) -> None:
    error = error_from_status(*json_api.error_of_body(body))
    assert type(error) is expected
    if isinstance(error, UnavailableError):
        assert error.ambiguous  # the server was reached, so it may have written


@given(
    st.binary(max_size=200) | st.from_regex(rb'\{"(error|code|message)":.{0,20}\}', fullmatch=True)
)
def test_any_error_body_can_be_read(body: bytes) -> None:
    assert isinstance(error_from_status(*json_api.error_of_body(body)), StoreError)


@given(st.dictionaries(st.sampled_from(["kv", "key", "value", "lease"]), st.text() | st.none()))
def test_an_invalid_item_is_unavailable(tree: json_api.Json) -> None:
    for read in (json_api.key_value, json_api.change):
        try:
            read(tree)
        except UnavailableError as error:
            assert error.ambiguous  # noqa: PT017 - most trees raise, some do not


def test_omitted_values_are_zero_or_empty() -> None:
    item = json_api.key_value({"key": "L2E="})
    assert (item.key, item.value, item.mod_revision, item.lease) == ("/a", b"", 0, 0)


def test_puts_and_deletes_are_decoded() -> None:
    put = json_api.change({"kv": {"key": "L2E=", "mod_revision": "9007199254740993"}})
    assert put.now is not None
    assert put.now.mod_revision == 9007199254740993  # beyond a float
    gone = json_api.change({"type": "DELETE", "kv": {"key": "L2E=", "mod_revision": "7"}})
    assert (gone.key, gone.mod_revision, gone.now) == ("/a", 7, None)


def test_a_transaction_contains_guards_and_operations() -> None:
    body = json_api.transaction(
        [
            ModRevisionGuard(key="/a", mod_revision=3),
            CreateRevisionGuard(key="/b", create_revision=4),
        ],
        [Put(key="/c", value=b"", lease=5), Put(key="/c", value=b"v"), Delete(key="/d")],
    )
    compare = [
        (c["target"], c.get("mod_revision"), c.get("create_revision")) for c in body["compare"]
    ]
    assert compare == [("MOD", "3", None), ("CREATE", None, "4")]
    assert body["success"] == [
        {"request_put": {"key": "L2M=", "value": "", "lease": "5"}},
        {"request_put": {"key": "L2M=", "value": "dg=="}},
        {"request_delete_range": {"key": "L2Q="}},
    ]


@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_keys_survive_a_round_trip(key: str) -> None:
    if key != key.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape"):
        return
    assert json_api.key_value({"key": json_api.b64(key)}).key == key


def test_a_missing_required_value_is_an_error() -> None:
    assert json_api.field_at({"header": {"revision": "3"}}, "header", "revision") == "3"
    odd: list[json_api.Json] = [{}, {"header": None}, {"header": {}}, {"header": "revision"}]
    for tree in odd:
        with pytest.raises(UnavailableError, match="not an answer of etcd"):
            json_api.field_at(tree, "header", "revision")
