"""Health checks of `fleetctl doctor`, with values."""

import inspect
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from fleetctl.doctor.report import format_findings, summary_line
from insight.doctor import checks
from insight.doctor.checks import FleetObservation, StoreHealth, run_checks
from insight.doctor.control_plane import (
    EtcdHealth,
    ForeignEndpoint,
    ProbeResult,
    UnobservedChange,
)
from insight.doctor.findings import Finding, count_level, findings_tree
from insight.doctor.lost_nodes import LostNode, PortState
from insight.version_skew import ComponentVersion, FleetVersions
from nodeagent.doctor import checks as machine_checks
from nodeagent.doctor.check import Check
from nodeagent.doctor.host_facts import HostFacts
from nodeagent.hardware.readings import DiskReading
from schemas.deployment import (
    ModelDeployment,
    ModelDeploymentSpec,
    ModelDeploymentStatus,
    ModelSource,
)
from schemas.gitsource import GitSource
from schemas.meta import Condition, ConditionStatus, ObjectMeta
from schemas.node import Node, NodeStatus
from schemas.pools import NodePool, NodePoolSpec, NodePoolStatus
from schemas.wire.health import StoreView
from tests.support.golden import matches_golden

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


FRESH = StoreView(staleness_s=2.4)
ETCD = EtcdHealth(has_users=False, size_bytes=12 * 2**20, quota_bytes=512 * 2**20)


def agents(**different: Any) -> dict[str, Any]:
    probe_result = ProbeResult(**{"label": "node/mac-1", "url": "x", "store": FRESH, **different})
    return {"agents": (probe_result,)}


def control(**different: Any) -> dict[str, Any]:
    return {"etcd": ETCD, "endpoints": 2, **different}


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
    "agents": (
        ProbeResult(label="node/mac-1", url="http://mac-1:4001", offset_s=-0.4, store=FRESH),
    ),
    "gateways": (
        ProbeResult(label="gateway/a", url="https://mac-1:4000", offset_s=0.1, store=FRESH),
    ),
    "engines": (),
    "etcd": ETCD,
    "endpoints": 2,
    "unobserved": (),
    "leader": "mac-1/7",
}


def findings(**different: Any) -> list[Finding]:
    return run_checks(FleetObservation(**{**HEALTHY, **different}))


def test_engines_on_sockets_of_other_machines_are_counted_and_not_blamed() -> None:
    here = ProbeResult(label="replica/q-0", url="unix:/s/a/4100.sock")
    there = ProbeResult(label="replica/q-1", url="unix:/s/b/4100.sock", is_elsewhere=True)
    found = [(f.level, f.message) for f in findings(engines=(here, there)) if f.check == "engines"]
    assert found == [
        ("OK", "1 of 1 engines answer"),
        ("OK", "1 engine listens on sockets of other machines: run doctor there to check"),
    ]


def test_the_fleets_doctor_says_it_of_the_lost_node() -> None:
    lost = LostNode(name="mac-2", host="10.0.0.2", ssh=PortState.OPEN, agent=PortState.CLOSED)
    found = findings(nodes=(node("mac-1"), node("mac-2")), lost=(lost,))
    [finding] = [f for f in found if f.check == "nodes" and f.level == "FAIL"]
    assert finding.message.startswith(
        "node/mac-2: its agent does not renew its lease, its Mac answers"
    )


@pytest.mark.parametrize(("is_silent", "is_firewall"), [(True, True), (False, False)])
def test_an_agent_that_lives_and_lets_connections_time_out_has_a_firewall(
    is_silent: bool, is_firewall: bool
) -> None:
    found = findings(**agents(error="no answer at x within 5 s", is_silent=is_silent))
    [finding] = [f for f in found if f.check == "agents"]
    assert ("a firewall on its Mac drops them" in finding.advice) is is_firewall


