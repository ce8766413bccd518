"""Rules for models that attend: to everything, to the last tokens, or through a compressed vector. Pure."""

from collections.abc import Callable

from nodeagent.geometry.config import Section
from nodeagent.geometry.layers import Groups, NotUnderstoodError, Rule, attention, need
from schemas.node import LayerGroup


def full(config: Section, _: int) -> Groups:
    """Return layers that all keep the key and the value of every token."""
    (layers,) = need(config, "num_hidden_layers")
    return tuple([attention(config)] * layers)


def by_types(default: Callable[[int], bool], *, window: int = 0) -> Rule:
    """Return the rule for models that name each layer; `default` says which slide if they do not."""

    def rule(config: Section, _: int) -> Groups:
        (layers,) = need(config, "num_hidden_layers")
        types = config.layer_types
        if types is not None and len(types) < layers:
            raise NotUnderstoodError(
                f"config.json has {len(types)} layer_types for {layers} layers"
            )
        slides = [
            default(at) if types is None else types[at] != "full_attention" for at in range(layers)
        ]
        seen = config.sliding_window or window
        if any(slides) and not seen:
            raise NotUnderstoodError("config.json lacks sliding_window")
        return tuple(attention(config, window=seen if sliding else 0) for sliding in slides)

    return rule


def patterned(*, window: int, pattern: int) -> Rule:
    """Return the rule for models whose every n-th layer sees everything; the figures are mlx-lm's defaults."""

    def rule(config: Section, _: int) -> Groups:
        (layers,) = need(config, "num_hidden_layers")
        every = config.sliding_window_pattern or pattern
        seen = config.sliding_window or window
        return tuple(
            attention(config, window=0 if at % every == every - 1 else seen) for at in range(layers)
        )

    return rule


def with_heads(rule: Rule, *, heads: int, kv_heads: int, size: int) -> Rule:
    """Return the rule for configs that leave out what mlx-lm then assumes."""

    def filled(config: Section, element_bytes: int) -> Groups:
        assumed = {
            "num_attention_heads": config.num_attention_heads or heads,
            "num_key_value_heads": config.num_key_value_heads or kv_heads,
            "head_dim": config.head_dim or size,
        }
        return rule(config.model_copy(update=assumed), element_bytes)

    return filled


def gemma4(config: Section, _: int) -> Groups:
    """Return Gemma 4's layers: the last ones share caches, those that see everything have larger heads."""
    layers = config.num_hidden_layers or 35
    every = config.sliding_window_pattern or 5
    types = config.layer_types or tuple(
        "full_attention" if at % every == every - 1 else "sliding_attention" for at in range(layers)
    )
    shared = 20 if config.num_kv_shared_layers is None else config.num_kv_shared_layers
    size = config.head_dim or 256
    wide = 512 if config.global_head_dim is None else config.global_head_dim or size
    heads = config.num_key_value_heads or 1
    far_heads = config.num_global_key_value_heads if config.attention_k_eq_v else None
    near = config.model_copy(update={"num_key_value_heads": heads, "head_dim": size})
    far = config.model_copy(update={"num_key_value_heads": far_heads or heads, "head_dim": wide})
    return tuple(
        attention(far) if kind == "full_attention" else attention(near, window=_window(config))
        for kind in types[: layers - shared]
    )


def gemma3n(config: Section, _: int) -> Groups:
    """Return Gemma 3n's layers: the last ones use the caches of those before."""
    layers, shared = need(config, "num_hidden_layers", "num_kv_shared_layers")
    if config.layer_types is None:
        raise NotUnderstoodError("config.json lacks layer_types")
    return tuple(
        attention(config, window=0 if kind == "full_attention" else _window(config))
        for kind in config.layer_types[: layers - shared]
    )


def _window(config: Section) -> int:
    return config.sliding_window or 512


def latent(config: Section, _: int) -> Groups:
    """Return MLA layers as V3's caches keep them: one compressed vector and one rotated key a token."""
    layers, rank, rope = need(config, "num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")
    return (LayerGroup(kind="Latent", count=layers, latent_dim=rank + rope),)


def indexed(config: Section, _: int) -> Groups:
    """Return V3.2's layers: MLA, and the indexer's keys with as many zeros beside them."""
    layers, rank, rope, index = need(
        config, "num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim"
    )
    return (LayerGroup(kind="Latent", count=layers, latent_dim=rank + rope + 2 * index),)


def unpacked(config: Section, _: int) -> Groups:
    """Return MLA layers as V2's caches keep them: every head's key and value."""
    layers, heads = need(config, "num_hidden_layers", "num_attention_heads")
    nope, rope, value = need(config, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    group = LayerGroup(
        kind="Full", count=layers, kv_heads=heads, head_dim=nope + rope, value_dim=value
    )
    return (group,)
