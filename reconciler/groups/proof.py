"""The memory proof of one rank of a group: a share of every layer, or whole layers. Pure.

One Mac alone is proven in reconciler/placement/proof.py, whose formulas these are. What shares and layers weigh was
found out by mlx-lm itself on a Mac that has the model (nodeagent/geometry/splitting.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from reconciler.groups.split import split
from reconciler.placement import cache
from reconciler.placement import proof as whole
from reconciler.placement.proof import NO_EXTRAS, Extras
from schemas.node import ModelGeometry
from schemas.replica import MemoryProof


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the engine is asked to hold, as for one Mac (reconciler/placement/sources.py)."""

    context_length: int
    concurrency: int
    extras: Extras = NO_EXTRAS
    override_bytes: int = 0
    """What spec.resources.memory says one rank takes; 0 if it says nothing."""


def prove_rank(
    geometry: ModelGeometry, load: Load, *, size: int, layers: tuple[int, int] | None
) -> MemoryProof:
    """Return what one of `size` ranks needs.

    `layers` are the first layer of a Pipeline's rank and the one after its last; None for a Tensor share, which is
    the same for every rank.
    """
    proven = whole.prove(
        geometry,
        context_length=load.context_length,
        concurrency=load.concurrency,
        ranks=size if layers is None else 1,
        override_bytes=load.override_bytes,
        extras=load.extras,
    )
    if layers is None:
        return proven.model_copy(update={"weights_bytes": _share(geometry, size, proven)})
    weights, found = layer_weights(geometry), geometry.splitting
    if found is None or not weights:
        return proven  # nobody weighed the layers: no rank holds more than the whole
    rest = found.rest_bytes
    start, stop = layers
    held = {
        "weights_bytes": rest + sum(weights[start:stop]),
        "kv_cache_bytes": sum(_layer_caches(geometry, load)[start:stop]),
    }
    return proven.model_copy(update=held)


def deal_layers(
    geometry: ModelGeometry, load: Load, room_bytes: Sequence[int], speeds: Sequence[float]
) -> tuple[int, ...] | None:
    """Return how many layers each rank of a Pipeline gets, in rank order, so that each one's proof fits its room.

    `speeds` are the Macs' memory bandwidths. None: there is no such way.
    """
    if load.override_bytes:
        # What a person said holds for every rank, whatever its layers.
        fits = all(load.override_bytes <= room for room in room_bytes)
        boundless = [sum(layer_weights(geometry))] * len(room_bytes)
        return split(layer_weights(geometry), 0, boundless, speeds) if fits else None
    per_layer = [
        weights + kept
        for weights, kept in zip(
            layer_weights(geometry), _layer_caches(geometry, load), strict=True
        )
    ]
    nothing = prove_rank(geometry, load, size=len(room_bytes), layers=(0, 0))
    return split(per_layer, nothing.total_bytes, room_bytes, speeds)


def layer_weights(geometry: ModelGeometry) -> tuple[int, ...]:
    """Return the bytes of each layer's weights, the first one first."""
    return geometry.splitting.layer_bytes if geometry.splitting is not None else ()


def _share(geometry: ModelGeometry, size: int, proven: MemoryProof) -> int:
    """Return the weights of one Tensor share: what mlx-lm made of it, else what the headers' names let expect."""
    found = geometry.splitting
    if found is None or size not in found.tensor or len(found.tensor_bytes) != len(found.tensor):
        return proven.weights_bytes
    return found.tensor_bytes[found.tensor.index(size)]


def _layer_caches(geometry: ModelGeometry, load: Load) -> list[int]:
    """Return what each layer's cache holds: where nobody knows which layer is of which kind, the most of any."""
    use = whole.use_of(load.context_length, load.concurrency, ranks=1, extras=load.extras)
    sizes = [cache.layer_bytes(group, geometry, use) for group in cache.groups_of(geometry)]
    found = geometry.splitting
    layers = layer_weights(geometry)
    if found is not None and len(found.layer_groups) == len(layers):
        return [sizes[group] for group in found.layer_groups]
    return [max(sizes, default=0)] * len(layers)
