"""Splits of a model: supported sizes, layers of each rank, and the memory proof of a rank."""

from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.layer_files import layer_spans
from reconciler.groups import model_split
from reconciler.groups.model_split import (
    RankLoad,
    deal_layers,
    prove_rank,
    split_layers,
)
from reconciler.placement.memory_proof import ProofExtras, prove
from schemas.node import LayerGroup, ModelGeometry, SplitOptions
from schemas.shardgroup import MOST_RANKS, Parallelism
from tests.support.golden_cases import Golden
from tests.support.sampling import samples

# As SmolLM2-135M's agent reports it.
SMOL = ModelGeometry(
    model_type="llama", weights_bytes=538_060_032, layers=30, kv_heads=3, head_dim=64, kv_element_bytes=4,
    vocab_size=49_152, replicated_bytes=113_386_752, heads=9, hidden_size=576, ffn_size=1536,
    splitting=SplitOptions(tensor=(3,), tensor_bytes=(254_944_512,), basis="llama, 9 heads, 3 KV heads"),
)  # fmt: skip

MIXED_LAYERS = (0, 0, 0, 1) * 3


def piped(*, layers: tuple[int, ...] = (10, 20, 30, 40), rest: int = 7) -> ModelGeometry:
    """Return a model with layers of these sizes, which can be split by layers."""
    size = sum(layers) + rest
    return ModelGeometry(
        model_type="qwen2", weights_bytes=size, layers=len(layers), kv_heads=2, head_dim=16, kv_element_bytes=2,
        vocab_size=512, heads=4, hidden_size=64, ffn_size=128,
        splitting=SplitOptions(
            tensor=(2,), tensor_bytes=(size // 2 + rest,), is_pipelined=True, layer_bytes=layers, rest_bytes=rest,
            layer_groups=(0,) * len(layers), basis="qwen2, 4 heads, 2 KV heads",
        ),
    )  # fmt: skip


def mixed(*, is_order_known: bool = True) -> ModelGeometry:
    """Return a model of which every fourth layer sees everything, and the others keep a small state."""
    state = LayerGroup(kind="State", count=9, state_bytes=1000)
    full = LayerGroup(kind="Full", count=3, kv_heads=2, head_dim=16, value_dim=16)
    geometry = piped(layers=(100,) * 12)
    assert geometry.splitting is not None
    order = MIXED_LAYERS if is_order_known else ()
    splitting = geometry.splitting.model_copy(update={"layer_groups": order})
    return geometry.model_copy(update={"groups": (state, full), "splitting": splitting})


def split_as(splitting: SplitOptions | None) -> ModelGeometry:
    return SMOL.model_copy(update={"splitting": splitting})


UNKNOWN = SplitOptions(unknown="ValueError: no rope", tensor=(3,))
ROWS: list[tuple[ModelGeometry, Parallelism, int]] = [
    (SMOL, "Tensor", 3), (SMOL, "Tensor", 2), (SMOL, "Pipeline", 3), (SMOL, "Pipeline", 2),
    (piped(), "Pipeline", 4), (piped(), "Pipeline", 5), (piped(), "Tensor", 3),
    (split_as(SplitOptions(basis="gemma3")), "Tensor", 2), (split_as(None), "Tensor", 3), (split_as(UNKNOWN), "Tensor", 3),
]  # fmt: skip


def test_a_refusal_names_the_nearest_supported_size(golden: Golden) -> None:
    cases = []
    for geometry, way, size in ROWS:
        basis = "unknown" if geometry.splitting is None else geometry.splitting.basis
        reason = model_split.unsupported_reason(geometry, way, size)
        cases.append((f"{way} over {size}: {basis}", [reason or "(supported)"]))
    golden.check("reconciler/model_splits.txt", {"Ways to split a model": cases})


splittings = st.builds(
    SplitOptions,
    tensor=st.sets(st.integers(2, MOST_RANKS)).map(sorted).map(tuple),
    is_pipelined=st.booleans(),
    layer_bytes=st.lists(st.just(1), max_size=40).map(tuple),
    unknown=st.sampled_from(["", "it was not done"]),
)


@settings(max_examples=samples(200))
@given(splitting=splittings | st.none(), size=st.integers(2, MOST_RANKS))
def test_a_way_is_supported_exactly_if_it_has_no_reason_against_it(
    splitting: SplitOptions | None, size: int
) -> None:
    geometry = split_as(splitting)
    for way in ("Tensor", "Pipeline"):
        words = model_split.unsupported_reason(geometry, way, size)
        assert (words == "") == (size in model_split.supported_sizes(geometry, way))
        if splitting is not None and not splitting.unknown and words:
            # Every size that is offered instead works.
            named = {
                n for w in ("Tensor", "Pipeline") for n in model_split.supported_sizes(geometry, w)
            }
            assert named or "neither" in words


PLENTY = 10**9

# What the best of all splits does not decide: speeds that are unknown, and what cannot be.
TABLE: list[tuple[tuple[int, ...], int, tuple[int, ...], tuple[float, ...], tuple[int, ...] | None]] = [
    ((5,) * 30, 0, (PLENTY,) * 3, (1, 1, 1), (10, 10, 10)),
    ((5,) * 30, 0, (PLENTY,) * 2, (800, 0), (15, 15)),
    ((5,) * 30, 0, (PLENTY,) * 2, (), (15, 15)),
    ((5,) * 30, 10, (35, PLENTY), (800, 100), (5, 25)),
    # Rank 0 has the last layers: the heavy one here.
    ((1, 1, 1, 9), 0, (PLENTY,) * 2, (1, 1), (1, 3)),
    ((5,) * 4, 11, (10, PLENTY), (1, 1), None),
    ((), 0, (PLENTY,), (1,), None),
    ((5,), 0, (), (), None),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "fixed", "rooms", "speeds", "wanted"), TABLE)
