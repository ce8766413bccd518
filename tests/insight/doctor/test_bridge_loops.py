"""Loops of cables through the Thunderbolt Bridges of several Macs."""

from collections.abc import Sequence

import pytest

from insight.doctor.cable_checks import check_bridges
from schemas.meta import ObjectMeta
from schemas.node import Node, NodeFabric, ThunderboltPort
from tests.support.agent_api import STATUS


def macs(*cables: str, unbridged: Sequence[str] = ()) -> list[Node]:
    """Return Macs with cables such as "a1-b1" between their ports; the bridges of some are taken apart."""
    ends = [(end, other) for cable in cables for end, other in _both_ways(cable)]
    nodes = []
    for name in sorted({end[0] for end, _ in ends}):
        ports = tuple(
            ThunderboltPort(
                receptacle=end[1], domain=end, peer=other, is_bridged=name not in unbridged
            )
            for end, other in ends
            if end[0] == name
        )
        status = STATUS.model_copy(update={"fabric": NodeFabric(ports=ports)})
        nodes.append(Node(metadata=ObjectMeta(name=name), status=status))
    return nodes


def _both_ways(cable: str) -> tuple[tuple[str, str], tuple[str, str]]:
    first, _, second = cable.partition("-")
    return (first, second), (second, first)


@pytest.mark.parametrize(
    ("nodes", "level", "names"),
    [
        pytest.param(macs("a1-b1", "b2-c1", "c2-a2"), "FAIL", "a, b, c", id="ring"),
        pytest.param(macs("a1-b1", "a2-b2"), "FAIL", "a, b", id="two cables"),
        pytest.param(macs("a1-b1", "b2-c1", "c2-a2", "d1-e1"), "FAIL", "a, b, c", id="ring and pair"),
        pytest.param(macs("a1-b1", "b2-c1"), "OK", "", id="chain"),
        pytest.param(macs("a1-b1", "a2-c1", "a3-d1"), "OK", "", id="star"),
        pytest.param(macs("a1-b1", "b2-c1", "c2-a2", unbridged="b"), "OK", "", id="open ring"),
    ],
)  # fmt: skip
def test_a_loop_of_bridged_cables_fails(nodes: list[Node], level: str, names: str) -> None:
    [finding] = check_bridges(nodes)
    assert finding.level == level
    if names:
        assert f"the Thunderbolt Bridges of {names} make a loop" in finding.message


def test_macs_without_joined_bridges_are_not_mentioned() -> None:
    assert list(check_bridges(macs("a1-b1", "b2-c1", "c2-a2", unbridged="abc"))) == []
    assert list(check_bridges([Node(metadata=ObjectMeta(name="a"))])) == []


def test_a_cable_that_only_one_end_reports_counts() -> None:
    nodes = macs("a1-b1", "a2-b2")
    blind = nodes[1].status
    assert blind is not None
    ports = tuple(port.model_copy(update={"peer": ""}) for port in blind.fabric.ports)
    nodes[1] = nodes[1].model_copy(
        update={"status": blind.model_copy(update={"fabric": NodeFabric(ports=ports)})}
    )
    assert [bridge.level for bridge in check_bridges(nodes)] == ["FAIL"]
