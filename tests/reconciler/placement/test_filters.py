"""Every reason against a node with its message: the node's own state, its folders, and the deployment's options."""

from dataclasses import replace
from typing import Any

import pytest

from reconciler.deployments.explain import explain_nodes
from reconciler.deployments.placer import Assignment, place_replica
from reconciler.placement import memory_proof
from reconciler.placement.filters import find_rejection
from reconciler.placement.inputs import NodeHold, NodeView, PlacementRequest, request_for
from reconciler.placement.memory_proof import prove
from reconciler.placement.refusals import summary_line
from reconciler.placement.table import NodeTable
from schemas.deployment import DraftModel, ModelSource, NamedAdapter
from schemas.guesses import MtpGuesses, NgramGuesses
from schemas.kv_cache import KvCache
from schemas.node import AdapterReport, LayerGroup, ModelReport, Taint
from schemas.placement import Placement
from tests.support.reconciler_world import unplaced
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
NEED = "needs 2.8 GiB (weights 2.0 GiB, KV cache 32.0 MiB for 1 x 1024 tokens, activations 62.5 MiB"
BROKEN = ModelReport(path="qwen", reason="ModelNotFound", message="/models/qwen is not a directory")
NOT_KNOWN = (
    "the memory of the model is not known: no rule says what the cache of a new model needs. "
    "Set spec.resources.memory to the memory of one replica"
)

