"""Health checks over an observation of the fleet. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from insight.doctor import cable_checks, control_plane, model_checks, network_checks
from insight.doctor.bridge_loops import check_bridges
from insight.doctor.cable_checks import LinkProbe
from insight.doctor.control_plane import ControlPlane
from insight.doctor.findings import Finding, Level, ok
from insight.doctor.group_admission import GroupAdmission
from insight.doctor.lost_nodes import LostNode, lost_advice
from insight.doctor.machines import MachineReport, check_machines
from insight.doctor.model_checks import PartialFile
from insight.doctor.network_checks import ListenedNetwork
from insight.doctor.transport_security import TransportSecurity, check_security
from insight.version_skew import FleetVersions
from nodeagent.doctor.system_checks import (
    CLOCK_FAIL_S,
    CLOCK_WARN_S,
    DISK_FAIL_BYTES,
    DISK_WARN_BYTES,
)
from nodeagent.hardware.metal import METAL_AVAILABLE
from reconciler.groups.fabric import FabricFault
from schemas import quantity
from schemas.gitsource import GitSource
from schemas.meta import ApiObject, Condition, ConditionStatus, find_condition, is_true
from schemas.node import Node
from schemas.quantity import counted
from schemas.replica import Replica
from schemas.shardgroup import ShardGroup
from schemas.wire.health import StoreView


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """State of the store."""

    address: str
    version: str
    read_s: float
    """Seconds for a linearizable read, which needs a majority of members."""
    write_error: str = ""
    """Reason why writes fail; empty if they succeed."""
    is_restoring: bool = False
    """True if the store is marked as being restored."""


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
class DiskSpace:
    """Disk of this machine that contains the fleet's data folder."""

    path: str
    size_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObjects:
    """The objects of a fleet, for the checks that need no probe."""

    nodes: Sequence[Node]
    ready: frozenset[str]
    """Nodes whose agents hold their lease."""
    replicas: Sequence[Replica]
    objects: Sequence[ApiObject]
    """Objects of kinds that have a health condition (CONDITION_KINDS)."""
    admissions: Sequence[GroupAdmission]
    """One for each ShardGroup."""
    has_leader: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObservation:
    """Everything that the checks need."""

    store: StoreHealth
    versions: FleetVersions
    skew: Sequence[str]
    nodes: Sequence[Node]
    ready: frozenset[str]
    replicas: Sequence[Replica]
    objects: Sequence[ApiObject]
    """Objects of kinds that have a health condition (CONDITION_KINDS)."""
    admissions: Sequence[GroupAdmission]
    """One for each ShardGroup."""
    agents: Sequence[ProbeResult]
    gateways: Sequence[ProbeResult]
    engines: Sequence[ProbeResult]
    control: ControlPlane
    """The state of the control plane: whether it acts on what the store holds."""
    full_disks: Mapping[str, str] = field(default_factory=dict)
    """State folders on disks that are almost full, by the labels of their gateways and dashboards."""
    disk: DiskSpace | None = None
    """None if the fleet has no data folder on this machine."""
    security: TransportSecurity = field(default_factory=TransportSecurity)
    """The protection of connections between machines."""
    machines: Sequence[MachineReport] = ()
    """The findings of agents about their machines."""
    links: Sequence[LinkProbe] = ()
    """Connections over the cables of this machine."""
    lost: Sequence[LostNode] = ()
    """The ports of nodes that do not renew their leases."""
    multicast: Sequence[ListenedNetwork] = ()
    """The networks of this machine on which gateways of others announce themselves."""
    partial_files: Sequence[PartialFile] = ()
    """Leftovers of interrupted downloads on this machine."""

    @property
    def stored(self) -> FleetObjects:
        """The part of it that is in the store."""
        return FleetObjects(
            nodes=self.nodes,
            ready=self.ready,
            replicas=self.replicas,
            objects=self.objects,
            admissions=self.admissions,
            has_leader=self.versions.reconciler is not None,
        )


# Leases of 4 s are renewed three times (docs/adr/0007), so a read must take much less than a second.
_SLOW_READ_S = 0.5
# Conditions that are good, or irrelevant, when True; any other condition is a problem when True.
_GOOD_CONDITIONS = frozenset(("Ready", "FabricHealthy", "ApiServing", METAL_AVAILABLE))
_HEALTHY_CONDITIONS = {
    "ModelDeployment": "Available",
    "NodePool": "Ready",
    "ShardGroup": "Ready",
    "ModelRoute": "Accepted",
    "GitSource": "Ready",
}
CONDITION_KINDS = tuple(_HEALTHY_CONDITIONS)


