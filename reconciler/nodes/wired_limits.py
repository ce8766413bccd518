"""The wired limit that pools ask for, compared with the one that a Mac has. Pure.

Nothing here sets it: that needs root on the Mac. Placement goes by the memory that the agent reports, which follows
the effective limit.
"""

from collections.abc import Sequence
from typing import Final

from schemas import quantity
from schemas.meta import Condition, ConditionStatus
from schemas.node import Node, NodeStatus, WiredLimit
from schemas.pools import NodePool

WIRED_LIMIT_DIFFERS: Final = "WiredLimitDiffers"
_MIB: Final = 2**20
_SETTERS: Final = {
    "Default": "macOS's default",
    "Service": "set by the job of fleetctl service",
    "Other": "set by a person or another program",
}


def wired_limit_condition(
    node: Node, status: NodeStatus, pools: Sequence[NodePool]
) -> Condition | None:
    """Return the condition WiredLimitDiffers of a node; None if no pool asks for a limit."""
    asked = {pool.name: pool.spec.wired_limit for pool in pools if pool.spec.wired_limit}
    if not asked:
        return None
    if len({quantity.parse(size) // _MIB for size in asked.values()}) > 1:
        sizes = ", ".join(f"pool {name}: {size}" for name, size in sorted(asked.items()))
        return _differs("PoolsDisagree", f"its pools ask for different wired limits ({sizes})")
    size = min(asked.values())
    wanted = f"pool {' and '.join(sorted(asked))} asks for a wired limit of {size}"
    if status.os != "macOS":
        return _differs("NoWiredLimit", f"{wanted}, and it runs {status.os}, which has none")
    if quantity.parse(size) > status.memory_bytes:
        memory = quantity.show(status.memory_bytes)
        return _differs("LimitTooLarge", f"{wanted}, and it has {memory} of memory")
    return _compared(node, status.wired_limit, size, wanted)


def _compared(node: Node, limit: WiredLimit | None, size: str, wanted: str) -> Condition:
    if limit is None:
        return Condition(
            type=WIRED_LIMIT_DIFFERS,
            status=ConditionStatus.UNKNOWN,
            reason="LimitUnknown",
            message=f"{wanted}; its agent has not reported the effective one",
        )
    if limit.mebibytes == quantity.parse(size) // _MIB:
        return Condition(
            type=WIRED_LIMIT_DIFFERS,
            status=ConditionStatus.FALSE,
            reason="LimitSet",
            message=f"{wanted}; {limit_text(limit)}",
        )
    return _differs(
        "LimitDiffers",
        f"{wanted}, and its limit is {limit_text(limit)}. On {node.name}, with the flags that its service has after --: "
        f"`sudo fleetctl service install nodeagent --wired-limit {size}`",
    )


def _differs(reason: str, message: str) -> Condition:
    return Condition(
        type=WIRED_LIMIT_DIFFERS, status=ConditionStatus.TRUE, reason=reason, message=message
    )


def limit_text(limit: WiredLimit) -> str:
    """Return the effective limit with what set it, for people."""
    if not limit.mebibytes:
        return _SETTERS["Default"]
    return f"{quantity.show(limit.mebibytes * _MIB)}, {_SETTERS[limit.set_by]}"
