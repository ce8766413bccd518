"""Short records of deployments for agents, which the leader keeps: the models that a Mac may be asked to run.

If agents watched deployments, each scaling, label and rollout would go to every Mac of the fleet:
docs/adr/0004-one-writer-per-key.md has the measurement and the rules.
"""

from collections.abc import Iterable
from contextlib import aclosing
from typing import Final

from machinery.clock import Clock
from models.inspection import model_use
from reconciler.services.kept_records import RecordKeeper, RecordLabels
from schemas.deployment import ModelDeployment
from schemas.meta import ApiObject
from schemas.shardgroup import ShardGroup
from store import codec, keys
from store.informer import Informer
from store.leases import Leadership
from store.port import Delete, Operation, Put, Transport

_LABELS: Final = RecordLabels(
    refused="records of deployments for agents are not written, so agents watch all deployments",
    waits="records of deployments for agents wait",
    kept_key=keys.MODEL_USES_KEPT,
)
_BATCH: Final = 100
_DEPLOYMENTS: Final = keys.spec_prefix("ModelDeployment")
_GROUPS: Final = keys.spec_prefix("ShardGroup")


# Of a record that a write without an answer may have changed.
_UNKNOWN: Final = b""


class ModelUseRecords:
    """A `RecordSource` by the names of deployments: compares and writes the short records."""

    def __init__(self, transport: Transport, specs: Informer[ApiObject]) -> None:
        """`specs` holds all ModelDeployments and ShardGroups."""
        self._transport = transport
        self._specs = specs
        self._written: dict[str, bytes] = {}

    def names_of(self, key: str) -> set[str]:
        """Return the deployments whose record a ModelDeployment or a ShardGroup has a part in."""
        if key.startswith(_DEPLOYMENTS):
            return {key.removeprefix(_DEPLOYMENTS)}
        return self._names() if key.startswith(_GROUPS) else set()

    def _names(self) -> set[str]:
        return {
            key.removeprefix(_DEPLOYMENTS)
            for key in self._specs.items
            if key.startswith(_DEPLOYMENTS)
        }

    async def read(self) -> set[str]:
        """Read which records there are; return their names, and those of all deployments."""
        found: dict[str, bytes] = {}
        async with aclosing(self._transport.pages(keys.MODEL_USE_PREFIX)) as pages:
            async for page in pages:
                for item in page.items:
                    found[item.key.removeprefix(keys.MODEL_USE_PREFIX)] = item.value
        self._written = found
        return self._names().union(found)

    async def write(self, leadership: Leadership, names: Iterable[str]) -> None:
        """Write the records that differ, many in one transaction; raises StoreError."""
        groups = [item for item in self._specs.items.values() if isinstance(item, ShardGroup)]
        wanted = {name: self._wanted(name, groups) for name in sorted(names)}
        changed = [name for name, value in wanted.items() if self._written.get(name) != value]
        for first in range(0, len(changed), _BATCH):
            batch = changed[first : first + _BATCH]
            operations = [_operation(name, wanted[name]) for name in batch]
            self._written.update(dict.fromkeys(batch, _UNKNOWN))  # until the answer arrives
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
        item = self._specs.items.get(key)
        return codec.encode(model_use(item, groups)) if isinstance(item, ModelDeployment) else None


def _operation(name: str, value: bytes | None) -> Operation:
    key = keys.named(keys.MODEL_USE_PREFIX, name)
    return Delete(key=key) if value is None else Put(key=key, value=value)


def model_use_keeper(
    transport: Transport, clock: Clock, specs: Informer[ApiObject]
) -> RecordKeeper:
    """Return the keeper of the records; `specs` holds all ModelDeployments and ShardGroups."""
    return RecordKeeper(transport, clock, specs, ModelUseRecords(transport, specs), _LABELS)
