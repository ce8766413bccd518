"""Keeps one rank's part of a model: the seam for replicas of several Macs. In the worker's thread alone.

As `mlx_lm.utils.sharded_load` does it, on a model whose weights are lazy: what belongs to other ranks is never read.
Nothing is sent here, and nobody is waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.shardgroup import Parallelism

# How modules of mlx-lm call their numbers of heads, which they divide without looking.
_HEADS = ("n_heads", "n_kv_heads", "num_heads", "num_key_value_heads", "num_attention_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a model is split."""

    group: Any
    """An mx.distributed.Group: the ranks that share it."""
    parallelism: Parallelism = "Tensor"
    layers: tuple[int, ...] = ()
    """How many layers each rank has, in rank order; rank 0 has the last ones. () splits them evenly."""


def split(model: Any, how: Split) -> None:
    """Leave in the model what this rank of the group computes.

    Each rank needs all weight files on its disk. To be done before caches are made, and before the weights are read.

    Raises:
        ValueError: the type cannot be split like that, or its sizes cannot be divided by the group's.

    """
    by_layers = getattr(getattr(model, "model", None), "pipeline", None)
    ways = [
        name
        for name, way in (("Tensor", getattr(model, "shard", None)), ("Pipeline", by_layers))
        if way is not None
    ]
    size = how.group.size()
    if how.parallelism not in ways:
        instead = f"parallelism {ways[0]} works" if ways else "give it one Mac that has room for it"
        raise ValueError(
            f"model type {getattr(model, 'model_type', '')} cannot be split over {size} Macs by "
            f"{how.parallelism} in mlx-lm; {instead}"
        )
    if how.parallelism == "Tensor":
        _check_heads(model, size)
        model.shard(how.group)
    elif by_layers is not None:
        by_layers(how.group, split=_counts(model, how.layers, size))


def _check_heads(model: Any, size: int) -> None:
    """Refuse what mlx-lm would load, and fail at the first token with."""
    for layer in model.layers:
        attention = getattr(layer, "self_attn", None)
        for name in _HEADS:
            heads = getattr(attention, name, size)
            # Some types repeat KV heads of which there are fewer than ranks.
            if heads % size and not ("kv" in name and heads < size):
                raise ValueError(
                    f"{heads} ({name}) cannot be divided among {size} ranks; choose a number of Macs that "
                    "divides it, or parallelism Pipeline where the type has it"
                )


def _counts(model: Any, layers: Sequence[int], size: int) -> list[int]:
    """Return how many layers each rank has; evenly as mlx-lm does it, the first ranks one more."""
    count = len(model.layers)
    if not layers:
        each, more = divmod(count, size)
        layers = [each + (rank < more) for rank in range(size)]
    if len(layers) != size or sum(layers) != count or min(layers) < 1:
        raise ValueError(
            f"the split {','.join(map(str, layers))} does not give each of {size} ranks a part of {count} layers"
        )
    return list(layers)
