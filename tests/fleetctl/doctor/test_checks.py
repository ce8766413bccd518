"""Health checks of `fleetctl doctor`, with values and with a real store."""

import json
from typing import Any

import pytest

from fleetctl.doctor.checks import (
    DiskSpace,
    Finding,
    FleetObservation,
    ProbeResult,
    StoreHealth,
    count_level,
    findings_tree,
    format_findings,
    run_checks,
    summary_line,
)
from fleetctl.fleets.version_skew import ComponentVersion, FleetVersions
from schemas.gitsource import GitSource
from schemas.meta import Condition, ConditionStatus
from schemas.node import Node, NodeStatus
from tests.support.fleet import Fleet, fleetctl

GIB = 2**30


def node(name: str, *conditions: Condition, free: int = 500 * GIB) -> Node:
    status = NodeStatus.model_validate({
        "uid": name, "hostname": name, "address": "10.0.0.1", "agent_version": "0.1.0", "os": "macOS",
        "os_version": "26.2", "machine": "Mac16,9", "chip": "Apple M4 Max", "cpu_cores": 16, "gpu_cores": 40,
        "memory_bytes": 128 * GIB, "allocatable_bytes": 96 * GIB, "disk_bytes": 1000 * GIB,
        "disk_free_bytes": free, "conditions": conditions,
    })  # fmt: skip
    bare = Node.model_validate_json(f'{{"metadata": {{"name": "{name}"}}}}')
    return bare.model_copy(update={"status": status})


def condition(type_: str, status: ConditionStatus, message: str) -> Condition:
    return Condition(type=type_, status=status, reason="Because", message=message)


HEALTHY: dict[str, Any] = {
    "store": StoreHealth(address="http://mac-1:2379", version="3.6.1", read_s=0.004),
    "versions": FleetVersions(
        client=ComponentVersion(part="fleetctl", version="0.1.0"),
        etcd=ComponentVersion(part="etcd", version="3.6.1"),
        reconciler=ComponentVersion(part="reconciler", name="mac-1/7", version="0.1.0"),
    ),
    "skew": (),
    "nodes": (node("mac-1"),),
    "ready": frozenset({"mac-1"}),
    "replicas": (),
    "objects": (),
    "admissions": (),
    "agents": (ProbeResult(label="node/mac-1", url="http://mac-1:4001", offset_s=-0.4),),
    "gateways": (ProbeResult(label="gateway/a", url="http://mac-1:4000", offset_s=0.1),),
    "engines": (),
}


def findings(**different: Any) -> list[Finding]:
    return run_checks(FleetObservation(**{**HEALTHY, **different}))


def test_a_healthy_fleet_has_only_ok_findings() -> None:
    assert format_findings(findings()) == (
        "OK    store     etcd 3.6.1 at http://mac-1:2379 answers in 4 ms\n"
        "OK    leader    reconciler mac-1/7 leads\n"
        "OK    versions  3 components have compatible versions\n"
        "OK    nodes     1 agent renews its lease\n"
        "OK    disk      1 disk has enough free space\n"
        "OK    memory    replicas need 0 B, and no node is overcommitted\n"
        "OK    agents    1 of 1 agents answer\n"
        "OK    clocks    2 clocks agree with this machine's\n"
        "OK    gateways  1 of 1 gateways answer\n"
        "\n"
        "9 OK, 0 WARN, 0 FAIL"
    )


