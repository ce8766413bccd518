"""The wired limit that pools ask for: what differs is named with the command, and an unset field means hands off."""

import pytest

from reconciler.nodes.wired_limits import wired_limit_condition
from schemas.meta import ObjectMeta
from schemas.node import Node, WiredLimit
from schemas.pools import NodePool, NodePoolSpec
from tests.support.reconciler_agents import node_status

NODE = Node(metadata=ObjectMeta(name="mac-1"))
STATUS = node_status("mac-1", memory_gib=128)


def pool(name: str, size: str | None) -> NodePool:
    return NodePool(metadata=ObjectMeta(name=name), spec=NodePoolSpec(wired_limit=size))


LIMIT_100 = WiredLimit(mebibytes=102_400, set_by="Service")
LIMIT_90 = WiredLimit(mebibytes=92_160, set_by="Other")
DEFAULT = WiredLimit(mebibytes=0, set_by="Default")


@pytest.mark.parametrize(
    ("sizes", "limit", "changes", "reason"),
    [
        pytest.param([None], LIMIT_90, {}, "", id="hands-off"),
        pytest.param(["100Gi"], LIMIT_100, {}, "LimitSet", id="set"),
        pytest.param(["100Gi", "102400Mi"], LIMIT_100, {}, "LimitSet", id="two-pools-agree"),
        pytest.param(["100Gi"], DEFAULT, {}, "LimitDiffers", id="default"),
        pytest.param(["100Gi"], LIMIT_90, {}, "LimitDiffers", id="other"),
        pytest.param(["100Gi", "90Gi"], LIMIT_90, {}, "PoolsDisagree", id="pools-disagree"),
        pytest.param(["200Gi"], DEFAULT, {}, "LimitTooLarge", id="more-than-the-mac-has"),
        pytest.param(["100Gi"], None, {"os": "Linux"}, "NoWiredLimit", id="linux"),
        pytest.param(["100Gi"], None, {}, "LimitUnknown", id="an-older-agent"),
    ],
)
def test_the_limit_of_a_mac_is_compared_with_its_pools(
    sizes: list[str | None], limit: WiredLimit | None, changes: dict[str, str], reason: str
) -> None:
    status = STATUS.model_copy(update={"wired_limit": limit, **changes})
    pools = [pool(f"p{number}", size) for number, size in enumerate(sizes)]
    condition = wired_limit_condition(NODE, status, pools)
    assert ("" if condition is None else condition.reason) == reason


def test_a_difference_has_what_is_effective_who_set_it_and_the_command() -> None:
    status = STATUS.model_copy(update={"wired_limit": LIMIT_90})
    condition = wired_limit_condition(NODE, status, [pool("studios", "100Gi")])
    assert condition is not None
    assert condition.message == (
        "pool studios asks for a wired limit of 100Gi, and its limit is 90.0 GiB, set by a person or another program. "
        "On mac-1, with the flags that its service has after --: "
        "`sudo fleetctl service install nodeagent --wired-limit 100Gi`"
    )


@pytest.mark.parametrize("size", ["0", "1Mi", "1023Mi"])
def test_a_limit_that_leaves_no_room_for_a_model_is_refused(size: str) -> None:
    with pytest.raises(ValueError, match="at least 1Gi"):
        NodePoolSpec(wired_limit=size)
