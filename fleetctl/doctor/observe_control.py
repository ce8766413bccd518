"""Observation of the control plane: unobserved changes, endpoints on foreign nodes, and the etcd behind the store."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from insight.doctor.control_plane import (
    EtcdHealth,
    ForeignEndpoint,
    UnobservedChange,
    is_remote,
    is_unobserved,
)
from machinery import processes
from machinery.clock import Clock
from machinery.http_body import read_limited
from machinery.prometheus import parse_samples
from schemas.meta import ApiObject
from schemas.replica import Endpoint, Replica, publisher_of, unassigned_reason
from store import codec, keys, objects
from store.errors import StoreError
from store.etcd.address import EtcdAddress
from store.etcd.grpc.admin import AuthClient, MaintenanceClient, member_addresses
from store.port import Transport
from store.usage import usage_by_prefix

ClientT = TypeVar("ClientT", AuthClient, MaintenanceClient)

_FOREIGN_KEY = "it was written below the key of another node"
SETTLE_S = 3.0
"""Seconds between two readings: a reconciler observes a change, and an agent withdraws an endpoint, much faster."""
_METRICS_S = 2.0
_MAX_METRICS_BYTES = 4 << 20
_QUOTA_METRIC = "etcd_server_quota_backend_bytes"
_QUOTA_FLAG = "--quota-backend-bytes="


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlReading:
    """One reading of what the control plane may still be working on."""

    endpoints: int
    foreign: frozenset[ForeignEndpoint]
    unobserved: frozenset[tuple[str, int]]
    """Label and generation of objects with a change that was not observed."""

    @property
    def is_settled(self) -> bool:
        """Return whether there is nothing that may still be under way."""
        return not self.foreign and not self.unobserved

    def confirm(self, later: "ControlReading") -> "ControlReading":
        """Return the later reading without what is new in it."""
        return replace(
            later,
            foreign=self.foreign & later.foreign,
            unobserved=self.unobserved & later.unobserved,
        )


async def read_control(transport: Transport, observed: Sequence[ApiObject]) -> ControlReading:
    """Compare endpoints with replicas, and generations with statuses. Raises StoreError."""
    endpoints = (await transport.list(keys.ENDPOINT_PREFIX)).items
    replicas = {replica.name: replica for replica in await objects.list_all(transport, Replica)}
    foreign = set()
    for item in endpoints:
        # The rule by which gateways refuse endpoints.
        node = item.key.removeprefix(keys.ENDPOINT_PREFIX).partition("/")[0]
        name = keys.replica_of(item.key)
        replica = replicas.get(name)
        try:
            endpoint = codec.decode(Endpoint, item)
        except codec.UndecodableError as error:
            reason = f"it cannot be read: {error}"
        else:
            publisher = None if replica is None else publisher_of(replica)
            is_own = endpoint.spec.node == node
            reason = unassigned_reason(endpoint, publisher) if is_own else _FOREIGN_KEY
        if reason:
            foreign.add(ForeignEndpoint(replica=name, node=node, reason=reason))
    return ControlReading(
        endpoints=len(endpoints),
        foreign=frozenset(foreign),
        unobserved=frozenset(
            (label_of(obj), obj.metadata.generation) for obj in observed if is_unobserved(obj)
        ),
    )


def label_of(obj: ApiObject) -> str:
    """Return the object's name in messages, such as `modeldeployment/qwen`."""
    return f"{obj.kind.lower()}/{obj.name}"


def unobserved_changes(
    reading: ControlReading, observed: Sequence[ApiObject], clock: Clock
) -> tuple[UnobservedChange, ...]:
    """Return the changes of a confirmed reading with their age: the time since the last write of the object."""
    labels = {label for label, _ in reading.unobserved}
    changes = []
    for obj in observed:
        if label_of(obj) in labels:
            written = max(
                (entry.time for entry in obj.metadata.managed_fields), default=clock.now()
            )
            change = UnobservedChange(
                label=label_of(obj),
                generation=obj.metadata.generation,
                observed_generation=getattr(getattr(obj, "status", None), "observed_generation", 0),
                # At least the time between the readings.
                age_s=max(SETTLE_S, (clock.now() - written).total_seconds()),
            )
            changes.append(change)
    return tuple(changes)


async def observe_etcd(
    transport: Transport, address: EtcdAddress, etcd_folder: Path | None, *, is_writable: bool
) -> EtcdHealth:
    """Observe the etcd itself; what cannot be read is left unknown. `etcd_folder` is that of an embedded etcd."""
    exposed = exposed_urls(address)
    try:
        members = []
        for member in member_addresses(address):
            async with open_admin(MaintenanceClient(member)) as client:
                members.append(await client.status())
        has_users = bool(address.username)
        if exposed and not has_users:
            async with open_admin(AuthClient(address)) as auth:
                has_users = await auth.is_on()
    except StoreError as error:
        return EtcdHealth(exposed=exposed, error=str(error))
    health = EtcdHealth(
        exposed=exposed,
        has_users=has_users,
        size_bytes=max(member.db_size_in_use_bytes for member in members),
        quota_bytes=await _read_quota(address, etcd_folder),
        is_full=not is_writable and any(member.has_alarms for member in members),
    )
    if not health.is_nearly_full:
        return health
    largest = next(iter(await usage_by_prefix(transport)), None)
    if largest is None:
        return health
    return replace(health, largest_prefix=largest.prefix, largest_bytes=largest.size_bytes)


def exposed_urls(address: EtcdAddress) -> tuple[str, ...]:
    """Return the URLs that other machines can reach; none where clients need a certificate."""
    if address.certificate is not None:
        return ()
    return tuple(url for url in address.endpoints if is_remote(urlsplit(url).hostname or ""))


@asynccontextmanager
async def open_admin(client: ClientT) -> AsyncIterator[ClientT]:
    """Close a client of etcd at the end of the block."""
    try:
        yield client
    finally:
        await client.close()


async def _read_quota(address: EtcdAddress, etcd_folder: Path | None) -> int | None:
    """Return the quota: of an embedded etcd from its command line, of another one from its metrics."""
    if address.socket is not None:
        # The usual place of the socket is below etcd's folder.
        folder = etcd_folder or address.socket.parent.parent
        record = processes.load_record(folder / "etcd.pid")
        flags = () if record is None else record.command
        found = [flag.removeprefix(_QUOTA_FLAG) for flag in flags if flag.startswith(_QUOTA_FLAG)]
        return int(found[0]) if found and found[0].isdigit() else None
    quotas = [await fetch_quota(address, url) for url in address.endpoints]
    return min((quota for quota in quotas if quota), default=None)


async def fetch_quota(address: EtcdAddress, url: str) -> int | None:
    """Return the quota that etcd's metrics report, in bytes; None if they do not."""
    timeout = aiohttp.ClientTimeout(total=_METRICS_S)
    try:
        context = address.ssl_context() or False
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(
                f"{url.rstrip('/')}/metrics", ssl=context, allow_redirects=False
            ) as response,
        ):
            body = await read_limited(response.content.iter_any(), _MAX_METRICS_BYTES)
        text = body.decode(errors="replace")
        values = [sample.value for sample in parse_samples(text) if sample.name == _QUOTA_METRIC]
        return int(float(values[0])) if values else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
