"""The verb `fleetctl fabric check`: output for given Macs, and on a real store."""

import json

import pytest

from fleetctl.verbs import fabric
from insight.doctor.group_admission import GroupAdmission, check_admission
from nodeagent.hardware import linux
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from schemas.node import Node
from schemas.shardgroup import ShardGroup, ShardGroupSpec
from tests.support.fleet import Fleet
from tests.support.reconciler_fabric import Mac, meshed, with_fabric, with_status


def shardgroup(name: str, spec: str) -> ShardGroup:
    meta = ObjectMeta(name=name, uid=f"uid-{name}", generation=1)
    allowed = {"allow_unencrypted_ring": True}  # Macs with JACCL meet over the Ethernet
    made = ShardGroupSpec.model_validate_json(spec).model_copy(update=allowed)
    return ShardGroup(metadata=meta, spec=made)


def nodes_of(macs: list[Mac]) -> list[Node]:
    return [Node(metadata=ObjectMeta(name=name), status=status) for name, status in macs]


def judged(macs: list[Mac], spec: str, *, dead: str = "") -> GroupAdmission:
    ready = {name for name, _ in macs} - {dead}
    return check_admission(shardgroup("studio", spec), nodes_of(macs), ready)


TWO = '{"members": [{"node": "mac-0"}, {"node": "mac-1"}], "backend": "jaccl"}'
SPARE = '{"members": [{"node": "mac-0"}, {"node": "mac-1"}, {"node": "mac-2"}], "size": 2, "backend": "jaccl"}'


def test_a_spare_replaces_a_dead_member() -> None:
    verdict = judged(meshed(3), SPARE, dead="mac-0")
    assert verdict.is_admitted
    assert [(member.node, member.rank) for member in verdict.members] == [
        ("mac-1", 0),
        ("mac-2", 1),
        ("mac-0", None),
    ]


def condition(type_: str, status: ConditionStatus) -> Condition:
    return Condition(type=type_, status=status, reason="Because", message="of something")


@pytest.mark.parametrize(
    ("macs", "spec", "reasons"),
    [
        pytest.param(meshed(1), TWO, ["NodeUnknown"], id="never-reported"),
        pytest.param(
            meshed(1), '{"selector": {}, "size": 2}', ["TooFewMembers"], id="selector-finds-too-few"
        ),
        pytest.param(
            with_status(meshed(2), 0, conditions=(condition("NeedsReboot", ConditionStatus.TRUE),)),
            TWO,
            ["NeedsReboot"],
            id="reboot",
        ),
        pytest.param(
            with_status(
                meshed(2), 0, conditions=(condition("FabricHealthy", ConditionStatus.FALSE),)
            ),
            TWO,
            ["FabricUnhealthy"],
            id="measured-slow",
        ),
    ],
)
def test_unusable_members_are_faults(macs: list[Mac], spec: str, reasons: list[str]) -> None:
    assert [fault.reason for fault in judged(macs, spec).faults] == reasons


def test_a_silent_agent_is_a_fault() -> None:
    assert [fault.reason for fault in judged(meshed(2), TWO, dead="mac-1").faults] == ["NotReady"]


@pytest.mark.parametrize(
    ("macs", "spec", "words"),
    [
        pytest.param(
            with_status(meshed(2), 1, mlx_version="0.32.4"),
            TWO,
            "versions of mlx differ (mac-0 none, mac-1 0.32.4)",
            id="versions",
        ),
        pytest.param(
            with_status(meshed(2), 1, memory_bytes=1), TWO, "chips or memory differ", id="unequal"
        ),
        pytest.param(
            meshed(2),
            TWO.replace("}]", '}], "environment": {"MLX_METAL_FAST_SYNCH": "1"}'),
            "can deadlock",
            id="fast-synch",
        ),
        pytest.param(
            with_fabric(meshed(3), 2, is_rdma_enabled=False),
            SPARE,
            "spare mac-2: RDMA is off",
            id="spare-that-is-none",
        ),
        pytest.param(meshed(2), SPARE, "spare mac-2: its agent has never reported", id="spare-unknown"),
    ],
)  # fmt: skip
def test_warnings_do_not_prevent_admission(macs: list[Mac], spec: str, words: str) -> None:
    verdict = judged(macs, spec)
    assert verdict.is_admitted
    (said,) = verdict.warnings
    assert words in said
    assert said in fabric.admission_text(verdict)


@pytest.mark.ci
@pytest.mark.etcd
@pytest.mark.timeout(120)
async def test_check_uses_the_reports_of_real_agents(store: Fleet) -> None:
    """Two real agents on this machine: a ring on loopback is admitted, a foreign address is not."""
    for name in ("node-1", "node-2"):
        store.start_agent(name)
    await store.joined(2)
    (node,) = [json.loads((await store.ctl("get", "node/node-1", "-o", "json")).out)]
    assert [one["name"] for one in node["status"]["fabric"]["interfaces"]] == [
        interface.name for interface in linux.read_fabric().interfaces
    ]
    members = [{"node": "node-1", "addresses": ["203.0.113.9"]}, {"node": "node-2"}]
    for name, given in (("pair", [*members[1:], {"node": "node-1"}]), ("lost", members)):
        group = {"kind": "ShardGroup", "metadata": {"name": name}, "spec": {"members": given}}
        await store.applied(json.dumps({"apiVersion": "fleet/v1alpha1", **group}))
    done = await store.ctl("fabric", "check", "-o", "json")
    lost, pair = json.loads(done.out)["groups"]
    # A machine without a network reports no addresses, so foreign ones cannot be detected.
    is_networked = bool(linux.read_fabric().interfaces)
    assert (done.code, pair["isAdmitted"]) == (int(is_networked), True)
    assert [one["addresses"] for one in pair["members"]] == [["127.0.0.1"]] * 2
    assert [one["reason"] for one in lost["missing"]] == ["NotItsAddress"] * is_networked
