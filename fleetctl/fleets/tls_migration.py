"""The migration of a fleet to TLS: what each live process reports, and whether the mode may move on.

The mode moves one step at a time (`TlsMode`). A step forward needs every live process; a step back needs none, but waits
for the processes, so that no listener refuses what a client still sends.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from identity.names import IdentityError, Role, parse_identity
from schemas.node import NodeLease
from schemas.records import GatewayLease, ReconcilerLease
from schemas.replica import Endpoint
from schemas.trust import FleetTrust, TlsMode, TlsReport
from store import codec, keys, objects
from store.errors import UndecodableError
from store.port import KeyValue, ModRevisionGuard, Put, Transport

STEPS: Final = tuple(TlsMode)
_Lease: TypeAlias = NodeLease | GatewayLease | ReconcilerLease
_KINDS: Final[tuple[tuple[str, Role, type[_Lease]], ...]] = (
    (keys.NODE_LEASE_PREFIX, Role.NODE, NodeLease),
    (keys.GATEWAY_LEASE_PREFIX, Role.GATEWAY, GatewayLease),
    (keys.RECONCILER_LEASE_PREFIX, Role.RECONCILER, ReconcilerLease),
)
_PARTS: Final = {Role.NODE: "agent of node", Role.GATEWAY: "gateway", Role.RECONCILER: "reconciler"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTls:
    """One live process."""

    role: Role
    name: str
    """The name of its node, its lease or its process."""
    report: TlsReport | None = None
    """None if it uses no certificate."""
    is_readable: bool = True
    """False if its lease is of a release that this fleetctl cannot read."""
    has_certificate: bool = False
    """True if a certificate was issued to it, whether or not it uses it."""

    @property
    def label(self) -> str:
        """Kind and name of the process, as in `agent of node mac-1`."""
        return f"{_PARTS[self.role]} {self.name}"

    @property
    def identity(self) -> str:
        """Role and name in its certificate, as in `node/mac-1`; empty without one."""
        if self.report is None:
            return ""
        try:
            found = parse_identity(self.report.identity)
        except IdentityError:
            return self.report.identity
        return f"{found.role}/{found.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocker:
    """A process or an engine that keeps the mode from moving on."""

    label: str
    remedy: str
    """The missing part, and the way to it."""
    is_brief: bool = False
    """True if it goes by itself within seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMigration:
    """The state of one moment."""

    trust: FleetTrust
    revision: int
    """The last change of the fleet's trust."""
    processes: tuple[ProcessTls, ...] = ()
    plain_endpoints: tuple[Endpoint, ...] = ()
    """Engines that other machines reach without TLS."""
    engines: int = 0

    def path(self, wanted: TlsMode) -> tuple[TlsMode, ...]:
        """Return the modes from here to the wanted one, without the current one."""
        here, there = STEPS.index(self.trust.mode), STEPS.index(wanted)
        if there > here:
            return STEPS[here + 1 : there + 1]
        return tuple(reversed(STEPS[there:here]))

    def blockers(self, step: TlsMode) -> tuple[Blocker, ...]:
        """Return what keeps the mode from taking this step; nothing keeps it from a step back."""
        if STEPS.index(step) <= STEPS.index(self.trust.mode):
            return ()
        found = [*self._unready(), *self.followers_missing()]
        if step is TlsMode.STRICT:
            found += map(_plain_engine, self.plain_endpoints)
        return tuple(found)

    def followers_missing(self) -> tuple[Blocker, ...]:
        """Return the processes that do not follow the current mode yet."""
        mode = self.trust.mode
        return tuple(
            Blocker(
                label=process.label, remedy=f"it still follows {process.report.mode}", is_brief=True
            )
            for process in self.processes
            if process.report is not None and process.report.mode is not mode
        )

    def _unready(self) -> list[Blocker]:
        return [
            Blocker(label=process.label, remedy=_remedy(process))
            for process in self.processes
            if process.report is None
        ]


def _remedy(process: ProcessTls) -> str:
    if not process.is_readable:
        return "its lease cannot be read: it is of another release; run the same release everywhere"
    if process.has_certificate:
        return "it has a certificate and does not use it yet; restart it"
    if process.role is Role.NODE:
        return (
            "it has no certificate; restart it with this release, and it asks for one (until it has one, an --address that "
            "other machines reach needs --insecure-engines)"
        )
    return "it has no certificate; restart it with --identity-dir DIR, and it asks for one"


def _plain_engine(endpoint: Endpoint) -> Blocker:
    return Blocker(
        label=f"engine of replica {endpoint.metadata.name} on node {endpoint.spec.node}",
        remedy="it answers without TLS, because it was started before its node had a certificate; restart it with "
        f"`fleetctl rollout restart modeldeployment/{endpoint.spec.deployment}`",
        # An agent publishes the new address of an engine that serves both within seconds.
        is_brief=True,
    )


async def read_migration(transport: Transport) -> TlsMigration | None:
    """Return the state of the fleet; None if it has no authority. Raises StoreError."""
    item = await transport.get(keys.FLEET_TRUST)
    if item is None:
        return None
    issued = {
        one.key.removeprefix(keys.ISSUED_PREFIX)
        for one in (await transport.list(keys.ISSUED_PREFIX)).items
    }
    processes = [
        _process(role, model, found, issued)
        for prefix, role, model in _KINDS
        for found in (await transport.list(prefix)).items
    ]
    endpoints = await objects.list_all(transport, Endpoint)
    return TlsMigration(
        trust=codec.decode(FleetTrust, item),
        revision=item.mod_revision,
        processes=tuple(processes),
        plain_endpoints=tuple(endpoint for endpoint in endpoints if _is_plain(endpoint.spec.url)),
        engines=len(endpoints),
    )


async def write_mode(transport: Transport, migration: TlsMigration, mode: TlsMode) -> None:
    """Write the fleet's mode.

    Raises:
        ConflictError: the trust has changed meanwhile.
        StoreError: it was not written.

    """
    guard = ModRevisionGuard(key=keys.FLEET_TRUST, mod_revision=migration.revision)
    changed = migration.trust.model_copy(update={"mode": mode})
    put = Put(key=keys.FLEET_TRUST, value=codec.encode(changed))
    await transport.commit([guard], [put])


def _process(role: Role, model: type[_Lease], item: KeyValue, issued: set[str]) -> ProcessTls:
    name = item.key.rpartition("/")[2]
    has_certificate = f"{role}/{name}" in issued
    try:
        lease = codec.decode(model, item)
    except UndecodableError:
        return ProcessTls(role=role, name=name, is_readable=False)
    if isinstance(lease, ReconcilerLease):
        name = lease.identity.partition(" ")[0]
    return ProcessTls(role=role, name=name, report=lease.tls, has_certificate=has_certificate)


def _is_plain(url: str) -> bool:
    """Return whether other machines reach the URL without TLS."""
    parts = urlsplit(url)
    if parts.scheme != "http":
        return False
    try:
        return not ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return parts.hostname != "localhost"


def status_rows(migration: TlsMigration) -> Sequence[tuple[str, str, str, str]]:
    """Return a table of the processes: name, identity, the mode that it follows, and what is missing."""
    rows = [("PROCESS", "IDENTITY", "FOLLOWS", "MISSING")]
    for process in migration.processes:
        if process.report is None:
            rows.append((process.label, "-", "-", _remedy(process)))
        else:
            rows.append((process.label, process.identity, str(process.report.mode), "-"))
    return rows
