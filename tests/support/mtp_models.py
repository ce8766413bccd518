"""Tiny checkpoints with a multi-token prediction (MTP) head, as their authors publish them. Imports mlx.

    python -m tests.support.mtp_models OUT [--arch mimo] [--layers 2] [--hidden 64] [--influence 0.1] [--period 0] [--wrong]

All weights are random. The next token is mostly a function of the last one, so that a head can guess it: the embeddings
decide about it, and the layers change it by their `influence`. The head is made to know this function, and no more;
with `is_wrong` it knows nothing. With a `period` a text repeats itself after so many tokens, but for that influence.
The arch `llama` has sliding windows, and no head.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.support import tiny_model
from tests.support.model_geometries import build

MtpArch: TypeAlias = Literal[
    "mimo",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "llama",
]
ARCHS: tuple[MtpArch, ...] = get_args(MtpArch)
QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_moe")

_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}
_LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_LATENT_ARCHS = ("glm4_moe_lite", "deepseek_v3")
# Every second layer attends, and the head's does: the number of layers is odd.
_DELTA = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 64,
}
# What writes into the stream between layers.
_WRITERS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def make(
    out: Path,
    *,
    arch: MtpArch = "mimo",
    layers: int = 2,
    hidden: int = 64,
    influence: float = 0.1,
    seed: int = 0,
    period: int = 0,
    has_head: bool = True,
    is_wrong: bool = False,
) -> Path:
    """Write a model directory; without a head its config still promises one, as those of many converters do."""
    tiny_model.make(out, arch="qwen2", hidden=hidden, layers=layers)
    config = _config(json.loads((out / "config.json").read_text()), arch, layers)
    has_head = has_head and arch != "llama"
    # The head's layer is one more of the same kind.
    larger = json.loads(json.dumps(config))
    larger.get("text_config", larger)["num_hidden_layers"] = layers + 1
    larger.get("layer_types", []).append("full_attention")
    leaves: list[tuple[str, Any]] = cast("Any", tree_flatten(build(larger).parameters()))
    shapes = {name.removeprefix("language_model."): array.shape for name, array in leaves}
    weights = _random(shapes, seed, influence)
    _teach(weights, seed, period)
    head = f"model.layers.{layers}."
    own = {n: weights.pop(n) for n in list(weights) if n.startswith(head)}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    (out / "model.safetensors.index.json").unlink()
    if has_head:
        own |= _head(head, -mx.eye(hidden) if is_wrong else mx.eye(hidden), arch)
        if arch == "mimo":
            own = {name.replace(head, "model.mtp_layers.0."): one for name, one in own.items()}
        if arch in QWEN:
            own = {name.replace(head, "mtp.layers.0."): one for name, one in own.items()}
        published = _as_published(own, arch)
        mx.save_safetensors(str(out / "model-mtp.safetensors"), published)
    return out


def _config(base: dict[str, Any], arch: MtpArch, layers: int) -> dict[str, Any]:
    wide = base["hidden_size"]
    config = base | {"model_type": arch, "num_nextn_predict_layers": 1}
    if arch == "llama":
        kinds = [*["sliding_attention"] * 3, "full_attention"] * (1 + layers // 4)
        return config | {"layer_types": kinds[:layers], "sliding_window": 128}
    if arch in QWEN:
        experts = 0 if arch == "qwen3_5" else 4
        config |= {**_DELTA, "num_experts": experts, "moe_intermediate_size": wide}
        config |= {"linear_num_value_heads": wide // 16, "linear_num_key_heads": wide // 32}
        return config if arch == "qwen3_next" else _wrapped(config, arch)
    if arch != "mimo":
        config |= {**_EXPERTS, "moe_intermediate_size": wide, "topk_method": "noaux_tc"}
        config |= {"use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_scaling": None}
        config |= {"attention_bias": False, "norm_topk_prob": True}
    if arch in _LATENT_ARCHS:
        config |= {**_LATENT, "partial_rotary_factor": 1.0}
    return config


def _wrapped(text: dict[str, Any], arch: MtpArch) -> dict[str, Any]:
    """Return the config of a model that may also see, around that of its language model."""
    return {"model_type": arch, "vocab_size": text["vocab_size"], "text_config": text}


def _random(shapes: dict[str, Any], seed: int, influence: float) -> dict[str, Any]:
    key, weights = mx.random.key(seed), {}
    for name, shape in sorted(shapes.items()):
        key, own = mx.random.split(key)
        if len(shape) == 1:
            weights[name] = mx.zeros(shape) if "bias" in name else mx.ones(shape)
            continue
        scale = 1.0 if "embed_tokens" in name else 2.0 / math.sqrt(shape[-1])
        scale *= influence if name.endswith(_WRITERS) else 1.0
        weights[name] = mx.random.normal(shape, key=own) * scale
    return weights


def _teach(weights: dict[str, Any], seed: int, period: int) -> None:
    """Make each token's successor the one that the output head finds most like the token's embedding."""
    embeddings = weights["model.embed_tokens.weight"]
    order = mx.random.permutation(embeddings.shape[0], key=mx.random.key(seed + 1))
    if period:
        places = mx.arange(embeddings.shape[0])
        order = places - places % period + (places + period - 1) % period
        order = mx.minimum(order, embeddings.shape[0] - 1)
    head = embeddings[order]
    head[2] = (
        0.0  # the end token is never the likeliest, so that greedy texts last as long as wanted
    )
    weights["lm_head.weight"] = head


def _head(prefix: str, token: Any, arch: MtpArch) -> dict[str, Any]:
    """Return the tensors that only a head has: it passes on `token` times the token, and a little of the hidden state."""
    width = token.shape[0]
    state = 0.05 * mx.eye(width)
    if arch == "mimo":
        names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        halves = [state, token]
    elif arch in QWEN:
        prefix = "mtp."
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        halves = [token, state]
    else:
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        halves = [token, state]
    one, other, projection, last = (f"{prefix}{name}.weight" for name in names)
    ones = mx.ones((width,))
    return {one: ones, other: ones, projection: mx.concatenate(halves, axis=1), last: ones}


def _as_published(head: dict[str, Any], arch: MtpArch) -> dict[str, Any]:
    """Return the head's tensors with the names of the authors' checkpoints: each expert, and one latent projection."""
    published: dict[str, Any] = {}
    for name, array in head.items():
        stem, dot, rest = name.partition(".switch_mlp.")
        if dot:
            published |= {f"{stem}.experts.{at}.{rest}": one for at, one in enumerate(array)}
        else:
            published[name] = array
    if arch in _LATENT_ARCHS:
        (place,) = {name.partition("embed_q")[0] for name in published if "embed_q" in name}
        keys = published.pop(f"{place}embed_q.weight").swapaxes(-1, -2)
        values = published.pop(f"{place}unembed_out.weight")
        joined = mx.concatenate([keys, values], axis=1)
        published[f"{place}kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
    if arch in QWEN:
        # Norms are published as differences from 1.
        return {name: one - 1 if one.ndim == 1 else one for name, one in published.items()}
    if arch != "mimo":
        # Published heads have copies of both ends of the model.
        norm = next(name for name in published if name.endswith(".enorm.weight"))
        place, width = norm.removesuffix(".enorm.weight"), published[norm].shape[0]
        published[f"{place}.embed_tokens.weight"] = mx.zeros((8, width))
        published[f"{place}.shared_head.head.weight"] = mx.zeros((8, width))
    return published


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a model directory as told on the command line."""
    parser = argparse.ArgumentParser(description="Make a tiny model with an MTP head.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", default="mimo", choices=ARCHS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--period", type=int, default=0)
    parser.add_argument("--influence", type=float, default=0.1)
    parser.add_argument("--wrong", dest="is_wrong", action="store_true")
    flags = vars(parser.parse_args(arguments))
    print(make(flags.pop("out"), **flags))


if __name__ == "__main__":
    main()
