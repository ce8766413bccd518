"""Tests of `store.etcd.address`: TLS through both adapters, client certificates, and errors that name the cause."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from store.errors import PermissionDeniedError, StoreError, UnavailableError
from store.etcd import users
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.port import Put
from tests.support.store_binaries import BINARIES
from tests.support.store_guarded_etcd import guard
from tests.support.store_tcp_etcd import TcpEtcd
from tests.support.store_tls import TlsEtcd, running_tls_etcd
from tests.support.tcp_server import tcp_server

pytestmark = pytest.mark.etcd

# Three attempts to connect, on a busy machine; nothing may hang.
_LIMIT_S = 10.0


@pytest.fixture(scope="module", params=BINARIES)
async def secured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TlsEtcd]:
    """An etcd with TLS: versions refuse a certificate with different alerts."""
    async with running_tls_etcd(tmp_path_factory.mktemp("tls"), binary=request.param) as etcd:
        yield etcd


def by(way: str, address: EtcdAddress) -> EtcdAddress:
    return replace(address, transport="http" if way == "http" else "grpc")


async def test_a_client_certificate_is_accepted(secured: TlsEtcd, way: str) -> None:
    async with AsyncExitStack() as stack:
        transport = connect(by(way, secured.address))
        stack.push_async_callback(transport.close)
        revision = await transport.commit([], [Put(key="/tls/a", value=b"1")])
        async with aclosing(transport.watch("/tls/", after_revision=revision - 1)) as watch:
            batch = await anext(watch)
            while not batch.changes:  # batches without changes report progress
                batch = await anext(watch)
            assert [change.key for change in batch.changes] == ["/tls/a"]
        assert await transport.keep_alive(await transport.grant(10)) > 0


async def refusal(address: EtcdAddress) -> str:
    """Return the error of a write; it must not be applied, and neither it nor a watch may hang."""
    transport = connect(address)
    try:
        async with asyncio.timeout(_LIMIT_S):
            with pytest.raises(StoreError) as refused:
                await transport.commit([], [Put(key="/tls/b", value=b"1")])
            with pytest.raises(StoreError):
                await anext(transport.watch("/tls/", after_revision=0))
    finally:
        await transport.close()
    assert isinstance(refused.value, UnavailableError)
    return str(refused.value)


Change = Callable[[TlsEtcd], EtcdAddress]


def _with_url(secured: TlsEtcd, old: str, new: str) -> EtcdAddress:
    return replace(secured.address, endpoints=(secured.address.endpoints[0].replace(old, new),))


WRONG: dict[str, tuple[Change, str]] = {
    "host name": (lambda s: _with_url(s, "127.0.0.1", "localhost"), "hostname mismatch"),
    "no client certificate": (
        lambda s: replace(s.address, certificate=None, key=None),
        "client certificate",
    ),
    "another's certificate": (
        lambda s: s.with_identity(s.stranger.issue("strange")),
        "client certificate",
    ),
    "an expired certificate": (
        lambda s: s.with_identity(s.ours.issue("expired", is_expired=True)),
        "client certificate",
    ),
    "another's authority": (
        lambda s: replace(s.address, ca=s.stranger.certificate),
        "certificate verify failed: .*--etcd-ca",
    ),
    "no authority": (
        lambda s: replace(s.address, ca=None),
        "certificate verify failed: .*--etcd-ca",
    ),
    "no such file": (
        lambda s: replace(s.address, ca=Path("/nowhere.pem")),
        "certificate files cannot be used",
    ),
    "not a certificate": (
        lambda s: replace(s.address, ca=s.stranger.issue("key").key),
        "certificate files cannot be used",
    ),
    "a key of another": (
        lambda s: replace(s.address, key=s.stranger.issue("other").key),
        "certificate files cannot be used",
    ),
    "plain http": (lambda s: _with_url(s, "https", "http"), "https"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_invalid_tls_settings_are_refused_with_a_reason(
    secured: TlsEtcd, way: str, what: str
) -> None:
    change, words = WRONG[what]
    said = await refusal(by(way, change(secured)))
    assert _says(said, words), said
    whole = connect(secured.address)
    assert await whole.get("/tls/b") is None
    await whole.close()


def _says(said: str, words: str) -> bool:
    *firsts, last = words.split(".*")
    return all(part in said for part in (*firsts, last))


async def test_an_expired_server_certificate_is_named(secured: TlsEtcd, way: str) -> None:
    old = secured.ours.issue("old-server", is_expired=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(old.certificate, old.key)

    async def close(_reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        return

    async with tcp_server(close, context=context) as port:
        said = await refusal(
            by(way, replace(secured.address, endpoints=(f"https://127.0.0.1:{port}",)))
        )
    assert "expired or not yet valid" in said


async def test_a_server_without_tls_is_named(secured: TlsEtcd, way: str, tmp_path: Path) -> None:
    async with TcpEtcd(tmp_path) as plain:
        url = plain.url.replace("http", "https")
        said = await refusal(by(way, replace(secured.address, endpoints=(url,))))
    assert "http://" in said


async def test_a_server_that_never_completes_the_handshake_times_out(
    secured: TlsEtcd, way: str
) -> None:
    async def mute(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with tcp_server(mute) as port:
        url = f"https://127.0.0.1:{port}"
        said = await refusal(by(way, replace(secured.address, endpoints=(url,))))
    assert url in said


@pytest.fixture(scope="module", params=BINARIES)
async def with_users(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TlsEtcd]:
    """An etcd with TLS, client certificates and the fleet's users."""
    folder = tmp_path_factory.mktemp("cn")
    async with running_tls_etcd(folder, "--bcrypt-cost=4", binary=request.param) as etcd:
        await guard(etcd.address, folder / "passwords")
        yield etcd


MINE, THEIRS = "/mlx-fleet/v1/rank/mac-1/a/0", "/mlx-fleet/v1/rank/mac-2/a/0"


async def test_over_grpc_the_common_name_is_the_user(with_users: TlsEtcd) -> None:
    """A property of etcd: the certificate's common name selects the user and its roles."""
    agent = with_users.ours.issue("agent", cn="fleet-node-mac-1")
    transport = connect(with_users.with_identity(agent))
    await transport.commit([], [Put(key=MINE, value=b"1")])
    async with aclosing(transport.watch("/mlx-fleet/v1/rank/mac-1/", after_revision=0)) as watch:
        await anext(watch)
    with pytest.raises(PermissionDeniedError, match="permission denied"):
        await transport.commit([], [Put(key=THEIRS, value=b"1")])
    await transport.close()


async def test_over_http_a_certificate_with_a_common_name_is_refused(with_users: TlsEtcd) -> None:
    """A property of etcd: its JSON gateway does not accept a common name as user, nor beside a password."""
    agent = with_users.ours.issue("agent", cn="fleet-node-mac-1")
    transport = connect(by("http", with_users.with_identity(agent)))
    with pytest.raises(StoreError, match="CommonName"):
        await transport.get(MINE)
    await transport.close()


async def test_without_a_common_name_the_password_authenticates(
    with_users: TlsEtcd, way: str
) -> None:
    who = mac_2(with_users)
    address = replace(with_users.address, username=who.user, password=who.password)
    transport = connect(by(way, address))
    await transport.commit([], [Put(key=THEIRS, value=b"1")])
    with pytest.raises(PermissionDeniedError):
        await transport.commit([], [Put(key=MINE, value=b"1")])
    await transport.close()


def mac_2(secured: TlsEtcd) -> users.Credentials:
    return users.read_credentials(secured.ours.certificate.parent / "passwords" / "node-mac-2.env")
