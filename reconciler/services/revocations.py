"""Revocation of a machine's access to the store, beside that of its certificates.

etcd knows no revoked certificates of the fleet: a machine whose certificates are revoked could go on reading with its
password, and its lease would keep the node alive. A signer that has root's password therefore deletes the machine's user,
and ends the node's lease, so that its replicas are placed elsewhere.
"""

import asyncio
import logging

from identity.names import Identity, IdentityError, Role, parse_identity
from machinery.clock import Clock
from machinery.control_loop import WorkQueue, run_loop
from schemas.trust import RevokedCertificate
from store import codec, keys
from store.errors import StoreError
from store.etcd.accounts import JoinedAccounts
from store.informer import Informer
from store.port import Transport

log = logging.getLogger(__name__)


class RevocationController:
    """Follows the revoked certificates of the fleet. Run `run()` in a task group."""

    def __init__(self, transport: Transport, clock: Clock, accounts: JoinedAccounts) -> None:
        self._transport = transport
        self._accounts = accounts
        self._queue = WorkQueue[str](clock)
        """URIs of identities."""
        self._revoked = Informer(
            transport,
            keys.REVOKED_PREFIX,
            lambda item: codec.decode(RevokedCertificate, item),
            clock,
        )
        self._revoked.on_change(self._changed)

    async def run(self) -> None:
        """End the access of revoked machines, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._revoked.run())
            group.create_task(run_loop(self._queue, self._end_access, transient=(StoreError,)))

    def _changed(self, key: str) -> None:
        entry = self._revoked.items.get(key)
        if entry is not None:
            self._queue.add(entry.identity)

    async def _end_access(self, uri: str) -> None:
        try:
            identity = parse_identity(uri)
        except IdentityError as error:
            log.warning("revocation not followed", extra={"why": str(error)})
            return
        issued = keys.issued_key(identity.role, identity.name)
        if await self._transport.get(issued) is not None:
            return  # the machine has joined again
        if not await self._accounts.are_required():
            return  # without passwords, the certificate of the store's client decides alone
        is_deleted = await self._accounts.delete(identity.role, identity.name)
        is_ended = await self._end_lease(identity)
        if is_deleted or is_ended:
            log.info("access to the store ended", extra={"identity": uri})

    async def _end_lease(self, identity: Identity) -> bool:
        """End the lease of a node's agent; return whether it had one."""
        if identity.role is not Role.NODE:
            return False
        held = await self._transport.get(keys.node_lease_key(identity.name))
        if held is None or not held.lease:
            return False
        await self._transport.revoke(held.lease)
        return True
