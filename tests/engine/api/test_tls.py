"""TLS of an engine's listener on real sockets: the peers that reach it, and how it follows its identity."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.names import Role
from machinery.clock import SystemClock
from schemas.trust import TlsMode
from tests.support.identities import TestAuthority, now
from tests.support.tls_engine import HOST, TlsEngine, on_loop, serving_tls
from tests.support.waiting import until

NODES = frozenset({Role.NODE})
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = GET[:-2] + b"connection: close\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def fleet(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "ours")


@pytest.fixture
def other_fleet(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "theirs")


def client(folder: IdentityFolder) -> ssl.SSLContext:
    return Credentials(folder, SystemClock()).client(NODES).context


def without_identity(fleet: TestAuthority) -> ssl.SSLContext:
    """Return a client that trusts the fleet and has no certificate."""
    context = ssl.create_default_context(cadata=fleet.authority.pem)
    context.check_hostname = False
    return context


@asynccontextmanager
async def connected(engine: TlsEngine, context: ssl.SSLContext | None) -> AsyncIterator[Streams]:
    name = None if context is None else engine.credentials.identity.dns_name
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(
            HOST, engine.port, ssl=context, server_hostname=name
        )
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


async def answer(engine: TlsEngine, context: ssl.SSLContext | None, sent: bytes = LAST) -> bytes:
    """Return all that comes until the engine closes; empty if it refuses the connection."""
    try:
        async with connected(engine, context) as (reader, writer):
            writer.write(sent)
            return await reader.read()
    except (ConnectionError, ssl.SSLError):
        return b""


@on_loop
async def test_gateways_and_its_own_agent_reach_an_engine(fleet: TestAuthority) -> None:
    async with serving_tls(fleet.issue(Role.NODE, "mac-1")) as engine:
        for folder in (fleet.issue(Role.GATEWAY, "edge"), engine.credentials.folder):
            assert (await answer(engine, client(folder))).startswith(b"HTTP/1.1 200")
        assert (await answer(engine, client(folder), POST)).startswith(b"HTTP/1.1 200")
        assert engine.reached == 1
        assert engine.refused == {}


Stranger = Callable[[TestAuthority, TestAuthority], ssl.SSLContext]


def _none(fleet: TestAuthority, _: TestAuthority) -> ssl.SSLContext:
    return without_identity(fleet)


def _foreign_authority(fleet: TestAuthority, other: TestAuthority) -> ssl.SSLContext:
    context = without_identity(fleet)
    context.load_cert_chain(other.issue(Role.GATEWAY, "edge").identity)
    return context


def _other_fleet_of_the_same_authority(fleet: TestAuthority, _: TestAuthority) -> ssl.SSLContext:
    """Return a gateway of another fleet whose certificate our authority signed, as an external one may."""
    twin = TestAuthority(fleet.root / "twin", fleet.authority, fleet="f" * 32)
    context = without_identity(fleet)
    context.load_cert_chain(twin.issue(Role.GATEWAY, "edge").identity)
    return context


def _expired(fleet: TestAuthority, _: TestAuthority) -> ssl.SSLContext:
    return client(fleet.issue(Role.GATEWAY, "old", start=now() - timedelta(days=31)))


def _revoked(fleet: TestAuthority, _: TestAuthority) -> ssl.SSLContext:
    sslcontext = client(fleet.issue(Role.GATEWAY, "thief"))
    revoked = (fleet.leaves[fleet.identity(Role.GATEWAY, "thief").uri].serial,)
    IdentityFolder(fleet.root / "node-mac-1").write_trust(fleet.snapshot(revoked=revoked))
    return sslcontext


def _role(role: Role) -> Stranger:
    return lambda fleet, _: client(fleet.issue(role, "mac-2"))


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        pytest.param(_none, "NoCertificate", id="no-certificate"),
        pytest.param(_foreign_authority, "UntrustedCertificate", id="foreign-authority"),
        pytest.param(_other_fleet_of_the_same_authority, "OtherFleet", id="other-fleet"),
        pytest.param(_expired, "Expired", id="expired"),
        pytest.param(_revoked, "Revoked", id="revoked"),
        pytest.param(_role(Role.NODE), "OtherNode", id="another-node"),
        pytest.param(_role(Role.RECONCILER), "WrongRole", id="reconciler"),
        pytest.param(_role(Role.ADMIN), "WrongRole", id="admin"),
        pytest.param(_role(Role.ETCD), "WrongRole", id="etcd"),
    ],
)
@on_loop
async def test_nobody_else_reaches_an_engine(
    fleet: TestAuthority, other_fleet: TestAuthority, stranger: Stranger, reason: str
) -> None:
    folder = fleet.issue(Role.NODE, "mac-1")
    context = stranger(fleet, other_fleet)
    async with serving_tls(folder) as engine:
        assert await answer(engine, context, POST) == b""
        await until(lambda: engine.refused == {reason: 1}, what=f"{reason} in {engine.refused}")
        assert engine.reached == 0


def has_mode(engine: TlsEngine, mode: TlsMode) -> bool:
    return engine.credentials.mode is mode


@on_loop
async def test_plain_connections_are_served_until_the_mode_is_strict(fleet: TestAuthority) -> None:
    folder = fleet.issue(Role.NODE, "mac-1")
    context = client(fleet.issue(Role.GATEWAY, "edge"))
    async with serving_tls(folder) as engine:
        for mode in (TlsMode.PERMISSIVE, TlsMode.TLS, TlsMode.STRICT, TlsMode.PERMISSIVE):
            folder.write_trust(fleet.snapshot(mode=mode))
            await until(partial(has_mode, engine, mode), what=mode)
            status = b"503" if mode is TlsMode.STRICT else b"200"
            assert (await answer(engine, None)).startswith(b"HTTP/1.1 " + status), mode
            assert (await answer(engine, context)).startswith(b"HTTP/1.1 200"), mode
        assert engine.refused == {"Plain": 1}


@on_loop
async def test_standing_plain_connections_end_after_their_request_when_the_mode_becomes_strict(
    fleet: TestAuthority,
) -> None:
    folder = fleet.issue(Role.NODE, "mac-1")
    async with (
        serving_tls(folder) as engine,
        connected(engine, None) as (idle, writer),
        connected(engine, None) as (busy, busy_writer),
    ):
        writer.write(GET)
        assert b"200" in await idle.readline()
        busy_writer.write(STREAM)
        assert b"200" in await busy.readline()
        folder.write_trust(fleet.snapshot(mode=TlsMode.STRICT))
        async with asyncio.timeout(5.0):
            assert (await idle.read()).endswith(b"{}")
        assert await busy.readline()
        assert not busy.at_eof()


@on_loop
async def test_a_revoked_peer_loses_its_connections_and_gets_no_new_one(
    fleet: TestAuthority,
) -> None:
    folder, thief = fleet.issue(Role.NODE, "mac-1"), fleet.issue(Role.GATEWAY, "thief")
    context, other = client(thief), client(fleet.issue(Role.GATEWAY, "edge"))
    loop = asyncio.get_running_loop()
    async with (
        serving_tls(folder) as engine,
        connected(engine, context) as (reader, writer),
        connected(engine, other) as (stays, other_writer),
    ):
        for stream_writer in (writer, other_writer):
            stream_writer.write(STREAM)
        assert b"200" in await reader.readline()
        assert b"200" in await stays.readline()
        revoked = (fleet.leaves[fleet.identity(Role.GATEWAY, "thief").uri].serial,)
        began_s = loop.time()
        folder.write_trust(fleet.snapshot(revoked=revoked))
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
        assert loop.time() - began_s < 5.0
        assert await answer(engine, context) == b""
        assert (await answer(engine, other)).startswith(b"HTTP/1.1 200")
        assert await stays.readline()
        assert engine.refused == {"Revoked": 1}
        assert engine.metrics.closed.value("Revoked") == 1


@on_loop
async def test_a_renewed_certificate_is_served_without_a_restart(fleet: TestAuthority) -> None:
    folder = fleet.issue(Role.NODE, "mac-1")
    context = client(fleet.issue(Role.GATEWAY, "edge"))
    async with serving_tls(folder) as engine, connected(engine, context) as (reader, writer):
        writer.write(GET)
        assert b"200" in await reader.readline()
        end_s = engine.metrics.certificate_end_s
        fleet.issue(Role.NODE, "mac-1", lifetime=timedelta(days=60))
        await until(lambda: engine.metrics.certificate_end_s > end_s, what="the new certificate")
        async with connected(engine, context) as (_, new):
            found = new.get_extra_info("ssl_object").getpeercert()
            assert int(found["serialNumber"], 16) == int(
                fleet.leaves[fleet.identity(Role.NODE, "mac-1").uri].serial, 16
            )
        writer.write(GET)
        while b"HTTP/1.1 200" not in await reader.readline():
            pass


@on_loop
async def test_an_expired_gateway_is_served_while_the_store_is_away(fleet: TestAuthority) -> None:
    folder = fleet.issue(Role.NODE, "mac-1")
    folder.write_trust(fleet.snapshot(seen=now() - timedelta(days=16)))
    context = client(fleet.issue(Role.GATEWAY, "edge", start=now() - timedelta(days=36)))
    async with serving_tls(folder) as engine:
        assert (await answer(engine, context)).startswith(b"HTTP/1.1 200")
        assert engine.metrics.count_expired() == 1
