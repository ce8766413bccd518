"""A real etcd with TLS and client certificates."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from store.etcd.address import EtcdAddress
from tests.support.ports import free_port
from tests.support.store_certificates import Authority, Identity
from tests.support.store_tcp_etcd import TcpEtcd


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsEtcd:
    """An etcd with TLS, its certificate authority, and an authority that it does not trust."""

    address: EtcdAddress
    ours: Authority
    stranger: Authority

    def with_identity(self, identity: Identity) -> EtcdAddress:
        return replace(self.address, certificate=identity.certificate, key=identity.key)


def secure_flags(authority: Authority, server: Identity) -> tuple[str, ...]:
    return (
        f"--cert-file={server.certificate}",
        f"--key-file={server.key}",
        f"--trusted-ca-file={authority.certificate}",
        "--client-cert-auth",
    )


@asynccontextmanager
async def running_tls_etcd(
    folder: Path, *flags: str, binary: Path | None = None
) -> AsyncIterator[TlsEtcd]:
    authority, stranger = Authority(folder, "ours"), Authority(folder, "stranger")
    server, client = authority.issue("server"), authority.issue("client")
    address = EtcdAddress(
        endpoints=(f"https://127.0.0.1:{free_port()}",),
        ca=authority.certificate,
        certificate=client.certificate,
        key=client.key,
    )
    flags = (*secure_flags(authority, server), *flags)
    async with TcpEtcd(folder, *flags, scheme="https", probe=address, binary=binary):
        yield TlsEtcd(address=address, ours=authority, stranger=stranger)
