"""The registry of the checks of a fleet, and what they need: the store's objects, and results of probes. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from insight.doctor import cable_checks, control_plane, model_checks, network_checks
from insight.doctor.cable_checks import LinkProbe, check_bridges
from insight.doctor.control_plane import EtcdHealth, ForeignEndpoint, ProbeResult, UnobservedChange
from insight.doctor.findings import Finding, Level
from insight.doctor.group_admission import GroupAdmission
from insight.doctor.lost_nodes import LostNode, lost_advice
from insight.doctor.machines import MachineReport, check_machines
from insight.doctor.model_checks import PartialFile
from insight.doctor.network_checks import ListenedNetwork
from insight.doctor.transport_security import SECURITY_CHECKS, TransportSecurity
from insight.version_skew import FleetVersions
from nodeagent.doctor.check import Check, fail, finding, ok, run_all, warn
from nodeagent.doctor.system_checks import clock_level, disk_level
from nodeagent.hardware.metal import METAL_AVAILABLE
from nodeagent.hardware.readings import DiskReading
from schemas import quantity
from schemas.gitsource import GitSource
from schemas.meta import ApiObject, ConditionStatus, find_condition, is_true
from schemas.node import Node
from schemas.quantity import counted
from schemas.replica import Replica
from schemas.shardgroup import ShardGroup


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
class FleetObservation:
    """The facts of a fleet. None: not observed, as in the dashboard, which probes nothing."""

    nodes: Sequence[Node]
    ready: frozenset[str]
    """Nodes whose agents hold their lease."""
    replicas: Sequence[Replica]
    objects: Sequence[ApiObject]
    """Objects of kinds that have a health condition (CONDITION_KINDS)."""
    admissions: Sequence[GroupAdmission]
    """One for each ShardGroup."""
    leader: str
    """Name of the reconciler that leads; empty if none does."""
    store: StoreHealth | None = None
    etcd: EtcdHealth | None = None
    versions: FleetVersions | None = None
    skew: Sequence[str] = ()
    agents: Sequence[ProbeResult] | None = None
    gateways: Sequence[ProbeResult] | None = None
    engines: Sequence[ProbeResult] | None = None
    endpoints: int | None = None
    """The number of endpoints in the store."""
    foreign_endpoints: Sequence[ForeignEndpoint] = ()
    unobserved: Sequence[UnobservedChange] | None = None
    """Changes that the reconciler has not observed."""
    full_disks: Mapping[str, str] | None = None
    """State folders on disks that are almost full, by the labels of their gateways and dashboards."""
    disk: DiskReading | None = None
    """The disk with the fleet's data folder; None if it has none on this machine."""
    security: TransportSecurity | None = None
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
    def unreachable(self) -> frozenset[str]:
        """The nodes without a lease, or whose agent does not answer from here."""
        silent = {agent.label.removeprefix("node/") for agent in self.agents or () if agent.error}
        return frozenset(silent | {node.name for node in self.nodes if node.name not in self.ready})

    @property
    def answering(self) -> frozenset[str]:
        """The gateways that answer from here."""
        return frozenset(gateway.label for gateway in self.gateways or () if not gateway.error)

    @property
    def groups(self) -> list[ShardGroup]:
        """The ShardGroups among the objects."""
        return [obj for obj in self.objects if isinstance(obj, ShardGroup)]


# Leases of 4 s are renewed three times (docs/adr/0007), so a read must take much less than a second.
_SLOW_READ_S: Final = 0.5
# Conditions that are good, or irrelevant, when True; any other condition is a problem when True.
_GOOD_CONDITIONS: Final = frozenset(("Ready", "FabricHealthy", "ApiServing", METAL_AVAILABLE))
_HEALTHY_CONDITIONS: Final = {
    "ModelDeployment": "Available",
    "NodePool": "Ready",
    "ShardGroup": "Ready",
    "ModelRoute": "Accepted",
    "GitSource": "Ready",
}
CONDITION_KINDS: Final = tuple(_HEALTHY_CONDITIONS)
_NODE_REMEDY: Final = "docs/operations/nodes.md describes each condition and its remedy"
_NODE_REMEDIES: Final = {
    "NeedsReboot": "`fleetctl node reboot NODE --drain`",
    "MemoryPressure": "quit programs on it, or `fleetctl drain NODE`",
    "DuplicateHardware": "`fleetctl describe node NODE` says which one to delete or to start anew",
    "KernelPanics": "update macOS; docs/operations/nodes.md#kernel-panics",
    "Withheld": "wait, or change spec.policy of the pool",
    "WiredLimitDiffers": "run the command on NODE; or change spec.wiredLimit of the pool",
    "VersionSkew": "upgrade the older one",
}
_FIREWALL_REMEDY: Final = (
    "it renews its lease, so it runs, and connections from here get no answer: a firewall on its Mac drops them, which "
    "`fleetctl doctor --local` there tells, or one on the way"
)
_FAILED_ROLLOUTS: Final = {
    "CanaryFailed": "was rolled back",
    "Stalled": "has a stalled rollout",
}


