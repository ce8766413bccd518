"""Connections to engines over TLS: who may answer, what a refusal looks like, and connections that are ready before requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from gateway.upstream.call import UnreachableError
from gateway.upstream.connection_pool import ConnectionPool
from gateway.upstream.tls import EngineTls
from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.names import Role
from machinery.clock import SystemClock
from schemas.wire.engine_address import EngineAddress
from tests.support.identities import TestAuthority, now
from tests.support.tls_engine import HOST, TlsEngine, on_loop, serving_tls
from tests.support.waiting import until

REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 2\r\n\r\n{}"
)


@pytest.fixture
def fleet(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "ours")


@asynccontextmanager
async def pooled(folder: IdentityFolder) -> AsyncIterator[ConnectionPool]:
    credentials = Credentials(folder, SystemClock())
    pool = ConnectionPool(SystemClock(), silence_s=20.0, tls=EngineTls(credentials))
    credentials.on_change(pool.close_revoked)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in (pool.run(), credentials.watch())]
        try:
            yield pool
        finally:
            for task in tasks:
                task.cancel()
            pool.close()


def address(engine: TlsEngine, node: str = "mac-1") -> EngineAddress:
    return EngineAddress(HOST, engine.port, "", node)


async def ask(pool: ConnectionPool, origin: EngineAddress) -> int:
    response = await pool.request(origin, REQUEST)
    while await response.read():
        pass
    response.close()
    return response.status


def failures(pool: ConnectionPool, reason: str) -> int:
    return pool.tls_failures.value(reason)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_connection_is_open_before_the_first_request_and_another_before_the_next(
    fleet: TestAuthority, loop: str
) -> None:
    async def run() -> None:
        async with (
            serving_tls(fleet.issue(Role.NODE, "mac-1")) as engine,
            pooled(fleet.issue(Role.GATEWAY, "edge")) as pool,
        ):
            pool.set_engines([address(engine)])
            await until(lambda: pool.connections() == 1, what="a spare connection")
            assert (
                await asyncio.gather(*(ask(pool, address(engine)) for _ in range(2))) == [200] * 2
            )
            await until(lambda: pool.connections() >= 2, what="the next spare connection")
            before = pool.connections()
            assert [await ask(pool, address(engine)) for _ in range(5)] == [200] * 5
            assert pool.connections() == before
            assert engine.reached == 7

    on_loop(run, loop)()


@on_loop
async def test_another_node_cannot_answer(fleet: TestAuthority) -> None:
    async with (
        serving_tls(fleet.issue(Role.NODE, "mac-2")) as thief,
        pooled(fleet.issue(Role.GATEWAY, "edge")) as pool,
    ):
        assert (
            await ask(pool, address(thief, "mac-2")) == 200
        )  # this connection stays, and is not used
        with pytest.raises(UnreachableError, match=r"TLS: .*mac-1"):
            await ask(pool, address(thief, "mac-1"))
        assert failures(pool, "UntrustedCertificate") == 1
        assert thief.reached == 1


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_refusal_after_the_handshake_counts_as_unreachable(
    fleet: TestAuthority, loop: str
) -> None:
    async def run() -> None:
        expired = fleet.issue(Role.GATEWAY, "old", start=now() - timedelta(days=31))
        async with serving_tls(fleet.issue(Role.NODE, "mac-1")) as engine, pooled(expired) as pool:
            with pytest.raises(UnreachableError, match="refused the connection after its TLS"):
                await ask(pool, address(engine))
            assert failures(pool, "ClosedByEngine") == 1
            assert engine.refused == {"Expired": 1}
            pool.set_engines([address(engine)])
            await until(lambda: failures(pool, "ClosedByEngine") == 2, what="the refused spare")
            assert engine.reached == 0

    on_loop(run, loop)()


@on_loop
async def test_connections_to_a_revoked_node_are_closed(fleet: TestAuthority) -> None:
    node, edge = fleet.issue(Role.NODE, "mac-1"), fleet.issue(Role.GATEWAY, "edge")
    async with serving_tls(node) as engine, pooled(edge) as pool:
        get = b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n"
        response = await pool.request(address(engine), get)
        assert await response.read()
        revoked = (fleet.leaves[fleet.identity(Role.NODE, "mac-1").uri].serial,)
        edge.write_trust(fleet.snapshot(revoked=revoked))
        await until(lambda: pool.connections() == 0, limit_s=5.0, what="no connection")
        with pytest.raises(UnreachableError, match="revoked"):
            await ask(pool, address(engine))
        assert failures(pool, "Revoked") == 2


@on_loop
async def test_without_an_identity_an_engine_with_tls_is_unreachable(fleet: TestAuthority) -> None:
    pool = ConnectionPool(SystemClock(), silence_s=20.0)
    async with serving_tls(fleet.issue(Role.NODE, "mac-1")) as engine:
        with pytest.raises(UnreachableError, match="has no identity"):
            await ask(pool, address(engine))
