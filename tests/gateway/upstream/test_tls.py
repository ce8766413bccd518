"""Connections to engines over TLS: who may answer, what a refusal looks like, and connections that are ready before requests."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from gateway.forwarding.router import LoadTracker
from gateway.upstream.call import BrokenResponseError, UnreachableError, WholeCall
from gateway.upstream.dialer import Dialer
from gateway.upstream.engine_links import EngineLinks
from gateway.upstream.tls import EngineTls
from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.names import Role
from machinery import engine_link
from machinery.clock import NEVER, SystemClock
from machinery.engine_link import RequestHead
from schemas.wire.engine_address import EngineAddress
from tests.support.identities import TestAuthority, now
from tests.support.tls_engine import HOST, TlsEngine, on_loop, serving_tls
from tests.support.waiting import until

HEAD = RequestHead("POST", "/v1/chat/completions", b"content-type: application/json\r\n", 2)


@pytest.fixture
def fleet(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "ours")


def made(folder: IdentityFolder | None) -> EngineLinks:
    clock = SystemClock()
    tls = None if folder is None else EngineTls(Credentials(folder, clock))
    return EngineLinks(clock, Dialer(clock, tls), LoadTracker(random.Random(1)), silence_s=20.0)


@asynccontextmanager
async def linked(folder: IdentityFolder) -> AsyncIterator[EngineLinks]:
    links = made(folder)
    assert links.dialer.tls is not None
    credentials = links.dialer.tls.credentials
    credentials.on_change(links.close_revoked)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in (links.run(), credentials.watch())]
        try:
            yield links
        finally:
            for task in tasks:
                task.cancel()
            links.close()


def address(engine: TlsEngine, node: str = "mac-1") -> EngineAddress:
    return EngineAddress(HOST, engine.port, "", node)


async def ask(links: EngineLinks, origin: EngineAddress) -> int:
    raw = engine_link.encode_request(HEAD, b"{}")
    call = WholeCall(origin=origin, raw=raw, silence_s=20.0, until_s=NEVER, limit=1 << 20)
    links.send(call)
    status, _ = await call.response
    return status


def engine_is_linked(links: EngineLinks, engine: TlsEngine) -> bool:
    link = links.links.get(address(engine))
    return link is not None and link.is_open


def failures(links: EngineLinks, reason: str) -> int:
    return links.dialer.tls_failures.value(reason)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_link_is_open_before_the_first_request_and_carries_all(
    fleet: TestAuthority, loop: str
) -> None:
    async def run() -> None:
        async with (
            serving_tls(fleet.issue(Role.NODE, "mac-1")) as engine,
            linked(fleet.issue(Role.GATEWAY, "edge")) as links,
        ):
            links.set_engines([address(engine)])
            await until(lambda: engine_is_linked(links, engine), what="a link")
            asked = (ask(links, address(engine)) for _ in range(9))
            assert await asyncio.gather(*asked) == [200] * 9
            assert links.connections() == 1
            assert engine.reached == 9

    on_loop(run, loop)()


@on_loop
async def test_another_node_cannot_answer(fleet: TestAuthority) -> None:
    async with (
        serving_tls(fleet.issue(Role.NODE, "mac-2")) as thief,
        linked(fleet.issue(Role.GATEWAY, "edge")) as links,
    ):
        assert (
            await ask(links, address(thief, "mac-2")) == 200
        )  # this connection stays, and is not used
        with pytest.raises(UnreachableError, match=r"TLS: .*mac-1"):
            await ask(links, address(thief, "mac-1"))
        assert failures(links, "UntrustedCertificate") == 1
        assert thief.reached == 1


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_refusal_after_the_handshake_counts_as_unreachable(
    fleet: TestAuthority, loop: str
) -> None:
    async def run() -> None:
        expired = fleet.issue(Role.GATEWAY, "old", start=now() - timedelta(days=31))
        async with serving_tls(fleet.issue(Role.NODE, "mac-1")) as engine, linked(expired) as links:
            with pytest.raises(UnreachableError, match="refused the connection after its TLS"):
                await ask(links, address(engine))
            assert failures(links, "ClosedByEngine") == 1
            assert engine.refused == {"Expired": 1}
            links.set_engines([address(engine)])
            await until(lambda: failures(links, "ClosedByEngine") == 2, what="the refused spare")
            assert engine.reached == 0

    on_loop(run, loop)()


@on_loop
async def test_connections_to_a_revoked_node_are_closed(fleet: TestAuthority) -> None:
    node, edge = fleet.issue(Role.NODE, "mac-1"), fleet.issue(Role.GATEWAY, "edge")
    async with (
        serving_tls(node) as engine,
        linked(edge) as links,
        asyncio.TaskGroup() as group,
    ):

        async def ask_for_stream() -> None:
            with pytest.raises(BrokenResponseError, match="revoked"):
                await links.request(address(engine), "/stream", limit=1 << 20)

        asking = group.create_task(ask_for_stream())
        await until(lambda: engine.reached, what="the request")
        revoked = (fleet.leaves[fleet.identity(Role.NODE, "mac-1").uri].serial,)
        edge.write_trust(fleet.snapshot(revoked=revoked))
        await asking
        assert links.connections() == 0
        with pytest.raises(UnreachableError, match="revoked"):
            await ask(links, address(engine))
        assert failures(links, "Revoked") == 2


@on_loop
async def test_without_an_identity_an_engine_with_tls_is_unreachable(fleet: TestAuthority) -> None:
    links = made(None)
    async with serving_tls(fleet.issue(Role.NODE, "mac-1")) as engine:
        with pytest.raises(UnreachableError, match="has no identity"):
            await ask(links, address(engine))
