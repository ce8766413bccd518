"""TLS servers: certificates that change on disk, and the limits of handshakes on real sockets."""

import asyncio
import shutil
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from typing_extensions import override

from machinery.clock import SystemClock
from machinery.http_server import listen
from machinery.tls_server import (
    CertificateError,
    ServerCertificate,
    TlsListener,
    TlsOptions,
)
from tests.support.store_certificates import Authority, Identity
from tests.support.waiting import until, until_async

HOST = "127.0.0.1"
REFUSAL = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the test on the event loop of the gateway, whose TLS differs from asyncio's."""

    @wraps(test)
    def run(*args: Any, **options: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*args, **options))

    return run


class QuickClock(SystemClock):
    """A clock on which files are looked at fifty times a second."""

    @override
    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 50)


class Echo(asyncio.Protocol):
    """Sends back what it gets."""

    @override
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Server:
    """A TLS listener that echoes, with its files."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder, "ours")
        self.files = self.authority.issue("server")
        self.certificate = ServerCertificate(self.files.certificate, self.files.key)
        self.client = ssl.create_default_context(cafile=self.authority.certificate)
        self.port = 0
        self.shed = 0

    def count_shed(self) -> None:
        self.shed += 1

    def install(self, identity: Identity) -> None:
        """Replace both files, one after the other, as an administrator would."""
        shutil.copyfile(identity.certificate, self.files.certificate)
        shutil.copyfile(identity.key, self.files.key)

    async def serial(self) -> int:
        """Return the serial number of the certificate that a new connection gets."""
        async with self.connection() as (_, writer):
            found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            return x509.load_der_x509_certificate(found).serial_number

    @asynccontextmanager
    async def connection(
        self, **options: Any
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        async with asyncio.timeout(20):
            options = {"ssl": self.client, **options}
            reader, writer = await asyncio.open_connection(HOST, self.port, **options)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def echoes(self) -> bool:
        async with self.connection() as (reader, writer), asyncio.timeout(20):
            writer.write(b"hello")
            return await reader.readexactly(5) == b"hello"


@asynccontextmanager
async def running_server(folder: Path, **options: Any) -> AsyncIterator[Server]:
    server = Server(folder)
    with listen(HOST, 0) as sock:
        server.port = sock.getsockname()[1]
        made = TlsOptions(
            certificate=server.certificate,
            plain_response=REFUSAL,
            on_shed=server.count_shed,
            **options,
        )
        listener = TlsListener(sock, Echo, made)
        try:
            yield server
        finally:
            listener.close()
            await listener.wait_closed()


@on_uvloop
async def test_tls_1_3_by_default_and_1_2_with_forward_secrecy(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        async with server.connection() as (_, writer):
            assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        server.client.maximum_version = ssl.TLSVersion.TLSv1_2
        async with server.connection() as (_, writer):
            name, version, _ = writer.get_extra_info("cipher")
            assert version == "TLSv1.2"
            assert name.startswith("ECDHE-")
            assert "GCM" in name or "CHACHA20" in name


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
@pytest.mark.parametrize(("version", "ciphers"), [
    pytest.param(ssl.TLSVersion.TLSv1_1, "ALL:@SECLEVEL=0", id="tls-1.1"),
    pytest.param(ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES128-SHA:@SECLEVEL=0", id="cbc"),
])  # fmt: skip
@on_uvloop
async def test_old_versions_and_ciphers_are_refused(
    tmp_path: Path, version: ssl.TLSVersion, ciphers: str
) -> None:
    async with running_server(tmp_path) as server:
        server.client.minimum_version = version
        server.client.maximum_version = version
        server.client.set_ciphers(ciphers)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await server.echoes()


@pytest.mark.parametrize(("group", "is_accepted"), [
    ("ffdhe8192", False), ("ffdhe2048", False), ("prime256v1", True),
])  # fmt: skip
@on_uvloop
async def test_costly_groups_are_refused(tmp_path: Path, group: str, *, is_accepted: bool) -> None:
    async with running_server(tmp_path) as server:
        try:
            server.client.set_ecdh_curve(group)
        except ValueError:
            pytest.skip(f"this OpenSSL's client has no {group}")
        try:
            assert await server.echoes() is is_accepted
        except (ssl.SSLError, ConnectionError):
            assert not is_accepted


@on_uvloop
async def test_plain_http_gets_an_answer(tmp_path: Path) -> None:
    async with (
        running_server(tmp_path) as server,
        server.connection(ssl=None) as (reader, writer),
        asyncio.timeout(20),
    ):
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.read() == REFUSAL


@on_uvloop
async def test_a_client_that_never_finishes_its_handshake_is_disconnected(tmp_path: Path) -> None:
    async with running_server(tmp_path, handshake_s=0.1) as server, asyncio.timeout(20):
        for sent in (b"", b"\x16\x03\x01"):
            async with server.connection(ssl=None) as (reader, writer):
                writer.write(sent)
                assert await reader.read() == b""


@on_uvloop
async def test_the_oldest_unfinished_handshakes_give_way(tmp_path: Path) -> None:
    async with (
        running_server(tmp_path, unfinished_handshakes=4) as server,
        AsyncExitStack() as all_,
    ):
        readers = []
        for number in range(12):
            reader, writer = await all_.enter_async_context(server.connection(ssl=None))
            writer.write(b"\x16\x03\x01" if number % 2 else b"")
            readers.append(reader)
        await until(lambda: server.shed == 8, what="room for four")
        assert await server.echoes()
        assert server.shed == 9
        async with asyncio.timeout(20):
            assert [await reader.read() for reader in readers[:9]] == [b""] * 9
        assert not any(reader.at_eof() for reader in readers[9:])


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac's loopback has one address")
@on_uvloop
async def test_the_address_with_most_unfinished_handshakes_gives_way(tmp_path: Path) -> None:
    async with (
        running_server(tmp_path, unfinished_handshakes=4) as server,
        AsyncExitStack() as all_,
    ):
        first, _ = await all_.enter_async_context(server.connection(ssl=None))
        for _ in range(12):
            flood = server.connection(ssl=None, local_addr=("127.0.0.2", 0))
            await all_.enter_async_context(flood)
        await until(lambda: server.shed == 9, what="room for four")
        assert await server.echoes()
        assert not first.at_eof()


@on_uvloop
async def test_changed_files_are_loaded_and_connections_stay(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server, asyncio.TaskGroup() as group:
        watch = group.create_task(server.certificate.watch(QuickClock()))
        first = await server.serial()
        async with server.connection() as (reader, writer):
            server.install(server.authority.issue("next"))

            async def is_new() -> bool:
                return await server.serial() != first

            await until_async(is_new, what="the new certificate", limit_s=20)
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
        watch.cancel()


@on_uvloop
async def test_files_that_cannot_be_used_are_logged_and_the_old_ones_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_server(tmp_path) as server, asyncio.TaskGroup() as group:
        watch = group.create_task(server.certificate.watch(QuickClock()))
        first, other = await server.serial(), server.authority.issue("next")

        def refused(word: str) -> bool:
            return any(word in str(getattr(record, "why", "")) for record in caplog.records)

        shutil.copyfile(other.certificate, server.files.certificate)
        await until(lambda: refused("does not belong to"), what="the wrong key", limit_s=20)
        server.files.key.write_text("no key")
        await until(lambda: refused("expected -----BEGIN"), what="the wrong text", limit_s=20)
        server.files.key.unlink()
        await until(lambda: refused("No such file"), what="the missing file", limit_s=20)
        assert await server.serial() == first
        # The files are whole again, but the key is open to all.
        shutil.copyfile(other.key, server.files.key)
        server.files.key.chmod(0o644)
        await until(lambda: refused("chmod 600"), what="the open key", limit_s=20)
        assert await server.serial() == first
        server.files.key.chmod(0o600)

        async def is_new() -> bool:
            return await server.serial() != first

        await until_async(is_new, what="the new certificate", limit_s=20)
        watch.cancel()


def test_an_encrypted_key_is_refused_without_a_question(tmp_path: Path) -> None:
    files = Authority(tmp_path, "ours").issue("server")
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    files.key.write_bytes(locked)
    with pytest.raises(CertificateError, match="is encrypted"):
        ServerCertificate(files.certificate, files.key)


def test_a_folder_is_no_certificate(tmp_path: Path) -> None:
    files = Authority(tmp_path, "ours").issue("server")
    with pytest.raises(CertificateError, match="is not a file"):
        ServerCertificate(tmp_path, files.key)
