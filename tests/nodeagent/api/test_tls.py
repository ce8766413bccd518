"""TLS of the agent's API on real sockets: who connects, who is shown metrics, and what a listener in between reads."""

import asyncio
import ssl
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest
from fastapi import FastAPI

from identity.credentials import Credentials
from identity.folder import IdentityFolder
from identity.listeners import server_security
from identity.names import Role
from machinery.http_server import AdminServer
from models.model_store.store import ModelStore
from nodeagent.engines.stop_order import StopOrder
from schemas.trust import TlsMode
from tests.support.agent_api import CLOCK, TICKET, serving
from tests.support.identities import TestAuthority, now
from tests.support.model_store import add_model


@pytest.fixture
def fleet(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "a")


def client(folder: IdentityFolder) -> ssl.SSLContext:
    return Credentials(folder, CLOCK).client(frozenset({Role.NODE})).context


def anonymous(fleet: TestAuthority) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=fleet.authority.pem)


async def test_an_administrator_with_a_ticket_is_answered(fleet: TestAuthority) -> None:
    async with serving(fleet) as api:
        admin = client(fleet.issue(Role.ADMIN, "anna"))
        assert await api.status(admin) == 200
        assert await api.status(admin, headers={}) == 401
        assert await api.status(anonymous(fleet)) == 200


async def test_nobody_else_gets_an_answer(fleet: TestAuthority, tmp_path: Path) -> None:
    other = TestAuthority(tmp_path / "b")
    foreign = other.issue(Role.ADMIN, "anna")
    foreign.write_authorities(fleet.authority.pem)  # it trusts the agent, which must not trust it
    old = fleet.issue(Role.ADMIN, "old", start=now() - timedelta(days=40))
    revoked = fleet.issue(Role.ADMIN, "revoked")
    revoked_client = client(revoked)
    serial = fleet.leaves[fleet.identity(Role.ADMIN, "revoked").uri].serial
    wrong_role = fleet.issue(Role.ETCD, "etcd-1")
    async with serving(fleet) as api:
        assert await api.status(revoked_client) == 200
        api.credentials.folder.write_trust(fleet.snapshot(revoked=(serial,)))
        api.credentials.refresh()
        for sslcontext in (client(foreign), client(old), revoked_client, client(wrong_role)):
            assert await api.status(sslcontext) == 0


async def test_other_machines_read_metrics_with_a_credential(
    fleet: TestAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("identity.metrics_access.is_local", lambda _: False)
    async with serving(fleet) as api:
        admin, stranger = client(fleet.issue(Role.ADMIN, "anna")), anonymous(fleet)
        for path in ("/health", "/metrics"):
            assert await api.status(admin, path, {}) == 200
            assert await api.status(stranger, path) == 200, "a ticket of fleetctl"
            assert await api.status(stranger, path, {}) == 401


@pytest.mark.parametrize(
    ("mode", "status"), [(TlsMode.PERMISSIVE, 200), (TlsMode.TLS, 200), (TlsMode.STRICT, 400)]
)
async def test_plain_http_is_answered_until_the_mode_is_strict(
    fleet: TestAuthority, mode: TlsMode, status: int
) -> None:
    async with serving(fleet, mode) as api:
        assert await api.plain_status() == status
        assert await api.status(client(fleet.issue(Role.ADMIN, "anna"))) == 200


async def test_an_address_of_the_network_needs_an_identity_or_the_flag() -> None:
    changed = asyncio.Event()
    for is_insecure in (False, True):
        changed.clear()
        security = server_security(None, frozenset(), is_insecure=is_insecure)
        api = AdminServer(FastAPI(), CLOCK, ("0.0.0.0", 0), changed.set, security=security)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(api.run())
            await changed.wait()
            if is_insecure:
                port = api.url.rpartition(":")[2]
                async with (
                    aiohttp.ClientSession() as http,
                    http.get(f"http://127.0.0.1:{port}/") as response,
                ):
                    assert response.status == 404
            running.cancel()
        assert api.is_refused is not is_insecure
        assert bool(api.url) is is_insecure
        assert ("--identity-dir" in api.error) is not is_insecure


async def test_only_an_administrator_changes_models(fleet: TestAuthority) -> None:
    model = add_model(ModelStore(fleet.root / "models", CLOCK), "org/m", "0" * 40, {"a": b"x"})
    path = f"/v1/models/{model.name}"
    changes = (("PUT", f"{path}/pin"), ("DELETE", f"{path}/pin"), ("DELETE", path))
    fetch = ("POST", f"/v1/model-fetches?repo=org/n&commit={'1' * 40}")
    async with serving(fleet) as api:
        admin, edge = fleet.issue(Role.ADMIN, "anna"), fleet.issue(Role.NODE, "mac-1")
        for sslcontext in (anonymous(fleet), client(edge)):
            for method, where in (*changes, fetch):
                assert await api.status(sslcontext, where, TICKET, method=method) == 403
        assert model.folder.is_dir()
        assert await api.status(client(edge), "/v1/models", TICKET) == 200
        for method, where in changes:
            assert await api.status(client(admin), where, {}, method=method) == 200
        assert not model.folder.exists()


async def test_only_an_administrator_gives_a_stop_order(fleet: TestAuthority) -> None:
    path, order = "/v1/stop-order", StopOrder(fleet.root)
    async with serving(fleet) as api:
        admin, edge = fleet.issue(Role.ADMIN, "anna"), fleet.issue(Role.NODE, "mac-1")
        for sslcontext in (anonymous(fleet), client(edge)):
            for headers in ({}, TICKET):
                assert await api.status(sslcontext, path, headers, method="PUT") == 403
        assert order.refusal() == ""
        assert await api.status(client(admin), path, {}, method="PUT") == 200
        assert "engines are stopped" in order.refusal()
        assert await api.status(client(edge), path, TICKET, method="DELETE") == 403
        assert await api.status(client(admin), path, {}, method="DELETE") == 200
        assert order.refusal() == ""


async def test_a_fleet_that_gets_its_certificates_takes_stop_orders_by_tickets(
    fleet: TestAuthority,
) -> None:
    async with serving(fleet, TlsMode.PERMISSIVE) as api:
        stranger = anonymous(fleet)
        path = "/v1/stop-order?graceSeconds=1"
        assert await api.status(stranger, path, {}, method="PUT") == 401
        assert await api.status(stranger, path, TICKET, method="PUT") == 200
        assert await api.status(stranger, "/v1/stop-order?graceSeconds=1e9", method="PUT") == 400
