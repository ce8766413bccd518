"""The memory proof's formula: one function for the placement proof and for the engine's admission."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.interface import KvOptions
from models import footprint, model_files
from models.footprint import KvFootprint, ServingLoad
from reconciler.placement import memory_proof
from reconciler.placement.memory_proof import ProofExtras
from schemas.node import LayerGroup, ModelGeometry
from tests.support.mlx_models import Late
from tests.support.sampling import samples

allocation: Any = Late("engine.memory.allocation")

GEOMETRY = ModelGeometry(
    model_type="llama",
    weights_bytes=1000,
    layers=2,
    kv_heads=2,
    head_dim=16,
    kv_element_bytes=2,
    vocab_size=64,
    max_context=4096,
    hidden_size=64,
    ffn_size=128,
    heads=4,
)

groups = st.one_of(
    st.builds(LayerGroup, kind=st.just("Full"), count=st.just(2), kv_heads=st.just(2)),
    st.builds(LayerGroup, kind=st.just("Sliding"), count=st.just(2), window=st.integers(1, 5000)),
    st.builds(LayerGroup, kind=st.just("Latent"), count=st.just(2), latent_dim=st.just(64)),
    st.builds(LayerGroup, kind=st.just("State"), count=st.just(2), state_bytes=st.just(640)),
)
geometries = st.builds(
    lambda **fields: GEOMETRY.model_copy(update=fields),
    kv_element_bytes=st.sampled_from((2, 4)),
    vocab_size=st.integers(1, 200_000),
    groups=st.lists(groups, min_size=1, max_size=3).map(tuple),
    hidden_size=st.integers(0, 8192),
    ffn_size=st.integers(0, 32_768),
    heads=st.integers(1, 64),
    prefill_batch=st.just(1),
    prefill_step=st.sampled_from((256, 512, 2048)),
    is_attention_fused=st.booleans(),
)
loads = st.builds(
    ServingLoad,
    context_length=st.integers(1, 40_000),
    concurrency=st.integers(1, 32),
    ranks=st.integers(1, 4),
    kv_tokens=st.none() | st.integers(1, 200_000),
    kv_bits=st.none() | st.just(4),
    kv_window=st.none() | st.integers(16, 4096),
    draft_tokens=st.integers(0, 8),
)


@settings(max_examples=samples(50))
@given(geometries, loads)
def test_the_placement_proof_uses_the_formula(geometry: ModelGeometry, load: ServingLoad) -> None:
    proof = memory_proof.prove(
        geometry,
        context_length=load.context_length,
        concurrency=load.concurrency,
        ranks=load.ranks,
        extras=ProofExtras(
            kv_tokens=load.kv_tokens,
            kv_bits=load.kv_bits,
            kv_window=load.kv_window,
            draft_tokens=load.draft_tokens,
        ),
    )
    assert proof.activation_bytes == footprint.activation_bytes(geometry, load)
    kept = footprint.kept_bytes(geometry, load, by_token=False) if load.draft_tokens else 0
    assert proof.kv_cache_bytes == footprint.cache_bytes(geometry, load) + kept


@pytest.mark.mlx
@settings(max_examples=samples(50))
@given(geometries, loads)
def test_admission_uses_the_formula(geometry: ModelGeometry, load: ServingLoad) -> None:
    measured = KvFootprint(token_bytes=8, windows=((64, 4),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_files, "model_geometry", lambda *_, **__: geometry)
        patch.setattr("engine.cache.layer_caches.measure_footprint", lambda *_: measured)
        _, activations = allocation._measure_needs(None, None, KvOptions(), load)
    expected = footprint.activation_bytes(geometry, load)
    assert activations == expected + measured.reading_bytes(geometry.prefill_step)


@settings(max_examples=samples(50))
@given(geometries, loads, st.integers(1, 8))
def test_more_requests_never_take_less(
    geometry: ModelGeometry, load: ServingLoad, more: int
) -> None:
    larger = ServingLoad(
        context_length=load.context_length,
        concurrency=load.concurrency + more,
        ranks=load.ranks,
        kv_tokens=load.kv_tokens,
        kv_bits=load.kv_bits,
        kv_window=load.kv_window,
        draft_tokens=load.draft_tokens,
    )
    assert footprint.cache_bytes(geometry, larger) >= footprint.cache_bytes(geometry, load)
    assert footprint.activation_bytes(geometry, larger) >= footprint.activation_bytes(
        geometry, load
    )
