"""Rules that hold a node back from new replicas, and say whether its replicas should leave. Pure.

Each rule is a function from the node's documents to a NodeHold or None; the first hold is the one that messages show.
A hold keeps new replicas away; only the holds in `_REASONS_TO_LEAVE` move replicas elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Final

from reconciler.nodes.liveness import Flapping
from reconciler.nodes.quiet_hours import QuietCalendar
from reconciler.nodes.version_skew import VersionedPart, mlx_skew_text, skew_text
from reconciler.placement.inputs import NodeHold
from schemas import quantity
from schemas.meta import ConditionStatus, find_condition
from schemas.node import Node, NodeStatus
from schemas.pools import NodePool

# The agent's conditions that keep new replicas away.
_PRESSURES: Final = ("MemoryPressure", "DiskPressure", "ThermalPressure", "NeedsReboot")
# Pressure is no reason to leave: replicas stay within their proof, so another program causes it, and it may be over
# before another Mac has loaded the model.
_REASONS_TO_LEAVE: Final = {"NodeWithheld": "withheld"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """The inputs for the state of a node besides its own documents."""

    pools: tuple[NodePool, ...]
    """Pools that contain the node."""
    calendar: QuietCalendar
    version: str
    """Version of the reconciler."""
    flapping: Flapping | None = None
    """Set while the node is held back for flapping."""
    peers: tuple[Node, ...] = ()
    """Other nodes that report the same hardware UUID."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The state of a node, as placement and its status need it."""

    holds: tuple[NodeHold, ...]
    leave_reason: str
    """Reason to move replicas elsewhere; empty if they may stay."""
    skew: str
    """Version difference, whether it holds the node back or not; empty if there is none."""

    def hold(self, reason: str) -> NodeHold | None:
        """Return the hold with that reason."""
        return next((one for one in self.holds if one.reason == reason), None)


def evaluate_node(node: Node, status: NodeStatus, context: NodeContext) -> NodeState:
    """Apply all rules to a node."""
    rules = (
        _draining(node),
        _withheld(status, context),
        _duplicate(node, status, context.peers),
        _skewed(status, context.version),
        _flapping(context.flapping),
        *_pressed(status),
        _metal(status),
        _disk(status, context.pools),
    )
    holds = tuple(hold for hold in rules if hold is not None)
    differs = agent_skew(status, context.version) or mlx_skew(status)
    return NodeState(holds=holds, leave_reason=_leave_reason(node, holds), skew=differs)


def _draining(node: Node) -> NodeHold | None:
    if not node.spec.draining:
        return None
    message = f"it is being drained; `fleetctl uncordon {node.name}` lets new replicas in again"
    return NodeHold(reason="NodeDraining", message=message)


def _withheld(status: NodeStatus, context: NodeContext) -> NodeHold | None:
    if not context.pools:
        return None
    rules = [
        f"pool {pool.name}: {why}"
        for pool in context.pools
        for why in _rules(pool, status, context)
    ]
    return NodeHold(reason="NodeWithheld", message="; ".join(rules)) if rules else None


def _rules(pool: NodePool, status: NodeStatus, context: NodeContext) -> Iterator[str]:
    policy = pool.spec.policy
    if policy is None:
        return
    if pool.name in context.calendar.quiet:
        yield context.calendar.quiet[pool.name]
    # A machine that reports no power source counts as one without a battery.
    if policy.mains_only and status.power == "Battery":
        yield "mainsOnly, until it runs on mains power again"
    if policy.owner_active == "Yield" and status.is_owner_active:
        yield "ownerActive, until its owner has been away for some minutes"


