"""Checks of nodes against each other: overlays, networks, builds of macOS and releases of MLX."""

import pytest

from insight.doctor.findings import Finding
from insight.doctor.network_checks import check_builds, check_networks
from schemas.meta import ObjectMeta
from schemas.node import FabricInterface, Node, NodeFabric
from tests.support.reconciler_agents import node_status


def node(name: str, address: str, *interfaces: tuple[str, str, int], **changes: str) -> Node:
    """Return a node with interfaces: name, address, length of the prefix."""
    fabric = NodeFabric(
        interfaces=tuple(
            FabricInterface(name=one, address=at, prefix_length=bits)
            for one, at, bits in interfaces
        ),
        os_build=changes.pop("os_build", "25D125"),
    )
    status = node_status(name).model_copy(update={"address": address, "fabric": fabric, **changes})
    return Node(metadata=ObjectMeta(name=name), status=status)


LAN_A = ("en0", "192.168.1.10", 24)
LAN_B = ("en0", "192.168.1.11", 24)
FAR = ("en0", "10.9.0.5", 24)
TAILNET = ("utun4", "100.100.1.2", 32)
ON_LAN = node("b", "192.168.1.11", LAN_B)


def networks(*nodes: Node, unreachable: str = "") -> list[Finding]:
    return list(check_networks(nodes, frozenset(unreachable)))


@pytest.mark.parametrize(
    ("nodes", "is_found"),
    [
        pytest.param((node("a", "100.100.1.2", LAN_A, TAILNET), ON_LAN), True, id="overlay"),
        pytest.param((node("a", "192.168.1.10", LAN_A, TAILNET), ON_LAN), False, id="lan-chosen"),
        pytest.param((node("a", "100.100.1.2", FAR, TAILNET), ON_LAN), False, id="no-common-lan"),
        pytest.param((node("a", "100.100.1.2", LAN_A, TAILNET),), False, id="alone"),
        pytest.param(
            (node("a", "10.5.0.1", LAN_A, ("utun9", "10.5.0.1", 24)), ON_LAN), True, id="other-vpn"
        ),
    ],
)
def test_an_overlay_is_told_where_a_lan_is_shared(nodes: tuple[Node, ...], is_found: bool) -> None:
    findings = [network for network in networks(*nodes) if network.level == "WARN"]
    assert bool(findings) == is_found
    for finding in findings:
        assert finding.node == "a"
        assert "--address 192.168.1.10" in finding.advice


@pytest.mark.parametrize(
    ("other", "unreachable", "level"),
    [
        pytest.param(ON_LAN, "b", None, id="one-network"),
        pytest.param(node("b", "10.9.0.5", FAR), "", "OK", id="several-and-all-reached"),
        pytest.param(node("b", "10.9.0.5", FAR), "b", "WARN", id="several-and-one-not-reached"),
        pytest.param(node("b", "10.9.0.5", ("en0", "10.9.0.5", 0)), "b", None, id="unknown"),
    ],
)
def test_several_networks_matter_when_a_node_is_not_reached(
    other: Node, unreachable: str, level: str | None
) -> None:
    findings = networks(node("a", "192.168.1.10", LAN_A), other, unreachable=unreachable)
    assert [finding.level for finding in findings] == ([] if level is None else [level])
    for finding in findings:
        assert "2 networks (192.168.1.0/24: a; 10.9.0.0/24: b)" in finding.message


def test_builds_and_releases_are_compared() -> None:
    same = [node(name, "", mlx_version="0.32.4") for name in "ab"]
    assert [(build.level, build.message) for build in check_builds(same)] == [
        ("OK", "all 2 Macs have macOS 25D125"),
        ("OK", "all 2 Macs have mlx 0.32.4"),
    ]
    mixed = [*same, node("c", "", mlx_version="0.33.0", os_build="25E1")]
    assert [(build.level, build.message) for build in check_builds(mixed)] == [
        ("WARN", "2 versions of macOS are in use (25D125: a, b; 25E1: c)"),
        ("WARN", "2 versions of mlx are in use (0.32.4: a, b; 0.33.0: c)"),
    ]
    unread = node("d", "", mlx_version="0.32.4", os_build="", os_version="26.2 (25D125)")
    unknown = node("e", "", mlx_version="0.32.4", os_build="", os_version="26.2")
    assert {build.level for build in check_builds([*same, unread, unknown])} == {"OK"}
    assert list(check_builds(same[:1])) == []
    assert list(check_builds([node("a", "", os="Linux"), node("b", "", os="Linux")])) == []
