"""The proxy in front of etcd as a process: who gets through, who is ended, and what strangers cannot use up."""

import asyncio
import contextlib
import resource
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
from cryptography import x509

from identity.authority import load_certificate
from identity.names import Role
from machinery import processes
from machinery.clock import SystemClock
from schemas.trust import RevokedCertificate, TlsMode
from store import codec, keys
from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.port import Put, Transport
from tests.support.etcd import running_etcd
from tests.support.identities import TestAuthority
from tests.support.ports import free_port
from tests.support.waiting import until_async

pytestmark = pytest.mark.etcd
_FILES_OF_MACOS = 256


@dataclass
class Stand:
    """An etcd with its proxy, and a node with a certificate."""

    ca: TestAuthority
    etcd: Transport
    url: str
    pid: int

    def address(self, ca: TestAuthority | None = None, *, name: str = "mac-2") -> EtcdAddress:
        """Return the address with a new certificate of a node."""
        folder = (ca or self.ca).issue(Role.NODE, name)
        return EtcdAddress(
            endpoints=(self.url,),
            ca=self.ca.issue(Role.NODE, "reader").authorities,
            certificate=folder.identity,
            key=folder.identity,
        )

    def revoke(self, identity: str) -> Put:
        leaf = self.ca.leaves[identity]
        entry = RevokedCertificate(
            identity=identity, revoked=SystemClock().now(), not_after=leaf.not_after
        )
        return Put(key=keys.named(keys.REVOKED_PREFIX, leaf.serial), value=codec.encode(entry))


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    ca, port = TestAuthority(tmp_path / "ours"), free_port()
    folder = ca.issue(Role.ETCD, "studio")
    async with running_etcd(tmp_path / "etcd") as etcd:
        store = connect(etcd.address)
        await ca.publish(store, TlsMode.STRICT)
        await store.commit([], [Put(key="/a", value=b"1")])
        proxy = processes.spawn(
            (
                *(sys.executable, "-m", "identity.etcd_proxy", "--etcd", str(etcd.address)),
                *("--identity-dir", str(folder.path), "--listen", f"127.0.0.1:{port}"),
            ),
            log=tmp_path / "proxy.log",
        )
        found = Stand(ca, store, f"https://127.0.0.1:{port}", proxy.record.pid)
        try:
            await until_async(lambda: is_readable(found.address()), what="the proxy")
            yield found
        finally:
            await store.close()
            await processes.end(proxy, SystemClock(), grace_s=10)


async def is_readable(address: EtcdAddress) -> bool:
    """Return whether a new client reads a key within some seconds."""
    transport = connect(address)
    try:
        async with asyncio.timeout(8):
            return await transport.get("/a") is not None
    except (StoreError, TimeoutError):
        return False
    finally:
        await transport.close()


@pytest.mark.parametrize("way", ["grpc", "http"])
async def test_other_machines_need_a_certificate_of_the_fleet(
    stand: Stand, tmp_path: Path, way: Literal["grpc", "http"]
) -> None:
    trusted = replace(stand.address(), transport=way)
    assert await is_readable(trusted)
    assert not await is_readable(replace(trusted, certificate=None, key=None))
    foreign = stand.address(TestAuthority(tmp_path / "stranger"))
    assert not await is_readable(replace(foreign, transport=way))
    server = stand.ca.issue(Role.ETCD, "other").identity
    assert not await is_readable(replace(trusted, certificate=server, key=server))


async def test_a_revoked_certificate_ends_open_watches_and_connects_no_more(stand: Stand) -> None:
    address = stand.address(name="stolen")
    transport = connect(address)
    watch = transport.watch("/a", after_revision=0)
    await anext(watch)
    await stand.etcd.commit([], [stand.revoke(stand.ca.identity(Role.NODE, "stolen").uri)])
    with contextlib.suppress(StoreError):
        async with asyncio.timeout(30):
            async for _ in watch:
                pass
    assert not await is_readable(address)
    assert await is_readable(stand.address())
    await transport.close()


async def test_clients_reconnect_with_certificates_that_were_replaced(
    stand: Stand, tmp_path: Path
) -> None:
    address = stand.address()
    assert address.certificate is not None
    assert address.ca is not None
    transport = connect(address)
    try:
        assert await transport.get("/a") is not None
        renewed = stand.ca.issue(Role.ETCD, "studio")  # in the same folder
        new = load_certificate(renewed.certificate()).serial_number
        stand.ca.issue(Role.NODE, "mac-2")

        async def is_new() -> bool:
            return await served_serial(stand.url, address) == new

        await until_async(is_new, what="the new certificate")
        assert await transport.get("/a") is not None
    finally:
        await transport.close()


async def served_serial(url: str, address: EtcdAddress) -> int:
    context = address.ssl_context()
    host, port = url.removeprefix("https://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(der).serial_number
    finally:
        writer.transport.abort()


def limit_open_files(pid: int, most: int) -> int:
    """Set the open-file limit of a process, and return what it was."""
    if sys.platform == "linux":
        return resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))[0]
    raise OSError("this system does not limit the files of another process")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits another process")
async def test_silent_connections_use_up_no_files(stand: Stand) -> None:
    """With the files of a Mac's shell: strangers hold more connections than there are files, and members get through."""
    before = limit_open_files(stand.pid, _FILES_OF_MACOS)
    assert before >= 4096, "the child was started with the limit of its parent's shell"
    host, port = stand.url.removeprefix("https://").split(":")
    with contextlib.ExitStack() as held:
        for _ in range(_FILES_OF_MACOS + 64):
            held.enter_context(socket.create_connection((host, int(port)), timeout=5))
        assert await is_readable(stand.address())


# From 22 addresses, as fast as a processor can: each connection sends a recorded hello, whose answer costs the server
# a signature, and reads one byte of that.
_FLOOD = """
import asyncio, ssl, sys
outgoing = ssl.MemoryBIO()
context = ssl._create_unverified_context()
try:
    context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
except ssl.SSLWantReadError:
    hello = outgoing.read()
async def hammer(number):
    while True:
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(sys.argv[1]), local_addr=(f"127.0.0.{2 + number % 22}", 0)
            )
            writer.write(hello)
            await reader.read(1)
            writer.transport.abort()
        except OSError:
            await asyncio.sleep(0)
async def main():
    await asyncio.gather(*map(hammer, range(22 * 24)))
asyncio.run(main())
"""


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="a Mac's loopback has one address")
async def test_a_flood_of_handshakes_delays_other_addresses_only(
    stand: Stand, tmp_path: Path
) -> None:
    address, port = stand.address(), stand.url.rpartition(":")[2]
    command = (sys.executable, "-c", _FLOOD, port)
    floods = [processes.spawn(command, log=tmp_path / f"flood{n}.log") for n in range(2)]
    try:
        await asyncio.sleep(3)
        assert [await is_readable(address) for _ in range(6)] == [True] * 6
    finally:
        for flood in floods:
            await processes.end(flood, SystemClock(), grace_s=1)