def run_checks(fleet: FleetObservation) -> list[Finding]:
    """Return the findings of all checks; what others depend on comes first."""
    stored = fleet.stored
    return [
        *_store(fleet),
        *control_plane.check_etcd(fleet.control.etcd),
        *_leader(fleet),
        *control_plane.check_store_views((*fleet.agents, *fleet.gateways)),
        *_versions(fleet),
        *_nodes(stored, fleet.lost),
        *_pressure(fleet.nodes),
        *network_checks.check_networks(fleet.nodes, _unreachable(fleet)),
        *network_checks.check_multicast(fleet.multicast, _answering(fleet.gateways)),
        *network_checks.check_builds(fleet.nodes),
        *_disks(fleet.nodes, fleet.disk, fleet.full_disks),
        *_memory(stored),
        *_probe_results("agents", fleet.agents, "agents", _AGENT_ADVICE),
        *_clocks(fleet.agents, fleet.gateways),
        *_gateways(fleet),
        *_engines(fleet.engines),
        *control_plane.check_endpoints(fleet.control),
        *check_security(fleet.security),
        *check_machines(fleet.machines),
        *check_bridges(fleet.nodes),
        *_fabric(stored),
        *cable_checks.check_cables(fleet.nodes, fleet.replicas, _groups(stored)),
        *cable_checks.check_links(fleet.links),
        *model_checks.check_models(fleet.nodes, fleet.partial_files),
        *_objects(stored),
    ]


def check_objects(fleet: FleetObjects) -> list[Finding]:
    """Return the findings of the checks that need only what the store holds, in the order of `run_checks`."""
    lost = frozenset(node.name for node in fleet.nodes if node.name not in fleet.ready)
    return [
        *_nodes(fleet, ()),
        *_pressure(fleet.nodes),
        *network_checks.check_networks(fleet.nodes, lost),
        *network_checks.check_builds(fleet.nodes),
        *_disks(fleet.nodes, None, {}),
        *_memory(fleet),
        *check_bridges(fleet.nodes),
        *_fabric(fleet),
        *cable_checks.check_cables(fleet.nodes, fleet.replicas, _groups(fleet)),
        *model_checks.check_models(fleet.nodes, ()),
        *_objects(fleet),
    ]


def _unreachable(fleet: FleetObservation) -> frozenset[str]:
    """Return the nodes without a lease, or whose agent does not answer from here."""
    lost = {node.name for node in fleet.nodes if node.name not in fleet.ready}
    silent = {one.label.removeprefix("node/") for one in fleet.agents if one.error}
    return frozenset(lost | silent)


def _answering(results: Sequence[ProbeResult]) -> frozenset[str]:
    return frozenset(one.label for one in results if not one.error)


def _groups(fleet: FleetObjects) -> list[ShardGroup]:
    return [one for one in fleet.objects if isinstance(one, ShardGroup)]


_AGENT_ADVICE = "logs, top and support-bundle need it: check that the agent runs and that this machine can reach its --api-port"
_FIREWALL_ADVICE = (
    "it renews its lease, so it runs, and connections from here get no answer: a firewall on its Mac drops them, which "
    "`fleetctl doctor --local` there tells, or one on the way"
)
_ENGINE_ADVICE = (
    "gateways need it: check that a firewall allows the node's --engine-port and the 100 ports after it, or that the "
    "gateway and the engine's agent run as the same user with the same --engine-sockets"
)


def unreachable_findings(message: str) -> list[Finding]:
    """Return the finding for a store that does not answer; without it, nothing else can be checked."""
    return [
        Finding(
            check="store",
            level="FAIL",
            message=message,
            advice="all other checks need the store; run doctor again when it answers",
        )
    ]


