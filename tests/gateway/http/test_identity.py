"""Gateways with an identity on real sockets: what clients get, who reads metrics, and whom the reconciler believes."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import aiohttp
import orjson
import pytest

from gateway.limits import GatewayLimits
from identity.credentials import Credentials
from identity.dialer import Dialer
from identity.folder import IdentityFolder
from identity.listeners import ApiSecurity
from identity.metrics_access import MetricsToken
from identity.names import Role
from machinery.clock import SystemClock
from machinery.tls_server import ServerCertificate
from reconciler.deployments.demand.scraper import DemandScraper
from schemas.records import GatewayLease
from schemas.trust import TlsMode
from store import codec, keys
from store.etcd.connect import connect
from store.memory import MemoryTransport
from store.port import Put
from tests.support.etcd import running_etcd
from tests.support.gateway_calls import gateway_process
from tests.support.gateway_world import running_gateway
from tests.support.identities import TestAuthority, now
from tests.support.ports import free_port
from tests.support.store_certificates import Authority
from tests.support.waiting import until, until_async

CLOCK = SystemClock()
TOKEN = "prometheus-token-of-this-test-0123456789"
DEMAND = "/metrics/demand"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gateway take clients for another machine's: a test has one machine only."""
    monkeypatch.setattr("identity.metrics_access.is_local", lambda _: False)


@pytest.fixture
def fleet(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "fleet")


@dataclass(frozen=True, slots=True)
class Stand:
    """A gateway with an identity."""

    store: MemoryTransport
    credentials: Credentials
    port: int

    async def get(
        self,
        path: str,
        context: ssl.SSLContext,
        *,
        name: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, str]:
        """Return status and text; status 0 if the connection is refused."""
        try:
            async with (
                asyncio.timeout(20),
                aiohttp.ClientSession() as http,
                http.get(
                    f"https://127.0.0.1:{self.port}{path}",
                    ssl=context,
                    server_hostname=name or self.credentials.identity.dns_name,
                    headers=headers or {},
                ) as response,
            ):
                return response.status, await response.text()
        except (aiohttp.ClientError, ssl.SSLError, ConnectionError):
            return 0, ""

    async def lease(self) -> tuple[str, GatewayLease] | None:
        for item in (await self.store.list(keys.GATEWAY_LEASE_PREFIX)).items:
            return item.key.rpartition("/")[2], codec.decode(GatewayLease, item)
        return None


@asynccontextmanager
async def gateway(
    fleet: TestAuthority,
    *,
    mode: TlsMode = TlsMode.STRICT,
    certificate: ServerCertificate | None = None,
    accepts_plain: bool = False,
    token: Path | None = None,
) -> AsyncIterator[Stand]:
    folder = fleet.issue(Role.GATEWAY, "edge-1")
    folder.write_trust(fleet.snapshot(mode=mode))
    credentials, store = Credentials(folder, CLOCK), MemoryTransport(CLOCK)
    limits = GatewayLimits(
        drain_timeout_s=0.0,
        credentials=credentials,
        certificate=certificate,
        accepts_plain=accepts_plain,
        asks_for_keys=True,
        security=ApiSecurity(metrics_token=MetricsToken(token) if token else None),
    )
    async with running_gateway(store, limits) as running:
        stand = Stand(store, credentials, int(running.url.rpartition(":")[2]))
        await until_async(stand.lease, what="the gateway's registration")
        yield stand


def client(folder: IdentityFolder) -> ssl.SSLContext:
    return Credentials(folder, CLOCK).client(frozenset({Role.GATEWAY})).context


def anonymous(fleet: TestAuthority) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=fleet.authority.pem)


async def test_reconcilers_and_administrators_read_metrics_and_others_do_not(
    fleet: TestAuthority, tmp_path: Path
) -> None:
    foreign = TestAuthority(tmp_path / "other").issue(Role.RECONCILER, "r-1")
    foreign.write_authorities(fleet.authority.pem)
    old = fleet.issue(Role.RECONCILER, "old", start=now() - timedelta(days=40))
    revoked = client(fleet.issue(Role.RECONCILER, "revoked"))
    serial = fleet.leaves[fleet.identity(Role.RECONCILER, "revoked").uri].serial
    async with gateway(fleet) as stand:
        for role, name in ((Role.RECONCILER, "r-1"), (Role.ADMIN, "anna")):
            assert (await stand.get(DEMAND, client(fleet.issue(role, name))))[0] == 200
        assert (await stand.get(DEMAND, revoked))[0] == 200
        stand.credentials.folder.write_trust(fleet.snapshot(revoked=(serial,)))
        stand.credentials.refresh()
        for refused in (client(foreign), client(old), revoked):
            assert await stand.get(DEMAND, refused) == (0, "")
        status, text = await stand.get(DEMAND, client(fleet.issue(Role.NODE, "mac-1")))
        assert (status, "dashboard" in text and "reconciler" in text) == (403, True)
        for path in (DEMAND, "/metrics"):
            status, text = await stand.get(path, anonymous(fleet))
            assert (status, "--metrics-token-file" in text) == (401, True)
        status, text = await stand.get("/health", anonymous(fleet))
        assert (status, list(orjson.loads(text))) == (200, ["status"])


