"""Rules for the first certificate of a process that is in the fleet already, while the fleet is being secured.

A request without a certificate before it is granted only if all of this holds:
- The mode is permissive: `fleetctl secure` has begun and not ended. Afterwards a join token or an approval is needed.
- The name has no certificate, and none of its certificates is revoked: a process that was shut out stays out.
- It is a node that the fleet knows, on the Mac that its agent has reported; or a gateway or a reconciler, of which at
  most 64 get a name like this. Administrators and etcd never do.

The store decides which process may write such a request: where it has users, an agent's asks for its own node only,
and a gateway's for gateways only. Without users, every process that reaches the store can write everything anyway.
"""

from typing import Final

from identity.names import Identity, Role
from identity.signer import IssueError
from schemas.node import Node, NodeStatus
from schemas.trust import CertificateRequest, FleetTrust, RevokedCertificate, TlsMode
from store import codec, keys
from store.port import Guard, ModRevisionGuard, Transport

MAX_UNCHECKED: Final = 64
"""The most gateways, and the most reconcilers, that get a first certificate without a token."""


async def check_first_request(
    transport: Transport, identity: Identity, asked: CertificateRequest
) -> tuple[Guard, ...]:
    """Check that the identity may have its first certificate; return the guards that it stays so.

    Raises:
        IssueError: it may not.
        StoreError: the store did not answer.

    """
    item = await transport.get(keys.FLEET_TRUST)
    if item is None or codec.decode(FleetTrust, item).mode is not TlsMode.PERMISSIVE:
        raise IssueError(
            f"{identity.uri} has no certificate, and the fleet is secured already: create a token with `fleetctl "
            "token create`, and join with it"
        )
    issued = keys.issued_key(identity.role, identity.name)
    if await transport.get(issued) is not None:
        raise IssueError(
            f"{identity.uri} has a certificate, and the request is not signed with its key; a Mac that has lost its "
            "key joins with a token for its name"
        )
    await _check_revoked(transport, identity)
    if identity.role is Role.NODE:
        await _check_node(transport, identity, asked.hardware_uuid)
    elif identity.role in (Role.GATEWAY, Role.RECONCILER, Role.DASHBOARD):
        listing = await transport.list(f"{keys.ISSUED_PREFIX}{identity.role}/")
        if len(listing.items) >= MAX_UNCHECKED:
            raise IssueError(
                f"{len(listing.items)} processes have the role {identity.role}; more of them join with a token"
            )
    else:
        raise IssueError(f"{identity.uri} gets no first certificate without an administrator")
    return (
        ModRevisionGuard(key=item.key, mod_revision=item.mod_revision),
        ModRevisionGuard(key=issued, mod_revision=0),
    )


async def _check_revoked(transport: Transport, identity: Identity) -> None:
    for item in (await transport.list(keys.REVOKED_PREFIX)).items:
        if codec.decode(RevokedCertificate, item).identity == identity.uri:
            raise IssueError(
                f"{identity.uri} was revoked; it joins again with a token for its name"
            )


async def _check_node(transport: Transport, identity: Identity, hardware_uuid: str) -> None:
    if await transport.get(keys.spec_key(Node.__name__, identity.name)) is None:
        raise IssueError(
            f"the fleet has no node {identity.name}; start its agent, or join with a token"
        )
    item = await transport.get(keys.status_key(Node.__name__, identity.name))
    known = "" if item is None else codec.decode(NodeStatus, item).hardware_uuid
    if known != hardware_uuid:
        raise IssueError(
            f"node {identity.name} is another Mac; join with a token, and another name"
        )