def test_layers_are_dealt_out(
    layers: tuple[int, ...],
    fixed: int,
    rooms: tuple[int, ...],
    speeds: tuple[float, ...],
    wanted: tuple[int, ...] | None,
) -> None:
    assert split_layers(layers, fixed, rooms, speeds) == wanted


def test_spans_are_those_of_mlx_lm() -> None:
    assert layer_spans((2, 3, 1)) == ((4, 6), (1, 4), (0, 1))


def ways(layers: list[int], ranks: int) -> list[tuple[int, ...]]:
    """Return every way to deal them out, in rank order."""
    cuts = combinations(range(1, len(layers)), ranks - 1)
    return [tuple(b - a for a, b in pairwise((0, *cut, len(layers)))) for cut in cuts]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, list[int], list[float]]:
    layers = draw(st.lists(st.integers(1, 50), min_size=1, max_size=9))
    ranks = draw(st.integers(1, 5))
    rooms = draw(st.lists(st.integers(0, 200), min_size=ranks, max_size=ranks))
    speeds = draw(st.lists(st.sampled_from([100.0, 273.0, 819.0]), min_size=ranks, max_size=ranks))
    return layers, draw(st.integers(0, 40)), rooms, speeds


@settings(max_examples=samples(400))
@given(case=cases())
def test_the_split_is_the_best_of_all(case: tuple[list[int], int, list[int], list[float]]) -> None:
    layers, fixed, rooms, speeds = case

    def slowest(way: tuple[int, ...]) -> float:
        held = [sum(layers[start:stop]) for start, stop in layer_spans(way)]
        fits = all(fixed + own <= room for own, room in zip(held, rooms, strict=True))
        return max(own / pace for own, pace in zip(held, speeds, strict=True)) if fits else inf

    best = min(map(slowest, ways(layers, len(rooms))), default=inf)
    found = split_layers(layers, fixed, rooms, speeds)
    if found is None:
        assert best == inf
        return
    assert sum(found) == len(layers)
    assert min(found) >= 1
    assert sorted(layer for span in layer_spans(found) for layer in range(*span)) == list(
        range(len(layers))
    )
    assert slowest(found) == pytest.approx(best)


LOAD = RankLoad(context_length=512, concurrency=2)


