"""A Mac that can do no RDMA gives its place in a group over JACCL to a spare."""

import pytest

from reconciler.actions import CreateReplica
from reconciler.groups.group_view import GroupView
from reconciler.placement.refusals import summary_line
from reconciler.plan import plan
from schemas.shardgroup import Backend
from tests.reconciler.groups.test_fabric import group as cabled
from tests.reconciler.groups.test_fabric import meshed, with_fabric
from tests.support.reconciler_group_situations import mac, seen, sharded
from tests.support.reconciler_shorthand import short

NAMES = ("mac-0", "mac-1", "mac-2")


def three(backend: Backend, *, off: tuple[int, ...]) -> GroupView:
    """Return a group of two of three Macs, RDMA switched off on some."""
    macs = meshed(3)
    for at in off:
        macs = with_fabric(macs, at, is_rdma_enabled=False)
    spec = cabled(backend, macs).model_copy(update={"size": 2})
    return GroupView(name="pair", spec=spec, members=NAMES, machines=dict(macs))


@pytest.mark.parametrize(
    ("backend", "off", "taken"),
    [
        pytest.param("jaccl", (), "+qwen-0@mac-0,mac-1", id="all-can"),
        pytest.param("jaccl", (0,), "+qwen-0@mac-1,mac-2", id="a-spare-steps-in"),
        pytest.param("ring", (0, 1, 2), "+qwen-0@mac-0,mac-1", id="a-ring-needs-none"),
    ],
)
def test_who_can_is_taken(backend: Backend, off: tuple[int, ...], taken: str) -> None:
    situation = seen(sharded(), (), [mac(n) for n in NAMES], [three(backend, off=off)])
    actions = plan(situation).actions
    assert [short(one) for one in actions if isinstance(one, CreateReplica)] == [taken]


def test_nobody_left_is_told_per_mac() -> None:
    situation = seen(sharded(), (), [mac(n) for n in NAMES], [three("jaccl", off=(0, 2))])
    refused = plan(situation).unschedulable
    assert refused is not None
    assert "rdma_ctl enable" in summary_line(refused)
    assert [node for node, why in refused.refusals if why.reason == "RdmaOff"] == ["mac-0", "mac-2"]
