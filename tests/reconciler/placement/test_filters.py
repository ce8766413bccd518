"""Every reason against a node, with the words that people read."""

from dataclasses import replace

import pytest

from reconciler.explain import explain_nodes
from reconciler.placement import filters
from reconciler.placement.inputs import PlacementRequest, request_for
from reconciler.placement.memory_proof import prove
from reconciler.placement.refusals import Unschedulable, summary_line
from reconciler.placer import Assignment, place_replica
from reconciler.views import NodeHold, NodeView
from schemas.node import ModelReport, Taint
from schemas.placement import Placement, Toleration
from tests.support.fleets import GEOMETRY, GIB, deployment, node


def want(**placement: object) -> PlacementRequest:
    return request_for(deployment(placement=Placement.model_validate(placement)))


def knows(**changes: object) -> dict[str, ModelReport]:
    geometry = GEOMETRY.model_copy(update=changes)
    return {"qwen": ModelReport(path="qwen", geometry=geometry)}


ANYWHERE = want()
A = node("a")
GPU = Taint(key="gpu", value="x", effect="NoSchedule")
NEED = "needs 2.8 GiB (weights 2.0 GiB, KV cache 32.0 MiB for 1 x 1024 tokens, activations 62.5 MiB"
BROKEN = ModelReport(path="qwen", reason="ModelNotFound", message="/models/qwen is not a directory")

# Want, node, reason, what the node says, what the line says.
REFUSALS = [
    pytest.param(
        ANYWHERE,
        replace(A, is_ready=False),
        "NodeNotReady",
        "its agent does not renew its lease",
        "1 NotReady",
        id="away",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, is_cordoned=True),
        "NodeCordoned",
        "it is cordoned (spec.unschedulable)",
        "1 cordoned",
        id="cordoned",
    ),
    pytest.param(
        want(pools=("lab", "desk")),
        A,
        "NotInPool",
        "it is in none of the pools lab, desk",
        "1 in none of the pools lab, desk",
        id="in-no-such-pool",
    ),
    pytest.param(
        want(node_selector={"rack": "1", "room": "x"}),
        replace(A, labels={"room": "x"}),
        "SelectorMismatch",
        "it lacks the label rack=1",
        "1 not selected (it lacks the label rack=1)",
        id="selector-names-what-lacks",
    ),
    pytest.param(
        want(chips=("Apple M4 Pro", "Apple M4 Max")),
        replace(A, chip="Apple M1"),
        "ChipMismatch",
        "its chip is Apple M1, spec.placement.chips asks for Apple M4 Pro or Apple M4 Max",
        "1 with another chip (its chip is Apple M1, spec.placement.chips asks for Apple M4 Pro "
        "or Apple M4 Max)",
        id="chip",
    ),
    pytest.param(
        want(min_gpu_cores=30),
        replace(A, gpu_cores=20),
        "TooFewGpuCores",
        "it has 20 GPU cores, spec.placement.minGpuCores is 30",
        "1 short of GPU cores (need 30, best has 20)",
        id="gpu-cores",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, reserved_by_group="pair"),
        "ReservedForGroup",
        "it is reserved for the ShardGroup pair",
        "1 reserved for a ShardGroup",
        id="exclusive-group",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, taints=(GPU, Taint(key="soft", effect="PreferNoSchedule"))),
        "NodeTainted",
        "it has the taint gpu=x:NoSchedule, which spec.placement.tolerations does not name",
        "1 tainted (it has the taint gpu=x:NoSchedule, which spec.placement.tolerations does not "
        "name)",
        id="tainted",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, models={}),
        "ModelNotInspected",
        "its agent has not looked at the model yet",
        "1 yet to look at the model",
        id="not-looked-at",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, models={"qwen": BROKEN}),
        "ModelNotFound",
        "/models/qwen is not a directory",
        "1 ModelNotFound (/models/qwen is not a directory)",
        id="the-agents-own-words",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, models=knows(unknown="no rule says what the cache of a new model needs")),
        "ModelNotUnderstood",
        "what the model needs is not known: no rule says what the cache of a new model needs. "
        "Set spec.resources.memory to what one replica takes",
        "1 ModelNotUnderstood (what the model needs is not known: no rule says what the cache of "
        "a new model needs. Set spec.resources.memory to what one replica takes)",
        id="not-understood",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, models=knows(max_context=512)),
        "ContextTooLong",
        "spec.contextLength is 1024, the model was made for 512 tokens at most",
        "1 with a model made for less (need 1024 tokens, best has 512)",
        id="context",
    ),
    pytest.param(
        replace(ANYWHERE, apart_from=frozenset({"llama", "phi", "away"})),
        replace(A, replicas={"phi": 1, "llama": 2, "else": 1}),
        "AntiAffinity",
        "it runs llama, phi, and spec.placement.antiAffinity keeps them apart",
        "1 with replicas to keep apart from",
        id="anti-affinity",
    ),
    pytest.param(
        want(max_replicas_per_node=2),
        replace(A, replicas={"qwen": 2}),
        "ReplicaLimit",
        "it has 2 replicas of this deployment, spec.placement.maxReplicasPerNode is 2",
        "1 full up (maxReplicasPerNode is 2)",
        id="replicas-per-node",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, allocatable_bytes=3 * GIB, used_bytes=GIB),
        "InsufficientMemory",
        f"{NEED}, process 768 MiB), has 2.0 GiB free of 3.0 GiB",
        "1 short of memory (need 2.8 GiB, best has 2.0)",
        id="memory",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, allocatable_bytes=GIB, used_bytes=2 * GIB, reserved_bytes=GIB),
        "InsufficientMemory",
        f"{NEED}, process 768 MiB), has 0 B free of 1.0 GiB (its pools reserve 1.0 GiB)",
        "1 short of memory (need 2.8 GiB, best has 0 B)",
        id="less-than-no-memory",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, promised_bytes=7 * GIB),
        "InsufficientMemory",
        f"{NEED}, process 768 MiB), has 1.0 GiB free of 8.0 GiB (7.0 GiB are kept for a higher "
        "priority)",
        "1 short of memory (need 2.8 GiB, best has 1.0)",
        id="promised-memory",
    ),
    pytest.param(
        request_for(deployment(memory="9Gi")),
        A,
        "InsufficientMemory",
        "needs 9.0 GiB (spec.resources.memory says so), has 8.0 GiB free of 8.0 GiB",
        "1 short of memory (need 9.0 GiB, best has 8.0)",
        id="a-person-says-more",
    ),
]


