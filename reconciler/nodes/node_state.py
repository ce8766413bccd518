"""What follows from a node's state: what it may still take, and whether what it has should go. Pure.

Every rule is a function from what is known of the node to a Hold, or None; their order is the order in which people
are told. What holds a node back keeps new replicas away and no more; only some of it is a reason to leave.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from machinery.version import is_compatible, parse_release
from reconciler.nodes.liveness import Flapping
from reconciler.nodes.quiet_hours import QuietCalendar
from reconciler.views import NodeHold
from schemas import quantity
from schemas.meta import ConditionStatus, find_condition
from schemas.node import Node, NodeStatus
from schemas.pools import NodePool

# The mlx-lm that the memory rules were held to (pyproject.toml pins it, models/cache_rules.py has them).
MLX_LM: Final = "0.32"
# The agent's conditions that keep new replicas away.
_PRESSURES: Final = ("MemoryPressure", "DiskPressure", "ThermalPressure", "NeedsReboot")
# Pressure is none: what runs keeps within its proof, so it is somebody else's doing, and may be over before another
# Mac has loaded the model.
_REASONS_TO_LEAVE: Final = {"NodeWithheld": "withheld"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """What beside the node itself decides about it."""

    pools: tuple[NodePool, ...]
    """Those it is in."""
    calendar: QuietCalendar
    version: str
    """The reconciler's own."""
    flap: Flapping | None = None
    """Set while it is held back because it came and went."""
    peers: tuple[Node, ...] = ()
    """Other nodes that report the same hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """What follows."""

    holds: tuple[NodeHold, ...]
    leave: str
    skew: str
    """Which version differs, be it a reason to hold the node back or not."""

    def hold(self, reason: str) -> NodeHold | None:
        """Return the hold for that reason."""
        return next((one for one in self.holds if one.reason == reason), None)


def evaluate_node(node: Node, status: NodeStatus, around: NodeContext) -> NodeState:
    """Return what follows from the node's state."""
    rules = (
        _draining(node),
        _withheld(status, around),
        _duplicate(node, status, around.peers),
        _skewed(status, around.version),
        _flapping(around.flap),
        *_pressed(status),
        _disk(status, around.pools),
    )
    holds = tuple(hold for hold in rules if hold is not None)
    differs = agent_skew(status, around.version) or mlx_skew(status)
    return NodeState(holds=holds, leave=_leave(node, holds), skew=differs)


def _draining(node: Node) -> NodeHold | None:
    if not node.spec.draining:
        return None
    message = f"it is being drained; `fleetctl uncordon {node.name}` lets new replicas in again"
    return NodeHold(reason="NodeDraining", message=message)


def _withheld(status: NodeStatus, around: NodeContext) -> NodeHold | None:
    rules = [
        f"pool {pool.name}: {why}" for pool in around.pools for why in _rules(pool, status, around)
    ]
    return NodeHold(reason="NodeWithheld", message="; ".join(rules)) if rules else None


def _rules(pool: NodePool, status: NodeStatus, around: NodeContext) -> Iterator[str]:
    policy = pool.spec.policy
    if policy is None:
        return
    if pool.name in around.calendar.quiet:
        yield around.calendar.quiet[pool.name]
    # A machine that cannot tell has no battery, as far as anybody knows.
    if policy.mains_only and status.power == "Battery":
        yield "mainsOnly, until it runs on mains power again"
    if policy.owner_active == "Yield" and status.is_owner_active:
        yield "ownerActive, until nobody has sat at it for some minutes"


def _duplicate(node: Node, status: NodeStatus, peers: Sequence[Node]) -> NodeHold | None:
    """Of two nodes with one machine the younger is refused: the elder's replicas are there already."""
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
        f"one is a clone, give it an identity of its own; if the Mac was renamed, "
        f"`fleetctl delete node {first}`",
    )


def _age(node: Node) -> tuple[bool, float, str]:
    """Return by what the eldest comes first; a node that nobody registered yet is the youngest."""
    created = node.metadata.creation_timestamp
    return created is None, 0.0 if created is None else created.timestamp(), node.name


def agent_skew(status: NodeStatus, version: str) -> str:
    """Return what is wrong between the agent's version and the reconciler's; empty if they get along."""
    theirs, ours = parse_release(status.agent_version), parse_release(version)
    if theirs is None or ours is None:  # a checkout, or a program of somebody else's
        return ""
    if is_compatible(status.agent_version, version):
        return ""
    who = "its fleet-nodeagent" if theirs < ours else "the reconciler"
    return (
        f"its agent is {status.agent_version}, the reconciler is {version}; they may be one minor "
        f"version apart: upgrade {who}"
    )


def mlx_skew(status: NodeStatus) -> str:
    """Return how the node's mlx-lm differs from the one that memory proofs are right for."""
    theirs = parse_release(status.mlx_lm_version)
    if theirs is None or theirs == parse_release(MLX_LM):
        return ""
    return (
        f"its mlx-lm is {status.mlx_lm_version}, memory proofs were checked with {MLX_LM}: install "
        f"mlx-lm {MLX_LM} there. Until then replicas may take more memory than proven"
    )


def _skewed(status: NodeStatus, version: str) -> NodeHold | None:
    differs = agent_skew(status, version)
    return NodeHold(reason="VersionSkew", message=differs) if differs else None


def _flapping(flap: Flapping | None) -> NodeHold | None:
    return None if flap is None else NodeHold(reason="NodeFlapping", message=flap_message(flap))


def flap_message(flap: Flapping) -> str:
    """Return how often the node came back, and until when it is held back."""
    return (
        f"it came back {flap.returns} times in a row; held back until {_time(flap.until_at)}, "
        "longer with each time"
    )


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _pressed(status: NodeStatus) -> Iterator[NodeHold]:
    for type_ in _PRESSURES:
        found = find_condition(status.conditions, type_)
        if found is not None and found.status is ConditionStatus.TRUE:
            yield NodeHold(reason=type_, message=found.message or found.reason)


def _disk(status: NodeStatus, pools: Sequence[NodePool]) -> NodeHold | None:
    kept = {p.name: quantity.parse(p.spec.reserved.disk) for p in pools if p.spec.reserved}
    need, have = max(kept.values(), default=0), status.disk_free_bytes
    if not status.disk_bytes or have >= need:  # no size: nobody could tell
        return None
    pool = min(name for name, size in kept.items() if size == need)
    return NodeHold(
        reason="InsufficientDisk",
        message=f"it has {quantity.show(have)} of disk free, pool {pool} reserves "
        f"{quantity.show(need)} (spec.reserved.disk)",
        need=need,
        have=have,
    )


def _leave(node: Node, holds: Sequence[NodeHold]) -> str:
    """Return why what runs there should go; the owner's wish first."""
    if node.spec.draining:
        return "draining: fleetctl drain"
    reasons = (
        f"{_REASONS_TO_LEAVE[hold.reason]}: {hold.message}"
        for hold in holds
        if hold.reason in _REASONS_TO_LEAVE
    )
    return next(reasons, "")
