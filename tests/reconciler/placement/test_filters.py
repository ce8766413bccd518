"""Every reason against a node with its message: the node's own state, its folders, and the deployment's options."""

from dataclasses import replace
from typing import Any

import pytest

from reconciler.deployments.explain import explain_nodes
from reconciler.deployments.placer import Assignment, place_replica
from reconciler.placement import filters, memory_proof
from reconciler.placement.inputs import NodeHold, NodeView, PlacementRequest, request_for
from reconciler.placement.memory_proof import ProofExtras, prove
from reconciler.placement.refusals import Unschedulable, summary_line
from reconciler.placement.table import NodeTable
from schemas.deployment import DraftModel, ModelSource, NamedAdapter
from schemas.guesses import MtpGuesses, NgramGuesses
from schemas.kv_cache import KvCache
from schemas.node import AdapterReport, LayerGroup, ModelGeometry, ModelReport, Taint
from schemas.placement import Placement, Toleration
from tests.support.world import GEOMETRY, GIB, deployment, node


def make_request(**placement: object) -> PlacementRequest:
    return request_for(deployment(placement=Placement.model_validate(placement)))


def knows(**changes: object) -> dict[str, ModelReport]:
    geometry = GEOMETRY.model_copy(update=changes)
    return {"qwen": ModelReport(path="qwen", geometry=geometry)}


ANYWHERE = make_request()
A = node("a")
GPU = Taint(key="gpu", value="x", effect="NoSchedule")
NEED = "needs 2.8 GiB (weights 2.0 GiB, KV cache 32.0 MiB for 1 x 1024 tokens, activations 62.5 MiB"
BROKEN = ModelReport(path="qwen", reason="ModelNotFound", message="/models/qwen is not a directory")

