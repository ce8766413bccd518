"""Rules that size the caches of a model's layers from its config.json, one for each architecture. Pure.

Each row of `RULES` was checked against the caches that mlx-lm 0.32.2 allocates (tests/models/test_cache_rules_mlx.py).
An architecture without a row has no estimate: a cache that is sized wrong ends in a kernel panic (mlx#3186), so the
memory proof then asks for `spec.resources.memory`.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final, TypeAlias

from models.hf_config import ModelConfig, TextConfig
from schemas.node import LayerGroup

LayerGroups: TypeAlias = tuple[LayerGroup, ...]
CacheRule: TypeAlias = Callable[[TextConfig, int], LayerGroups]
"""From a config and the bytes of one cached number to the model's layers, in their order where they differ."""


class NotUnderstoodError(Exception):
    """The config lacks a value, or no rule knows its architecture."""


def require(config: TextConfig, *names: str) -> tuple[int, ...]:
    """Return the numbers in these fields.

    Raises:
        NotUnderstoodError: a field is missing.

    """
    missing = [name for name in names if getattr(config, name) is None]
    if missing:
        raise NotUnderstoodError(f"config.json lacks {', '.join(missing)}")
    return tuple(getattr(config, name) for name in names)


def key_size(config: TextConfig) -> int:
    """Return the number of elements of one head's key."""
    if config.head_dim is not None:
        return config.head_dim
    if config.hidden_size is None or config.num_attention_heads is None:
        raise NotUnderstoodError("config.json lacks head_dim")
    return config.hidden_size // config.num_attention_heads


def kv_head_count(config: TextConfig) -> int:
    """Return the number of key-value heads; without the field every attention head has its own."""
    if config.num_key_value_heads is not None:
        return config.num_key_value_heads
    if config.num_attention_heads is None:
        raise NotUnderstoodError("config.json lacks num_key_value_heads")
    return config.num_attention_heads


def attention_layer(config: TextConfig, *, window: int = 0) -> LayerGroup:
    """Return one layer that keeps keys and values of all tokens, or of the last `window`."""
    size = key_size(config)
    return LayerGroup(
        kind="Sliding" if window else "Full",
        count=1,
        kv_heads=kv_head_count(config),
        head_dim=size,
        value_dim=size,
        window=window,
    )


def state_layer(conv: int, recurrent: int, element_bytes: int) -> LayerGroup:
    """Return one layer of fixed size: the inputs of a convolution, and a recurrent state (numbers of elements)."""
    # The recurrent state is float32 whatever the weights are (mlx_lm/models/gated_delta.py, ssm.py).
    return LayerGroup(kind="State", count=1, state_bytes=conv * element_bytes + recurrent * 4)


def group_layers(layers: LayerGroups) -> LayerGroups:
    """Return equal layers as one group, in a fixed order, so that equal models report the same."""
    counts: Counter[LayerGroup] = Counter()
    for layer in layers:
        counts[layer.model_copy(update={"count": 1})] += layer.count
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0].kind, pair[0].window))
    return tuple(layer.model_copy(update={"count": count}) for layer, count in ordered)


def ignoring_head_dim(rule: CacheRule) -> CacheRule:
    """Return the rule for models that divide hidden_size by the heads and ignore the config's head_dim."""

    def without(config: TextConfig, element_bytes: int) -> LayerGroups:
        return rule(config.model_copy(update={"head_dim": None}), element_bytes)

    return without


def full_attention(config: TextConfig, _: int) -> LayerGroups:
    """Return layers that keep the key and the value of every token."""
    (layers,) = require(config, "num_hidden_layers")
    return tuple([attention_layer(config)] * layers)


def sliding_by_layer_types(default: Callable[[int], bool], *, window: int = 0) -> CacheRule:
    """Return the rule for models that list `layer_types`; without it `default` says which layers slide."""

    def rule(config: TextConfig, _: int) -> LayerGroups:
        (layers,) = require(config, "num_hidden_layers")
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
        return tuple(attention_layer(config, window=seen if sliding else 0) for sliding in slides)

    return rule


def sliding_by_pattern(*, window: int, pattern: int) -> CacheRule:
    """Return the rule for models whose every n-th layer sees all tokens; the arguments are mlx-lm's defaults."""

    def rule(config: TextConfig, _: int) -> LayerGroups:
        (layers,) = require(config, "num_hidden_layers")
        every = config.sliding_window_pattern or pattern
        seen = config.sliding_window or window
        return tuple(
            attention_layer(config, window=0 if at % every == every - 1 else seen)
            for at in range(layers)
        )

    return rule


