"""TLS to etcd: with a client certificate, and with names that are checked."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from store.address import EtcdAddress
from store.errors import UnavailableError
from store.etcd import connect
from store.port import Put
from tests.store.certificates import Authority
from tests.store.tcp_etcd import TcpEtcd, free_port

pytestmark = pytest.mark.etcd


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    address: EtcdAddress
    stranger: Authority


@pytest.fixture(scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    authority, stranger = Authority(folder, "ours"), Authority(folder, "stranger")
    server, client = authority.issue("server"), authority.issue("client")
    address = EtcdAddress(
        endpoints=(f"https://127.0.0.1:{free_port()}",),
        ca=authority.certificate,
        certificate=client.certificate,
        key=client.key,
    )
    flags = (
        f"--cert-file={server.certificate}",
        f"--key-file={server.key}",
        f"--trusted-ca-file={authority.certificate}",
        "--client-cert-auth",
    )
    async with TcpEtcd(folder, *flags, scheme="https", probe=address):
        yield Secured(address=address, stranger=stranger)


async def test_a_client_certificate_opens_the_door(secured: Secured) -> None:
    transport = connect(secured.address)
    revision = await transport.commit([], [Put(key="/tls/a", value=b"1")])
    watch = transport.watch("/tls/", after_revision=revision - 1)
    await anext(watch)
    assert [change.key for change in (await anext(watch)).changes] == ["/tls/a"]
    await watch.aclose()
    await transport.close()


async def test_what_is_wrong_is_refused_and_said(secured: Secured) -> None:
    strangers = secured.stranger.issue("strange")
    localhost = secured.address.endpoints[0].replace("127.0.0.1", "localhost")
    tries = {
        "host name": replace(secured.address, endpoints=(localhost,)),
        "no client certificate": replace(secured.address, certificate=None, key=None),
        "another's certificate": replace(
            secured.address, certificate=strangers.certificate, key=strangers.key
        ),
        "another's authority": replace(secured.address, ca=secured.stranger.certificate),
        "no authority": replace(secured.address, ca=None),
        "no such file": replace(secured.address, ca=Path("/nowhere.pem")),
        "not a certificate": replace(secured.address, ca=strangers.key),
    }
    said = {}
    for what, address in tries.items():
        transport = connect(address)
        with pytest.raises(UnavailableError) as refused:
            await transport.commit([], [Put(key="/tls/b", value=b"1")])
        with pytest.raises(UnavailableError):
            await anext(transport.watch("/tls/", after_revision=0))
        await transport.close()
        said[what] = str(refused.value)
    assert "localhost" in said["host name"].lower()
    assert "hostname mismatch" in said["host name"].lower()
    assert "certificate verify failed" in said["another's authority"].lower()
    for files in ("no such file", "not a certificate"):
        assert "certificate files cannot be used" in said[files]
    assert await only(secured, "/tls/b") is None


async def only(secured: Secured, key: str) -> object:
    transport = connect(secured.address)
    try:
        return await transport.get(key)
    finally:
        await transport.close()
