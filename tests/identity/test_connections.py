"""TLS connections between identities on real sockets: who is refused, and with which reason."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.names import Role
from identity.peers import PeerError, peer_of
from machinery.clock import SystemClock
from tests.support.identities import TestAuthority, now
from tests.support.tcp_server import tcp_server

NODES, GATEWAYS = frozenset({Role.NODE}), frozenset({Role.GATEWAY})


@pytest.fixture
def fleet(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "a")


@pytest.fixture
def other_fleet(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "b")


class Server:
    """An engine's listener: it answers a line with the identity of its sender."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self.peers = credentials.server(GATEWAYS)
        self.port = 0

    @asynccontextmanager
    async def listen(self) -> AsyncIterator["Server"]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = peer_of(writer.get_extra_info("ssl_object"))
            await reader.readline()
            writer.write(f"{peer and peer.identity.uri}\n".encode())

        async with tcp_server(serve, context=self.peers.context) as self.port:
            yield self


async def ask(port: int, context: ssl.SSLContext, server_name: str) -> str:
    """Return the server's answer, empty if it refuses."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname=server_name
    )
    try:
        writer.write(b"hello\n")
        await writer.drain()
        return (await reader.readline()).decode().strip()
    except (ConnectionError, ssl.SSLError):
        return ""
    finally:
        writer.close()


def gateway(folder: IdentityFolder) -> ssl.SSLContext:
    return Credentials(folder, SystemClock()).client(NODES).context


def plain_client(fleet: TestAuthority) -> ssl.SSLContext:
    """Return a client that trusts the authority and has no certificate."""
    context = ssl.create_default_context(cadata=fleet.authority.pem)
    context.check_hostname = False
    return context


async def test_the_right_gateway_reaches_the_right_node(fleet: TestAuthority) -> None:
    node = Credentials(fleet.issue(Role.NODE, "mac-1"), SystemClock())
    folder = fleet.issue(Role.GATEWAY, "edge")
    async with Server(node).listen() as server:
        answer = await ask(server.port, gateway(folder), node.identity.dns_name)
    assert answer == fleet.identity(Role.GATEWAY, "edge").uri


Client = Callable[[TestAuthority, TestAuthority], ssl.SSLContext]


def _revoked(fleet: TestAuthority, _: TestAuthority) -> ssl.SSLContext:
    folder = fleet.issue(Role.GATEWAY, "thief")
    leaf = fleet.leaves[fleet.identity(Role.GATEWAY, "thief").uri]
    IdentityFolder(fleet.root / "node-mac-1").write_trust(fleet.snapshot(revoked=(leaf.serial,)))
    return gateway(folder)


def _foreign(fleet: TestAuthority, other: TestAuthority) -> ssl.SSLContext:
    """Return a gateway of another fleet that trusts this one."""
    folder = other.issue(Role.GATEWAY, "edge")
    folder.write_authorities(fleet.authority.pem)
    context = plain_client(fleet)
    context.load_cert_chain(folder.identity)
    return context


def _expired(fleet: TestAuthority, _: TestAuthority) -> ssl.SSLContext:
    start = now() - timedelta(days=31)
    return gateway(fleet.issue(Role.GATEWAY, "old", start=start))


def _node(fleet: TestAuthority, _: TestAuthority) -> ssl.SSLContext:
    return gateway(fleet.issue(Role.NODE, "mac-2"))


def _none(fleet: TestAuthority, _: TestAuthority) -> ssl.SSLContext:
    return plain_client(fleet)


@pytest.mark.parametrize(("client", "reason"), [
    (_none, ""), (_foreign, ""), (_expired, "Expired"), (_revoked, "Revoked"), (_node, "WrongRole"),
])  # fmt: skip
async def test_everyone_else_is_refused(
    fleet: TestAuthority, other_fleet: TestAuthority, client: Client, reason: str
) -> None:
    folder = fleet.issue(Role.NODE, "mac-1")
    context = client(fleet, other_fleet)
    node = Credentials(folder, SystemClock())
    async with Server(node).listen() as server:
        assert await ask(server.port, context, node.identity.dns_name) == ""
        if reason:
            assert server.peers.verifier.refused == {reason: 1}


async def test_a_node_cannot_answer_for_another(fleet: TestAuthority) -> None:
    thief = Credentials(fleet.issue(Role.NODE, "mac-2"), SystemClock())
    folder = fleet.issue(Role.GATEWAY, "edge")
    wanted = fleet.identity(Role.NODE, "mac-1").dns_name
    async with Server(thief).listen() as server:
        with pytest.raises(ssl.SSLCertVerificationError, match="mac-1"):
            await ask(server.port, gateway(folder), wanted)


async def test_server_with_right_name_and_the_wrong_role_is_refused(fleet: TestAuthority) -> None:
    admin = Credentials(fleet.issue(Role.ADMIN, "mac-1"), SystemClock())
    folder = fleet.issue(Role.GATEWAY, "edge")
    async with Server(admin).listen() as server:
        with pytest.raises(PeerError, match="expected node"):
            await ask(server.port, gateway(folder), admin.identity.dns_name)


async def test_a_renewed_certificate_is_used_without_a_restart(fleet: TestAuthority) -> None:
    node = Credentials(fleet.issue(Role.NODE, "mac-1"), SystemClock())
    client = Credentials(fleet.issue(Role.GATEWAY, "edge"), SystemClock())
    contexts = client.client(NODES)
    before = contexts.context
    fleet.issue(Role.GATEWAY, "edge")
    client.refresh()
    assert contexts.context is not before
    async with Server(node).listen() as server:
        assert await ask(server.port, contexts.context, node.identity.dns_name)


async def test_expired_certificates_are_accepted_for_seven_days_while_the_store_is_away(
    fleet: TestAuthority,
) -> None:
    folder = fleet.issue(Role.NODE, "mac-1")
    node = Credentials(folder, SystemClock())
    client = Credentials(
        fleet.issue(Role.GATEWAY, "edge", start=now() - timedelta(days=36)), SystemClock()
    )
    context = client.client(NODES).context
    async with Server(node).listen() as server:
        folder.write_trust(fleet.snapshot(seen=now() - timedelta(days=16)))
        node.refresh()
        assert await ask(server.port, context, node.identity.dns_name)
        assert server.peers.verifier.expired == 1
        folder.write_trust(fleet.snapshot(seen=now()))
        node.refresh()
        assert not await ask(server.port, context, node.identity.dns_name)
    assert server.peers.verifier.refused == {"Expired": 1}