def _duplicate(node: Node, status: NodeStatus, peers: Sequence[Node]) -> NodeHold | None:
    """Hold the younger of two nodes that are one machine: the older one already has replicas."""
    if not peers:
        return None
    others = [
        peer
        for peer in peers
        if peer.name != node.name
        and not (status.is_part and peer.status is not None and peer.status.is_part)
        and _age(peer) < _age(node)
    ]
    if not others:
        return None
    first = min(others, key=_age).name
    return NodeHold(
        reason="DuplicateHardware",
        message=f"node {first} is the same machine (hardware UUID {status.hardware_uuid}). If this "
        f"one is a clone, give it its own identity; if the Mac was renamed, "
        f"`fleetctl delete node {first}`; for two agents on one machine, start both with --part-of-machine",
    )


def _age(node: Node) -> tuple[bool, float, str]:
    """Return a sort key, the oldest node first; a node without a spec counts as the youngest."""
    created = node.metadata.creation_timestamp
    return created is None, 0.0 if created is None else created.timestamp(), node.name


def agent_skew(status: NodeStatus, version: str) -> str:
    """Describe the difference between the agent's and the reconciler's version; empty if they are compatible."""
    return _version_skew(status.agent_version, version)


@lru_cache  # a fleet has few versions at a time
def _version_skew(agent_version: str, version: str) -> str:
    return skew_text(
        VersionedPart(label="its agent", version=agent_version, upgrade="its fleet-nodeagent"),
        VersionedPart(label="the reconciler", version=version),
    )


def mlx_skew(status: NodeStatus) -> str:
    """Describe how the node's mlx-lm differs from the tested version; empty if it does not."""
    return mlx_skew_text("its mlx-lm", status.mlx_lm_version)


def _skewed(status: NodeStatus, version: str) -> NodeHold | None:
    differs = agent_skew(status, version)
    return NodeHold(reason="VersionSkew", message=differs) if differs else None


def _flapping(found: Flapping | None) -> NodeHold | None:
    return None if found is None else NodeHold(reason="NodeFlapping", message=flap_message(found))


def flap_message(found: Flapping) -> str:
    """Describe how often the node came back, and until when it is held back."""
    return (
        f"it came back {found.returns} times in a row; held back until {_time(found.until_at)}, "
        "each time for longer"
    )


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _pressed(status: NodeStatus) -> Iterator[NodeHold]:
    # All conditions are read once, and not once for each pressure: a new leader does it for every node.
    found = {one.type: one for one in status.conditions if one.status is ConditionStatus.TRUE}
    for type_ in _PRESSURES:
        if type_ in found:
            yield NodeHold(reason=type_, message=found[type_].message or found[type_].reason)


def _metal(status: NodeStatus) -> NodeHold | None:
    found = find_condition(status.conditions, "MetalAvailable")
    if found is None or found.status is not ConditionStatus.FALSE:
        return None  # an earlier agent, or a machine without Metal, has no such condition
    return NodeHold(reason="MetalUnavailable", message=found.message or found.reason)


def _disk(status: NodeStatus, pools: Sequence[NodePool]) -> NodeHold | None:
    if not pools:
        return None
    kept = {p.name: quantity.parse(p.spec.reserved.disk) for p in pools if p.spec.reserved}
    need, have = max(kept.values(), default=0), status.disk_free_bytes
    if not status.disk_bytes or have >= need:  # an agent that reports no disk size
        return None
    pool = min(name for name, size in kept.items() if size == need)
    return NodeHold(
        reason="InsufficientDisk",
        message=f"it has {quantity.show(have)} of disk free, pool {pool} reserves "
        f"{quantity.show(need)} (spec.reserved.disk)",
        need=need,
        have=have,
    )


def _leave_reason(node: Node, holds: Sequence[NodeHold]) -> str:
    """Return why replicas should leave the node; a drain comes first."""
    if node.spec.draining:
        return "draining: fleetctl drain"
    if not holds:
        return ""
    reasons = (
        f"{_REASONS_TO_LEAVE[hold.reason]}: {hold.message}"
        for hold in holds
        if hold.reason in _REASONS_TO_LEAVE
    )
    return next(reasons, "")
