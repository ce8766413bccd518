"""All watches of a connection on one stream. Equal watches share one of etcd's, which sends each change once.

A stream is opened for the first watch and closed after the last one.
"""

import asyncio
import copy
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Final

from store.errors import CompactedError, ReplacedError, StoreError, UnavailableError
from store.etcd.adapter import HEARTBEAT_S, drop_seen_changes
from store.etcd.error_mapping import is_refusal
from store.etcd.grpc import wire
from store.etcd.grpc.channel import GrpcChannel, Stream
from store.etcd.grpc.proto import etcd_pb2 as pb
from store.keys import prefix_end
from store.port import KeyChange, WatchBatch

# The request of a progress report, and the watch id of its answer (clientv3's InvalidWatchID).
_PROGRESS: Final = pb.WatchRequest(progress_request=pb.WatchProgressRequest())
_NO_WATCH: Final = -1
# While other answers of the same etcd arrive, the stream itself is tested this often. 5,000 agents send 83 requests a second.
_STREAM_TEST_S: Final = 60.0
# A follower that leaves more changes than this unread is ended, because they are all in memory.
_MOST_UNREAD: Final = 50_000


class _Follower:
    """One caller of `watch`: the batches it has not read yet."""

    def __init__(self, prefix: str, after_revision: int) -> None:
        self.prefix = prefix
        self.after_revision = after_revision
        self._batches: deque[WatchBatch] = deque()
        self._unread = 0
        self._end: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, batch: WatchBatch) -> None:
        """Add a batch."""
        if self._end is not None:
            return
        self._batches.append(batch)
        self._unread += len(batch.changes)
        if self._unread > _MOST_UNREAD:
            self.end(UnavailableError(f"{self._unread} changes of {self.prefix} were not read"))
            self._batches.clear()
        self._wake()

    def end(self, error: Exception) -> None:
        """Raise the error after the batches that are there."""
        if self._end is None:
            self._end = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> WatchBatch:
        """Return the next batch; the first one confirms the watch, with etcd's revision."""
        while not self._batches:
            if self._end is not None:
                raise self._end
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        batch = self._batches.popleft()
        self._unread -= len(batch.changes)
        return batch


@dataclass(slots=True, eq=False)
class _EtcdWatch:
    """One of etcd's watches, and its followers."""

    number: int
    prefix: str
    reached: int
    """The revision of the last change that it delivered, or after which it was created."""
    is_created: bool = False
    fragments: list[KeyChange] = field(default_factory=list)
    followers: list[_Follower] = field(default_factory=list)

    def tell(self, batch: WatchBatch) -> None:
        for follower in self.followers:
            follower.put(batch)

    def end(self, error: Exception) -> None:
        for follower in self.followers:
            # Each needs its own: raising adds to an error's traceback.
            follower.end(copy.copy(error))


