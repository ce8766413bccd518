"""What an agent heeds while a backup is restored into the store. Decides nothing else.

From the marker's first write to its removal the store is half of a fleet: that a Replica is not there says
nothing, and what an agent writes would be taken for somebody else's by the restore, which then breaks off.

The node's sign of life and its self-description in the store. Holds the lease.
"""

import hashlib
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

from machinery.clock import Clock
from schemas.node import NodeLease, NodeStatus
from store import codec, keys
from store.errors import PermissionDeniedError, StoreError
from store.leases import LeaseSession
from store.port import ModRevisionGuard, Put, Transport

NOT_RESTORING: Final = ModRevisionGuard(key=keys.RESTORING, mod_revision=0)
"""The guard of what an agent writes and a backup holds."""


async def is_replica_deleted(transport: Transport, replica: str) -> bool:
    """Return whether the store says for certain that there is no such replica.

    Raises:
        StoreError: nobody can say.

    """
    # In this order: a restore may end between the two, and then the replica is there by the second.
    if await transport.get(keys.RESTORING) is not None:
        return False
    return await transport.get(keys.spec_key("Replica", replica)) is None


log = logging.getLogger(__name__)

# 5 s at most (docs/architecture.md, section 3). etcd notices an expiry up to half a second late, so
# 4 s is what makes a dead Mac's endpoints vanish within 5.
LEASE_TTL_S = 4


class NameTakenError(Exception):
    """Another live agent goes by our name; a person must rename one of them."""


def session_name(state_dir: Path, pid: int) -> str:
    """Return what tells one run of an agent from others: its state folder, then its process.

    One folder has one agent at a time (nodeagent/__main__.py holds a lock), so whoever comes from
    our folder was our own earlier run. The node's uid does not say that: it is the same for every
    folder of one machine.
    """
    return f"{hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:12]}/{pid}"


class NodeRegistration:
    """Keeps the node's lease, and writes its status when there is news."""

    def __init__(
        self, transport: Transport, clock: Clock, *, node: str, uid: str, session: str
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._node = node
        self._lease_value = NodeLease(uid=uid, session=session)
        self._session: LeaseSession | None = None

    @property
    def lease(self) -> int | None:
        """Return the lease to publish under; None while we must take ourselves for dead."""
        session = self._session
        return session.id if session is not None and session.valid() else None

    async def keep(self, on_new_session: Callable[[], None], *, ttl_s: int = LEASE_TTL_S) -> None:
        """Hold a lease for ever, a new one whenever one is lost.

        Raises:
            NameTakenError: another live agent has our name.

        """
        told = ""
        while True:
            session = LeaseSession(self._transport, self._clock, ttl_s=ttl_s)
            try:
                await session.open()
                await self._announce(session)
            except (StoreError, codec.UndecodableError) as error:
                # What cannot be read is another version's, and goes with its lease: wait for that.
                await session.close()
                why = str(error)
                if why != told:
                    log.warning("no lease yet", extra={"why": why})
                told = why
                # Credentials are mended by a person, an etcd that is away comes back by itself.
                is_refused = isinstance(error, PermissionDeniedError)
                await self._clock.sleep(random.uniform(0.1, 0.4) * (10 if is_refused else 1))
                continue
            told = ""
            self._session = session
            log.info("lease held", extra={"lease": session.id})
            on_new_session()
            await session.keep()
            self._session = None

    async def _announce(self, session: LeaseSession) -> None:
        key = keys.node_lease_key(self._node)
        there = await self._transport.get(key)
        if there is not None:
            why = self._not_ours(codec.decode(NodeLease, there))
            if why:
                await session.close()
                raise NameTakenError(f"the name {self._node} is taken by {why}")
        put = Put(key=key, value=codec.encode(self._lease_value), lease=session.id)
        guard = ModRevisionGuard(key=key, mod_revision=there.mod_revision if there else 0)
        await self._transport.commit([guard], [put])

    def _not_ours(self, holder: NodeLease) -> str:
        """Return who holds our name, if it is not an earlier run of this very agent."""
        ours = self._lease_value
        if holder.uid != ours.uid:
            return "a live node with another identity; start this agent with another --name"
        if holder.session.partition("/")[0] != ours.session.partition("/")[0]:
            return (
                "a live agent on this machine with another --state-dir; stop that one, and wait "
                f"{LEASE_TTL_S + 1} s, or start this one with another --name"
            )
        return ""

    async def described(self) -> NodeStatus | None:
        """Return what an earlier run of ours said of the node; None if nothing, or nothing we can read.

        Raises:
            StoreError: it could not be asked for.

        """
        there = await self._transport.get(keys.status_key("Node", self._node))
        if there is None:
            return None
        try:
            said = codec.decode(NodeStatus, there)
        except codec.UndecodableError:  # a newer agent's, or nobody's: say anew what is so
            return None
        return said if said.uid == self._lease_value.uid else None

    async def describe(self, status: NodeStatus) -> None:
        """Write the node's status if the store holds another one.

        Raises:
            StoreError: it was not written.
            NewerDocumentError: a newer agent wrote it; not ours to overwrite.

        """
        key, value = keys.status_key("Node", self._node), codec.encode(status)
        there = await self._transport.get(key)
        # Asked each time: somebody may have deleted the node, which is there all the same.
        if there is None or there.value != value:
            codec.refuse_newer(NodeStatus, there)
            guard = ModRevisionGuard(key=key, mod_revision=there.mod_revision if there else 0)
            await self._transport.commit([guard, NOT_RESTORING], [Put(key=key, value=value)])