@pytest.mark.parametrize(
    ("different", "line"),
    [
        pytest.param(
            {"store": StoreHealth(address="unix:/x", version="3.6.1", read_s=0.9)},
            "WARN store: etcd 3.6.1 at unix:/x took 900 ms to answer",
            id="slow-store",
        ),
        pytest.param(
            {"store": StoreHealth(address="unix:/x", version="3.6.1", read_s=0.1, write_error="no space")},
            "FAIL store: the store accepts no writes: no space",
            id="full-store",
        ),
        pytest.param(
            {"store": StoreHealth(address="unix:/x", version="3.6.1", read_s=0.1, is_restoring=True)},
            "WARN store: `fleetctl restore` is running, or was interrupted",
            id="restoring",
        ),
        pytest.param(
            {"versions": FleetVersions(client=HEALTHY["versions"].client, etcd=HEALTHY["versions"].etcd)},
            "FAIL leader: no reconciler leads: running models keep serving, but nothing is placed, replaced or scaled",
            id="no-leader",
        ),
        pytest.param(
            {"skew": ("gateway a is 0.1.0, reconciler is 0.3.0: upgrade gateway a",)},
            "WARN versions: gateway a is 0.1.0, reconciler is 0.3.0",
            id="skew",
        ),
        pytest.param(
            {"ready": frozenset()}, "FAIL nodes: node/mac-1: its agent does not renew its lease", id="lost"
        ),
        pytest.param({"nodes": ()}, "WARN nodes: there are no nodes, so no model can run", id="no-nodes"),
        pytest.param(
            {"nodes": (node("mac-1", condition("MemoryPressure", ConditionStatus.TRUE, "2 GB are left")),)},
            "WARN nodes: node/mac-1: MemoryPressure=True: 2 GB are left",
            id="pressure",
        ),
        pytest.param(
            {"nodes": (node("mac-1", condition("ApiServing", ConditionStatus.FALSE, "port 4001 is taken")),)},
            "WARN nodes: node/mac-1: ApiServing=False: port 4001 is taken",
            id="port-taken",
        ),
        pytest.param(
            {"nodes": (node("mac-1", free=2 * GIB),)},
            "WARN disk: node/mac-1: 2.0 GiB free of 1000.0 GiB",
            id="little-disk",
        ),
        pytest.param(
            {"disk": DiskSpace(path="/data", size_bytes=100 * GIB, free_bytes=2**20)},
            "FAIL disk: /data: 1.0 MiB free of 100.0 GiB",
            id="no-disk",
        ),
        pytest.param(
            {"agents": (ProbeResult(label="node/mac-1", url="", error="no answer"),)},
            "WARN agents: node/mac-1: no answer",
            id="agent-silent",
        ),
        pytest.param(
            {"agents": (ProbeResult(label="node/mac-1", url="x", holds_lease=False),)},
            "WARN agents: node/mac-1 answers, but has lost its lease",
            id="agent-lost",
        ),
        pytest.param(
            {"agents": (ProbeResult(label="node/mac-1", url="x", offset_s=7.2),)},
            "WARN clocks: node/mac-1: its clock is 7 s ahead of this machine's",
            id="clock-ahead",
        ),
        pytest.param(
            {"agents": (ProbeResult(label="node/mac-1", url="x", offset_s=-90.0),)},
            "FAIL clocks: node/mac-1: its clock is 90 s behind this machine's",
            id="clock-far-behind",
        ),
        pytest.param(
            {"gateways": ()}, "WARN gateways: no gateway is registered, so clients cannot reach the models", id="no-gateway"
        ),
        pytest.param(
            {"gateways": (ProbeResult(label="gateway/a", url="x", error="refused"),)},
            "FAIL gateways: gateway/a: refused",
            id="gateway-silent",
        ),
        pytest.param(
            {"engines": (ProbeResult(label="replica/q-0", url="x", error="no connection to x"),)},
            "WARN engines: replica/q-0: no connection to x",
            id="engine-silent",
        ),
    ],
)  # fmt: skip
def test_each_problem_has_one_finding_with_advice(different: dict[str, Any], line: str) -> None:
    bad = [one for one in findings(**different) if one.level != "OK"]
    assert [f"{one.level} {one.check}: {one.message}" for one in bad] == [line]
    assert bad[0].advice


def test_a_suspended_git_source_is_not_a_problem() -> None:
    def source(name: str, *, suspend: bool) -> GitSource:
        return GitSource.model_validate({
            "metadata": {"name": name}, "spec": {"repository": "https://git.example/x.git", "suspend": suspend}
        })  # fmt: skip

    several = findings(objects=(source("a", suspend=True), source("b", suspend=False)))
    messages = [(one.level, one.message) for one in several if one.check == "objects"]
    assert messages == [
        ("OK", "gitsource/a is suspended"),
        ("WARN", "gitsource/b is not Ready: the reconciler has not observed it yet"),
    ]


def test_the_tree_and_the_summary_count_findings() -> None:
    several = findings(gateways=())
    assert findings_tree(several)["ok"] is True
    assert findings_tree(findings(ready=frozenset()))["ok"] is False
    assert summary_line(several) == "8 OK, 1 WARN, 0 FAIL"
    assert count_level(several, "WARN") == 1


async def test_an_empty_store_fails(shared: Fleet) -> None:
    done = await fleetctl("doctor", "--etcd", str(shared.etcd.address), "-o", "json")
    assert done.code == 1, done.err
    tree = json.loads(done.out)
    assert tree["ok"] is False
    levels = {(one["check"], one["level"]) for one in tree["findings"]}
    assert levels >= {("store", "OK"), ("leader", "FAIL"), ("nodes", "WARN"), ("gateways", "WARN")}


async def test_no_store() -> None:
    done = await fleetctl("doctor", "--etcd", "http://127.0.0.1:1")
    assert (done.code, done.err) == (1, "")
    assert done.out.startswith("FAIL  store  etcd at http://127.0.0.1:1: ")
    assert done.out.endswith("\n0 OK, 0 WARN, 1 FAIL\n")
