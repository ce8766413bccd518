"""The audit log: a transport that adds a record with author and differences to every transaction that writes objects.

    audited = AuditedTransport(transport, clock, ChangeAuthor(user="anna@studio", manager="fleetctl", reason="..."))

The record is in the same transaction as the write, so nothing is acknowledged without it. Documents that are read
through the transport are remembered, which is how the record knows what differs without a further read. Values of
secrets are never recorded.
"""

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from typing_extensions import override

from machinery.clock import Clock
from store import keys
from store.errors import PermissionDeniedError
from store.forwarding import ForwardedCalls
from store.port import (
    MAX_OPERATIONS,
    Guard,
    KeyValue,
    Listing,
    ModRevisionGuard,
    Operation,
    Put,
    Transport,
)

_WITHOUT_RIGHT: Final = (
    "; every change is recorded below change/, which this etcd user may not write: run `fleetctl init-auth --prepare` "
    "once, which gives accounts of an earlier release that right"
)
# Writes to these are recorded by name alone.
_SECRETS: Final = {
    keys.API_KEY_PREFIX: "ApiKey",
    keys.EXTERNAL_KEY_PREFIX: "ExternalKey",
    keys.HUB_TOKEN_PREFIX: "HubToken",
    keys.JOIN_TOKEN_PREFIX: "JoinToken",
    keys.REVOKED_PREFIX: "RevokedCertificate",
    keys.JOIN_DECISION_PREFIX: "JoinDecision",
    keys.FLEET_TRUST: "FleetTrust",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeAuthor:
    """The author of a write: user, process, command and reason."""

    user: str
    manager: str
    account: str = ""
    command: str = ""
    reason: str = ""


@dataclass(slots=True)
class AuditedTransport(ForwardedCalls):
    """`store.port.Transport` whose commits record the objects that they write. Use one for each command or apply."""

    inner: Transport
    clock: Clock
    author: ChangeAuthor
    _read: dict[str, KeyValue] = field(default_factory=dict)
    """The specs that were read, by key."""

    @override
    async def get(self, key: str) -> KeyValue | None:
        item = await self.inner.get(key)
        if item is not None:
            self._remember((item,))
        return item

    @override
    async def pages(self, prefix: str) -> AsyncGenerator[Listing]:
        async with aclosing(self.inner.pages(prefix)) as pages:
            async for page in pages:
                if prefix.startswith(keys.SPEC_PREFIX):
                    self._remember(page.items)
                yield page

    def _remember(self, items: Sequence[KeyValue]) -> None:
        self._read.update(
            {item.key: item for item in items if item.key.startswith(keys.SPEC_PREFIX)}
        )

    @override
    async def commit(self, guards: Sequence[Guard], operations: Sequence[Operation]) -> int:
        changed = [operation for operation in operations if _is_recorded(operation.key)]
        if not changed:
            return await self.inner.commit(guards, operations)
        if len(operations) >= MAX_OPERATIONS:
            raise ValueError(f"a recorded transaction has less than {MAX_OPERATIONS} operations")
        revisions = {
            guard.key: guard.mod_revision for guard in guards if isinstance(guard, ModRevisionGuard)
        }
        from manifests import change_records  # noqa: PLC0415 - it brings pydantic

        writes = [
            change_records.RecordedWrite(
                kind_and_name=_kind_and_name(one.key),
                before=self._before(one.key, revisions),
                after=one.value if isinstance(one, Put) else None,
                from_revision=revisions.get(one.key, 0),
            )
            for one in changed
        ]
        now = self.clock.now()
        key = keys.change_key(int(now.timestamp() * 1000), secrets.token_hex(4))
        record = Put(key=key, value=change_records.encode_record(self.author, now, writes))
        try:
            return await self.inner.commit(guards, [*operations, record])
        except PermissionDeniedError as error:
            raise PermissionDeniedError(f"{error}{_WITHOUT_RIGHT}") from error

    def _before(self, key: str, revisions: dict[str, int]) -> KeyValue | None:
        """Return the document that the write is based on; None if it was not read, or is another one now."""
        item = self._read.get(key)
        based_on = revisions.get(key)
        return None if item is None or based_on not in (None, item.mod_revision) else item


def _is_recorded(key: str) -> bool:
    return key.startswith((keys.SPEC_PREFIX, *_SECRETS))


def _kind_and_name(key: str) -> tuple[str, str]:
    for prefix, kind in _SECRETS.items():
        if key.startswith(prefix):
            return kind, key.removeprefix(prefix)
    return keys.kind_and_name(key)