@pytest.mark.parametrize(("wanted", "there", "reason", "message", "line"), REFUSALS)
def test_refusals(
    wanted: PlacementRequest, there: NodeView, reason: str, message: str, line: str
) -> None:
    rejected = filters.find_rejection(wanted, there)
    assert rejected is not None
    assert (rejected.reason, rejected.message) == (reason, message)
    verdict = place_replica(wanted, [there])
    assert isinstance(verdict, Unschedulable)
    assert verdict.refusals == (("a", rejected),)
    assert summary_line(verdict) == f"0/1 nodes fit: {line}"


@pytest.mark.parametrize(
    ("wanted", "there"),
    [
        (ANYWHERE, A),
        (want(pools=("lab", "desk")), replace(A, pools=frozenset({"desk", "other"}))),
        (want(node_selector={"rack": "1"}), replace(A, labels={"rack": "1", "more": "y"})),
        (want(chips=("Apple M1",)), replace(A, chip="Apple M1")),
        (want(min_gpu_cores=30), replace(A, gpu_cores=30)),
        (want(max_replicas_per_node=2), replace(A, replicas={"qwen": 1})),
        (replace(ANYWHERE, apart_from=frozenset({"llama"})), replace(A, replicas={"phi": 1})),
        (ANYWHERE, replace(A, models=knows(max_context=None))),
        (
            request_for(deployment(memory="4Gi")),
            replace(A, models=knows(unknown="what is it")),
        ),
    ],
)
def test_fits(wanted: PlacementRequest, there: NodeView) -> None:
    assert filters.find_rejection(wanted, there) is None
    assert isinstance(place_replica(wanted, [there]), Assignment)


@pytest.mark.parametrize(
    ("toleration", "is_tolerated"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"key": "gpu", "value": "x"}, True),
        ({"key": "gpu", "value": "x", "effect": "NoSchedule"}, True),
        ({"key": "gpu", "value": "x", "effect": "NoExecute"}, False),
        ({"key": "gpu", "value": "y"}, False),
        ({"key": "gpu"}, False),
        ({"key": "cpu", "operator": "Exists"}, False),
    ],
)
def test_tolerations_are_those_of_kubernetes(
    toleration: dict[str, str], *, is_tolerated: bool
) -> None:
    wanted = want(tolerations=(Toleration.model_validate(toleration),))
    rejected = filters.find_rejection(wanted, replace(A, taints=(GPU,)))
    assert (rejected is None) is is_tolerated