def test_a_healthy_fleet_has_only_ok_findings() -> None:
    assert format_findings(findings()) == (
        "OK    store        etcd 3.6.1 at http://mac-1:2379 answers in 4 ms\n"
        "OK    quota        12.0 MiB of etcd's 512 MiB are in use\n"
        "OK    leader       reconciler mac-1/7 leads\n"
        "OK    store reads  2 processes read the store; the oldest copy is 2 s old\n"
        "OK    versions     3 components have compatible versions\n"
        "OK    nodes        1 agent renews its lease\n"
        "OK    disk         1 place has enough free disk space\n"
        "OK    memory       replicas need 0 B, and no node is overcommitted\n"
        "OK    agents       1 of 1 agents answer\n"
        "OK    clocks       2 processes have this machine's time\n"
        "OK    gateways     1 of 1 gateways answer\n"
        "OK    endpoints    2 endpoints are on the node of the replica\n"
        "\n"
        "12 OK, 0 WARN, 0 FAIL"
    )


SITUATIONS: dict[str, dict[str, Any]] = {
    "slow-store": {"store": StoreHealth(address="unix:/x", version="3.6.1", read_s=0.9)},
    "full-store": {"store": StoreHealth(address="unix:/x", version="3.6.1", read_s=0.1, write_error="no space")},
    "restoring": {"store": StoreHealth(address="unix:/x", version="3.6.1", read_s=0.1, is_restoring=True)},
    "no-leader": {"leader": ""},
    "skew": {"skew": ("gateway a is 0.1.0, reconciler is 0.3.0: upgrade gateway a",)},
    "lost": {"ready": frozenset()},
    "no-nodes": {"nodes": ()},
    "pressure": {"nodes": (node("mac-1", condition("MemoryPressure", ConditionStatus.TRUE, "2 GB are left")),)},
    "clone": {"nodes": (node("mac-1", condition("DuplicateHardware", ConditionStatus.TRUE, "mac-2 is the same")),)},
    "needs-reboot": {"nodes": (node("mac-1", condition("NeedsReboot", ConditionStatus.TRUE, "24 GB stay wired")),)},
    "port-taken": {"nodes": (node("mac-1", condition("ApiServing", ConditionStatus.FALSE, "port 4001 is taken")),)},
    "no-metal": {"nodes": (node("mac-1", condition("MetalAvailable", ConditionStatus.FALSE, "no GPU")),)},
    "little-disk": {"nodes": (node("mac-1", free=2 * GIB),)},
    "no-disk": {"disk": DiskReading(path="/data", total_bytes=100 * GIB, free_bytes=2**20)},
    "full-state-disk": {"full_disks": {"dashboard/1f2e": "/state"}},
    "agent-silent": {"agents": (ProbeResult(label="node/mac-1", url="", error="no answer"),)},
    "agent-lost": agents(holds_lease=False),
    "clock-ahead": agents(offset_s=7.2),
    "clock-far-behind": agents(offset_s=-90.0),
    "no-gateway": {"gateways": ()},
    "plain-http": {"gateways": (ProbeResult(label="gateway/a", url="http://mac-1:4000", store=FRESH),)},
    "gateway-silent": {"gateways": (ProbeResult(label="gateway/a", url="x", error="refused"),)},
    "engine-silent": {"engines": (ProbeResult(label="replica/q-0", url="x", error="no connection to x"),)},
    "locked-out": agents(store=StoreView(staleness_s=3.0, refusal="user name is empty")),
    "never-read-the-store": agents(store=StoreView(staleness_s=None)),
    "old-view": agents(store=StoreView(staleness_s=31.0)),
    "frozen-view": agents(store=StoreView(staleness_s=240.0)),
    "view-unknown-is-not-ok": agents(store=None),
    "frozen-reconciler": control(unobserved=( UnobservedChange(label="modeldeployment/q", generation=2, observed_generation=1, age_s=226.0), )),
    "foreign-endpoint": control(foreign_endpoints=(ForeignEndpoint(replica="chat-0", node="mac-2", reason="it is of mac-1"),)),
    "open-etcd": control(etcd=replace(ETCD, exposed=("http://10.0.0.5:2379",))),
    "users-unknown-is-not-ok": control(etcd=replace(ETCD, exposed=("http://10.0.0.5:2379",), has_users=None)),
    "nearly-full": control(etcd=replace(ETCD, size_bytes=450 * 2**20, largest_prefix="event/Node/mac-2/", largest_bytes=400 * 2**20)),
    "full": control(etcd=replace(ETCD, quota_bytes=None, is_full=True)),
    "size-unknown-is-not-ok": control(etcd=EtcdHealth(error="no answer")),
    "quota-unknown-is-not-ok": control(etcd=replace(ETCD, quota_bytes=None)),
}  # fmt: skip


