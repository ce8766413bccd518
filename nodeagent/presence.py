"""The node's sign of life and its self-description in the store. Holds the lease."""

import logging
import random
from collections.abc import Callable

from machinery.clock import Clock
from schemas.node import NodeLease, NodeStatus
from store import codec, keys
from store.errors import ConflictError, StoreError
from store.lease import LeaseSession
from store.port import Put, Transport, Unchanged

log = logging.getLogger(__name__)

# 5 s at most (docs/architecture.md, section 3). etcd notices an expiry up to half a second late, so
# 4 s is what makes a dead Mac's endpoints vanish within 5.
LEASE_TTL_S = 4


class NameTakenError(Exception):
    """Another live node goes by our name; a person must rename one of them."""


class Presence:
    """Keeps the node's lease, and writes its status when there is news."""

    def __init__(
        self, transport: Transport, clock: Clock, *, node: str, uid: str, session: str
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._node = node
        self._lease_value = NodeLease(uid=uid, session=session)
        self._session: LeaseSession | None = None
        self._written: NodeStatus | None = None

    @property
    def lease(self) -> int | None:
        """Return the lease to publish under; None while we must take ourselves for dead."""
        session = self._session
        return session.id if session is not None and session.valid() else None

    async def keep(self, on_new_session: Callable[[], None]) -> None:
        """Hold a lease for ever, a new one whenever one is lost.

        Raises:
            NameTakenError: another live node has our name.

        """
        while True:
            session = LeaseSession(self._transport, self._clock, ttl_s=LEASE_TTL_S)
            try:
                await session.open()
                await self._announce(session)
            except StoreError as error:
                log.info("no lease yet", extra={"why": str(error)})
                await self._clock.sleep(random.uniform(0.1, 0.4))  # noqa: S311 - jitter is no secret
                continue
            self._session = session
            log.info("lease held", extra={"lease": session.id})
            on_new_session()
            await session.keep()
            self._session = None

    async def _announce(self, session: LeaseSession) -> None:
        key = keys.node_lease_key(self._node)
        there = await self._transport.get(key)
        if there is not None:
            holder = codec.decode(NodeLease, there)
            if holder.uid != self._lease_value.uid:
                await session.close()
                raise NameTakenError(
                    f"the name {self._node} is taken by a live node with another identity; "
                    "start this agent with another --name"
                )
        put = Put(key=key, value=codec.encode(self._lease_value), lease=session.id)
        guard = Unchanged(key=key, mod_revision=there.mod_revision if there else 0)
        try:
            await self._transport.commit([guard], [put])
        except ConflictError:
            await session.close()
            raise

    async def describe(self, status: NodeStatus) -> None:
        """Write the node's status if it is news. Raises the store's errors."""
        if status == self._written:
            return
        key = keys.status_key("Node", self._node)
        if self._written is None:
            there = await self._transport.get(key)
            if there is not None and there.value == codec.encode(status):
                self._written = status
                return
        await self._transport.commit([], [Put(key=key, value=codec.encode(status))])
        self._written = status
