"""Rules for models some of whose layers keep a state of fixed size: linear attention, Mamba, convolutions. Pure."""

from nodeagent.geometry.config import Section
from nodeagent.geometry.layers import (
    Groups,
    NotUnderstoodError,
    attention,
    head_dim,
    need,
    state,
)
from schemas.node import LayerGroup


def delta(config: Section, element_bytes: int) -> Groups:
    """Return Qwen3-Next's layers: of each four, three keep a state."""
    (layers,) = need(config, "num_hidden_layers")
    values, keys, key_dim, value_dim, kernel = need(
        config,
        "linear_num_value_heads",
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    conv = (kernel - 1) * (2 * keys * key_dim + values * value_dim)
    linear = state(conv, values * value_dim * key_dim, element_bytes)
    every = config.full_attention_interval or 4
    return tuple(linear if (at + 1) % every else attention(config) for at in range(layers))


def mamba(config: Section, element_bytes: int) -> Groups:
    """Return Mamba's layers."""
    layers, wide, size, kernel = need(
        config, "num_hidden_layers", "intermediate_size", "state_size", "conv_kernel"
    )
    return tuple([state((kernel - 1) * wide, wide * size, element_bytes)] * layers)


def mamba2(config: Section, element_bytes: int) -> Groups:
    """Return Mamba 2's layers."""
    layers, heads, groups, kernel = need(
        config, "num_hidden_layers", "num_heads", "n_groups", "conv_kernel"
    )
    size = config.ssm_state_size or need(config, "state_size")[0]
    layer = _mixer(heads, head_dim(config), (size, groups, kernel), element_bytes)
    return tuple([layer] * layers)


def nemotron_h(config: Section, element_bytes: int) -> Groups:
    """Return Nemotron-H's layers: M keeps a state, * attends, the others keep nothing."""
    names = {"mamba": "M", "attention": "*"}
    listed = config.layers_block_type or config.layer_types
    pattern = config.hybrid_override_pattern
    if pattern is None and listed is None:
        raise NotUnderstoodError("config.json lacks hybrid_override_pattern")
    blocks = pattern if pattern is not None else [names.get(one, "-") for one in listed or ()]
    heads, dim, size, groups, kernel = need(
        config, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"
    )
    kinds = {
        "M": _mixer(heads, dim, (size, groups, kernel), element_bytes),
        "*": attention(config),
    }
    return tuple(kinds[block] for block in blocks if block in kinds)


def granite_hybrid(config: Section, element_bytes: int) -> Groups:
    """Return Granite 4's layers."""
    if config.layer_types is None:
        raise NotUnderstoodError("config.json lacks layer_types")
    kinds = {"attention": attention(config)}
    if "mamba" in config.layer_types:
        heads, dim, size, groups, kernel = need(
            config,
            "mamba_n_heads",
            "mamba_d_head",
            "mamba_d_state",
            "mamba_n_groups",
            "mamba_d_conv",
        )
        kinds["mamba"] = _mixer(heads, dim, (size, groups, kernel), element_bytes)
    return tuple(kinds[kind] for kind in config.layer_types if kind in kinds)


def falcon_h1(config: Section, element_bytes: int) -> Groups:
    """Return Falcon-H1's layers: each attends and keeps a state."""
    (layers,) = need(config, "num_hidden_layers")
    heads, dim, size, groups, kernel = need(
        config, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"
    )
    mixer = _mixer(heads, dim, (size, groups, kernel), element_bytes)
    return tuple([attention(config), mixer] * layers)


def jamba(config: Section, element_bytes: int) -> Groups:
    """Return Jamba's layers: one in a period attends."""
    layers, hidden = need(config, "num_hidden_layers", "hidden_size")
    expand, size, kernel = need(config, "mamba_expand", "mamba_d_state", "mamba_d_conv")
    kinds = config.layers_block_type
    if kinds is None:
        period, offset = need(config, "attn_layer_period", "attn_layer_offset")
        kinds = tuple(
            "attention" if at % max(1, period) == offset else "mamba" for at in range(layers)
        )
    wide = expand * hidden
    mixer = state((kernel - 1) * wide, wide * size, element_bytes)
    return tuple(attention(config) if kind == "attention" else mixer for kind in kinds)


def lfm2(config: Section, element_bytes: int) -> Groups:
    """Return LFM2's layers: most remember the inputs of a short convolution only."""
    layers, hidden, kernel = need(config, "num_hidden_layers", "hidden_size", "conv_L_cache")
    if config.full_attn_idxs is not None:
        attends = set(config.full_attn_idxs)
    elif config.layer_types is not None:
        attends = {at for at, kind in enumerate(config.layer_types) if kind == "full_attention"}
    else:
        raise NotUnderstoodError("config.json lacks layer_types")
    short = state((kernel - 1) * hidden, 0, element_bytes)
    return tuple(attention(config) if at in attends else short for at in range(layers))


def _mixer(heads: int, dim: int, shape: tuple[int, int, int], element_bytes: int) -> LayerGroup:
    """Return one Mamba 2 layer; `shape` is the size of the state, the groups, the kernel."""
    size, groups, kernel = shape
    conv = (kernel - 1) * (heads * dim + 2 * groups * size)
    return state(conv, heads * dim * size, element_bytes)
