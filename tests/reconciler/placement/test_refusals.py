"""Every hold of a node, as the message of a deployment that has no place.

Reasons that depend on the deployment are in test_filters.py; the messages of each node in nodes/test_node_state.py.
"""

from dataclasses import replace

import pytest

from reconciler.deployments.placer import Assignment, place_replica
from reconciler.placement.filters import find_rejection
from reconciler.placement.inputs import NodeHold, NodeView, request_for
from reconciler.placement.refusals import Unschedulable, summary_line
from tests.support.world import GIB, deployment, node

WANT = request_for(deployment())
LINES = [
    ("NodeDraining", "1 draining"),
    ("NodeWithheld", "1 withheld (so it is)"),
    ("DuplicateHardware", "1 with the hardware of another node (so it is)"),
    ("VersionSkew", "1 of another version (so it is)"),
    ("NodeFlapping", "1 held back (so it is)"),
    ("MemoryPressure", "1 under memory pressure"),
    ("DiskPressure", "1 under disk pressure"),
    ("ThermalPressure", "1 too hot"),
    ("NeedsReboot", "1 in need of a reboot"),
]


def held(name: str, reason: str, **more: int) -> NodeView:
    hold = NodeHold(reason=reason, message="so it is", **more)
    return replace(node(name), holds=(hold, NodeHold(reason="NotTheFirst", message="and no more")))


def test_the_line_about_shared_hardware_leaves_remedies_to_the_nodes() -> None:
    """The conditions of a deployment have the line three times."""
    message = (
        "node mac-1 is the same machine (hardware UUID 1). If this one is a clone, start it anew"
    )
    there = replace(node("a"), holds=(NodeHold(reason="DuplicateHardware", message=message),))
    placed = place_replica(WANT, [there])
    assert isinstance(placed, Unschedulable)
    assert summary_line(placed) == (
        "0/1 nodes fit: 1 with the hardware of another node (node mac-1 is the same machine (hardware UUID 1))"
    )


@pytest.mark.parametrize(("reason", "line"), LINES)
def test_the_phrase_of_each_reason(reason: str, line: str) -> None:
    there = held("a", reason)
    rejected = find_rejection(WANT, there)
    assert rejected is not None
    assert (rejected.reason, rejected.message) == (reason, "so it is")
    verdict = place_replica(WANT, [there])
    assert isinstance(verdict, Unschedulable)
    assert verdict.refusals == (("a", rejected),)
    assert summary_line(verdict) == f"0/1 nodes fit: {line}"


def test_disk_names_the_node_with_the_most() -> None:
    nodes = [
        held(name, "InsufficientDisk", need=50 * GIB, have=have * GIB)
        for name, have in (("a", 10), ("b", 40), ("c", 20))
    ]
    verdict = place_replica(WANT, [*nodes, replace(node("d"), is_cordoned=True)])
    assert isinstance(verdict, Unschedulable)
    line = "0/4 nodes fit: 3 short of disk (need 50.0 GiB, best has 40.0), 1 cordoned"
    assert summary_line(verdict) == line


def test_not_ready_comes_before_all_holds() -> None:
    rejected = find_rejection(WANT, replace(held("a", "NeedsReboot"), is_ready=False))
    assert rejected is not None
    assert rejected.reason == "NodeNotReady"


def test_other_nodes_take_the_replicas_of_a_held_back_node() -> None:
    verdict = place_replica(WANT, [held("a", "NodeFlapping"), node("b", memory_gib=4)])
    assert isinstance(verdict, Assignment)
    assert verdict.node == "b"


def test_a_reason_to_leave_does_not_keep_replicas_away() -> None:
    assert find_rejection(WANT, replace(node("a"), leave_reason="draining: fleetctl drain")) is None
