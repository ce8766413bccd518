"""The memory proof: every kind of layer by hand, properties of all, and the comparison with an engine's peak."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.deployments.status import replica_status
from reconciler.placement import memory_proof
from reconciler.placement.inputs import request_for
from reconciler.placement.memory_proof import ProofExtras, prove
from schemas.kv_cache import KvCache
from schemas.meta import Status
from schemas.node import LayerGroup, ModelGeometry, VisionTower
from schemas.quantity import parse, show
from schemas.replica import MemoryProof, RankStatus
from schemas.vision import Vision
from tests.support.reconciler_world import replica_events
from tests.support.world import (
    GEOMETRY,
    GIB,
    NOW,
    PROOF,
    condition,
    condition_of,
    deployment,
    node,
    replica,
)


def geometry(
    *, layers: int, kv_heads: int, vocab: int, weights: int = 0, **sizes: int
) -> ModelGeometry:
    changes = {"layers": layers, "kv_heads": kv_heads, "vocab_size": vocab, **sizes}
    return GEOMETRY.model_copy(update={"weights_bytes": weights, "max_context": 131_072, **changes})


# Check values of spec/facts.md 4.4: 36 layers x 2 x 8 heads x 64 x 2 bytes; SmolLM2-135M alike.
GPT_OSS_120B = geometry(layers=36, kv_heads=8, vocab=201_088)
SMOLLM2_135M = geometry(layers=30, kv_heads=3, vocab=49_152, weights=269_060_552)


def test_bytes_per_token() -> None:
    proof = prove(GPT_OSS_120B, context_length=4096, concurrency=1)
    assert proof.kv_cache_bytes == 73_728 * 4096


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


def of_groups(*groups: LayerGroup, **changes: object) -> ModelGeometry:
    return GEOMETRY.model_copy(update={"groups": groups, **changes})


def cache(shape: ModelGeometry, *, context: int, concurrency: int = 1, ranks: int = 1) -> int:
    proof = prove(shape, context_length=context, concurrency=concurrency, ranks=ranks)
    return proof.kv_cache_bytes


FULL = LayerGroup(kind="Full", count=10, kv_heads=4, head_dim=64, value_dim=32)
SLIDING = LayerGroup(kind="Sliding", count=10, kv_heads=4, head_dim=64, value_dim=64, window=128)
LATENT = LayerGroup(kind="Latent", count=61, latent_dim=576)
STATE = LayerGroup(kind="State", count=36, state_bytes=1000)


@pytest.mark.parametrize(
    ("group", "context", "concurrency", "wanted"),
    [
        pytest.param(FULL, 1024, 2, 10 * 4 * 96 * 2 * 2048, id="keys-and-values-may-differ"),
        pytest.param(SLIDING, 100, 1, 10 * 1024 * (128 + 128), id="shorter-than-the-window"),
        pytest.param(SLIDING, 4096, 1, 10 * 1024 * (128 + 2048), id="the-window-and-one-prefill"),
        pytest.param(SLIDING, 4096, 9, 10 * 1024 * (9 * 128 + 4 * 512), id="four-prefill-at-once"),
        # DeepSeek V3: 512 + 64 numbers of 2 bytes in 61 layers: 70,272 B a token, not 3.8 MiB.
        pytest.param(LATENT, 256, 1, 70_272 * 256, id="latent"),
        pytest.param(STATE, 16, 3, 36 * 3000, id="a-state-does-not-grow"),
        pytest.param(STATE, 1_000_000, 3, 36 * 3000, id="a-state-does-not-grow-ever"),
    ],
)
def test_each_kind_of_layer(group: LayerGroup, context: int, concurrency: int, wanted: int) -> None:
    assert cache(of_groups(group), context=context, concurrency=concurrency) == wanted


def test_groups_add_up() -> None:
    alone = [cache(of_groups(group), context=2000) for group in (FULL, SLIDING, LATENT, STATE)]
    assert cache(of_groups(FULL, SLIDING, LATENT, STATE), context=2000) == sum(alone)


def test_ranks_share_heads_but_not_latent_vectors() -> None:
    assert cache(of_groups(FULL), context=256, ranks=2) * 2 == cache(of_groups(FULL), context=256)
    assert cache(of_groups(LATENT), context=256, ranks=2) == cache(of_groups(LATENT), context=256)


def test_ranks_share_weights_except_replicated_ones() -> None:
    shape = GEOMETRY.model_copy(update={"weights_bytes": 1000, "replicated_bytes": 100})
    proof = prove(shape, context_length=256, concurrency=1, ranks=4)
    assert proof.weights_bytes == 900 // 4 + 100


def test_a_person_may_say_more_or_less() -> None:
    proof = prove(GEOMETRY, context_length=256, concurrency=1, override_bytes=7)
    assert (proof.total_bytes, proof.overridden) == (7, True)
    assert proof.sum_bytes == prove(GEOMETRY, context_length=256, concurrency=1).total_bytes


def test_prefill_counts_activations_and_unfused_attention_scores() -> None:
    shape = of_groups(FULL, hidden_size=512, ffn_size=2048, heads=8)
    fused = prove(shape, context_length=4096, concurrency=8)
    logits = 2 * 8 * 32_000 * 4
    assert fused.activation_bytes == 2048 * (6 * 512 + 4 * 2048) * 2 + logits
    plain = shape.model_copy(update={"is_attention_fused": False})
    more = prove(plain, context_length=4096, concurrency=8)
    scores = 2 * 8 * 2048 * 4096 * 2
    assert more.activation_bytes - fused.activation_bytes == scores
    near = plain.model_copy(update={"groups": (SLIDING,)})
    least = prove(near, context_length=4096, concurrency=8)
    assert least.activation_bytes - fused.activation_bytes == 2 * 8 * 2048 * (128 + 512) * 2


SMALL = GEOMETRY.model_copy(update={"weights_bytes": GIB // 2, "layers": 4})
WIDE = FULL.model_copy(update={"count": 16, "kv_heads": 8, "value_dim": 64})
NARROW = SLIDING.model_copy(update={"count": 4, "kv_heads": 8})


def extra(extras: ProofExtras, shape: ModelGeometry = GEOMETRY) -> MemoryProof:
    return prove(shape, context_length=1024, concurrency=2, extras=extras)


def test_bits_make_the_cache_smaller_and_unpack_one_layer() -> None:
    shape = of_groups(WIDE, NARROW, hidden_size=512, heads=8)
    plain, packed = extra(ProofExtras(), shape), extra(ProofExtras(kv_bits=8), shape)
    tokens, window = 2048, 4 * 8 * 128 * 2 * (2 * 128 + 2 * (1024 - 128))
    assert plain.kv_cache_bytes == 16 * 8 * 128 * 2 * tokens + window
    # 64 numbers in 64 bytes, a scale and a bias of 2 bytes: 1.06 bytes a number (spec/facts.md 4.4).
    assert packed.kv_cache_bytes == 16 * 8 * 2 * (64 + 4) * tokens + window
    four = extra(ProofExtras(kv_bits=4), shape)
    assert four.kv_cache_bytes == 16 * 8 * 2 * (32 + 4) * tokens + window
    assert packed.activation_bytes - plain.activation_bytes == 8 * 128 * 2 * tokens
    # Heads of 96 numbers are packed by 32.
    of_96 = of_groups(WIDE.model_copy(update={"head_dim": 96, "value_dim": 96}))
    assert extra(ProofExtras(kv_bits=4), of_96).kv_cache_bytes == 16 * 8 * 2 * (48 + 12) * tokens


def test_a_window_bounds_the_cache_and_holds_what_is_being_read() -> None:
    shape = of_groups(WIDE, prefill_batch=1)
    proof = prove(shape, context_length=8192, concurrency=4, extras=ProofExtras(kv_window=1000))
    assert proof.kv_cache_bytes == 16 * 8 * 128 * 2 * (4 * 1000 + 512)


def test_a_draft_model_counts_with_its_cache_and_its_tokens_are_read_at_once() -> None:
    shape = GEOMETRY.model_copy(update={"hidden_size": 512, "ffn_size": 1024, "heads": 8})
    plain, proof = (
        extra(e, shape) for e in (ProofExtras(), ProofExtras(draft=SMALL, draft_tokens=3))
    )
    cache_of_draft = 4 * 8 * 128 * 2 * 2 * 1280  # 1,027 tokens, in steps of 256
    assert proof.draft_bytes == GIB // 2 + cache_of_draft + 512 * 32_000 * 4
    assert proof.kv_cache_bytes == plain.kv_cache_bytes * 1280 // 1024
    # Logits of a row for each guess and one for the token after them.
    assert proof.activation_bytes - plain.activation_bytes == 2 * 2 * 3 * 32_000 * 4
    parts = (proof.weights_bytes, proof.kv_cache_bytes, proof.activation_bytes, proof.draft_bytes)
    assert proof.total_bytes == proof.sum_bytes == proof.overhead_bytes + sum(parts)


def test_tokens_of_all_requests_replace_full_contexts() -> None:
    def proof_for(concurrency: int, tokens: int | None = None) -> MemoryProof:
        wanted = deployment(concurrency=concurrency, kv_cache=KvCache(tokens=tokens))
        return memory_proof.proof_of(request_for(wanted), node("a"))

    shared = proof_for(16, 4096)
    assert shared.kv_cache_bytes == proof_for(4).kv_cache_bytes
    # Never more than all of them can have.
    assert proof_for(2, 4096).kv_cache_bytes == proof_for(2).kv_cache_bytes
    spec = deployment(concurrency=16, kv_cache=KvCache(tokens=4096)).spec
    assert "for 4096 tokens of 16 requests, " in memory_proof.describe_proof(shared, spec)


shapes = st.builds(
    of_groups,
    st.sampled_from([FULL, SLIDING, LATENT, STATE]),
    st.sampled_from([FULL, SLIDING, LATENT, STATE]),
    hidden_size=st.sampled_from([0, 512]),
    heads=st.just(8),
    is_attention_fused=st.booleans(),
)


@given(shapes, st.integers(16, 100_000), st.integers(1, 32), st.integers(1, 8))
def test_more_ranks_never_need_more_each(
    shape: ModelGeometry, context: int, concurrency: int, ranks: int
) -> None:
    def total(number: int) -> int:
        found = prove(shape, context_length=context, concurrency=concurrency, ranks=number)
        return found.total_bytes

    assert total(ranks + 1) <= total(ranks)


CENTI = GIB // 100
MINE = replica(0).replica


def rank(peak_bytes: int) -> RankStatus:
    return RankStatus(replica_uid=MINE.metadata.uid, node="a", peak_bytes=peak_bytes)


def of(peak_bytes: int, *, memory: MemoryProof = PROOF, old: Status | None = None) -> Status:
    view = replica(0, memory=memory)
    return replica_status(view, [rank(peak_bytes)], old=old, now=NOW)


@pytest.mark.parametrize(
    ("peak", "shown", "is_corrected"),
    [
        (0, "", False),
        (80 * CENTI, "20 % less than proven: the proof counts, because caches may not be full yet", False),
        (86 * CENTI, "as proven", False),
        (115 * CENTI, "as proven", False),
        (120 * CENTI, "20 % more than proven: the measured value counts", True),
    ],
)  # fmt: skip
def test_the_comparison_with_a_peak(peak: int, shown: str, *, is_corrected: bool) -> None:
    assert memory_proof.compare_with_peak(PROOF, peak) == shown
    types = {condition.type for condition in of(peak).conditions}
    assert ("ProofCorrected" in types) is is_corrected


def test_the_message_of_a_correction() -> None:
    *truth, message = condition_of(of(5 * GIB // 4), "ProofCorrected")
    assert truth == ["True", "MeasuredMore"]
    assert message == (
        "qwen-0 used 1.2 GiB on a, 25 % more than the 1.0 GiB of its memory proof. a counts 1.2 GiB "
        "for it from now on; set spec.resources.memory to 2Gi, so that new replicas are placed "
        "with that too"
    )
    status = of(3 * GIB, memory=PROOF.model_copy(update={"override_bytes": 2 * GIB}))
    _, _, message = condition_of(status, "ProofCorrected")
    assert "50 % more than the 2.0 GiB of spec.resources.memory. " in message


def test_advice_about_memory_comes_from_the_proof() -> None:
    """Not from the peak of an engine that ended while it loaded: a replica with that size would end, too."""
    small = prove(GEOMETRY, context_length=4096, concurrency=4, override_bytes=100 * 2**20)
    total = prove(GEOMETRY, context_length=4096, concurrency=4).total_bytes
    ended = condition("Ready", "ModelUnusable", "it ended", holds=False)
    report = rank(768 * 2**20).model_copy(update={"conditions": (ended,)})
    view = replica(0, memory=small, is_ready=False)
    status = replica_status(view, [report], old=None, now=NOW)
    assert [condition.type for condition in status.conditions] == ["Ready"]
    advised = f"{-(-total // GIB)}Gi"
    assert status.conditions[0].message == (
        f"spec.resources.memory is 100 MiB, less than the weights ({show(GEOMETRY.weights_bytes)}), and the "
        f"memory proof says {show(total)}: remove it, or set {advised}; it ended"
    )
    enough = prove(GEOMETRY, context_length=4096, concurrency=4, override_bytes=parse(advised))
    assert memory_proof.override_shortfall(enough) == ""
    # A ready replica: what it was measured to use counts, and never less than the proof.
    served = memory_proof.proof_corrections(replica(0, memory=small).replica, [rank(768 * 2**20)])
    assert f"set spec.resources.memory to {advised}" in served


async def test_a_correction_is_recorded_once_per_step() -> None:
    statuses: list[Status] = [of(0)]
    for peak in (GIB, 2 * GIB, 2 * GIB, 3 * GIB, 0):
        statuses.append(of(peak, old=statuses[-1]))
    events = await replica_events(statuses[1:], old=statuses[0])
    assert {(e.type, e.reason, e.about.kind, e.about.uid, e.count) for e in events} == {
        ("Warning", "ProofCorrected", "ModelDeployment", "uid-qwen", 1)
    }
    assert sorted(e.message[:22] for e in events) == [f"qwen-0 used {n}.0 GiB on" for n in (2, 3)]


def test_bits_save_memory_for_a_single_request_and_count_with_shared_tokens() -> None:
    sizes = {"hidden_size": 3584, "ffn_size": 18_944, "heads": 28}
    shape = geometry(layers=28, kv_heads=4, vocab=152_064, **sizes)

    def need(concurrency: int, *, bits: int | None, tokens: int | None = None) -> int:
        extras = ProofExtras(kv_bits=bits, kv_tokens=tokens)
        found = prove(shape, context_length=32_768, concurrency=concurrency, extras=extras)
        return found.kv_cache_bytes + found.activation_bytes

    for concurrency in (1, 2, 8):
        plain, packed = (need(concurrency, bits=bits) for bits in (None, 4))
        assert packed < 0.6 * plain
    # One layer of sixteen bits is unpacked for the tokens that requests have together.
    assert need(8, bits=4, tokens=65_536) - need(2, bits=4) < 8 * 2 * 4 * 152_064


def test_images_need_memory_by_their_pixels_and_their_number() -> None:
    sizes = {"hidden_size": 1536, "ffn_size": 8960, "heads": 12}
    shape = geometry(layers=28, kv_heads=2, vocab=151_936, **sizes)

    def need(vision: Vision | None) -> int:
        extras = ProofExtras(vision=vision)
        return prove(shape, context_length=4096, concurrency=2, extras=extras).activation_bytes

    text, one = need(None), need(Vision(max_images=1))
    decoding, embeddings = 192 << 20, 2 * 4096 * 1536 * 2
    each = one - text - decoding - embeddings
    assert each > 0
    four = need(Vision(max_images=4))
    assert four - one == 3 * each
    assert need(Vision(max_images=4, max_pixels=100_000)) < four


def test_the_tower_of_a_model_decides_how_much_memory_images_need() -> None:
    """A tower of one size sees it whatever the limit says; rows for more layers are kept as long as the embeddings."""

    def need(tower: VisionTower | None, max_pixels: int = 100_000) -> int:
        shape = geometry(layers=28, kv_heads=2, vocab=151_936, hidden_size=1536).model_copy(
            update={"vision": tower}
        )
        extras = ProofExtras(vision=Vision(max_images=1, max_pixels=max_pixels))
        return prove(shape, context_length=4096, concurrency=2, extras=extras).activation_bytes

    usual = VisionTower(patch=14, width=1280, ffn=5120, heads=16)
    assert need(None) == need(usual)
    assert need(usual.model_copy(update={"width": 2560})) > need(usual)
    assert need(usual.model_copy(update={"patch": 28})) < need(usual)
    kept = 2 * 4096 * 1536 * 2
    assert need(usual.model_copy(update={"added_rows": 3})) == need(usual) + 3 * kept
    square = usual.model_copy(update={"side": 896})
    assert need(square) == need(square, 602_112) > need(usual, 602_112)
