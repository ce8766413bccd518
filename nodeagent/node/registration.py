"""The registration of the node in the store: its lease, its status, and the guard against a running restore.

From the first write of a restore's marker to its removal the store holds a part of the fleet: a missing Replica then means
nothing, and a write of an agent would make the restore fail.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from identity.credentials import TlsReporter, no_report
from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from schemas.node import NodeLease, NodeStatus
from schemas.replica import Replica, concerned_nodes
from store import codec, keys
from store.errors import ConflictError, PermissionDeniedError, StoreError
from store.leases import LEASE_TTL_S, LeaseSession, keep_published
from store.port import KeyValue, ModRevisionGuard, Put, Transport

NOT_RESTORING: Final = ModRevisionGuard(key=keys.RESTORING, mod_revision=0)
"""The guard of every write of an agent to a key that backups contain."""


async def is_withdrawn(transport: Transport, replica: str, node: str) -> bool:
    """Return whether the replica certainly concerns the node no more: it was deleted, or moved elsewhere.

    Raises:
        StoreError: the store could not be read.

    """
    # In this order: a restore may end between the two reads, and the second one then finds the replica.
    if await transport.get(keys.RESTORING) is not None:
        return False
    item = await transport.get(keys.spec_key("Replica", replica))
    if item is None:
        return True
    try:
        return node not in concerned_nodes(codec.decode_object(Replica, item))
    except codec.UndecodableError:
        return False  # a newer mlx-fleet wrote it: the engine goes on


log = logging.getLogger(__name__)

_BACKOFF = Backoff(first_s=0.2, limit_s=2.0)
_CHECK_S: Final = 60.0


class NameTakenError(Exception):
    """Another live agent has this node's name; a person must rename one of them."""


def session_name(state_dir: Path, pid: int) -> str:
    """Return the identity of one run of an agent: a digest of its state folder, and its process.

    One folder has one agent at a time (nodeagent/__main__.py holds a lock), so a session of the same folder is an earlier
    run of this agent. The node's uid cannot tell that: it is the same for every folder of one machine.
    """
    return f"{hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:12]}/{pid}"


class NodeRegistration:
    """Keeps the node's lease, and writes its status when it changed."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        *,
        node: str,
        lease: NodeLease,
        tls: TlsReporter = no_report,
        check_s: float = _CHECK_S,
    ) -> None:
        """Prepare. `tls` reports the TLS of this process; the lease follows it.

        `check_s`: how often the status is looked for in the store while it stays the same.
        """
        self._transport = transport
        self._clock = clock
        self._node = node
        self._lease_value = lease
        self._tls = tls
        self._check_s = check_s
        self._session: LeaseSession | None = None
        self._stored: KeyValue | None = None
        """The node's status in the store, as this run has read or written it."""
        self._checked_at = 0.0
        self._is_wanted = asyncio.Event()
        self._is_wanted.set()

    @property
    def lease(self) -> int | None:
        """The id of the lease to publish under; None while the node counts as dead."""
        session = self._session
        return session.id if session is not None and session.valid() else None

    async def keep(self, on_new_session: Callable[[], None], *, ttl_s: int = LEASE_TTL_S) -> None:
        """Hold a lease forever; replace one that is lost, and call `on_new_session` for each.

        Raises:
            NameTakenError: another live agent has our name.

        """
        last_error = ""
        retries = Retries(_BACKOFF, self._clock)
        while True:
            await self._is_wanted.wait()
            session = LeaseSession(self._transport, self._clock, ttl_s=ttl_s)
            try:
                await session.open()
                await self._register(session)
            except (StoreError, codec.UndecodableError) as error:
                # An unreadable lease is of another version and ends by itself: wait for its end.
                await session.close()
                if str(error) != last_error:
                    log.warning("no lease yet; will retry", extra={"why": str(error)})
                last_error = str(error)
                # A person must correct credentials; an unreachable etcd comes back by itself.
                await retries.wait(is_refused=isinstance(error, PermissionDeniedError))
                continue
            retries.reset()
            last_error = ""
            # The end of a lease may be that of the store, which another one has replaced.
            self._session, self._stored = session, None
            log.info("lease held", extra={"lease": session.id})
            on_new_session()
            key = keys.node_lease_key(self._node)
            await keep_published(session, self._transport, self._clock, key, self._value)
            self._session = None

    async def suspend(self) -> None:
        """End the lease, and with it all keys that depend on it; hold none until `resume()`."""
        self._is_wanted.clear()
        if self._session is not None:
            await self._session.close()

    def resume(self) -> None:
        """Hold a lease again."""
        self._is_wanted.set()

    def _value(self) -> bytes:
        return codec.encode(self._lease_value.model_copy(update={"tls": self._tls()}))

    async def _register(self, session: LeaseSession) -> None:
        key = keys.node_lease_key(self._node)
        current = await self._transport.get(key)
        if current is not None:
            holder = self._other_holder(codec.decode(NodeLease, current))
            if holder:
                await session.close()
                raise NameTakenError(f"the name {self._node} is taken by {holder}")
        put = Put(key=key, value=self._value(), lease=session.id)
        guard = ModRevisionGuard(key=key, mod_revision=current.mod_revision if current else 0)
        await self._transport.commit([guard], [put])

    def _other_holder(self, holder: NodeLease) -> str:
        """Return the other holder of the name, for the error message; "" for an earlier run of this very agent."""
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
        """Return the status that an earlier run of this agent wrote; None if there is none that can be read.

        Raises:
            StoreError: the store could not be read.

        """
        current = await self._current()
        if current is None:
            return None
        try:
            status = codec.decode(NodeStatus, current)
        except codec.UndecodableError:  # of a newer agent, or damaged: describe the node again
            return None
        return status if status.uid == self._lease_value.uid else None

    async def _current(self) -> KeyValue | None:
        """Return the status in the store. No other process writes it, so it is read once, and again if it has gone."""
        now = self._clock.monotonic()
        if self._stored is not None and now - self._checked_at >= self._check_s:
            guard = ModRevisionGuard(key=self._stored.key, mod_revision=self._stored.mod_revision)
            try:
                # A user may have deleted the node, which still exists. The answer is short, unlike the status.
                await self._transport.commit([guard], [])
                self._checked_at = now
            except ConflictError:
                self._stored = None
        if self._stored is None:
            self._stored = await self._transport.get(keys.status_key("Node", self._node))
            self._checked_at = now
        return self._stored

    async def describe(self, status: NodeStatus) -> None:
        """Write the node's status if the store holds another one.

        Raises:
            StoreError: it was not written.
            NewerDocumentError: a newer agent wrote it; it must not be overwritten.

        """
        value, current = codec.encode(status), await self._current()
        if current is not None and current.value == value:
            return
        codec.refuse_newer(NodeStatus, current)
        key, read = keys.status_key("Node", self._node), current.mod_revision if current else 0
        guard = ModRevisionGuard(key=key, mod_revision=read)
        # Until the answer arrives it is not known what is stored.
        self._stored = None
        revision = await self._transport.commit([guard, NOT_RESTORING], [Put(key=key, value=value)])
        self._stored = KeyValue(key, value, revision, revision)
