"""One shard group in detail: the cables between its Macs, its checks, how models are split over it. Pure.

What a group's Macs have, and what the replicas of the group say of their ranks.
"""

from collections.abc import Mapping
from typing import Final

from insight.conditions import Row
from insight.fleet_caches import FleetCaches
from reconciler.groups.fabric import Cable, FabricFault, cables_between
from reconciler.listers.caches import BY_KIND
from schemas.fabric_verdict import MIN_HEALTHY_GB_S
from schemas.node import NodeStatus
from schemas.replica import Replica
from schemas.shardgroup import GroupMember, ShardGroup, ShardGroupStatus
from store import keys

_MOST_MEMBERS: Final = 64


def group_detail(caches: FleetCaches, name: str) -> Row | None:
    """Return members, links, checks and replicas of a group; None if there is no such group."""
    spec = caches.objects.specs.items.get(keys.spec_key("ShardGroup", name))
    if not isinstance(spec, ShardGroup):
        return None
    item = caches.objects.statuses.items.get(keys.status_key("ShardGroup", name))
    status = item if isinstance(item, ShardGroupStatus) else ShardGroupStatus()
    replicas = _replicas(caches, name)
    listed = [member.node for member in spec.spec.members]
    if not listed and replicas:
        listed = [rank.node for rank in replicas[0].spec.ranks]
    members = listed[:_MOST_MEMBERS]
    return {
        "members": members,
        "leastGbPerSecond": MIN_HEALTHY_GB_S,
        "links": _links(caches, spec, members),
        "checks": [
            {
                "name": check.at.isoformat(),
                "at": check.at.isoformat(),
                "backend": check.backend,
                "outcome": check.outcome,
                "reason": check.reason,
                "message": check.message,
                "gbPerSecond": check.gb_per_second,
                "usualGbPerSecond": check.usual_gb_per_second,
                "macs": list(check.nodes),
            }
            for check in reversed(status.fabric_checks)
        ],
        "replicas": [_split(replica) for replica in replicas],
    }


def _replicas(caches: FleetCaches, group: str) -> list[Replica]:
    specs = caches.objects.specs.by_index(BY_KIND, "Replica").values()
    replicas = [
        spec
        for spec in specs
        if isinstance(spec, Replica)
        and spec.spec.formation is not None
        and spec.spec.formation.group == group
    ]
    return sorted(replicas, key=lambda replica: replica.name)


def _links(caches: FleetCaches, group: ShardGroup, members: list[str]) -> list[Row]:
    """Return the cables of each pair of Macs whose agents have reported."""
    given: Mapping[str, GroupMember] = {member.node: member for member in group.spec.members}
    reported: dict[str, NodeStatus] = {}
    for name in members:
        status = caches.objects.statuses.items.get(keys.status_key("Node", name))
        if isinstance(status, NodeStatus):
            reported[name] = status
    rows: list[Row] = []
    for at, one in enumerate(members):
        for other in members[at + 1 :]:
            if one not in reported or other not in reported:
                continue
            cables = cables_between((one, reported[one]), (other, reported[other]), given)
            if isinstance(cables, FabricFault):
                row: Row = {"cables": [], "fault": cables.message}
            else:
                row = {"cables": [_cable_row(cable) for cable in cables], "fault": ""}
            rows.append({"from": one, "to": other, **row})
    return rows


def _cable_row(cable: Cable) -> Row:
    ports = [end.port.speed_gbps for end in (cable.here, cable.there) if end.port is not None]
    return {
        "device": cable.here.device or cable.here.interface,
        "gbitPerSecond": min((port for port in ports if port > 0), default=None),
    }


def _split(replica: Replica) -> Row:
    """Return how a replica's model is divided over its ranks, by the bytes of its memory proofs."""
    formation = replica.spec.formation
    return {
        "name": replica.name,
        "deployment": replica.spec.deployment,
        "epoch": None if formation is None else formation.epoch,
        "backend": None if formation is None else formation.backend,
        "parallelism": None if formation is None else formation.parallelism,
        "formedAt": None if formation is None else formation.formed_at.isoformat(),
        "because": "" if formation is None else formation.because,
        "failures": 0 if formation is None else formation.failures,
        "ranks": [
            {
                "node": rank.node,
                "weightsBytes": rank.memory.weights_bytes,
                "kvBytes": rank.memory.kv_cache_bytes,
                "totalBytes": rank.memory.total_bytes,
                "layers": rank.layers or None,
            }
            for rank in replica.spec.ranks
        ],
    }
