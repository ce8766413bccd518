"""Tests of `store.etcd.sync_reader`: it reads what the other adapters read, and never hangs."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from machinery.clock import SystemClock
from store import namespace
from store.errors import (
    LongListError,
    PermissionDeniedError,
    SlowStoreError,
    StoreError,
    UnavailableError,
)
from store.etcd import sync_reader
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.embedded import EmbeddedEtcd
from store.etcd.sync_reader import SyncReader, run_sync
from store.port import Put, Transport
from tests.support.ports import free_port
from tests.support.store_guarded_etcd import Guarded, guarded_etcd
from tests.support.store_tls import TlsEtcd, running_tls_etcd

T = TypeVar("T")

HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
async def transport(shared_etcd: EmbeddedEtcd) -> AsyncIterator[Transport]:
    made = connect(shared_etcd.address)
    yield made
    await made.close()


@pytest.fixture(scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    async with guarded_etcd(tmp_path_factory.mktemp("guarded")) as made:
        yield made


@pytest.fixture(scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TlsEtcd]:
    async with running_tls_etcd(tmp_path_factory.mktemp("tls")) as made:
        yield made


def read(address: EtcdAddress, *reads: str, is_list: bool = False) -> list[Any]:
    """Return the values of keys, or below prefixes, over one connection."""
    store = SyncReader(address, SystemClock())
    try:
        return [run_sync(store.list(key) if is_list else store.get(key)) for key in reads]
    finally:
        store.close()


async def quickly(address: EtcdAddress, *reads: str, is_list: bool = False) -> list[Any]:
    """Return the same from a thread: the reader blocks, and the test's servers run in this loop."""
    async with asyncio.timeout(30):
        return await asyncio.to_thread(read, address, *reads, is_list=is_list)


@pytest.mark.etcd
async def test_it_reads_the_same_as_the_other_adapters(
    shared_etcd: EmbeddedEtcd, transport: Transport, corner: str
) -> None:
    # More than a page, values longer than a chunk, an empty value, and non-ASCII letters.
    values = {f"{corner}{n:04}": b"x" * (n * 7 % 900) for n in range(700)}
    values |= {f"{corner}grüße": "日本".encode(), f"{corner}long": b"y" * 300_000}
    puts = [Put(key=key, value=value) for key, value in values.items()]
    for first in range(0, len(puts), 100):
        await transport.commit([], puts[first : first + 100])
    (listing,) = await quickly(shared_etcd.address, corner, is_list=True)
    expected = await transport.list(corner)
    assert listing.items == expected.items
    assert len(listing.items) == len(values)
    found = await quickly(shared_etcd.address, f"{corner}long", f"{corner}nobody", f"{corner}0001")
    assert found[0] == await transport.get(f"{corner}long")
    assert found[1] is None
    assert found[2].value == b"x" * 7


@pytest.mark.etcd
async def test_a_long_list_is_refused_after_its_first_page(
    shared_etcd: EmbeddedEtcd, transport: Transport, corner: str
) -> None:
    """For `fleetctl.cli.connect.read_once`, which then reads it over gRPC."""
    for first in range(0, 600, 100):
        keys = [f"{corner}{n:04}" for n in range(first, first + 100)]
        await transport.commit([], [Put(key=key, value=b"1") for key in keys])

    def read_list(longest: int) -> int:
        store = SyncReader(shared_etcd.address, SystemClock(), longest_list=longest)
        try:
            return len(run_sync(store.list(corner)).items)
        finally:
            store.close()

    assert await asyncio.to_thread(read_list, 600) == 600
    with pytest.raises(LongListError):
        await asyncio.to_thread(read_list, 599)


@pytest.mark.etcd
async def test_keys_are_below_the_prefix(
    shared_etcd: EmbeddedEtcd, transport: Transport, corner: str
) -> None:
    prefix = corner.rstrip("/")
    await namespace.with_prefix(transport, prefix).commit([], [Put(key="/a", value=b"1")])
    address = replace(shared_etcd.address, prefix=prefix)
    (found,) = await quickly(address, "/a")
    assert (found.key, found.value) == ("/a", b"1")
    (listing,) = await quickly(address, "/", is_list=True)
    assert [item.key for item in listing.items] == ["/a"]


