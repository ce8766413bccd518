"""`fleetctl token`: creates, lists and revokes join tokens."""

from pathlib import Path

import pytest

from identity.join_token import parse_token
from identity.token_store import list_tokens
from machinery.clock import SystemClock
from schemas.records import ReconcilerLease
from schemas.trust import FleetTrust
from store import codec, keys
from store.port import Put
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.identities import TestAuthority

POOL = """
apiVersion: fleet/v1alpha1
kind: NodePool
metadata: {name: studio}
spec: {selector: {matchLabels: {site: studio}}}
"""


@pytest.fixture
async def secured(tmp_path: Path) -> tuple[MemoryFleet, TestAuthority]:
    """A fleet with an authority, and a reconciler with a join port."""
    fleet, ca = MemoryFleet(), TestAuthority(tmp_path)
    trust = FleetTrust(fleet=ca.authority.fleet, authorities=ca.authority.pem)
    lease = ReconcilerLease(identity="control-1/7 1.0", join_address="control-1:4002")
    await fleet.store.commit(
        [],
        [
            Put(key=keys.FLEET_TRUST, value=codec.encode(trust)),
            Put(key=keys.named(keys.RECONCILER_LEASE_PREFIX, "r"), value=codec.encode(lease)),
        ],
    )
    return fleet, ca


async def test_create_prints_the_whole_command_once(
    secured: tuple[MemoryFleet, TestAuthority],
) -> None:
    fleet, ca = secured
    done = await fleet.ctl("token", "create")
    assert done.code == 0, done.err
    program, verb, text, address = done.out.split()
    assert (program, verb, address) == ("fleetctl", "join", "control-1:4002")
    token = parse_token(text)
    assert token.authority_hash == ca.authority.spki_hash
    assert "for one machine with the role node, until" in done.err
    assert "shown only once" in done.err
    assert token.secret_text not in done.err
    listed = await fleet.ctl("token", "list")
    assert token.id in listed.out
    assert token.secret_text not in listed.out
    assert "1 of 1" in listed.out


async def test_create_takes_limits_and_what_the_machine_gets(
    secured: tuple[MemoryFleet, TestAuthority],
) -> None:
    fleet, _ = secured
    await fleet.applied(POOL)
    words = ("--ttl=7d", "--uses=5", "--node=mac-9", "--pool=studio", "--label=rack=a1")
    done = await fleet.ctl("token", "create", *words, "-o", "token")
    assert done.code == 0, done.err
    parse_token(done.out)
    [record] = await list_tokens(fleet.store)
    assert (record.most_uses, record.name, record.pool) == (5, "mac-9", "studio")
    assert record.labels == {"site": "studio", "rack": "a1"}
    duration = record.expires - SystemClock().now()
    assert 6 <= duration.days <= 7
    assert "@" in record.created_by


async def test_create_warns_of_a_port_that_others_cannot_reach(
    secured: tuple[MemoryFleet, TestAuthority],
) -> None:
    fleet, _ = secured
    for address, is_local in (("127.0.0.1:4002", True), ("[::1]:1", True), ("10.0.0.7:1", False)):
        done = await fleet.ctl("token", "create", "--address", address)
        assert done.out.split()[-1] == address
        assert ("only this machine reaches" in done.err) == is_local


async def test_revoke_ends_a_token_and_never_prints_its_secret(
    secured: tuple[MemoryFleet, TestAuthority],
) -> None:
    fleet, _ = secured
    text = (await fleet.ctl("token", "create", "-o", "token")).out.strip()
    token = parse_token(text)
    done = await fleet.ctl("token", "revoke", text)  # people paste what they have
    assert (done.code, done.out) == (0, f"token/{token.id} revoked\n")
    again = await fleet.ctl("token", "revoke", token.id)
    assert again.code == 1
    assert f"there is no token {token.id}" in again.err
    assert token.secret_text not in done.out + done.err + again.err
    assert "No join tokens found" in (await fleet.ctl("token", "list")).err