# Request, node, reason, the node's message, the summary line.
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
        make_request(pools=("lab", "desk")),
        A,
        "NotInPool",
        "it is in none of the pools lab, desk",
        "1 in none of the pools lab, desk",
        id="in-no-such-pool",
    ),
    pytest.param(
        make_request(node_selector={"rack": "1", "room": "x"}),
        replace(A, labels={"room": "x"}),
        "SelectorMismatch",
        "it lacks the label rack=1",
        "1 not selected (it lacks the label rack=1)",
        id="selector-names-what-lacks",
    ),
    pytest.param(
        make_request(chips=("Apple M4 Pro", "Apple M4 Max")),
        replace(A, chip="Apple M1"),
        "ChipMismatch",
        "its chip is Apple M1, spec.placement.chips asks for Apple M4 Pro or Apple M4 Max",
        "1 with another chip (its chip is Apple M1, spec.placement.chips asks for Apple M4 Pro "
        "or Apple M4 Max)",
        id="chip",
    ),
    pytest.param(
        make_request(min_gpu_cores=30),
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
        "its agent has not inspected the model yet",
        "1 yet to inspect the model",
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
        "the memory of the model is not known: no rule says what the cache of a new model needs. "
        "Set spec.resources.memory to the memory of one replica",
        "1 ModelNotUnderstood (the memory of the model is not known: no rule says what the cache of "
        "a new model needs. Set spec.resources.memory to the memory of one replica)",
        id="not-understood",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, models=knows(max_context=512)),
        "ContextTooLong",
        "spec.contextLength is 1024, the model supports at most 512 tokens",
        "1 with a shorter context (need 1024 tokens, best has 512)",
        id="context",
    ),
    pytest.param(
        replace(ANYWHERE, apart_from=frozenset({"llama", "phi", "away"})),
        replace(A, replicas={"phi": 1, "llama": 2, "else": 1}),
        "AntiAffinity",
        "it runs llama, phi, and spec.placement.antiAffinity keeps them apart",
        "1 with replicas that antiAffinity keeps apart",
        id="anti-affinity",
    ),
    pytest.param(
        make_request(max_replicas_per_node=1),
        replace(A, replicas={"qwen": 1}),
        "ReplicaLimit",
        "it has 1 replica of this deployment, spec.placement.maxReplicasPerNode is 1",
        "1 full up (maxReplicasPerNode is 1)",
        id="one-replica-per-node",
    ),
    pytest.param(
        make_request(max_replicas_per_node=2),
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
        "1 too small even when empty (need 2.8 GiB, the largest has 1.0)",
        id="less-than-no-memory",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, promised_bytes=7 * GIB),
        "InsufficientMemory",
        f"{NEED}, process 768 MiB), has 1.0 GiB free of 8.0 GiB (7.0 GiB are reserved for a higher "
        "priority)",
        "1 short of memory (need 2.8 GiB, best has 1.0)",
        id="promised-memory",
    ),
    pytest.param(
        request_for(deployment(memory="9Gi")),
        A,
        "InsufficientMemory",
        "needs 9.0 GiB (set by spec.resources.memory), has 8.0 GiB free of 8.0 GiB",
        "1 too small even when empty (need 9.0 GiB, the largest has 8.0)",
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
        (make_request(pools=("lab", "desk")), replace(A, pools=frozenset({"desk", "other"}))),
        (make_request(node_selector={"rack": "1"}), replace(A, labels={"rack": "1", "more": "y"})),
        (make_request(chips=("Apple M1",)), replace(A, chip="Apple M1")),
        (make_request(min_gpu_cores=30), replace(A, gpu_cores=30)),
        (make_request(max_replicas_per_node=2), replace(A, replicas={"qwen": 1})),
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
    wanted = make_request(tolerations=(Toleration.model_validate(toleration),))
    rejected = filters.find_rejection(wanted, replace(A, taints=(GPU,)))
    assert (rejected is None) is is_tolerated


def test_a_byte_decides() -> None:
    need = prove(GEOMETRY, context_length=1024, concurrency=1).total_bytes
    assert filters.find_rejection(ANYWHERE, replace(A, allocatable_bytes=need)) is None
    rejected = filters.find_rejection(ANYWHERE, replace(A, allocatable_bytes=need - 1))
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
        "0/5 nodes fit: 3 too small even when empty (need 2.8 GiB, the largest has 2.0), 1 cordoned, 1 NotReady"
    )
    # One that is only full now, and the line is about the room of now.
    full = replace(node("f", memory_gib=8), used_bytes=7 * GIB)
    verdict = place_replica(ANYWHERE, [*small, full])
    assert isinstance(verdict, Unschedulable)
    assert summary_line(verdict) == "0/4 nodes fit: 4 short of memory (need 2.8 GiB, best has 2.0)"


def test_where_messages_differ_one_speaks_for_all() -> None:
    wanted = make_request(node_selector={"rack": "1", "room": "x"})
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