def test_a_byte_decides() -> None:
    need = prove(GEOMETRY, context_length=1024, concurrency=1).total_bytes
    assert filters.find_rejection(ANYWHERE, replace(A, allocatable_bytes=need)) is None
    rejected = filters.find_rejection(ANYWHERE, replace(A, allocatable_bytes=need - 1))
    assert rejected is not None
    assert (rejected.reason, rejected.need, rejected.have) == ("InsufficientMemory", need, need - 1)


def test_what_is_wrong_is_said_in_order() -> None:
    """Cure one reason after the other: each time the next one is named, and none comes back."""
    wanted = replace(
        want(
            pools=("lab",), node_selector={"rack": "1"}, chips=("M",), min_gpu_cores=1,
            max_replicas_per_node=1,
        ),
        apart_from=frozenset({"llama"}),
    )  # fmt: skip
    there = NodeView(
        name="a", is_ready=False, is_cordoned=True, reserved_by_group="pair", taints=(GPU,),
        replicas={"llama": 1, "qwen": 1}, holds=(NodeHold(reason="NeedsReboot", message="it waits"),),
    )  # fmt: skip
    cures: list[tuple[str, dict[str, object]]] = [
        ("NodeNotReady", {"is_ready": True}),
        ("NeedsReboot", {"holds": ()}),
        ("NodeCordoned", {"is_cordoned": False}),
        ("NotInPool", {"pools": frozenset({"lab"})}),
        ("SelectorMismatch", {"labels": {"rack": "1"}}),
        ("ChipMismatch", {"chip": "M"}),
        ("TooFewGpuCores", {"gpu_cores": 1}),
        ("ReservedForGroup", {"reserved_by_group": ""}),
        ("NodeTainted", {"taints": ()}),
        ("ModelNotInspected", {"models": knows(max_context=512, unknown="it")}),
        ("ModelNotUnderstood", {"models": knows(max_context=512)}),
        ("ContextTooLong", {"models": knows()}),
        ("AntiAffinity", {"replicas": {"qwen": 1}}),
        ("ReplicaLimit", {"replicas": {}}),
        ("InsufficientMemory", {"allocatable_bytes": 4 * GIB}),
    ]
    for reason, cure in cures:
        rejected = filters.find_rejection(wanted, there)
        assert rejected is not None
        assert rejected.reason == reason
        there = replace(there, **cure)  # type: ignore[arg-type]  # the table above has the types
    assert filters.find_rejection(wanted, there) is None


def test_a_line_for_people() -> None:
    small = [node("a", memory_gib=1), node("b", memory_gib=2), node("c", memory_gib=0.5)]
    others = [replace(node("d"), is_cordoned=True), replace(node("e"), is_ready=False)]
    verdict = place_replica(ANYWHERE, [*small, *others])
    assert isinstance(verdict, Unschedulable)
    assert summary_line(verdict) == (
        "0/5 nodes fit: 3 short of memory (need 2.8 GiB, best has 2.0), 1 cordoned, 1 NotReady"
    )


def test_where_messages_differ_one_speaks_for_all() -> None:
    wanted = want(node_selector={"rack": "1", "room": "x"})
    verdict = place_replica(wanted, [replace(node("a"), labels={"rack": "1"}), node("b")])
    assert isinstance(verdict, Unschedulable)
    line = "0/2 nodes fit: 2 not selected (it lacks the label rack=1, room=x)"
    assert summary_line(verdict) == line


def test_an_empty_fleet_is_explained() -> None:
    verdict = place_replica(ANYWHERE, [])
    assert isinstance(verdict, Unschedulable)
    line = "no node has joined the fleet yet; start fleet-nodeagent on a Mac"
    assert summary_line(verdict) == line
    assert explain_nodes(ANYWHERE, []) == ()


def test_a_thousand_refusals_say_no_more_than_twenty() -> None:
    verdict = place_replica(ANYWHERE, [node(f"n{at:04}", is_ready=False) for at in range(1000)])
    assert isinstance(verdict, Unschedulable)
    assert [name for name, _ in verdict.refusals] == [f"n{at:04}" for at in range(20)]
    assert summary_line(verdict) == "0/1000 nodes fit: 1000 NotReady"
