"""What tables say of ShardGroups, and of replicas that run on them. Pure."""

from typing import cast

from schemas.meta import ApiObject
from schemas.replica import Replica
from schemas.shardgroup import ShardGroup


def together(obj: ApiObject, _: object) -> str:
    """Return how a replica's ranks work together: `Tensor x2 ring, epoch 3, fallback 1`."""
    spec = cast("Replica", obj).spec
    if spec.formation is None:
        return "-"
    made = spec.formation
    back = f", fallback {made.fallback}" if made.fallback else ""
    return f"{made.parallelism} x{len(spec.ranks)} {made.backend}, epoch {made.epoch}{back}"


def members(obj: ApiObject, _: object) -> str:
    """Return who is listed in a group; of a selector how many it finds."""
    group = cast("ShardGroup", obj)
    if group.spec.members:
        return ",".join(member.node for member in group.spec.members)
    return f"{group.status.members} selected" if group.status is not None else "?"


def replicas(obj: ApiObject, _: object) -> str:
    """Return what runs on a group."""
    status = cast("ShardGroup", obj).status
    if status is None:
        return "?"
    return ",".join(status.replicas) or "-"
