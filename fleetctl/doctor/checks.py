"""What the doctor says about one thing, and how it is shown. Pure.

What the doctor saw: values to judge.

What is right and wrong in what the doctor saw. Pure.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fleetctl.cli import terminal
from fleetctl.fabric.admission import GroupAdmission
from fleetctl.fleets.version_skew import FleetVersions
from reconciler.groups.fabric import FabricFault
from schemas import quantity
from schemas.gitsource import GitSource
from schemas.meta import ApiObject, ConditionStatus, find_condition
from schemas.node import Node
from schemas.replica import Replica

Level = Literal["OK", "WARN", "FAIL"]
_ROLES: dict[Level, terminal.Role] = {"OK": "good", "WARN": "warn", "FAIL": "bad"}
# Indents what follows under what was found.
_MARGIN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """Which check: store, leader, nodes, ..."""
    level: Level
    message: str
    """What is so, with the name of what it is about."""
    advice: str = ""
    """What to do, where something is wrong."""


def count_level(found: Sequence[Finding], level: Level) -> int:
    return sum(one.level == level for one in found)


def format_findings(found: Sequence[Finding]) -> str:
    """Return the findings for people, what to do below each."""
    width = max(len(one.check) for one in found)
    lines: list[str] = []
    for one in found:
        word = terminal.style(one.level.ljust(4), _ROLES[one.level])
        lines.append(f"{word}  {one.check.ljust(width)}  {one.message}")
        if one.advice:
            lines.append(" " * (_MARGIN + width + 2) + terminal.style(one.advice, "dim"))
    return "\n".join((*lines, "", summary_line(found)))


def summary_line(found: Sequence[Finding]) -> str:
    """Return how much is well, such as `11 OK, 1 WARN, 0 FAIL`."""
    return ", ".join(f"{count_level(found, level)} {level}" for level in _ROLES)


def findings_tree(found: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings for programs."""
    return {
        "ok": not count_level(found, "FAIL"),
        "findings": [
            {
                "check": one.check,
                "level": one.level,
                "message": one.message,
                **({"advice": one.advice} if one.advice else {}),
            }
            for one in found
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """How the store is."""

    address: str
    version: str
    read_s: float
    """How long it took to answer a read that every member has to agree on."""
    write_error: str = ""
    """Why it takes no writes; empty if it does."""
    is_restoring: bool = False
    """Whether `fleetctl restore` is at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What came of asking somebody over HTTP or TCP from here."""

    label: str
    """For people: `node/mac-1`, `gateway/1f2e`, `replica/qwen-0`."""
    url: str
    error: str = ""
    """Why there was no good answer; empty if there was one."""
    offset_s: float | None = None
    """How far its clock is ahead of ours, in seconds, give or take one; None if it did not say."""
    holds_lease: bool = True
    """Whether it thinks that the fleet knows of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """The disk of this machine that has the fleet's folder."""

    path: str
    size_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObservation:
    """Everything that was looked at."""

    store: StoreHealth
    versions: FleetVersions
    skew: Sequence[str]
    nodes: Sequence[Node]
    ready: frozenset[str]
    replicas: Sequence[Replica]
    objects: Sequence[ApiObject]
    """Objects of the kinds that have a condition which says whether they are well."""
    verdicts: Sequence[GroupAdmission]
    """About each ShardGroup."""
    agents: Sequence[ProbeResult]
    gateways: Sequence[ProbeResult]
    engines: Sequence[ProbeResult]
    disk: DiskSpace | None = None
    """None if the fleet has no folder on this machine."""


# Leases of 4 s are renewed three times (docs/adr/0009): an answer must take much less than a second.
_SLOW_S = 0.5
# A Date header has whole seconds. What is far off breaks certificates and the order of events.
_CLOCK_WARN_S, _CLOCK_FAIL_S = 3.0, 60.0
# An agent's own DiskPressure comes later; etcd stops at no space at all.
_DISK_WARN_BYTES, _DISK_FAIL_BYTES = 10 * 2**30, 2**30
# What is well when it is True, or says nothing about the node's health; any other condition is trouble.
_GOOD_CONDITIONS = frozenset(("Ready", "FabricHealthy", "ApiServing"))
_HEALTHY_CONDITIONS = {
    "ModelDeployment": "Available",
    "NodePool": "Ready",
    "ShardGroup": "Ready",
    "ModelRoute": "Accepted",
    "GitSource": "Ready",
}
CONDITION_KINDS = tuple(_HEALTHY_CONDITIONS)


def run_checks(seen: FleetObservation) -> list[Finding]:
    """Return what is to be said, what others depend on first."""
    return [
        *_store(seen),
        *_leader(seen),
        *_versions(seen),
        *_nodes(seen),
        *_pressure(seen.nodes),
        *_disks(seen),
        *_memory(seen),
        *_probe_results("agents", seen.agents, "agents", _AGENT_ADVICE),
        *_clocks(seen.agents, seen.gateways),
        *_gateways(seen),
        *_probe_results("engines", seen.engines, "engines", _ENGINE_ADVICE),
        *_fabric(seen),
        *_objects(seen),
    ]


_AGENT_ADVICE = "logs, top and bundles need it: see that the agent runs, and that its --api-port can be reached from here"
_ENGINE_ADVICE = "gateways need it: see that a firewall lets the node's --engine-port and the hundred after it through"


def unreachable_findings(message: str) -> list[Finding]:
    """Return what is to be said if the store does not answer: nothing else can be looked at."""
    return [
        Finding(
            check="store",
            level="FAIL",
            message=message,
            advice="every other check needs the store; run doctor again when it answers",
        )
    ]


def _ok(check: str, message: str) -> Finding:
    return Finding(check=check, level="OK", message=message)


def _store(seen: FleetObservation) -> Iterator[Finding]:
    store = seen.store
    took = f"{store.read_s * 1000:.0f} ms"
    if store.read_s > _SLOW_S:
        yield Finding(
            check="store",
            level="WARN",
            message=f"etcd {store.version} at {store.address} took {took} to answer",
            advice="leases last 4 s: see how busy its disk and its machine are (docs/operations/store.md)",
        )
    else:
        yield _ok("store", f"etcd {store.version} at {store.address} answers in {took}")
    if store.write_error:
        yield Finding(
            check="store",
            level="FAIL",
            message=f"it takes no writes: {store.write_error}",
            advice="until it does, nothing in the fleet can change (docs/operations/store.md)",
        )
    if store.is_restoring:
        yield Finding(
            check="store",
            level="WARN",
            message="`fleetctl restore` is at work, or was ended in the middle",
            advice="let it end, or run it again; until then nobody leads",
        )


def _leader(seen: FleetObservation) -> Iterator[Finding]:
    leader = seen.versions.reconciler
    if leader is not None:
        yield _ok("leader", f"reconciler {leader.name} leads")
        return
    yield Finding(
        check="leader",
        level="FAIL",
        message="no reconciler leads: what runs goes on, and nothing is placed, replaced or scaled",
        advice="start fleet-reconciler on any machine; `fleetctl up` does on this one",
    )


def _versions(seen: FleetObservation) -> Iterator[Finding]:
    for line in seen.skew:
        message, _, advice = line.partition(": ")
        yield Finding(check="versions", level="WARN", message=message, advice=advice)
    if not seen.skew:
        parts = 1 + len(seen.versions.servers())
        yield _ok("versions", f"{parts} parts of the fleet get along")


def _nodes(seen: FleetObservation) -> Iterator[Finding]:
    if not seen.nodes:
        yield Finding(
            check="nodes",
            level="WARN",
            message="there are no nodes, so no model can run",
            advice="start fleet-nodeagent on each Mac; `fleetctl up` does on this one",
        )
        return
    lost = [node.name for node in seen.nodes if node.name not in seen.ready]
    for name in lost:
        yield Finding(
            check="nodes",
            level="FAIL",
            message=f"node/{name}: its agent does not renew its lease",
            advice=f"is the Mac awake, and does fleet-nodeagent run there? `fleetctl delete node {name}` forgets it",
        )
    if not lost:
        yield _ok(
            "nodes",
            f"{_counted(len(seen.nodes), 'agent renews its lease', 'agents renew their leases')}",
        )


def _pressure(nodes: Sequence[Node]) -> Iterator[Finding]:
    for node in nodes:
        for found in node.status.conditions if node.status is not None else ():
            bad = found.status is (
                ConditionStatus.FALSE if found.type in _GOOD_CONDITIONS else ConditionStatus.TRUE
            )
            if bad and found.type != "Ready":
                yield Finding(
                    check="nodes",
                    level="WARN",
                    message=f"node/{node.name}: {found.type}={found.status}: {found.message or found.reason}",
                    advice="docs/operations/nodes.md says what to do about each condition",
                )


def _disks(seen: FleetObservation) -> Iterator[Finding]:
    places = [
        (f"node/{node.name}", node.status.disk_bytes, node.status.disk_free_bytes)
        for node in seen.nodes
        if node.status is not None and node.status.disk_bytes
    ]
    if seen.disk is not None:
        places.append((seen.disk.path, seen.disk.size_bytes, seen.disk.free_bytes))
    short = [place for place in places if place[2] < _DISK_WARN_BYTES]
    for label, size, free in short:
        level: Level = "FAIL" if free < _DISK_FAIL_BYTES else "WARN"
        yield Finding(
            check="disk",
            level=level,
            message=f"{label}: {quantity.show(free)} free of {quantity.show(size)}",
            advice="make room: models and etcd's file need it",
        )
    if places and not short:
        yield _ok("disk", f"{_counted(len(places), 'disk has', 'disks have')} room")


def _memory(seen: FleetObservation) -> Iterator[Finding]:
    assigned: dict[str, int] = defaultdict(int)
    for replica in seen.replicas:
        for rank in replica.spec.ranks:
            assigned[rank.node] += rank.memory.total_bytes
    over = [
        (node.name, assigned[node.name], node.status.allocatable_bytes)
        for node in seen.nodes
        if node.status is not None and assigned[node.name] > node.status.allocatable_bytes
    ]
    for name, taken, most in over:
        yield Finding(
            check="memory",
            level="FAIL",
            message=f"node/{name}: replicas need {quantity.show(taken)}, models may have {quantity.show(most)}",
            advice=f"`fleetctl describe node {name}` shows whose; scale one down, or drain the node",
        )
    if seen.nodes and not over:
        total = sum(assigned.values())
        yield _ok(
            "memory", f"replicas need {quantity.show(total)}, and no node has more than it can hold"
        )


def _probe_results(
    check: str, answers: Sequence[ProbeResult], what: str, advice: str, level: Level = "WARN"
) -> Iterator[Finding]:
    silent = [one for one in answers if one.error]
    for one in silent:
        yield Finding(check=check, level=level, message=f"{one.label}: {one.error}", advice=advice)
    for one in answers:
        if not one.error and not one.holds_lease:
            yield Finding(
                check=check,
                level="WARN",
                message=f"{one.label} answers, but has lost its lease",
                advice="can it reach the store? `fleetctl logs` of it says",
            )
    if answers and not silent:
        yield _ok(check, f"{len(answers)} of {len(answers)} {what} answer")


def _clocks(*groups: Sequence[ProbeResult]) -> Iterator[Finding]:
    told = [
        (one.label, one.offset_s) for group in groups for one in group if one.offset_s is not None
    ]
    off = [(label, offset) for label, offset in told if abs(offset) > _CLOCK_WARN_S]
    for label, offset in off:
        word = "ahead of" if offset > 0 else "behind"
        yield Finding(
            check="clocks",
            level="FAIL" if abs(offset) > _CLOCK_FAIL_S else "WARN",
            message=f"{label}: its clock is {abs(offset):.0f} s {word} this machine's",
            advice="let both be set over the network: `sudo sntp -sS time.apple.com` on a Mac sets it once",
        )
    if told and not off:
        yield _ok(
            "clocks", f"{_counted(len(told), 'clock agrees', 'clocks agree')} with this machine's"
        )


def _gateways(seen: FleetObservation) -> Iterator[Finding]:
    if not seen.gateways:
        yield Finding(
            check="gateways",
            level="WARN",
            message="no gateway is registered, so no client is served through one",
            advice="start fleet-gateway on any machine; `fleetctl up` does on this one",
        )
    advice = "clients get no answer there: see its log, and that its port can be reached from here"
    yield from _probe_results("gateways", seen.gateways, "gateways", advice, "FAIL")


def _fabric(seen: FleetObservation) -> Iterator[Finding]:
    for one in seen.verdicts:
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
    fine = [one for one in seen.verdicts if one.is_admitted and not one.warnings]
    if fine:
        yield _ok(
            "fabric",
            f"{_counted(len(fine), 'ShardGroup has', 'ShardGroups have')} the cables and settings needed",
        )


_CHECK = "`fleetctl fabric check` shows cables, RDMA and addresses"


def _fault(group: str, fault: FabricFault) -> str:
    return f"shardgroup/{group}: {fault.message}"


def _objects(seen: FleetObservation) -> Iterator[Finding]:
    for kind, type_ in _HEALTHY_CONDITIONS.items():
        every = [obj for obj in seen.objects if obj.kind == kind]
        # Somebody wants these to be left as they are.
        suspended = [obj for obj in every if isinstance(obj, GitSource) and obj.spec.suspend]
        mine = [obj for obj in every if obj not in suspended]
        for one in suspended:
            yield _ok("objects", f"{kind.lower()}/{one.name} is suspended")
        bad = 0
        for obj in mine:
            status = getattr(obj, "status", None)
            found = find_condition(status.conditions, type_) if status is not None else None
            if found is not None and found.status is ConditionStatus.TRUE:
                continue
            bad += 1
            why = (
                "the reconciler has not looked at it"
                if found is None
                else (found.message or found.reason)
            )
            yield Finding(
                check="objects",
                level="WARN",
                message=f"{kind.lower()}/{obj.name} is not {type_}: {why}",
                advice=f"`fleetctl describe {kind.lower()}/{obj.name}` says more",
            )
        if mine and not bad:
            yield _ok("objects", f"{len(mine)} of {len(mine)} {kind}s are {type_}")


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