class _WatchStream:
    """One stream to etcd with any number of watches. Ends itself when it breaks or the last follower leaves."""

    def __init__(
        self, stream: Stream[pb.WatchRequest, pb.WatchResponse], channel: GrpcChannel
    ) -> None:
        self._stream = stream
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._watches: dict[int, _EtcdWatch] = {}
        self._by_prefix: dict[str, _EtcdWatch] = {}
        self._uncreated: deque[int] = deque()
        """Watches in the order of their requests, which is the order in which etcd answers."""
        self._last_number = 0
        self._revision, self._store = 0, ""
        self._outgoing: deque[pb.WatchRequest] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._reader = self._loop.create_task(self._read())
        self._reader.add_done_callback(self._on_task_end)
        self._answered_at = self._ticked_at = self._loop.time()
        self._asked_at: float | None = None
        self._tick_s = min(HEARTBEAT_S, channel.idle_s / 4)
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        self._has_ended = False
        self.takes_watches = True

    def join(self, follower: _Follower) -> None:
        """Let the follower have all changes after its revision."""
        watch = self._by_prefix.get(follower.prefix)
        # A watch that has delivered nothing after that revision will deliver all that the follower needs.
        if watch is None or watch.reached > follower.after_revision:
            self._last_number += 1
            prefix, number = follower.prefix, self._last_number
            watch = _EtcdWatch(number, prefix, follower.after_revision)
            self._watches[number] = self._by_prefix[prefix] = watch
            self._uncreated.append(number)
            create = pb.WatchCreateRequest(
                key=wire.raw(prefix),
                range_end=wire.raw(prefix_end(prefix)),
                # Not the next one: see `drop_seen_changes`.
                start_revision=max(1, follower.after_revision),
                progress_notify=True,
                watch_id=number,
                fragment=True,
            )
            self._send(pb.WatchRequest(create_request=create))
        elif watch.is_created:
            follower.put(self._confirmation())
        watch.followers.append(follower)

    def leave(self, follower: _Follower) -> None:
        """Remove a follower; a watch without one is cancelled, and the stream ends after the last one."""
        for watch in self._watches.values():
            if follower in watch.followers:
                watch.followers.remove(follower)
                if not watch.followers:
                    self._forget(watch)
                    self._send(
                        pb.WatchRequest(cancel_request=pb.WatchCancelRequest(watch_id=watch.number))
                    )
                break
        if not self._watches:
            self.close()

    def _forget(self, watch: _EtcdWatch) -> None:
        self._watches.pop(watch.number, None)
        if self._by_prefix.get(watch.prefix) is watch:
            del self._by_prefix[watch.prefix]

    def close(self) -> None:
        """End the stream."""
        self._end(UnavailableError("the connection to etcd was closed"))

    def _end(self, error: Exception) -> None:
        self._has_ended, self.takes_watches = True, False
        self._timer.cancel()
        for task in (self._reader, self._writer):
            if task is not None:
                task.cancel()
        self._stream.close()
        for watch in self._watches.values():
            watch.end(error)
        self._watches.clear()
        self._by_prefix.clear()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Exception):
            self._end(error)

    def _send(self, request: pb.WatchRequest) -> None:
        """Send in a task of its own: a write that is cancelled would break the stream for all."""
        self._outgoing.append(request)
        if not self._has_ended and (self._writer is None or self._writer.done()):
            self._writer = self._loop.create_task(self._write())
            self._writer.add_done_callback(self._on_task_end)

    async def _write(self) -> None:
        while self._outgoing:
            await self._stream.send(self._outgoing.popleft())

    async def _read(self) -> None:
        while True:
            answer = await self._stream.next()
            if answer is None:
                raise self._stream.failure("the stream ended")
            self._asked_at, self._answered_at = None, self._loop.time()
            self._take(answer)

    def _take(self, answer: pb.WatchResponse) -> None:
        self._revision = max(self._revision, answer.header.revision)
        self._store = str(answer.header.cluster_id)
        number = answer.watch_id
        if answer.created:
            number = self._uncreated.popleft()  # etcd may refuse a watch under another number
        watch = self._watches.get(number)
        if watch is None:
            if number == _NO_WATCH:
                self._tell_alive()
            return  # nobody follows it any more
        if answer.canceled:
            self._forget(watch)
            watch.end(self._cancellation(answer))
        elif answer.created:
            watch.is_created = True
            watch.tell(self._confirmation())
        elif answer.events:
            watch.fragments.extend(map(wire.change, answer.events))
            # Keep all changes of a revision together, so that a resume does not split them.
            if not answer.fragment:
                changes, watch.fragments = tuple(watch.fragments), []
                watch.reached = changes[-1].mod_revision
                watch.tell(WatchBatch(revision=watch.reached, changes=changes, store=self._store))
        else:
            # While a watch catches up, etcd's header is ahead of its events; a report without events is not.
            revision = answer.header.revision
            watch.tell(WatchBatch(revision=revision, changes=(), store=self._store))

    def _cancellation(self, answer: pb.WatchResponse) -> StoreError:
        if answer.compact_revision:
            return CompactedError("the history after the last revision seen is gone")
        # It may be due to the token that the stream was opened with: the next watch opens another one.
        self.takes_watches = False
        reason = answer.cancel_reason
        if is_refusal(reason):
            return _RefusedWatchError(f"watch cancelled: {reason}")
        return self._stream.failure(f"watch cancelled: {reason or 'no reason'}")

    def _confirmation(self) -> WatchBatch:
        """Return a batch with the revision that etcd has reached."""
        return WatchBatch(revision=self._revision, changes=(), store=self._store)

    def _tell_alive(self) -> None:
        """Tell all followers that etcd is there, without a revision.

        The revision of a report that was requested may be ahead of events that are still to come (etcd issue 15220).
        """
        alive = WatchBatch(revision=0, changes=(), store=self._store)
        for watch in self._watches.values():
            if watch.is_created:
                watch.tell(alive)

    def _tick(self) -> None:
        """Find out whether etcd is alive: by any of its answers, else by a request on this stream."""
        now, before = self._loop.time(), self._ticked_at
        self._ticked_at = now
        if now - before > 2 * self._tick_s:
            self._asked_at = None  # this process had no time to read the answer
        if self._asked_at is not None and now - self._asked_at >= self._channel.idle_s / 2:
            self._end(self._stream.failure(f"nothing received for {self._channel.idle_s:g} s"))
            return
        is_heard = self._stream.heard_at() > before
        if is_heard:
            self._tell_alive()
        if self._asked_at is None and not (is_heard and now - self._answered_at < _STREAM_TEST_S):
            self._asked_at = now
            self._send(_PROGRESS)
        self._timer = self._loop.call_later(self._tick_s, self._tick)


