"""Checks of connections between machines, with values, a store, and files."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetctl.doctor.observe_security import find_open_secrets, plain_etcd_urls, read_security
from identity.authority import new_key
from identity.names import Role
from identity.signer import Signer
from insight.doctor.transport_security import (
    SECURITY_CHECKS,
    CertificateState,
    KeyState,
    TokenState,
    TransportSecurity,
)
from machinery.clock import SystemClock
from nodeagent.doctor.check import run_all
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeLease
from schemas.records import ApiKey, GatewayLease
from schemas.trust import FleetTrust, JoinTokenRecord, TlsMode
from schemas.wire.findings import Finding
from store import codec, keys
from store.etcd.address import EtcdAddress
from store.memory import MemoryTransport
from store.port import Put
from tests.support.agent_api import STATUS
from tests.support.gateway_world import endpoint
from tests.support.identities import TestAuthority, now

DAY = timedelta(days=1)


def checked(found: TransportSecurity) -> list[Finding]:
    return run_all(SECURITY_CHECKS, SimpleNamespace(security=found))


def results(found: TransportSecurity) -> list[tuple[str, str]]:
    return [(finding.level, finding.check) for finding in checked(found)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(TransportSecurity(), [], id="one machine"),
        pytest.param(
            TransportSecurity(plain=("node/mac-1 at http://10.0.0.1:4001",)),
            [("WARN", "tls"), ("WARN", "listeners")],
            id="a network without TLS",
        ),
        pytest.param(TransportSecurity(mode=TlsMode.PERMISSIVE), [("WARN", "tls")], id="migration"),
        pytest.param(TransportSecurity(mode=TlsMode.STRICT), [("OK", "tls")], id="strict"),
        pytest.param(
            TransportSecurity(insecure_flags=("gateway/a: --insecure-metrics",)),
            [("WARN", "listeners")],
            id="an insecure flag",
        ),
        pytest.param(
            TransportSecurity(plain_etcd=("http://10.0.0.1:2379",)), [("WARN", "tls")], id="etcd"
        ),
        pytest.param(
            TransportSecurity(
                tokens=(
                    TokenState(id="long", left=9 * DAY, uses=2),
                    TokenState(id="used", left=9 * DAY, uses=0),
                    TokenState(id="short", left=DAY, uses=2),
                )
            ),
            [("WARN", "tokens")],
            id="a long token",
        ),
        pytest.param(TransportSecurity(open_secrets=("ca.key",)), [("FAIL", "secrets")], id="key"),
    ],
)
def test_each_weakness_is_a_finding(
    found: TransportSecurity, expected: list[tuple[str, str]]
) -> None:
    assert results(found) == expected
    assert all(finding.advice for finding in checked(found) if finding.level != "OK")


@pytest.mark.parametrize(
    ("left", "level"),
    [(30 * DAY, "OK"), (10 * DAY, "OK"), (9 * DAY, "WARN"), (2 * DAY, "FAIL"), (-DAY, "FAIL")],
)
def test_a_certificate_that_is_not_renewed_is_found(left: timedelta, level: str) -> None:
    transport_security = TransportSecurity(
        certificates=(CertificateState(label="node/a", left=left),)
    )
    assert results(transport_security) == [(level, "certificates")]


@pytest.mark.parametrize(
    ("left", "is_told"),
    [(30 * DAY, False), (10 * DAY, False), (9 * DAY, True), (DAY / 2, True), (-DAY, False)],
)
def test_an_api_key_that_ends_soon_is_told(left: timedelta, *, is_told: bool) -> None:
    transport_security = TransportSecurity(api_keys=(KeyState(name="ci", left=left),))
    assert results(transport_security) == ([("WARN", "api keys")] if is_told else [])


async def test_the_store_shows_listeners_flags_and_certificates(tmp_path: Path) -> None:
    clock, fleet, other = (
        SystemClock(),
        TestAuthority(tmp_path / "a"),
        TestAuthority(tmp_path / "b"),
    )
    store = MemoryTransport(clock)
    trust = FleetTrust(
        fleet=fleet.authority.fleet, authorities=fleet.authority.pem, mode=TlsMode.TLS
    )
    await store.commit([], [Put(key=keys.FLEET_TRUST, value=codec.encode(trust))])
    for owner, name in ((fleet, "mac-1"), (other, "mac-2")):
        signer = Signer(transport=store, clock=clock, authority=owner.authority, lifetime=5 * DAY)
        await signer.issue(owner.identity(Role.NODE, name), new_key()[1])
    token = JoinTokenRecord(
        id="a2345672", hash="0" * 64, created=now(), expires=now() + 9 * DAY, most_uses=3
    )
    key = keys.named(keys.JOIN_TOKEN_PREFIX, token.id)
    await store.commit([], [Put(key=key, value=codec.encode(token))])
    for name, end in (("ci", now() + 9 * DAY), ("app", None)):
        api_key = ApiKey(name=name, hash="0" * 64, created=now(), expires=end)
        at = keys.named(keys.API_KEY_PREFIX, name)
        await store.commit([], [Put(key=at, value=codec.encode(api_key))])
    lease = NodeLease(uid="u", session="s", insecure_flags=("--insecure-http",))
    key = keys.named(keys.NODE_LEASE_PREFIX, "mac-1")
    await store.commit([], [Put(key=key, value=codec.encode(lease))])
    nodes = [
        Node(metadata=ObjectMeta(name=name), status=STATUS.model_copy(update={"agent_url": url}))
        for name, url in (
            ("mac-1", "http://10.0.0.1:4001"),
            ("mac-2", "https://10.0.0.2:4001"),
            ("mac-3", "http://127.0.0.1:4001"),
        )
    ]
    gateways = {
        "g": GatewayLease(
            url="https://10.0.0.3:4000", version="1", insecure_flags=("--insecure-metrics",)
        )
    }
    engines = [endpoint("m-0", "m", "http://10.0.0.1:4100"), endpoint("m-1", "m", "unix:/tmp/x")]
    security = await read_security(store, now(), (nodes, gateways, engines), (EtcdAddress(), None))
    assert security.mode is TlsMode.TLS
    assert security.plain == (
        "node/mac-1 at http://10.0.0.1:4001",
        "replica/m-0 at http://10.0.0.1:4100",
    )
    assert security.insecure_flags == (
        "node/mac-1: --insecure-http",
        "gateway/g: --insecure-metrics",
    )
    assert [(state.name, state.left.days) for state in security.api_keys] == [("ci", 8)]
    assert [(state.id, state.left.days, state.uses) for state in security.tokens] == [
        ("a2345672", 8, 3)
    ]
    states = {
        certificate.label: (certificate.left.days, certificate.is_foreign)
        for certificate in security.certificates
    }
    assert states == {"node/mac-1": (4, False), "node/mac-2": (4, True)}


def test_files_with_secrets_are_closed_to_other_users(tmp_path: Path) -> None:
    key = tmp_path / "authority" / "ca.key"
    identity = tmp_path / "identities" / "admin" / "identity.pem"
    for path in (key, identity):
        path.parent.mkdir(parents=True)
        path.touch(0o600)
    assert find_open_secrets(tmp_path) == ()
    for path in (key, identity):
        path.chmod(0o644)
    assert [str(key) in find_open_secrets(tmp_path)[0], len(find_open_secrets(tmp_path))] == [
        True,
        2,
    ]
    assert find_open_secrets(None) == ()


def test_etcd_over_plain_http_is_named() -> None:
    urls = ("http://127.0.0.1:2379", "https://10.0.0.1:2379", "http://10.0.0.2:2379")
    assert plain_etcd_urls(EtcdAddress(endpoints=urls)) == ("http://10.0.0.2:2379",)
