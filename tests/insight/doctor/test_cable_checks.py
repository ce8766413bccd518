"""Checks of cables and RDMA: each failure is found in one report, and not in the sound one beside it."""

from datetime import UTC, datetime
from typing import Any

import pytest

from insight.doctor.cable_checks import check_cables
from insight.doctor.findings import Finding
from nodeagent.hardware.rdma_failures import KNOWN_FAILURES
from schemas.formation import Formation
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from schemas.node import FabricInterface, Node
from schemas.replica import Replica, ReplicaStatus
from schemas.shardgroup import GroupMember, ShardGroup, ShardGroupSpec, ShardGroupStatus
from tests.support.reconciler_fabric import Mac, meshed, with_fabric
from tests.support.world import replica

SINCE = datetime(2026, 11, 22, tzinfo=UTC)


def nodes_of(macs: list[Mac]) -> list[Node]:
    return [Node(metadata=ObjectMeta(name=name), status=status) for name, status in macs]


def found_in(macs: list[Mac]) -> list[Finding]:
    return list(check_cables(nodes_of(macs), ()))


def cabled(network: str, length: int) -> dict[str, Any]:
    """Return the interfaces of a Mac with two cables: the second one has the address."""
    return {
        "interfaces": (
            FabricInterface(name="en0", address="192.168.1.5", prefix_length=24),
            FabricInterface(name="en2", address="10.0.1.1", is_thunderbolt=True, prefix_length=30),
            FabricInterface(name="en3", address=network, is_thunderbolt=True, prefix_length=length),
        )
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({}, "", id="sound"),
        pytest.param(
            {"rdma": (), "is_rdma_enabled": True},
            "RDMA is on, but macOS has no RDMA device",
            id="rdma-without-devices",
        ),
        pytest.param(
            {"rdma": (), "is_rdma_enabled": True, "thunderbolt": 4},
            "RDMA is on, but its ports are Thunderbolt 4, which cannot do RDMA: no setting changes that",
            id="thunderbolt-4",
        ),
        pytest.param({"rdma": (), "is_rdma_enabled": False}, "", id="rdma-off"),
        pytest.param(
            {"interfaces": (FabricInterface(name="en2", address="10.0.1.1"),)},
            "rdma_en3 leads to another Mac, and en3 has no IPv4 address: ranks fail with errno 22",
            id="no-ipv4",
        ),
        pytest.param(cabled("10.0.1.5", 30), "", id="a-network-for-each-cable"),
        pytest.param(cabled("10.0.1.2", 0), "", id="length-unknown"),
        pytest.param(
            cabled("10.0.1.2", 30),
            "the cables at en2, en3 are in one network, 10.0.1.0/30: packets take any of them",
            id="one-network",
        ),
    ],
)
def test_a_macs_report(changes: dict[str, Any], message: str) -> None:
    findings = found_in(with_fabric(meshed(3), 0, **changes))
    assert [finding.message for finding in findings] == ([message] if message else [])
    assert all(finding.node == "mac-0" and finding.advice for finding in findings)


@pytest.mark.parametrize(
    ("there", "is_split"), [("10.82.0.226", False), ("10.82.0.230", True), ("", False)]
)
def test_a_cable_with_another_network_at_each_end(there: str, is_split: bool) -> None:
    macs = meshed(2)
    for at, address in enumerate(("10.82.0.225", there)):
        end = FabricInterface(name="en2", address=address, prefix_length=30)
        macs = with_fabric(macs, at, interfaces=(end,) if address else (), rdma=())
    messages = [finding.message for finding in found_in(macs) if "two networks" in finding.message]
    assert (
        messages
        == [
            "the cable from en2 to en2 of mac-1 has two networks, 10.82.0.224/30 and 10.82.0.228/30: its ends do not reach "
            "each other"
        ]
        * is_split
    )


def test_thunderbolt_4_gets_no_advice_that_cannot_help() -> None:
    (finding,) = found_in(with_fabric(meshed(2), 0, rdma=(), is_rdma_enabled=True, thunderbolt=4))
    assert finding.advice == "use it in groups with backend: ring"


def jaccl_replica(connections: int, words: str = "") -> Replica:
    """Return a replica whose rank 0 has connections over one device, and that failed with words."""
    made = replica(0).replica
    towards = ((), *(("rdma_en2",) for _ in range(connections)))
    ranks = tuple(
        made.spec.ranks[0].model_copy(update={"node": name, "rdma": towards if not at else ()})
        for at, name in enumerate(("mac-0", "mac-1"))
    )
    formation = Formation(group="pair", backend="jaccl", formed_at=SINCE)
    spec = made.spec.model_copy(update={"ranks": ranks, "formation": formation})
    over = Condition(
        type="EpochOver",
        status=ConditionStatus.TRUE if words else ConditionStatus.FALSE,
        reason="RankEnded",
        message=words,
        last_transition_time=SINCE,
    )
    return made.model_copy(update={"spec": spec, "status": ReplicaStatus(conditions=(over,))})


@pytest.mark.parametrize(("connections", "count"), [(10, 0), (11, 1)])
def test_more_connections_than_queue_pairs(connections: int, count: int) -> None:
    cables = list(check_cables((), (jaccl_replica(connections),)))
    assert len(cables) == count
    assert all("rdma_en2 for 11 connections, and it has 10" in cable.message for cable in cables)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("rank 1 on mac-1: [jaccl] Changing queue pair to RTR failed with errno 22", "errno 22"),
        ("rank 1 on mac-1: [jaccl] Changing queue pair to RTR failed with errno 96", "queue pair"),
        ("rank 1 on mac-1: [jaccl] connect failed (errno: 65)", "errno 60 or 65"),
        ("rank 1 on mac-1: socket: No route to host", "errno 60 or 65"),
        ("rank 1 on mac-1: ibv_create_qp: Resource busy", "errno 16"),
        ("rank 1 on mac-1: Couldn't allocate protection domain", "protection domain"),
        ("rank 1 on mac-1: errno 2: no such file", ""),
        ("rank 1 on mac-1: exit code 1", ""),
        ("", ""),
    ],
)
def test_the_words_of_a_failed_rank_have_a_cause(words: str, name: str) -> None:
    cables = list(check_cables((), (jaccl_replica(1, words),)))
    if not name:
        assert cables == []
        return
    (finding,) = cables
    assert finding.message.startswith(f"replica/qwen-0 of shardgroup/pair failed with {name}: ")
    assert (finding.node, finding.since) == ("mac-1", SINCE)
    assert "NODE" not in finding.advice


def test_used_up_queue_pairs_ask_for_a_restart_and_not_for_another_attempt() -> None:
    (failure,) = (known for known in KNOWN_FAILURES if known.name == "errno 16")
    assert failure.advice.endswith(": another attempt cannot help")


@pytest.mark.parametrize(
    ("status", "count"), [(ConditionStatus.FALSE, 1), (ConditionStatus.TRUE, 0)]
)
def test_a_group_whose_cables_became_slow(status: ConditionStatus, count: int) -> None:
    condition = Condition(
        type="FabricHealthy", status=status, reason="SlowerThanUsual", message="2 GB/s, 8 usual"
    )
    group = ShardGroup(
        metadata=ObjectMeta(name="pair"),
        spec=ShardGroupSpec(members=(GroupMember(node="a"), GroupMember(node="b"))),
        status=ShardGroupStatus(conditions=(condition,)),
    )
    cables = list(check_cables((), (), (group,)))
    assert len(cables) == count
    assert all("fleetctl describe shardgroup pair" in cable.advice for cable in cables)