def unreachable_findings(message: str) -> list[Finding]:
    """Return the finding for a store that does not answer; without it, nothing else can be checked."""
    advice = "all other checks need the store; run doctor again when it answers"
    return [Finding(check="store", level="FAIL", message=message, advice=advice)]


def check_store(store: StoreHealth) -> Iterator[Finding]:
    """Yield whether the store answers in time, and accepts writes."""
    etcd, took = f"etcd {store.version} at {store.address}", f"{store.read_s * 1000:.0f} ms"
    if store.read_s > _SLOW_READ_S:
        yield warn(
            f"{etcd} took {took} to answer",
            "leases last 4 s: check the load of etcd's disk and machine (docs/operations/store.md)",
        )
    else:
        yield ok(f"{etcd} answers in {took}")
    if store.write_error:
        yield fail(
            f"the store accepts no writes: {store.write_error}",
            "until it does, nothing in the fleet can change (docs/operations/store.md)",
        )
    if store.is_restoring:
        yield warn(
            "`fleetctl restore` is running, or was interrupted",
            "wait for it, or run it again; until then no reconciler leads",
        )


def check_versions(versions: FleetVersions, skew: Sequence[str]) -> Iterator[Finding]:
    """Yield the parts whose versions do not go together."""
    for line in skew:
        message, _, advice = line.partition(": ")
        yield warn(message, advice)
    if not skew:
        yield ok(f"{1 + len(versions.servers())} components have compatible versions")


def check_leases(
    nodes: Sequence[Node], ready: frozenset[str], lost: Sequence[LostNode]
) -> Iterator[Finding]:
    """Yield the nodes whose agents do not renew their leases, with what their ports tell."""
    tried = {node.name: node for node in lost}
    silent = [node.name for node in nodes if node.name not in ready]
    for name in silent:
        ports, advice = lost_advice(name, tried.get(name))
        yield fail(f"node/{name}: its agent does not renew its lease{ports}", advice)
    if not nodes:
        yield warn(
            "there are no nodes, so no model can run",
            "start fleet-nodeagent on each Mac; `fleetctl up` starts one on this machine",
        )
    elif not silent:
        yield ok(counted(len(nodes), "agent renews its lease", "agents renew their leases"))