def _store(fleet: FleetObservation) -> Iterator[Finding]:
    store = fleet.store
    read_time = f"{store.read_s * 1000:.0f} ms"
    if store.read_s > _SLOW_READ_S:
        yield Finding(
            check="store",
            level="WARN",
            message=f"etcd {store.version} at {store.address} took {read_time} to answer",
            advice="leases last 4 s: check the load of etcd's disk and machine (docs/operations/store.md)",
        )
    else:
        yield ok("store", f"etcd {store.version} at {store.address} answers in {read_time}")
    if store.write_error:
        yield Finding(
            check="store",
            level="FAIL",
            message=f"the store accepts no writes: {store.write_error}",
            advice="until it does, nothing in the fleet can change (docs/operations/store.md)",
        )
    if store.is_restoring:
        yield Finding(
            check="store",
            level="WARN",
            message="`fleetctl restore` is running, or was interrupted",
            advice="wait for it, or run it again; until then no reconciler leads",
        )


def _leader(fleet: FleetObservation) -> Iterator[Finding]:
    leader = fleet.versions.reconciler
    if leader is not None:
        yield control_plane.check_leader(leader.name, fleet.control.unobserved)
        return
    yield Finding(
        check="leader",
        level="FAIL",
        message="no reconciler leads: running models keep serving, but nothing is placed, replaced or scaled",
        advice="start fleet-reconciler on any machine; `fleetctl up` starts one on this machine",
    )


def _versions(fleet: FleetObservation) -> Iterator[Finding]:
    for line in fleet.skew:
        message, _, advice = line.partition(": ")
        yield Finding(check="versions", level="WARN", message=message, advice=advice)
    if not fleet.skew:
        parts = 1 + len(fleet.versions.servers())
        yield ok("versions", f"{parts} components have compatible versions")


def _nodes(fleet: FleetObjects, tried_ports: Sequence[LostNode]) -> Iterator[Finding]:
    if not fleet.nodes:
        yield Finding(
            check="nodes",
            level="WARN",
            message="there are no nodes, so no model can run",
            advice="start fleet-nodeagent on each Mac; `fleetctl up` starts one on this machine",
        )
        return
    lost = [node.name for node in fleet.nodes if node.name not in fleet.ready]
    tried = {one.name: one for one in tried_ports}
    for name in lost:
        words, advice = lost_advice(name, tried.get(name))
        yield Finding(
            check="nodes",
            level="FAIL",
            message=f"node/{name}: its agent does not renew its lease{words}",
            advice=advice,
        )
    if not lost:
        yield ok(
            "nodes",
            f"{counted(len(fleet.nodes), 'agent renews its lease', 'agents renew their leases')}",
        )


_NODE_REMEDY = "docs/operations/nodes.md describes each condition and its remedy"
_NODE_REMEDIES = {
    "NeedsReboot": "`fleetctl node reboot NODE --drain`",
    "MemoryPressure": "quit programs on it, or `fleetctl drain NODE`",
    "DuplicateHardware": "`fleetctl describe node NODE` says which one to delete or to start anew",
    "Withheld": "wait, or change spec.policy of the pool",
    "WiredLimitDiffers": "run the command on NODE; or change spec.wiredLimit of the pool",
    "VersionSkew": "upgrade the older one",
}


def _pressure(nodes: Sequence[Node]) -> Iterator[Finding]:
    for node in nodes:
        for found in node.status.conditions if node.status is not None else ():
            bad_status = (
                ConditionStatus.FALSE if found.type in _GOOD_CONDITIONS else ConditionStatus.TRUE
            )
            if found.status is bad_status and found.type != "Ready":
                yield Finding(
                    check="nodes",
                    level="WARN",
                    message=f"node/{node.name}: {found.type}={found.status}: {found.message or found.reason}",
                    advice=_NODE_REMEDIES.get(found.type, _NODE_REMEDY).replace("NODE", node.name),
                    since=found.last_transition_time,
                )


def _disks(
    nodes: Sequence[Node], own: DiskSpace | None, full: Mapping[str, str]
) -> Iterator[Finding]:
    places = [
        (f"node/{node.name}", node.status.disk_bytes, node.status.disk_free_bytes)
        for node in nodes
        if node.status is not None and node.status.disk_bytes
    ]
    if own is not None:
        places.append((own.path, own.size_bytes, own.free_bytes))
    short = [place for place in places if place[2] < DISK_WARN_BYTES]
    for label, size, free in short:
        level: Level = "FAIL" if free < DISK_FAIL_BYTES else "WARN"
        yield Finding(
            check="disk",
            level=level,
            message=f"{label}: {quantity.show(free)} free of {quantity.show(size)}",
            advice="free disk space: models and etcd's database need it",
        )
    for label, folder in full.items():
        yield Finding(
            check="disk",
            level="FAIL",
            message=f"{label}: the disk of {folder}, where it writes its state, is almost full",
            advice="free space there, or give its --state-dir a folder on another disk",
        )
    pressed = any(n.status and is_true(n.status.conditions, "DiskPressure") for n in nodes)
    if places and not short and not pressed and not full:
        yield ok(
            "disk", f"{counted(len(places), 'place has', 'places have')} enough free disk space"
        )


