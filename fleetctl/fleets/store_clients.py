"""The processes of a fleet that hold leases in the store, and whether each has a password for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from schemas.node import NodeLease
from schemas.records import GatewayLease, ReconcilerLease
from store import codec, keys
from store.port import KeyValue, Transport

_LeaseModel: TypeAlias = type[NodeLease] | type[GatewayLease] | type[ReconcilerLease]
_KINDS: tuple[tuple[str, str, _LeaseModel], ...] = (
    (keys.NODE_LEASE_PREFIX, "agent of node", NodeLease),
    (keys.GATEWAY_LEASE_PREFIX, "gateway", GatewayLease),
    (keys.RECONCILER_LEASE_PREFIX, "reconciler", ReconcilerLease),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreClient:
    """One live process."""

    name: str
    """Kind and name of the process, for users: `agent of node mac-1`."""
    has_password: bool
    """False if it has none, or if its lease cannot be read."""


async def list_clients(transport: Transport) -> Sequence[StoreClient]:
    """Return the processes that hold a lease now.

    A process that cannot be asked counts as one without a password: it would be locked out without a warning.

    Raises:
        StoreError: the store could not be read.

    """
    store_clients: list[StoreClient] = []
    for prefix, kind, model in _KINDS:
        for item in (await transport.list(prefix)).items:
            lease = _decode(model, item)
            name = item.key.removeprefix(prefix)
            if isinstance(lease, ReconcilerLease):
                name = lease.identity
            has_password = lease is not None and lease.has_store_password
            store_clients.append(StoreClient(name=f"{kind} {name}", has_password=has_password))
    return store_clients


def _decode(
    model: _LeaseModel, item: KeyValue
) -> NodeLease | GatewayLease | ReconcilerLease | None:
    try:
        return codec.decode(model, item)
    except codec.UndecodableError:
        return None
