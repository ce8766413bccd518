"""Records that the leader derives from specs and keeps for agents: following changes, writing, retrying, marking as kept.

What the records are is in `reconciler.services.assignments` and `reconciler.services.model_uses`.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from schemas.meta import ApiObject
from store.errors import PermissionDeniedError, StoreError
from store.informer import Informer
from store.leases import Leadership
from store.port import Put, Transport

log = logging.getLogger(__name__)

_BACKOFF: Final = Backoff(first_s=0.05, limit_s=5.0)
# Between the starts of two writes: what changes meanwhile shares a transaction, which costs more than what is in it.
_PAUSE_S: Final = 0.05


class RecordSource(Protocol):
    """Tells which records of one kind there should be, and writes them. Records have names."""

    def names_of(self, key: str) -> Collection[str]:
        """Return the names of the records that the object under a spec key has a part in."""
        ...

    async def read(self) -> Iterable[str]:
        """Read which records there are; return their names, and those of all that there should be."""
        ...

    async def write(self, leadership: Leadership, names: Iterable[str]) -> None:
        """Write those of these records that are wrong; raises StoreError, and may be called again with the same names."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLabels:
    """Log messages about one kind of records, and the key that marks them as kept."""

    refused: str
    """The store does not allow this process to write them."""
    waits: str
    """They could not be written for another reason."""
    kept_key: str
    """The key exists while a leader keeps all of them."""


class RecordKeeper:
    """Keeps one kind of records. `connect()` once; `lead()` while this process leads."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        specs: Informer[ApiObject],
        source: RecordSource,
        labels: RecordLabels,
    ) -> None:
        """`specs` holds all objects that records are derived from."""
        self._transport = transport
        self._clock = clock
        self._specs = specs
        self._source = source
        self._labels = labels
        self._retries = Retries(_BACKOFF, clock)
        self._due: set[str] = set()
        """The names of records that may be wrong."""
        self._noted = asyncio.Event()
        self._is_leading = False

    def connect(self) -> None:
        """Follow changes of the cache."""
        self._specs.on_change(self._note)

    def _note(self, key: str) -> None:
        names = self._source.names_of(key) if self._is_leading else ()
        if names:
            self._due.update(names)
            self._noted.set()

    async def lead(self, leadership: Leadership) -> None:
        """Write what changes, forever; once all is right, mark it as kept while the leadership lasts."""
        self._is_leading = True
        try:
            await self._keep(leadership)
        finally:
            self._is_leading = False

    async def _keep(self, leadership: Leadership) -> None:
        is_read = is_marked = False
        while True:
            self._noted.clear()
            pause_ends = self._clock.monotonic() + _PAUSE_S
            try:
                if not is_read:
                    self._due.update(await self._source.read())
                    is_read = True
                await self._write(leadership)
                if not is_marked:
                    put = Put(key=self._labels.kept_key, value=b"1", lease=leadership.lease)
                    await self._transport.commit([leadership.guard], [put])
                    is_marked = True
            except StoreError as error:
                is_refused = isinstance(error, PermissionDeniedError)
                is_news = is_refused and self._retries.failures == 0
                log.log(
                    logging.WARNING if is_news else logging.INFO,
                    self._labels.refused if is_refused else self._labels.waits,
                    extra={
                        "why": str(error),
                        **({"do": "fleetctl init-auth --prepare"} if is_refused else {}),
                    },
                )
                await self._retries.wait(is_refused=is_refused)
                continue
            self._retries.reset()
            await self._noted.wait()
            pause_s = pause_ends - self._clock.monotonic()
            if pause_s > 0:
                await self._clock.sleep(pause_s)

    async def _write(self, leadership: Leadership) -> None:
        due, self._due = self._due, set()
        try:
            await self._source.write(leadership, due)
        except StoreError:
            self._due |= due
            raise
