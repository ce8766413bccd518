"""Short records of deployments for agents, which the leader keeps: the models that a Mac may be asked to run.

If agents watched deployments, each scaling, label and rollout would go to every Mac of the fleet:
docs/adr/0114-short-records-of-deployments.md has the measurement and the rules.
"""

import asyncio
import logging
from contextlib import aclosing
from typing import Final

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from models.inspection import model_use
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject
from schemas.shardgroup import ShardGroup
from store import codec, keys
from store.errors import PermissionDeniedError, StoreError
from store.informer import Informer
from store.leases import Leadership
from store.port import Delete, Operation, Put, Transport

log = logging.getLogger(__name__)

_BACKOFF: Final = Backoff(first_s=0.05, limit_s=5.0)
_BATCH: Final = 100
_DEPLOYMENTS: Final = keys.spec_prefix("ModelDeployment")
_GROUPS: Final = keys.spec_prefix("ShardGroup")


class ModelUseRecords:
    """Keeps the records. `connect()` once; `lead()` while this process leads."""

    def __init__(self, transport: Transport, clock: Clock, specs: Informer[ApiObject]) -> None:
        """`specs` holds all ModelDeployments and ShardGroups."""
        self._transport = transport
        self._specs = specs
        self._retries = Retries(_BACKOFF, clock)
        self._due: set[str] = set()
        """The names of deployments whose record may be wrong."""
        self._noted = asyncio.Event()
        self._is_leading = False
        self._written: dict[str, bytes] = {}

    def connect(self) -> None:
        """Follow changes of the cache."""
        self._specs.on_change(self._note)

    def _note(self, key: str) -> None:
        if not self._is_leading:
            return
        if key.startswith(_DEPLOYMENTS):
            self._due.add(key.removeprefix(_DEPLOYMENTS))
        elif key.startswith(_GROUPS):
            self._due.update(self._names())
        else:
            return
        self._noted.set()

    def _names(self) -> set[str]:
        return {
            key.removeprefix(_DEPLOYMENTS)
            for key in self._specs.items
            if key.startswith(_DEPLOYMENTS)
        }

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
            try:
                if not is_read:
                    await self._read()
                    is_read = True
                await self._write(leadership)
                if not is_marked:
                    put = Put(key=keys.MODEL_USES_KEPT, value=b"1", lease=leadership.lease)
                    await self._transport.commit([leadership.guard], [put])
                    is_marked = True
            except StoreError as error:
                is_refused = isinstance(error, PermissionDeniedError)
                self._complain(error, is_refused=is_refused)
                is_read = False  # what failed may have been written
                await self._retries.wait(is_refused=is_refused)
                continue
            self._retries.reset()
            await self._noted.wait()

    def _complain(self, error: StoreError, *, is_refused: bool) -> None:
        is_news = is_refused and self._retries.failures == 0
        log.log(
            logging.WARNING if is_news else logging.INFO,
            "records of deployments for agents are not written, so agents watch all deployments"
            if is_refused
            else "records of deployments for agents wait",
            extra={
                "why": str(error),
                **({"do": "fleetctl init-auth --prepare"} if is_refused else {}),
            },
        )

    async def _read(self) -> None:
        """Read which records there are; all are due."""
        found: dict[str, bytes] = {}
        async with aclosing(self._transport.pages(keys.MODEL_USE_PREFIX)) as pages:
            async for page in pages:
                for item in page.items:
                    found[item.key.removeprefix(keys.MODEL_USE_PREFIX)] = item.value
        self._written = found
        self._due.update(found, self._names())

    async def _write(self, leadership: Leadership) -> None:
        """Write the records that are due and differ, many in one transaction. Raises StoreError."""
        due, self._due = self._due, set()
        groups = [one for one in self._specs.items.values() if isinstance(one, ShardGroup)]
        wanted = {name: self._wanted(name, groups) for name in sorted(due)}
        changed = [name for name, value in wanted.items() if self._written.get(name) != value]
        for first in range(0, len(changed), _BATCH):
            batch = changed[first : first + _BATCH]
            operations = [_operation(name, wanted[name]) for name in batch]
            await self._transport.commit([leadership.guard], operations)
            for name in batch:
                value = wanted[name]
                if value is None:
                    self._written.pop(name, None)
                else:
                    self._written[name] = value

    def _wanted(self, name: str, groups: list[ShardGroup]) -> bytes | None:
        """Return the record of a deployment; None if there is no such deployment."""
        key = f"{_DEPLOYMENTS}{name}"
        if key in self._specs.undecodable:
            return self._written.get(name)  # of a newer release, whose leader wrote its record
        found = self._specs.items.get(key)
        return (
            codec.encode(model_use(found, groups)) if isinstance(found, ModelDeployment) else None
        )


def _operation(name: str, value: bytes | None) -> Operation:
    key = keys.named(keys.MODEL_USE_PREFIX, name)
    return Delete(key=key) if value is None else Put(key=key, value=value)