def with_default_heads(rule: CacheRule, *, heads: int, kv_heads: int, size: int) -> CacheRule:
    """Return the rule for configs without these fields; the arguments are mlx-lm's defaults."""

    def filled(config: TextConfig, element_bytes: int) -> LayerGroups:
        assumed = {
            "num_attention_heads": config.num_attention_heads or heads,
            "num_key_value_heads": config.num_key_value_heads or kv_heads,
            "head_dim": config.head_dim or size,
        }
        return rule(config.model_copy(update=assumed), element_bytes)

    return filled


def gemma4(config: TextConfig, _: int) -> LayerGroups:
    """Return Gemma 4's layers: the last ones share caches, and those that see all tokens have larger heads."""
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
        attention_layer(far)
        if kind == "full_attention"
        else attention_layer(near, window=_gemma_window(config))
        for kind in types[: layers - shared]
    )


def gemma3n(config: TextConfig, _: int) -> LayerGroups:
    """Return Gemma 3n's layers: the last ones use the caches of those before."""
    layers, shared = require(config, "num_hidden_layers", "num_kv_shared_layers")
    if config.layer_types is None:
        raise NotUnderstoodError("config.json lacks layer_types")
    return tuple(
        attention_layer(config, window=0 if kind == "full_attention" else _gemma_window(config))
        for kind in config.layer_types[: layers - shared]
    )


def _gemma_window(config: TextConfig) -> int:
    return config.sliding_window or 512


def latent_attention(config: TextConfig, _: int) -> LayerGroups:
    """Return MLA layers as DeepSeek V3's caches keep them: one compressed vector and one rotated key per token."""
    layers, rank, rope = require(config, "num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")
    return (LayerGroup(kind="Latent", count=layers, latent_dim=rank + rope),)


def indexed_latent_attention(config: TextConfig, _: int) -> LayerGroups:
    """Return DeepSeek V3.2's layers: MLA, and the indexer's keys padded to twice their size."""
    layers, rank, rope, index = require(
        config, "num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim"
    )
    return (LayerGroup(kind="Latent", count=layers, latent_dim=rank + rope + 2 * index),)