def _memory(fleet: FleetObjects) -> Iterator[Finding]:
    assigned: dict[str, int] = defaultdict(int)
    for replica in fleet.replicas:
        for rank in replica.spec.ranks:
            assigned[rank.node] += rank.memory.total_bytes
    over = [
        (node.name, assigned[node.name], node.status.allocatable_bytes)
        for node in fleet.nodes
        if node.status is not None and assigned[node.name] > node.status.allocatable_bytes
    ]
    for name, needed, available in over:
        yield Finding(
            check="memory",
            level="FAIL",
            message=f"node/{name}: replicas need {quantity.show(needed)}, but only {quantity.show(available)} are allocatable",
            advice=f"`fleetctl describe node {name}` lists them; scale a deployment down, or drain the node",
        )
    if fleet.nodes and not over:
        total = sum(assigned.values())
        yield ok("memory", f"replicas need {quantity.show(total)}, and no node is overcommitted")


def _probe_results(
    check: str, results: Sequence[ProbeResult], what: str, advice: str, level: Level = "WARN"
) -> Iterator[Finding]:
    silent = [one for one in results if one.error]
    for one in silent:
        remedy = _FIREWALL_ADVICE if one.is_silent else advice
        yield Finding(check=check, level=level, message=f"{one.label}: {one.error}", advice=remedy)
    for one in results:
        if not one.error and not one.holds_lease:
            yield Finding(
                check=check,
                level="WARN",
                message=f"{one.label} answers, but has lost its lease",
                advice="check that it can reach the store; see `fleetctl logs`",
            )
    if results and not silent:
        yield ok(check, f"{len(results)} of {len(results)} {what} answer")


def _engines(results: Sequence[ProbeResult]) -> Iterator[Finding]:
    here = [one for one in results if not one.is_elsewhere]
    yield from _probe_results("engines", here, "engines", _ENGINE_ADVICE)
    if len(here) < len(results):
        number = counted(len(results) - len(here), "engine listens", "engines listen")
        yield ok("engines", f"{number} on sockets of other machines: run doctor there to check")


def _clocks(*groups: Sequence[ProbeResult]) -> Iterator[Finding]:
    offsets = [
        (one.label, one.offset_s) for group in groups for one in group if one.offset_s is not None
    ]
    off = [(label, offset) for label, offset in offsets if abs(offset) > CLOCK_WARN_S]
    for label, offset in off:
        word = "ahead of" if offset > 0 else "behind"
        yield Finding(
            check="clocks",
            level="FAIL" if abs(offset) > CLOCK_FAIL_S else "WARN",
            message=f"{label}: its clock is {abs(offset):.0f} s {word} this machine's",
            advice="synchronize both clocks: `sudo sntp -sS time.apple.com` sets a Mac's clock once",
        )
    if offsets and not off:
        yield ok(
            "clocks",
            f"{counted(len(offsets), 'process has', 'processes have')} this machine's time",
        )


def _gateways(fleet: FleetObservation) -> Iterator[Finding]:
    if not fleet.gateways:
        yield Finding(
            check="gateways",
            level="WARN",
            message="no gateway is registered, so clients cannot reach the models",
            advice="start fleet-gateway on any machine; `fleetctl up` starts one on this machine",
        )
    advice = "clients get no answer there: check its log, and that this machine can reach its port"
    yield from _probe_results("gateways", fleet.gateways, "gateways", advice, "FAIL")
    for one in fleet.gateways:
        parts = urlsplit(one.url)
        if parts.scheme == "http" and control_plane.is_remote(parts.hostname or ""):
            yield Finding(
                check="gateways",
                level="WARN",
                message=f"{one.label} serves plain HTTP at {one.url}: others on the network can read keys and prompts",
                advice="start it with --identity-dir, or --tls-cert and --tls-key, instead of --insecure-http",
            )