def test_a_share_has_the_size_that_mlx_lm_reports() -> None:
    proof = prove_rank(SMOL, LOAD, size=3, layers=None)
    assert proof.weights_bytes == 254_944_512
    whole = prove(SMOL, context_length=512, concurrency=2)
    assert proof.kv_cache_bytes * 3 == whole.kv_cache_bytes
    # The size of this share is unknown: it is estimated from the tensors' names.
    bare = SMOL.model_copy(update={"splitting": None})
    assert prove_rank(bare, LOAD, size=3, layers=None).weights_bytes == 254_944_512


def test_a_run_of_layers_has_its_own_weights_and_caches_and_the_rest() -> None:
    geometry = piped()
    proof = prove_rank(geometry, LOAD, size=2, layers=(1, 3))
    assert proof.weights_bytes == 20 + 30 + 7
    whole = prove(geometry, context_length=512, concurrency=2)
    assert proof.kv_cache_bytes * 2 == whole.kv_cache_bytes
    assert proof.activation_bytes == whole.activation_bytes
    assert proof.overhead_bytes == whole.overhead_bytes


def test_layer_caches_depend_on_the_kind_of_layer() -> None:
    known, unknown = mixed(), mixed(is_order_known=False)
    whole = prove(known, context_length=512, concurrency=2).kv_cache_bytes
    full, state = 2 * (16 + 16) * 2 * 512 * 2, 1000 * 2
    for at, kind in enumerate(MIXED_LAYERS):
        one = (at, at + 1)
        assert prove_rank(known, LOAD, size=2, layers=one).kv_cache_bytes == (state, full)[kind]
        assert prove_rank(unknown, LOAD, size=2, layers=one).kv_cache_bytes == full
    assert prove_rank(known, LOAD, size=2, layers=(0, 12)).kv_cache_bytes == whole


def test_a_model_without_layer_sizes_counts_as_a_whole() -> None:
    whole = prove(SMOL, context_length=512, concurrency=2)
    assert prove_rank(SMOL, LOAD, size=2, layers=(0, 15)) == whole


def test_an_override_counts_for_every_rank() -> None:
    load = RankLoad(context_length=512, concurrency=2, override_bytes=1000)
    assert prove_rank(piped(), load, size=2, layers=(0, 1)).total_bytes == 1000
    assert prove_rank(piped(), load, size=2, layers=None).total_bytes == 1000
    assert deal_layers(piped(), load, (1000, 1000), (1, 1)) == (1, 3)
    assert deal_layers(piped(), load, (1000, 999), (1, 1)) is None


def test_a_model_that_has_no_pipeline_is_not_dealt_out() -> None:
    assert deal_layers(SMOL, LOAD, (2**40, 2**40), (1, 1)) is None


rooms = st.lists(st.integers(0, 3 * 2**20), min_size=2, max_size=4)


@settings(max_examples=samples(200))
@given(
    geometry=st.sampled_from([piped(layers=(90_000, 120_000, 30_000) * 4), mixed()]),
    spare=rooms,
    window=st.none() | st.just(64),
    prefix=st.integers(0, 100_000),
)
def test_dealt_layers_fit_each_rank(
    geometry: ModelGeometry, spare: list[int], window: int | None, prefix: int
) -> None:
    extras = ProofExtras(kv_window=window, prefix_cache_bytes=prefix)
    load = RankLoad(context_length=300, concurrency=3, extras=extras)
    least = prove_rank(geometry, load, size=len(spare), layers=(0, 0)).total_bytes
    room = [least + more for more in spare]
    dealt = deal_layers(geometry, load, room, [100.0] * len(room))
    if dealt is None:
        assert min(spare) < prove_rank(geometry, load, size=2, layers=(0, 12)).total_bytes - least
        return
    covered = [0, *(stop for _, stop in sorted(layer_spans(dealt)))]
    assert [b - a for a, b in pairwise(covered)] == list(reversed(dealt))
    assert covered[-1] == 12
    for span, limit in zip(layer_spans(dealt), room, strict=True):
        assert prove_rank(geometry, load, size=len(room), layers=span).total_bytes <= limit
