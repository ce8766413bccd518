"""Which sizes and modes a model can be split by, and what is said of the others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciler.groups import model_split
from schemas.node import ModelGeometry, SplitOptions
from schemas.shardgroup import MOST_RANKS, Parallelism
from tests.support.examples import few
from tests.support.reconciler_group_models import SMOL, piped


def split_as(splitting: SplitOptions | None) -> ModelGeometry:
    return SMOL.model_copy(update={"splitting": splitting})


ROWS: list[tuple[ModelGeometry, Parallelism, int, str]] = [
    (SMOL, "Tensor", 3, ""),
    (SMOL, "Tensor", 2, "llama, 9 heads, 3 KV heads: Tensor works with 3, not 2"),
    (
        SMOL,
        "Pipeline",
        3,
        "llama, 9 heads, 3 KV heads: mlx-lm has no Pipeline for it; Tensor works with 3",
    ),
    (
        SMOL,
        "Pipeline",
        2,
        "llama, 9 heads, 3 KV heads: mlx-lm has no Pipeline for it; Tensor works with 3, not 2",
    ),
    (piped(), "Pipeline", 4, ""),
    (
        piped(),
        "Pipeline",
        5,
        "qwen2, 4 heads, 2 KV heads: Pipeline works with 2 to 4, not 5",
    ),
    (
        piped(),
        "Tensor",
        3,
        "qwen2, 4 heads, 2 KV heads: Tensor works with 2, not 3; Pipeline works with 3",
    ),
    (
        split_as(SplitOptions(basis="gemma3")),
        "Tensor",
        2,
        "gemma3: mlx-lm can split it neither by Tensor nor by Pipeline; run it on one Mac, or take another model",
    ),
    (
        split_as(None),
        "Tensor",
        3,
        "nobody has looked yet over how many Macs this llama model can be split; the agent of a Mac that has its "
        "folder does so, within a minute",
    ),
    (
        split_as(SplitOptions(unknown="ValueError: no rope", tensor=(3,))),
        "Tensor",
        3,
        "over how many Macs this llama model can be split could not be found out: ValueError: no rope; where this "
        "was mended, the agent looks again",
    ),
]


@pytest.mark.parametrize(("geometry", "way", "size", "words"), ROWS)
def test_a_refusal_names_the_nearest_thing_that_works(
    geometry: ModelGeometry, way: Parallelism, size: int, words: str
) -> None:
    assert model_split.unsupported_reason(geometry, way, size) == words


def test_tensor_comes_first() -> None:
    assert model_split.supported_ways(piped(), 2) == ("Tensor", "Pipeline")
    assert model_split.supported_ways(piped(), 3) == ("Pipeline",)
    assert model_split.supported_ways(SMOL, 2) == ()


splittings = st.builds(
    SplitOptions,
    tensor=st.sets(st.integers(2, MOST_RANKS)).map(sorted).map(tuple),
    is_pipelined=st.booleans(),
    layer_bytes=st.lists(st.just(1), max_size=40).map(tuple),
    unknown=st.sampled_from(["", "it was not done"]),
)


@settings(max_examples=few(200))
@given(splitting=splittings | st.none(), size=st.integers(2, MOST_RANKS))
def test_what_is_refused_in_words_is_no_way_and_the_other_way_round(
    splitting: SplitOptions | None, size: int
) -> None:
    geometry = split_as(splitting)
    ways = model_split.supported_ways(geometry, size)
    for way in ("Tensor", "Pipeline"):
        words = model_split.unsupported_reason(geometry, way, size)
        assert (
            (words == "") == (way in ways) == (size in model_split.supported_sizes(geometry, way))
        )
        if splitting is not None and not splitting.unknown and words:
            # Every size that is offered instead works.
            named = {
                n for w in ("Tensor", "Pipeline") for n in model_split.supported_sizes(geometry, w)
            }
            assert named or "neither" in words
