"""The weight files that one rank of a Pipeline needs: those with its layers, and those with tensors outside of layers. Pure.

A tensor whose name does not say its layer belongs to all ranks, so an unknown way of naming costs bytes, not answers.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

# Decoder layers only: the layers of a vision tower have other parents, and every rank keeps what is not known.
_LAYER: Final = re.compile(r"(?:(?:model|language_model|text_model|transformer)\.)*layers\.(\d+)\.")
_MAX_DIGITS: Final = 6


def layer_of(tensor: str) -> int | None:
    """Return the number of the decoder layer that a tensor belongs to; None for one outside of layers."""
    found = _LAYER.match(tensor)
    return int(found[1]) if found is not None and len(found[1]) <= _MAX_DIGITS else None


def layer_spans(layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the first layer of each rank, and the one after its last; rank 0 has the last layers of the model."""
    first = [sum(layers[rank + 1 :]) for rank in range(len(layers))]
    return tuple((start, start + count) for start, count in zip(first, layers, strict=True))


def rank_files(weight_map: Mapping[str, str], layers: Sequence[int], rank: int) -> frozenset[str]:
    """Return the weight files that a rank reads; all of them if the names do not show every layer.

    Args:
        weight_map: the file of each tensor.
        layers: the number of layers of each rank, in rank order.
        rank: the rank.

    """
    start, stop = layer_spans(layers)[rank]
    total = sum(layers)
    numbers = {name: layer_of(name) for name in weight_map}
    if not set(range(total)) <= set(numbers.values()):
        return frozenset(weight_map.values())
    # Layers beyond the last one are for the prediction of several tokens; mlx-lm drops them.
    foreign = {*range(start), *range(stop, total)}
    beyond = {number for number in numbers.values() if number is not None and number >= total}
    return frozenset(
        file for name, file in weight_map.items() if numbers[name] not in foreign | beyond
    )