def test_each_problem_has_one_finding_with_advice(request: pytest.FixtureRequest) -> None:
    texts = []
    for name, different in SITUATIONS.items():
        bad = [finding for finding in findings(**different) if finding.level != "OK"]
        assert len(bad) == 1, name
        assert bad[0].advice
        texts.append(f"## {name}\n{format_findings(bad)}\n")
    matches_golden(request, "worlds/doctor_findings", "\n".join(texts))


def test_the_remedy_of_a_node_that_needs_a_restart_has_its_name() -> None:
    waiting = condition("NeedsReboot", ConditionStatus.TRUE, "24 GB stay wired")
    (one,) = (
        finding for finding in findings(nodes=(node("mac-1", waiting),)) if finding.level == "WARN"
    )
    assert one.advice == "`fleetctl node reboot mac-1 --drain`"


def test_plain_http_on_loopback_is_no_problem() -> None:
    local = ProbeResult(label="gateway/a", url="http://127.0.0.1:4000", store=FRESH)
    assert {finding.level for finding in findings(gateways=(local,))} == {"OK"}


def test_an_object_with_an_unobserved_change_is_not_healthy() -> None:
    ready = condition("Ready", ConditionStatus.TRUE, "3 of 3 nodes ready")
    pool = NodePool(
        metadata=ObjectMeta(name="desk", generation=2),
        spec=NodePoolSpec(nodes=("mac-1",)),
        status=NodePoolStatus(observed_generation=1, conditions=(ready,)),
    )
    (found,) = [finding for finding in findings(objects=(pool,)) if finding.check == "objects"]
    assert (found.level, found.message) == (
        "WARN",
        "nodepool/desk is not Ready: the reconciler has not observed its latest change yet",
    )


def deployed(reason: str, message: str, truth: ConditionStatus) -> ModelDeployment:
    """Return a deployment that is available, with this condition Progressing."""
    available = condition("Available", ConditionStatus.TRUE, "2 of 2 replicas ready")
    progressing = Condition(type="Progressing", status=truth, reason=reason, message=message)
    return ModelDeployment(
        metadata=ObjectMeta(name="q", generation=1),
        spec=ModelDeploymentSpec(model=ModelSource(path="small")),
        status=ModelDeploymentStatus(observed_generation=1, conditions=(available, progressing)),
    )


@pytest.mark.parametrize(
    ("reason", "message", "words"),
    [
        ("CanaryFailed", "aborted by a user; replicas run revision 1 again", "was rolled back"),
        ("Stalled", "no progress for 10m", "has a stalled rollout"),
    ],
)
def test_a_failed_rollout_is_told_though_replicas_serve(
    reason: str, message: str, words: str
) -> None:
    failed = deployed(reason, message, ConditionStatus.FALSE)
    fine, bad = [finding for finding in findings(objects=(failed,)) if finding.check == "objects"]
    assert (fine.level, fine.message) == ("OK", "1 of 1 ModelDeployments are Available")
    assert (bad.level, bad.message) == ("WARN", f"modeldeployment/q {words} ({reason}): {message}")
    assert "`fleetctl rollout undo q --to-revision N`" in bad.advice


