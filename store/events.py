"""Writing events: what happened to an object, kept for about an hour, repeats counted."""

import hashlib
import logging
from typing import Literal

from machinery.clock import Clock
from schemas.event import Event, EventSpec, ObjectReference
from schemas.meta import ObjectMeta
from store import codec, keys
from store.errors import LeaseLostError, StoreError
from store.port import Put, Transport, Unchanged

log = logging.getLogger(__name__)

_KEPT_S = 3600
# One lease for all events of this long: a lease per event would be a thousand leases.
_LEASE_SHARED_S = 600.0
_NAME_LENGTH = 100


class EventRecorder:
    """Records events of one source. Losing an event is no failure: it is logged and that is all."""

    def __init__(self, transport: Transport, clock: Clock, *, source: str) -> None:
        self._transport = transport
        self._clock = clock
        self._source = source
        self._lease = 0
        self._lease_until = float("-inf")

    async def record(
        self,
        about: ObjectReference,
        reason: str,
        message: str,
        *,
        type_: Literal["Normal", "Warning"] = "Normal",
    ) -> None:
        """Write the event, or count it once more if it was seen before."""
        identity = repr((about, reason, message, self._source))
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        now = self._clock.now()
        event = Event(
            # The digest identifies; the name is for people, and must not be too long for one.
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
        try:
            await self._write(event)
        except (StoreError, codec.UndecodableError) as error:
            if isinstance(error, LeaseLostError):
                self._lease_until = float("-inf")
            log.info("event lost", extra={"reason": reason, "why": str(error)})

    async def _write(self, event: Event) -> None:
        key = keys.event_key(self._source, event.name)
        before = await self._transport.get(key)
        if before is not None:
            seen = codec.decode(Event, before).spec
            spec = event.spec.model_copy(
                update={"count": seen.count + 1, "first_seen": seen.first_seen}
            )
            event = event.model_copy(update={"spec": spec})
        guard = Unchanged(key=key, mod_revision=before.mod_revision if before else 0)
        put = Put(key=key, value=codec.encode(event), lease=await self._current_lease())
        await self._transport.commit([guard], [put])

    async def _current_lease(self) -> int:
        now = self._clock.elapsed()
        if now >= self._lease_until:
            self._lease = await self._transport.grant(_KEPT_S)
            self._lease_until = now + _LEASE_SHARED_S
        return self._lease