def check_conditions(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield the conditions of nodes that are problems."""
    for node in nodes:
        for condition in node.status.conditions if node.status is not None else ():
            is_good = condition.type in _GOOD_CONDITIONS
            bad_status = ConditionStatus.FALSE if is_good else ConditionStatus.TRUE
            if condition.status is bad_status and condition.type != "Ready":
                remedy = _NODE_REMEDIES.get(condition.type, _NODE_REMEDY)
                yield warn(
                    f"node/{node.name}: {condition.type}={condition.status}: {condition.message or condition.reason}",
                    remedy.replace("NODE", node.name),
                    since=condition.last_transition_time,
                )


def check_disks(
    nodes: Sequence[Node], disk: DiskReading | None, full_disks: Mapping[str, str] | None
) -> Iterator[Finding]:
    """Yield the disks that are almost full."""
    places = [
        (f"node/{node.name}", node.status.disk_bytes, node.status.disk_free_bytes)
        for node in nodes
        if node.status is not None and node.status.disk_bytes
    ]
    if disk is not None:
        places.append((disk.path, disk.total_bytes, disk.free_bytes))
    levels = [disk_level(free) for _, _, free in places]
    for level, (label, size, free) in zip(levels, places, strict=True):
        if level != "OK":
            yield finding(
                level,
                f"{label}: {quantity.show(free)} free of {quantity.show(size)}",
                "free disk space: models and etcd's database need it",
            )
    for label, folder in (full_disks or {}).items():
        yield fail(
            f"{label}: the disk of {folder}, where it writes its state, is almost full",
            "free space there, or give its --state-dir a folder on another disk",
        )
    pressed = any(n.status and is_true(n.status.conditions, "DiskPressure") for n in nodes)
    if places and set(levels) == {"OK"} and not pressed and not full_disks:
        yield ok(f"{counted(len(places), 'place has', 'places have')} enough free disk space")


def check_memory(nodes: Sequence[Node], replicas: Sequence[Replica]) -> Iterator[Finding]:
    """Yield the nodes whose replicas need more memory than they have."""
    assigned: dict[str, int] = defaultdict(int)
    for replica in replicas:
        for rank in replica.spec.ranks:
            assigned[rank.node] += rank.memory.total_bytes
    is_fine = bool(nodes)
    for node in nodes:
        needed = assigned[node.name]
        if node.status is not None and needed > node.status.allocatable_bytes:
            is_fine, available = False, node.status.allocatable_bytes
            yield fail(
                f"node/{node.name}: replicas need {quantity.show(needed)}, but only {quantity.show(available)} are allocatable",
                f"`fleetctl describe node {node.name}` lists them; scale a deployment down, or drain the node",
            )
    if is_fine:
        total = quantity.show(sum(assigned.values()))
        yield ok(f"replicas need {total}, and no node is overcommitted")


def check_agents(agents: Sequence[ProbeResult]) -> Iterator[Finding]:
    """Yield the agents that do not answer."""
    yield from _probe_findings("agents", agents)


def _probe_findings(
    what: str, results: Sequence[ProbeResult], level: Level = "WARN"
) -> Iterator[Finding]:
    silent = [result for result in results if result.error]
    for result in silent:
        advice = _FIREWALL_REMEDY if result.is_silent else ""
        yield finding(level, f"{result.label}: {result.error}", advice)
    for result in results:
        if not result.error and not result.holds_lease:
            yield warn(
                f"{result.label} answers, but has lost its lease",
                "check that it can reach the store; see `fleetctl logs`",
            )
    if results and not silent:
        yield ok(f"{len(results)} of {len(results)} {what} answer")


def check_clocks(
    agents: Sequence[ProbeResult], gateways: Sequence[ProbeResult]
) -> Iterator[Finding]:
    """Yield the processes whose clock differs from this machine's."""
    offsets = [(p.label, p.offset_s) for p in (*agents, *gateways) if p.offset_s is not None]
    off = [(label, offset) for label, offset in offsets if clock_level(offset) != "OK"]
    for label, offset in off:
        direction = "ahead of" if offset > 0 else "behind"
        message = f"{label}: its clock is {abs(offset):.0f} s {direction} this machine's"
        yield finding(clock_level(offset), message)
    if offsets and not off:
        yield ok(f"{counted(len(offsets), 'process has', 'processes have')} this machine's time")


def check_gateways(gateways: Sequence[ProbeResult]) -> Iterator[Finding]:
    """Yield the gateways that do not answer, or serve plain HTTP to other machines."""
    if not gateways:
        yield warn(
            "no gateway is registered, so clients cannot reach the models",
            "start fleet-gateway on any machine; `fleetctl up` starts one on this machine",
        )
    yield from _probe_findings("gateways", gateways, "FAIL")
    for gateway in gateways:
        parts = urlsplit(gateway.url)
        if parts.scheme == "http" and control_plane.is_remote(parts.hostname or ""):
            yield warn(
                f"{gateway.label} serves plain HTTP at {gateway.url}: others on the network can read keys and prompts",
                "start it with --identity-dir, or --tls-cert and --tls-key, instead of --insecure-http",
            )


def check_engines(engines: Sequence[ProbeResult]) -> Iterator[Finding]:
    """Yield the engines that accept no connection from here."""
    here = [engine for engine in engines if not engine.is_elsewhere]
    yield from _probe_findings("engines", here)
    if len(here) < len(engines):
        number = counted(len(engines) - len(here), "engine listens", "engines listen")
        yield ok(f"{number} on sockets of other machines: run doctor there to check")


def check_fabric(admissions: Sequence[GroupAdmission]) -> Iterator[Finding]:
    """Yield what keeps ShardGroups from forming."""
    for admission in admissions:
        for fault in admission.faults:
            yield fail(f"shardgroup/{admission.group}: {fault.message}")
        for line in admission.warnings:
            yield warn(f"shardgroup/{admission.group}: {line}")
    fine = sum(admission.is_admitted and not admission.warnings for admission in admissions)
    if fine:
        groups = counted(fine, "ShardGroup has", "ShardGroups have")
        yield ok(f"{groups} all cables and settings")


def check_objects(objects: Sequence[ApiObject], leader: str) -> Iterator[Finding]:
    """Yield the objects that are not healthy, are suspended, or do not roll out though replicas serve."""
    for kind, type_ in _HEALTHY_CONDITIONS.items():
        active: list[ApiObject] = []
        for obj in objects:
            if obj.kind == kind and isinstance(obj, GitSource) and obj.spec.suspend:
                label = f"{kind.lower()}/{obj.name}"
                yield warn(
                    f"{label} is suspended: commits are not applied",
                    f"`fleetctl resume {label}` ends it",
                )
            elif obj.kind == kind:
                active.append(obj)
        bad = [(obj.name, reason) for obj in active if (reason := _unhealthy_reason(obj, type_))]
        for name, reason in bad:
            label = f"{kind.lower()}/{name}"
            yield warn(
                f"{label} is not {type_}: {reason}", f"`fleetctl describe {label}` shows details"
            )
        healthy = f"{len(active)} of {len(active)} {kind}s are {type_}"
        if active and not bad and leader:
            yield ok(healthy)
        elif active and not bad:
            yield warn(
                f"{healthy} as last observed: no reconciler leads, so this may be out of date",
                "start fleet-reconciler, and run doctor again",
            )
        for obj in active:
            status = getattr(obj, "status", None)
            rollout = None if status is None else find_condition(status.conditions, "Progressing")
            if (
                rollout is not None
                and rollout.reason in _FAILED_ROLLOUTS
                and not control_plane.is_unobserved(obj)
            ):
                yield warn(
                    f"modeldeployment/{obj.name} {_FAILED_ROLLOUTS[rollout.reason]} ({rollout.reason}): {rollout.message}",
                    f"`fleetctl describe md/{obj.name}` shows details; `fleetctl rollout undo {obj.name} --to-revision N` "
                    f"declares an earlier revision, and `fleetctl rollout history {obj.name}` lists them",
                )


def _unhealthy_reason(obj: ApiObject, type_: str) -> str:
    """Return why an object does not count as healthy; "" if it does. A condition of an earlier spec tells nothing."""
    status = getattr(obj, "status", None)
    condition = None if status is None else find_condition(status.conditions, type_)
    if condition is None:
        return "the reconciler has not observed it yet"
    if control_plane.is_unobserved(obj):
        return "the reconciler has not observed its latest change yet"
    is_healthy = condition.status is ConditionStatus.TRUE
    return "" if is_healthy else (condition.message or condition.reason)


# What others depend on comes first.
CHECKS: Final[Sequence[Check]] = (
    Check(name="store", run=check_store, needs=("store",)),
    Check(name="store", run=control_plane.check_exposure, needs=("etcd",)),
    Check(name="quota", run=control_plane.check_quota, needs=("etcd",)),
    Check(name="leader", run=control_plane.check_leader, needs=("leader", "unobserved")),
    Check(name="store reads", run=control_plane.check_store_views, needs=("agents", "gateways")),
    Check(name="versions", run=check_versions, needs=("versions", "skew")),
    Check(name="nodes", run=check_leases, needs=("nodes", "ready", "lost")),
    Check(name="nodes", run=check_conditions, needs=("nodes",)),
    Check(name="networks", run=network_checks.check_networks, needs=("nodes", "unreachable")),
    Check(name="multicast", run=network_checks.check_multicast, needs=("multicast", "answering")),
    Check(name="builds", run=network_checks.check_builds, needs=("nodes",)),
    Check(name="disk", run=check_disks, needs=("nodes",), uses=("disk", "full_disks")),
    Check(name="memory", run=check_memory, needs=("nodes", "replicas")),
    Check(
        name="agents",
        run=check_agents,
        needs=("agents",),
        remedy="logs, top and support-bundle need it: check that the agent runs and that this machine can reach its --api-port",
    ),
    Check(
        name="clocks",
        run=check_clocks,
        needs=("agents", "gateways"),
        remedy="synchronize both clocks: `sudo sntp -sS time.apple.com` sets a Mac's clock once",
    ),
    Check(
        name="gateways",
        run=check_gateways,
        needs=("gateways",),
        remedy="clients get no answer there: check its log, and that this machine can reach its port",
    ),
    Check(
        name="engines",
        run=check_engines,
        needs=("engines",),
        remedy="gateways need it: check that a firewall allows the node's --engine-port and the 100 ports after it, or that "
        "the gateway and the engine's agent run as the same user with the same --engine-sockets",
    ),
    Check(
        name="endpoints",
        run=control_plane.check_endpoints,
        needs=("endpoints", "foreign_endpoints"),
    ),
    *SECURITY_CHECKS,
    Check(name="machines", run=check_machines, needs=("machines",)),
    Check(name="thunderbolt bridge", run=check_bridges, needs=("nodes",)),
    Check(
        name="fabric",
        run=check_fabric,
        needs=("admissions",),
        remedy="`fleetctl fabric check` shows cables, RDMA and addresses",
    ),
    Check(name="cables", run=cable_checks.check_cables, needs=("nodes", "replicas", "groups")),
    Check(name="cables", run=cable_checks.check_links, needs=("links",)),
    Check(name="models", run=model_checks.check_models, needs=("nodes", "partial_files")),
    Check(name="objects", run=check_objects, needs=("objects", "leader")),
)


def run_checks(fleet: FleetObservation) -> list[Finding]:
    """Return the findings of all checks whose facts are known."""
    return run_all(CHECKS, fleet)
