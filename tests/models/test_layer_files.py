"""The weight files of each rank of a Pipeline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.layer_files import layer_of, layer_spans, rank_files

OUTSIDE = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
PREFIXES = ("model", "language_model.model", "model.language_model")


@st.composite
def split_models(draw: st.DrawFn) -> tuple[dict[str, str], tuple[int, ...]]:
    """Return the files of a model's tensors in any order, and the number of layers of each rank."""
    layers = tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=5)))
    prefix = draw(st.sampled_from(PREFIXES))
    beyond = draw(st.integers(0, 2))
    names = [
        f"{prefix}.layers.{layer}.{part}"
        for layer in range(sum(layers) + beyond)
        for part in ("self_attn.q_proj.weight", "mlp.up_proj.scales")
    ]
    files = st.integers(1, 8).map(lambda number: f"model-{number:05d}-of-00008.safetensors")
    return {name: draw(files) for name in (*names, *OUTSIDE)}, layers


@given(split_models())
def test_each_rank_gets_the_files_of_its_layers_and_of_what_is_outside(
    model: tuple[dict[str, str], tuple[int, ...]],
) -> None:
    weight_map, layers = model
    spans = layer_spans(layers)
    for rank, (start, stop) in enumerate(spans):
        found = rank_files(weight_map, layers, rank)
        own = {
            file
            for name, file in weight_map.items()
            if (layer := layer_of(name)) is None or start <= layer < stop
        }
        assert found == own
    # Together they have every tensor of the model but those beyond its last layer.
    together = {
        file for rank in range(len(layers)) for file in rank_files(weight_map, layers, rank)
    }
    inside = {name for name in weight_map if (layer_of(name) or 0) < sum(layers)}
    assert together == {weight_map[name] for name in inside}


@given(split_models())
def test_order_of_the_map_changes_nothing(model: tuple[dict[str, str], tuple[int, ...]]) -> None:
    weight_map, layers = model
    turned = dict(reversed(weight_map.items()))
    assert rank_files(turned, layers, 0) == rank_files(weight_map, layers, 0)


def test_names_that_do_not_show_all_layers_need_every_file() -> None:
    unknown = {f"h.{layer}.attn.weight": f"{layer}" for layer in range(4)}
    assert rank_files(unknown, (2, 2), 0) == {"0", "1", "2", "3"}
    lacking = {f"model.layers.{layer}.x": f"{layer}" for layer in (0, 1, 3)}
    assert rank_files(lacking, (2, 2), 1) == {"0", "1", "3"}


@pytest.mark.parametrize(("name", "layer"), [
    ("model.layers.7.mlp.gate.weight", 7),
    ("layers.0.attention.wq.weight", 0),
    ("language_model.model.layers.12.input_layernorm.weight", 12),
    ("vision_tower.encoder.layers.3.mlp.weight", None),
    ("mtp.layers.0.weight", None),
    ("model.embed_tokens.weight", None),
    ("model.layers.x.weight", None),
    ("model.layers.1234567.weight", None),
])  # fmt: skip
def test_only_decoder_layers_have_a_number(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer
