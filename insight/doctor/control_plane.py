"""Checks of the control plane: whether its processes read the store and act on it, and whether the store is exposed. Pure.

A lease proves little: etcd renews the leases of processes that it locks out. What cannot be observed is never OK.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from insight.doctor.findings import Finding, Level, ok
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


class ProbedProcess(Protocol):
    """A process that was asked for its health."""

    @property
    def label(self) -> str: ...

    @property
    def error(self) -> str: ...

    @property
    def store(self) -> StoreView | None: ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlane:
    """The observation that these checks need."""

    etcd: EtcdHealth
    endpoints: int = 0
    foreign_endpoints: Sequence[ForeignEndpoint] = ()
    unobserved: Sequence[UnobservedChange] = ()


def is_unobserved(obj: ApiObject) -> bool:
    """Return whether the object's status is about an earlier generation of its spec."""
    status = getattr(obj, "status", None)
    observed = getattr(status, "observed_generation", None)
    return observed is not None and observed < obj.metadata.generation


def check_leader(name: str, unobserved: Sequence[UnobservedChange]) -> Finding:
    """Return whether the leading reconciler acts: it observes changes within seconds."""
    if not unobserved:
        return ok("leader", f"reconciler {name} leads")
    named = [
        f"{one.label} (generation {one.generation}, observed {one.observed_generation}, for {one.age_s:.0f} s)"
        for one in unobserved[:_MAX_NAMES]
    ]
    more = f" and {len(unobserved) - _MAX_NAMES} more" if len(unobserved) > _MAX_NAMES else ""
    return Finding(
        check="leader",
        level="FAIL",
        message=f"reconciler {name} holds its lease, but does not act: it has not observed {', '.join(named)}{more}",
        advice="its log says why; if etcd enforces passwords, it needs --etcd-password-file (docs/operations/etcd-security.md)",
    )


def check_store_views(processes: Sequence[ProbedProcess]) -> Iterator[Finding]:
    """Yield whether agents and gateways read the store."""
    asked = [one for one in processes if not one.error]
    views = [(one.label, one.store) for one in asked if one.store is not None]
    bad = [(label, found) for label, view in views if (found := _view_problem(view)) is not None]
    for label, (level, message) in bad:
        advice = "it works with what it knew before: check its network and its --etcd-password-file"
        yield Finding(
            check="store views", level=level, message=f"{label}: {message}", advice=advice
        )
    silent = [one.label for one in asked if one.store is None]
    if silent:
        listed = ", ".join(silent[:_MAX_NAMES])
        yield Finding(
            check="store views",
            level="WARN",
            message=f"{counted(len(silent), 'process does', 'processes do')} not report how old their view of the store is: "
            f"{listed}",
            advice="upgrade them: until then nothing shows whether they are locked out of the store",
        )
    if views and not bad and not silent:
        oldest_s = max(view.staleness_s or 0.0 for _, view in views)
        message = f"{counted(len(views), 'process reads', 'processes read')} the store; the oldest view is {oldest_s:.0f} s old"
        yield ok("store views", message)


def _view_problem(view: StoreView) -> tuple[Level, str] | None:
    if view.refusal:
        return "FAIL", f"the store refuses it: {view.refusal}"
    if view.staleness_s is None:
        return "FAIL", "it has never read the store"
    if view.staleness_s > _VIEW_WARN_S:
        level: Level = "FAIL" if view.staleness_s > _VIEW_FAIL_S else "WARN"
        return level, f"it has heard nothing from the store for {view.staleness_s:.0f} s"
    return None


def check_endpoints(control: ControlPlane) -> Iterator[Finding]:
    """Yield whether each endpoint is on the node that its replica is assigned to."""
    for one in control.foreign_endpoints:
        yield Finding(
            check="endpoints",
            level="FAIL",
            message=f"node/{one.node} publishes an endpoint of replica/{one.replica} that does not count: {one.reason}",
            advice=f"requests and prompts may go to a process that is no part of the fleet: check node/{one.node}, and give it "
            f"a new password with `fleetctl init-auth --out DIR --prepare --rotate fleet-node-{one.node}`",
        )
    if control.endpoints and not control.foreign_endpoints:
        phrase = counted(control.endpoints, "endpoint is", "endpoints are")
        yield ok("endpoints", f"{phrase} on the node of the replica")


def check_etcd(etcd: EtcdHealth) -> Iterator[Finding]:
    """Yield whether etcd is open to the network, and whether its quota is nearly used up."""
    if etcd.exposed and not etcd.has_users:
        url = etcd.exposed[0]
        is_unknown = etcd.has_users is None
        yield Finding(
            check="store",
            level="WARN",
            message=f"etcd at {url} is reached over the network, and "
            + ("whether it has users is unknown" if is_unknown else "has no users"),
            advice="whoever reaches it controls the fleet: see `fleetctl init-auth` (docs/operations/etcd-security.md)",
        )
    if etcd.is_nearly_full:
        yield _full_etcd(etcd)
    elif etcd.size_bytes is None or etcd.error:
        yield Finding(
            check="quota",
            level="WARN",
            message=f"the size of etcd's database is unknown: {etcd.error or 'etcd does not report it'}",
            advice="etcd refuses writes at its quota: watch the size yourself (docs/operations/store.md)",
        )
    elif etcd.quota_bytes is None:
        yield Finding(
            check="quota",
            level="WARN",
            message=f"etcd's database has {quantity.show(etcd.size_bytes)} in use; its quota is unknown",
            advice="etcd refuses writes at its quota, 2 GiB unless a flag says otherwise: watch the size yourself",
        )
    else:
        yield ok(
            "quota",
            f"{quantity.show(etcd.size_bytes)} of etcd's {quantity.show(etcd.quota_bytes)} are in use",
        )


def _full_etcd(etcd: EtcdHealth) -> Finding:
    size = "" if etcd.size_bytes is None else f"{quantity.show(etcd.size_bytes)} "
    quota = "its quota" if etcd.quota_bytes is None else f"{quantity.show(etcd.quota_bytes)}"
    largest = ""
    if etcd.largest_prefix:
        largest = f"; the largest prefix is {etcd.largest_prefix} with {quantity.show(etcd.largest_bytes)}"
    return Finding(
        check="quota",
        level="FAIL" if etcd.is_full else "WARN",
        message=f"etcd's database uses {size}of {quota}{largest}",
        advice="at the quota nothing in the fleet can change: docs/operations/store.md says how to free space; a node that "
        "writes far more than others may be compromised",
        fix=ETCD_SPACE,
    )


def is_remote(host: str) -> bool:
    """Return whether another machine can have the address."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
