"""The bricks of every rule: numbers that must be there, one attention layer, equal layers counted. Pure."""

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from nodeagent.geometry.config import Section
from schemas.node import LayerGroup

Groups: TypeAlias = tuple[LayerGroup, ...]
# From a config, and the bytes of one number in the cache, to the layers of the model: in their order, where they differ.
Rule: TypeAlias = Callable[[Section, int], Groups]


class NotUnderstoodError(Exception):
    """The config does not say enough, or its architecture is new to us."""


def need(config: Section, *names: str) -> tuple[int, ...]:
    """Return the numbers of those names.

    Raises:
        NotUnderstoodError: the config does not have them all.

    """
    lacking = [name for name in names if getattr(config, name) is None]
    if lacking:
        raise NotUnderstoodError(f"config.json lacks {', '.join(lacking)}")
    return tuple(getattr(config, name) for name in names)


def head_dim(config: Section) -> int:
    """Return how many numbers one head's key has."""
    if config.head_dim is not None:
        return config.head_dim
    if config.hidden_size is None or config.num_attention_heads is None:
        raise NotUnderstoodError("config.json lacks head_dim")
    return config.hidden_size // config.num_attention_heads


def kv_heads(config: Section) -> int:
    """Return how many heads keep keys and values; models that do not say so share none."""
    if config.num_key_value_heads is not None:
        return config.num_key_value_heads
    if config.num_attention_heads is None:
        raise NotUnderstoodError("config.json lacks num_key_value_heads")
    return config.num_attention_heads


def attention(config: Section, *, window: int = 0) -> LayerGroup:
    """Return one layer that keeps keys and values: of all tokens, or of the last `window`."""
    size = head_dim(config)
    return LayerGroup(
        kind="Sliding" if window else "Full",
        count=1,
        kv_heads=kv_heads(config),
        head_dim=size,
        value_dim=size,
        window=window,
    )


def state(conv: int, recurrent: int, element_bytes: int) -> LayerGroup:
    """Return one layer whose memory does not grow: the inputs of a convolution, and what recurs."""
    # What recurs is kept in float32 whatever the weights are (mlx_lm/models/gated_delta.py, ssm.py).
    return LayerGroup(kind="State", count=1, state_bytes=conv * element_bytes + recurrent * 4)


def counted(layers: Groups) -> Groups:
    """Return equal layers as one group, in an order of their own, so that equal models report alike."""
    counts: Counter[LayerGroup] = Counter()
    for layer in layers:
        counts[layer.model_copy(update={"count": 1})] += layer.count
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0].kind, pair[0].window))
    return tuple(layer.model_copy(update={"count": count}) for layer, count in ordered)


def divided(rule: Rule) -> Rule:
    """Return the rule for models whose heads share hidden_size, whatever the config says of them."""

    def without(config: Section, element_bytes: int) -> Groups:
        return rule(config.model_copy(update={"head_dim": None}), element_bytes)

    return without