SMALL = GEOMETRY.model_copy(update={"weights_bytes": GIB // 2, "layers": 4})
LAW = AdapterReport(path="law", weights_bytes=GIB // 4)
FULL = LayerGroup(kind="Full", count=16, kv_heads=8, head_dim=64, value_dim=64)
SLIDING = LayerGroup(kind="Sliding", count=4, kv_heads=8, head_dim=64, value_dim=64, window=128)
LATENT = LayerGroup(kind="Latent", count=4, latent_dim=576)
STATE = LayerGroup(kind="State", count=4, state_bytes=1000)


def model_request(source: ModelSource | None = None, **changes: Any) -> PlacementRequest:
    made = deployment()
    fields = {"model": source or ModelSource(path="qwen"), **changes}
    return request_for(made.model_copy(update={"spec": made.spec.model_copy(update=fields)}))


def drafted(tokens: int = 3) -> ModelSource:
    return ModelSource(path="qwen", draft=DraftModel(path="small", tokens=tokens))


ADAPTED = ModelSource(path="qwen", adapter="law")
WHOLE = replace(
    node("a"),
    models={**node("a").models, "small": ModelReport(path="small", geometry=SMALL)},
    adapters={"law": LAW},
)


def of_shape(*groups: LayerGroup, **changes: Any) -> NodeView:
    shape = GEOMETRY.model_copy(update={"groups": groups, **changes})
    return replace(WHOLE, models={**WHOLE.models, "qwen": ModelReport(path="qwen", geometry=shape)})


def with_draft(report: ModelReport) -> NodeView:
    return replace(WHOLE, models={**WHOLE.models, "small": report})


def told(**changes: Any) -> ModelReport:
    return ModelReport(path="small", geometry=SMALL.model_copy(update=changes))


MODEL_REFUSALS = [
    pytest.param(
        model_request(drafted()), node("a"), "ModelNotInspected",
        "its agent has not inspected the draft model yet", id="draft-not-seen",
    ),
    pytest.param(
        model_request(ADAPTED), node("a"), "ModelNotInspected",
        "its agent has not inspected the adapter yet", id="adapter-not-seen",
    ),
    pytest.param(
        model_request(drafted()),
        with_draft(ModelReport(path="small", reason="ModelNotFound", message="/m/small is not a directory")),
        "ModelNotFound", "draft model: /m/small is not a directory", id="draft-not-there",
    ),
    pytest.param(
        model_request(ADAPTED),
        replace(WHOLE, adapters={"law": AdapterReport(path="law", reason="AdapterUnusable", message="adapter: it is torn")}),
        "AdapterUnusable", "adapter: it is torn", id="adapter-broken",
    ),
    pytest.param(
        model_request(drafted()), with_draft(told(unknown="a new thing")), "ModelNotUnderstood",
        "the memory of the draft model is not known: a new thing. Set spec.resources.memory to the memory of one replica", id="draft-not-understood",
    ),
    pytest.param(
        model_request(drafted()), with_draft(told(max_context=512)), "ContextTooLong",
        "spec.contextLength is 1024, the draft model supports at most 512 tokens", id="draft-too-short",
    ),
    pytest.param(
        model_request(drafted()), of_shape(FULL, SLIDING), "DraftUnsupported",
        "spec.model.draft needs caches that can drop rejected tokens, and the model has layers that cannot; leave it out", id="a-window-takes-nothing-back",
    ),
    pytest.param(
        model_request(ModelSource(path="qwen", ngram=NgramGuesses())), of_shape(FULL, SLIDING), "DraftUnsupported",
        "spec.model.ngram needs caches that can drop rejected tokens, and the model has layers that cannot; leave it out", id="a-window-takes-no-ngram-back",
    ),
    pytest.param(
        model_request(ModelSource(path="qwen", mtp=MtpGuesses())), of_shape(FULL, has_mtp_head=False), "DraftUnsupported",
        "spec.model.mtp needs a multi-token prediction head, and the weights have none that engines can use; use ngram, or leave it out", id="no-head",
    ),
    pytest.param(
        model_request(drafted()), with_draft(told(groups=(STATE,))), "DraftUnsupported",
        "spec.model.draft needs caches that can drop rejected tokens, and the draft model has layers that cannot; leave it out",
        id="nor-does-a-state",
    ),
    pytest.param(
        model_request(kv_cache=KvCache(bits=4)), of_shape(LATENT), "KvCacheUnsupported",
        "the model has no layers that keep keys and values of all tokens; leave spec.kvCache.bits out", id="latent",
    ),
    pytest.param(
        model_request(kv_cache=KvCache(window=64)), of_shape(STATE), "KvCacheUnsupported",
        "the model has no layers that keep keys and values of all tokens; leave spec.kvCache.window out",
        id="no-window-over-states",
    ),
    pytest.param(
        model_request(kv_cache=KvCache(bits=8)), of_shape(FULL.model_copy(update={"head_dim": 80, "value_dim": 80})),
        "KvCacheUnsupported",
        "the model has heads of 80 numbers, which is no multiple of 32; leave spec.kvCache.bits out",
        id="heads-of-80",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "there", "reason", "message"), MODEL_REFUSALS)
def test_model_refusals(
    wanted: PlacementRequest, there: NodeView, reason: str, message: str
) -> None:
    rejected = filters.find_rejection(wanted, there)
    assert rejected is not None
    assert (rejected.reason, rejected.message) == (reason, message)
    verdict = NodeTable([there]).evaluate(wanted)
    assert not verdict.passes[0]


@pytest.mark.parametrize(
    "wanted",
    [
        model_request(drafted()),
        model_request(ADAPTED),
        model_request(kv_cache=KvCache(bits=8)),
        model_request(kv_cache=KvCache(window=64)),
        model_request(ModelSource(path="qwen", adapter="law", draft=DraftModel(path="small"))),
    ],
)
def test_complete_folders_are_accepted(wanted: PlacementRequest) -> None:
    found = place_replica(wanted, [node("b"), replace(WHOLE, allocatable_bytes=16 * GIB)])
    assert isinstance(found, Assignment)
    if wanted.spec.model != ModelSource(path="qwen"):
        assert found.node == "a"  # the other one has none of it
    assert found.memory == memory_proof.proof_of(wanted, WHOLE)


def test_an_unknown_shape_is_left_to_the_engine() -> None:
    there = of_shape(unknown="what is it")
    wanted = replace(model_request(kv_cache=KvCache(bits=8)))
    spec = deployment(memory="3Gi").spec.model_copy(update={"kv_cache": KvCache(bits=8)})
    assert filters.find_rejection(replace(wanted, spec=spec), there) is None


def extra(extras: ProofExtras, shape: ModelGeometry = GEOMETRY, *, concurrency: int = 2) -> Any:
    return prove(shape, context_length=1024, concurrency=concurrency, extras=extras)


def test_bits_make_the_cache_smaller_and_unpack_one_layer() -> None:
    shape = GEOMETRY.model_copy(update={"groups": (FULL, SLIDING), "hidden_size": 512, "heads": 8})
    plain, packed = extra(ProofExtras(), shape), extra(ProofExtras(kv_bits=8), shape)
    tokens, window = 2048, 4 * 8 * 128 * 2 * (2 * 128 + 2 * (1024 - 128))
    assert plain.kv_cache_bytes == 16 * 8 * 128 * 2 * tokens + window
    # 64 numbers in 64 bytes, a scale and a bias of 2 bytes: 1.06 bytes a number (spec/facts.md 4.4).
    assert packed.kv_cache_bytes == 16 * 8 * 2 * (64 + 4) * tokens + window
    assert (
        extra(ProofExtras(kv_bits=4), shape).kv_cache_bytes
        == 16 * 8 * 2 * (32 + 4) * tokens + window
    )
    assert packed.activation_bytes - plain.activation_bytes == 8 * 128 * 2 * tokens


def test_heads_of_96_are_packed_by_32() -> None:
    shape = GEOMETRY.model_copy(
        update={"groups": (FULL.model_copy(update={"head_dim": 96, "value_dim": 96}),)}
    )
    assert extra(ProofExtras(kv_bits=4), shape).kv_cache_bytes == 16 * 8 * 2 * (48 + 12) * 2048


def test_a_window_bounds_the_cache_and_holds_what_is_being_read() -> None:
    shape = GEOMETRY.model_copy(update={"groups": (FULL,), "prefill_batch": 1})
    per_token = 16 * 8 * 128 * 2
    proof = prove(shape, context_length=8192, concurrency=4, extras=ProofExtras(kv_window=1000))
    assert proof.kv_cache_bytes == per_token * (4 * 1000 + 512)


def test_a_draft_model_counts_with_its_cache_and_the_guesses_are_read_at_once() -> None:
    shape = GEOMETRY.model_copy(update={"hidden_size": 512, "ffn_size": 1024, "heads": 8})
    plain, found = (
        extra(ProofExtras(), shape),
        extra(ProofExtras(draft=SMALL, draft_tokens=3), shape),
    )
    cache_of_draft = 4 * 8 * 128 * 2 * 2 * 1280  # 1,027 tokens, in steps of 256
    assert found.draft_bytes == GIB // 2 + cache_of_draft + 512 * 32_000 * 4
    assert found.kv_cache_bytes == plain.kv_cache_bytes * 1280 // 1024
    # Logits of a row for each guess and one for the token after them.
    assert found.activation_bytes - plain.activation_bytes == 2 * 2 * 3 * 32_000 * 4
    assert (
        found.total_bytes
        == found.sum_bytes
        == found.overhead_bytes
        + sum(
            (found.weights_bytes, found.kv_cache_bytes, found.activation_bytes, found.draft_bytes)
        )
    )


def test_all_parts_are_named() -> None:
    source = ModelSource(path="qwen", adapter="law", draft=DraftModel(path="small"))
    wanted = model_request(source, kv_cache=KvCache(bits=8, prefix_bytes="1Gi"))
    memory = memory_proof.proof_of(wanted, WHOLE)
    assert (memory.prefix_cache_bytes, memory.adapter_bytes) == (GIB, GIB // 4)
    rejected = filters.find_rejection(wanted, replace(WHOLE, allocatable_bytes=GIB))
    assert rejected is not None
    assert rejected.message == (
        "needs 4.7 GiB (weights 2.0 GiB, KV cache 21.2 MiB for 1 x 1024 tokens in 8 bits, activations 62.5 MiB, "
        "process 768 MiB, prefix cache 1.0 GiB, adapter 256 MiB, draft model 584 MiB), "
        "has 1.0 GiB free of 1.0 GiB"
    )


def test_tokens_of_all_requests_replace_full_contexts() -> None:
    def cache_bytes(concurrency: int, tokens: int | None = None) -> int:
        wanted = model_request(concurrency=concurrency, kv_cache=KvCache(tokens=tokens))
        return memory_proof.proof_of(wanted, WHOLE).kv_cache_bytes

    assert cache_bytes(16, 4 * 1024) == cache_bytes(4)
    assert cache_bytes(2, 4 * 1024) == cache_bytes(2)  # never more than all of them can have
    wanted = model_request(concurrency=16, kv_cache=KvCache(tokens=4096))
    proof = memory_proof.describe_proof(memory_proof.proof_of(wanted, WHOLE), wanted.spec)
    assert "for 4096 tokens of 16 requests, " in proof


TWO = {"law": LAW, "poems": AdapterReport(path="poems", weights_bytes=7)}
BOTH = ModelSource(
    path="qwen",
    adapters=tuple(NamedAdapter(name=f"n-{path}", path=path) for path in TWO),
)


def test_all_adapters_count_once_and_must_be_there() -> None:
    proof = memory_proof.proof_of(model_request(BOTH), replace(WHOLE, adapters=TWO))
    assert proof.adapter_bytes == LAW.weights_bytes + 7
    missing = filters.find_rejection(model_request(BOTH), WHOLE)
    assert missing is not None
    assert missing.message == "its agent has not inspected the adapter yet"
    assert NodeTable([WHOLE]).awaits_reports(BOTH)


def test_a_table_tells_wants_apart_that_differ_in_one_of_these() -> None:
    table = NodeTable([replace(WHOLE, adapters=TWO)])
    wants = [
        model_request(),
        model_request(ADAPTED),
        model_request(BOTH),
        model_request(drafted()),
        model_request(drafted(16)),
        model_request(kv_cache=KvCache(bits=8)),
        model_request(kv_cache=KvCache(bits=4)),
        model_request(kv_cache=KvCache(prefix_bytes="1Gi")),
    ]
    for want in wants:
        assert (
            int(table.evaluate(want).need.of_node[0])
            == memory_proof.proof_of(want, replace(WHOLE, adapters=TWO)).total_bytes
        )


def test_reports_are_awaited_of_all_folders() -> None:
    both = ModelSource(path="qwen", adapter="law", draft=DraftModel(path="small"))
    lacking = (replace(WHOLE, adapters={}), replace(WHOLE, models=node("a").models))
    assert not NodeTable([WHOLE]).awaits_reports(both)
    assert not NodeTable([node("a")]).awaits_reports(ModelSource(path="qwen"))
    for view in lacking:
        assert NodeTable([WHOLE, replace(view, name="b")]).awaits_reports(both)
        away = replace(view, name="b", is_ready=False)
        assert not NodeTable([WHOLE, away]).awaits_reports(both)
    assert not NodeTable([]).awaits_reports(both)