class _RefusedWatchError(UnavailableError):
    """etcd refused the watch: the token is stale, or the user may not read the prefix."""


class Watches:
    """Follows prefixes for all callers of a connection."""

    def __init__(self, channel: GrpcChannel) -> None:
        self._channel = channel
        self._current: _WatchStream | None = None

    async def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[WatchBatch]:
        """Yield batches as `Transport.watch` does; raises as it does."""
        follower = _Follower(prefix, after_revision)
        stream = await self._stream()
        stream.join(follower)
        try:
            created = await follower.next()
            # A watch on a future revision would be silent forever. A lagging member may not have the revision yet.
            if created.revision < after_revision and await self._newest(prefix) < after_revision:
                raise ReplacedError("the store was replaced or rolled back")
            yield WatchBatch(revision=after_revision, changes=(), store=created.store)
            while True:
                batch: WatchBatch | None = await follower.next()
                assert batch is not None
                if batch.changes and batch.changes[0].mod_revision <= after_revision:
                    batch = drop_seen_changes(batch.changes, after_revision, batch.store)
                elif batch.revision < after_revision:
                    batch = WatchBatch(revision=after_revision, changes=(), store=batch.store)
                if batch is not None:
                    after_revision = batch.revision
                    yield batch
        except _RefusedWatchError:
            # For a stale token, too, etcd may cancel a watch as denied. A call tells the two apart,
            # and renews the token.
            request = pb.RangeRequest(
                key=wire.raw(prefix), range_end=wire.raw(prefix_end(prefix)), limit=1
            )
            await self._channel.read(wire.RANGE, request)
            raise
        finally:
            stream.leave(follower)

    async def _stream(self) -> _WatchStream:
        """Return a stream that takes more watches."""
        if self._current is None or not self._current.takes_watches:
            await self._channel.ready()
            opened: Stream[pb.WatchRequest, pb.WatchResponse] = await self._channel.open(wire.WATCH)
            if self._current is not None and self._current.takes_watches:
                opened.close()  # another caller was faster
            else:
                self._current = _WatchStream(opened, self._channel)
        return self._current

    async def _newest(self, key: str) -> int:
        """Return the newest revision of the store."""
        request = pb.RangeRequest(key=wire.raw(key))
        return (await self._channel.read(wire.RANGE, request)).header.revision

    def close(self) -> None:
        """End the stream; streams that take no more watches end with their last one."""
        if self._current is not None:
            self._current.close()
            self._current = None
