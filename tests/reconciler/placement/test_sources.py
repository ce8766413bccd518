"""What a node must have on its disk for a deployment, and what adapters, draft models and cache options take."""

from dataclasses import replace
from typing import Any

import pytest

from reconciler.placement import filters
from reconciler.placement.inputs import PlacementRequest, request_for
from reconciler.placement.memory_proof import ProofExtras, prove
from reconciler.placement.table import NodeTable
from reconciler.placer import Assignment, place_replica
from reconciler.views import NodeView
from schemas.deployment import DraftModel, KvCache, ModelSource
from schemas.node import AdapterReport, LayerGroup, ModelGeometry, ModelReport
from tests.support.fleets import GEOMETRY, GIB, deployment, node

SMALL = GEOMETRY.model_copy(update={"weights_bytes": GIB // 2, "layers": 4})
LAW = AdapterReport(path="law", weights_bytes=GIB // 4)
FULL = LayerGroup(kind="Full", count=16, kv_heads=8, head_dim=64, value_dim=64)
SLIDING = LayerGroup(kind="Sliding", count=4, kv_heads=8, head_dim=64, value_dim=64, window=128)
LATENT = LayerGroup(kind="Latent", count=4, latent_dim=576)
STATE = LayerGroup(kind="State", count=4, state_bytes=1000)


def want(source: ModelSource | None = None, **changes: Any) -> PlacementRequest:
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


REFUSALS = [
    pytest.param(
        want(drafted()), node("a"), "ModelNotInspected",
        "its agent has not looked at the draft model yet", id="draft-not-seen",
    ),
    pytest.param(
        want(ADAPTED), node("a"), "ModelNotInspected",
        "its agent has not looked at the adapter yet", id="adapter-not-seen",
    ),
    pytest.param(
        want(drafted()),
        with_draft(ModelReport(path="small", reason="ModelNotFound", message="/m/small is not a directory")),
        "ModelNotFound", "draft model: /m/small is not a directory", id="draft-not-there",
    ),
    pytest.param(
        want(ADAPTED),
        replace(WHOLE, adapters={"law": AdapterReport(path="law", reason="AdapterUnusable", message="adapter: it is torn")}),
        "AdapterUnusable", "adapter: it is torn", id="adapter-broken",
    ),
    pytest.param(
        want(drafted()), with_draft(told(unknown="a new thing")), "ModelNotUnderstood",
        "what the draft model needs is not known: a new thing. Set spec.resources.memory to what one replica takes",
        id="draft-not-understood",
    ),
    pytest.param(
        want(drafted()), with_draft(told(max_context=512)), "ContextTooLong",
        "spec.contextLength is 1024, the draft model was made for 512 tokens at most", id="draft-too-short",
    ),
    pytest.param(
        want(drafted()), of_shape(FULL, SLIDING), "DraftUnsupported",
        "spec.model.draft needs to take back what was guessed wrong, and the model has layers that cannot; leave it out",
        id="a-window-takes-nothing-back",
    ),
    pytest.param(
        want(drafted()), with_draft(told(groups=(STATE,))), "DraftUnsupported",
        "spec.model.draft needs to take back what was guessed wrong, and the draft model has layers that cannot; "
        "leave it out",
        id="nor-does-a-state",
    ),
    pytest.param(
        want(kv_cache=KvCache(bits=4)), of_shape(LATENT), "KvCacheUnsupported",
        "the model has no layers with plain keys and values of all tokens; leave spec.kvCache.bits out", id="latent",
    ),
    pytest.param(
        want(kv_cache=KvCache(window=64)), of_shape(STATE), "KvCacheUnsupported",
        "the model has no layers with plain keys and values of all tokens; leave spec.kvCache.window out",
        id="no-window-over-states",
    ),
    pytest.param(
        want(kv_cache=KvCache(bits=8)), of_shape(FULL.model_copy(update={"head_dim": 80, "value_dim": 80})),
        "KvCacheUnsupported",
        "the model has heads of 80 numbers, and they are packed 32 together; leave spec.kvCache.bits out",
        id="heads-of-80",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "there", "reason", "message"), REFUSALS)
def test_refusals(wanted: PlacementRequest, there: NodeView, reason: str, message: str) -> None:
    rejected = filters.find_rejection(wanted, there)
    assert rejected is not None
    assert (rejected.reason, rejected.message) == (reason, message)
    verdict = NodeTable([there]).judged(wanted)
    assert not verdict.passes[0]


@pytest.mark.parametrize(
    "wanted",
    [
        want(drafted()),
        want(ADAPTED),
        want(kv_cache=KvCache(bits=8)),
        want(kv_cache=KvCache(window=64)),
        want(ModelSource(path="qwen", adapter="law", draft=DraftModel(path="small"))),
    ],
)
def test_what_is_there_is_taken(wanted: PlacementRequest) -> None:
    found = place_replica(wanted, [node("b"), replace(WHOLE, allocatable_bytes=16 * GIB)])
    assert isinstance(found, Assignment)
    if wanted.spec.model != ModelSource(path="qwen"):
        assert found.node == "a"  # the other one has none of it
    assert found.memory == filters.proof_of(wanted, WHOLE)


def test_a_shape_nobody_knows_is_left_to_the_engine() -> None:
    there = of_shape(unknown="what is it")
    wanted = replace(want(kv_cache=KvCache(bits=8)))
    spec = deployment(memory="3Gi").spec.model_copy(update={"kv_cache": KvCache(bits=8)})
    assert filters.find_rejection(replace(wanted, spec=spec), there) is None


def extra(extras: ProofExtras, shape: ModelGeometry = GEOMETRY, *, concurrency: int = 2) -> Any:
    return prove(shape, context_length=1024, concurrency=concurrency, extras=extras)


def test_bits_make_the_cache_smaller_and_leave_the_fused_kernel() -> None:
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
    assert packed.activation_bytes - plain.activation_bytes == 2 * 8 * 2048 * 1024 * 2


def test_heads_of_96_are_packed_by_32() -> None:
    shape = GEOMETRY.model_copy(
        update={"groups": (FULL.model_copy(update={"head_dim": 96, "value_dim": 96}),)}
    )
    assert extra(ProofExtras(kv_bits=4), shape).kv_cache_bytes == 16 * 8 * 2 * (48 + 12) * 2048


def test_a_window_bounds_the_cache_and_holds_what_is_being_read() -> None:
    shape = GEOMETRY.model_copy(update={"groups": (FULL,), "prefill_batch": 1})
    per_token = 16 * 8 * 128 * 2
    found = prove(shape, context_length=8192, concurrency=4, extras=ProofExtras(kv_window=1000))
    assert found.kv_cache_bytes == per_token * (4 * 1000 + 512)


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
    wanted = want(source, kv_cache=KvCache(bits=8, prefix_bytes="1Gi"))
    memory = filters.proof_of(wanted, WHOLE)
    assert (memory.prefix_cache_bytes, memory.adapter_bytes) == (GIB, GIB // 4)
    rejected = filters.find_rejection(wanted, replace(WHOLE, allocatable_bytes=GIB))
    assert rejected is not None
    assert rejected.message == (
        "needs 4.7 GiB (weights 2.0 GiB, KV cache 21.2 MiB for 1 x 1024 tokens in 8 bits, activations 62.5 MiB, "
        "process 768 MiB, prefix cache 1.0 GiB, adapter 256 MiB, draft model 584 MiB), "
        "has 1.0 GiB free of 1.0 GiB"
    )


def test_a_table_tells_wants_apart_that_differ_in_one_of_these() -> None:
    table = NodeTable([WHOLE])
    wants = [
        want(),
        want(ADAPTED),
        want(drafted()),
        want(drafted(16)),
        want(kv_cache=KvCache(bits=8)),
        want(kv_cache=KvCache(bits=4)),
        want(kv_cache=KvCache(prefix_bytes="1Gi")),
    ]
    for one in wants:
        assert int(table.judged(one).need.of_node[0]) == filters.proof_of(one, WHOLE).total_bytes


def test_reports_are_awaited_of_all_folders() -> None:
    both = ModelSource(path="qwen", adapter="law", draft=DraftModel(path="small"))
    assert WHOLE.has_looked_at(both)
    assert node("a").has_looked_at(ModelSource(path="qwen"))
    assert not replace(WHOLE, adapters={}).has_looked_at(both)
    assert not replace(WHOLE, models=node("a").models).has_looked_at(both)
