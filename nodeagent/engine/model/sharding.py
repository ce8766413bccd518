"""Keeps one rank's part of a model: the seam for replicas of several Macs. In the worker's thread alone.

As `mlx_lm.utils.sharded_load` does it, on a model whose weights are lazy: what belongs to other ranks is never read.
Nothing is sent here, and nobody is waited for.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from schemas.shardgroup import Parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a model is split."""

    group: Any
    """An mx.distributed.Group: the ranks that share it."""
    parallelism: Parallelism = "Tensor"
    layers: tuple[int, ...] = ()
    """How many layers each rank has, in rank order; rank 0 has the last ones. () leaves it to mlx-lm."""


def split(model: Any, how: Split) -> None:
    """Leave in the model what this rank of the group computes.

    Each rank needs all weight files on its disk. To be done before caches are made, and before the weights are read.

    Raises:
        ValueError: the type cannot be split like that, or its sizes cannot be divided by the group's.

    """
    by_layers = getattr(getattr(model, "model", None), "pipeline", None)
    ways = ["Tensor"] * hasattr(model, "shard") + ["Pipeline"] * (by_layers is not None)
    if how.parallelism not in ways:
        instead = f"parallelism {ways[0]} works" if ways else "give it one Mac that has room for it"
        raise ValueError(
            f"model type {getattr(model, 'model_type', '')} cannot be split over {how.group.size()} Macs by "
            f"{how.parallelism} in mlx-lm; {instead}"
        )
    if by_layers is not None and how.parallelism == "Pipeline":
        _pipeline(model, by_layers, how)
        return
    before = dict(_heads(model))
    model.shard(how.group)
    _check_heads(before, dict(_heads(model)), how.group.size())


def _pipeline(model: Any, by_layers: Any, how: Split) -> None:
    count, size = len(model.layers), how.group.size()
    takes_split = "split" in inspect.signature(by_layers).parameters
    if how.layers and (len(how.layers) != size or sum(how.layers) != count):
        raise ValueError(
            f"the split {','.join(map(str, how.layers))} does not give each of {size} ranks its part of {count} layers"
        )
    if how.layers and takes_split:
        by_layers(how.group, split=list(how.layers))
        return
    by_layers(how.group)
    own = len([layer for layer in model.layers if layer is not None])
    if how.layers and own != how.layers[how.group.rank()]:
        raise ValueError(
            f"model type {model.model_type} splits its layers itself in mlx-lm: rank {how.group.rank()} gets "
            f"{own}, not {how.layers[how.group.rank()]}; leave --layers out"
        )


def _heads(model: Any) -> Iterator[tuple[tuple[int, str], int]]:
    """Yield the numbers of heads in each layer's modules, which types of mlx-lm divide without looking."""
    for at, layer in enumerate(model.layers):
        for name, module in layer.named_modules():
            for key, value in vars(module).items():
                if "heads" in key and type(value) is int:
                    yield (at, f"{name}.{key}"), value


def _check_heads(
    before: dict[tuple[int, str], int], after: dict[tuple[int, str], int], size: int
) -> None:
    """Refuse what mlx-lm would load, and fail with at the first token, or not even then."""
    for (at, name), heads in before.items():
        now = after.get((at, name), heads)
        # Some types repeat KV heads of which there are fewer than ranks.
        is_repeated = now == 1 and size % heads == 0
        if now not in (heads, heads / size) and not is_repeated:
            raise ValueError(
                f"{name} of layer {at} is {heads}, which {size} ranks cannot share; choose a number of Macs "
                "that divides it, or parallelism Pipeline where the type has it"
            )
