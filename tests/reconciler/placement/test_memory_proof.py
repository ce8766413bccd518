"""The memory proof: every kind of layer by hand, properties of all, and the comparison with an engine's peak."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.deployments.events import DeploymentEvents
from reconciler.deployments.status import replica_status
from reconciler.listers.caches import make_caches
from reconciler.listers.lister import Lister
from reconciler.placement import memory_proof
from reconciler.placement.memory_proof import ProofExtras, prove
from schemas.event import Event
from schemas.meta import Condition, ConditionStatus, Status, find_condition
from schemas.node import LayerGroup, ModelGeometry
from schemas.quantity import parse, show
from schemas.replica import MemoryProof, RankStatus
from schemas.vision import Vision
from store import objects
from store.events import EventRecorder
from store.memory import MemoryTransport
from tests.support.clock import FakeClock
from tests.support.world import GEOMETRY, GIB, NOW, PROOF, deployment, observed, replica


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
    condition = find_condition(of(peak).conditions, "ProofCorrected")
    assert (condition is not None) is is_corrected


def test_the_message_of_a_correction() -> None:
    condition = find_condition(of(5 * GIB // 4).conditions, "ProofCorrected")
    assert condition is not None
    assert (condition.status, condition.reason) == (ConditionStatus.TRUE, "MeasuredMore")
    assert condition.message == (
        "qwen-0 used 1.2 GiB on a, 25 % more than the 1.0 GiB of its memory proof. a counts 1.2 GiB "
        "for it from now on; set spec.resources.memory to 2Gi, so that new replicas are placed "
        "with that too"
    )
    said = of(3 * GIB, memory=PROOF.model_copy(update={"override_bytes": 2 * GIB}))
    condition = find_condition(said.conditions, "ProofCorrected")
    assert condition is not None
    assert "50 % more than the 2.0 GiB of spec.resources.memory. " in condition.message


def test_advice_about_memory_comes_from_the_proof() -> None:
    """Not from the peak of an engine that ended while it loaded: a replica with that size would end, too."""
    small = prove(GEOMETRY, context_length=4096, concurrency=4, override_bytes=100 * 2**20)
    total = prove(GEOMETRY, context_length=4096, concurrency=4).total_bytes
    ended = Condition(
        type="Ready", status=ConditionStatus.FALSE, reason="ModelUnusable", message="it ended"
    )
    report = rank(768 * 2**20).model_copy(update={"conditions": (ended,)})
    view = replica(0, memory=small, is_ready=False)
    status = replica_status(view, [report], old=None, now=NOW)
    assert [condition.type for condition in status.conditions] == ["Ready"]
    advised = f"{-(-total // GIB)}Gi"
    assert status.conditions[0].message == (
        f"it ended. spec.resources.memory is 100 MiB, less than the weights ({show(GEOMETRY.weights_bytes)}), and the "
        f"memory proof says {show(total)}: remove it, or set {advised}"
    )
    enough = prove(GEOMETRY, context_length=4096, concurrency=4, override_bytes=parse(advised))
    assert memory_proof.override_shortfall(enough) == ""
    # A ready replica: what it was measured to use counts, and never less than the proof.
    served = memory_proof.proof_corrections(replica(0, memory=small).replica, [rank(768 * 2**20)])
    assert f"set spec.resources.memory to {advised}" in served


async def test_a_correction_is_recorded_once_per_step() -> None:
    clock = FakeClock()
    transport = MemoryTransport(clock)
    recorder = EventRecorder(transport, clock, source="reconciler")
    teller, view = (
        DeploymentEvents(Lister(make_caches(transport, clock)), recorder),
        observed(deployment()),
    )
    old: Status = of(0, old=None)
    for peak in (GIB, 2 * GIB, 2 * GIB, 3 * GIB, 0):
        new = of(peak, old=old)
        await teller.record_replica_status(replica(0), view, old, new)
        old = new
    events = [event.spec for event in await objects.list_all(transport, Event)]
    assert {(e.type, e.reason, e.about.kind, e.about.uid, e.count) for e in events} == {
        ("Warning", "ProofCorrected", "ModelDeployment", "uid-qwen", 1)
    }
    assert sorted(e.message[:22] for e in events) == [f"qwen-0 used {n}.0 GiB on" for n in (2, 3)]


def test_bits_save_memory_for_a_single_request_and_count_with_shared_tokens() -> None:
    shape = geometry(layers=28, kv_heads=4, vocab=152_064).model_copy(
        update={"hidden_size": 3584, "ffn_size": 18_944, "heads": 28, "is_attention_fused": True}
    )

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
    shape = geometry(layers=28, kv_heads=2, vocab=151_936).model_copy(
        update={"hidden_size": 1536, "ffn_size": 8960, "heads": 12, "is_attention_fused": True}
    )

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
