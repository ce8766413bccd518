"""Checks of the control plane: whether its processes read the store and act on it, and whether the store is exposed. Pure.

A lease proves little: etcd renews the leases of processes that it locks out. What cannot be observed is never OK.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from insight.doctor.findings import Finding
from nodeagent.doctor.check import fail, finding, listed, ok, warn
from schemas import quantity
from schemas.meta import ApiObject
from schemas.quantity import counted
from schemas.wire.health import StoreView

# An idle watch of an etcd that sends no progress reports is opened again after 17 s.
_VIEW_WARN_S, _VIEW_FAIL_S = 30.0, 60.0
# etcd refuses writes at its quota; compaction and defragmentation need time before that.
_QUOTA_WARN = 0.8
_MAX_NAMES = 5
ETCD_SPACE = "etcd-space"
"""The fix that drops etcd's history, and lets a full one accept writes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Result of a connection from this machine to a fleet process."""

    label: str
    """Name in messages: `node/mac-1`, `gateway/1f2e`, `replica/qwen-0`."""
    url: str
    error: str = ""
    """Reason of the failure; empty on success."""
    offset_s: float | None = None
    """Lead of its clock over this machine's, in seconds, accurate to one; None if unknown."""
    is_silent: bool = False
    """True if nothing answered in time: neither the process nor, with a refusal, its machine."""
    is_elsewhere: bool = False
    """True if it listens on a socket of another machine, and was not connected to."""
    holds_lease: bool = True
    """True if the process reports that it holds its lease."""
    store: StoreView | None = None
    """Its view of the store; None if it does not report one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnobservedChange:
    """A change of a spec that the reconciler has not observed."""

    label: str
    """Such as `modeldeployment/qwen`."""
    generation: int
    observed_generation: int
    age_s: float
    """Seconds since the change, or since it was first seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignEndpoint:
    """An endpoint that gateways refuse: it does not speak for its replica."""

    replica: str
    node: str
    """The node below whose key it is published."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdHealth:
    """The etcd behind the store."""

    exposed: Sequence[str] = ()
    """Its URLs that other machines can reach without a client certificate."""
    has_users: bool | None = None
    """True if it enforces passwords; None if unknown."""
    size_bytes: int | None = None
    """The part of its database that is in use; None if unknown."""
    quota_bytes: int | None = None
    is_full: bool = False
    """True if it refuses writes because of its quota."""
    largest_prefix: str = ""
    """The prefix that holds most of the fleet's data; read only if the database is nearly full."""
    largest_bytes: int = 0
    error: str = ""
    """Reason why it could not be observed."""

    @property
    def is_nearly_full(self) -> bool:
        """Return whether the quota is used up, or nearly so."""
        if self.is_full:
            return True
        known = self.size_bytes is not None and self.quota_bytes is not None
        return bool(known and (self.size_bytes or 0) > _QUOTA_WARN * (self.quota_bytes or 0))


def is_unobserved(obj: ApiObject) -> bool:
    """Return whether the object's status is about an earlier generation of its spec."""
    status = getattr(obj, "status", None)
    observed = getattr(status, "observed_generation", None)
    return observed is not None and observed < obj.metadata.generation


def check_leader(leader: str, unobserved: Sequence[UnobservedChange]) -> Iterator[Finding]:
    """Yield whether a reconciler leads, and acts: it observes changes within seconds."""
    if not leader:
        yield fail(
            "no reconciler leads: running models keep serving, but nothing is placed, replaced or scaled",
            "start fleet-reconciler on any machine; `fleetctl up` starts one on this machine",
        )
    elif not unobserved:
        yield ok(f"reconciler {leader} leads")
    else:
        changes = [
            f"{change.label} (generation {change.generation}, observed {change.observed_generation}, for {change.age_s:.0f} s)"
            for change in unobserved
        ]
        yield fail(
            f"reconciler {leader} holds its lease, but does not act: it has not observed {listed(changes)}",
            "its log says why; if etcd enforces passwords, it needs --etcd-password-file (docs/operations/etcd-security.md)",
        )


