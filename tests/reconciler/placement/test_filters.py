"""Every reason against a node with its message: the node's own state, its folders, and the deployment's options."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from models.catalogue import catalogue
from reconciler.deployments.explain import explain_nodes
from reconciler.deployments.model_fit import with_facts
from reconciler.deployments.placer import Assignment, place_replica
from reconciler.placement import memory_proof
from reconciler.placement.filters import find_rejection
from reconciler.placement.inputs import NodeView, PlacementRequest, Rejection, request_for
from reconciler.placement.memory_proof import prove
from reconciler.placement.refusals import summary_line
from reconciler.placement.table import NodeTable
from schemas.deployment import DraftModel, ModelDeploymentSpec, ModelSource, NamedAdapter
from schemas.guesses import MtpGuesses
from schemas.kv_cache import KvCache
from schemas.node import AdapterReport, LayerGroup, ModelReport, Taint
from schemas.placement import Placement
from tests.support.golden_cases import Golden
from tests.support.reconciler_world import unplaced
from tests.support.values import present
from tests.support.world import GEOMETRY, GIB, deployment, node


def make_request(**placement: object) -> PlacementRequest:
    return request_for(deployment(placement=Placement.model_validate(placement)))


def knows(**changes: object) -> dict[str, ModelReport]:
    geometry = GEOMETRY.model_copy(update=changes)
    return {"qwen": ModelReport(path="qwen", geometry=geometry)}


ANYWHERE = make_request()
A = node("a")
GPU = Taint(key="gpu", value="x", effect="NoSchedule")
SOFT = Taint(key="soft", effect="PreferNoSchedule")
BROKEN = ModelReport(path="qwen", reason="ModelNotFound", message="/models/qwen is not a directory")


def held(reason: str, message: str = "so it is", **amounts: int) -> dict[str, Any]:
    later = Rejection(reason="NotTheFirst", message="and no more")
    return {"holds": (Rejection(reason=reason, message=message, **amounts), later)}


HOLDS = (
    *("NodeDraining", "NodeWithheld", "DuplicateHardware", "VersionSkew", "NodeFlapping", "MemoryPressure"),
    *("DiskPressure", "ThermalPressure", "NeedsReboot"),
)  # fmt: skip
# Each case: the request, and what differs in the node.
REFUSALS: dict[str, tuple[PlacementRequest, dict[str, Any]]] = {
    "away": (ANYWHERE, {"is_ready": False}),
    "cordoned": (ANYWHERE, {"is_cordoned": True}),
    "in no such pool": (make_request(pools=("lab", "desk")), {}),
    "a label is missing": (make_request(node_selector={"rack": "1", "room": "x"}), {"labels": {"room": "x"}}),
    "another chip": (make_request(chips=("Apple M4 Pro", "Apple M4 Max")), {"chip": "Apple M1"}),
    "few GPU cores": (make_request(min_gpu_cores=30), {"gpu_cores": 20}),
    "an exclusive group": (ANYWHERE, {"reserved_by_group": "pair"}),
    "tainted": (ANYWHERE, {"taints": (GPU, SOFT)}),
    "not inspected": (ANYWHERE, {"models": {}}),
    "the message of the agent": (ANYWHERE, {"models": {"qwen": BROKEN}}),
    "not understood": (ANYWHERE, {"models": knows(unknown="no rule says what the cache of a new model needs")}),
    "a long context": (ANYWHERE, {"models": knows(max_context=512)}),
    "anti-affinity": (
        replace(ANYWHERE, apart_from=frozenset({"llama", "phi", "away"})), {"replicas": {"phi": 1, "llama": 2, "else": 1}},
    ),
    "one replica a node": (make_request(max_replicas_per_node=1), {"replicas": {"qwen": 1}}),
    "two replicas a node": (make_request(max_replicas_per_node=2), {"replicas": {"qwen": 2}}),
    "memory": (ANYWHERE, {"allocatable_bytes": 3 * GIB, "used_bytes": GIB}),
    "less than no memory": (ANYWHERE, {"allocatable_bytes": GIB, "used_bytes": 2 * GIB, "reserved_bytes": GIB}),
    "promised memory": (ANYWHERE, {"promised_bytes": 7 * GIB}),
    "a person says more": (request_for(deployment(memory="9Gi")), {}),
    **{f"hold {reason}": (ANYWHERE, held(reason)) for reason in HOLDS},
}  # fmt: skip


def refusal(wanted: PlacementRequest, there: NodeView) -> list[str]:
    """Return reason and message of the node, and the summary line."""
    rejected = find_rejection(wanted, there)
    assert rejected is not None
    verdict = unplaced(wanted, there)
    assert verdict.refusals == (("a", rejected),)
    return [f"{rejected.reason}: {rejected.message}", summary_line(verdict)]


def test_refusals(golden: Golden) -> None:
    nodes = [
        (case, refusal(wanted, replace(A, **changes)))
        for case, (wanted, changes) in REFUSALS.items()
    ]
    models = [(case, refusal(wanted, there)) for case, (wanted, there) in MODEL_REFUSALS.items()]
    lines = [(case, summary(wanted, *nodes)) for case, (wanted, nodes) in LINES.items()]
    sections = {"Nodes": nodes, "Models, drafts, adapters": models, "Several nodes": lines}
    golden.check("reconciler/placement_refusals.txt", sections)
    for wanted, there in MODEL_REFUSALS.values():
        assert not NodeTable([there]).evaluate(wanted).passes[0]


@pytest.mark.parametrize(
    ("wanted", "changes"),
    [
        (make_request(pools=("lab", "desk")), {"pools": frozenset({"desk", "other"})}),
        (make_request(node_selector={"rack": "1"}), {"labels": {"rack": "1", "more": "y"}}),
        (make_request(chips=("Apple M1",)), {"chip": "Apple M1"}),
        (make_request(min_gpu_cores=30), {"gpu_cores": 30}),
        (make_request(max_replicas_per_node=2), {"replicas": {"qwen": 1}}),
        (replace(ANYWHERE, apart_from=frozenset({"llama"})), {"replicas": {"phi": 1}}),
        (ANYWHERE, {"models": knows(max_context=None)}),
        (ANYWHERE, {"leave_reason": "draining: fleetctl drain"}),
        (request_for(deployment(memory="4Gi")), {"models": knows(unknown="what is it")}),
        (request_for(deployment(memory="3Gi", kv_cache=KvCache(bits=8))), {"models": knows(unknown="what is it")}),
    ],
)  # fmt: skip
def test_fits(wanted: PlacementRequest, changes: dict[str, Any]) -> None:
    assert find_rejection(wanted, replace(A, **changes)) is None
    assert isinstance(place_replica(wanted, [replace(A, **changes)]), Assignment)


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
    toleration: dict[str, str], is_tolerated: bool
) -> None:
    rejected = find_rejection(make_request(tolerations=(toleration,)), replace(A, taints=(GPU,)))
    assert (rejected is None) is is_tolerated


def test_a_byte_decides() -> None:
    need = prove(GEOMETRY, context_length=1024, concurrency=1).total_bytes
    assert find_rejection(ANYWHERE, replace(A, allocatable_bytes=need)) is None
    rejected = find_rejection(ANYWHERE, replace(A, allocatable_bytes=need - 1))
    assert rejected is not None
    assert (rejected.reason, rejected.need, rejected.have) == ("InsufficientMemory", need, need - 1)


def test_the_first_failing_check_is_reported() -> None:
    """Cure one reason after the other: each time the next one is named, and none comes back."""
    wanted = replace(
        make_request(
            pools=("lab",), node_selector={"rack": "1"}, chips=("M",), min_gpu_cores=1,
            max_replicas_per_node=1,
        ),
        apart_from=frozenset({"llama"}),
    )  # fmt: skip
    there = NodeView(
        name="a", is_ready=False, is_cordoned=True, reserved_by_group="pair", taints=(GPU,),
        replicas={"llama": 1, "qwen": 1}, holds=(Rejection(reason="NeedsReboot", message="it waits"),),
    )  # fmt: skip
    cures: list[tuple[str, dict[str, Any]]] = [
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
        rejected = find_rejection(wanted, there)
        assert rejected is not None
        assert rejected.reason == reason
        there = replace(there, **cure)
    assert find_rejection(wanted, there) is None


SMALL_NODES = (node("a", memory_gib=1), node("b", memory_gib=2), node("c", memory_gib=0.5))
CLONE = "node mac-1 is the same machine (hardware UUID 1). If this one is a clone, start it anew"
DISKS = [
    node(name, **held("InsufficientDisk", need=50 * GIB, have=have * GIB))
    for name, have in (("a", 10), ("b", 40), ("c", 20))
]
LINES: dict[str, tuple[PlacementRequest, Sequence[NodeView]]] = {
    "reasons are counted": (ANYWHERE, (*SMALL_NODES, node("d", is_cordoned=True), node("e", is_ready=False))),
    "full at the moment": (ANYWHERE, (*SMALL_NODES, node("f", used_bytes=7 * GIB))),
    "one message stands for all": (
        make_request(node_selector={"rack": "1", "room": "x"}), (node("a", labels={"rack": "1"}), node("b")),
    ),
    "remedies are left to the nodes": (ANYWHERE, [node("a", **held("DuplicateHardware", CLONE))]),
    "the most disk": (ANYWHERE, [*DISKS, node("d", is_cordoned=True)]),
    "no nodes": (ANYWHERE, ()),
}  # fmt: skip


def summary(wanted: PlacementRequest, *nodes: NodeView) -> list[str]:
    assert len(explain_nodes(wanted, nodes)) == len(nodes)
    return [summary_line(unplaced(wanted, *nodes))]


def test_a_thousand_refusals_list_no_more_than_twenty_nodes() -> None:
    verdict = unplaced(ANYWHERE, *(node(f"n{at:04}", is_ready=False) for at in range(1000)))
    assert [name for name, _ in verdict.refusals] == [f"n{at:04}" for at in range(20)]
    assert summary_line(verdict) == "0/1000 nodes fit: 1000 NotReady"


SMALL = GEOMETRY.model_copy(update={"weights_bytes": GIB // 2, "layers": 4})
LAW = AdapterReport(path="law", weights_bytes=GIB // 4)
FULL = LayerGroup(kind="Full", count=16, kv_heads=8, head_dim=64, value_dim=64)
LATENT = LayerGroup(kind="Latent", count=4, latent_dim=576)
STATE = LayerGroup(kind="State", count=4, state_bytes=1000)
MISSING_DRAFT = ModelReport(path="small", reason="ModelNotFound", message="/m/small is not a directory")  # fmt: skip
TORN = AdapterReport(path="law", reason="AdapterUnusable", message="adapter: it is torn")


def model_request(source: ModelSource | None = None, **changes: Any) -> PlacementRequest:
    return request_for(deployment(model=source or ModelSource(path="qwen"), **changes))


def drafted(tokens: int = 3) -> ModelSource:
    return ModelSource(path="qwen", draft=DraftModel(path="small", tokens=tokens))


ADAPTED = ModelSource(path="qwen", adapter="law")
BOTH = ModelSource(path="qwen", adapter="law", draft=DraftModel(path="small"))
WHOLE = replace(
    A, models={**A.models, "small": ModelReport(path="small", geometry=SMALL)}, adapters={"law": LAW}
)  # fmt: skip


def of_shape(*groups: LayerGroup, **changes: Any) -> NodeView:
    return replace(WHOLE, models={**WHOLE.models, **knows(groups=groups, **changes)})


def with_draft(report: ModelReport | None = None, **changes: Any) -> NodeView:
    made = ModelReport(path="small", geometry=SMALL.model_copy(update=changes))
    return replace(WHOLE, models={**WHOLE.models, "small": report or made})


OF_80 = FULL.model_copy(update={"head_dim": 80, "value_dim": 80})
MODEL_REFUSALS: dict[str, tuple[PlacementRequest, NodeView]] = {
    "draft not inspected": (model_request(drafted()), A),
    "adapter not inspected": (model_request(ADAPTED), A),
    "draft not there": (model_request(drafted()), with_draft(MISSING_DRAFT)),
    "adapter broken": (model_request(ADAPTED), replace(WHOLE, adapters={"law": TORN})),
    "draft not understood": (model_request(drafted()), with_draft(unknown="a new thing")),
    "draft too short": (model_request(drafted()), with_draft(max_context=512)),
    "no head": (model_request(ModelSource(path="qwen", mtp=MtpGuesses())), of_shape(FULL, has_mtp_head=False)),
    "bits of latent vectors": (model_request(kv_cache=KvCache(bits=4)), of_shape(LATENT)),
    "a window over states": (model_request(kv_cache=KvCache(window=64)), of_shape(STATE)),
    "heads of 80": (model_request(kv_cache=KvCache(bits=8)), of_shape(OF_80)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "node_name"),
    [
        (model_request(drafted()), "a"),
        (model_request(ADAPTED), "a"),
        (model_request(BOTH), "a"),
        (model_request(kv_cache=KvCache(bits=8)), "a"),
        (model_request(kv_cache=KvCache(window=64)), "a"),
    ],
)
def test_complete_folders_are_accepted(wanted: PlacementRequest, node_name: str) -> None:
    """The other node has neither the draft nor the adapter."""
    placed = place_replica(wanted, [node("b"), replace(WHOLE, allocatable_bytes=16 * GIB)])
    assert isinstance(placed, Assignment)
    assert (placed.node, placed.memory) == (node_name, memory_proof.proof_of(wanted, WHOLE))


def test_all_parts_of_a_need_are_named() -> None:
    wanted = model_request(BOTH, kv_cache=KvCache(bits=8, prefix_bytes="1Gi"))
    memory = memory_proof.proof_of(wanted, WHOLE)
    assert (memory.prefix_cache_bytes, memory.adapter_bytes) == (GIB, GIB // 4)
    rejected = find_rejection(wanted, replace(WHOLE, allocatable_bytes=GIB))
    assert rejected is not None
    assert rejected.message == (
        "needs 4.7 GiB (weights 2.0 GiB, KV cache 21.2 MiB for 1 x 1024 tokens in 8 bits, activations 62.5 MiB, "
        "process 768 MiB, prefix cache 1.0 GiB, adapter 256 MiB, draft model 584 MiB), "
        "has 1.0 GiB free of 1.0 GiB"
    )


TWO = {"law": LAW, "poems": AdapterReport(path="poems", weights_bytes=7)}
NAMED = ModelSource(
    path="qwen", adapters=tuple(NamedAdapter(name=f"n-{path}", path=path) for path in TWO)
)


def test_all_adapters_count_once_and_must_be_there() -> None:
    proof = memory_proof.proof_of(model_request(NAMED), replace(WHOLE, adapters=TWO))
    assert proof.adapter_bytes == LAW.weights_bytes + 7
    missing = find_rejection(model_request(NAMED), WHOLE)
    assert missing is not None
    assert missing.message == "its agent has not inspected the adapter yet"
    assert NodeTable([WHOLE]).awaits_reports(NAMED)


def test_a_table_distinguishes_requests_that_differ_in_one_of_these() -> None:
    there = replace(WHOLE, adapters=TWO)
    table = NodeTable([there])
    sources = [None, ADAPTED, NAMED, drafted(), drafted(16)]
    caches = [KvCache(bits=8), KvCache(bits=4), KvCache(prefix_bytes="1Gi")]
    requests = [*map(model_request, sources), *(model_request(kv_cache=kv) for kv in caches)]
    needs = [int(table.evaluate(request).need.of_node[0]) for request in requests]
    assert needs == [memory_proof.proof_of(request, there).total_bytes for request in requests]


def test_reports_are_awaited_of_all_folders() -> None:
    assert not NodeTable([WHOLE]).awaits_reports(BOTH)
    assert not NodeTable([A]).awaits_reports(ModelSource(path="qwen"))
    for view in (replace(WHOLE, adapters={}), replace(WHOLE, models=A.models)):
        assert NodeTable([WHOLE, replace(view, name="b")]).awaits_reports(BOTH)
        away = replace(view, name="b", is_ready=False)
        assert not NodeTable([WHOLE, away]).awaits_reports(BOTH)
    assert not NodeTable([]).awaits_reports(BOTH)


def _moe_rejection(memory_bytes: int, **more: Any) -> Rejection:
    entry = next(
        entry
        for entry in catalogue.search(("Qwen3-235B-A22B", "4bit"), catalogue.shipped_catalogue())
        if entry.name == "Qwen3-235B-A22B"
    )
    spec = ModelDeploymentSpec(model=ModelSource(path="moe"), concurrency=1)
    mac = NodeView(name="mac", is_ready=True, allocatable_bytes=memory_bytes, **more)
    node = with_facts(mac, "moe", entry.facts)
    return present(find_rejection(PlacementRequest(name="", spec=spec), node))


def test_a_mixture_of_experts_beyond_memory_is_refused_with_the_rate_that_its_disk_allows() -> None:
    told = _moe_rejection(48 * GIB, bandwidth_gbps=400.0, disk_gbps=5.0).message
    rate = float(present(re.search(r"reads 5\.0 GB/s, .* at most (\d+\.\d) tokens/s", told))[1])
    # 8 of 128 experts of each layer in 4.5 bits, from the disk; attention and head from memory.
    experts_s, rest_s = 227.1e9 * 8 / 128 * 4.5 / 8 / 5e9, 8e9 * 4.5 / 8 / 280e9
    assert rate == pytest.approx(1 / (experts_s + rest_s), rel=0.1)
    assert "not measured yet" in _moe_rejection(48 * GIB).message
    assert "even without its experts" in _moe_rejection(4 * GIB, disk_gbps=5.0).message
    # A Mac that is only full now gets no such figure.
    full = _moe_rejection(512 * GIB, disk_gbps=5.0, used_bytes=500 * GIB).message
    assert "experts" not in full