async def test_prometheus_reads_metrics_with_the_token(
    fleet: TestAuthority, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    async with gateway(fleet, token=token) as stand:
        for given, status in ((TOKEN, 200), (f"{TOKEN}x", 403)):
            headers = {"authorization": f"Bearer {given}"}
            found = await stand.get("/metrics", anonymous(fleet), headers=headers)
            assert found[0] == status


async def test_clients_get_their_certificate_and_processes_the_identity(
    fleet: TestAuthority, tmp_path: Path
) -> None:
    own = Authority(tmp_path, "public")
    files = own.issue("localhost")
    public = ServerCertificate(files.certificate, files.key)
    browser = ssl.create_default_context(cafile=own.certificate)
    async with gateway(fleet, certificate=public) as stand:
        assert (await stand.get("/health", browser, name="127.0.0.1"))[0] == 200
        assert (await stand.get("/health", browser))[0] == 0
        reconciler = client(fleet.issue(Role.RECONCILER, "r-1"))
        assert (await stand.get(DEMAND, reconciler))[0] == 200
    async with gateway(fleet) as stand:
        assert (await stand.get("/health", anonymous(fleet), name="localhost"))[0] == 200


async def test_clients_are_not_asked_for_a_certificate(
    fleet: TestAuthority, tmp_path: Path
) -> None:
    stranger = TestAuthority(tmp_path / "company").issue(Role.ADMIN, "laptop")
    context = anonymous(fleet)
    context.load_cert_chain(stranger.identity)
    async with gateway(fleet) as stand:
        assert (await stand.get("/health", context, name="localhost"))[0] == 200
        assert (await stand.get("/health", context))[0] == 0


@pytest.mark.parametrize("accepts_plain", [True, False])
async def test_it_registers_its_name_and_dials_follow_the_mode(
    fleet: TestAuthority, *, accepts_plain: bool
) -> None:
    async with gateway(fleet, mode=TlsMode.PERMISSIVE, accepts_plain=accepts_plain) as stand:
        found = await stand.lease()
        assert found is not None
        scheme = "http" if accepts_plain else "https"
        assert found[0] == "edge-1"
        assert found[1].tls is not None
        assert found[1].url == f"{scheme}://127.0.0.1:{stand.port}"
        stand.credentials.folder.write_trust(fleet.snapshot(mode=TlsMode.TLS))
        stand.credentials.refresh()

        async def is_https() -> bool:
            lease = await stand.lease()
            return lease is not None and lease[1].url.startswith("https:")

        await until_async(is_https, what="the URL of mode tls")


@pytest.mark.etcd
async def test_a_process_takes_its_identity_from_a_folder(
    fleet: TestAuthority, tmp_path: Path
) -> None:
    """On loopback clients may speak plain HTTP; processes of the fleet get the identity at the same port."""
    folder, port = fleet.issue(Role.GATEWAY, "edge-1"), free_port()
    flags = ("--port", str(port), "--identity-dir", str(folder.path))
    async with (
        running_etcd(tmp_path) as etcd,
        gateway_process("--etcd", str(etcd.address), *flags),
        aiohttp.ClientSession() as http,
    ):
        transport = connect(etcd.address)

        async def id_() -> str:
            items = (await transport.list(keys.GATEWAY_LEASE_PREFIX)).items
            return items[0].key.rpartition("/")[2] if items else ""

        assert await until_async(id_, what="the registration") == "edge-1"
        admin = client(fleet.issue(Role.ADMIN, "anna"))
        name = fleet.identity(Role.GATEWAY, "edge-1").dns_name
        for url, context, host in (
            (f"http://127.0.0.1:{port}/health", True, None),
            (f"https://127.0.0.1:{port}{DEMAND}", admin, name),
        ):
            async with http.get(url, ssl=context, server_hostname=host) as response:
                assert response.status == 200
        await transport.close()


async def test_the_reconciler_believes_the_gateway_and_not_a_thief(
    fleet: TestAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    own = fleet.issue(Role.RECONCILER, "r-1")
    own.write_trust(fleet.snapshot())
    dialer = Dialer(Credentials(own, CLOCK))
    async with gateway(fleet) as stand, asyncio.TaskGroup() as group:
        scraper = DemandScraper(
            stand.store, CLOCK, needed=lambda: {"m"}, on_change=lambda _: None, dialer=dialer
        )
        scraping = group.create_task(scraper.run())

        def is_complete() -> bool:
            demand = scraper.demand("m")
            return demand is not None and demand.is_complete

        await until(is_complete, what="the gateway's demand")
        # With the gateways' password of the store, a thief registers the same address under another id, and one without
        # an identity; neither has a certificate with its id.
        network = f"http://192.0.2.9:{stand.port}"
        for id_, url, has_identity in (
            ("edge-2", f"https://127.0.0.1:{stand.port}", True),
            ("edge-3", network, False),
        ):
            tls = stand.credentials.report() if has_identity else None
            lease = GatewayLease(url=url, version="1", tls=tls)
            key = keys.named(keys.GATEWAY_LEASE_PREFIX, id_)
            await stand.store.commit([], [Put(key=key, value=codec.encode(lease))])
        await until(lambda: caplog.text.count("does not show its load") == 2, what="two refusals")
        whys = sorted(
            str(vars(record)["why"]) for record in caplog.records if "why" in vars(record)
        )
        assert "TLS mode is strict" in whys[0]
        assert "not valid for 'edge-2.gateway" in whys[1]
        await until(lambda: not is_complete(), what="two gateways that count as silent")
        scraping.cancel()
