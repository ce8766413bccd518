"""The verb `fleetctl fabric check`: output for given Macs, and on a real store."""

import json
from datetime import UTC, datetime

import click
import pytest

from fleetctl.cli import terminal
from fleetctl.verbs import fabric
from insight.doctor.group_admission import GroupAdmission, check_admission
from nodeagent.hardware import linux
from schemas.deployment import (
    ModelDeployment,
    ModelDeploymentSpec,
    ModelDeploymentStatus,
    ModelSource,
)
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from schemas.node import Node
from schemas.shardgroup import FabricCheck, ShardGroup, ShardGroupSpec, ShardGroupStatus
from store import codec, keys
from store.port import Put
from tests.support.fleet import Fleet
from tests.support.fleetctl_runner import MemoryFleet
from tests.support.reconciler_agents import node_status, put_lease, put_node
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

ADMITTED = """\
shardgroup/studio: jaccl over 2 nodes, cables and settings: admitted
  RANK    NODE    STATUS    ADDRESSES
  0       mac-0   Ready     192.168.1.0
  1       mac-1   Ready     192.168.1.1
  CABLE    FROM                                TO                                    GBIT/S
  0-1      mac-0 rdma_en2 (active, 10.0.1.1)   mac-1 rdma_en2 (active, 10.1.1.1)     80"""
REFUSED = """\
shardgroup/studio: jaccl over 2 nodes, cables and settings: not admitted
  RANK    NODE    STATUS    ADDRESSES
  0       mac-0   Ready     -
  1       mac-1   Ready     -
  CABLE    FROM                                TO                        GBIT/S
  0-1      mac-0 rdma_en2 (active, 10.0.1.1)   mac-1 - (not there, 10.1.1.1)   80
  RdmaOff: RDMA is off on mac-1: start it into Recovery"""


def squeezed(text: str) -> list[list[str]]:
    return [line.split() for line in click.unstyle(text).splitlines()]


def test_a_complete_group_is_admitted() -> None:
    verdict = judged(meshed(2), TWO)
    assert squeezed(fabric.admission_text(verdict)) == squeezed(ADMITTED)
    assert fabric.admission_tree(verdict, {})["isAdmitted"] is True
    assert terminal.paint("admitted", "good") in fabric.admission_text(verdict)


def test_faults_are_listed_below_the_group() -> None:
    macs = with_fabric(meshed(2), 1, is_rdma_enabled=False, rdma=())
    verdict = judged(macs, TWO)
    said, wanted = squeezed(fabric.admission_text(verdict)), squeezed(REFUSED)
    assert said[:-1] == wanted[:-1]
    assert said[-1][: len(wanted[-1])] == wanted[-1]
    assert [fault.reason for fault in verdict.faults] == ["RdmaOff"]


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


MATRIX = """\
             mac-0                            mac-1                            SAME
MACHINE      Mac16,1                          Mac16,1                          yes
CHIP         Apple M4 Pro                     Apple M4 Pro                     yes
CPU CORES    10                               10                               yes
GPU CORES    10                               10                               yes
MEMORY       8.0 GiB                          8.0 GiB                          yes
FOR MODELS   8.0 GiB                          8.0 GiB                          yes
SYSTEM       macOS 26                         macOS 26                         yes
BUILD        25D125                           25C56                            no
MLX          -                                -                                yes
MLX-LM       -                                -                                yes
AGENT        0                                0                                yes
THUNDERBOLT  5                                5                                yes
RDMA         on                               on                               yes
RDMA PORTS   rdma_en2:Active                  rdma_en2:Active
ADDRESSES    en0:192.168.1.0,en2:10.0.1.1     en0:192.168.1.1,en2:10.1.1.1

FROM / TO    mac-0        mac-1
mac-0                     rdma_en2@80
mac-1        rdma_en2@80"""


@pytest.fixture(scope="module")
async def two_groups(shared_fleet: MemoryFleet) -> MemoryFleet:
    return await with_two_groups(shared_fleet)


async def with_two_groups(fleet: MemoryFleet) -> MemoryFleet:
    """Return the fleet with two live Linux nodes and two groups."""
    transport = fleet.store
    for name in ("node-1", "node-2"):
        status = node_status(name).model_copy(update={"os": "Linux"})
        await transport.commit([], [put_node(name, status), put_lease(name)])
    ring = '{"members": [{"node": "node-1"}, {"node": "node-2"}]}'
    for name, spec in (("pair", ring), ("fast", ring.replace("]}", '], "backend": "jaccl"}'))):
        await transport.commit([], [codec.put_spec(shardgroup(name, spec))])
    return fleet


