"""Event recording: events are kept for about an hour, and repetitions are counted."""

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from machinery.clock import Clock
from schemas.event import Event, EventSpec, ObjectReference
from schemas.meta import ObjectMeta
from store import codec, keys
from store.errors import ConflictError, LeaseLostError, StoreError, UnavailableError
from store.port import KeyValue, ModRevisionGuard, Put, Transport

log = logging.getLogger(__name__)

_KEPT_S = 3600
# One lease for all events of this period: a lease per event would be a thousand leases.
_LEASE_SHARED_S = 600.0
_NAME_LENGTH = 100


# etcd takes 128 guards and operations at once; an event needs one of each.
_AT_ONCE = 60
# Between two writes: events that come meanwhile share a transaction, and other writes go before.
_PAUSE_S = 0.2
# Further events are dropped: the store is unavailable, and newer events matter more.
_MOST_WAITING = 10_000
# Names of events, of which each takes 250 bytes.
_MOST_REMEMBERED = 10_000


class EventRecorder:
    """Records events of one source. A lost event is logged and is not a failure.

    While `run()` runs, `record` does not wait: events are written shortly after, in batches; the first one at once.
    """

    def __init__(self, transport: Transport, clock: Clock, *, source: str) -> None:
        self._transport = transport
        self._clock = clock
        self._source = source
        self._lease = 0
        self._lease_until = float("-inf")
        self._waiting: list[Event] = []
        self._pending = asyncio.Event()
        self._is_running = False
        self._written: set[str] = set()
        """Names of events that this process has written."""

    async def run(self) -> None:
        """Write recorded events until cancelled; events that still wait then are lost."""
        self._is_running = True
        try:
            while True:
                await self._pending.wait()
                self._pending.clear()
                while self._waiting:
                    events, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
                    await self._try(events)
                await self._clock.sleep(_PAUSE_S)
        finally:
            self._is_running = False

    async def record(
        self,
        about: ObjectReference,
        reason: str,
        message: str,
        *,
        type_: Literal["Normal", "Warning"] = "Normal",
    ) -> None:
        """Write the event, or increase its count if it was recorded before."""
        identity = f"{about.kind}/{about.name}/{about.uid}/{reason}/{message}/{self._source}"
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        now = self._clock.now()
        event = Event(
            # The digest identifies the event; the name before it is for people and must stay short.
            metadata=ObjectMeta(name=f"{about.name[:_NAME_LENGTH]}.{digest}"),
            spec=EventSpec(
                about=about,
                type=type_,
                reason=reason,
                message=message,
                source=self._source,
                first_seen=now,
                last_seen=now,
            ),
        )
        if not self._is_running:
            await self._try([event])
            return
        if len(self._waiting) >= _MOST_WAITING:
            log.info("event lost", extra={"reason": reason, "why": "too many events are waiting"})
            return
        self._waiting.append(event)
        self._pending.set()

    async def _try(self, events: Sequence[Event]) -> None:
        """Write the events in one transaction, or one by one if that fails."""
        try:
            await self._write(_merge_repeats(events))
        except (StoreError, codec.UndecodableError) as error:
            if isinstance(error, LeaseLostError):
                self._lease_until = float("-inf")
            if len(events) == 1 or isinstance(error, UnavailableError):
                reasons = sorted({event.spec.reason for event in events})
                log.info("event lost", extra={"reason": ", ".join(reasons), "why": str(error)})
                return
            for event in events:
                await self._try([event])

    async def _write(self, events: Sequence[Event]) -> None:
        """Write the events in one transaction; those that this process has not written yet are taken to be new.

        Most are: reading each before cost more than all of the write.
        """
        found = {event.name: keys.event_key(self._source, event.name) for event in events}
        try:
            await self._commit(events, await self._read(found.keys() & self._written, found))
        except ConflictError:  # an earlier process recorded one of them
            await self._commit(events, await self._read(found, found))
        if len(self._written) >= _MOST_REMEMBERED:
            self._written.clear()
        self._written.update(found)

    async def _read(
        self, names: Iterable[str], found: Mapping[str, str]
    ) -> dict[str, KeyValue | None]:
        names = list(names)
        items = await asyncio.gather(*(self._transport.get(found[name]) for name in names))
        return dict(zip(names, items, strict=True))

    async def _commit(self, events: Sequence[Event], before: Mapping[str, KeyValue | None]) -> None:
        now = self._clock.elapsed()
        if now >= self._lease_until:
            self._lease = await self._transport.grant(_KEPT_S)
            self._lease_until = now + _LEASE_SHARED_S
        lease = self._lease
        guards, puts = [], []
        for event in events:
            key, there, merged = (
                keys.event_key(self._source, event.name),
                before.get(event.name),
                event,
            )
            if there is not None:
                spec = codec.decode(Event, there).spec
                merged = _repeated(event, spec.count, spec)
            guards.append(
                ModRevisionGuard(key=key, mod_revision=there.mod_revision if there else 0)
            )
            puts.append(Put(key=key, value=codec.encode(merged), lease=lease))
        await self._transport.commit(guards, puts)


def _repeated(event: Event, count: int, first: EventSpec) -> Event:
    """Return the event as a repetition of `count` earlier ones."""
    update = {"count": count + event.spec.count, "first_seen": first.first_seen}
    return event.model_copy(update={"spec": event.spec.model_copy(update=update)})


def _merge_repeats(events: Sequence[Event]) -> list[Event]:
    """Return each event once: the store does not write a key twice in one transaction."""
    found: dict[str, Event] = {}
    for event in events:
        before = found.get(event.name)
        found[event.name] = (
            event if before is None else _repeated(event, before.spec.count, before.spec)
        )
    return list(found.values())