# Request, what differs in the node, reason, the node's message, the summary line.
REFUSALS = [
    pytest.param(ANYWHERE, {"is_ready": False}, "NodeNotReady", "its agent does not renew its lease", "1 NotReady", id="away"),
    pytest.param(ANYWHERE, {"is_cordoned": True}, "NodeCordoned", "it is cordoned (spec.unschedulable)", "1 cordoned", id="cordoned"),
    pytest.param(
        make_request(pools=("lab", "desk")), {}, "NotInPool", "it is in none of the pools lab, desk",
        "1 in none of the pools lab, desk", id="in-no-such-pool",
    ),
    pytest.param(
        make_request(node_selector={"rack": "1", "room": "x"}), {"labels": {"room": "x"}}, "SelectorMismatch",
        "it lacks the label rack=1", "1 not selected (it lacks the label rack=1)", id="selector-names-what-lacks",
    ),
    pytest.param(
        make_request(chips=("Apple M4 Pro", "Apple M4 Max")), {"chip": "Apple M1"}, "ChipMismatch",
        "its chip is Apple M1, spec.placement.chips asks for Apple M4 Pro or Apple M4 Max",
        "1 with another chip (its chip is Apple M1, spec.placement.chips asks for Apple M4 Pro or Apple M4 Max)", id="chip",
    ),
    pytest.param(
        make_request(min_gpu_cores=30), {"gpu_cores": 20}, "TooFewGpuCores",
        "it has 20 GPU cores, spec.placement.minGpuCores is 30", "1 short of GPU cores (need 30, best has 20)", id="gpu-cores",
    ),
    pytest.param(
        ANYWHERE, {"reserved_by_group": "pair"}, "ReservedForGroup", "it is reserved for the ShardGroup pair",
        "1 reserved for a ShardGroup", id="exclusive-group",
    ),
    pytest.param(
        ANYWHERE, {"taints": (GPU, SOFT)}, "NodeTainted",
        "it has the taint gpu=x:NoSchedule, which spec.placement.tolerations does not name",
        "1 tainted (it has the taint gpu=x:NoSchedule, which spec.placement.tolerations does not name)", id="tainted",
    ),
    pytest.param(
        ANYWHERE, {"models": {}}, "ModelNotInspected", "its agent has not inspected the model yet",
        "1 yet to inspect the model", id="not-inspected",
    ),
    pytest.param(
        ANYWHERE, {"models": {"qwen": BROKEN}}, "ModelNotFound", "/models/qwen is not a directory",
        "1 ModelNotFound (/models/qwen is not a directory)", id="the-message-of-the-agent",
    ),
    pytest.param(
        ANYWHERE, {"models": knows(unknown="no rule says what the cache of a new model needs")}, "ModelNotUnderstood",
        NOT_KNOWN, f"1 ModelNotUnderstood ({NOT_KNOWN})", id="not-understood",
    ),
    pytest.param(
        ANYWHERE, {"models": knows(max_context=512)}, "ContextTooLong",
        "spec.contextLength is 1024, the model supports at most 512 tokens",
        "1 with a shorter context (need 1024 tokens, best has 512)", id="context",
    ),
    pytest.param(
        replace(ANYWHERE, apart_from=frozenset({"llama", "phi", "away"})), {"replicas": {"phi": 1, "llama": 2, "else": 1}},
        "AntiAffinity", "it runs llama, phi, and spec.placement.antiAffinity keeps them apart",
        "1 with replicas that antiAffinity keeps apart", id="anti-affinity",
    ),
    pytest.param(
        make_request(max_replicas_per_node=1), {"replicas": {"qwen": 1}}, "ReplicaLimit",
        "it has 1 replica of this deployment, spec.placement.maxReplicasPerNode is 1",
        "1 full up (maxReplicasPerNode is 1)", id="one-replica-per-node",
    ),
    pytest.param(
        make_request(max_replicas_per_node=2), {"replicas": {"qwen": 2}}, "ReplicaLimit",
        "it has 2 replicas of this deployment, spec.placement.maxReplicasPerNode is 2",
        "1 full up (maxReplicasPerNode is 2)", id="replicas-per-node",
    ),
    pytest.param(
        ANYWHERE, {"allocatable_bytes": 3 * GIB, "used_bytes": GIB}, "InsufficientMemory",
        f"{NEED}, process 768 MiB), has 2.0 GiB free of 3.0 GiB", "1 short of memory (need 2.8 GiB, best has 2.0)", id="memory",
    ),
    pytest.param(
        ANYWHERE, {"allocatable_bytes": GIB, "used_bytes": 2 * GIB, "reserved_bytes": GIB}, "InsufficientMemory",
        f"{NEED}, process 768 MiB), has 0 B free of 1.0 GiB (its pools reserve 1.0 GiB)",
        "1 too small even when empty (need 2.8 GiB, the largest has 1.0)", id="less-than-no-memory",
    ),
    pytest.param(
        ANYWHERE, {"promised_bytes": 7 * GIB}, "InsufficientMemory",
        f"{NEED}, process 768 MiB), has 1.0 GiB free of 8.0 GiB (7.0 GiB are reserved for a higher priority)",
        "1 short of memory (need 2.8 GiB, best has 1.0)", id="promised-memory",
    ),
    pytest.param(
        request_for(deployment(memory="9Gi")), {}, "InsufficientMemory",
        "needs 9.0 GiB (set by spec.resources.memory), has 8.0 GiB free of 8.0 GiB",
        "1 too small even when empty (need 9.0 GiB, the largest has 8.0)", id="a-person-says-more",
    ),
    *(
        pytest.param(
            ANYWHERE,
            {"holds": (NodeHold(reason=reason, message="so it is"), NodeHold(reason="NotTheFirst", message="and no more"))},
            reason, "so it is", line, id=reason,
        )
        for reason, line in (
            ("NodeDraining", "1 draining"),
            ("NodeWithheld", "1 withheld (so it is)"),
            ("DuplicateHardware", "1 with the hardware of another node (so it is)"),
            ("VersionSkew", "1 of another version (so it is)"),
            ("NodeFlapping", "1 held back (so it is)"),
            ("MemoryPressure", "1 under memory pressure"),
            ("DiskPressure", "1 under disk pressure"),
            ("ThermalPressure", "1 too hot"),
            ("NeedsReboot", "1 in need of a reboot"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "changes", "reason", "message", "line"), REFUSALS)
def test_refusals(
    wanted: PlacementRequest, changes: dict[str, Any], reason: str, message: str, line: str
) -> None:
    there = replace(A, **changes)
    rejected = find_rejection(wanted, there)
    assert rejected is not None
    assert (rejected.reason, rejected.message) == (reason, message)
    verdict = unplaced(wanted, there)
    assert verdict.refusals == (("a", rejected),)
    assert summary_line(verdict) == f"0/1 nodes fit: {line}"


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
        replicas={"llama": 1, "qwen": 1}, holds=(NodeHold(reason="NeedsReboot", message="it waits"),),
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


def held(reason: str, message: str = "", **amounts: int) -> dict[str, Any]:
    return {"holds": (NodeHold(reason=reason, message=message, **amounts),)}


SMALL_NODES = (node("a", memory_gib=1), node("b", memory_gib=2), node("c", memory_gib=0.5))
RACKS = make_request(node_selector={"rack": "1", "room": "x"})
CLONE = "node mac-1 is the same machine (hardware UUID 1)"


@pytest.mark.parametrize(
    ("wanted", "nodes", "line"),
    [
        pytest.param(
            ANYWHERE, (*SMALL_NODES, node("d", is_cordoned=True), node("e", is_ready=False)),
            "0/5 nodes fit: 3 too small even when empty (need 2.8 GiB, the largest has 2.0), 1 cordoned, 1 NotReady",
            id="reasons-are-counted",
        ),
        pytest.param(
            ANYWHERE, (*SMALL_NODES, node("f", used_bytes=7 * GIB)),
            "0/4 nodes fit: 4 short of memory (need 2.8 GiB, best has 2.0)", id="full-at-the-moment",
        ),
        pytest.param(
            RACKS, (node("a", labels={"rack": "1"}), node("b")),
            "0/2 nodes fit: 2 not selected (it lacks the label rack=1, room=x)", id="one-message-stands-for-all",
        ),
        pytest.param(
            ANYWHERE, (node("a", **held("DuplicateHardware", f"{CLONE}. If this one is a clone, start it anew")),),
            f"0/1 nodes fit: 1 with the hardware of another node ({CLONE})", id="remedies-are-left-to-the-nodes",
        ),
        pytest.param(
            ANYWHERE,
            [*(node(name, **held("InsufficientDisk", need=50 * GIB, have=have * GIB)) for name, have in zip("abc", (10, 40, 20), strict=True)), node("d", is_cordoned=True)],
            "0/4 nodes fit: 3 short of disk (need 50.0 GiB, best has 40.0), 1 cordoned", id="most-disk",
        ),
        pytest.param(ANYWHERE, (), "no node has joined the fleet yet; start fleet-nodeagent on a Mac", id="no-nodes"),
    ],
)  # fmt: skip
def test_the_summary_line(wanted: PlacementRequest, nodes: tuple[NodeView, ...], line: str) -> None:
    assert summary_line(unplaced(wanted, *nodes)) == line
    assert len(explain_nodes(wanted, nodes)) == len(nodes)


def test_a_thousand_refusals_list_no_more_than_twenty_nodes() -> None:
    verdict = unplaced(ANYWHERE, *(node(f"n{at:04}", is_ready=False) for at in range(1000)))
    assert [name for name, _ in verdict.refusals] == [f"n{at:04}" for at in range(20)]
    assert summary_line(verdict) == "0/1000 nodes fit: 1000 NotReady"


SMALL = GEOMETRY.model_copy(update={"weights_bytes": GIB // 2, "layers": 4})
LAW = AdapterReport(path="law", weights_bytes=GIB // 4)
FULL = LayerGroup(kind="Full", count=16, kv_heads=8, head_dim=64, value_dim=64)
SLIDING = LayerGroup(kind="Sliding", count=4, kv_heads=8, head_dim=64, value_dim=64, window=128)
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


NO_DROP = (
    "needs caches that can drop rejected tokens, and the {} has layers that cannot; leave it out"
)
NO_LAYERS = (
    "the model has no layers that keep keys and values of all tokens; leave spec.kvCache.{} out"
)
MODEL_REFUSALS = [
    pytest.param(model_request(drafted()), A, "ModelNotInspected", "its agent has not inspected the draft model yet", id="draft-not-seen"),
    pytest.param(model_request(ADAPTED), A, "ModelNotInspected", "its agent has not inspected the adapter yet", id="adapter-not-seen"),
    pytest.param(
        model_request(drafted()), with_draft(MISSING_DRAFT), "ModelNotFound", "draft model: /m/small is not a directory", id="draft-not-there",
    ),
    pytest.param(
        model_request(ADAPTED), replace(WHOLE, adapters={"law": TORN}), "AdapterUnusable", "adapter: it is torn", id="adapter-broken",
    ),
    pytest.param(
        model_request(drafted()), with_draft(unknown="a new thing"), "ModelNotUnderstood",
        "the memory of the draft model is not known: a new thing. Set spec.resources.memory to the memory of one replica",
        id="draft-not-understood",
    ),
    pytest.param(
        model_request(drafted()), with_draft(max_context=512), "ContextTooLong",
        "spec.contextLength is 1024, the draft model supports at most 512 tokens", id="draft-too-short",
    ),
    pytest.param(
        model_request(drafted()), of_shape(FULL, SLIDING), "DraftUnsupported",
        f"spec.model.draft {NO_DROP.format('model')}", id="a-window-takes-nothing-back",
    ),
    pytest.param(
        model_request(ModelSource(path="qwen", ngram=NgramGuesses())), of_shape(FULL, SLIDING), "DraftUnsupported",
        f"spec.model.ngram {NO_DROP.format('model')}", id="a-window-takes-no-ngram-back",
    ),
    pytest.param(
        model_request(ModelSource(path="qwen", mtp=MtpGuesses())), of_shape(FULL, has_mtp_head=False), "DraftUnsupported",
        "spec.model.mtp needs a multi-token prediction head, and the weights have none that engines can use; use ngram, or leave it out",
        id="no-head",
    ),
    pytest.param(
        model_request(drafted()), with_draft(groups=(STATE,)), "DraftUnsupported",
        f"spec.model.draft {NO_DROP.format('draft model')}", id="nor-does-a-state",
    ),
    pytest.param(model_request(kv_cache=KvCache(bits=4)), of_shape(LATENT), "KvCacheUnsupported", NO_LAYERS.format("bits"), id="latent"),
    pytest.param(
        model_request(kv_cache=KvCache(window=64)), of_shape(STATE), "KvCacheUnsupported", NO_LAYERS.format("window"), id="no-window-over-states",
    ),
    pytest.param(
        model_request(kv_cache=KvCache(bits=8)), of_shape(FULL.model_copy(update={"head_dim": 80, "value_dim": 80})), "KvCacheUnsupported",
        "the model has heads of 80 numbers, which is no multiple of 32; leave spec.kvCache.bits out", id="heads-of-80",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "there", "reason", "message"), MODEL_REFUSALS)
def test_model_refusals(
    wanted: PlacementRequest, there: NodeView, reason: str, message: str
) -> None:
    rejected = find_rejection(wanted, there)
    assert rejected is not None
    assert (rejected.reason, rejected.message) == (reason, message)
    assert not NodeTable([there]).evaluate(wanted).passes[0]


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