async def test_groups_of_a_store(two_groups: MemoryFleet) -> None:
    done = await two_groups.ctl("fabric", "check", "pair")
    assert (done.code, done.err) == (0, "")
    assert (
        done.out.splitlines()[0]
        == "shardgroup/pair: ring over 2 nodes, cables and settings: admitted"
    )
    assert [line.split() for line in done.out.splitlines()[2:]] == [
        ["0", "node-1", "Ready", "127.0.0.1"],
        ["1", "node-2", "Ready", "127.0.0.1"],
    ]
    both = await two_groups.ctl("fabric", "check", "-o", "json")
    assert both.code == 1
    fast, pair = json.loads(both.out)["groups"]
    assert (pair["group"], pair["isAdmitted"], pair["missing"]) == ("pair", True, [])
    assert [one["reported"]["os"] for one in pair["members"]] == ["Linux", "Linux"]
    assert [one["reason"] for one in fast["missing"]] == ["NotAMac", "NotAMac"]
    wrong = await two_groups.ctl("fabric", "check", "shardgroup/pear")
    assert (wrong.code, wrong.err) == (
        1,
        'error: shardgroups "pear" not found; did you mean pair?\n',
    )
    kind = await two_groups.ctl("fabric", "check", "md/pair")
    assert kind.code == 2
    assert "modeldeployments are not shardgroups; write NAME or shardgroup/NAME" in kind.err


async def test_a_deployment_that_the_group_cannot_run_is_listed(fleet: MemoryFleet) -> None:
    two_groups = await with_two_groups(fleet)
    why = "0/1 groups fit: Tensor works with 3, not 2"
    placed = Condition(
        type="Placed",
        status=ConditionStatus.FALSE,
        reason="Unschedulable",
        message=why,
        observed_generation=1,
    )
    for name, group, generation in (("big", "pair", 1), ("else", "fast", 1), ("new", "pair", 2)):
        made = ModelDeployment(
            metadata=ObjectMeta(name=name, uid=f"uid-{name}", generation=generation),
            spec=ModelDeploymentSpec(model=ModelSource(path="m"), sharding=group),
        )
        status = codec.encode(ModelDeploymentStatus(conditions=(placed,)))
        key = keys.status_key("ModelDeployment", name)
        await two_groups.store.commit([], [codec.put_spec(made), Put(key=key, value=status)])
    done = await two_groups.ctl("fabric", "check", "pair")
    assert (done.code, done.err) == (0, "")
    head, *_, last = done.out.splitlines()
    assert head == "shardgroup/pair: ring over 2 nodes, cables and settings: admitted"
    assert last == f"  modeldeployment/big is not placed (Unschedulable): {why}"
    (pair,) = json.loads((await two_groups.ctl("fabric", "check", "pair", "-o", "json")).out)[
        "groups"
    ]
    assert [one["deployment"] for one in pair["unplaced"]] == ["big"]


async def test_the_history_of_checks_is_shown(fleet: MemoryFleet) -> None:
    two_groups = await with_two_groups(fleet)
    old = FabricCheck(
        at=datetime(2026, 1, 1, tzinfo=UTC),
        nodes=("node-1", "node-2"),
        backend="ring",
        outcome="Healthy",
        reason="Measured",
        gb_per_second=1.2,
    )
    slower = {"outcome": "Unhealthy", "reason": "SlowerThanUsual", "usual_gb_per_second": 1.2}
    new = old.model_copy(update={**slower, "gb_per_second": 0.4})
    status = codec.encode(ShardGroupStatus(fabric_checks=(old, new)))
    await two_groups.store.commit(
        [], [Put(key=keys.status_key("ShardGroup", "pair"), value=status)]
    )
    described = (await two_groups.ctl("describe", "shardgroup", "pair")).out
    titles, first, second = described.partition("Checks of the cables:\n")[2].splitlines()[:3]
    assert titles.split() == ["AGE", "RESULT", "SPEED", "USUAL", "MACS", "REASON", "MESSAGE"]
    assert first.split()[1:7] == ["Unhealthy", "0.4", "GB/s", "1.2", "GB/s", "node-1,node-2"]
    assert second.split()[1:6] == ["Healthy", "1.2", "GB/s", "-", "node-1,node-2"]


async def test_a_store_without_groups(fleet: MemoryFleet) -> None:
    done = await fleet.ctl("fabric", "check")
    assert (done.code, done.out) == (0, "")
    assert "no shardgroups found" in done.err


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
