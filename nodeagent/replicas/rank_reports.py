"""The node's reports of its ranks in the store: one key each, written by this agent alone."""

import logging
from collections.abc import Sequence

from machinery.clock import Clock
from nodeagent.node.registration import NOT_RESTORING
from schemas.meta import Condition, find_condition
from schemas.replica import RankStatus, Replica
from store import codec, keys
from store.codec import NewerDocumentError, UndecodableError
from store.errors import StoreError, UnavailableError
from store.port import Delete, Put, Transport

log = logging.getLogger(__name__)


class RankReports:
    """The reports of one node, by replica name: a node has at most one rank of a replica."""

    def __init__(self, transport: Transport, clock: Clock, node: str) -> None:
        self._transport = transport
        self._clock = clock
        self._node = node
        self._reported: dict[str, RankStatus] = {}
        self._ranks: dict[str, int] = {}
        """The rank of the last report."""
        self._muted: set[str] = set()
        """Replicas whose report in the store is of a newer agent, which we must not overwrite."""
        self._unread: set[str] = set()
        """Replicas whose report in the store could not be read yet; it may be of a newer agent."""
        self._outdated: dict[str, set[str]] = {}
        """Keys of our reports of other ranks of the replica."""
        self._is_listed = False

    def forget(self, name: str) -> None:
        """Drop the state of a replica that is not assigned to this node any more."""
        self._reported.pop(name, None)
        self._ranks.pop(name, None)
        self._muted.discard(name)
        self._unread.discard(name)

    async def read(self, replica: Replica, rank: int) -> RankStatus | None:
        """Return our last report; read from the store once, after a restart of this agent."""
        name = replica.name
        before = self._ranks.get(name)
        if before is not None and before != rank:
            self._outdated.setdefault(name, set()).add(self._key(name, before))
            self.forget(name)
        if name not in self._reported:
            try:
                if replica.spec.formation is not None:
                    await self._list()
                stored = await self._transport.get(self._key(name, rank))
            except StoreError:
                self._unread.add(name)
                return None
            was_muted = name in self._muted
            self._muted.discard(name)
            self._unread.discard(name)
            if stored is not None:
                try:
                    self._reported[name] = codec.decode(RankStatus, stored)
                    self._ranks[name] = rank
                except NewerDocumentError as error:
                    self._muted.add(name)
                    if not was_muted:
                        log.warning("rank not reported", extra={"why": str(error)})
                except UndecodableError:
                    return None  # it was written by hand: report again
        return self._reported.get(name)

    async def write(self, replica: Replica, rank: int, status: RankStatus) -> None:
        """Write the report of a rank; a condition's time is that of its last change of status.

        Raises:
            StoreError: it was not written.

        """
        name = replica.name
        if name in self._muted:
            return
        if name in self._unread:
            raise UnavailableError("the last report of the rank could not be read yet")
        before = self._reported.get(name)
        old = before.conditions if before is not None else ()
        stamped = tuple(self._stamped(old, condition) for condition in status.conditions)
        status = status.model_copy(update={"conditions": stamped})
        outdated = sorted(self._outdated.get(name, set()) - {self._key(name, rank)})
        await self._transport.commit(
            [codec.unchanged_guard(replica), NOT_RESTORING],
            [
                Put(key=self._key(name, rank), value=codec.encode(status)),
                *(Delete(key=key) for key in outdated),
            ],
        )
        self._outdated.pop(name, None)
        self._reported[name], self._ranks[name] = status, rank

    def _stamped(self, old: Sequence[Condition], new: Condition) -> Condition:
        """Return the condition with the time of its last change of status."""
        before = find_condition(old, new.type)
        same = before is not None and before.status == new.status
        changed_at = (
            before.last_transition_time if before is not None and same else self._clock.now()
        )
        return new.model_copy(update={"last_transition_time": changed_at})

    async def retract(self, name: str) -> None:
        """Delete the report of a group that continues without this node, once its rank here has ended.

        Until then the reconciler counts its memory.

        Raises:
            StoreError: the report may still exist.

        """
        await self._list()
        if name in self._ranks:
            self._outdated.setdefault(name, set()).add(self._key(name, self._ranks[name]))
        gone = sorted(self._outdated.get(name, ()))
        if gone:
            await self._transport.commit([NOT_RESTORING], [Delete(key=key) for key in gone])
        self._outdated.pop(name, None)

    async def _list(self) -> None:
        """List, once, the reports of earlier runs of this agent, which may be of other ranks."""
        if self._is_listed:
            return
        for item in (await self._transport.list(keys.rank_prefix(self._node))).items:
            self._outdated.setdefault(keys.replica_of(item.key), set()).add(item.key)
        self._is_listed = True

    def _key(self, name: str, rank: int) -> str:
        return keys.rank_key(self._node, name, rank)
