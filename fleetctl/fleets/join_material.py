"""Material with which a machine joins: tokens that hold the hash of the authority, and the addresses of join ports."""

import secrets
from typing import Final

from fleetctl.cli.errors import FleetctlError
from identity import token_store
from identity.authority import AuthorityError, load_certificate, spki_hash
from identity.join_token import JoinToken
from identity.token_store import TokenOptions
from machinery.clock import Clock
from machinery.connection_limits import is_loopback
from schemas.records import ReconcilerLease
from schemas.trust import FleetTrust
from store import codec, keys
from store.port import Transport

MAKE_AUTHORITY: Final = (
    "A fleet of `fleetctl up` gets one with `fleetctl up --join ADDRESS`, after `fleetctl down`; for any other, "
    "`fleetctl secure --authority-dir DIR` on a control Mac makes one"
)
"""Advice about a fleet without an authority."""
_ENTROPY_BYTES: Final = 21


async def create_token(transport: Transport, clock: Clock, wanted: TokenOptions) -> JoinToken:
    """Create a token that holds the hash of the fleet's authority. Raises FleetctlError: the fleet has none."""
    pinned = await authority_hash(transport)
    entropy = secrets.token_bytes(_ENTROPY_BYTES)
    return await token_store.create_token(transport, clock, pinned, entropy, wanted)


async def authority_hash(transport: Transport) -> bytes:
    """Return the hash of the fleet's authority, which the joining machine checks first.

    Raises:
        FleetctlError: the fleet has none, or it cannot be read.

    """
    item = await transport.get(keys.FLEET_TRUST)
    if item is None:
        raise FleetctlError(
            f"this fleet has no certificate authority yet, so no machine can verify it. {MAKE_AUTHORITY}"
        )
    try:
        signing = load_certificate(codec.decode(FleetTrust, item).authorities)
    except AuthorityError as error:
        raise FleetctlError(f"the fleet's authority cannot be read: {error}") from error
    return spki_hash(signing.public_key())


async def join_addresses(transport: Transport) -> list[str]:
    """Return the addresses of the join ports of live reconcilers."""
    items = (await transport.list(keys.RECONCILER_LEASE_PREFIX)).items
    found = {codec.decode(ReconcilerLease, item).join_address for item in items}
    return sorted(found - {""})


def is_local_address(address: str) -> bool:
    """Return whether only this machine reaches the address."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return is_loopback(host)
    except ValueError:
        return host == "localhost"