@pytest.mark.etcd
async def test_a_password_is_sent_where_it_is_required(guarded: Guarded) -> None:
    assert await quickly(guarded.address("admin"), "/mlx-fleet/v1/a") == [None]
    with pytest.raises(PermissionDeniedError):
        await quickly(guarded.address("node-mac-1"), "/mlx-fleet/v1/secret/ApiKey/a")
    with pytest.raises(PermissionDeniedError):
        await quickly(replace(guarded.address("admin"), password="wrong"), "/mlx-fleet/v1/a")
    with pytest.raises(StoreError):
        await quickly(replace(guarded.address("admin"), username=""), "/mlx-fleet/v1/a")


@pytest.mark.etcd
async def test_a_user_is_ignored_where_authentication_is_off(shared_etcd: EmbeddedEtcd) -> None:
    address = replace(shared_etcd.address, username="ann", password="b")
    assert await quickly(address, "/test/nobody") == [None]


@pytest.mark.etcd
async def test_tls_verifies_both_sides(secured: TlsEtcd) -> None:
    assert await quickly(secured.address, "/a") == [None]
    for wrong in (
        replace(secured.address, ca=secured.stranger.certificate),
        replace(secured.address, certificate=None, key=None),
        replace(secured.address, ca=Path("/nowhere")),
    ):
        with pytest.raises(UnavailableError):
            await quickly(wrong, "/a")


@contextmanager
def server(*answers: bytes, hangs: bool = False) -> Iterator[EtcdAddress]:
    """Answer each connection with the next of the answers; then close the connection, or never."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        held: list[socket.socket] = []

        def serve() -> None:
            for answer in answers:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                held.append(connection)
                connection.recv(65_536)
                connection.sendall(answer)
                if not hangs:
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            port = listening.getsockname()[1]
            yield EtcdAddress(endpoints=(f"http://127.0.0.1:{port}",))
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for connection in held:
                connection.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x15\x03\x01\x00\x02\x02\x16",
        b"HTTP/1.1 200",
        HEAD + b"Content-Length: 10\r\n\r\n{}",
        HEAD + b"Content-Length: many\r\n\r\n{}",
        HEAD + b"\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",
        HEAD + b"Content-Length: 2\r\n\r\n[]",
        HEAD + b"Content-Length: 2\r\n\r\nno",
        HEAD + b'Content-Length: 13\r\n\r\n{"kvs": [{}]}',
        HEAD + b"X: " + b"y" * 100_000,
        HEAD + b"Content-Length: 99999999999\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffff\r\n{}",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n0\r\n\r\n",
        HEAD + b"".join(b"X-%d: y\r\n" % n for n in range(200)) + b"\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nNot Found",
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 6\r\n\r\n<html>",
    ],
)
def test_a_server_that_is_not_etcd_is_unavailable(answer: bytes) -> None:
    with server(answer) as address, pytest.raises(UnavailableError):
        read(address, "/a")


def test_a_silent_server_times_out() -> None:
    with server(HEAD, hangs=True) as address, pytest.raises(UnavailableError):
        read(address, "/a")


def test_a_slow_answer_to_the_password_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller must not ask again over gRPC: each request costs etcd a bcrypt."""
    monkeypatch.setattr(sync_reader, "_AUTHENTICATE_S", 0.2)
    with server(HEAD, HEAD, hangs=True) as address:
        known = replace(address, endpoints=address.endpoints * 2, username="ann", password="b")
        with pytest.raises(
            SlowStoreError, match=r"to the password within 0\.2 s: it is there but slow"
        ):
            read(known, "/a")


def test_a_closed_connection_is_opened_again() -> None:
    answer = b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    with server(answer, answer) as address:
        assert read(address, "/a", "/b") == [None, None]


def test_the_next_member_is_used_when_one_is_down() -> None:
    answer = HEAD + b"Content-Length: 2\r\n\r\n{}"
    with server(answer) as address:
        away = f"http://127.0.0.1:{free_port()}"
        assert read(replace(address, endpoints=(away, *address.endpoints)), "/a") == [None]


async def _waits() -> None:
    await asyncio.sleep(0)


async def _answers(value: T) -> T:
    return value


def test_run_sync_refuses_coroutines_that_wait() -> None:
    assert run_sync(_answers(3)) == 3
    waiting: Coroutine[Any, Any, None] = _waits()
    with pytest.raises(RuntimeError, match="event loop"):
        run_sync(waiting)
