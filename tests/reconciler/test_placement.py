"""Placement: the memory proof, every filter with its words, scores, and the line people read."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.observe import NodeView
from reconciler.placement import filters
from reconciler.placement.place import Placed, Unschedulable, explain, place, score, with_replica
from reconciler.placement.proof import prove
from schemas.deployment import ModelDeployment, Placement
from schemas.node import ModelGeometry, ModelReport
from tests.support.fleets import GEOMETRY, GIB, deployment, node


def geometry(*, layers: int, kv_heads: int, vocab: int, weights: int = 0) -> ModelGeometry:
    return ModelGeometry(
        model_type="any",
        weights_bytes=weights,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=64,
        kv_element_bytes=2,
        vocab_size=vocab,
        max_context=131_072,
    )


# Check values of spec/facts.md 4.4: 36 layers x 2 x 8 heads x 64 x 2 bytes; SmolLM2-135M alike.
GPT_OSS_120B = geometry(layers=36, kv_heads=8, vocab=201_088)
SMOLLM2_135M = geometry(layers=30, kv_heads=3, vocab=49_152, weights=269_060_552)


@pytest.mark.parametrize(
    ("shape", "per_token"),
    [
        pytest.param(GPT_OSS_120B, 73_728, id="gpt-oss-120b"),
        pytest.param(SMOLLM2_135M, 23_040, id="smollm2-135m"),
    ],
)
def test_bytes_per_token(shape: ModelGeometry, per_token: int) -> None:
    proof = prove(shape, context_length=4096, concurrency=1)
    assert proof.kv_cache_bytes == per_token * 4096


@pytest.mark.parametrize(
    ("context", "concurrency", "tokens", "prefill"),
    [
        (256, 1, 256, 256),
        (257, 1, 512, 512),
        (16, 1, 256, 256),
        (4096, 1, 4096, 512),
        (4096, 8, 32_768, 512),
        (1, 3, 768, 256),
    ],
)
def test_caches_grow_in_steps(context: int, concurrency: int, tokens: int, prefill: int) -> None:
    proof = prove(SMOLLM2_135M, context_length=context, concurrency=concurrency)
    assert proof.kv_cache_bytes == 23_040 * tokens
    assert proof.activation_bytes == prefill * 49_152 * 4
    assert proof.weights_bytes == 269_060_552
    assert proof.overhead_bytes == 768 * 2**20
    assert proof.total_bytes == 269_060_552 + 23_040 * tokens + prefill * 196_608 + 768 * 2**20


@given(context=st.integers(16, 200_000), concurrency=st.integers(1, 64))
def test_more_never_needs_less(context: int, concurrency: int) -> None:
    here = prove(GPT_OSS_120B, context_length=context, concurrency=concurrency).total_bytes
    longer = prove(GPT_OSS_120B, context_length=context + 1, concurrency=concurrency).total_bytes
    wider = prove(GPT_OSS_120B, context_length=context, concurrency=concurrency + 1).total_bytes
    assert here <= longer
    assert here < wider


ANYWHERE = deployment()
POOLED = deployment(placement=Placement(pools=("lab", "desk")))
PICKY = deployment(placement=Placement(node_selector={"rack": "1", "room": "x"}))
A = node("a")
BROKEN = ModelReport(path="qwen", reason="ModelNotFound", message="/models/qwen is not a directory")
NEED = "needs 2.8 GiB (weights 2.0 GiB, KV cache 32.0 MiB for 1 x 1024 tokens, activations 62.5 MiB"
REFUSALS = [
    pytest.param(
        ANYWHERE,
        replace(A, is_ready=False),
        "NodeNotReady",
        "its agent does not renew its lease",
        id="away",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, is_cordoned=True),
        "NodeCordoned",
        "it is cordoned (spec.unschedulable)",
        id="cordoned",
    ),
    pytest.param(
        POOLED, A, "NotInPool", "it is in none of the pools lab, desk", id="in-no-such-pool"
    ),
    pytest.param(
        PICKY,
        replace(A, labels={"room": "x"}),
        "SelectorMismatch",
        "it lacks the label rack=1",
        id="selector-names-what-lacks",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, reserved_by_group="pair"),
        "ReservedForGroup",
        "it is reserved for the ShardGroup pair",
        id="exclusive-group",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, models={}),
        "ModelNotInspected",
        "its agent has not looked at the model yet",
        id="not-looked-at",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, models={"qwen": BROKEN}),
        "ModelNotFound",
        "/models/qwen is not a directory",
        id="the-agents-own-words",
    ),
    pytest.param(
        ANYWHERE,
        replace(
            A,
            models={
                "qwen": ModelReport(
                    path="qwen", geometry=GEOMETRY.model_copy(update={"max_context": 512})
                )
            },
        ),
        "ContextTooLong",
        "spec.contextLength is 1024, the model was made for 512 tokens at most",
        id="context",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, allocatable_bytes=3 * GIB, used_bytes=GIB),
        "InsufficientMemory",
        f"{NEED}, process 768 MiB), has 2.0 GiB free of 3.0 GiB",
        id="memory",
    ),
    pytest.param(
        ANYWHERE,
        replace(A, allocatable_bytes=GIB, used_bytes=2 * GIB),
        "InsufficientMemory",
        f"{NEED}, process 768 MiB), has 0 B free of 1.0 GiB",
        id="less-than-no-memory",
    ),
]


@pytest.mark.parametrize(("want", "there", "reason", "message"), REFUSALS)
def test_refusals(want: ModelDeployment, there: NodeView, reason: str, message: str) -> None:
    rejected = filters.reject(want.spec, there)
    assert rejected is not None
    assert (rejected.reason, rejected.message) == (reason, message)


@pytest.mark.parametrize(
    ("want", "there"),
    [
        (ANYWHERE, A),
        (POOLED, replace(A, pools=frozenset({"desk", "other"}))),
        (PICKY, replace(A, labels={"rack": "1", "room": "x", "more": "y"})),
    ],
)
def test_fits(want: ModelDeployment, there: NodeView) -> None:
    assert filters.reject(want.spec, there) is None


def test_a_byte_decides() -> None:
    need = prove(GEOMETRY, context_length=1024, concurrency=1).total_bytes
    assert filters.reject(ANYWHERE.spec, replace(A, allocatable_bytes=need)) is None
    rejected = filters.reject(ANYWHERE.spec, replace(A, allocatable_bytes=need - 1))
    assert rejected is not None
    assert (rejected.reason, rejected.need, rejected.have) == ("InsufficientMemory", need, need - 1)


def test_what_is_wrong_is_said_in_order() -> None:
    """Cure one reason after the other: each time the next one is named, and none comes back."""
    want = deployment(placement=Placement(pools=("lab",), node_selector={"rack": "1"}))
    short = GEOMETRY.model_copy(update={"max_context": 512})
    there = NodeView(name="a", is_ready=False, is_cordoned=True, reserved_by_group="pair")
    cures: list[tuple[str, dict[str, object]]] = [
        ("NodeNotReady", {"is_ready": True}),
        ("NodeCordoned", {"is_cordoned": False}),
        ("NotInPool", {"pools": frozenset({"lab"})}),
        ("SelectorMismatch", {"labels": {"rack": "1"}}),
        ("ReservedForGroup", {"reserved_by_group": ""}),
        ("ModelNotInspected", {"models": {"qwen": ModelReport(path="qwen", geometry=short)}}),
        ("ContextTooLong", {"models": {"qwen": ModelReport(path="qwen", geometry=GEOMETRY)}}),
        ("InsufficientMemory", {"allocatable_bytes": 4 * GIB}),
    ]
    for reason, cure in cures:
        rejected = filters.reject(want.spec, there)
        assert rejected is not None
        assert rejected.reason == reason
        there = replace(there, **cure)  # type: ignore[arg-type]  # the table above has the types
    assert filters.reject(want.spec, there) is None


def where(*nodes: NodeView) -> str:
    placed = place(ANYWHERE, nodes)
    assert isinstance(placed, Placed)
    return placed.node


def test_ties_go_by_name() -> None:
    assert where(node("c"), node("a"), node("b")) == "a"


def test_the_node_without_a_sibling_wins() -> None:
    crowded = replace(node("a", memory_gib=64), replicas={"qwen": 1})
    assert where(crowded, node("b", memory_gib=4)) == "b"


def test_replicas_of_others_are_no_siblings() -> None:
    assert where(replace(node("a"), replicas={"other": 9}), node("b")) == "a"


def test_the_emptier_node_wins() -> None:
    assert where(replace(node("a"), used_bytes=GIB), node("b")) == "b"


def test_scores_are_between_0_and_100() -> None:
    assert score(ANYWHERE, node("a")) == pytest.approx(100)
    full = replace(node("a"), used_bytes=8 * GIB, replicas={"qwen": 99})
    assert score(ANYWHERE, full) == pytest.approx(0.7)
    assert score(ANYWHERE, replace(node("a"), allocatable_bytes=0)) == pytest.approx(70)


def test_a_placement_carries_its_proof_and_takes_its_room() -> None:
    placed = place(ANYWHERE, [A])
    assert isinstance(placed, Placed)
    assert placed.memory == prove(GEOMETRY, context_length=1024, concurrency=1)
    after = with_replica(A, ANYWHERE, placed.memory)
    assert after.free_bytes == A.free_bytes - placed.memory.total_bytes
    assert after.replicas == {"qwen": 1}
    assert with_replica(after, ANYWHERE, placed.memory).replicas == {"qwen": 2}


def why(*nodes: NodeView, of: ModelDeployment = ANYWHERE) -> str:
    verdict = place(of, nodes)
    assert isinstance(verdict, Unschedulable)
    assert [name for name, _ in verdict.refusals] == sorted(view.name for view in nodes)
    return explain(verdict)


def test_an_empty_fleet_is_explained() -> None:
    assert why() == "no node has joined the fleet yet; start fleet-nodeagent on a Mac"


def test_each_reason_is_counted() -> None:
    away = [replace(node(name), is_ready=False) for name in ("e", "b")]
    small = [node("a", memory_gib=1), node("c", memory_gib=2)]
    missing = replace(node("d"), models={"qwen": BROKEN})
    assert why(*away, *small, missing) == (
        "0/5 nodes fit: 2 InsufficientMemory (need 2.8 GiB, best has 2.0 GiB free); "
        "1 ModelNotFound (/models/qwen is not a directory); "
        "2 NodeNotReady (its agent does not renew its lease)"
    )


def test_where_messages_differ_one_is_shown() -> None:
    one = replace(node("a"), labels={"rack": "1"})
    assert why(one, node("b"), of=PICKY) == (
        "0/2 nodes fit: 2 SelectorMismatch (for one: it lacks the label rack=1, room=x)"
    )