def _fabric(fleet: FleetObjects) -> Iterator[Finding]:
    for one in fleet.admissions:
        for fault in one.faults:
            yield Finding(
                check="fabric", level="FAIL", message=_fault(one.group, fault), advice=_CHECK
            )
        for line in one.warnings:
            yield Finding(
                check="fabric",
                level="WARN",
                message=f"shardgroup/{one.group}: {line}",
                advice=_CHECK,
            )
    fine = [one for one in fleet.admissions if one.is_admitted and not one.warnings]
    if fine:
        yield ok(
            "fabric",
            f"{counted(len(fine), 'ShardGroup has', 'ShardGroups have')} all cables and settings",
        )


_CHECK = "`fleetctl fabric check` shows cables, RDMA and addresses"


def _fault(group: str, fault: FabricFault) -> str:
    return f"shardgroup/{group}: {fault.message}"


def _objects(fleet: FleetObjects) -> Iterator[Finding]:
    for kind, type_ in _HEALTHY_CONDITIONS.items():
        every = [obj for obj in fleet.objects if obj.kind == kind]
        # A user suspended these on purpose.
        suspended = [obj for obj in every if isinstance(obj, GitSource) and obj.spec.suspend]
        for one in suspended:
            yield Finding(
                check="objects",
                level="WARN",
                message=f"{kind.lower()}/{one.name} is suspended: commits are not applied",
                advice=f"`fleetctl resume {kind.lower()}/{one.name}` ends it",
            )
        active = [obj for obj in every if obj not in suspended]
        bad = [found for obj in active if (found := _unhealthy(obj, type_)) is not None]
        yield from bad
        if active and not bad:
            yield _healthy(fleet, f"{len(active)} of {len(active)} {kind}s are {type_}")
        yield from (found for obj in active if (found := _rollout(obj)) is not None)


def _unhealthy(obj: ApiObject, type_: str) -> Finding | None:
    """Return the finding about an object whose health condition is not true."""
    why = _unhealthy_reason(obj, _condition(obj, type_))
    if not why:
        return None
    label = f"{obj.kind.lower()}/{obj.name}"
    return Finding(
        check="objects",
        level="WARN",
        message=f"{label} is not {type_}: {why}",
        advice=f"`fleetctl describe {label}` shows details",
    )


def _healthy(fleet: FleetObjects, message: str) -> Finding:
    """Return the finding about objects without a problem: without a leader, their conditions may be out of date."""
    if fleet.has_leader:
        return ok("objects", message)
    return Finding(
        check="objects",
        level="WARN",
        message=f"{message} as last observed: no reconciler leads, so this may be out of date",
        advice="start fleet-reconciler, and run doctor again",
    )


_FAILED_ROLLOUTS = {
    "CanaryFailed": "was rolled back",
    "Stalled": "has a stalled rollout",
}


def _rollout(obj: ApiObject) -> Finding | None:
    """Return the finding about a deployment whose newest version does not roll out, though replicas serve."""
    found = _condition(obj, "Progressing")
    if found is None or control_plane.is_unobserved(obj) or found.reason not in _FAILED_ROLLOUTS:
        return None
    name = obj.name
    return Finding(
        check="objects",
        level="WARN",
        message=f"modeldeployment/{name} {_FAILED_ROLLOUTS[found.reason]} ({found.reason}): {found.message}",
        advice=f"`fleetctl describe md/{name}` shows details; `fleetctl rollout undo {name} --to-revision N` declares an "
        f"earlier revision, and `fleetctl rollout history {name}` lists them",
    )


def _condition(obj: ApiObject, type_: str) -> Condition | None:
    status = getattr(obj, "status", None)
    return find_condition(status.conditions, type_) if status is not None else None


def _unhealthy_reason(obj: ApiObject, found: Condition | None) -> str:
    """Return why an object does not count as healthy; "" if it does. A condition of an earlier spec tells nothing."""
    if found is None:
        return "the reconciler has not observed it yet"
    if control_plane.is_unobserved(obj):
        return "the reconciler has not observed its latest change yet"
    return "" if found.status is ConditionStatus.TRUE else (found.message or found.reason)