def check_store_views(
    agents: Sequence[ProbeResult], gateways: Sequence[ProbeResult]
) -> Iterator[Finding]:
    """Yield whether agents and gateways read the store."""
    answers = [process for process in (*agents, *gateways) if not process.error]
    views = [(process.label, process.store) for process in answers if process.store is not None]
    oldest_s, is_fine = 0.0, True
    for label, view in views:
        age_s, level, problem = view.staleness_s, "FAIL", ""
        if view.refusal:
            problem = f"the store refuses it: {view.refusal}"
        elif age_s is None:
            problem = "it has never read the store"
        elif age_s > _VIEW_WARN_S:
            level = "FAIL" if age_s > _VIEW_FAIL_S else "WARN"
            problem = f"it has heard nothing from the store for {age_s:.0f} s"
        if problem:
            is_fine = False
            yield finding(
                "FAIL" if level == "FAIL" else "WARN",
                f"{label}: {problem}",
                "it works with what it knew before: check its network and its --etcd-password-file",
            )
        oldest_s = max(oldest_s, age_s or 0.0)
    silent = [process.label for process in answers if process.store is None]
    if silent:
        number = counted(len(silent), "process does", "processes do")
        yield warn(
            f"{number} not report how old their view of the store is: {', '.join(silent[:_MAX_NAMES])}",
            "upgrade them: until then nothing shows whether they are locked out of the store",
        )
    elif views and is_fine:
        number = counted(len(views), "process reads", "processes read")
        yield ok(f"{number} the store; the oldest copy is {oldest_s:.0f} s old")


def check_endpoints(
    endpoints: int, foreign_endpoints: Sequence[ForeignEndpoint]
) -> Iterator[Finding]:
    """Yield whether each endpoint is on the node that its replica is assigned to."""
    for endpoint in foreign_endpoints:
        yield fail(
            f"node/{endpoint.node} publishes an endpoint of replica/{endpoint.replica} that does not count: {endpoint.reason}",
            f"requests and prompts may go to a process that is no part of the fleet: check node/{endpoint.node}, and give it "
            f"a new password with `fleetctl init-auth --out DIR --prepare --rotate fleet-node-{endpoint.node}`",
        )
    if endpoints and not foreign_endpoints:
        number = counted(endpoints, "endpoint is", "endpoints are")
        yield ok(f"{number} on the node of the replica")


def check_exposure(etcd: EtcdHealth) -> Iterator[Finding]:
    """Yield whether etcd is open to the network."""
    if etcd.exposed and not etcd.has_users:
        users = "whether it has users is unknown" if etcd.has_users is None else "has no users"
        yield warn(
            f"etcd at {etcd.exposed[0]} is reached over the network, and {users}",
            "whoever reaches it controls the fleet: see `fleetctl init-auth` (docs/operations/etcd-security.md)",
        )


def check_quota(etcd: EtcdHealth) -> Iterator[Finding]:
    """Yield whether etcd's quota is nearly used up."""
    used = "" if etcd.size_bytes is None else quantity.show(etcd.size_bytes)
    quota = "" if etcd.quota_bytes is None else quantity.show(etcd.quota_bytes)
    if etcd.is_nearly_full:
        largest = f"; the largest prefix is {etcd.largest_prefix} with {quantity.show(etcd.largest_bytes)}"
        yield finding(
            "FAIL" if etcd.is_full else "WARN",
            f"etcd's database uses {f'{used} ' if used else ''}of {quota or 'its quota'}"
            + (largest if etcd.largest_prefix else ""),
            "at the quota nothing in the fleet can change: docs/operations/store.md says how to free space; a node that "
            "writes far more than others may be compromised",
            fix=ETCD_SPACE,
        )
    elif not used or etcd.error:
        yield warn(
            f"the size of etcd's database is unknown: {etcd.error or 'etcd does not report it'}",
            "etcd refuses writes at its quota: watch the size yourself (docs/operations/store.md)",
        )
    elif not quota:
        yield warn(
            f"etcd's database has {used} in use; its quota is unknown",
            "etcd refuses writes at its quota, 2 GiB unless a flag says otherwise: watch the size yourself",
        )
    else:
        yield ok(f"{used} of etcd's {quota} are in use")


def is_remote(host: str) -> bool:
    """Return whether another machine can have the address."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
