"""The fleet's side of a node that is added: tokens, known machines, and whether the node is Ready."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from fleetctl.cli.errors import FleetctlError
from fleetctl.fleets.join_material import (
    authority_hash,
    create_token,
    is_local_address,
    join_addresses,
)
from fleetctl.objects import reader
from identity import token_store
from identity.join_token import JoinToken
from identity.token_store import TokenOptions
from machinery.clock import Clock
from machinery.os_user import current_user
from schemas import kinds
from schemas.meta import Condition, find_condition
from schemas.node import Node
from schemas.trust import FleetTrust
from store import codec, keys, objects
from store.port import Transport

# A step that is killed leaves its token; it is worth nothing soon.
_TOKEN_LIFETIME: Final = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAccess:
    """The store of a fleet that nodes are added to."""

    transport: Transport
    clock: Clock
    fleet: str
    """Id of the fleet, as in its certificates."""
    addresses: tuple[str, ...]
    """Addresses of join ports."""

    async def nodes(self) -> list[Node]:
        return list(await objects.list_all(self.transport, Node))

    async def create_token(self, name: str) -> JoinToken:
        """Return a token with which one machine of this name can join."""
        options = TokenOptions(
            lifetime=_TOKEN_LIFETIME,
            uses=1,
            role="node",
            name=name,
            labels={},
            created_by=current_user(),
        )
        return await create_token(self.transport, self.clock, options)

    async def revoke_token(self, token: JoinToken) -> None:
        await token_store.revoke_token(self.transport, token.id)

    async def is_revoked(self, serial: str) -> bool:
        return await self.transport.get(f"{keys.REVOKED_PREFIX}{serial}") is not None

    async def readiness(self, name: str) -> Condition | None:
        """Return the condition Ready of a node; None if the fleet does not know the node."""
        kind = kinds.by_name("Node")
        assert kind is not None
        api_object = await reader.read_one(self.transport, kind, name)
        if not isinstance(api_object, Node) or api_object.status is None:
            return None
        return find_condition(api_object.status.conditions, "Ready")


async def open_fleet(transport: Transport, clock: Clock, address: str) -> FleetAccess:
    """Return the access to a fleet; `address` replaces the join addresses of its reconcilers.

    Raises:
        FleetctlError: no machine can join it.

    """
    await authority_hash(transport)
    item = await transport.get(keys.FLEET_TRUST)
    assert item is not None  # it was there a moment ago
    found = [address] if address else await join_addresses(transport)
    found = [one for one in found if not is_local_address(one)]
    if not found:
        raise FleetctlError(
            "no reconciler of this fleet has a join port that other machines reach. Start one with --authority-dir and "
            "--api-host, or name its address with --join-address"
        )
    fleet = codec.decode(FleetTrust, item).fleet
    return FleetAccess(transport=transport, clock=clock, fleet=fleet, addresses=tuple(found))


def names_by_uuid(nodes: Iterable[Node]) -> dict[str, str]:
    """Return the names of nodes by the hardware UUID of their machines; nodes that share a machine are left out."""
    return {
        node.status.hardware_uuid.lower(): node.name
        for node in nodes
        if node.status is not None and node.status.hardware_uuid and not node.status.is_part
    }
