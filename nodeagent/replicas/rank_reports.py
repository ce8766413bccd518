"""What this node says of its ranks in the store: one key each, written by its agent alone."""

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
    """The reports of one node's agent, by the name of the replica: a node has one rank of it at most."""

    def __init__(self, transport: Transport, clock: Clock, node: str) -> None:
        self._transport = transport
        self._clock = clock
        self._node = node
        self._said: dict[str, RankStatus] = {}
        self._ranks: dict[str, int] = {}
        """Under which rank the last one was said."""
        self._muted: set[str] = set()
        """Replicas of which we must not report: what is there is a newer agent's to overwrite."""
        self._unread: set[str] = set()
        """Replicas whose report in the store we could not read yet; it may be a newer agent's."""
        self._outdated: dict[str, set[str]] = {}
        """Keys under which we reported of another rank of the replica."""
        self._is_listed = False

    def forget(self, name: str) -> None:
        """Drop what is remembered of a replica that is none of ours any more."""
        self._said.pop(name, None)
        self._ranks.pop(name, None)
        self._muted.discard(name)
        self._unread.discard(name)

    async def said(self, replica: Replica, rank: int) -> RankStatus | None:
        """Return what we last said; asked of the store once, after a restart of ours."""
        name = replica.name
        before = self._ranks.get(name)
        if before is not None and before != rank:
            self._outdated.setdefault(name, set()).add(self._key(name, before))
            self.forget(name)
        if name not in self._said:
            try:
                if replica.spec.formation is not None:
                    await self._list()
                there = await self._transport.get(self._key(name, rank))
            except StoreError:
                self._unread.add(name)
                return None
            was_muted = name in self._muted
            self._muted.discard(name)
            self._unread.discard(name)
            if there is not None:
                try:
                    self._said[name] = codec.decode(RankStatus, there)
                    self._ranks[name] = rank
                except NewerDocumentError as error:
                    self._muted.add(name)
                    if not was_muted:
                        log.warning("rank not reported", extra={"why": str(error)})
                except UndecodableError:
                    return None  # somebody wrote it by hand: say anew what is so
        return self._said.get(name)

    async def write(self, replica: Replica, rank: int, status: RankStatus) -> None:
        """Write what is so of a rank, with the times at which its conditions' truth moved.

        Raises:
            StoreError: it was not written.

        """
        name = replica.name
        if name in self._muted:
            return
        if name in self._unread:
            raise UnavailableError("what is reported of the rank could not be read yet")
        before = self._said.get(name)
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
        self._said[name], self._ranks[name] = status, rank

    def _stamped(self, old: Sequence[Condition], new: Condition) -> Condition:
        """Return the condition with the time at which its truth moved."""
        before = find_condition(old, new.type)
        same = before is not None and before.status == new.status
        moved = before.last_transition_time if before is not None and same else self._clock.now()
        return new.model_copy(update={"last_transition_time": moved})

    async def retract(self, name: str) -> None:
        """Remove what was said of a group that goes on without this node, once its rank here has ended.

        Until then the reconciler counts its memory.

        Raises:
            StoreError: it is still there, maybe.

        """
        await self._list()
        if name in self._ranks:
            self._outdated.setdefault(name, set()).add(self._key(name, self._ranks[name]))
        gone = sorted(self._outdated.get(name, ()))
        if gone:
            await self._transport.commit([NOT_RESTORING], [Delete(key=key) for key in gone])
        self._outdated.pop(name, None)

    async def _list(self) -> None:
        """Learn, once, what an earlier run of this agent said, and maybe of other ranks than are ours now."""
        if self._is_listed:
            return
        for item in (await self._transport.list(keys.rank_prefix(self._node))).items:
            self._outdated.setdefault(keys.replica_of(item.key), set()).add(item.key)
        self._is_listed = True

    def _key(self, name: str, rank: int) -> str:
        return keys.rank_key(self._node, name, rank)