def unpacked_latent_attention(config: TextConfig, _: int) -> LayerGroups:
    """Return MLA layers as DeepSeek V2's caches keep them: every head's key and value."""
    layers, heads = require(config, "num_hidden_layers", "num_attention_heads")
    nope, rope, value = require(config, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    group = LayerGroup(
        kind="Full", count=layers, kv_heads=heads, head_dim=nope + rope, value_dim=value
    )
    return (group,)


def gated_delta(config: TextConfig, element_bytes: int) -> LayerGroups:
    """Return Qwen3-Next's layers: three of each four keep a state."""
    (layers,) = require(config, "num_hidden_layers")
    values, keys, key_dim, value_dim, kernel = require(
        config,
        "linear_num_value_heads",
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    conv = (kernel - 1) * (2 * keys * key_dim + values * value_dim)
    linear = state_layer(conv, values * value_dim * key_dim, element_bytes)
    every = config.full_attention_interval or 4
    return tuple(linear if (at + 1) % every else attention_layer(config) for at in range(layers))


def kimi_linear(config: TextConfig, element_bytes: int) -> LayerGroups:
    """Return Kimi Linear's layers: most keep a state and the inputs of three convolutions, the others MLA's vectors."""
    layers, rank, rope = require(config, "num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")
    linear = config.linear_attn_config
    if linear is None or not linear.num_heads or not linear.head_dim or linear.kda_layers is None:
        raise NotUnderstoodError("config.json lacks linear_attn_config")
    wide = linear.num_heads * linear.head_dim
    kernel = linear.short_conv_kernel_size or 4
    state = state_layer(3 * (kernel - 1) * wide, wide * linear.head_dim, element_bytes)
    latent = LayerGroup(kind="Latent", count=1, latent_dim=rank + rope)
    states = set(linear.kda_layers)
    return tuple(state if at + 1 in states else latent for at in range(layers))


def mamba(config: TextConfig, element_bytes: int) -> LayerGroups:
    """Return Mamba's layers."""
    layers, wide, size, kernel = require(
        config, "num_hidden_layers", "intermediate_size", "state_size", "conv_kernel"
    )
    return tuple([state_layer((kernel - 1) * wide, wide * size, element_bytes)] * layers)


def mamba2(config: TextConfig, element_bytes: int) -> LayerGroups:
    """Return Mamba 2's layers."""
    layers, heads, groups, kernel = require(
        config, "num_hidden_layers", "num_heads", "n_groups", "conv_kernel"
    )
    size = config.ssm_state_size or require(config, "state_size")[0]
    layer = _mamba2_layer(heads, key_size(config), (size, groups, kernel), element_bytes)
    return tuple([layer] * layers)


def nemotron_h(config: TextConfig, element_bytes: int) -> LayerGroups:
    """Return Nemotron-H's layers: M keeps a state, * attends, other blocks keep nothing."""
    names = {"mamba": "M", "attention": "*"}
    listed = config.layers_block_type or config.layer_types
    pattern = config.hybrid_override_pattern
    if pattern is None and listed is None:
        raise NotUnderstoodError("config.json lacks hybrid_override_pattern")
    blocks = pattern if pattern is not None else [names.get(one, "-") for one in listed or ()]
    heads, dim, size, groups, kernel = require(
        config, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"
    )
    kinds = {
        "M": _mamba2_layer(heads, dim, (size, groups, kernel), element_bytes),
        "*": attention_layer(config),
    }
    return tuple(kinds[block] for block in blocks if block in kinds)


def granite_hybrid(config: TextConfig, element_bytes: int) -> LayerGroups:
    """Return Granite 4's layers."""
    if config.layer_types is None:
        raise NotUnderstoodError("config.json lacks layer_types")
    kinds = {"attention": attention_layer(config)}
    if "mamba" in config.layer_types:
        heads, dim, size, groups, kernel = require(
            config,
            "mamba_n_heads",
            "mamba_d_head",
            "mamba_d_state",
            "mamba_n_groups",
            "mamba_d_conv",
        )
        kinds["mamba"] = _mamba2_layer(heads, dim, (size, groups, kernel), element_bytes)
    return tuple(kinds[kind] for kind in config.layer_types if kind in kinds)


def falcon_h1(config: TextConfig, element_bytes: int) -> LayerGroups:
    """Return Falcon-H1's layers: each one attends and keeps a state."""
    (layers,) = require(config, "num_hidden_layers")
    heads, dim, size, groups, kernel = require(
        config, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"
    )
    mixer = _mamba2_layer(heads, dim, (size, groups, kernel), element_bytes)
    return tuple([attention_layer(config), mixer] * layers)


def jamba(config: TextConfig, element_bytes: int) -> LayerGroups:
    """Return Jamba's layers: one in each period attends."""
    layers, hidden = require(config, "num_hidden_layers", "hidden_size")
    expand, size, kernel = require(config, "mamba_expand", "mamba_d_state", "mamba_d_conv")
    kinds = config.layers_block_type
    if kinds is None:
        period, offset = require(config, "attn_layer_period", "attn_layer_offset")
        kinds = tuple(
            "attention" if at % max(1, period) == offset else "mamba" for at in range(layers)
        )
    wide = expand * hidden
    mixer = state_layer((kernel - 1) * wide, wide * size, element_bytes)
    return tuple(attention_layer(config) if kind == "attention" else mixer for kind in kinds)


def lfm2(config: TextConfig, element_bytes: int) -> LayerGroups:
    """Return LFM2's layers: most keep only the inputs of a short convolution."""
    layers, hidden, kernel = require(config, "num_hidden_layers", "hidden_size", "conv_L_cache")
    if config.full_attn_idxs is not None:
        attends = set(config.full_attn_idxs)
    elif config.layer_types is not None:
        attends = {at for at, kind in enumerate(config.layer_types) if kind == "full_attention"}
    else:
        raise NotUnderstoodError("config.json lacks layer_types")
    short = state_layer((kernel - 1) * hidden, 0, element_bytes)
    return tuple(attention_layer(config) if at in attends else short for at in range(layers))


def _mamba2_layer(
    heads: int, dim: int, shape: tuple[int, int, int], element_bytes: int
) -> LayerGroup:
    """Return one Mamba 2 layer; `shape` is (size of the state, groups, kernel)."""
    size, groups, kernel = shape
    conv = (kernel - 1) * (heads * dim + 2 * groups * size)
    return state_layer(conv, heads * dim * size, element_bytes)


# mlx_lm.utils.MODEL_REMAPPING: other names for the same module.
ALIASES: Final = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma4_unified": "gemma4",
    "deepseek_v41_text": "deepseek_v41",
}

# Models whose layers all keep the key and the value of every token.
_FULL_ATTENTION: Final = (
    "dots1", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2", "glm", "glm4", "glm4_moe", "hunyuan_v1_dense",
    "minimax", "nemotron", "olmo2", "olmoe", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "seed_oss",
    "smollm3", "solar_open", "telechat3",
)  # fmt: skip
# The same; mlx-lm divides hidden_size by the heads and ignores head_dim.
_FULL_ATTENTION_DIVIDED: Final = (
    "Klear", "apertus", "bailing_moe", "cohere", "deepseek", "gpt_neox", "granite", "granitemoe", "helium",
    "internlm2", "internlm3", "mimo", "minicpm", "mixtral", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe",
    "qwen2_vl", "stablelm", "starcoder2",
)  # fmt: skip

RULES: Final[dict[str, CacheRule]] = {
    **dict.fromkeys(_FULL_ATTENTION, full_attention),
    **dict.fromkeys(_FULL_ATTENTION_DIVIDED, ignoring_head_dim(full_attention)),
    "llama": sliding_by_layer_types(lambda _: False),
    "ministral3": sliding_by_layer_types(lambda _: False),
    "gpt_oss": sliding_by_layer_types(lambda at: at % 2 == 0, window=128),
    "olmo3": sliding_by_layer_types(lambda at: (at + 1) % 4 != 0),
    "cohere2": sliding_by_pattern(window=4096, pattern=4),
    "gemma3_text": with_default_heads(
        sliding_by_pattern(window=512, pattern=6), heads=4, kv_heads=1, size=256
    ),
    "gemma3": with_default_heads(
        sliding_by_pattern(window=512, pattern=6), heads=8, kv_heads=4, size=256
    ),
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "gemma4_text": gemma4,
    "deepseek_v2": unpacked_latent_attention,
    "youtu_llm": unpacked_latent_attention,
    "deepseek_v3": latent_attention,
    "glm4_moe_lite": latent_attention,
    "kimi_k25": latent_attention,
    "kimi_vl": latent_attention,
    "mistral4": latent_attention,
    "deepseek_v32": indexed_latent_attention,
    "glm_moe_dsa": indexed_latent_attention,
    "qwen3_next": gated_delta,
    "qwen3_5": gated_delta,
    "qwen3_5_moe": gated_delta,
    "kimi_linear": kimi_linear,
    "mamba": mamba,
    "mamba2": mamba2,
    "nemotron_h": nemotron_h,
    "granitemoehybrid": ignoring_head_dim(granite_hybrid),
    "falcon_h1": falcon_h1,
    "jamba": ignoring_head_dim(jamba),
    "lfm2": ignoring_head_dim(lfm2),
    "lfm2_moe": ignoring_head_dim(lfm2),
}


def mlx_module(config: ModelConfig) -> str:
    """Return the name of the mlx-lm module that builds the model."""
    alias = ALIASES.get(config.model_type, config.model_type)
    if alias == "mistral3":  # a wrapper of one of three language models
        inner = config.text_config.model_type
        return inner if inner in ("ministral3", "mistral4") else "llama"
    # Of a wrapper that mlx-lm lacks (engine/vision/glm_language.py).
    return {"glm4v": "glm4", "glm4v_moe": "glm4_moe"}.get(alias, alias)


def layer_groups(module: str, config: TextConfig, *, element_bytes: int) -> LayerGroups:
    """Return the model's layers in groups of equal caches.

    Raises:
        NotUnderstoodError: no rule knows the architecture, or the config lacks a value.

    """
    rule = RULES.get(module)
    if rule is None:
        raise NotUnderstoodError(f"no rule says how large the cache of a {module} model is")
    return group_layers(rule(config, element_bytes))


def layer_order(module: str, config: TextConfig, *, element_bytes: int) -> tuple[int, ...]:
    """Return the index in `layer_groups` of each layer; () if the rule does not list layers one by one.

    Raises:
        NotUnderstoodError: as in layer_groups.

    """
    groups = layer_groups(module, config, element_bytes=element_bytes)
    one_each = [group.model_copy(update={"count": 1}) for group in groups]
    listed = [
        layer for group in RULES[module](config, element_bytes) for layer in [group] * group.count
    ]
    order = tuple(one_each.index(layer.model_copy(update={"count": 1})) for layer in listed)
    # Layers that keep nothing, or two caches, do not match the config's count.
    return order if len(order) == config.num_hidden_layers else ()
