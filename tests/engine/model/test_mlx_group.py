"""Splits of a model over ranks: a group of one, layers of each rank, and refused splits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.gauges import Gauges
from models import model_files
from tests.support.engine_batches import PROMPTS, drain, job, load, new_batch
from tests.support.mlx_models import BASE, build, module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]
NINE = {**BASE, "hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}


class Group:
    """The part of mx.distributed.Group that a split uses."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def split(model: Any, group: Any, parallelism: str, *layers: int) -> Any:
    mlx_group = module("engine.model.mlx_group")
    how = mlx_group.ModelSplit(group=group, parallelism=parallelism, layers=layers)
    mlx_group.split_model(model, how)
    return model


def test_a_group_of_one_has_all_of_the_model(tiny: Path) -> None:
    loader, mlx_group = (module(f"engine.model.{name}") for name in ("loader", "mlx_group"))
    gauges, facts = Gauges(), model_files.inspect_model(tiny)
    how = mlx_group.ModelSplit(group=module("mlx.core").distributed.init())
    whole = loader.load(
        tiny, facts, gauges, is_stopping=lambda: False, options=loader.LoadOptions(split=how)
    )
    assert gauges.loaded_bytes == facts.weight_bytes
    made = []
    for loaded in (whole, load(tiny)):
        batch = new_batch(loaded, tiny)
        batch.add(job(0, PROMPTS[1]))
        made.append(drain(batch)[0])
    assert made[0] == made[1]


def test_each_rank_has_its_layers() -> None:
    config = {**BASE, "model_type": "qwen2", "num_hidden_layers": 5}
    models = [split(build(config), Group(rank, 3), "Pipeline", 1, 3, 1) for rank in range(3)]
    assert [len(model.layers) for model in models] == [1, 3, 1]
    # Rank 0 has the last layers; without an explicit split the first ranks have one more.
    assert [model.model.start_idx for model in models] == [4, 1, 0]
    assert len(split(build(config), Group(0, 3), "Pipeline").layers) == 2


@pytest.mark.parametrize(
    ("config", "group", "how", "error"),
    [
        (BASE, Group(0, 2), ("Pipeline", 2, 2), "llama cannot be split over 2 Macs by Pipeline"),
        (BASE, Group(0, 2), ("Pipeline",), "parallelism Tensor works"),
        (
            {**BASE, "model_type": "qwen2"},
            Group(0, 2),
            ("Pipeline", 2, 3),
            "the split 2,3 does not divide 4 layers among 2 ranks",
        ),
    ],
)
def test_an_unsupported_split_is_refused(
    config: dict[str, Any], group: Group, how: tuple[Any, ...], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        split(build(config), group, *how)


def test_a_type_that_cannot_be_split_is_refused() -> None:
    odd = SimpleNamespace(model_type="gemma", model=SimpleNamespace())
    with pytest.raises(
        ValueError, match=r"type gemma cannot be split over 2 Macs.*run it on one Mac"
    ):
        split(odd, Group(0, 2), "Tensor")


@pytest.mark.parametrize(
    ("heads", "shared", "size", "error"),
    [
        (9, 4, 2, "is 9, which 2 ranks cannot share"),
        (9, 3, 3, ""),
        (2, 1, 4, ""),  # repeated, as qwen3_5 does it
        (2, 0, 4, "is 2, which 4 ranks cannot share"),
        (3, 1, 4, "is 3, which 4 ranks cannot share"),
        (4, 4, 2, ""),  # not split at all
    ],
)
def test_heads_are_shared_or_refused(heads: int, shared: int, size: int, error: str) -> None:
    """Check heads: mlx-lm divides them without a check, and then computes wrong answers or fails."""
    nn = module("mlx.nn")

    class Attention(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.n_kv_heads = heads

    layer = Attention()

    def shard(_: Group) -> None:
        layer.n_kv_heads = shared

    model = SimpleNamespace(layers=[layer], shard=shard)
    if not error:
        split(model, Group(0, size), "Tensor")
        return
    with pytest.raises(ValueError, match=error):
        split(model, Group(0, size), "Tensor")