def test_no_object_is_ok_while_no_reconciler_leads() -> None:
    complete = deployed("RolloutComplete", "all run revision 1", ConditionStatus.TRUE)
    (found,) = [
        finding
        for finding in findings(objects=(complete,), leader="")
        if finding.check == "objects"
    ]
    assert (found.level, found.message) == (
        "WARN",
        "1 of 1 ModelDeployments are Available as last observed: no reconciler leads, so this may be out of date",
    )


def test_a_suspended_git_source_is_told() -> None:
    def source(name: str, *, suspend: bool) -> GitSource:
        return GitSource.model_validate({
            "metadata": {"name": name}, "spec": {"repository": "https://git.example/x.git", "suspend": suspend}
        })  # fmt: skip

    several = findings(objects=(source("a", suspend=True), source("b", suspend=False)))
    messages = [
        (finding.level, finding.message) for finding in several if finding.check == "objects"
    ]
    assert messages == [
        ("WARN", "gitsource/a is suspended: commits are not applied"),
        ("WARN", "gitsource/b is not Ready: the reconciler has not observed it yet"),
    ]


def test_the_tree_and_the_summary_count_findings() -> None:
    several = findings(gateways=())
    assert findings_tree(several)["ok"] is True
    assert findings_tree(findings(ready=frozenset()))["ok"] is False
    assert summary_line(several) == "11 OK, 1 WARN, 0 FAIL"
    assert count_level(several, "WARN") == 1


def test_a_mac_whose_gpu_works_has_no_problem() -> None:
    works = node("mac-1", condition("MetalAvailable", ConditionStatus.TRUE, "MLX computes on M4"))
    assert {finding.level for finding in findings(nodes=(works,))} == {"OK"}


def test_where_since_when_and_the_fix_of_a_finding_are_shown() -> None:
    began = datetime(2026, 11, 22, 8, tzinfo=UTC)
    found = [
        Finding(check="sleep", level="WARN", message="may sleep", advice="sudo pmset -c sleep 0",
                node="mac-1", since=began, fix="power"),
        Finding(check="clock", level="UNKNOWN", message="nobody knows"),
    ]  # fmt: skip
    assert format_findings(found) == (
        "WARN     sleep  node/mac-1: may sleep (since 2026-11-22 08:00+00:00)\n"
        "                sudo pmset -c sleep 0\n"
        "UNKNOWN  clock  nobody knows\n"
        "\n"
        "0 OK, 1 WARN, 0 FAIL, 1 UNKNOWN"
    )
    tree = findings_tree(found)
    assert tree["ok"] is True
    assert tree["findings"][0] == {
        "check": "sleep", "level": "WARN", "message": "may sleep", "advice": "sudo pmset -c sleep 0",
        "node": "mac-1", "since": "2026-11-22T08:00:00+00:00", "fix": "power",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("check", "facts"),
    [
        *((one, FleetObservation) for one in checks.CHECKS),
        *((one, HostFacts) for one in machine_checks.CHECKS),
    ],
    ids=lambda value: value.name if isinstance(value, Check) else "",
)
def test_a_check_gets_the_facts_that_it_names(check: Check, facts: type) -> None:
    named = (*check.needs, *check.uses)
    assert named == tuple(inspect.signature(check.run).parameters)
    assert set(named) <= set(dir(facts))


def test_a_check_without_its_facts_is_left_out_and_the_others_remain() -> None:
    stored = ("nodes", "ready", "replicas", "objects", "admissions", "leader")
    found = run_checks(FleetObservation(**{name: HEALTHY[name] for name in stored}))
    assert [(finding.check, finding.level) for finding in found] == [
        ("nodes", "OK"), ("disk", "OK"), ("memory", "OK"),
    ]  # fmt: skip
