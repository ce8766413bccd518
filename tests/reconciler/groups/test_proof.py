"""A rank's proof: shares and runs of layers, against the proof of the whole."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.groups.model_split import RankLoad, deal_layers, layer_spans, prove_rank
from reconciler.placement.memory_proof import ProofExtras, prove
from schemas.node import ModelGeometry
from tests.support.examples import few
from tests.support.reconciler_group_models import MIXED_LAYERS, SMOL, mixed, piped

LOAD = RankLoad(context_length=512, concurrency=2)


def test_a_share_weighs_what_mlx_lm_made_of_it() -> None:
    proof = prove_rank(SMOL, LOAD, size=3, layers=None)
    assert proof.weights_bytes == 254_944_512
    whole = prove(SMOL, context_length=512, concurrency=2)
    assert proof.kv_cache_bytes * 3 == whole.kv_cache_bytes
    # Nobody said what a share of this size weighs: what the tensors' names let expect.
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


def test_layers_of_other_kinds_keep_what_theirs_do() -> None:
    known, unknown = mixed(), mixed(is_order_known=False)
    whole = prove(known, context_length=512, concurrency=2).kv_cache_bytes
    full, state = 2 * (16 + 16) * 2 * 512 * 2, 1000 * 2
    for at, kind in enumerate(MIXED_LAYERS):
        one = (at, at + 1)
        assert prove_rank(known, LOAD, size=2, layers=one).kv_cache_bytes == (state, full)[kind]
        assert prove_rank(unknown, LOAD, size=2, layers=one).kv_cache_bytes == full
    assert prove_rank(known, LOAD, size=2, layers=(0, 12)).kv_cache_bytes == whole


def test_who_was_not_weighed_layer_by_layer_counts_as_whole() -> None:
    whole = prove(SMOL, context_length=512, concurrency=2)
    assert prove_rank(SMOL, LOAD, size=2, layers=(0, 15)) == whole


def test_what_a_person_says_counts_for_every_rank() -> None:
    load = RankLoad(context_length=512, concurrency=2, override_bytes=1000)
    assert prove_rank(piped(), load, size=2, layers=(0, 1)).total_bytes == 1000
    assert prove_rank(piped(), load, size=2, layers=None).total_bytes == 1000
    assert deal_layers(piped(), load, (1000, 1000), (1, 1)) == (1, 3)
    assert deal_layers(piped(), load, (1000, 999), (1, 1)) is None


def test_a_model_that_has_no_pipeline_is_not_dealt_out() -> None:
    assert deal_layers(SMOL, LOAD, (2**40, 2**40), (1, 1)) is None


rooms = st.lists(st.integers(0, 3 * 2**20), min_size=2, max_size=4)


@settings(max_examples=few(200))
@given(
    geometry=st.sampled_from([piped(layers=(90_000, 120_000, 30_000) * 4), mixed()]),
    spare=rooms,
    window=st.none() | st.just(64),
    prefix=st.integers(0, 100_000),
)
def test_what_is_dealt_out_fits_rank_by_rank(
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
